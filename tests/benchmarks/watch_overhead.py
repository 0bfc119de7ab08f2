"""What `stepsplit watch` costs a training, by the training's own clock.

    python tests/benchmarks/watch_overhead.py [SECONDS] [EVERY] [BUDGET]

Two gloo ranks, or on a machine with a GPU one of NCCL, train under `stepsplit watch` with its
default budget or so many percent. Each sample has a block of steps around it, with its warmup,
recorded steps and export; it is paired with the block of as many steps before. Their difference is
what the sample cost, and over all of the time the overhead. Also printed: the overhead that the
watch says of itself, and whether the loss is as without the watch.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from stepsplit.collectors.formats.file_names import list_note_files
from stepsplit.collectors.formats.watch_notes import SampleReport, read_notes

BLOCK = 20
"""Steps of a block; a sample takes four of them."""


ON_GPU = torch.cuda.is_available()
WIDTH, ROWS = (4096, 4096) if ON_GPU else (256, 64)


def train(seconds: float, steps: int, times_file: str) -> None:
    """The training of one rank; for so many steps, or for so long as rank 0 says."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if ON_GPU else "cpu")
    distributed.init_process_group("nccl" if ON_GPU else "gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)]).to(device)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = torch.Generator(device).manual_seed(rank)
    times, begin, done = [time.perf_counter_ns()], time.monotonic(), 0
    while not steps or done < steps:
        with torch.autocast("cuda", torch.bfloat16, enabled=ON_GPU):
            loss = model(torch.randn(ROWS, WIDTH, generator=batches, device=device)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ON_GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter_ns())
        done += 1
        # All ranks do as many steps: rank 0 decides each hundredth step.
        if not steps and done % 100 == 0:
            go_on = torch.tensor(float(time.monotonic() - begin < seconds), device=device)
            distributed.broadcast(go_on, 0)
            if not go_on:
                break
    if rank == 0:
        Path(times_file).write_text(json.dumps({"times": times, "loss": loss.item().hex()}))
    distributed.barrier()
    del model, optimizer
    distributed.destroy_process_group()


def pair_blocks(times: list[int], samples: list[SampleReport]) -> list[int]:
    """How much longer the block of each sample took than the one before it, in ns."""
    took = [b - a for a, b in pairwise(times)]
    pairs = []
    for sample in samples:
        first = sample.step - 2
        if first >= BLOCK and first + BLOCK <= len(took):
            before = took[first - BLOCK : first]
            pairs.append(sum(took[first : first + BLOCK]) - sum(before))
    return pairs


def bootstrap(values: list[int]) -> tuple[float, float]:
    """The 95 % interval of the mean."""
    draw = random.Random(0)
    means = sorted(mean(draw.choices(values, k=len(values))) for _ in range(2_000))
    return means[50], means[1949]


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 900.0
    every = sys.argv[2] if len(sys.argv) > 2 else "1s"
    folder = Path(tempfile.mkdtemp())
    out, file = folder / "run", folder / "times.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    job = [*launcher, "--nproc-per-node", "1" if ON_GPU else "2", __file__, "train"]
    watch = [sys.executable, "-m", "stepsplit.dashboard", "watch", "--out", str(out)]
    budget = ["--budget", sys.argv[3]] if len(sys.argv) > 3 else []
    command = [*watch, "--every", every, "--disk", "0.05", *budget, "--"]
    subprocess.run([*command, *job, str(seconds), "0", str(file)], check=True)
    watched = json.loads(file.read_text())
    times = watched["times"]
    notes = read_notes(list_note_files(out)[0]).notes
    samples = [n for n in notes if isinstance(n, SampleReport) and not n.no_data]
    pairs = pair_blocks(times, samples)
    total_ns = times[-1] - times[0]
    low, high = bootstrap(pairs)
    say = sys.stdout.write
    say(f"{len(times) - 1} steps of {median(b - a for a, b in pairwise(times)) / 1e6:.2f} ms")
    say(f" in {total_ns / 1e9:.0f} s, {len(samples)} samples, {len(pairs)} pairs\n")
    say(f"a sample costs {mean(pairs) / 1e6:.1f} ms (95 %: {low / 1e6:.1f} to {high / 1e6:.1f})\n")
    parts = [100 * each * len(samples) / total_ns for each in (mean(pairs), low, high)]
    say("overhead by pairs {:.2f} % (95 %: {:.2f} to {:.2f} %)\n".format(*parts))
    say(f"overhead by its own figure {100 * (samples[-1].overhead or 0):.2f} %\n")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    say(f"files {size / 2**20:.1f} MiB\n")
    subprocess.run([*job, "0", str(len(times) - 1), str(file)], check=True)
    same = json.loads(file.read_text())["loss"] == watched["loss"]
    say(f"loss {'as' if same else 'NOT as'} in the plain training of as many steps\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
