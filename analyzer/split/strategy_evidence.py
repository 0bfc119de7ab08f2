"""Evidence for the strategies used in a step: calls, their order, and the passes around them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from stepsplit.analyzer.arrays import Intervals, is_inside, union
from stepsplit.analyzer.split.classify import DDP_FORWARD, find_call_purposes, find_spans
from stepsplit.analyzer.split.mesh import DATA_AXES, RankLayout
from stepsplit.analyzer.split.mesh_inference import SCALAR_BYTES
from stepsplit.analyzer.split.steps import MERGED, Steps, StepWindow
from stepsplit.analyzer.trace import OP_CODE, OPS, Bool, Category, Events, Group, Int64, RankTrace
from stepsplit.collectors.formats.run_spec import AXES

# Data parallel strategies: ddp, zero-1, zero-2, fsdp, hsdp.

_SUMS = ("all_reduce", "reduce_scatter", "reduce")

FORWARD, BACKWARD, AFTER = range(3)
"""The parts of a step. AFTER follows the last backward, where optimizers run; gradients reduced
between a backward and the next forward also count as AFTER."""

_LATE = (BACKWARD, AFTER)

_RETURNS = ("all_gather", "broadcast")

_LEAST_WEIGHTS = 0.2
"""Minimum bytes of updated weights per byte of gradients: fp8 weights of fp32 gradients give 0.25,
evaluations and checkpoints gather less."""

_ZERO = "Optimizer.step#ZeroRedundancyOptimizer"

_DEEPSPEED_ZERO_3 = "PreBackwardFunctionForModule"
"""The autograd function around each module in deepspeedai/DeepSpeed, runtime/zero,
parameter_offload.py."""

_MEGATRON = "MODEL_PARALLEL_GROUP"


class _Use(Struct, frozen=True):
    """Tensor traffic on a group: counts and bytes per step, shape (parts, ops).

    marked: FSDP annotations mark these calls.
    """

    group: Group
    axes: frozenset[str]
    counts: Counts
    bytes: Counts
    marked: bool

    def is_called(self, part: int, *ops: str) -> bool:
        return bool(self.counts[part, _list_codes(*ops)].any())

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are reduced, on all ranks or on their owners."""
        return any(self.is_called(part, *_SUMS) for part in _LATE)

    @property
    def scatters(self) -> bool:
        """Whether each rank gets only its own part of the reduced gradients."""
        return any(self.is_called(part, "reduce_scatter", "reduce") for part in _LATE)

    @property
    def shards(self) -> bool:
        """Whether weights are gathered before use."""
        return self.is_called(FORWARD, "all_gather") and self.scatters

    @property
    def may_return_weights(self) -> bool:
        """Whether weights may be gathered or broadcast at all."""
        return any(self.is_called(p, *_RETURNS) for p in (FORWARD, AFTER))

    @property
    def returns_weights(self) -> bool:
        """Whether weights of about the size of the gradients are gathered after the backward."""
        back = self.bytes[AFTER, _list_codes(*_RETURNS)].sum()
        summed = self.bytes[BACKWARD:, _list_codes(*_SUMS)].sum()
        return self.is_called(AFTER, *_RETURNS) and bool(back >= _LEAST_WEIGHTS * summed)


class DataParallel(Struct, frozen=True):
    """The strategies of a rank's data parallel groups."""

    strategies: tuple[Strategy, ...]
    groups: tuple[Group, ...]


def detect_data_strategies(evidence: RankEvidence, taken: Collection[Group]) -> DataParallel:
    """Strategies of the rank's data parallel groups; taken are groups used for something else."""
    uses = [
        use for use in _list_uses(evidence) if use.group not in taken and _is_data(evidence, use)
    ]
    groups, sharded = tuple(use.group for use in uses), [use for use in uses if use.shards]
    if not sharded:
        return DataParallel(
            tuple(s for use in uses for s in _classify_replicated(evidence, use)), groups
        )
    replica_uses = [use for use in uses if not use.shards and _is_shard_replica(use)]
    replicas = max((len(use.group.ranks) for use in replica_uses), default=1)
    return DataParallel(
        tuple(_classify_sharded(evidence, use, replicas) for use in sharded), groups
    )


def detect_wrapped_ddp(evidence: RankEvidence, groups: Collection[Group]) -> list[Strategy]:
    """DistributedDataParallel around the cp groups, whose ranks have the same weights."""
    uses = [
        use
        for use in _list_uses(evidence)
        if use.group in groups and use.is_called(BACKWARD, *_SUMS)
    ]
    sizes = [len(use.group.ranks) for use in uses] if _has_event(evidence, DDP_FORWARD) else []
    return [Strategy("ddp", "cp", size) for size in sizes]


def count_gradient_sums(evidence: RankEvidence, groups: Collection[Group]) -> int:
    """After how many backward passes, over all steps, the rank reduces gradients on the groups."""
    summing = np.zeros(len(evidence.row), dtype=np.bool_)
    for group in groups:
        summing |= evidence.is_on(group)
    summing &= evidence.is_op(*_SUMS) & evidence.is_tensor & np.isin(evidence.part, _LATE)
    return len(np.unique(evidence.passes.find_latest(evidence.when[summing])))


def _is_shard_replica(use: _Use) -> bool:
    """Whether the group reduces shards across replicas of the model."""
    return use.marked or "dp_replicate" in use.axes


def _list_uses(evidence: RankEvidence) -> list[_Use]:
    return [
        _build_use(evidence, group, evidence.is_on(group) & evidence.is_tensor)
        for group in evidence.list_groups()
    ]


def _build_use(evidence: RankEvidence, group: Group, mask: Bool) -> _Use:
    marked = bool((mask & evidence.shards & evidence.is_op("all_gather", *_SUMS)).any())
    axes = evidence.layout.find_axes(group)
    return _Use(group, axes, evidence.count_per_step(mask), evidence.sum_bytes(mask), marked)


def _is_data(evidence: RankEvidence, use: _Use) -> bool:
    """Whether the group reduces gradients of data parallel ranks.

    A group of unknown axis does if it reduces in no forward. Groups across stages do not:
    embeddings of the first and last stage are reduced like gradients. Without ProfilerStep marks it
    is unknown whether weights are gathered after one step or before the next.
    """
    if (
        not use.sums_gradients
        or len({evidence.layout.find_stage(rank) for rank in use.group.ranks}) > 1
    ):
        return False
    if use.marked:
        return True
    if use.may_return_weights and not (evidence.steps.marked or _has_event(evidence, _ZERO)):
        return False
    if use.axes:
        return use.axes == {"ep"} or (use.axes <= DATA_AXES and use.axes != {"cp"})
    return not use.is_called(FORWARD, "all_reduce", "reduce_scatter")


def _classify_sharded(evidence: RankEvidence, use: _Use, replicas: int) -> Strategy:
    """Sharded weights: gathered for each use (fsdp), or kept from forward to backward (zero-2).

    Megatron-LM's distributed optimizer (ZeRO-1) may gather them in the next forward. DeepSpeed's
    ZeRO-3 keeps weights that are needed again soon.
    """
    axis, size = format_axes(use.axes - {"ep"}, "dp_shard"), len(use.group.ranks)
    again = use.is_called(BACKWARD, "all_gather")
    if replicas > 1:
        detail = "" if again else ", weights kept until the backward"
        return Strategy("hsdp", axis, size, f"{replicas} replicas{detail}")
    if again:
        return Strategy("fsdp", axis, size)
    if _has_event(evidence, _DEEPSPEED_ZERO_3):
        return Strategy("fsdp", axis, size, "weights kept until the backward")
    if not use.marked and _is_megatron(evidence):
        return Strategy("zero-1", axis, size)
    return Strategy("zero-2", axis, size, "weights kept until the backward")


def _classify_replicated(evidence: RankEvidence, use: _Use) -> list[Strategy]:
    """Replicated weights: ddp, or zero-1 / zero-2 if updated weights are gathered after the
    optimizer."""
    axis, size = format_axes(use.axes - {"ep"}, "dp_replicate"), len(use.group.ranks)
    if not use.returns_weights and not _has_event(evidence, _ZERO):
        return [] if use.scatters else [Strategy("ddp", axis, size)]
    return [Strategy(*_classify_zero_stage(evidence, use, axis, size))]


def _classify_zero_stage(
    evidence: RankEvidence, use: _Use, axis: str, size: int
) -> tuple[str, str, int, str]:
    """Distinguishes ZeRO-1 from ZeRO-2, and from ZeRO-3 of a small model.

    ZeRO-2 reduce-scatters gradients during the backward or after each microbatch; ZeRO-1 reduces
    them once. With one microbatch, reduced after the backward, both have the same traffic.
    DeepSpeed's ZeRO-3 keeps small weights on all ranks.
    """
    if _has_event(evidence, _DEEPSPEED_ZERO_3):
        return "fsdp", axis, size, "weights too small to shard"
    if _is_megatron(evidence) or _has_event(evidence, _ZERO):
        return "zero-1", axis, size, ""
    if use.is_called(BACKWARD, "reduce_scatter", "reduce"):
        return "zero-2", axis, size, "gradients scattered during the backward"
    if len(evidence.passes) <= len(evidence.steps):
        return "zero-1", axis, size, "or zero-2: with one microbatch they send the same"
    sums_each_pass = count_gradient_sums(evidence, [use.group]) == len(evidence.passes)
    return ("zero-2" if sums_each_pass else "zero-1"), axis, size, ""


def _is_megatron(evidence: RankEvidence) -> bool:
    return any(_MEGATRON in group.description.upper() for group in evidence.trace.groups)


def _has_event(evidence: RankEvidence, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in evidence.trace.events.names)


def _list_codes(*ops: str) -> list[int]:
    return [OP_CODE[op] for op in ops]


# Names of the detected strategies.

NAMES = (
    "ddp",
    "zero-1",
    "zero-2",
    "fsdp",
    "hsdp",
    "tp",
    "sp",
    "vocabulary",
    "loss",
    "cp",
    "ep",
    "pp",
    "gradient accumulation",
    "recompute",
    "offload",
    "autocast",
    "fp8",
    "mixed precision",
    "loss scaling",
)
"""In display order; names that predicted messages also have are spelled like those."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A parallelism or memory strategy detected in the recorded steps.

    Only strategies with unambiguous evidence are listed.

    Attributes:
        name: One of "ddp", "zero-1", "zero-2", "fsdp", "hsdp", "tp", "sp", "vocabulary", "loss",
            "cp", "ep", "pp", "gradient accumulation", "recompute", "offload", "autocast", "fp8",
            "mixed precision", "loss scaling".
        axis: Mesh axis along which ranks share the work; None if it has none.
        size: Number of ranks along the axis; None without an axis.
        detail: The variant or further evidence: the schedule of pp, "ring", "all-gather" or
            "ulysses" for cp, "full" or "selective" for recompute; "" if there is none.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> [strategy.in_words for strategy in report.run.strategies]
        ['tp 2', 'pp 2 (1f1b)']
    """

    name: str
    axis: str | None = None
    size: int | None = None
    detail: str = ""

    @property
    def in_words(self) -> str:
        """Name, number of ranks, axis and detail in one line, such as "fsdp 8 on dp_shard"."""
        size = f" {self.size}" if self.size is not None else ""
        axis = f" on {self.axis}" if self.axis not in (None, "tp", self.name) else ""
        return self.name + size + axis + (f" ({self.detail})" if self.detail else "")


def count_accumulated_microbatches(strategies: Iterable[Strategy]) -> int | None:
    """Microbatches per step with gradient accumulation, from the detected strategies; None if there
    is none, as in a pipeline."""
    details = [one.detail for one in strategies if one.name == "gradient accumulation"]
    count = re.match(r"\d+", details[0]) if details else None
    return int(count.group()) if count else None


def format_axes(axes: Collection[str], unknown: str) -> str:
    """The axes of a group joined in mesh order, such as "dp_shard x cp"; unknown if there are
    none."""
    return " x ".join(sorted(axes, key=AXES.index)) or unknown


# Calls of one rank in its full steps, as evidence of its strategies.

Counts = npt.NDArray[np.float64]

CALL, BACKWARD_BEGINS = "X", "|"

_REDUCES = [OP_CODE[op] for op in ("all_reduce", "reduce_scatter", "reduce")]


class RankEvidence(Struct, frozen=True):
    """The calls of a rank in its full steps, one row each in trace order; columns of one length.

    part is FORWARD, BACKWARD or AFTER, -1 if unknown; shards: issued by FSDP. has_purpose: a range
    around the call shows that it moves gradients, weights or activations.
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

    def count_per_step(self, mask: Bool) -> Counts:
        """Number of these calls per step, shape (parts, ops)."""
        return self._compute_per_step(mask, None)

    def sum_bytes(self, mask: Bool) -> Counts:
        """Bytes of these calls per step, shape (parts, ops)."""
        return self._compute_per_step(mask, np.maximum(self.message_bytes, 0))

    def _compute_per_step(self, mask: Bool, weights: Int64 | None) -> Counts:
        mask = mask & (self.part >= 0)
        place = self.part[mask] * len(OPS) + self.op[mask]
        call_weights = None if weights is None else weights[mask]
        size = 3 * len(OPS)
        return np.bincount(place, call_weights, size).reshape(3, len(OPS)) / max(1, len(self.steps))

    def build_sequence(self, mask: Bool) -> str:
        """The forward work of all steps as a string: X for each of these calls issued in a forward,
        the letters of the landmarks, and | at the start of a backward."""
        mask = mask & (self.part == FORWARD)
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


# In which step the host issued each call.

_MARK = "ProfilerStep#"


class HostSteps(Struct, frozen=True):
    """The full steps of a rank in order, each from start_ns to end_ns.

    marked: ProfilerStep marks give the host times. Otherwise the steps are inferred from repetition
    and, for a device trace, use device times: on_device.
    """

    number: tuple[int, ...]
    start_ns: Int64
    end_ns: Int64
    marked: bool
    on_device: bool

    def __len__(self) -> int:
        return len(self.number)

    def find_step(self, when: Int64) -> Int64:
        """The index of the step at each instant, -1 for none."""
        step = np.searchsorted(self.start_ns, when, side="right") - 1
        within = step >= 0
        within[within] = when[within] < self.end_ns[step[within]]
        return np.where(within, step, -1)


def build_host_steps(trace: RankTrace, steps: Steps) -> HostSteps:
    """The full steps of the rank (all steps if none is full) in host time."""
    is_merged = any(note.code == MERGED for note in steps.notes)
    numbers = {window.step for window in steps.windows} if is_merged else None
    marks = _read_marked_steps(trace.events, numbers)
    counted = [w for w in steps.counted if not marks or w.step in marks]
    spans = [marks[w.step] if marks and trace.on_device else w for w in counted]
    return _make_host_steps(spans, marked=bool(marks), on_device=trace.on_device and not marks)


def take_whole_trace(trace: RankTrace) -> HostSteps:
    """The whole trace as one host step."""
    first, last = int(trace.events.start_ns.min()), int(trace.events.end_ns.max())
    return _make_host_steps([StepWindow(0, "full", first, last)], marked=False, on_device=False)


def _make_host_steps(spans: Sequence[StepWindow], *, marked: bool, on_device: bool) -> HostSteps:
    return HostSteps(
        number=tuple(span.step for span in spans),
        start_ns=np.array([span.start_ns for span in spans], dtype=np.int64),
        end_ns=np.array([span.end_ns for span in spans], dtype=np.int64),
        marked=marked,
        on_device=on_device,
    )


def compute_issued_ns(trace: RankTrace, steps: HostSteps) -> Int64:
    """The issue time of each call, on the clock of the steps; -1 if unknown."""
    starts = trace.events.start_ns[trace.calls.event]
    if steps.on_device:
        return starts
    unknown = -1 if trace.on_device else starts
    return np.where(trace.calls.issued_ns >= 0, trace.calls.issued_ns, unknown)


def find_issue_step(trace: RankTrace, steps: HostSteps, leads: Bool) -> Int64:
    """The index of the step in which each call was issued; -1 for none, and for all but the first
    row of a call with several kernels."""
    return np.where(leads, steps.find_step(compute_issued_ns(trace, steps)), -1)


def _read_marked_steps(events: Events, numbers: Set[int] | None) -> dict[int, StepWindow]:
    """The marked steps by number, each from the end of the previous one, the first from its
    start; numbers: those of the last marks of merged steps, None for all."""
    rows = np.flatnonzero(
        events.match_prefix(_MARK) & events.is_category(Category.ANNOTATION, Category.OP)
    )
    by_number: dict[int, StepWindow] = {}
    begin = int(events.start_ns[rows[0]]) if len(rows) else 0
    for row, end in zip(rows.tolist(), events.ends_of(rows).tolist(), strict=True):
        number = events.name_of(row).removeprefix(_MARK)
        is_last = number.isdecimal() and (numbers is None or int(number) in numbers)
        if is_last and end > begin:
            by_number[int(number)] = StepWindow(int(number), "full", begin, end)
            begin = end
    return by_number
