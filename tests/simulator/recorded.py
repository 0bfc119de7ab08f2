"""What of a run is left in a recording that lacks some of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace

from simulator.noise import number_of
from simulator.program import Collective, Compute, Messages
from simulator.ran import Ran, RankRun, Run
from simulator.style import Style
from simulator.truth import truth_of

_CUT_CALLS = 5
_LOST_OF = 50


def recorded(run: Run, style: Style, seed: int) -> Run:
    """The run as far as a recording of that style holds it; its truth is the truth of what is left.

    A kernel whose launch is cut away has a negative launch. Steps are kept under "no_steps", where
    only their annotations are missing.
    """
    ranks = enumerate(run.ranks)
    if style.missing == "cut_windows":
        return replace(run, ranks=tuple(_cut(rank, seed, number) for number, rank in ranks))
    if style.missing == "lost_events":
        return replace(run, ranks=tuple(_thinned(rank, seed, number) for number, rank in ranks))
    return run


def whole_steps(run: Run, style: Style, seed: int) -> frozenset[tuple[int, int]]:
    """(rank, step) of the full steps about which the recording holds the whole truth."""
    left = set(truth_of(recorded(run, style, seed)).splits)
    whole = [split for split in truth_of(run).splits if split in left and not split.partial]
    return frozenset((split.rank, split.step) for split in whole)


def _cut(rank: RankRun, seed: int, number: int) -> RankRun:
    """What begins and ends between two of the rank's communication kernels."""
    calls = [ran for ran in rank.device if isinstance(ran.work, Collective | Messages)]
    first, last = (_cut_calls(seed, side, number, len(calls)) for side in ("begin", "end"))
    if not first:
        return rank
    begin_ns = sorted(ran.end_ns for ran in calls)[first - 1]
    end_ns = sorted(ran.start_ns for ran in calls)[-last]

    def within(start_ns: int, until_ns: int) -> bool:
        return begin_ns <= start_ns and until_ns <= end_ns

    kept = [at for at, call in enumerate(rank.host) if within(call.start_ns, call.end_ns)]
    device = tuple(ran for ran in rank.device if within(ran.start_ns, ran.end_ns))
    marks = tuple(mark for mark in rank.marks if within(mark.start_ns, mark.end_ns))
    return _with_calls(RankRun(rank.host, device, marks), kept)


def _cut_calls(seed: int, side: str, number: int, calls: int) -> int:
    """Before or behind how many calls a rank is cut, so that half of them are left."""
    return min(1 + number_of(seed, side, number) % _CUT_CALLS, calls // 4)


def _thinned(rank: RankRun, seed: int, number: int) -> RankRun:
    """Without some of the kernels that compute, and without the launches of nothing else."""
    device = tuple(ran for at, ran in enumerate(rank.device) if not _is_lost(ran, seed, number, at))
    gone = {ran.launch for ran in rank.device} - {ran.launch for ran in device}
    kept = [at for at in range(len(rank.host)) if at not in gone]
    return _with_calls(RankRun(rank.host, device, rank.marks), kept)


def _is_lost(ran: Ran, seed: int, number: int, at: int) -> bool:
    computes = isinstance(ran.work, Compute)
    return computes and number_of(seed, "lost", number, at) % _LOST_OF == 0


def _with_calls(rank: RankRun, kept: Iterable[int]) -> RankRun:
    """The rank with these of its host's calls; all that points at them points at them still."""
    kept = list(kept)
    now = {before: after for after, before in enumerate(kept)}
    return RankRun(
        tuple(rank.host[at] for at in kept),
        tuple(replace(ran, launch=now.get(ran.launch, -1 - ran.launch)) for ran in rank.device),
        tuple(
            replace(
                mark,
                first_call=bisect_left(kept, mark.first_call),
                after_call=bisect_left(kept, mark.after_call),
            )
            for mark in rank.marks
        ),
    )
