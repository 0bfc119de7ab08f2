"""Paths of many ranks are compared in a tree, with the result of following them node by node."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.fleet import Fleet, run_fleet, write_fleet

from stepsplit.analyzer import analyze
from stepsplit.analyzer.diagnose.graph import topological_order
from stepsplit.analyzer.report.io import to_json


@pytest.mark.slow
def test_the_tree_blames_as_the_paths_do_node_by_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(pp=4, dp=2, microbatches=4, layers=1, slow_ranks={5: 1.3}, slow_hosts={3: 1.1})
    write_fleet(run_fleet(fleet), tmp_path / "fleet")

    monkeypatch.setattr(topological_order, "_WIDE", 1)
    in_tree = analyze(tmp_path / "fleet")
    monkeypatch.setattr(topological_order, "_WIDE", 1 << 40)
    by_node = analyze(tmp_path / "fleet")

    assert any(row.rank == 5 and row.cause == "compute" for row in in_tree.blame)
    assert to_json(in_tree) == to_json(by_node)
