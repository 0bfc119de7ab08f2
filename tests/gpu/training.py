"""A training of one rank on one GPU with NCCL, to be recorded: training.py MODE STEPS

MODE: plain; streams: half of the work on a second stream; bursts: many small kernels; graph: the
forward is captured in step 5 and replayed; late_graph: in step 200; history: the training records
its own memory history.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist

CAPTURED_IN = {"graph": 5, "late_graph": 200}


def build_model() -> torch.nn.Module:
    """Eight layers in bf16, large enough that a GPU needs milliseconds for a step."""
    layers = [torch.nn.Linear(4096, 4096, bias=False) for _ in range(8)]
    return torch.nn.Sequential(*layers).cuda().bfloat16()


class Training:
    """One training; prints the synchronized times of its steps at the end."""

    def __init__(self, mode: str):
        self.mode = mode
        self.model = build_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        self.side = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None

    def run_step(self, step: int) -> None:
        """Forward, backward, gradient reduction, optimizer."""
        if self.mode == "bursts":
            for _ in range(20_000):
                self.batch[:1].add_(0)
        if step >= CAPTURED_IN.get(self.mode, step + 1):
            self.replay()
        with torch.autograd.profiler.record_function("forward"):
            loss = self.model(self.batch).float().square().mean()
        loss.backward()
        if self.mode == "streams":
            self.work_aside()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def replay(self) -> None:
        """Eight matrix products in one graph, captured at the first call."""
        if self.graph is None:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(self.graph):
                self.output = self.model(self.batch)
        self.graph.replay()

    def work_aside(self) -> None:
        """As much work as a forward on another stream, which the optimizer does not wait for."""
        with torch.cuda.stream(self.side), torch.no_grad():
            for _ in range(4):
                self.model(self.batch)


def main() -> None:
    mode, steps = sys.argv[1], int(sys.argv[2])
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    training = Training(mode)
    if mode == "history":
        torch.cuda.memory._record_memory_history(max_entries=1000)
    seconds = []
    for step in range(steps):
        begin = time.perf_counter()
        training.run_step(step)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    history = sum(map(len, torch.cuda.memory._snapshot()["device_traces"]))
    peak = torch.cuda.max_memory_allocated()
    measured = {"seconds": seconds, "peak_bytes": peak, "history": history}
    sys.stdout.write(json.dumps(measured) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
