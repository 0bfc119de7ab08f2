"""python recorded.py SCENARIO: trainings with the recorder written into the script."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch.profiler import profile
from training import STEPS, Training, tell_ops

from stepsplit.collectors import ProfiledRun, profile_run


def recorder_cannot_write(training: Training) -> None:
    """Rank 0 is to write below a file, rank 1 to a disk that is read only."""
    folders = (Path(sys.argv[0]) / "run", Path(os.environ["READ_ONLY"]))
    with profile_run(folders[training.rank]) as run:
        _steps(training, run)


def recorder_inside_own_profiler(training: Training) -> None:
    with profile() as own, profile_run(os.environ["OUT"], wait=0) as run:
        _steps(training, run)
    tell_ops(own, training)


def recorder_twice_at_once(training: Training) -> None:
    """The second of ours finds the first there and gives up; then the user's own runs."""
    out = Path(os.environ["OUT"])
    with profile_run(out / "1", wait=0) as first, profile_run(out / "2", wait=0) as second:
        while training.steps < 6:
            training.step()
            first.step()
            second.step()
    with profile() as own:
        training.until(STEPS)
    tell_ops(own, training)


def _steps(training: Training, run: ProfiledRun) -> None:
    while training.steps < STEPS:
        training.step()
        run.step()


if __name__ == "__main__":
    job = Training()
    globals()[sys.argv[1]](job)
    job.end()
