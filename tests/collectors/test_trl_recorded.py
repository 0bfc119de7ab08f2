"""GRPO of TRL on two gloo ranks under `stepsplit record`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

from stepsplit.analyzer import analyze

SCRIPT = Path(__file__).parents[1] / "support" / "grpo_job.py"


@pytest.mark.slow
def test_no_step_of_grpo_is_dropped_and_its_phases_have_names(tmp_path: Path) -> None:
    record = "import sys; from stepsplit.collectors.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", record, "record", "--out", str(tmp_path / "run"),
               "--first", "4", "--steps", "4", "--", sys.executable, "-m",
               "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT),
               str(tmp_path), "10"]  # fmt: skip
    subprocess.run(command, check=True, timeout=300, capture_output=True,
                   env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})  # fmt: skip
    report = analyze(tmp_path / "run")
    # Of the fifth one TRL logs.
    assert [(row.rank, row.step, row.kind) for row in report.steps] == [
        (rank, step, "full") for rank in (0, 1) for step in (4, 5, 6, 7)
    ]
    assert report.rl_step
    assert report.rl_step.steps == 4
    shares = {row.phase: row.time.window_ns / report.rl_step.step_ns
              for row in report.rl_step.phases}  # fmt: skip
    assert sum(shares.values()) == pytest.approx(1)
    assert {"generation", "reward", "reference", "training"} <= shares.keys()
    assert max(shares, key=lambda phase: shares[phase]) == "generation"
    assert shares[""] < 0.2
