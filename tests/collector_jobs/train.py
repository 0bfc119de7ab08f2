"""python train.py SCENARIO: a training in which something happens. See the test of each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import distributed
from torch.autograd import profiler
from torch.profiler import profile, schedule
from torch.utils.data import DataLoader
from training import STEPS, Training, tell_ops


def nothing(training: Training) -> None:
    training.until(STEPS)


def killed_in_a_recorded_step(training: Training) -> None:
    training.until(7)
    _end_rank_1(training)
    training.until(STEPS)


def killed_while_packed(training: Training) -> None:
    training.until(9)
    _end_rank_1(training)


def killed_while_exported(training: Training) -> None:
    def export(self: profile, path: str) -> None:
        Path(path).write_text('{"traceEvents": [{"name": "half')
        os.kill(os.getpid(), signal.SIGKILL)

    if training.rank == 1:
        profile.export_chrome_trace = export
    training.until(9)


def slow_export_on_rank_1(training: Training) -> None:
    _slow_down_export(training)
    training.until(STEPS)


def raises_in_a_recorded_step(training: Training) -> None:
    training.until(8)
    raise ValueError("the training's own error")


def leaves_at_once(training: Training) -> None:
    training.until(STEPS)
    training.end()
    os._exit(7)


def never_ends(training: Training) -> None:
    training.until(8)
    sys.stdout.write("in step 8\n")
    sys.stdout.flush()
    time.sleep(60)


def loads_data_in_a_recorded_step(training: Training) -> None:
    """By a worker that is forked and one that is spawned, while the profiler runs."""
    training.until(7)
    for start in ("fork", "spawn"):
        loader = DataLoader(range(8), num_workers=1, multiprocessing_context=start)
        sys.stdout.write(f"rank {training.rank} {start} {sum(int(each) for each in loader)}\n")
    training.until(STEPS)


def trains_in_a_subprocess(training: Training) -> None:
    """Rank 0 has another process train something of its own, after ours has written."""
    training.until(10)
    if training.rank == 0:
        subprocess.run([sys.executable, str(Path(__file__).with_name("alone.py"))], check=True)
    training.until(STEPS)


def until_stopped(training: Training) -> None:
    """Steps until there is a file; then whether torch is as it was. Rank 1 writes slowly."""
    _slow_down_export(training)
    before = _torch_now()
    while not _is_stopped(training):
        training.step()
        time.sleep(0.03)
    sys.stdout.write(f"rank {training.rank} torch is as it was: {before == _torch_now()}\n")


def _is_stopped(training: Training) -> bool:
    there = torch.tensor([float(Path(os.environ["STOP"]).exists() and training.rank == 0)])
    distributed.all_reduce(there)
    return bool(there.item())


def _torch_now() -> list[object]:
    """What a recorder replaces, and whether a profiler runs."""
    patched = [vars(distributed.ProcessGroup)[name] for name in ("send", "recv")]
    starters = [profiler._prepare_profiler, profiler._enable_profiler]
    return [*patched, *starters, torch.autograd._profiler_enabled()]


def own_profiler_throughout_or_in_a_recorded_step(training: Training) -> None:
    """Rank 0 has one from its first step on, rank 1 starts one while ours records."""
    training.until(0 if training.rank == 0 else 7)
    with profile() as own:
        training.until(8 if training.rank == 1 else 10)
    tell_ops(own, training)
    training.until(STEPS)


def own_profiler_warm_or_begun_as_ours_is_warm(training: Training) -> None:
    """Rank 0's is warm when ours is to warm up (before step 5), rank 1's begins after that."""
    own = profile(
        schedule=schedule(wait=0, warmup=4 if training.rank == 0 else 1, active=2, repeat=1)
    )
    training.until(3 if training.rank == 0 else 5)
    with own:
        while training.steps < 9:
            training.step()
            own.step()
    tell_ops(own, training)
    training.until(STEPS)


def own_schedule_until_stopped(training: Training) -> None:
    """Profiles two of three steps for ever, and exports each time: never free for another one."""
    places = Path(os.environ["TMPDIR"]) / f"own{training.rank}.json.gz"
    exported: list[int] = []

    def export(own: profile) -> None:
        own.export_chrome_trace(str(places))
        exported.append(places.stat().st_size)

    with profile(schedule=schedule(wait=0, warmup=1, active=2), on_trace_ready=export) as own:
        while training.steps < STEPS and not _is_stopped(training):
            training.step()
            own.step()
    sys.stdout.write(f"rank {training.rank} exported all: {min(exported) > 1000}\n")


def _slow_down_export(training: Training) -> None:
    export = profile.export_chrome_trace

    def slow(self: profile, path: str) -> None:
        time.sleep(2)
        export(self, path)

    if training.rank == 1:
        profile.export_chrome_trace = slow


def _end_rank_1(training: Training) -> None:
    if training.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    job = Training()
    globals()[sys.argv[1]](job)
    job.end()
