"""A large upload does not grow the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.uploads import uploaded


@pytest.mark.slow
def test_the_servers_memory_stays_flat(tmp_path: Path) -> None:
    costs = uploaded(tmp_path, 256_000_000)

    assert [cost.way for cost in costs] == ["PUT", "PATCH"]
    assert max(cost.grown_bytes for cost in costs) < 60_000_000, costs
