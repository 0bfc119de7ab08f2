"""torchtitan's profiler on two real ranks: its own traces, and the recorder in its place."""

from pathlib import Path

import pytest
from integrations.ranks import analyzed, calls_by_step, full_steps, needs, train
from support.turns import INTEGRATION

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*INTEGRATION)]


def test_the_recorder_replaces_torchtitans_profiler(tmp_path: Path) -> None:
    needs("torchtitan")
    folder = tmp_path / "dump"

    recorded = train("train_torchtitan.py", folder, "ours")
    plain = train("train_torchtitan.py", folder, "ours", recorded=False)

    assert recorded.losses == plain.losses
    traces = folder / "profiling" / "traces"
    report = analyzed(traces).report
    assert full_steps(report) == {0: [3, 4, 5], 1: [3, 4, 5]}
    for rank in (0, 1):
        assert calls_by_step(traces, rank, "all_reduce") == {3: 1, 4: 1, 5: 1}
    assert [strategy.name for strategy in report.run.strategies] == ["ddp"]


def test_torchtitans_own_traces_are_read(tmp_path: Path) -> None:
    needs("torchtitan")
    folder = tmp_path / "dump"

    train("train_torchtitan.py", folder, "theirs")

    traces = folder / "profiling" / "traces" / "iteration_6"
    report = analyzed(traces).report
    assert full_steps(report) == {0: [3, 4, 5], 1: [3, 4, 5]}
    assert {row.op for row in report.collectives} == {"all_reduce"}
    for rank in (0, 1):
        assert calls_by_step(traces, rank, "all_reduce") == {3: 1, 4: 1, 5: 1}
