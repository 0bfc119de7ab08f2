"""Memory over time: from a recording of memory beside the traces to the chart and its peak."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.page_text import read_text

from stepsplit.analyzer import Analysis, examine
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.report.tables import read_tables, write_tables
from stepsplit.analyzer.split_recording import split_recording
from stepsplit.dashboard.figures.run import MemoryOverTime, draw_memory_over_time
from stepsplit.dashboard.pages.address import AddressQuery
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.pages.compute import build_memory_page

pytestmark = pytest.mark.slow
SAMPLE = Path(__file__).parents[2] / "sample_traces" / "h100_pp2"
MIB, GROWTH = 1 << 20, 5_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """Two ranks that allocate through the first half of each step, and free through the second; of
    rank 1 each allocation is larger, and the third step has one more."""
    folder = tmp_path_factory.mktemp("memory") / "run"
    shutil.copytree(SAMPLE, folder)
    (folder / "report.json").unlink()
    split = split_recording(read_recording([folder]))
    for rank in split.ranks:
        rows = [[-1, 1, 1024 * MIB, 0]]
        for step in rank.steps:
            edges = step.start_ns + np.linspace(0, step.split.step_ns, 2 * GROWTH + 2)[1:-1]
            at = rank.clock.map_to_own_ns(edges.astype(np.int64)) + rank.trace.t0_unix_ns
            size = MIB * (1 + rank.trace.rank)
            rows += [[ns, 1, size, 4] for ns in at[:GROWTH].tolist()]
            if step is rank.steps[2]:
                peak_ns = int(at[GROWTH - 1]) + 1
                rows += [[peak_ns, 1, MIB, 4], [peak_ns + 1, 2, -MIB, 4]]
            rows += [[ns, 2, -size, 4] for ns in at[GROWTH:].tolist()]
        name = f"rank{rank.trace.rank}_memory.raw.json.gz"
        (folder / name).write_bytes(gzip.compress(json.dumps(rows).encode()))
    return examine([folder])


def test_the_peak_of_a_rank_is_where_it_was_recorded(made: Analysis, tmp_path: Path) -> None:
    memory = made.tables.memory
    for rank in (0, 1):
        own = memory.rank == rank
        assert 0 < own.sum() <= 2_000, "thinned"
        sizes, times = memory.allocated_bytes[own], memory.time_ns[own]
        assert sizes.max() == MIB * (1024 + GROWTH * (1 + rank) + 1)
        third = [row for row in made.report.steps if row.rank == rank][2]
        into = times[sizes.argmax()] - third.start_ns
        assert into == pytest.approx(third.step_ns / 2, rel=0.001)
        assert (np.diff(times) >= 0).all() and (memory.reserved_bytes == -1).all()

    write_tables(tmp_path, made.tables)
    again = read_tables(tmp_path).memory
    assert (again.time_ns == memory.time_ns).all() and (again.rank == memory.rank).all()


def test_the_page_names_the_peak_and_its_step(made: Analysis) -> None:
    view = View("run", made.report, made.tables, "0123456789ab")
    third = [row for row in made.report.steps if row.rank == 1][2]
    words = f"ms into step {third.step}"

    fullest = read_text(build_memory_page(view))
    assert "peak of rank 1: 10.8 GiB" in fullest and words in fullest
    assert "forward and backward of that step" in fullest
    assert "peak of rank 0: 5.9 GiB" in read_text(
        build_memory_page(view, AddressQuery({"rank": "0"}))
    )


def test_the_page_names_the_lines_that_allocated_the_peak(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(SAMPLE, folder)
    (folder / "report.json").unlink()
    rank = split_recording(read_recording([folder])).ranks[0]
    step = rank.steps[1]
    middle = np.array([step.start_ns + step.split.step_ns // 2])
    at_us = int(rank.clock.map_to_own_ns(middle)[0] + rank.trace.t0_unix_ns) // 1000
    library = {
        "filename": "/opt/site-packages/torch/nn/modules/linear.py",
        "line": 125,
        "name": "f",
    }

    def allocate(addr: int, size: int, line: int) -> dict[str, object]:
        own = {"filename": "/home/me/train/model.py", "line": line, "name": "<b>forward"}
        return {"action": "alloc", "addr": addr, "size": size, "time_us": at_us + addr,
                "frames": [library, own]}  # fmt: skip

    trace = [allocate(1, 3 * MIB, 42), allocate(2, MIB, 57), allocate(3, MIB, 57)]
    blocks = [
        {"address": one["addr"], "size": one["size"], "state": "active_allocated"} for one in trace
    ]
    segment = {"total_size": 8 * MIB, "address": 1, "segment_type": "large", "blocks": blocks}
    content = {"segments": [segment], "device_traces": [trace]}
    (folder / "rank0_memory.pickle").write_bytes(pickle.dumps(content))
    made = examine([folder])
    write_tables(tmp_path / "tables", made.tables)
    tables = read_tables(tmp_path / "tables")
    assert tables.allocations == made.tables.allocations
    words = read_text(build_memory_page(View("run", made.report, tables, "0123456789ab")))
    words = words[words.index("Largest allocations") :]
    assert " model.py:42 <b>forward" in words and "3 MiB" in words
    assert "torch/nn/modules/linear.py:125 f" in words and "/opt" not in words
    assert words.index("model.py:42") < words.index("model.py:57") and "60.0 %" in words


def test_a_rank_that_allocated_nothing_has_no_memory_over_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(SAMPLE, folder)
    (folder / "report.json").unlink()
    nothing = {"segments": [], "device_traces": [[]]}
    (folder / "rank0_memory.pickle").write_bytes(pickle.dumps(nothing))
    assert not len(examine([folder]).tables.memory.rank)


def test_of_many_steps_each_has_its_line_and_some_their_name() -> None:
    def draw(count: int) -> tuple[int, list[str]]:
        steps = [(number, number * 10**6) for number in range(count)]
        size = np.full(4, MIB)
        layout = draw_memory_over_time(
            MemoryOverTime(np.arange(4), size, -size, steps, [(0, 10**5, 0), (10**5, 10**6, 1)])
        ).layout
        return len(layout.shapes), [one.text for one in layout.annotations]

    assert draw(0) == (2, [])
    assert draw(3) == (5, ["step 0", "step 1", "step 2"])
    lines, names = draw(50)
    assert lines == 52 and names == [f"step {number}" for number in range(0, 50, 3)]


def test_memory_of_another_time_has_no_place_in_the_steps(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(SAMPLE, folder)
    (folder / "report.json").unlink()
    rows = [[-1, 1, MIB, 0], [5 * 10**17, 1, MIB, 4]]
    (folder / "rank0_memory.raw.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    assert not len(examine([folder]).tables.memory.rank)
