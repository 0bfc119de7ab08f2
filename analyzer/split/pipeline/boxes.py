"""The pipeline boxes of a rank: as annotations mark them, else as its messages cut its compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import union
from stepsplit.analyzer.split.classify import computing_ops
from stepsplit.analyzer.split.mesh.layout import STAGE_AXES, Layout
from stepsplit.analyzer.split.pipeline.marked import Box, boxes_of
from stepsplit.analyzer.trace import Bool, Category, Events, Int64, RankTrace

_PHASES = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class FoundBoxes:
    """A rank's boxes in order of time, and what told them: annotations, messages, or nothing."""

    boxes: tuple[Box, ...]
    source: str | None


def found_boxes(trace: RankTrace, layout: Layout) -> FoundBoxes:
    """The boxes that annotations mark; where they mark none, those that messages tell."""
    marked = boxes_of(trace, layout.stage_of.get(trace.rank))
    if marked:
        return FoundBoxes(marked, "annotations")
    told = boxes_of_messages(trace, layout)
    return FoundBoxes(told, "messages" if told else None)


def boxes_of_messages(trace: RankTrace, layout: Layout) -> tuple[Box, ...]:
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
    work = _work(trace, layout, steps)
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


def _work(trace: RankTrace, layout: Layout, steps: Int64) -> _Work:
    """The rank's kernels (on a CPU its ops), without the optimizer's, in order of launch."""
    events = trace.events
    launched = events.launch_ns() if trace.on_device else events.start_ns
    works = _kernels(trace, layout) if trace.on_device else computing_ops(events)
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


def _kernels(trace: RankTrace, layout: Layout) -> Bool:
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
