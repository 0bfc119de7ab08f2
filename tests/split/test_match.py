"""Matching of calls across ranks: with and without sequence numbers, and with lost calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.builders import BASE_NS, GpuTrace
from support.splitting import recording_of

from stepsplit.analyzer.split.matching import MatchedCalls, match
from stepsplit.analyzer.split.sequence_pairing import (
    CallSequence,
    pair_sequences,
    subtract_paired_ends,
)

PAIR = [("0", "", [0, 1])]


US = 1_000


def sequence(sizes: list[int], ends: list[int]) -> CallSequence:
    return CallSequence(
        np.array(sizes, dtype=np.int64)[:, np.newaxis], np.array(ends, dtype=np.int64)
    )


def matched(tmp_path: Path, *traces: GpuTrace) -> MatchedCalls:
    for trace in traces:
        trace.write(tmp_path)
    return match(recording_of(tmp_path).traces)


def test_shifted_recordings_are_paired_by_a_constant_clock_offset() -> None:
    """All calls are alike; only under a shift by two are the ends apart by one offset."""
    ends = [0, 100_000, 290_000, 310_000, 570_000, 660_000, 900_000, 950_000]
    there = sequence([8] * 8, ends)
    here = sequence([8] * 6, [end + 33_000_000 for end in ends[2:]])
    found = pair_sequences(here, there, one_clock=False)
    assert (found.place.tolist(), found.ambiguous) == ([2, 3, 4, 5, 6, 7], False)


def test_a_pairing_that_times_cannot_decide_is_ambiguous() -> None:
    even = [100_000 * n for n in range(8)]
    found = pair_sequences(sequence([8] * 6, even[:6]), sequence([8] * 8, even), one_clock=False)
    assert (found.place.tolist(), found.ambiguous) == ([0, 1, 2, 3, 4, 5], True)


def test_late_ends_on_a_busy_machine_shift_no_calls() -> None:
    """Three steps of a real job over gloo, in us: the second rank ends its calls 7, 4 and 0 ms
    earlier than the first, and its next calls 0.6 and 4 ms after the first's last ones."""
    here = sequence([8] * 3, [US * end for end in (548_696, 556_414, 564_509)])
    there = sequence([8] * 3, [US * end for end in (555_797, 560_168, 564_560)])
    assert pair_sequences(here, there, one_clock=True).place.tolist() == [0, 1, 2]


def test_on_one_clock_shifted_recordings_are_paired_by_time() -> None:
    here = sequence([8] * 3, [US * end for end in (2_000, 3_000, 4_000)])
    there = sequence([8] * 3, [US * end for end in (1_010, 2_010, 3_010)])
    assert pair_sequences(here, there, one_clock=True).place.tolist() == [1, 2, -1]


def test_a_lost_call_leaves_the_others_in_their_places() -> None:
    sizes = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    ends = [100 * size for size in sizes]
    lost = sequence(sizes[:4] + sizes[5:], ends[:4] + ends[5:])
    found = pair_sequences(lost, sequence(sizes, ends), one_clock=True)
    assert found.place.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]


def test_calls_of_a_damaged_recording_are_paired_by_the_others() -> None:
    """Three of forty ends are 0, fifty years too early: the other calls pair as they end."""
    even = [BASE_NS + 1_000_000 * call for call in range(40)]
    damaged = [0 if call in (3, 9, 20) else end for call, end in enumerate(even)]
    apart_ns = subtract_paired_ends(
        sequence([8] * 40, damaged), sequence([8] * 40, [end + 5 for end in even])
    )
    reference = subtract_by_shift(sequence([8] * 40, damaged), sequence([8] * 40, even))
    assert apart_ns.tolist() == [one - 5 for one in reference]


def subtract_by_shift(first: CallSequence, second: CallSequence) -> list[int]:
    """The differences of ends of calls of one kind that scatter least, shift by shift."""
    found = []
    for shift in range(-64, 65):
        rows = [row for row in range(len(first)) if 0 <= row + shift < len(second)]
        if len(rows) >= 4 and 2 * len(rows) >= min(len(first), len(second)):
            there = [row + shift for row in rows]
            if (first.kind[rows] == second.kind[there]).all():
                found.append(first.end_ns[rows] - second.end_ns[there])
    scatter = [np.abs(one - np.median(one)).mean() for one in found]
    return found[int(np.argmin(scatter))].tolist() if found else []


@pytest.mark.parametrize("calls", [5, 30, 90, 499, 501, 1_200])
@pytest.mark.parametrize("kinds", [1, 3])
def test_ends_of_short_and_long_sequences_are_subtracted_alike(calls: int, kinds: int) -> None:
    """The second recording begins some calls later, on another clock, and lacks the last ones."""
    for seed in range(8):
        rng = np.random.default_rng([seed, calls, kinds])
        end_ns = np.sort(rng.integers(0, 10**9, calls)).astype(np.int64)
        kind = (np.arange(calls, dtype=np.int64) % kinds)[:, np.newaxis]
        lost = slice(int(rng.integers(0, 3)), calls - int(rng.integers(0, 2)))
        later_ns = int(rng.integers(-(10**9), 10**9)) + rng.integers(-20, 20, calls)
        first, second = (
            CallSequence(kind, end_ns),
            CallSequence(kind[lost], (end_ns + later_ns)[lost]),
        )
        assert subtract_paired_ends(first, second).tolist() == subtract_by_shift(first, second)


def test_groups_of_one_name_and_different_ranks_are_different_groups(tmp_path: Path) -> None:
    traces = []
    for rank in range(4):
        mates = [rank // 2 * 2, rank // 2 * 2 + 1]
        trace = GpuTrace(rank, 4, groups=[("tp", "", mates)])
        traces.append(trace.all_reduce(10, 20, group="tp", Seq=1))
    found = matched(tmp_path, *traces)
    assert found.key[0] == found.key[1] != found.key[2] == found.key[3]


def test_a_call_with_a_missing_member_is_shared_but_not_complete(tmp_path: Path) -> None:
    trio = [("0", "", [0, 1, 2])]
    traces = [GpuTrace(rank, 3, groups=trio).all_reduce(10, 20, Seq=1) for rank in range(2)]
    found = matched(tmp_path, *traces)
    assert (found.key.tolist(), found.shared[0] == found.shared[1] >= 0) == ([-1, -1], True)


def test_members_that_disagree_about_the_size_made_different_calls(tmp_path: Path) -> None:
    one = GpuTrace(0, 2, groups=PAIR).all_reduce(10, 20, Seq=1, nelems=1000)
    other = GpuTrace(1, 2, groups=PAIR).all_reduce(10, 20, Seq=1, nelems=1001)
    assert matched(tmp_path, one, other).shared.tolist() == [-1, -1]


@pytest.mark.parametrize("posted", [11, 15.5])
def test_the_messages_of_a_batch_are_those_posted_before_its_launch(
    tmp_path: Path, posted: float
) -> None:
    """Two posts, then one kernel without arguments: a send and a receive in one kernel. By a small
    error of its end the last post may seem to contain the launch at 15."""
    stages = [("3", "mesh_pp", [0, 1])]
    traces = []
    for rank, first in ((0, "send"), (1, "recv")):
        trace = GpuTrace(rank, 2, groups=stages)
        trace.all_reduce(1, 2, group="3", Seq=1)
        for op in (first, {"send": "recv", "recv": "send"}[first]):
            trace.post(op, 1 - rank, 10, posted, group="3")
        trace.kernel("ncclDevKernel_SendRecv", 20, 40, launched=15, stream=20)
        traces.append(trace)
    found = matched(tmp_path, *traces)
    messages = found.is_message
    assert found.key[messages].tolist().count(found.key[messages][0]) == 2
    assert len(set(found.key[messages].tolist())) == 2
    assert (found.key[messages] >= 0).all()


def test_a_replayed_graph_pairs_its_calls_though_one_window_lacks_a_replay(tmp_path: Path) -> None:
    """Captured calls repeat their numbers: the second rank's window begins one replay later."""
    ends = [100, 230, 310, 480, 590, 730]
    traces = []
    for rank, skipped in ((0, 0), (1, 1)):
        trace = GpuTrace(rank, 2, f"host{rank}", BASE_NS + rank * 10**9, groups=PAIR)
        for end in ends[skipped:]:
            trace.all_reduce(1000 * end - 50, 1000 * end, Seq=7)
            trace.all_reduce(1000 * end + 10, 1000 * end + 40, Seq=8)
        traces.append(trace)
    found = matched(tmp_path, *traces)
    first, second = found.shared[found.trace == 0], found.shared[found.trace == 1]
    assert first[2:].tolist() == second.tolist()


def test_exchanges_of_which_each_rank_sends_another_amount_are_paired_in_order(
    tmp_path: Path,
) -> None:
    """Without sequence numbers; the amounts of one rank are those of the other one call later."""
    traces = []
    for rank in (0, 1):
        trace = GpuTrace(rank, 2, groups=PAIR)
        for call in range(4):
            at = 100 * call
            trace.collective("AllToAll", "all_to_allv", at, at + 20, nelems=10 * (call + rank) + 10)
        traces.append(trace)
    found = matched(tmp_path, *traces)
    assert found.key[:4].tolist() == found.key[4:].tolist() and (found.key >= 0).all()


def test_messages_of_two_communicators_are_paired_by_stream(tmp_path: Path) -> None:
    """Activations and gradients go the same way, on a stream each, as in a V of stages: rank 0
    sends the activations of a microbatch first, rank 1 takes its gradients first."""
    sender, receiver = (GpuTrace(rank, 2, groups=PAIR).kernel("gemm", 0, 5) for rank in (0, 1))
    for at in (0, 310, 650, 940, 1300):
        sender.message("send", 1, at + 10, at + 200, stream=20)
        sender.message("send", 1, at + 20, at + 100, stream=21)
        receiver.message("recv", 0, at + 60, at + 100, stream=31)
        receiver.message("recv", 0, at + 160, at + 200, stream=30)
    found = matched(tmp_path, sender, receiver)
    ends: dict[int, set[int]] = {}
    for key, end in zip(found.key.tolist(), found.end_ns.tolist(), strict=True):
        ends.setdefault(key, set()).add(end)
    assert len(ends) == 10 and min(ends) >= 0
    assert all(len(both) == 1 for both in ends.values())


@pytest.mark.parametrize(("near", "waits"), [(2, False), (1, True)])
def test_a_dispatch_waits_for_members_beyond_the_reach_of_its_barriers(
    near: int, waits: bool, tmp_path: Path
) -> None:
    """HybridEP's kernels poll for what ranks of other NVLink domains send over the network; those
    of their own domain have met in the barriers around them, which state how many these are."""
    sync, dispatch = f"void hybrid_ep::device_sync_kernel<{near}>", "hybrid_ep::dispatch_kernel<16>"

    def record(rank: int) -> GpuTrace:
        trace = GpuTrace(rank, 2, groups=PAIR).step(1, 0, 100)
        for name, start, end in ((sync, 10, 12), (dispatch, 12 + 3 * rank, 40), (sync, 40, 42)):
            trace.kernel(name, start, end, **trace._described("all_to_all", "0", 1000))
        return trace

    found = matched(tmp_path, record(0), record(1))
    assert found.waits.tolist() == [True, waits, True] * 2
