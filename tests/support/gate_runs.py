"""Recordings of the demo training, as it is or with a mistake planted, for a gate to judge."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from stepsplit.collectors.demo.arguments import DemoArgs

JOBS = Path(__file__).parents[1] / "collector_jobs"
RECIPE = DemoArgs(
    steps=11, active=8, layers=2, hidden=256, microbatches=2, micro_batch=8, seq_len=64
)
STRAGGLER = replace(RECIPE, slow_rank=1, slow_ms=300)
_QUIET = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
}
_LONGEST_S = 120


def record(out: Path, plant: str = "nothing", recipe: DemoArgs = RECIPE) -> Path:
    """A recording of two data-parallel ranks under the folder out. Raises where a rank fails."""
    run_ranks(
        "planted_demo.py", plant, "--out", str(out), "--parallel", "dp=2",
        *recipe.format_arguments(),
    )  # fmt: skip
    return out


def run_ranks(job: str, *arguments: str) -> None:
    """Runs two ranks of a job of tests/collector_jobs. Raises where a rank fails."""
    command = [sys.executable, str(JOBS / "ranks.py"), str(JOBS / job), *arguments]
    subprocess.run(
        command, env=os.environ | _QUIET, check=True, timeout=_LONGEST_S, capture_output=True
    )
