"""Evidence for the strategies used in a step: calls, their order, and the passes around them."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import Intervals, is_inside, union
from stepsplit.analyzer.split.call_purposes import find_call_purposes, find_spans, is_traced
from stepsplit.analyzer.split.issue_steps import (
    HostSteps,
    build_host_steps,
    compute_issued_ns,
    take_whole_trace,
)
from stepsplit.analyzer.split.mesh import RankLayout
from stepsplit.analyzer.split.mesh_inference import SCALAR_BYTES
from stepsplit.analyzer.split.steps import Steps
from stepsplit.analyzer.split.world_group import find_replayed
from stepsplit.analyzer.trace import OP_CODE, Bool, Category, Events, Group, Int64, RankTrace

FORWARD, BACKWARD, AFTER = range(3)
"""The parts of a step. AFTER follows the last backward, where optimizers run; gradients reduced
between a backward and the next forward also count as AFTER."""

CALL, BACKWARD_BEGINS = "X", "|"

_REDUCES = [OP_CODE[op] for op in ("all_reduce", "reduce_scatter", "reduce")]


class RankEvidence(Struct, frozen=True):
    """The calls of a rank in its full steps, one row each in trace order; columns of one length.

    part is FORWARD, BACKWARD or AFTER, -1 if unknown; shards: issued by FSDP. has_purpose: a range
    around the call shows that it moves gradients, weights or activations. replayed: by a graph,
    whose launch is that of all its calls, so that their order among the ops is unknown.
    """

    trace: RankTrace
    layout: RankLayout
    steps: HostSteps
    marks: Landmarks
    passes: Passes
    row: Int64
    when: Int64
    part: Int64
    shards: Bool
    has_purpose: Bool
    replayed: Bool

    @property
    def op(self) -> Int64:
        return self.trace.calls.op[self.row].astype(np.int64)

    @property
    def group(self) -> Int64:
        return self.trace.calls.group_id[self.row].astype(np.int64)

    @property
    def message_bytes(self) -> Int64:
        return self.trace.calls.message_bytes[self.row]

    @property
    def is_tensor(self) -> Bool:
        """Which calls may move tensors, as opposed to losses, norms or flags."""
        size = self.message_bytes
        return (size < 0) | (size > SCALAR_BYTES) | self.has_purpose

    def is_op(self, *ops: str) -> Bool:
        """Which calls have one of these ops."""
        return np.isin(self.op, [OP_CODE[op] for op in ops])

    def is_on(self, group: Group) -> Bool:
        """Which calls use this group."""
        ids = [i for i, one in enumerate(self.trace.groups) if one == group]
        return np.isin(self.group, ids)

    def list_groups(self) -> list[Group]:
        """The groups of more than one rank that the rank uses."""
        used = sorted(set(self.group[self.group >= 0].tolist()))
        used_groups = dict.fromkeys(self.trace.groups[i] for i in used)
        return [group for group in used_groups if len(group.ranks) > 1]

    def build_sequence(self, mask: Bool) -> str:
        """The forward work of all steps as a string: X for each of these calls issued in a forward,
        the letters of the landmarks, and | at the start of a backward. Without replayed calls."""
        mask = mask & (self.part == FORWARD) & ~self.replayed
        marks = self.marks.outside & (self.steps.find_step(self.marks.start_ns) >= 0)
        called, begins = self.when[mask], self.passes.start_ns
        when = np.concatenate((self.marks.start_ns[marks], called, begins))
        letter = np.concatenate((
            self.marks.letter[marks],
            np.full(len(called), ord(CALL)),
            np.full(len(begins), ord(BACKWARD_BEGINS)),
        ))  # fmt: skip
        letters = letter[np.argsort(when, kind="stable")].astype(np.uint8)
        return letters.tobytes().decode("ascii")


def collect_evidence(
    trace: RankTrace, windows: Steps, leads: Bool, layout: RankLayout
) -> RankEvidence:
    """Collects the evidence of a rank; leads marks the first row of each of its calls."""
    steps, marks = build_host_steps(trace, windows), find_landmarks(trace.events)
    steps = take_whole_trace(trace) if steps.on_device else steps
    when, passes = compute_issued_ns(trace, steps), find_passes(marks, steps)
    row = np.flatnonzero(leads & (steps.find_step(when) >= 0))
    when = when[row]
    ends = np.isin(trace.calls.op[row], _REDUCES) | is_inside(marks.optimizer, when)
    purposes = find_call_purposes(trace)
    return RankEvidence(
        trace=trace,
        layout=layout,
        steps=steps,
        marks=marks,
        passes=passes,
        row=row,
        when=when,
        part=passes.classify_part(when, steps, ends),
        shards=purposes.weights[row],
        has_purpose=purposes.known[row],
        replayed=find_replayed(trace, trace.calls.event[row]),
    )


def collapse_repeats(story: str) -> str:
    """The string with runs of the same letter collapsed to one."""
    letters = np.frombuffer(story.encode("ascii"), dtype=np.uint8)
    new = np.ones(len(letters), dtype=np.bool_)
    new[1:] = letters[1:] != letters[:-1]
    return letters[new].tobytes().decode("ascii")


# Forward, backward and what follows: the part of the step of each instant.

_NEVER = np.iinfo(np.int64).max


class Passes(Struct, frozen=True):
    """The backward passes of a rank in order of time; step indexes its full steps.

    resumes_ns is the start of the next forward work, the largest int64 if there is none.
    """

    start_ns: Int64
    end_ns: Int64
    resumes_ns: Int64
    step: Int64

    def __len__(self) -> int:
        return len(self.step)

    def classify_part(self, when: Int64, steps: HostSteps, ends: Bool) -> Int64:
        """FORWARD, BACKWARD or AFTER for each instant; -1 outside steps with a backward.

        Between a backward and the next forward, ends marks what belongs to the backward.
        """
        step = steps.find_step(when)
        known = (step >= 0) & np.isin(step, self.step)
        last = self.find_latest(when)
        if not len(self):
            return np.full(len(when), -1, dtype=np.int64)
        here = known & (last >= 0) & (self.step[last] == step)
        ended = here & (when >= self.end_ns[last]) & (when < self.resumes_ns[last])
        ends_step = self.resumes_ns[last] >= steps.end_ns[step]
        part = np.where(here & (when < self.end_ns[last]), BACKWARD, FORWARD)
        part = np.where(ended & (ends | ends_step), AFTER, part)
        return np.where(known, part, -1)

    def find_latest(self, when: Int64) -> Int64:
        """The last pass that started before each instant, -1 for none."""
        return np.searchsorted(self.start_ns, when, side="right") - 1


def find_passes(marks: Landmarks, steps: HostSteps) -> Passes:
    """Finds the backward passes: autograd work without forward work in between."""
    engine = union(marks.engine.start_ns, marks.engine.end_ns)
    step = steps.find_step(engine.start_ns)
    in_step = step >= 0
    engine, step = Intervals(engine.start_ns[in_step], engine.end_ns[in_step]), step[in_step]
    work = marks.start_ns[marks.outside]
    done = np.searchsorted(work, engine.start_ns)
    new = np.ones(len(step), dtype=np.bool_)
    new[1:] = (done[1:] != done[:-1]) | (step[1:] != step[:-1])
    last = np.append(new[1:], True) if len(new) else new
    return Passes(
        start_ns=engine.start_ns[new],
        end_ns=engine.end_ns[last],
        resumes_ns=np.append(work, _NEVER)[done[new]],
        step=step[new],
    )


# Ops that locate a call in the model.

PRODUCT, ATTENTION, EMBEDDING, ROUTING = "LAEK"
"""Letters of the kinds: matrix products (GEMM), attention, embedding look-ups, expert routing."""

_KINDS = {
    "aten::linear": PRODUCT,
    "aten::mm": PRODUCT,
    "aten::addmm": PRODUCT,
    "aten::_grouped_mm": PRODUCT,
    "aten::convolution": PRODUCT,
    "aten::softmax": ATTENTION,
    "aten::_softmax": ATTENTION,
    "aten::embedding": EMBEDDING,
    "aten::topk": ROUTING,
}

_ATTENTION = re.compile(r"attention|attnfunc|flash_attn|fmha", re.IGNORECASE)

_WRAPS = ("autograd::", "torch::", "c10d", "_c10d", "nn.Module", "ProfilerStep")


class Landmarks(Struct, frozen=True):
    """Landmark ops in order of time: start and letter (ASCII code).

    outside: forward work, outside any backward or optimizer. engine has the intervals of autograd,
    optimizer those of optimizers.
    """

    start_ns: Int64
    letter: Int64
    outside: Bool
    engine: Intervals
    optimizer: Intervals


def find_landmarks(events: Events) -> Landmarks:
    letters = np.array([ord(_classify_letter(name)) for name in events.names], dtype=np.int64)
    rows = np.flatnonzero(events.is_category(Category.OP) & (letters[events.name_id] != ord(" ")))
    rows = rows[~is_traced(events, events.start_ns[rows])]
    start = events.start_ns[rows]
    engine = find_spans(events, "autograd::engine")
    optimizer = _skip_closures(find_spans(events, "Optimizer.step#"), engine)
    return Landmarks(
        start_ns=start,
        letter=letters[events.name_id[rows]],
        outside=~(is_inside(engine, start) | is_inside(optimizer, start)),
        engine=engine,
        optimizer=optimizer,
    )


def _skip_closures(optimizer: Intervals, engine: Intervals) -> Intervals:
    """The optimizers' own work: a step may call a closure with forward and backward first."""
    if not len(engine):
        return optimizer
    last = np.searchsorted(engine.start_ns, optimizer.end_ns) - 1
    within = (last >= 0) & (engine.start_ns[last] >= optimizer.start_ns)
    own_ns = np.where(within, engine.end_ns[last], optimizer.start_ns)
    return Intervals(np.minimum(own_ns, optimizer.end_ns), optimizer.end_ns)


@cache
def _classify_letter(name: str) -> str:
    if name in _KINDS:
        return _KINDS[name]
    attends = not name.startswith(_WRAPS) and _ATTENTION.search(name) is not None
    return ATTENTION if attends and "ackward" not in name else " "
