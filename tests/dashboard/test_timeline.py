"""The timeline: exact shapes while there is room, merged shapes otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_builders import analysis

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.tables import Slices, Waits
from stepsplit.dashboard.pages.timeline import (
    DrawnShapes,
    TimelineTrack,
    TimelineView,
    build_band,
    build_index_json,
    build_lanes,
    build_window_json,
    export_json,
)

COMPUTE, COLLECTIVE, SKEW = (BUCKETS.index(name) for name in ("compute", "collective", "skew"))


def track(*slices: tuple[int, int, int]) -> TimelineTrack:
    """Slices as (start, duration, bucket)."""
    columns = np.array(slices, dtype=np.int64).reshape(len(slices), 3)
    return TimelineTrack(columns[:, 0], columns[:, 1], columns[:, 2].astype(np.uint8))


def shapes(drawn: DrawnShapes) -> list[tuple[int, int, int, int, int]]:
    columns = (drawn.start_ns, drawn.dur_ns, drawn.bucket, drawn.cover, drawn.row)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_window_with_room_shows_its_slices_as_they_are() -> None:
    made = track((0, 10, COMPUTE), (20, 10, SKEW), (30, 10, COLLECTIVE), (90, 5, COMPUTE))
    assert shapes(made.draw(25, 90, 10)) == [(20, 10, SKEW, 255, 1), (30, 10, COLLECTIVE, 255, 2)]


def test_a_slot_shows_its_dominant_bucket_and_cover() -> None:
    made = track((0, 60, COMPUTE), (60, 40, SKEW), (100, 10, SKEW), (150, 30, COMPUTE))
    assert shapes(made.draw(0, 200, 2)) == [
        (0, 100, COMPUTE, 255, -1), (100, 100, COMPUTE, 127, -1),
    ]  # fmt: skip


def test_a_long_wait_is_drawn_exactly_among_many_short_kernels() -> None:
    short = [(n * 10, 9, COMPUTE) for n in range(20)]
    made = track(*short, (200, 150, SKEW), *((350 + n * 10, 9, COMPUTE) for n in range(5)))
    assert shapes(made.draw(0, 400, 4)) == [
        (0, 200, COMPUTE, 255, -1), (300, 100, COMPUTE, 127, -1), (200, 150, SKEW, 255, 20),
    ]  # fmt: skip


def test_nothing_is_drawn_where_nothing_ran() -> None:
    made = track((0, 10, COMPUTE), (20, 10, COMPUTE), (210, 1, COMPUTE), (291, 1, COMPUTE))
    assert [shape[:2] for shape in shapes(made.draw(0, 300, 3))] == [(0, 100), (200, 100)]
    assert shapes(track().draw(0, 100, 2)) == []


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50), st.integers(0, 6)), max_size=60),
       st.integers(1, 40))  # fmt: skip
def test_shapes_do_not_overlap(raw: list[tuple[int, int, int]], slots: int) -> None:
    now, made = 0, []
    for gap, dur, bucket in raw:
        made.append((now + gap, dur, bucket))
        now += gap + dur
    drawn = track(*made).draw(0, now + 100, slots)
    for kind in (drawn.row >= 0, drawn.row < 0):
        start, end = drawn.start_ns[kind], (drawn.start_ns + drawn.dur_ns)[kind]
        assert (start[1:] >= end[:-1]).all()
    assert (drawn.dur_ns > 0).all()
    assert {bucket for _, _, bucket in made} >= set(drawn.bucket.tolist())


def test_a_waiting_segment_has_its_owner() -> None:
    segments = analysis().tables.segments
    at = int(np.flatnonzero((segments.rank == 2) & (segments.bucket == SKEW))[0])
    one = (np.array([2], np.int32), np.array([4], np.int32), np.array([SKEW], np.uint8),
           np.array([3], np.int32), np.array(["tp"]), np.array(["all_reduce"]),
           segments.start_ns[at : at + 1], segments.dur_ns[at : at + 1])  # fmt: skip
    line = build_band(2, segments, Waits(*one))
    row = int(np.searchsorted(line.track.start_ns, segments.start_ns[at]))
    assert (line.owner[row], line.names[line.name[row]]) == (3, "all_reduce on tp")
    assert (np.delete(line.owner, row) == -1).all()


def test_the_lane_with_the_most_compute_comes_first() -> None:
    slices = Slices(
        lane=np.array([0, 1, 1], np.int32), depth=np.array([0, 0, 1], np.uint8),
        name=np.array([0, 1, 1], np.int32), bucket=np.array([COLLECTIVE, 0, 0], np.uint8),
        owner=np.full(3, -1, np.int32), start_ns=np.array([0, 0, 0]), dur_ns=np.array([9, 5, 5]),
        lanes=("stream 20", "stream 7"), names=("ncclKernel", "gemm"),
    )  # fmt: skip
    assert [(line.lane, line.depth) for line in build_lanes(slices)] == [
        ("stream 7", 0), ("stream 7", 1), ("stream 20", 0),
    ]  # fmt: skip


def test_the_index_lists_steps_ranks_and_bucket_colors() -> None:
    made = analysis()
    index = build_index_json(TimelineView(made.report, made.tables))
    assert [one["kind"] for one in index["steps"]] == ["partial", "full", "full", "full", "full"]
    assert index["ranks"][2] == {"rank": 2, "host": "node02", "stage": 1}
    assert [one["name"] for one in index["buckets"]] == list(BUCKETS)


def test_a_window_of_a_step_covers_every_rank_to_the_nanosecond() -> None:
    made = analysis()
    scene = TimelineView(made.report, made.tables)
    step = scene.steps[2]
    window = scene.read_window(step.start_ns, step.end_ns, 10_000, (0, 1, 2, 3), ())
    for line in window.rows:
        took = next(r for r in made.report.steps if (r.rank, r.step) == (line.rank, step.step))
        inside = line.drawn.start_ns < step.end_ns
        assert line.drawn.dur_ns[inside].sum() == took.step_ns
    body = orjson.dumps(build_window_json(window), option=orjson.OPT_SERIALIZE_NUMPY)
    assert [row["rank"] for row in orjson.loads(body)["rows"]] == [0, 1, 2, 3]


def test_an_exported_page_contains_one_full_step() -> None:
    made = analysis()
    kept = export_json(made.report, made.tables)
    assert [one["step"] for one in kept["index"]["steps"]] == [6]
    assert len(kept["window"]["rows"]) == 4


def test_a_window_far_off_is_empty() -> None:
    made = analysis()
    view = TimelineView(made.report, made.tables)
    lines = view.read_window(10**15, 10**15 + 5, 100, (0,), (0,)).rows
    assert [len(line.drawn.start_ns) for line in lines] == [0]


@pytest.mark.parametrize("slots", [1, 7, 300])
def test_coarse_and_exact_agree_on_a_band_of_one_bucket(slots: int) -> None:
    segments = analysis().tables.segments
    alike = replace(segments, bucket=np.zeros_like(segments.bucket))
    line = build_band(0, alike, Waits.build_empty())
    end = int((segments.start_ns + segments.dur_ns).max())
    drawn = line.track.draw(0, end, slots)
    assert drawn.dur_ns.sum() == end
