"""The figures draw every nanosecond of the report once, and no name becomes markup."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from report_builders import MS, analysis

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.report import Host
from stepsplit.analyzer.report.tables import Boxes, Segments, Tables
from stepsplit.dashboard.figures.detail import Band, coarse
from stepsplit.dashboard.figures.pipeline import pipeline
from stepsplit.dashboard.figures.split import by_rank, by_step
from stepsplit.dashboard.figures.timeline import SHAPES, timeline

EVIL = '<a href="javascript:alert(1)">node</a>'


def test_the_bars_of_a_rank_add_up_to_its_steps() -> None:
    report = analysis().report

    figure = by_step(report, rank=2)

    stacked = sum(np.array(trace.y) for trace in figure.data)
    assert stacked == pytest.approx([r.step_ns / MS for r in report.steps if r.rank == 2])
    assert tuple(trace.name for trace in figure.data) == BUCKETS


def test_steps_that_enter_no_median_are_pale_and_named() -> None:
    trace = by_step(analysis().report).data[0]

    assert list(trace.x) == ["3 partial", "4", "5", "6", "7"]
    assert list(trace.marker.opacity) == [0.45, 1, 1, 1, 1]


def test_a_ranks_bar_is_the_median_of_its_full_steps() -> None:
    report = analysis().report

    compute = by_rank(report).data[0]

    full = [r.compute_ns for r in report.steps if r.rank == 3 and r.kind == "full"]
    assert compute.y[3] == pytest.approx(np.median(full) / MS)
    assert "95.1 ms of 145 ms" in compute.customdata[0][1]


def test_a_host_name_is_text_in_the_hover() -> None:
    report = analysis().report
    run = msgspec.structs.replace(report.run, hosts=(Host(EVIL, (0, 1, 2, 3)),))

    text = str(by_rank(msgspec.structs.replace(report, run=run)).to_json())

    assert "<a" not in text and "\\u003ca" not in text
    assert "&lt;a" in text or "\\u0026lt;a" in text


def test_the_timeline_fills_a_step_of_every_rank() -> None:
    made = analysis()

    figure = timeline(made.tables, 5)

    drawn = {str(rank): 0.0 for rank in range(4)}
    for trace in figure.data:
        for row, width in zip(trace.y, trace.x, strict=True):
            drawn[row] += width
    steps = {str(r.rank): r.step_ns / MS for r in made.report.steps if r.step == 5}
    assert drawn == pytest.approx(steps)
    assert min(min(trace.base) for trace in figure.data) == 0


def test_a_long_trace_is_drawn_in_few_shapes() -> None:
    count = 20_000
    columns = np.arange(count)
    segments = Segments(
        rank=np.repeat(np.arange(4, dtype=np.int32), count // 4),
        step=np.zeros(count, np.int32),
        bucket=(columns % 7).astype(np.uint8),
        start_ns=np.tile(np.arange(count // 4, dtype=np.int64), 4) * 10,
        dur_ns=np.full(count, 10, np.int64),
    )

    figure = timeline(Tables(segments, analysis().tables.boxes))

    assert 0 < sum(len(trace.x) for trace in figure.data) <= SHAPES


def test_a_coarse_band_shows_what_fills_each_slot() -> None:
    # Slots of 50 ns: compute 40 and bubble 10; then bubble 50.
    band = Band(np.array([0, 4, 0, 4]), np.array([0, 20, 30, 50]), np.array([20, 10, 20, 50]))

    drawn = coarse(band, 2)

    assert drawn.bucket.tolist() == [0, 4]
    assert (drawn.start_ns.tolist(), drawn.dur_ns.tolist()) == ([0, 50], [50, 50])
    assert coarse(band, 4) is band


def test_the_pipeline_has_a_row_a_stage_and_a_box_a_microbatch() -> None:
    forward, backward = pipeline(analysis().tables, 4).data

    assert (forward.name, backward.name) == ("forward", "backward")
    assert set(forward.y) == {"stage 0 (rank 0)", "stage 1 (rank 2)"}
    assert list(forward.text) == list(backward.text) == ["0", "1", "2", "3"] * 2


def test_tables_without_rows_are_blank_figures() -> None:
    made = analysis().tables
    segments = Segments(*(getattr(made.segments, n)[:0] for n in Segments.__dataclass_fields__))
    boxes = Boxes(*(getattr(made.boxes, n)[:0] for n in Boxes.__dataclass_fields__))

    assert not timeline(Tables(segments, boxes), 4).data
    assert not pipeline(Tables(segments, boxes), 4).data
