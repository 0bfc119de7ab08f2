"""The timeline: exact shapes while there is room, merged shapes otherwise."""

from __future__ import annotations

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given, strategies as st
from msgspec import structs
from support.report_builders import analysis

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.tables import Segments, Slices, Tables, Waits
from stepsplit.dashboard.figures.rank_groups import RankGrouping, list_groupings
from stepsplit.dashboard.pages.timeline import (
    KeptSlices,
    NameTime,
    RangeSplit,
    TimelineView,
    WindowDetail,
    build_band,
    build_index_json,
    build_lanes,
    build_matches_json,
    build_window_json,
    export_json,
    find_slots,
    measure_names,
    measure_range,
)
from stepsplit.dashboard.pages.timeline_track import DrawnShapes, TimelineTrack, cut_into_slots

COMPUTE, COLLECTIVE, SKEW, IDLE = (
    BUCKETS.index(name) for name in ("compute", "collective", "skew", "idle")
)


def track(*slices: tuple[int, int, int]) -> TimelineTrack:
    """Slices as (start, duration, bucket)."""
    columns = np.array(slices, dtype=np.int64).reshape(len(slices), 3)
    return TimelineTrack(columns[:, 0], columns[:, 1], columns[:, 2].astype(np.uint8))


def shapes(drawn: DrawnShapes) -> list[tuple[int, int, int, int, int]]:
    columns = (drawn.start_ns, drawn.dur_ns, drawn.bucket, drawn.cover, drawn.row)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_window_with_room_shows_its_slices_as_they_are() -> None:
    made = track((0, 10, COMPUTE), (20, 10, SKEW), (30, 10, COLLECTIVE), (90, 5, COMPUTE))
    assert shapes(made.draw(cut_into_slots(25, 90, 10))) == [
        (20, 10, SKEW, 255, 1),
        (30, 10, COLLECTIVE, 255, 2),
    ]


def test_a_slot_shows_its_dominant_bucket_and_cover() -> None:
    made = track((0, 60, COMPUTE), (60, 40, SKEW), (100, 10, SKEW), (150, 30, COMPUTE))
    assert shapes(made.draw(cut_into_slots(0, 200, 2))) == [
        (0, 100, COMPUTE, 255, -1), (100, 100, COMPUTE, 127, -1),
    ]  # fmt: skip


def test_a_long_wait_is_drawn_exactly_among_many_short_kernels() -> None:
    short = [(n * 10, 9, COMPUTE) for n in range(20)]
    made = track(*short, (200, 150, SKEW), *((350 + n * 10, 9, COMPUTE) for n in range(5)))
    assert shapes(made.draw(cut_into_slots(0, 400, 4))) == [
        (0, 200, COMPUTE, 255, -1), (300, 100, COMPUTE, 127, -1), (200, 150, SKEW, 255, 20),
    ]  # fmt: skip


def test_nothing_is_drawn_where_nothing_ran() -> None:
    made = track((0, 10, COMPUTE), (20, 10, COMPUTE), (210, 1, COMPUTE), (291, 1, COMPUTE))
    assert [shape[:2] for shape in shapes(made.draw(cut_into_slots(0, 300, 3)))] == [
        (0, 100),
        (200, 100),
    ]
    assert shapes(track().draw(cut_into_slots(0, 100, 2))) == []


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50), st.integers(0, 6)), max_size=60),
       st.integers(1, 40))  # fmt: skip
def test_shapes_do_not_overlap(raw: list[tuple[int, int, int]], slots: int) -> None:
    now, made = 0, []
    for gap, dur, bucket in raw:
        made.append((now + gap, dur, bucket))
        now += gap + dur
    drawn = track(*made).draw(cut_into_slots(0, now + 100, slots))
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
    window = scene.read_window(step.start_ns, step.end_ns, WindowDetail(10_000), (0, 1, 2, 3), ())
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
    lines = view.read_window(10**15, 10**15 + 5, WindowDetail(100), (0,), (0,)).rows
    assert [len(line.drawn.start_ns) for line in lines] == [0]


@pytest.mark.parametrize("slots", [1, 7, 300])
def test_coarse_and_exact_agree_on_a_band_of_one_bucket(slots: int) -> None:
    segments = analysis().tables.segments
    alike = structs.replace(segments, bucket=np.zeros_like(segments.bucket))
    line = build_band(0, alike, Waits.build_empty())
    end = int((segments.start_ns + segments.dur_ns).max())
    drawn = line.track.draw(cut_into_slots(0, end, slots))
    assert drawn.dur_ns.sum() == end


# The window as JSON.


def slices(*events: tuple[str, str, int, int]) -> Slices:
    """Compute slices as (lane, name, start, duration), one below the other on no lane."""
    lanes = tuple(dict.fromkeys(lane for lane, *_ in events))
    names = tuple(dict.fromkeys(name for _, name, *_ in events))
    return Slices(
        lane=np.array([lanes.index(one[0]) for one in events], np.int32),
        depth=np.zeros(len(events), np.uint8),
        name=np.array([names.index(one[1]) for one in events], np.int32),
        bucket=np.full(len(events), COMPUTE, np.uint8),
        owner=np.full(len(events), -1, np.int32),
        start_ns=np.array([one[2] for one in events]), dur_ns=np.array([one[3] for one in events]),
        lanes=lanes, names=names,
    )  # fmt: skip


def segments(*rows: tuple[int, int, int, int]) -> Segments:
    """Segments as (rank, bucket, start, duration)."""
    rank, bucket, start, dur = np.array(rows, dtype=np.int64).T
    steps = np.zeros(len(rows), np.int32)
    return Segments(rank.astype(np.int32), steps, bucket.astype(np.uint8), start, dur)


def view(**own: Slices) -> TimelineView:
    """The run by hand with these slices, by r0 to r3."""
    made = analysis()
    by_rank = {int(name[1:]): one for name, one in own.items()}
    return TimelineView(made.report, structs.replace(made.tables, slices=by_rank))


def as_json(body: object) -> object:
    return orjson.loads(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))


def of_band(*rows: tuple[int, int, int, int]) -> TimelineView:
    made = analysis()
    return TimelineView(made.report, Tables(segments(*rows), made.tables.boxes))


def test_exact_slices_are_packed_as_differences_to_the_nanosecond() -> None:
    shown = of_band((0, COMPUTE, 1_000, 70), (0, IDLE, 1_070, 31), (0, SKEW, 1_102, 5))

    window = shown.read_window(990, 1_200, WindowDetail(100), (0,), ())

    assert as_json(build_window_json(window)) == {
        "from": 990, "to": 1_200, "names": [""],
        "rows": [{"rank": 0, "lane": "buckets", "depth": 0, "slots": 100, "gap": [10, 0, 1],
                  "dur": [70, 31, 5], "bucket": "063"}],
    }  # fmt: skip


def test_merged_slices_are_packed_as_a_letter_per_slot() -> None:
    short = [(0, COMPUTE, n * 10, 10) for n in range(10)]
    half = [(0, COLLECTIVE, 100 + n * 20, 10) for n in range(5)]

    window = of_band(*short, *half, (0, SKEW, 300, 100)).read_window(
        0, 400, WindowDetail(9, 8), (0,), ()
    )

    assert as_json(build_window_json(window))["rows"] == [  # type: ignore[index]
        {"rank": 0, "lane": "buckets", "depth": 0, "slots": 8, "merged": "D2GF.2P2"}
    ]


def test_closed_ranks_of_compact_rows_have_fewer_slots_than_open_ones() -> None:
    shown = view(r0=slices(("stream 7", "gemm", 0, 5)))

    rows = shown.read_window(0, 10**9, WindowDetail(200, 50), (0, 1), (0,)).rows

    assert [(row.rank, row.line.lane, len(row.drawn.edges) - 1) for row in rows] == [
        (0, "buckets", 200), (0, "stream 7", 200), (1, "buckets", 50),
    ]  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 90), st.integers(0, 6)), min_size=1,
                max_size=60), st.integers(1, 40), st.integers(1, 8))  # fmt: skip
def test_packed_exact_slices_are_the_slices(
    raw: list[tuple[int, int, int]], slots: int, least: int
) -> None:
    now, rows = 500, []
    for gap, dur, bucket in raw:
        rows.append((0, bucket, now + gap, dur))
        now += gap + dur
    window = of_band(*rows).read_window(0, now + 50, WindowDetail(slots, slots * least), (0,), ())
    (row,) = as_json(build_window_json(window))["rows"]  # type: ignore[index]
    end, unpacked = 0, []
    for gap, dur, bucket in zip(row.get("gap", []), row.get("dur", []), row.get("bucket", ""),
                                strict=True):  # fmt: skip
        unpacked.append((0, int(bucket), end + gap, dur))
        end += gap + dur
    assert set(unpacked) <= set(rows)
    assert len(unpacked) == len(rows) or "merged" in row


# Search.


def test_a_search_counts_by_rank_and_lists_the_matches_by_time() -> None:
    shown = view(
        r0=slices(("stream 7", "gemm_bf16", 30, 5), ("stream 7", "softmax", 40, 5)),
        r2=slices(("stream 7", "Gemm_fp8", 10, 3), ("stream 9", "gemm_bf16", 50, 2)),
        r3=slices(("stream 7", "softmax", 0, 1)),
    )

    found = shown.search("GEMM")

    assert as_json(build_matches_json(found, shown.read_slices, 1, 5)) == {
        "count": 3, "ranks": [[0, 1], [2, 2]], "first": 1,
        "matches": [
            {"rank": 0, "lane": "stream 7", "depth": 0, "start": 30, "dur": 5, "bucket": 0,
             "name": "gemm_bf16", "owner": -1},
            {"rank": 2, "lane": "stream 9", "depth": 0, "start": 50, "dur": 2, "bucket": 0,
             "name": "gemm_bf16", "owner": -1},
        ],
    }  # fmt: skip
    assert found.count_before(30) == 1
    assert found.narrow([2], 0, 50).start_ns.tolist() == [10]
    assert len(shown.search("conv").rank) == 0


def test_a_rank_without_a_matching_name_is_not_read_again() -> None:
    read: list[int] = []

    class Reading(dict[int, Slices]):
        def __getitem__(self, rank: int) -> Slices:
            read.append(rank)
            return super().__getitem__(rank)

    made = analysis()
    own = Reading({0: slices(("s", "gemm", 0, 1)), 1: slices(("s", "softmax", 0, 1))})
    shown = TimelineView(made.report, structs.replace(made.tables, slices=own))
    shown.search("conv")
    read.clear()

    shown.search("gem")

    assert read == [0]


def test_the_slots_of_matches_are_marked() -> None:
    edges = np.array([0, 10, 20, 30, 40])
    start, end = np.array([-5, 12, 30, 39, 90]), np.array([0, 20, 30, 45, 95])
    assert find_slots(start, end, edges).tolist() == [False, True, False, True]

    shown = view(
        r0=slices(*(("stream 7", "gemm" if n == 9 else "add", n * 10, 9) for n in range(99)))
    )
    window = shown.read_window(0, 1_000, WindowDetail(10, query="gem"), (0,), (0,))

    packed = as_json(build_window_json(window))
    assert [row.line.lane for row in window.rows] == ["buckets", "stream 7"]
    assert [row["matched"] for row in packed["rows"]] == ["#.9", "#.9"]  # type: ignore[index]


# A slice, and the name of a band's shape.


def test_a_slice_is_found_by_rank_lane_depth_and_start() -> None:
    shown = view(r1=slices(("stream 7", "gemm", 30, 5), ("stream 9", "add", 30, 6)))

    assert shown.find_slice(1, "stream 9", 0, 30) == {
        "rank": 1, "lane": "stream 9", "depth": 0, "start": 30, "dur": 6, "bucket": COMPUTE,
        "name": "add", "owner": -1,
    }  # fmt: skip
    band = shown.find_slice(1, "buckets", 0, 0)
    assert band is not None and (band["bucket"], band["dur"]) == (COMPUTE, 3_604_500)
    for place in ((1, "stream 9", 0, 31), (1, "stream 9", 1, 30), (1, "x", 0, 30),
                  (2, "stream 9", 0, 30), (1, "buckets", 0, 1)):  # fmt: skip
        assert shown.find_slice(*place) is None


def test_a_shape_is_named_by_what_takes_most_of_it() -> None:
    shown = view(r0=slices(("s", "gemm", 0, 40), ("s", "add", 40, 30), ("t", "add", 60, 30)))

    assert shown.find_name(0, COMPUTE, 0, 100) == "add"
    assert shown.find_name(0, COMPUTE, 0, 60) == "gemm"
    assert shown.find_name(0, COLLECTIVE, 0, 100) is None
    assert shown.find_name(1, COMPUTE, 0, 100) is None


# The split of a range.


def test_a_range_splits_into_the_buckets_inside_it() -> None:
    rows = segments((0, COMPUTE, 0, 100), (0, SKEW, 100, 50), (0, COMPUTE, 150, 10),
                    (0, IDLE, 170, 30), (2, COLLECTIVE, 0, 95))  # fmt: skip

    assert measure_range(rows, (0, 1, 2), 90, 180) == (
        RangeSplit(0, 80, (20, 0, 0, 50, 0, 0, 10)),
        RangeSplit(1, 0, (0, 0, 0, 0, 0, 0, 0)),
        RangeSplit(2, 5, (0, 5, 0, 0, 0, 0, 0)),
    )


@given(st.integers(0, 500_000_000), st.integers(1, 500_000_000))
def test_the_buckets_of_a_range_add_up_to_its_time_to_the_nanosecond(low: int, wide: int) -> None:
    made = analysis()
    first = min(row.start_ns for row in made.report.steps)
    last = max(row.start_ns + row.step_ns for row in made.report.steps)
    for split in measure_range(made.tables.segments, (0, 1, 2, 3), low, low + wide):
        inside = max(0, min(low + wide, last) - max(low, first))
        assert (sum(split.buckets_ns), split.covered_ns) == (inside, inside)


def test_the_kernels_of_a_range_are_those_of_all_its_ranks() -> None:
    def slices(*rows: tuple[int, int, int, int]) -> Slices:
        name, bucket, start, dur = np.array(rows, dtype=np.int64).T
        count = len(rows)
        return Slices(
            np.zeros(count, np.int32), np.zeros(count, np.uint8), name.astype(np.int32),
            bucket.astype(np.uint8), np.full(count, -1, np.int32), start, dur, ("stream 7",),
            ("gemm", "all_reduce"),
        )  # fmt: skip

    ranks = {
        0: slices((0, COMPUTE, 0, 100), (0, COMPUTE, 100, 50), (1, SKEW, 150, 30)),
        1: slices((0, COMPUTE, 90, 200), (1, COLLECTIVE, 500, 10), (1, IDLE, 120, 9)),
    }

    found = measure_names(ranks.get, (0, 1, 2), 50, 160)

    assert found == (
        NameTime("gemm", COMPUTE, 3, 50 + 50 + 70, 0, 100),
        NameTime("all_reduce", SKEW, 1, 10, 0, 10),
    )


def test_a_step_measured_as_a_range_is_its_row_in_the_report() -> None:
    made = analysis()
    row = next(row for row in made.report.steps if (row.rank, row.step) == (2, 5))
    (split,) = measure_range(made.tables.segments, (2,), row.start_ns, row.start_ns + row.step_ns)
    assert split.buckets_ns == row.split.buckets_ns


# Groups of ranks.


def members(grouping: RankGrouping) -> dict[str, tuple[int, ...]]:
    return {group.label: group.ranks for group in grouping.groups}


def test_ranks_are_grouped_by_stage_host_and_mesh_axis() -> None:
    report = analysis().report
    stages, hosts = {0: 0, 1: 0, 2: 1, 3: None}, {0: "n2", 1: "n2", 2: "n10", 3: None}

    made = {one.by: members(one) for one in list_groupings(report, stages, hosts)}

    assert made == {
        "stage": {"stage 0": (0, 1), "stage 1": (2, 3)},  # of rank 3: by the mesh
        "host": {"n2": (0, 1), "n10": (2,), "other ranks": (3,)},
        "pp": {"pp group 0": (0, 2), "pp group 1": (1, 3)},
        "tp": {"tp group 0": (0, 1), "tp group 1": (2, 3)},
    }
    hosts_by_rank = next(one for one in list_groupings(report, stages, hosts) if one.by == "host")
    assert [group.label for group in hosts_by_rank.groups] == ["n2", "n10", "other ranks"]


def test_without_a_mesh_ranks_are_grouped_by_the_recorded_groups() -> None:
    report = analysis().report
    report = msgspec.structs.replace(report, run=msgspec.structs.replace(report.run, mesh=None))
    alike = dict.fromkeys(range(4), "node01")

    made = {one.by: members(one) for one in list_groupings(report, dict.fromkeys(range(4)), alike)}

    assert made == {
        "tp": {"tp group 0": (0, 1), "tp group 1": (2, 3)},
        "pp": {"pp group 0": (0, 2), "other ranks": (1, 3)},
    }


def test_slices_are_read_once_as_long_as_they_fit() -> None:
    one = slices(("stream 7", "gemm", 0, 5), ("stream 7", "norm", 9, 5))
    asked: list[int] = []

    class OnDisk(dict[int, Slices]):
        def get(self, rank: int, default: Slices | None = None) -> Slices | None:  # type: ignore[override]
            asked.append(rank)
            return super().get(rank, default)

    columns = (one.lane, one.depth, one.name, one.bucket, one.owner, one.start_ns, one.dur_ns)
    size = sum(column.nbytes for column in columns)
    kept = KeptSlices(OnDisk(dict.fromkeys(range(4), one)), most_bytes=3 * size)
    for rank in (0, 1, 2, 0, 1, 2, 9):
        assert (kept.read(rank) is one) == (rank < 9)
    assert asked == [0, 1, 2, 9]
    kept.read(3)  # 0 was asked for longest ago
    assert [kept.read(rank) is one for rank in (1, 2, 3)] == [True] * 3
    assert asked == [0, 1, 2, 9, 3]
    kept.read(0)
    assert asked[-1] == 0
