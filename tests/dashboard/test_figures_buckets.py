"""The figures draw every nanosecond of the report once, and no name becomes markup."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.report_builders import MS, analysis
from support.samples import analyze_recording

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.diagnose.what_if import build_ideal_grid
from stepsplit.analyzer.gap.comm_gap import model_busbw
from stepsplit.analyzer.regression.compare import compare_reports
from stepsplit.analyzer.report.report import Host
from stepsplit.analyzer.report.tables import Waits
from stepsplit.analyzer.report.waits import sum_waits_by_owner, sum_waits_by_root
from stepsplit.dashboard.figures.communication import (
    RankGroup,
    compute_typical_range,
    draw_waits_matrix,
)
from stepsplit.dashboard.figures.run import (
    MemoryBar,
    draw_difference,
    draw_memory,
    draw_pipeline,
    draw_split_by_rank,
    draw_split_by_step,
    draw_stage_bubbles,
    draw_waterfall,
    select_pipeline,
)

SAMPLES = Path(__file__).parents[2] / "sample_traces"

EVIL = '<a href="javascript:alert(1)">node</a>'


def test_the_bars_of_a_rank_add_up_to_its_steps() -> None:
    report = analysis().report

    figure = draw_split_by_step(report, rank=2)

    stacked = sum(np.array(trace.y) for trace in figure.data)
    assert stacked == pytest.approx([r.step_ns / MS for r in report.steps if r.rank == 2])
    assert tuple(trace.name for trace in figure.data) == BUCKETS


def test_steps_outside_of_the_mean_are_pale_and_labeled() -> None:
    trace = draw_split_by_step(analysis().report).data[0]

    assert list(trace.x) == ["3 partial", "4", "5", "6", "7"]
    assert list(trace.marker.opacity) == [0.45, 1, 1, 1, 1]


def test_a_ranks_bar_is_the_mean_of_its_full_steps() -> None:
    report = analysis().report

    compute = draw_split_by_rank(report).data[0]

    full = [r.compute_ns for r in report.steps if r.rank == 3 and r.kind == "full"]
    assert compute.y[3] == pytest.approx(np.mean(full) / MS)
    assert "94.8 ms of 144.5 ms" in compute.customdata[0][1]


def test_a_host_name_is_text_in_the_hover() -> None:
    report = analysis().report
    run = msgspec.structs.replace(report.run, hosts=(Host(EVIL, (0, 1, 2, 3)),))

    text = str(draw_split_by_rank(msgspec.structs.replace(report, run=run)).to_json())

    assert "<a" not in text and "\\u003ca" not in text
    assert "&lt;a" in text or "\\u0026lt;a" in text


def test_the_pipeline_has_a_row_a_stage_and_a_box_a_microbatch() -> None:
    measured = select_pipeline(analysis().tables.boxes, 4)

    forward, backward = draw_pipeline(measured, None).data

    assert (forward.name, backward.name) == ("forward", "backward")
    assert set(forward.y) == {"stage 0 (rank 0)", "stage 1 (rank 2)"}
    assert list(forward.text) == list(backward.text) == ["0", "1", "2", "3"] * 2


def test_the_ideal_grid_is_below_the_measured_one_on_the_same_clock() -> None:
    measured = select_pipeline(analysis().tables.boxes, 4)
    ideal = build_ideal_grid(measured, "1f1b", 4)

    figure = draw_pipeline(measured, ideal)

    assert [trace.yaxis for trace in figure.data] == ["y", "y", "y2", "y2"]
    assert min(min(trace.base) for trace in figure.data) == 0
    busy = [
        sum(sum(trace.x) for trace in figure.data if trace.yaxis == axis) for axis in ("y", "y2")
    ]
    assert busy[0] == pytest.approx(busy[1], rel=1e-5)


def test_each_stage_has_its_bubble_and_the_ideal_is_a_line() -> None:
    found = analysis().report.pipeline
    assert found is not None

    figure = draw_stage_bubbles(found)

    assert list(figure.data[0].y) == pytest.approx([23.1, 19.8])
    assert figure.layout.shapes[0].y0 == 20


@pytest.mark.parametrize("sample", ["tp2_pp2", "h100_pp2", "h100_fsdp2"])
def test_the_waterfall_leads_from_the_predicted_to_the_measured_step(sample: str) -> None:
    gap = analyze_recording(SAMPLES / sample, "auto").gap
    assert gap is not None

    (fall,) = draw_waterfall(gap).data

    assert fall.name == "from predicted to measured"
    assert [fall.y[0], fall.y[-1]] == ["predicted", "measured"]
    assert len(set(fall.y)) == len(fall.y)
    assert sum(fall.x[:-1]) == pytest.approx(fall.x[-1])
    assert fall.x[-1] == pytest.approx(gap.shown.measured.step_ns / MS)


def test_the_difference_of_two_runs_adds_up_too() -> None:
    one, other = (analyze_recording(SAMPLES / name) for name in ("pp2_m2", "pp2_m8"))

    (fall,) = draw_difference(compare_reports(one, other)).data

    assert sum(fall.x[:-1]) == pytest.approx(fall.x[-1])


def waits_of(*rows: tuple[int, int, int, int]) -> Waits:
    """Waits of rank, owner, start and end in ms, sorted as the tables are."""
    rank, owner, start, end = np.array(sorted(rows, key=lambda row: (row[0], row[2]))).T
    text = np.full(len(rank), "tp")
    zero = np.zeros(len(rank), dtype=np.int64)
    return Waits(rank, zero, zero, owner, text, text, start * MS, (end - start) * MS)


def test_the_waits_matrix_has_waiting_ranks_as_rows() -> None:
    waits = waits_of((2, 3, 0, 1), (2, 3, 1, 4), (0, 2, 2, 3))
    ranks = [RankGroup(f"rank {rank}", (rank,)) for rank in range(4)]

    (heat,) = draw_waits_matrix(sum_waits_by_owner(waits, 4), ranks, steps=2).data

    assert heat.z[2][3] == 2
    assert heat.z[0][2] == 0.5
    assert np.isnan(heat.z[3][2])


def test_a_chain_of_waits_leads_to_the_rank_that_works() -> None:
    # Rank 0 waits for 1, which first works, then waits for 2, which later waits for 3.
    waits = waits_of((0, 1, 0, 10), (1, 2, 4, 20), (2, 3, 6, 9), (3, -1, 7, 8))

    direct, root = sum_waits_by_owner(waits, 4) // MS, sum_waits_by_root(waits, 4) // MS

    assert direct.tolist() == [[0, 10, 0, 0], [0, 0, 16, 0], [0, 0, 0, 3], [0, 0, 0, 0]]
    assert root.tolist() == [[0, 4, 3, 3], [0, 0, 13, 3], [0, 0, 0, 3], [0, 0, 0, 0]]


def test_groups_of_ranks_wait_as_their_mean() -> None:
    waits = waits_of((0, 2, 0, 4), (1, 3, 0, 2), (1, 0, 3, 4))
    pairs = [RankGroup("tp group 0", (0, 1)), RankGroup("tp group 1", (2, 3))]

    (heat,) = draw_waits_matrix(sum_waits_by_owner(waits, 4), pairs, steps=1).data

    assert heat.z[0].tolist() == [0.5, 3.0]
    assert np.isnan(heat.z[1]).all()


def test_what_all_groups_are_is_said_once_so_that_their_labels_leave_room_for_the_cells() -> None:
    pairs = [RankGroup("dp_replicate group 0", (0, 1)), RankGroup("dp_replicate group 1", (2, 3))]
    hosts = [RankGroup("n0", (0, 1)), RankGroup("n1", (2, 3))]

    shown = [draw_waits_matrix(np.zeros((4, 4)), groups, steps=1) for groups in (pairs, hosts)]

    assert [list(one.data[0].x) for one in shown] == [["0", "1"], ["n0", "n1"]]
    titles = [one.layout.yaxis.title.text for one in shown]
    assert titles == ["waiting (dp_replicate group)", "waiting"]
    assert shown[0].data[0].hovertemplate.startswith("dp_replicate group %{y} waits for dp_repl")


@given(st.integers(0, 2**32 - 1))
def test_the_time_waited_for_roots_is_that_of_each_moment(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_ranks, n_ms = 5, 12
    # The rank that each rank waits for in each ms: a later one, so that no chain is a circle.
    owners = [[int(rng.integers(r + 1, n_ranks + 1)) for _ in range(n_ms)] for r in range(n_ranks)]
    owners = [[-1 if o == n_ranks or rng.random() < 0.4 else o for o in own] for own in owners]
    rows = [(r, o, t, t + 1) for r, own in enumerate(owners) for t, o in enumerate(own) if o >= 0]
    expected = np.zeros((n_ranks, n_ranks), dtype=np.int64)
    for rank, owner, moment, _ in rows:
        while owners[owner][moment] >= 0:
            owner = owners[owner][moment]
        expected[rank, owner] += MS

    sums = sum_waits_by_root(waits_of(*(rows or [(0, 1, 0, 0)])), n_ranks)

    assert sums.tolist() == expected.tolist()


def test_a_limit_far_above_all_bars_is_not_drawn() -> None:
    bars = [MemoryBar("rank 0", (("weights", 2**30),), rest_bytes=2**30)]

    assert draw_memory(bars, 3 * 2**30).layout.shapes[0].x0 == 3
    assert not draw_memory(bars, 300 * 2**30).layout.shapes
    assert [trace.name for trace in draw_memory(bars).data] == ["weights", "uncategorized"]


def test_the_typical_range_comes_from_neighboring_runs() -> None:
    values = [10.0, 10.2, 9.9, 10.1, 10.0, 15.0, 10.1]

    near = compute_typical_range(values, 5)

    assert near is not None
    assert (near.median, near.is_typical(15.0), near.is_typical(10.2)) == (10.05, False, True)
    assert compute_typical_range(values[:5], 2) is None


def test_the_typical_range_is_below_zero_only_where_runs_are() -> None:
    values = [100.0, 420.0, 10.0, 300.0, 20.0, 200.0]
    near, signed = (compute_typical_range([one - off for one in values], 0) for off in (0, 15))

    assert near is not None and near.low == 0
    assert signed is not None and signed.low < -15


def test_the_models_busbw_approaches_the_link_peak() -> None:
    report = analyze_recording(SAMPLES / "tp2_pp2", "auto")

    found = model_busbw(report, "tp", "all_reduce", 1_000, 10**9)

    assert found is not None
    assert list(found.busbw_bytes_per_s) == sorted(found.busbw_bytes_per_s)
    assert found.busbw_bytes_per_s[-1] <= found.link_bytes_per_s
    assert model_busbw(report, "tp", "send_recv", 1_000, 10**9) is None
    assert model_busbw(analysis().report, "tp", "all_reduce", 1, 2) is None
