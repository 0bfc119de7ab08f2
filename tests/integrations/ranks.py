"""Starts two real ranks of a training script and reads their output."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from support.required import absent

from stepsplit.analyzer import Analysis, examine
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.report import Report

HERE = Path(__file__).parent
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
_STEP = re.compile(r"ProfilerStep#\d+$")
_QUIET = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Trained:
    """The output of a training, and the last loss of each rank as bits."""

    output: str
    losses: tuple[str, ...]


def needs(*modules: str, of: str = "integrations") -> None:
    """Skips the calling test if a library is not installed, or fails it; see required.py."""
    for module in modules:
        if find_spec(module) is None:
            absent(of, f"{module} is not installed")


def train(script: str, folder: Path, *arguments: str, recorded: bool = True) -> Trained:
    """Runs the script on two ranks, recorded to the folder or not recorded."""
    out = str(folder) if recorded else "-"
    # Rarely a torch thread outlives the interpreter and aborts it after all output was written;
    # that is ignored in runs without the recorder.
    theirs = not recorded or "theirs" in arguments
    excused = "terminate called without an active exception" if theirs else "no excuse"
    return run([*LAUNCH, str(HERE / script), out, *arguments], folder.parent, excused)


def run(arguments: list[str], cwd: Path, excused: str = "no excuse") -> Trained:
    """Runs Python with the arguments, to the end of a training on two ranks.

    It ends well, or prints what is excused.
    """
    ran = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | _QUIET,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0 or excused in ran.stdout, ran.stdout[-4000:]
    # Both ranks write to one pipe: a line may begin within another.
    said = sorted(re.findall(r"rank (\d+) loss (0x[\da-f.]+p[+-]\d+|\S+)", ran.stdout))
    assert [rank for rank, _ in said] == ["0", "1"], ran.stdout[-4000:]
    return Trained(ran.stdout, tuple(loss for _, loss in said))


def analyzed(folder: Path) -> Analysis:
    """The folder's analysis, with the checks that all tests share."""
    analysis = examine([folder])
    report = analysis.report
    assert report.run.ranks == (0, 1)
    for row in report.steps:
        assert sum(getattr(row, f"{bucket}_ns") for bucket in BUCKETS) == row.step_ns > 0
    return analysis


def full_steps(report: Report) -> dict[int, list[int]]:
    """The numbers of the full steps of each rank."""
    found: dict[int, list[int]] = {rank: [] for rank in report.run.ranks}
    for row in report.steps:
        if row.kind == "full":
            found[row.rank].append(row.step)
    return found


def calls_by_step(folder: Path, rank: int, op: str) -> dict[int, int]:
    """The number of calls of the collective in the rank's trace, by step number."""
    with gzip.open(folder / f"rank{rank}_trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    steps = [e for e in events if e.get("cat") != "gpu_user_annotation" and _STEP.match(_name(e))]
    begins = [float(e["ts"]) for e in events if _name(e) == f"gloo:{op}" and e.get("ph") == "X"]
    return {
        int(_name(step).partition("#")[2]): sum(
            float(step["ts"]) <= at < float(step["ts"]) + float(step["dur"]) for at in begins
        )
        for step in steps
    }


def _name(event: dict[str, Any]) -> str:
    return str(event.get("name", ""))
