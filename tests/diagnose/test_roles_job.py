"""A real job of three roles with a slow part: its shares, and what holds it up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


@pytest.mark.slow
@pytest.mark.parametrize("part", SLOW)
def test_the_slow_part_of_three_roles_comes_first(part: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               "4", str(SCRIPT), str(tmp_path), part]  # fmt: skip
    subprocess.run(command, check=True, timeout=120, capture_output=True,
                   env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    analysis = examine_roles_or_run([tmp_path])
    assert isinstance(analysis, RoleAnalysis)
    first = analysis.job.held[0]
    assert (first.role, first.rank, first.mark) == SLOW[part]
    for role in analysis.job.roles:
        for rank, time in zip(role.ranks, role.rank_times, strict=True):
            planted = json.loads((tmp_path / f"{role.name}-{rank}.json").read_text())
            if role.name != "trainer":  # its broadcast, too, is communication
                share = (time.wait_ns + time.transfer_ns) / time.window_ns
                assert share == pytest.approx(planted, abs=0.02), (role.name, rank)
