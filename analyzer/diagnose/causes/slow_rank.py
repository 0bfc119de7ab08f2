"""Slow ranks: devices slower than their peers in the same kernels, always or at times."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy, replay_remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.graph.replay import Change, scale_work
from stepsplit.analyzer.diagnose.slow_kernels import sum_slow_ranks
from stepsplit.analyzer.report.report import EventRef
from stepsplit.analyzer.report.work_rows import WORK_NOUNS
from stepsplit.analyzer.trace import Bool, Float, KnownWork
from stepsplit.collectors.formats.rank_record import RankRecord

_FAMILY_NAMES = {"gemm": "GEMM"}

_EQUAL = {
    "shapes": " at equal shapes",
    "grids": " at equal grids (no shapes recorded)",
    "": ", unless its inputs are larger (no shapes recorded)",
}
"""What is known of the kernels that are compared. A persistent kernel has the same grid for larger
inputs."""

_STEADY = 1.05
"""A slowdown that grows or shrinks by more than this factor over the steps is said with both."""


def find_slow_ranks(context: CauseContext) -> Iterator[Remedy]:
    """Find the ranks that are slow in most steps; their gain is that at the speed of their peers.
    Then those that are slow in some steps."""
    pace = context.peer_speed
    of_row = context.graph.steps.rank
    slow = np.unique(of_row[(pace < 1) & context.counted]).tolist()
    families = {one.rank: one for one in reversed(sum_slow_ranks(context.slow_kernels))}
    for index in slow:
        rank, mine = int(context.ranks[index]), of_row == index
        events: tuple[EventRef, ...] = ()
        law = context.law
        if law is not None and index in law.slow:
            noun = WORK_NOUNS[law.summary.unit]
            what = f"it computes {law.slow[index]:.2f}x as long as its peers"
            equal: KnownWork = "shapes"
            at_equal = f" for as many {noun}, by all its steps"
        elif rank in families:
            kernels = families[rank]
            trace = context.split.ranks[index].trace
            rows = np.flatnonzero(trace.events.match_prefix(kernels.kernel))
            longest = rows[np.argsort(-trace.events.dur_ns[rows], kind="stable")][:3]
            events = tuple(context.make_event_ref(index, row) for row in longest.tolist())
            family = _FAMILY_NAMES.get(kernels.family, kernels.family)
            what = f"its {family} kernels are {kernels.ratio:.2f}x slower than on its peers"
            equal, at_equal = kernels.equal, _EQUAL[kernels.equal]
        else:
            ratio = 1 / float(np.mean(pace[mine & context.counted]))
            what = f"as many kernels take {ratio:.2f}x as long as on its peers"
            equal = context.split.ranks[index].trace.shapes.known_work
            at_equal = _EQUAL[equal]
        # A device that heats up is slower in the last step than in the first.
        growth, rows = "", np.flatnonzero(mine & context.counted)
        if len(rows) > 1:
            steps = context.graph.steps.step[rows]
            first, last = pace[rows[steps.argmin()]], pace[rows[steps.argmax()]]
            if max(first, last) >= _STEADY * min(first, last):
                growth = f", {1 / first:.2f}x in step {steps.min()}"
                growth += f" and {1 / last:.2f}x in step {steps.max()}"
        own_pace = np.where(mine, pace, 1.0)
        yield _speed_up(
            context,
            index,
            partial(scale_work, work="compute", times=own_pace),
            own_pace,
            mine,
            events,
            f"rank {rank} is a straggler: {what}{at_equal}{growth}",
            equal,
        )
    for one in context.unusual_steps:
        if not one.equal_work or one.index in slow:
            continue
        rank = int(context.ranks[one.index])
        named = units.format_number_list(context.list_steps(one.rows))
        equal = context.split.ranks[one.index].trace.shapes.known_work
        yield _speed_up(
            context,
            one.index,
            one.restore,
            one.pace,
            one.rows,
            one.longest,
            f"rank {rank} is a straggler in {int(one.rows.sum())} of {one.steps} steps ({named}): "
            f"as many kernels take {one.ratio:.2f}x as long there as in its other steps"
            f"{_EQUAL[equal]}",
            equal,
            names_steps=True,
        )


def _speed_up(
    context: CauseContext,
    index: int,
    change: Change,
    pace: Float,
    slow: Bool,
    events: tuple[EventRef, ...],
    message: str,
    equal: KnownWork,
    *,
    names_steps: bool = False,
) -> Remedy:
    """The remedy for a rank whose compute takes longer than it should in its slow steps, and what
    of it is known to be equal in others.

    pace is the time that it should take over that it takes, pace and slow have an element for each
    row of the steps.
    """
    rank = int(context.ranks[index])
    compute_ns, counted = context.select_bucket_ns("compute"), slow & context.counted
    gpu_state = _describe_gpu(context.records, rank)
    return replay_remedy(
        context,
        change,
        bucket="compute",
        measured_ns=compute_ns[counted].mean(),
        predicted_ns=(compute_ns * pace)[counted].mean(),
        rows=slow,
        message=message + (f"; {gpu_state}" if gpu_state else ""),
        ranks=(rank,),
        events=events,
        would_settle=() if equal == "shapes" else ("shapes",),
        is_doubtful=not equal,
        names_steps=names_steps,
    )


# The state of a straggler's GPU during the recording: SM clock and throttling.

_LOW_CLOCK_RATIO = 0.97
"""A clock below this fraction of the median rank's clock is reported."""

_THROTTLE_REASONS = (
    (0x0004, "power cap"),
    (0x0008, "hardware slowdown"),
    (0x0010, "sync boost"),
    (0x0020, "thermal slowdown by software"),
    (0x0040, "thermal slowdown by hardware"),
    (0x0080, "power brake"),
)
"""Bits of nvmlClocksEventReasons (nvml.h) that slow a busy device down."""


def _describe_gpu(records: tuple[RankRecord, ...], rank: int) -> str:
    """The rank's SM clock compared with the median rank and its throttle reasons; "" if normal."""
    clocks = {
        one.rank.rank: median(read)
        for one in records
        if (read := [state.sm_clock_mhz for state in one.gpu if state.sm_clock_mhz is not None])
    }
    words = []
    usual = median(clocks.values()) if clocks else 0.0
    if rank in clocks and clocks[rank] < _LOW_CLOCK_RATIO * usual:
        words.append(f"SM clock {clocks[rank]:,.0f} MHz (median rank: {usual:,.0f} MHz)")
    own = [one for one in records if one.rank.rank == rank]
    bits = 0
    for state in (state for record in own for state in record.gpu):
        bits |= state.throttle_reasons or 0
    reasons = [name for bit, name in _THROTTLE_REASONS if bits & bit]
    if reasons:
        words.append(f"throttled: {', '.join(reasons)}")
    notes = [one.gpu_note for one in own if one.gpu_note]
    if notes:
        words.append(notes[0] if rank in clocks else f"SM clock unknown: {notes[0]}")
    return "; ".join(words)


SLOW_RANK = CauseEntry(
    "slow_rank", find_slow_ranks, basis="measured", as_set="stragglers", of_peers=True
)
