"""The pipeline grid of a run: forwards and backwards of each microbatch, bubble, schedule."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from stepsplit.analyzer.arrays import Intervals, distinct, most_of, overlap_ns, union, without
from stepsplit.analyzer.split.attribute import BucketBands
from stepsplit.analyzer.split.classify import MARKERS, Mark, marks_in
from stepsplit.analyzer.split.mesh import STAGE_AXES, RankLayout
from stepsplit.analyzer.split.transfers import BUBBLE, COLLECTIVE, P2P, SKEW
from stepsplit.analyzer.trace import Bool, Category, Events, Int64, RankTrace

# The pipeline boxes of a rank: as annotations mark them, else as its messages cut its compute.

_PHASES = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class FoundBoxes:
    """A rank's boxes in order of time, and what told them: annotations, messages, or nothing."""

    boxes: tuple[Box, ...]
    source: str | None


def found_boxes(trace: RankTrace, layout: RankLayout) -> FoundBoxes:
    """The boxes that annotations mark; where they mark none, those that messages tell."""
    marked = boxes_of(trace, layout.stage_of.get(trace.rank))
    if marked:
        return FoundBoxes(marked, "annotations")
    told = boxes_of_messages(trace, layout)
    return FoundBoxes(told, "messages" if told else None)


def boxes_of_messages(trace: RankTrace, layout: RankLayout) -> tuple[Box, ...]:
    """The boxes of a rank that holds one stage, by what its host launched between its messages.

    What a message needs is launched before it and what needs a message after it, so that between
    two messages lies one box; a kernel launched by autograd is a backward's. Where no message
    parts two boxes autograd does: a forward of the last stage ends, and one of the first begins,
    where autograd does. A box lasts from its first kernel to its last, tp, cp and ep communication
    included; microbatches are counted in each step. A step whose forwards and backwards differ in
    number has no boxes, nor has a rank with messages of several chunks.
    """
    line = next((line for line in layout.pipelines if trace.rank in line), ())
    messages = _messages(trace, line)
    if not len(messages) or _several_chunks(trace, line):
        return ()
    steps = np.sort(trace.events.start_ns[_host(trace.events, "ProfilerStep#")])
    work = _rank_work(trace, layout, steps)
    gaps = _gaps(work, messages, _step_of(messages, steps))
    kind = _kind(work, gaps, first=trace.rank == line[0], last=trace.rank == line[-1])
    return _boxes(work, gaps.number, kind, layout.stage(trace.rank))


@dataclass(frozen=True, slots=True)
class _Work:
    """What a rank's boxes are made of, by when the host launched it; columns of one length.

    step counts the host's steps; autograd says what was launched by it.
    """

    launch_ns: Int64
    start_ns: Int64
    end_ns: Int64
    step: Int64
    autograd: Bool


def _messages(trace: RankTrace, line: Sequence[int]) -> Int64:
    """When the host made each call to another rank of the line, or to one that nobody knows."""
    calls = trace.calls
    of_line = [len(set(group.ranks) & set(line)) > 1 for group in trace.groups]
    unknown = (calls.peer < 0) & np.array([*of_line, bool(line)])[calls.group_id]
    rows = np.flatnonzero(calls.is_message & (np.isin(calls.peer, line) | unknown))
    issued = calls.issued_ns[rows]
    return np.sort(np.where(issued >= 0, issued, trace.events.start_ns[calls.event[rows]]))


def _several_chunks(trace: RankTrace, line: Sequence[int]) -> bool:
    """Whether messages pass by a neighbor: from the last rank to the first, for a further chunk."""
    calls, at = trace.calls, line.index(trace.rank)
    neighbors = line[max(at - 1, 0) : at + 2]
    others = np.isin(calls.peer, line) & ~np.isin(calls.peer, neighbors)
    return bool((calls.is_message & others).any())


def _step_of(when: Int64, steps: Int64) -> Int64:
    """The step in which the host was, -1 before the first; 0 where no step is marked."""
    return np.searchsorted(steps, when, side="right") - (1 if len(steps) else 0)


def _rank_work(trace: RankTrace, layout: RankLayout, steps: Int64) -> _Work:
    """The rank's kernels (on a CPU its ops), without the optimizer's, in order of launch."""
    events = trace.events
    launched = events.launch_ns() if trace.on_device else events.start_ns
    works = _kernels(trace, layout) if trace.on_device else trace.kinds.computes
    step = _step_of(launched, steps)
    works &= (launched >= 0) & (step >= 0) & ~_launched_in(events, "Optimizer.", launched)
    rows = np.flatnonzero(works)
    rows = rows[np.argsort(launched[rows], kind="stable")]
    return _Work(
        launch_ns=launched[rows],
        start_ns=events.start_ns[rows],
        end_ns=events.end_ns[rows],
        step=step[rows],
        autograd=_launched_in(events, "autograd::engine::evaluate_function", launched[rows]),
    )


def _kernels(trace: RankTrace, layout: RankLayout) -> Bool:
    """Which events are kernels of a box: computing, or communicating within the stage."""
    axes = [layout.axes_of(group) for group in trace.groups]
    within = np.array([*(bool(a) and a <= STAGE_AXES for a in axes), False])
    kernels = trace.events.of(Category.KERNEL)
    kernels[trace.calls.event] &= within[trace.calls.group_id]
    return kernels


def _host(events: Events, name: str) -> Bool:
    """Which events are ops and annotations whose name begins so."""
    return events.of(Category.OP, Category.ANNOTATION) & events.named(name)


def _launched_in(events: Events, name: str, launched: Int64) -> Bool:
    """Which of these times lie in an op or annotation of such a name."""
    spans = _host(events, name)
    covered = union(events.start_ns[spans], events.end_ns[spans])
    edges = np.stack([covered.start_ns, covered.end_ns], axis=1).ravel()
    return np.asarray(np.searchsorted(edges, launched, side="right") % 2 == 1)


@dataclass(frozen=True, slots=True)
class _Gaps:
    """For each piece of work, the gap between messages that it is in, by number.

    preceded, followed: whether that gap begins and ends with a message of the same step; before,
    after: whether the piece comes before all of autograd's in its gap, or after.
    """

    number: Int64
    preceded: Bool
    followed: Bool
    before: Bool
    after: Bool


def _gaps(work: _Work, messages: Int64, message_step: Int64) -> _Gaps:
    passed = np.searchsorted(messages, work.launch_ns, side="right")
    before = np.concatenate(([-1], message_step))[passed]
    after = np.concatenate((message_step, [-1]))[passed]
    at, gaps = np.arange(len(passed)), len(messages) + 1
    first, last = np.full(gaps, len(at)), np.full(gaps, -1)
    np.minimum.at(first, passed[work.autograd], at[work.autograd])
    np.maximum.at(last, passed[work.autograd], at[work.autograd])
    return _Gaps(
        number=passed,
        preceded=before == work.step,
        followed=after == work.step,
        before=at < first[passed],
        after=at > last[passed],
    )


def _kind(work: _Work, gaps: _Gaps, *, first: bool, last: bool) -> Int64:
    """Of each piece of work 0 for a forward's, 1 for a backward's, -1 for neither.

    Every stage but the first receives what a forward needs, every one but the last sends what it
    made and receives what a backward needs; on the last that is the forward before it.
    """
    alone = gaps.before & gaps.after
    forward = alone | (gaps.before & last) | (gaps.after & first)
    whole = (gaps.preceded | first) & (gaps.followed | (last & ~alone))
    back = gaps.preceded & (gaps.followed | first)
    return np.where(forward, np.where(whole, 0, -1), np.where(back, 1, -1))


def _boxes(work: _Work, gap: Int64, kind: Int64, stage: int) -> tuple[Box, ...]:
    """A box for the pieces of one gap and kind, in the steps that have both kinds alike."""
    rows = np.flatnonzero(kind >= 0)
    codes, box = np.unique(2 * gap[rows] + kind[rows], return_inverse=True)
    start = np.full(len(codes), np.iinfo(np.int64).max)
    end, step = np.zeros(len(codes), dtype=np.int64), np.zeros(len(codes), dtype=np.int64)
    np.minimum.at(start, box, work.start_ns[rows])
    np.maximum.at(end, box, work.end_ns[rows])
    step[box] = work.step[rows]
    found = []
    for number in np.unique(step).tolist():
        parts = [np.flatnonzero((step == number) & (codes % 2 == phase)) for phase in (0, 1)]
        if len(parts[0]) == len(parts[1]):
            found += [
                Box(stage, i, phase, int(start[row]), int(end[row]))
                for phase, part in zip(_PHASES, parts, strict=True)
                for i, row in enumerate(part.tolist())
            ]
    return tuple(sorted(found, key=lambda one: one.start_ns))


# The pipeline's grid, and the bubble that its holes make.


@dataclass(frozen=True, slots=True)
class StepGrid:
    """One rank's part of a step: its boxes, and when it worked in them, on the common clock."""

    rank: int
    step: int
    boxes: tuple[Box, ...]
    busy: Intervals


@dataclass(frozen=True, slots=True)
class StageHoles:
    """One stage in one step: the window of its whole pipeline, and the stage's holes in it."""

    rank: int
    step: int
    stage: int
    window_ns: int
    holes_ns: int


def grid_of(rank: int, step: int, boxes: Sequence[Box], band: BucketBands) -> StepGrid:
    """The boxes of one step; busy leaves out waits for the pipeline that lie inside of a box.

    A range may hold the wait for what it works on (torch's own annotations do), which is no work.
    """
    start = np.array([box.start_ns for box in boxes], dtype=np.int64)
    end = np.array([box.end_ns for box in boxes], dtype=np.int64)
    waits = np.isin(band.bucket, (P2P, BUBBLE))
    worked = without(union(start, end), Intervals(band.start_ns[waits], band.end_ns[waits]))
    return StepGrid(rank, step, numbered(boxes), worked)


def numbered(boxes: Sequence[Box]) -> tuple[Box, ...]:
    """The boxes of a step with each microbatch's number once.

    A schedule that is called for one microbatch after the other begins anew each time.
    """
    passes: Counter[tuple[int, int, str]] = Counter()
    count = max((box.microbatch for box in boxes), default=0) + 1
    found = []
    for box in boxes:
        again = passes[box.stage, box.microbatch, box.phase]
        passes[box.stage, box.microbatch, box.phase] += 1
        found.append(replace(box, microbatch=box.microbatch + again * count) if again else box)
    return tuple(found)


def holes_of(
    pipelines: Sequence[Sequence[int]], grids: Mapping[tuple[int, int], StepGrid]
) -> tuple[StageHoles, ...]:
    """The holes of every stage of every pipeline whose ranks are all there.

    The window runs from the first forward to the last backward over all stages of the pipeline;
    holes are what its forwards and backwards, with their own communication, leave of it.
    """
    found = []
    for ranks in pipelines:
        for step in sorted({step for rank, step in grids if rank in ranks}):
            parts = [grids[rank, step] for rank in ranks if (rank, step) in grids]
            if len(parts) == len(ranks) and all(len(part.busy) for part in parts):
                found += _holes(ranks, step, parts)
    return tuple(found)


def _holes(ranks: Sequence[int], step: int, parts: Sequence[StepGrid]) -> list[StageHoles]:
    first = min(int(part.busy.start_ns[0]) for part in parts)
    last = max(int(part.busy.end_ns[-1]) for part in parts)
    window = Intervals(np.array([first]), np.array([last]))
    return [
        StageHoles(
            part.rank, step, stage, last - first, last - first - overlap_ns(part.busy, window)
        )
        for stage, part in zip(range(len(ranks)), parts, strict=True)
    ]


def covered_ns(busy: Intervals, band: BucketBands) -> int:
    """Exposed communication inside holes of the schedule that a wait for the pipeline follows.

    Without it the rank would only have waited longer in the same hole.
    """
    after = busy.start_ns[1:]
    hole = np.searchsorted(busy.end_ns[:-1], band.start_ns, side="right") - 1
    inside = np.flatnonzero(hole >= 0)
    inside = inside[band.end_ns[inside] <= after[hole[inside]]]
    waits = inside[band.bucket[inside] == BUBBLE]
    last = most_of(hole[waits], band.start_ns[waits], len(after))
    comm = inside[np.isin(band.bucket[inside], (COLLECTIVE, P2P, SKEW))]
    covered = comm[band.end_ns[comm] <= last[hole[comm]]]
    return int((band.end_ns - band.start_ns)[covered].sum())


@dataclass(frozen=True, slots=True)
class Box:
    """One forward, backward or weight gradient of a microbatch, on the rank's own clock."""

    stage: int
    microbatch: int
    phase: str
    start_ns: int
    end_ns: int


# Which pipeline schedule ran: as a person or torch names it, or as the boxes show it.

Line = Sequence[Sequence[Box]]
"""The boxes of one step: of each rank of a pipeline, by pp coordinate, none where it is absent."""

_SPELLED = {
    "none": "naive",
    "interleaved1f1b": "interleaved",
    "1f1binterleaved": "interleaved",
    "loopedbfs": "interleaved",
    "zbh1": "zb-h1",
    "zb1p": "zb-h1",
    "interleavedzerobubble": "zb-h1",
    "zbh2": "zb-h2",
    "zb": "zerobubble",
    "zbv": "zb-v",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}


@dataclass(frozen=True, slots=True)
class SeenSchedule:
    """What the boxes show. times_ns: one microbatch's forward, input and weight gradient on a
    stage; None where the backward is not split. name is None where the order is no known one.
    """

    name: str | None
    microbatches: int
    chunks: int
    times_ns: tuple[float, float, float] | None


def schedule_named(stated: str) -> str:
    """The schedule's name as the model knows it, of what a person or torch's class calls it.

    torch's interleaved zero bubble is the ZB1P of the paper, which is ZB-H1; a breadth-first loop
    (LoopedBFS) has the bubble of the interleaved schedule.
    """
    name = stated.lower().replace("_", "").replace("-", "").replace(" ", "")
    name = name.removeprefix("schedule")
    return _SPELLED.get(name, name)


def schedule_seen(steps: Sequence[Line]) -> SeenSchedule:
    """The schedule of most of the steps, of which those with the most boxes are whole."""
    sizes = [sum(len(boxes) for boxes in line) for line in steps]
    whole = [line for line, size in zip(steps, sizes, strict=True) if size == max(sizes)]
    names = [schedule_of(line) for line in whole]
    name = Counter(names).most_common(1)[0][0]
    line = whole[names.index(name)]
    return SeenSchedule(
        name=name,
        microbatches=_microbatches(line, name),
        chunks=max(len(_stages(boxes)) for boxes in line),
        times_ns=_times_ns(line),
    )


def schedule_of(line: Line) -> str | None:
    """The schedule by where the stages sit, how the backward is split, and what comes before it.

    naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zerobubble (its weight gradients follow neither),
    zb-v, dualpipe, dualpipe-v; None for another. Orders that coincide count as 1f1b: one microbatch
    is that of naive and gpipe too.
    """
    p, present = len(line), {rank: boxes for rank, boxes in enumerate(line) if boxes}
    if not present:
        return None
    held = {rank: _stages(boxes) for rank, boxes in present.items()}
    split = any(box.phase == "weight" for boxes in present.values() for box in boxes)
    if all(len(stages) == 1 for stages in held.values()):
        return _by_warmup(present, p, split)
    if all(len(stages) == 2 and stages == {r, p - 1 - r} for r, stages in held.items()):
        return "dualpipe"
    if all(stages == {r, 2 * p - 1 - r} for r, stages in held.items()):
        return _folded(present, split)
    if all(stage % p == r for r, stages in held.items() for stage in stages):
        return "zb-h1" if split else "interleaved"
    return None


def _by_warmup(present: Mapping[int, Sequence[Box]], p: int, split: bool) -> str | None:
    """By how many forwards each rank does before its first backward; one stage a rank."""
    m = max(len({box.microbatch for box in boxes}) for boxes in present.values())
    warmup = {rank: _warmup(boxes) for rank, boxes in present.items()}
    expected: dict[str, Callable[[int], int]] = {
        "1f1b": lambda rank: min(m, p - rank),
        "gpipe": lambda rank: m,
        "naive": lambda rank: 1,
    }
    if split:
        expected = {"zb-h1": expected["1f1b"], "zb-h2": lambda rank: min(m, 2 * (p - rank) - 1)}
    fits = [
        name
        for name, forwards in expected.items()
        if all(found == forwards(rank) for rank, found in warmup.items())
    ]
    if split:
        return fits[0] if len(fits) == 1 else "zerobubble"
    return fits[0] if fits else None


def _folded(present: Mapping[int, Sequence[Box]], split: bool) -> str | None:
    """Stages r and 2p-1-r: of one model in a V, or of two that are passed in opposite directions.

    ZB-V splits every backward, DualPipeV only some.
    """
    if all(_apart(boxes) for boxes in present.values()):
        return "dualpipe"
    if not split:
        return None
    boxes = [box for rank in present.values() for box in rank]
    backwards, weights = (
        _microbatches_of_phase(boxes, "backward"),
        _microbatches_of_phase(boxes, "weight"),
    )
    return "zb-v" if backwards == weights else "dualpipe-v"


def _apart(boxes: Sequence[Box]) -> bool:
    """Whether no microbatch passes both stages of the rank."""
    passes = {(box.stage, box.microbatch) for box in boxes}
    return len(passes) == len({box.microbatch for box in boxes})


def _warmup(boxes: Sequence[Box]) -> int:
    phases = [box.phase for box in sorted(boxes, key=lambda box: box.start_ns)]
    before = phases[: phases.index("backward")] if "backward" in phases else phases
    return before.count("forward")


def _stages(boxes: Sequence[Box]) -> set[int]:
    return {box.stage for box in boxes}


def _microbatches_of_phase(boxes: Sequence[Box], phase: str) -> set[tuple[int, int]]:
    return {(box.stage, box.microbatch) for box in boxes if box.phase == phase}


def _microbatches(line: Line, name: str | None) -> int:
    """How many pass the pipeline; those of dualpipe in both directions, each once on a rank."""
    if name == "dualpipe":
        return max(len(_microbatches_of_phase(boxes, "forward")) for boxes in line)
    return max(len({box.microbatch for box in boxes}) for boxes in line)


def _times_ns(line: Line) -> tuple[float, float, float] | None:
    """Medians over the boxes that had their rank for themselves."""
    weights = {at for boxes in line for at in _microbatches_of_phase(boxes, "weight")}
    alone = [box for boxes in line for box in _alone(boxes)]
    split = [box for box in alone if (box.stage, box.microbatch) in weights]
    found = [
        [box.end_ns - box.start_ns for box in among if box.phase == phase]
        for among, phase in ((alone, "forward"), (split, "backward"), (split, "weight"))
    ]
    if not all(found):
        return None
    forward, inputs, weight = (float(median(times)) for times in found)
    return forward, inputs, weight


def _alone(boxes: Sequence[Box]) -> list[Box]:
    """Two actions at once are boxes of the same time, which tells of neither how long it takes."""
    at = Counter((box.start_ns, box.end_ns) for box in boxes)
    return [box for box in boxes if at[box.start_ns, box.end_ns] == 1]


# The boxes of a pipeline that annotations mark.


def boxes_of(trace: RankTrace, stage: int | None = None) -> tuple[Box, ...]:
    """The boxes that annotations mark, on the device where it shows them, in order of time.

    Some of torch's schedules mark them too; where the collector did, its marks alone count. The
    marks of torch's GPipe name no stage: stage, the rank's pp coordinate, does; without it they
    are no boxes. Two actions at once are two boxes of the same time.
    """
    events = trace.events
    of_category = events.of(Category.GPU_ANNOTATION if trace.on_device else Category.ANNOTATION)
    for prefixes in MARKERS:
        marks = [
            marks_in(name, stage) if name.startswith(prefixes) else () for name in events.names
        ]
        rows = np.flatnonzero(of_category & events.name_mask(tuple(map(bool, marks))))
        if len(rows):
            found = _on_compute_stream(trace, rows).tolist()
            return tuple(
                _box(events, row, mark) for row in found for mark in marks[events.name_id[row]]
            )
    return ()


def _on_compute_stream(trace: RankTrace, rows: Int64) -> Int64:
    """A device shows a mark once for each stream that worked in it: the one that computes most."""
    events = trace.events
    lanes = distinct(events.lane[rows]).tolist()
    if not trace.on_device or len(lanes) == 1:
        return rows
    computes = trace.kinds.computes
    work = np.bincount(
        events.lane[computes], weights=events.dur_ns[computes], minlength=len(events.lanes)
    )
    of_stream: dict[tuple[str, str], float] = defaultdict(float)
    for lane, busy in zip(events.lanes, work.tolist(), strict=True):
        of_stream[lane.pid, lane.tid] += busy
    streams = {lane: (events.lanes[lane].pid, events.lanes[lane].tid) for lane in lanes}
    busiest = max(lanes, key=lambda lane: of_stream[streams[lane]])
    return np.asarray(rows[events.lane[rows] == busiest])


def _box(events: Events, row: int, mark: Mark) -> Box:
    start = int(events.start_ns[row])
    return Box(mark.stage, mark.microbatch, mark.phase, start, start + int(events.dur_ns[row]))
