"""Slow ranks: devices slower than their peers in the same kernels, always or at times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median

import numpy as np

from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy, replay_remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.graph.dependency_graph import DependencyGraph
from stepsplit.analyzer.diagnose.graph.replay import ReplayContext, scale_work
from stepsplit.analyzer.diagnose.slow_kernels import sum_slow_ranks
from stepsplit.analyzer.report.report import EventRef
from stepsplit.analyzer.significance import SIGMA_OF_MAD
from stepsplit.analyzer.split.kernels import collect_compute, find_kernel_work
from stepsplit.analyzer.trace import Bool, Float, Int64
from stepsplit.collectors.formats.rank_record import RankRecord

_FAMILY_NAMES = {"gemm": "GEMM"}

_MIN_STEPS = 3
"""Of fewer steps, none is compared with the rank's others."""

_SLOW_STEP_RATIO, _SLOW_STEP_SIGMAS = 0.05, 6.0
"""In a slow step a rank's compute exceeds its usual one by this fraction, and by so many standard
deviations of all ranks and steps."""

_MAX_MORE_KERNELS = 0.02
"""As many kernels: at most this fraction more, or of other kinds."""


def find_slow_ranks(context: CauseContext) -> Iterator[Remedy]:
    """Find the ranks that are slow in most steps; their gain is that at the speed of their peers.
    Then those that are slow now and then."""
    pace = compute_peer_speed_ratio(context)
    slow = {int(context.ranks[index]) for index in context.graph.steps.rank[pace < 1].tolist()}
    for rank in sorted(slow):
        mine = context.ranks[context.graph.steps.rank] == rank
        kernels = next(one for one in sum_slow_ranks(context.slow_kernels) if one.rank == rank)
        doubt = "" if kernels.same_work else ", unless its inputs are larger (no shapes recorded)"
        index = int(np.flatnonzero(context.ranks == rank)[0])
        events = context.split.ranks[index].trace.events
        rows = np.flatnonzero(events.match_prefix(kernels.kernel))
        longest = rows[np.argsort(-events.dur_ns[rows], kind="stable")][:3]
        yield _speed_up(
            context,
            rank,
            np.where(mine, pace, 1.0),
            mine,
            tuple(context.make_event_ref(index, row) for row in longest.tolist()),
            f"rank {rank} is a straggler: its {_FAMILY_NAMES.get(kernels.family, kernels.family)} "
            f"kernels are {kernels.ratio:.2f}x slower than on its peers{doubt}",
        )
    yield from _find_intermittent(context, slow)


def compute_peer_speed_ratio(context: ReplayContext) -> Float:
    """For each row, its compute time at the speed of its peers as a ratio of the measured time.

    A slowdown shared by all ranks of a stage counts as work of the stage, not as slow devices.
    """
    lost: dict[int, int] = defaultdict(int)
    for one in context.slow_kernels:
        lost[one.rank] += one.lost_ns
    lost_ns = np.array([lost[rank] for rank in context.ranks.tolist()], dtype=np.int64)
    # The mean compute of each rank over the counted steps.
    compute, of_row, counted = (
        context.select_bucket_ns("compute"), context.graph.steps.rank, context.counted,
    )  # fmt: skip
    count = np.bincount(of_row[counted], minlength=len(context.ranks))
    total = np.bincount(of_row[counted], compute[counted], minlength=len(context.ranks))
    share = lost_ns[of_row] / np.maximum(total / np.maximum(count, 1), 1.0)[of_row]
    for stage in np.unique(context.stage).tolist():
        mine = context.stage == stage
        if len(np.unique(of_row[mine])) > 1:
            share[mine] -= share[mine].min()
    return np.clip(1 - share, 0.0, 1.0)


def _speed_up(
    context: CauseContext,
    rank: int,
    pace: Float,
    slow: Bool,
    events: tuple[EventRef, ...],
    message: str,
) -> Remedy:
    """The remedy for a rank whose compute takes longer than it should in its slow steps.

    pace is the time that it should take over that it takes, pace and slow have an element for each
    rank and step.
    """

    def speed_up(graph: DependencyGraph) -> DependencyGraph:
        return scale_work(graph, "compute", pace)

    compute_ns, counted = context.select_bucket_ns("compute"), slow & context.counted
    gpu_state = _describe_gpu(context.records, rank)
    return replay_remedy(
        context,
        speed_up,
        bucket="compute",
        measured_ns=compute_ns[counted].mean(),
        predicted_ns=(compute_ns * pace)[counted].mean(),
        rows=slow,
        message=message + (f"; {gpu_state}" if gpu_state else ""),
        ranks=(rank,),
        events=events,
    )


def _find_intermittent(context: CauseContext, known: set[int]) -> Iterator[Remedy]:
    """Find each GPU that takes longer for as many kernels in fewer than half of its steps, such as
    one that is throttled now and then; known ones are slow in most steps."""
    beyond = _measure_beyond_usual(context)
    steps = beyond.shape[1]
    if len(beyond) < 2 or steps < _MIN_STEPS or not context.split.ranks[0].trace.on_device:
        return
    sigma = SIGMA_OF_MAD * float(np.nanmedian(np.abs(beyond)))
    slow = beyond > max(_SLOW_STEP_RATIO, _SLOW_STEP_SIGMAS * sigma)
    for index in np.flatnonzero(slow.any(axis=1)).tolist():
        rank, own = int(context.ranks[index]), slow[index]
        if rank in known or 2 * int(own.sum()) >= steps or not _has_equal_work(context, index, own):
            continue
        rows, place = _number_counted_steps(context)
        mine = (context.graph.steps.rank[rows] == index) & own[place]
        pace = np.ones(len(context.graph.steps.rank))
        pace[rows[mine]] = 1 / (1 + beyond[index][place[mine]])
        compute_ns = context.select_bucket_ns("compute")[rows[mine]]
        ratio = float(compute_ns.sum() / (compute_ns * pace[rows[mine]]).sum())
        has_shapes = len(context.split.ranks[index].trace.shapes) > 0
        doubt = "" if has_shapes else ", unless its inputs are larger there (no shapes recorded)"
        yield _speed_up(
            context,
            rank,
            pace,
            pace < 1,
            (),
            f"rank {rank} is a straggler in {int(own.sum())} of {len(own)} steps: as many "
            f"kernels take {ratio:.2f}x as long there as in its other steps{doubt}",
        )


def _number_counted_steps(context: CauseContext) -> tuple[Int64, Int64]:
    """(the rows that count, the place of the step of each among all steps)."""
    rows = np.flatnonzero(context.counted)
    return rows, np.unique(context.graph.steps.step[rows], return_inverse=True)[1]


def _measure_beyond_usual(context: CauseContext) -> Float:
    """By how much each rank's compute exceeds that of its median step in each step, as a fraction,
    without what the median rank has in the same step; shape (ranks, steps), nan if not counted."""
    rows, place = _number_counted_steps(context)
    compute = np.full((len(context.ranks), int(place.max(initial=-1)) + 1), np.nan)
    compute[context.graph.steps.rank[rows], place] = context.select_bucket_ns("compute")[rows]
    compute = np.where(compute > 0, compute, np.nan)
    if np.isnan(compute).all(axis=1).any() or np.isnan(compute).all(axis=0).any():
        return np.zeros((0, 0))
    beyond = compute / np.nanmedian(compute, axis=1, keepdims=True) - 1
    # Of two ranks, the one that exceeds its usual step by less.
    return np.asarray(beyond - np.nanquantile(beyond, 0.5, axis=0, method="lower"))


def _has_equal_work(context: CauseContext, index: int, slow: Bool) -> bool:
    """Whether a rank runs in these steps no more kernels than in its others, nor other ones, by
    name and, where they are recorded, shapes."""
    rank = context.split.ranks[index]
    compute = collect_compute(rank.trace, rank.windows)
    if len(compute.steps) != len(slow):
        return False
    place = np.searchsorted(compute.steps, compute.step)
    count = np.bincount(place, minlength=len(slow))
    _, kind = find_kernel_work(rank.trace, compute.row)
    is_new = ~np.isin(kind[slow[place]], kind[~slow[place]])
    more = count[slow].max() / max(float(np.median(count[~slow])), 1.0)
    return bool(more <= 1 + _MAX_MORE_KERNELS and is_new.mean() <= _MAX_MORE_KERNELS)


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


SLOW_RANK = CauseEntry("slow_rank", find_slow_ranks, as_set="stragglers")
