"""Traces of Megatron-LM's training loop, which is rebuilt here because it needs a GPU."""

from pathlib import Path

import pytest
from integrations.ranks import analyzed, calls_by_step, full_steps, train
from support.turns import INTEGRATION

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*INTEGRATION)]


def test_the_traces_of_use_pytorch_profiler_are_read(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = tmp_path / "job"

    train("train_megatron.py", folder, "theirs")

    written = sorted(path.name for path in (folder / "torch_profile").iterdir())
    assert written == ["rank-0.json.gz", "rank-1.json.gz"]
    report = analyzed(folder / "torch_profile").report
    assert full_steps(report) == {0: [4, 5, 6], 1: [4, 5, 6]}
    assert {row.op for row in report.collectives} == {"all_reduce"}


def test_the_hook_of_train_step_records_its_calls(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = tmp_path / "job"

    recorded = train("train_megatron.py", folder, "ours")
    plain = train("train_megatron.py", folder, "ours", recorded=False)

    assert recorded.losses == plain.losses
    report = analyzed(folder).report
    assert full_steps(report) == {0: [3, 4, 5], 1: [3, 4, 5]}
    for rank in (0, 1):
        assert calls_by_step(folder, rank, "all_reduce") == {3: 1, 4: 1, 5: 1}
