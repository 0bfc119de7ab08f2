"""What-if analysis: the mean step of a recording after a change, by a replay of its graph."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from stepsplit.analyzer.arrays import first_rows, group_ids, group_max, group_mean, group_min
from stepsplit.analyzer.diagnose.causes.expert_load import balance_experts
from stepsplit.analyzer.diagnose.causes.gradient_calls import find_sync_kernels
from stepsplit.analyzer.diagnose.causes.lost_overlap import list_hoistable_calls
from stepsplit.analyzer.diagnose.causes.peer_speed import measure_peer_speed
from stepsplit.analyzer.diagnose.causes.small_collectives import compute_service_ns
from stepsplit.analyzer.diagnose.graph.dependency_graph import (
    WORK,
    DependencyGraph,
    build_dependency_graph,
)
from stepsplit.analyzer.diagnose.graph.replay import (
    ReplayContext,
    compute_times,
    hoist_collectives,
    limit_work,
    scale_transfers,
    scale_work,
)
from stepsplit.analyzer.diagnose.graph.segments import WorkSegments
from stepsplit.analyzer.diagnose.other_hardware import CarriedRun, carry_run, choose_hardware
from stepsplit.analyzer.diagnose.pipeline_change import (
    compute_microbatches_gain_ns,
    compute_schedule_gain_ns,
)
from stepsplit.analyzer.diagnose.slow_kernels import find_slow_kernels
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.schedule import (
    ChunkPositions,
    Order,
    build_orders,
    list_chunk_positions,
)
from stepsplit.analyzer.model.schedule_graph import ScheduleTimeline, build_graph, simulate
from stepsplit.analyzer.model.schedule_names import SCHEDULES
from stepsplit.analyzer.ops import compute_busbw_factor
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.report.tables import PHASES, Boxes
from stepsplit.analyzer.split.mesh import DATA_AXES, RankLayout
from stepsplit.analyzer.split.run import find_recorded_device
from stepsplit.analyzer.split_recording import split_recording
from stepsplit.analyzer.trace import OP_CODE, Float, Int64
from stepsplit.collectors.formats.run_spec import SHORTHAND

# What-ifs as JSON, schema "stepsplit.what_if/1".

SCHEMA = "stepsplit.what_if/1"


def to_json(found: WhatIfs) -> str:
    """{"schema", "step_ns", "slowdown", "changes": [{"change", "step_ns", "gain_ns"}], "carried":
    the fields of CarriedRun, or null}"""
    rows = [
        {"change": str(one.change), "step_ns": one.step_ns, "gain_ns": one.gain_ns}
        for one in found.changes
    ]
    body = {
        "schema": SCHEMA, "step_ns": found.step_ns, "slowdown": found.slowdown, "changes": rows,
        "carried": None if found.carried is None else asdict(found.carried),
    }  # fmt: skip
    return json.dumps(body, indent=1, allow_nan=False) + "\n"


# The mean step of a recording after a change.


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The mean full step with one change, and the gain.

    Attributes:
        change: the change, such as `WhatIfChange("link", axis="tp", times=2.0)`.
        step_ns: mean full step with the change, in ns.
        gain_ns: reduction of the mean full step, in ns; negative if the step gets longer.
    """

    change: WhatIfChange
    step_ns: int
    gain_ns: int


@dataclass(frozen=True, slots=True)
class WhatIfs:
    """The mean full step of a recording, and the estimate for each change alone.

    Attributes:
        step_ns: mean full step as recorded, in ns.
        changes: one `WhatIf` per change, in the order of the request.
        carried: the step on other hardware, if asked for. Default None.
        slowdown: cost of stragglers as a ratio: the step divided by the step in which all ranks and
            stages have equal compute and no call transfers longer than the median of its op and
            size, both without idle hosts. The metric S of Lin et al., Understanding Stragglers in
            Large Model Training Using What-if Analysis, arXiv:2505.05713.
    """

    step_ns: int
    changes: tuple[WhatIf, ...]
    slowdown: float
    carried: CarriedRun | None = None


def compute_slowdown(context: ReplayContext) -> float:
    """The slowdown by stragglers, as defined in WhatIfs."""
    idle = WhatIfChange("no-idle")
    before = context.compute_gain_ns(apply_change(context, idle))
    even = context.replay_with(apply_change(context, WhatIfChange("even")))
    after = even.compute_gain_ns(apply_change(even, idle))
    least_ns = even.mean_ns - after
    return (context.mean_ns - before) / least_ns if least_ns > 0 else 1.0


def _replay_change(context: ReplayContext, change: WhatIfChange) -> WhatIf:
    match change.kind:
        case "microbatches":
            gain = round(compute_microbatches_gain_ns(context, change.count))
        case "schedule":
            gain = round(compute_schedule_gain_ns(context, change.name))
        case _:
            gain = context.compute_gain_ns(apply_change(context, change))
    return WhatIf(change, round(context.mean_ns) - gain, gain)


def what_if(
    *places: str | Path,
    changes: Sequence[str] = (),
    rules: Rules = BUILT_IN,
    hardware: str | None = None,
    links: Sequence[str] = (),
    gpus_per_node: int | None = None,
    recorded_on: str | None = None,
) -> WhatIfs:
    """Estimate how changes would affect the step time of a recording, by a replay.

    Args:
        places: files, folders, archives or URLs of the recording.
        changes: changes as text: even, even-ranks, even-stages, no-slow-ranks, no-idle, overlap,
            link:AXIS=FACTOR, microbatches=N, schedule=NAME, replicas=N or buckets=N. Default: all
            that apply, or none if other hardware is given.
        rules: kernel rules, see `read_rules`. Default: the built-in rules.
        hardware: other hardware to carry the recording to: a preset such as "b200-sxm", or a file
            of `stepsplit calibrate` (.toml). Default: the recorded hardware.
        links: links of single axes there, such as "tp=nvlink-5" ("all=..." for every axis).
            Default: those of the hardware.
        gpus_per_node: GPUs per node there. Default: those of the hardware.
        recorded_on: preset or file of the recorded hardware. Default: by the recorded device name.

    Returns:
        A `WhatIfs` with the recorded step, the step after each change (ns), the slowdown by
        stragglers and, with other hardware, links or gpus_per_node, the step there (`CarriedRun`).

    Raises:
        DataError: a place is missing or cannot be read.
        UsageError: a change is invalid or does not apply to the recording, a preset is unknown, or
            the recorded device has none.

    Examples:
        >>> from stepsplit.analyzer import what_if
        >>> result = what_if("runs/exp1", changes=["link:tp=2"])  # doctest: +SKIP
        >>> result.changes[0].gain_ns  # doctest: +SKIP
        1250000
        >>> carried = what_if("runs/exp1", hardware="b200-sxm").carried  # doctest: +SKIP
        >>> carried.low_ns, carried.step_ns, carried.high_ns  # doctest: +SKIP
        (410000000, 520000000, 690000000)
    """
    recording = read_recording(places, rules=rules)
    split = split_recording(recording)
    hardware_change = None
    if hardware is not None or links or gpus_per_node is not None:
        device = find_recorded_device(recording.spec, split)
        hardware_change = choose_hardware(device, hardware, recorded_on, links, gpus_per_node)
    elif recorded_on is not None:
        raise UsageError("recorded_on needs hardware, links or gpus_per_node to carry the run to")
    if not any(rank.steps for rank in split.ranks):
        raise UsageError("the recording has no step to replay; record at least one full step")
    context = ReplayContext.build(split, build_dependency_graph(split), find_slow_kernels(split))
    rows = [_replay_change(context, parse_change(each)) for each in changes]
    if not changes and hardware_change is None:
        for each in DEFAULT_CHANGES:
            with suppress(UsageError):  # it does not apply to this recording
                rows.append(_replay_change(context, parse_change(each)))
    carried = None if hardware_change is None else carry_run(context, hardware_change)
    return WhatIfs(round(context.mean_ns), tuple(rows), compute_slowdown(context), carried)


# WhatIfChange -> DependencyGraph.


def apply_change(context: ReplayContext, change: WhatIfChange) -> DependencyGraph:
    """The graph with the change applied. Raises UsageError if it does not apply to the run."""
    every = np.zeros(len(context.stage), dtype=np.int64)
    match change.kind:
        case "even":
            return limit_transfers(context, remove_imbalance(context, every))
        case "even-ranks":
            return remove_imbalance(context, context.stage)
        case "even-stages":
            return remove_imbalance(context, every)
        case "no-slow-ranks":
            return scale_work(context.graph, "compute", measure_peer_speed(context))
        case "no-idle":
            return limit_work(context.graph, "idle", np.zeros(len(context.stage)))
        case "overlap":
            return hoist_collectives(context.graph, list_hoistable_calls(context))
        case "link":
            kernels = _find_axis_kernels(context, change.axis)
            return scale_transfers(context.graph, kernels, np.full(len(kernels), 1 / change.times))
        case "buckets":
            return _merge_buckets(context, change.count)
    return _scale_replicas(context, change.count)


def _find_axis_kernels(context: ReplayContext, axis: str) -> Int64:
    """The collectives and messages over the links of an axis; all of them for "all"."""
    if axis == "all":
        return np.arange(len(context.graph.kernels))
    layout = context.split.layout
    kernels = context.find_kernels(lambda axes: axis in _find_slowest_links(layout, axes))
    if not len(kernels):
        every = map(layout.find_axes, context.split.matched.groups)
        links = {one for axes in every for one in _find_slowest_links(layout, axes)}
        known = ", ".join(sorted(links)) or "no axis"
        raise UsageError(f"the recording has no communication on {axis!r}; it has {known}")
    return kernels


def _find_slowest_links(layout: RankLayout, axes: frozenset[str]) -> frozenset[str]:
    """The axis whose links limit a group of several axes: the outermost one of the mesh."""
    order = layout.mesh.axes if layout.mesh else ()
    outermost = next((axis for axis in order if axis in axes), None)
    return frozenset({outermost}) if outermost else axes


def _scale_replicas(context: ReplayContext, times: int) -> DependencyGraph:
    """Multiply the number of data-parallel ranks at equal link speed: each rank of a ring of n
    sends (n - 1) / n of the bytes."""
    matched = context.split.matched
    kernels = context.find_kernels(lambda axes: bool(axes) and axes <= DATA_AXES)
    sizes = np.array([len(group.ranks) for group in matched.groups], dtype=np.int64)
    ranks = sizes[matched.group[context.graph.kernels.row[kernels]]]
    kernels, ranks = kernels[ranks > 1], ranks[ranks > 1]
    if not len(kernels):
        raise UsageError("cannot change replicas: the recording has no data-parallel communication")
    longer = {
        n: compute_busbw_factor("all_gather", n * times) / compute_busbw_factor("all_gather", n)
        for n in set(ranks.tolist())
    }
    scale = np.array([longer[n] for n in ranks.tolist()])
    return scale_transfers(context.graph, kernels, scale)


def _merge_buckets(context: ReplayContext, count: int) -> DependencyGraph:
    """The gradient reductions of each group in so many buckets per step, in the recorded order.

    A bucket starts with the last of its parts, and takes as long as all of them less the latency of
    all but one.
    """
    graph, matched = context.graph, context.split.matched
    kernels = np.flatnonzero(find_sync_kernels(context))
    kernels = kernels[matched.op[graph.kernels.row[kernels]] != OP_CODE["all_gather"]]
    row = graph.kernels.row[kernels]
    series = group_ids(graph.kernels.step[kernels], matched.group[row])
    order = np.lexsort((graph.at_ns[graph.kernels.start[kernels]], series))
    kernels, series, row = kernels[order], series[order], row[order]
    calls = np.bincount(series)
    if not len(kernels) or calls.max() <= count:
        most = int(calls.max(initial=0))
        raise UsageError(
            f"buckets={count}: the recording has at most {most} gradient reductions per step on a "
            "group, and buckets can only be merged"
        )
    # The bucket of each call of a series, of count of equal size; a series is together.
    size = matched.message_bytes[row]
    reached = np.cumsum(size)
    first = first_rows(series)
    before = (reached - size)[first][series]
    middle = reached - before - size / 2
    part = np.asarray(middle * count // np.bincount(series, size)[series], dtype=np.int64)
    bucket = group_ids(series, np.where(calls[series] > count, part, np.arange(len(series))))
    ends = graph.kernels.end[kernels]
    saved = (np.bincount(bucket) - 1) * _compute_latency_ns(context, kernels)[first_rows(bucket)]
    merged = np.bincount(bucket, graph.rest_ns[ends]) - saved
    last = len(bucket) - 1 - first_rows(bucket[::-1])
    rest = graph.rest_ns.copy()
    rest[ends] = 0
    rest[ends[last]] = np.maximum(np.rint(merged), 0)
    return replace(graph, rest_ns=rest)


def _compute_latency_ns(context: ReplayContext, kernels: Int64) -> Float:
    """The time of a call of no bytes on the group of each of these calls, by the line through the
    smallest and largest; 0 if all are of one size."""
    matched, row = context.split.matched, context.graph.kernels.row[kernels]
    latency, times = np.zeros(len(kernels)), compute_times(context.graph)
    for number in np.unique(matched.group[row]).tolist():
        own = np.flatnonzero((matched.group[row] == number) & (matched.shared[row] >= 0))
        if not len(own):
            continue
        shared = matched.shared[row[own]]
        first = own[first_rows(group_ids(shared))]
        size = matched.message_bytes[row[first]]
        took = compute_service_ns(context, times, kernels[own], shared)
        least, most = size.min(), size.max()
        if least < most:
            short, long = (np.median(took[size == one]) for one in (least, most))
            latency[matched.group[row] == number] = max(
                0.0, (short * most - long * least) / (most - least)
            )
    return latency


# Changes as text: "link:tp=2", "microbatches=8".

PLAIN_KINDS = ("even", "even-ranks", "even-stages", "no-slow-ranks", "no-idle", "overlap")

EXAMPLES = (
    *PLAIN_KINDS,
    "link:tp=2",
    "microbatches=8",
    "schedule=zb-h1",
    "replicas=2",
    "buckets=2",
)

DEFAULT_CHANGES = (*PLAIN_KINDS, "link:all=2", "replicas=2")
"""The changes that are estimated by default."""

_LEAST_TIMES, _MOST_TIMES = 0.001, 1_000
"""The speed-up factors that a link may have: at the largest, transfers take all but no time."""

_CHANGE_PATTERN = re.compile(
    r"(link):([a-z_]+)=([0-9]{1,9}\.?[0-9]{0,20}|\.[0-9]{1,20})"
    r"|(microbatches|replicas|buckets)=([0-9]{1,9})|(schedule)=([a-z0-9-]+)"
)


@dataclass(frozen=True, slots=True)
class WhatIfChange:
    """One change of a what-if analysis.

    Attributes:
        kind: even, even-ranks, even-stages, no-slow-ranks, no-idle, overlap, link, microbatches,
            replicas, buckets or schedule.
        axis: axis of a link change, "all" for every axis. Default "".
        times: speed-up factor of a link change, from 0.001 to 1,000. Default 1.0.
        count: number of microbatches or gradient buckets, or factor of the replicas. Default 0.
        name: schedule name. Default "".

    Examples:
        >>> from stepsplit.analyzer import WhatIfChange
        >>> str(WhatIfChange("link", axis="tp", times=2.0))
        'link:tp=2'
    """

    kind: str
    axis: str = ""
    times: float = 1.0
    count: int = 0
    name: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "link":
                # As parse_change reads it: all digits, and no exponent.
                return f"link:{self.axis}={np.format_float_positional(self.times, trim='-')}"
            case "schedule":
                return f"schedule={self.name}"
            case "microbatches" | "replicas" | "buckets":
                return f"{self.kind}={self.count}"
        return self.kind


def parse_change(text: str) -> WhatIfChange:
    """Parse a change. Raises UsageError with the valid forms, or with those of a link's factor."""
    if text in PLAIN_KINDS:
        return WhatIfChange(text)
    match = _CHANGE_PATTERN.fullmatch(text)
    if match is None or float(match[3] or match[5] or 1) <= 0:
        raise UsageError(f"{text!r} is not a valid change; use one of {', '.join(EXAMPLES)}")
    if match[1]:
        axis, times = SHORTHAND.get(match[2], match[2]), float(match[3])
        if not _LEAST_TIMES <= times <= _MOST_TIMES:
            valid = f"from {_LEAST_TIMES:g} to {_MOST_TIMES:,}"
            raise UsageError(f"{text!r}: the factor of a link is {valid} times its speed")
        return WhatIfChange("link", axis=axis, times=times)
    if match[4]:
        return WhatIfChange(match[4], count=int(match[5]))
    return WhatIfChange("schedule", name=match[7])


# The run without load imbalance and stragglers.

_PHASES = 3

_COMPUTE = WORK.index("compute")


def remove_imbalance(context: ReplayContext, among: Int64) -> DependencyGraph:
    """Set the compute of every row to the mean of its step and group, per phase; that of the ranks
    of a stage also between the same calls, and the experts of a group receive as many tokens.

    among is the group number of each row: rows of one group share their work equally.
    """
    steps, graph = context.graph.steps, balance_experts(context, context.graph)
    segments = WorkSegments.measure(graph, WORK[_COMPUTE])
    label = group_ids(steps.step, context.stage)
    labels = int(label.max(initial=-1)) + 1
    fewest, most = (limit(label, segments.calls, labels) for limit in (group_min, group_max))
    shared_ns = np.stack([group_mean(label, own) for own in segments.spent_ns.T], axis=1)
    graph = segments.set_work(graph, (fewest == most)[label], shared_ns)
    nodes = np.flatnonzero(graph.step >= 0)
    cell = graph.step[nodes] * _PHASES + context.classify_phases()[nodes]
    own = np.bincount(cell, graph.work_ns[nodes, _COMPUTE], minlength=_PHASES * len(steps.step))
    table = own.astype(np.float64).reshape(-1, _PHASES)
    label = group_ids(steps.step, among)
    mean = np.stack([group_mean(label, table[:, phase]) for phase in range(_PHASES)], axis=1)
    times = (mean / np.maximum(table, 1)).ravel()[cell]
    work = graph.work_ns.copy(order="K")
    work[nodes, _COMPUTE] = np.rint(work[nodes, _COMPUTE] * times)
    return replace(graph, work_ns=work)


def limit_transfers(context: ReplayContext, graph: DependencyGraph) -> DependencyGraph:
    """Limit the transfer time of each call of known size to the median of its op and size; not what
    a library runs before it moves the data."""
    kernels, matched = graph.kernels, context.split.matched
    known = matched.message_bytes[kernels.row] >= 0
    known &= matched.carrier[kernels.row] == kernels.row
    kind = group_ids(matched.op[kernels.row], matched.message_bytes[kernels.row], known)
    took = graph.rest_ns[kernels.end]
    usual = np.array([np.median(took[kind == one]) for one in range(int(kind.max(initial=-1)) + 1)])
    rest = graph.rest_ns.copy()
    limit = usual[kind].astype(np.int64) if len(kind) else took
    rest[kernels.end] = np.where(known, np.minimum(took, limit), took)
    return replace(graph, rest_ns=rest)


# The ideal grid of a pipeline schedule: equal stages, no communication.

_PHASE_OF_KIND = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}


def build_ideal_grid(measured: Boxes, schedule: str | None, microbatches: int) -> Boxes | None:
    """The boxes of one step, from time 0, if every stage took the measured mean.

    measured holds one step with one rank per stage. None if the schedule is not modelled or does
    not support this number of stages and microbatches.
    """
    ranks, positions = np.unique(measured.rank), len(np.unique(measured.stage))
    if schedule not in SCHEDULES or not len(ranks) or positions % len(ranks):
        return None
    if int(measured.stage.max()) != positions - 1:
        return None
    shape = (schedule, len(ranks), microbatches, positions // len(ranks))
    chunks = 1 if schedule in ("zb-v", "dualpipe", "dualpipe-v") else shape[3]
    try:
        ordered, at = build_orders(*shape[:3], chunks), list_chunk_positions(*shape[:2], chunks)
        # Each stage takes the mean forward, backward and weight gradient of all stages.
        took = [measured.dur_ns[measured.phase == phase] for phase in range(len(PHASES))]
        forward, backward, weight = (float(one.mean()) if len(one) else 0.0 for one in took)
        costs = ((forward, backward, weight),) * positions
        timeline = simulate(build_graph(*shape[:3], chunks), costs)
    except UsageError:
        return None
    if max(place for one in at for place in one) != positions - 1:
        return None
    return _build_boxes(
        measured,
        [int(measured.rank[measured.stage == one[0]][0]) for one in at],
        ordered,
        at,
        timeline,
    )


def _build_boxes(
    measured: Boxes,
    ranks: list[int],
    ordered: tuple[Order, ...],
    at: ChunkPositions,
    timeline: ScheduleTimeline,
) -> Boxes:
    rows = [
        (
            ranks[i],
            at[i][one.chunk],
            one.microbatch,
            PHASES.index(_PHASE_OF_KIND[one.kind]),
            start,
            end,
        )
        for i, order in enumerate(ordered)
        for one, start, end in zip(order, timeline.starts_ns[i], timeline.ends_ns[i], strict=True)
    ]
    table = np.array(rows, dtype=np.float64).astype(np.int64)
    return Boxes(
        rank=table[:, 0].astype(np.int32),
        step=np.full(len(table), int(measured.step[0]), dtype=np.int32),
        stage=table[:, 1].astype(np.int32),
        microbatch=table[:, 2].astype(np.int32),
        phase=table[:, 3].astype(np.uint8),
        start_ns=table[:, 4],
        dur_ns=table[:, 5] - table[:, 4],
    )
