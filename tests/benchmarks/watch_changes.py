"""Whether `stepsplit watch` finds what is planted in a real training, and nothing in a clean one.

    python tests/benchmarks/watch_changes.py [CLEAN_RUNS] [PLANTED_RUNS]

Two gloo ranks train a small model with DDP and a data loader. In a planted run, rank 1 is 15 %
slower from step 2,000 on, and its data loader waits 30 % of a step more from step 5,000 on. There
is a sample each 30 steps. Printed for each run: the changes that were found, the step by which they
were, the ranks that were named, and what the samples say of the cause; for clean runs each change
is a false alarm, by the program or by the machine, and one of a minute or more a false webhook.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

from stepsplit.analyzer.watch.records import WatchBatch, decode_batch
from stepsplit.dashboard.store.alerts import LASTS_S

SLOW_FROM, LOADER_FROM, STEPS = 2_000, 5_000, 7_000

SAMPLE_STEPS = 30

SLOWER, LOADER = 0.15, 0.30


def train(steps: int, is_planted: bool) -> None:
    """The training of one rank."""
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, IterableDataset

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    is_planted = is_planted and distributed.get_rank() == 1
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(384, 384) for _ in range(6)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    usual_s = _measure_step(model, optimizer)

    class Batches(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for step in range(steps):
                if is_planted and step >= LOADER_FROM:
                    time.sleep(LOADER * usual_s)
                yield torch.randn(64, 384)

    for step, batch in enumerate(DataLoader(Batches(), batch_size=None)):
        loss = model(batch).pow(2).mean()
        if is_planted and step >= SLOW_FROM:
            _work(SLOWER * usual_s)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    distributed.barrier()
    del model, optimizer
    distributed.destroy_process_group()


def _measure_step(model: object, optimizer: object) -> float:
    """The time of a step on all ranks, as the mean of some."""
    import torch
    from torch import distributed

    for _ in range(2):
        begin = time.perf_counter()
        for _ in range(100):
            loss = model(torch.randn(64, 384)).pow(2).mean()  # type: ignore[operator]
            loss.backward()
        took = torch.tensor((time.perf_counter() - begin) / 100)
    distributed.all_reduce(took)
    return float(took) / distributed.get_world_size()


def _work(seconds: float) -> None:
    """Computes for so long."""
    import torch

    matrix, end = torch.ones(64, 64), time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix @ matrix


def watch(steps: int, planted: bool) -> list[WatchBatch]:
    """The batches of a watched training."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "stepsplit.dashboard", "watch", "--out", folder,
            "--every", f"{SAMPLE_STEPS}steps", "--budget", "20", "--",
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            __file__, "--train", str(steps), str(int(planted)),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=1_800)
        (path,) = (Path(folder) / "hosts").glob("*.jsonl")
        return [decode_batch(line, str(path)) for line in path.read_bytes().splitlines()]


def print_run(name: str, batches: list[WatchBatch]) -> tuple[int, int]:
    """Prints the changes of a run; returns the number of those to slower steps, and of those among
    them that lasted long enough for a webhook."""
    samples = sorted(sample.step for batch in batches for sample in batch.samples)
    say = sys.stdout.write
    apart = median(b - a for a, b in pairwise(samples))
    say(f"{name}: {len(samples)} samples, {apart:.0f} steps apart\n")
    last, since_ns, lasted_ns = 0, dict[int, int](), dict[int, int]()
    for batch in batches:
        last = max([last, *(window.last_step for window in batch.windows)])
        for event in batch.events:
            if event.kind in ("change", "drift"):
                say(f"  by {last}: {event.kind} step {event.step} rank {event.rank}: {event.text}")
                begin = max((at for at in (SLOW_FROM, LOADER_FROM) if at <= event.step), default=0)
                since = sum(begin <= step <= event.step for step in samples)
                say("\n" if event.before_ns else f"; sample {since} since step {begin}\n")
            if event.kind != "change" or event.before_ns is None or event.after_ns is None:
                continue
            if event.is_over and event.step in since_ns:
                lasted_ns.setdefault(event.step, batch.unix_ns - since_ns[event.step])
            elif not event.is_over and event.after_ns > event.before_ns:
                since_ns[event.step] = event.unix_ns
    findings = [sample.finding for batch in batches for sample in batch.samples if sample.finding]
    if findings:
        say(f"  newest finding: {findings[-1]}\n")
    for step, begin_ns in since_ns.items():
        lasted_ns.setdefault(step, batches[-1].unix_ns - begin_ns)
    return len(since_ns), sum(each >= LASTS_S * 10**9 for each in lasted_ns.values())


def main() -> None:
    """Prints all runs, planted ones first."""
    clean, planted = (int(each) for each in (*sys.argv[1:3], "20", "1")[:2])
    for number in range(planted):
        print_run(f"planted {number}", watch(STEPS, planted=True))
    found = [print_run(f"clean {number}", watch(STEPS, planted=False)) for number in range(clean)]
    slower, alerts = (sum(each[i] for each in found) for i in (0, 1))
    text = f"{clean} clean runs: {slower} changes to slower steps, {alerts} of them of a minute"
    sys.stdout.write(f"{text} or more\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(int(sys.argv[2]), sys.argv[3] == "1")
    else:
        main()
