"""A real job of three roles with a slow part: its shares, and what holds it up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")

from stepsplit.analyzer.analysis import RoleAnalysis, examine_roles_or_run

SCRIPT = Path(__file__).parents[1] / "support" / "role_job.py"

SLOW = {
    "tail": ("rollout", 1, "generate"),
    "transfer": ("trainer", 3, "weight_sync"),
    "reward": ("reference", 2, "reward"),
}


PHASE_OF_MARK = {
    "generate": "generation",
    "reward": "reward",
    "reference": "reference",
    "train": "training",
    "weight_sync": "weight_sync",
}


@pytest.mark.slow
@pytest.mark.parametrize("part", SLOW)
def test_the_slow_part_of_three_roles_comes_first(part: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               "4", str(SCRIPT), str(tmp_path), part, "1"]  # fmt: skip
    subprocess.run(command, check=True, timeout=120, capture_output=True,
                   env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    analysis = examine_roles_or_run([tmp_path])
    assert isinstance(analysis, RoleAnalysis)
    job = analysis.job
    first = job.held[0]
    assert (first.role, first.rank, first.mark) == SLOW[part]
    counted = {row.step for row in job.steps if row.is_counted}
    for role in job.roles:
        for rank, time in zip(role.ranks, role.rank_times, strict=True):
            steps = json.loads((tmp_path / f"{role.name}-{rank}.json").read_text())
            planted: Counter[str] = Counter()
            for step in counted:
                planted.update(steps[step])
            found: Counter[str] = Counter()
            for row in job.phase_rows:
                if (row.role, row.rank) == (role.name, rank) and row.step in counted:
                    found[row.phase] += row.time.window_ns
            for tail in job.tail_rows:
                if (tail.role, tail.rank) == (role.name, rank) and tail.step in counted:
                    found["tail"] += tail.tail_ns
            found["waits"] = (time.wait_ns + time.transfer_ns) * len(counted)
            for part_of, seconds in planted.items():
                # The trainer's broadcast, too, is communication.
                if part_of in ("step", "batch") or (role.name, part_of) == ("trainer", "waits"):
                    continue
                share = found[PHASE_OF_MARK.get(part_of, part_of)] / (time.window_ns * len(counted))
                truth = seconds / planted["step"]
                assert share == pytest.approx(truth, abs=0.02), (role.name, rank, part_of)
    is_tail = part == "tail"
    assert (first.tail_ns > first.held_ns / 2) == is_tail
    (long,) = job.tails
    assert (long.saved_ns > job.step_ns / 4) == is_tail
