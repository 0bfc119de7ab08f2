"""Three roles in one gloo job of four ranks (rollout, rollout, reference, trainer), with one slow
part: `role_job.py OUT tail|transfer|reward|none SEED`. Each rank writes, for each step and by its
own clock, the seconds of the step, of its waits and phases, and of decoding for one sequence."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import record_function

from stepsplit.collectors import profile_run

SLOW_S, STEPS = 0.3, 8
DECODE_S, SEQUENCES = 0.005, 8


def work(seconds: float) -> None:
    """Takes so long as on a machine of its own: this one has fewer cores than the job has ranks."""
    matrix = torch.randn(160, 160)
    torch.mm(matrix, matrix)
    time.sleep(seconds)


class Planted:
    """The seconds of each part of each step."""

    def __init__(self) -> None:
        self.seconds: list[Counter[str]] = []

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[-1][part] += time.perf_counter() - begin

    @contextmanager
    def mark(self, part: str) -> Iterator[None]:
        with self.time(part), record_function(part):
            yield


def generate(planted: Planted, lengths: list[int]) -> None:
    """Decodes the sequences together, as an engine without a queue."""
    for token in range(max(lengths)):
        left = sum(length > token for length in lengths)
        part = "tail" if left == 1 else "batch"
        with planted.time(part), record_function(f"decode sequences={left}"):
            work(DECODE_S)


def main(out: str, slow: str, seed: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    role = ("rollout", "rollout", "reference", "trainer")[rank]
    weights, samples = dist.new_group([0, 1, 3]), torch.zeros(1000)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters())
    draw = random.Random(int(seed))
    slow_s = SLOW_S * draw.uniform(0.9, 1.3)
    extra = {part: slow_s * (slow == part) for part in ("tail", "transfer", "reward")}
    # The same in each step, and for both rollouts but for the long one.
    lengths = sorted(draw.randint(20, 30) for _ in range(SEQUENCES))
    lengths[-1] = lengths[-2] + 1
    if rank == 1:
        lengths[-1] += round(extra["tail"] / DECODE_S)
    planted = Planted()
    with profile_run(out, role=role, wait=2, warmup=1, active=4) as run:
        for _ in range(STEPS):
            planted.seconds.append(Counter())
            with planted.time("step"):
                if role == "rollout":
                    with planted.mark("generate"):
                        generate(planted, lengths)
                    with planted.time("waits"):
                        dist.send(samples, 2)
                        with planted.mark("weight_sync"):
                            dist.broadcast(samples, 3, group=weights)
                elif role == "reference":
                    with planted.time("waits"):
                        for source in (0, 1):
                            dist.recv(samples, source)
                    with planted.mark("reward"):
                        time.sleep(0.02 + extra["reward"])
                    with planted.mark("reference"):
                        work(0.05)
                    dist.send(samples, 3)
                else:
                    with planted.time("waits"):
                        dist.recv(samples, 2)
                    with planted.mark("train"):
                        work(0.1)
                        model(torch.ones(4, 64)).sum().backward()
                        optimizer.step()
                    with planted.mark("weight_sync"):
                        time.sleep(0.02 + extra["transfer"])
                        dist.broadcast(samples, 3, group=weights)
            run.step()
    Path(out, f"{role}-{rank}.json").write_text(json.dumps(planted.seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
