"""The step of a pipeline under another schedule, or with another number of microbatches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from statistics import median

import numpy as np

from stepsplit.analyzer.arrays import Intervals, overlap_ns
from stepsplit.analyzer.diagnose.graph.replay import ReplayContext
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.schedule_graph import Costs, build_graph, simulate
from stepsplit.analyzer.model.schedule_names import SCHEDULES, Schedule
from stepsplit.analyzer.model.schedule_time import compute_pipeline_time
from stepsplit.analyzer.trace import OP_CODE, Int64


def compute_schedule_gain_ns(context: ReplayContext, name: str) -> float:
    """The gain of another schedule, in ns: both are simulated with the measured forwards and
    backwards, without messages, as those of the other are unknown.

    Raises UsageError if the run has no pipeline or a schedule is unknown.
    """
    schedule = context.split.schedule
    if schedule is None or not context.split.stage_bubbles:
        raise UsageError(_NO_PIPELINE)
    recorded = _get_schedule(
        schedule.name, "cannot change the schedule: that of the recording is not known exactly"
    )
    other = _get_schedule(name, f"unknown schedule {name!r}; use one of {', '.join(SCHEDULES)}")
    stages, costs = len(context.split.layout.pipelines[0]), _compute_median_costs(context)
    before, after = (
        compute_pipeline_time(
            one, stages, schedule.microbatches, schedule.chunks, costs
        ).makespan_ns
        for one in (recorded, other)
    )
    return before - after


def compute_microbatches_gain_ns(context: ReplayContext, count: int) -> float:
    """The gain of count microbatches per step for the same work, in ns.

    Both steps are simulated with the measured forwards, backwards and messages. Where these are not
    annotated, it follows from the pace of the messages, if there are enough. Raises UsageError if
    the run has no pipeline or the schedule is not known exactly.
    """
    schedule, layout = context.split.schedule, context.split.layout
    known = schedule is not None and context.split.stage_bubbles
    marked = any(rank.slots.are_marked for rank in context.split.ranks)
    if layout.pipelines and not marked:
        if schedule is not None and schedule.chunks > 1:
            raise UsageError(_CHUNKS_NOT_ANNOTATED)
        # Slots by the order of messages end with kernels, wherever the messages are.
        with suppress(*([UsageError] if known else [])):
            return _estimate_by_pace(context, count)
    if schedule is None or not known:
        raise UsageError(_NO_PIPELINE)
    name = _get_schedule(
        schedule.name, "cannot change the microbatches: the schedule is not known exactly"
    )
    stages = len(layout.pipelines[0])
    recorded, chunks = schedule.microbatches, schedule.chunks
    costs, transfer_ns = _compute_median_costs(context), _compute_median_transfer_ns(context)
    before, after = (
        compute_pipeline_time(name, stages, each, chunks, costs, transfer_ns).makespan_ns
        for each in (recorded, count)
    )
    # A step of more microbatches has more work: of it, the share of as many as before is a step of
    # equal work, optimizer and gradient reduction included. Of how much the recorded window is
    # longer than the simulated one (launches, messages that pass each other, noise that ranks wait
    # for), each further microbatch adds what each one in the middle of the recorded step added.
    slower_ns = _measure_slower_pace_ns(context, name, costs, transfer_ns, before)
    changed = context.mean_ns + after - before + slower_ns * (count - recorded)
    return context.mean_ns - changed * recorded / count


def _get_schedule(name: str, problem: str) -> Schedule:
    """The schedule of this name; raises UsageError with the problem if there is none."""
    if (found := next((one for one in SCHEDULES if one == name), None)) is None:
        raise UsageError(problem)
    return found


def _measure_slower_pace_ns(
    context: ReplayContext, name: Schedule, costs: Costs, transfer_ns: float, simulated_ns: float
) -> float:
    """By how much longer a recorded microbatch takes than a simulated one where the pipeline is
    full; 0 if the slots are not those of the schedule.

    There all ranks have one pace: what only some of them show is of their warm-up.
    """
    schedule, pipelines = context.split.schedule, context.split.layout.pipelines
    assert schedule is not None
    microbatches, stages = schedule.microbatches, len(pipelines[0])
    if name in ("naive", "gpipe") or microbatches <= stages:
        # Few microbatches never fill the pipeline, GPipe does it twice: the whole window counts.
        window_ns = float(np.mean([one.window_ns for one in context.split.stage_bubbles]))
        return max(0.0, window_ns - simulated_ns) / max(1, microbatches - 1)
    graph = build_graph(name, stages, microbatches, schedule.chunks)
    simulated = simulate(graph, costs, transfer_ns).starts_ns
    place = {rank: stage for line in pipelines for stage, rank in enumerate(line)}
    slower: dict[int, list[float]] = defaultdict(list)
    for grid in (one for rank in context.split.ranks for one in rank.grids):
        stage = place.get(grid.rank)
        if stage is None or not 1 < len(grid.slots) == len(simulated[stage]):
            continue
        lag_ns = np.sort([one.start_ns for one in grid.slots]) - np.array(simulated[stage])
        low = len(lag_ns) // 4
        high = len(lag_ns) - 1 - low
        passes = len(lag_ns) / microbatches
        slower[stage].append(float(lag_ns[high] - lag_ns[low]) / (high - low) * passes)
    each = [median(of_stage) for of_stage in slower.values()]
    return max(min(each, default=0.0), 0.0) + min(max(each, default=0.0), 0.0)


def _compute_median_transfer_ns(context: ReplayContext) -> float:
    """The median transfer of what a stage receives from another; 0 without messages."""
    kernels, op = context.graph.kernels, context.split.matched.op
    received = np.flatnonzero((op[kernels.row] == OP_CODE["recv"]) & (kernels.step >= 0))
    moved_ns = np.maximum(context.graph.rest_ns[kernels.end[received]], 0)
    return float(np.median(moved_ns)) if len(received) else 0.0


_NO_PIPELINE = "cannot change the schedule: no pipeline detected in the recording"

_CHUNKS_NOT_ANNOTATED = "cannot change the microbatches: several chunks per stage, not annotated"
"""Slots by the order of messages were 2 to 11 % off here in simulated jobs."""


def _estimate_by_pace(context: ReplayContext, count: int) -> float:
    """The gain of count microbatches for the same work, in ns, without annotated forwards.

    With one chunk per stage, each further microbatch of the same size makes the step longer by the
    pace: the time between two microbatches in the steady phase.
    """
    line = context.split.layout.pipelines[0]
    if len(line) > 2 and _list_message_ends(context, line[0], line[-1]):
        raise UsageError(_CHUNKS_NOT_ANNOTATED)
    forward = _list_message_ends(context, line[0], line[1])
    backward = _list_message_ends(context, line[1], line[0])
    counts = {len(one) for one in (*forward, *backward)}
    if len(counts) != 1 or min(counts) <= len(line):
        raise UsageError(
            "cannot change the microbatches: forwards and backwards are not annotated, and the "
            f"messages of a step are not more than the {len(line)} stages in each direction"
        )
    in_turn = all(sent[-1] < received[0] for sent, received in zip(forward, backward, strict=True))
    if context.split.schedule is None and not in_turn:
        # With one chunk the first backward returns after a microbatch for each stage. Where a
        # second chunk comes back over the same links (ZB-V, DualPipe-V), its forward takes twice as
        # many stages to return, and each microbatch is two messages. Between two stages those of an
        # interleaved schedule look like those of one chunk.
        ahead = [np.searchsorted(sent, one[0]) for sent, one in zip(forward, backward, strict=True)]
        if len(line) == 2 or max(ahead) > len(line):
            raise UsageError(
                "cannot change the microbatches: forwards and backwards are not annotated, and "
                "without a known schedule a stage may have several chunks"
            )
    microbatches = counts.pop()
    pace = _find_pace_ns(backward)
    if in_turn:
        pace += _find_pace_ns(forward)
    changed = context.mean_ns + (count - microbatches) * pace
    return context.mean_ns - changed * microbatches / count


def _find_pace_ns(ends: Sequence[Int64]) -> float:
    """The usual time between two messages of a step: in the cooldown of a zero-bubble schedule they
    follow each other faster."""
    return float(np.mean([np.median(np.diff(one)) for one in ends]))


def _list_message_ends(context: ReplayContext, sender: int, receiver: int) -> list[Int64]:
    """When the messages between two ranks ended at the receiver, in order, for each full step in
    which there are any."""
    matched, kernels, steps = context.split.matched, context.graph.kernels, context.graph.steps
    place = {rank: index for index, rank in enumerate(context.ranks.tolist())}
    if sender not in place or receiver not in place:
        return []
    own, others = (matched.slice_trace(place[rank]) for rank in (receiver, sender))
    sent = matched.shared[others][matched.op[others] == OP_CODE["send"]]
    received = (matched.op[own] == OP_CODE["recv"]) & (matched.shared[own] >= 0)
    kernel = kernels.of_row[own][received & np.isin(matched.shared[own], sent)]
    kernel = kernel[(kernels.step[kernel] >= 0) & context.counted[kernels.step[kernel]]]
    ends, step = context.graph.at_ns[kernels.end[kernel]], steps.step[kernels.step[kernel]]
    return [np.sort(ends[step == number]) for number in np.unique(step).tolist()]


def _compute_median_costs(context: ReplayContext) -> Costs:
    """The median forward and backward of each model stage; a backward that is not split counts half
    as input gradient and half as weight gradient. Some schedules (DualPipe) split some of them."""
    took: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank in context.split.ranks:
        for grid in rank.grids:
            split = {(one.stage, one.microbatch) for one in grid.slots if one.phase == "weight"}
            for box in grid.slots:
                here = Intervals(np.array([box.start_ns]), np.array([box.end_ns]))
                is_input = box.phase == "backward" and (box.stage, box.microbatch) in split
                phase = "input" if is_input else box.phase
                took[box.stage][phase].append(overlap_ns(here, grid.busy))
    costs = []
    for _, own in sorted(took.items()):
        forward, backward, of_input, weight = (
            float(median(own.get(phase) or [0]))
            for phase in ("forward", "backward", "input", "weight")
        )
        share = of_input / (of_input + weight) if weight else 0.5
        backward = backward or of_input + weight
        costs.append((forward, backward * share, backward * (1 - share)))
    return tuple(costs)
