"""Ray Train on two real workers: the recorder in the loop that each of them runs."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from integrations.ranks import HERE, Trained, analyzed, calls_by_step, full_steps, needs, run

pytestmark = pytest.mark.slow


def train(out: str, folder: Path) -> Trained:
    folder.mkdir()
    # Ray's sockets are in this folder, so its path must be short.
    with TemporaryDirectory(dir="/tmp") as sockets:
        return run([str(HERE / "train_ray.py"), out, str(folder), sockets], folder)


def test_the_recorder_in_the_loop_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("ray", of="ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    folder = tmp_path / "recorded"

    recorded = train(str(folder), tmp_path / "with")
    plain = train("-", tmp_path / "without")

    assert recorded.losses == plain.losses
    report = analyzed(folder).report
    assert full_steps(report) == {0: [3, 4, 5], 1: [3, 4, 5]}
    for rank in (0, 1):
        assert calls_by_step(folder, rank, "all_reduce") == {3: 1, 4: 1, 5: 1}
    assert [strategy.name for strategy in report.run.strategies] == ["ddp"]
