"""Gloo calls that a rank leaves open, completed from a peer: a reduced recording has no dump."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from support.builders import CpuTrace
from support.required import shared_repro
from support.splitting import recording_of

from stepsplit.analyzer import analyze
from stepsplit.analyzer.readers.kineto.calls import Range, are_interchangeable, note_open_calls
from stepsplit.analyzer.readers.open_calls import complete_open_calls
from stepsplit.analyzer.trace import OP_CODE, RankTrace

PAIR = [("0", "default_pg", [0, 1])]
WORKER_A, WORKER_B = 101, 102


def bucket_and_bitmap(folder: Path, *, short: float = 0) -> list[RankTrace]:
    """DDP's last bucket and its bitmap of used parameters: launched together, on both workers of
    rank 0 until rank 1 comes. The bitmap may end so much earlier."""
    for rank, end in ((0, 900), (1, 905)):
        trace = CpuTrace(rank, 2, PAIR).step(2, 0, 2_000).op("aten::mm", 0, 10)
        trace.all_reduce(10, 12, 40, group="0", seq=0, tid=WORKER_A, nelems=90_000)
        begin = 100 + 700 * rank
        trace.all_reduce(begin, begin + 8, end, group="0", seq=1, tid=WORKER_A, nelems=50_000)
        trace.all_reduce(begin + 2, begin + 12, end - short, group="0", seq=2, tid=WORKER_B,
                         nelems=50)  # fmt: skip
        trace.op("aten::mm", 950, 960).write(folder)
    return list(recording_of(folder).traces)


@pytest.mark.parametrize("short", [0, 60])
def test_the_bucket_and_the_bitmap_are_known_where_both_are_recorded(
    tmp_path: Path, short: float
) -> None:
    for trace in bucket_and_bitmap(tmp_path, short=short):
        assert trace.calls.seq.tolist() == [0, 1, 2]
        assert not trace.notes


def leave_open(trace: RankTrace, *rows: int) -> RankTrace:
    """The trace as a reduction that knew less has it."""
    calls = trace.calls
    is_open = np.isin(np.arange(len(calls)), rows)
    names = ("issued_ns", "group_id", "seq", "input_bytes", "message_bytes")
    unknown = {name: np.where(is_open, -1, getattr(calls, name)) for name in names}
    notes = note_open_calls(len(rows))
    return replace(trace, calls=replace(calls, **unknown), notes=notes)


def test_a_peer_completes_what_is_open_in_the_order_of_starts(tmp_path: Path) -> None:
    whole, peer = bucket_and_bitmap(tmp_path)
    completed, same = complete_open_calls([leave_open(whole, 1, 2), peer])
    assert same is peer
    assert completed.notes == ()
    for name in ("group_id", "seq", "input_bytes", "message_bytes"):
        assert getattr(completed.calls, name).tolist() == getattr(whole.calls, name).tolist()
    late_ns = whole.calls.issued_ns - completed.calls.issued_ns
    assert late_ns.tolist() == [0, 500, 500]  # of the op's start, half a microsecond earlier


def test_a_peer_knows_that_what_ran_as_an_all_reduce_was_a_reduce_scatter(tmp_path: Path) -> None:
    whole, peer = bucket_and_bitmap(tmp_path)
    scatter = np.where(peer.calls.seq == 1, OP_CODE["reduce_scatter"], peer.calls.op)
    scattered = replace(peer, calls=replace(peer.calls, op=scatter.astype(peer.calls.op.dtype)))
    completed, _ = complete_open_calls([leave_open(whole, 1, 2), scattered])
    assert completed.notes == ()
    assert completed.calls.op.tolist() == scatter.tolist()


def test_without_a_peer_that_knows_they_stay_open(tmp_path: Path) -> None:
    whole, peer = bucket_and_bitmap(tmp_path)
    left = leave_open(whole, 1, 2)
    assert complete_open_calls([left])[0].notes == left.notes
    assert complete_open_calls([left, leave_open(peer, 1, 2)])[0].calls.seq.tolist() == [0, -1, -1]


@pytest.mark.parametrize(
    ("spans", "sizes", "is_known"),
    [
        (((0, 1_000), (50, 1_050)), (1_000_000, 200), True),  # the same time, whatever they are
        (((0, 1_000), (50, 1_050)), (200, 1_000_000), True),
        (((0, 1_000), (50, 400)), (1_000_000, 200), True),  # the small one ends first
        (((0, 1_000), (50, 400)), (200, 1_000_000), False),  # the large one would end first
        (((0, 1_000), (50, 400)), (1_000_000, 200_000), False),
        (((0, 1_000), (50, 400)), (1_000_000, -1), False),
    ],
)
def test_which_of_two_ranges_is_which_call(
    spans: tuple[tuple[int, int], ...], sizes: tuple[int, ...], is_known: bool
) -> None:
    ranges = [Range(i, "", 10_000 * begin, 10_000 * end) for i, (begin, end) in enumerate(spans)]
    assert are_interchangeable(ranges, sizes) is is_known


def test_a_recorded_job_with_find_unused_parameters() -> None:
    report = analyze(shared_repro("users3/find_unused") / "red")
    assert all(row.group >= 0 for row in report.collectives)
    assert {row.code for row in report.warnings}.isdisjoint({"gloo_order_unknown", "unmatched"})
