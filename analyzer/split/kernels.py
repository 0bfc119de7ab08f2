"""Kernels of a rank: families, what they computed, slowdown under concurrent communication."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import Intervals, list_distinct, union
from stepsplit.analyzer.buckets import TRANSFERS
from stepsplit.analyzer.split.steps import Steps, StepWindow
from stepsplit.analyzer.split.transfers import Pieces
from stepsplit.analyzer.trace import EventKinds, Events, Int64, RankTrace

# Compute of a rank by kernel family (GPU kernels, or ops of a CPU run).


@dataclass(frozen=True, slots=True)
class KernelFamily:
    """Compute of one kernel family on one rank, over its full steps (all steps if none is full).

    Concurrent kernels each count in full, so the sum of total_ns may exceed the compute time.

    Attributes:
        rank: Global rank.
        family: Kernel family, such as "gemm" or "attention".
        count: Number of kernels.
        total_ns: Sum of their durations in ns.
        share: total_ns over the sum of all families of the rank, 0..1.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> report.kernels[0].family, round(report.kernels[0].share, 2)
        ('gemm', 0.63)
    """

    rank: int
    family: str
    count: int
    total_ns: int
    share: float


class ComputeEvents(Struct, frozen=True):
    """Compute events of the full steps of a rank (of all steps if none is full), each counted in
    the step that has its middle: a step may begin with the begin of a kernel.

    Columns of one length, sorted by start: step is the step number, row the row of the event,
    name_id indexes names, kinds gives the family of a name. took_ns is the duration of a kernel,
    for an op of a CPU run the self time, without nested ops.
    """

    rank: int
    names: tuple[str, ...]
    kinds: EventKinds
    steps: tuple[int, ...]
    step: Int64
    row: Int64
    name_id: Int64
    took_ns: Int64


def sum_kernel_families(
    traces: Sequence[RankTrace], steps: Sequence[Steps]
) -> tuple[KernelFamily, ...]:
    """One row per rank and family, by rank and then by decreasing time.

    steps has one entry per trace.
    """
    rows = []
    for trace, own_steps in zip(traces, steps, strict=True):
        rows += _sum_families(collect_compute(trace, own_steps))
    return tuple(rows)


def collect_compute(trace: RankTrace, steps: Steps) -> ComputeEvents:
    """The compute events of the full steps of a rank (of all steps if none is full)."""
    rows, events = np.flatnonzero(trace.kinds.computes), trace.events
    took = events.dur_ns[rows] if trace.on_device else compute_self_ns(events, rows)
    full = steps.counted
    starts = np.array([window.start_ns for window in full], dtype=np.int64)
    ends = np.array([window.end_ns for window in full], dtype=np.int64)
    middle = events.start_ns[rows] + events.dur_ns[rows] // 2
    at = np.searchsorted(starts, middle, side="right") - 1
    inside = at >= 0
    inside[inside] &= middle[inside] < ends[at[inside]]
    numbers = np.array([window.step for window in full], dtype=np.int64)
    return ComputeEvents(
        rank=trace.rank,
        names=events.names,
        kinds=trace.kinds,
        steps=tuple(numbers.tolist()),
        step=numbers[at[inside]],
        row=rows[inside],
        name_id=events.name_id[rows[inside]].astype(np.int64),
        took_ns=took[inside],
    )


def compute_self_ns(events: Events, rows: Int64) -> Int64:
    """Self time of nested events: the duration without the events nested inside on the same lane.

    rows ascend. The sum over a lane is the time that its events cover.
    """
    own = events.dur_ns[rows].copy()
    for lane in list_distinct(events.lane[rows]).tolist():
        here = np.flatnonzero(events.lane[rows] == lane)
        start, end = events.start_ns[rows[here]], events.ends_of(rows[here])
        outer_first = np.lexsort((-end, start))
        here, start, end = here[outer_first], start[outer_first], end[outer_first]
        parent = _find_parents(start, end)
        nested = parent >= 0
        inside = np.minimum(end[nested], end[parent[nested]]) - start[nested]
        np.subtract.at(own, here[parent[nested]], inside)
    return np.maximum(own, 0)


def _find_parents(start: Int64, end: Int64) -> Int64:
    """The innermost enclosing event of each, -1 for none; events are sorted by start, outer
    first."""
    parent = np.full(len(start), -1, dtype=np.int64)
    left = np.arange(len(start))
    outer = np.empty(0, dtype=np.int64)
    while len(left):  # once per nesting level
        reach = np.maximum.accumulate(end[left])
        on_top = np.concatenate(([True], start[left][1:] >= reach[:-1]))
        level = left[on_top]
        if len(outer):
            parent[level] = outer[np.searchsorted(start[outer], start[level], side="right") - 1]
        left, outer = left[~on_top], level
    return parent


class KernelWork(Struct, frozen=True):
    """What a kernel or op does: its name, and its input shapes or launch grid, None if unknown.

    Runs of one name with equal shapes do the same work.
    """

    name: str
    shapes: str | None


def find_kernel_work(trace: RankTrace, rows: Int64) -> tuple[tuple[KernelWork, ...], Int64]:
    """(the distinct work of these events, the index of each event's in it)."""
    names, texts = trace.events.names, trace.shapes.texts
    shapes = len(texts) + 1
    name_id = trace.events.name_id[rows].astype(np.int64)
    codes, work_id = np.unique(
        name_id * shapes + trace.shapes.find_ids(rows) + 1, return_inverse=True
    )
    work = (divmod(code, shapes) for code in codes.tolist())
    return (
        tuple(KernelWork(names[name], texts[shape - 1] if shape else None) for name, shape in work),
        work_id,
    )


def _sum_families(compute: ComputeEvents) -> list[KernelFamily]:
    count = np.bincount(compute.name_id, minlength=len(compute.names))
    total = np.zeros(len(compute.names), dtype=np.int64)
    np.add.at(total, compute.name_id, compute.took_ns)
    counts, totals = defaultdict[str, int](int), defaultdict[str, int](int)
    for name in np.flatnonzero(count).tolist():
        family = compute.kinds.find_family(name)
        counts[family] += int(count[name])
        totals[family] += int(total[name])
    everything = sum(totals.values()) or 1
    rows = [
        KernelFamily(compute.rank, family, counts[family], ns, ns / everything)
        for family, ns in totals.items()
    ]
    return sorted(rows, key=lambda row: (-row.total_ns, row.family))


# What a kernel computed, by its name and the input shapes of the op that launched it.

GEMM_FAMILIES = ("gemm", "convolution", "moe")
"""Kernel families that are limited by FLOP/s."""

ATTENTION_FAMILY = "attention"

MEMORY_FAMILIES = (
    "elementwise", "memory", "reduce", "normalization", "softmax", "embedding", "optimizer",
    "random", "fused", "quantize", "pooling", "sort",
)  # fmt: skip
"""Kernel families that are limited by memory bandwidth."""


class GemmShape(Struct, frozen=True):
    """count products of (rows x inner) by (inner x columns)."""

    rows: int
    columns: int
    inner: int
    count: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.count * self.rows * self.columns * self.inner


class AttentionShape(Struct, frozen=True):
    """Fused attention of batch x heads heads of size head, over tokens queries and keys.

    keys may be fewer heads (GQA).
    """

    batch: int
    heads: int
    tokens: int
    head: int

    @property
    def causal_forward_flops(self) -> int:
        """FLOPs of the forward of the causal half."""
        return 2 * self.batch * self.heads * self.tokens * self.tokens * self.head


def parse_gemm(shapes: str | None) -> GemmShape | None:
    """The GEMM of these input shapes; None if they are unknown or not those of a GEMM.

    The last two matrices are multiplied: (m, k) by (k, n), or by (n, k) as in aten::linear; those
    of three dimensions are a batch.
    """
    matrices = [dims for dims in _parse_dims(shapes) if len(dims) >= 2]
    if len(matrices) < 2 or any(size <= 0 for dims in matrices[-2:] for size in dims):
        return None
    left, right = matrices[-2:]
    if len(left) == len(right) == 3 and left[0] == right[0] and left[2] == right[1]:
        return GemmShape(left[1], right[2], left[2], left[0])
    if len(right) != 2:
        return None
    if left[-1] == right[0]:
        return GemmShape(prod(left[:-1]), right[1], left[-1])
    if left[-1] == right[1]:
        return GemmShape(prod(left[:-1]), right[0], left[-1])
    return None


def parse_attention(shapes: str | None) -> AttentionShape | None:
    """The attention of these input shapes; None if they are unknown or not those of attention.

    Queries, keys and values have four dimensions, in the order batch, tokens, heads, head or batch,
    heads, tokens, head: the larger one of the middle two counts as tokens.
    """
    tensors = [dims for dims in _parse_dims(shapes) if len(dims) == 4]
    if len(tensors) < 3 or any(size <= 0 for size in tensors[0]):
        return None
    batch, one, other, head = tensors[0]
    return AttentionShape(batch, min(one, other), max(one, other), head)


def _parse_dims(shapes: str | None) -> list[list[int]]:
    """The inputs that are tensors; lists of tensors and scalars are left out."""
    end = (shapes or "").rfind("]") + 1
    if shapes is None or not shapes.startswith("["):
        return []
    try:
        inputs = json.loads(shapes[:end])
    except ValueError:
        return []
    return [dims for dims in inputs if dims and all(type(size) is int for size in dims)]


_NAMED_DTYPES = (
    ("fp8", re.compile(r"e4m3|e5m2|fp8|float8|f8f8|_F8|nvjet_(sm\d+_)?[qro]{2}")),
    ("bf16", re.compile(r"bf16|bfloat16|_BB?S_|nvjet_(sm\d+_)?t")),
    (
        "fp16",
        re.compile(
            r"fp16|float16|_h[a-z]*gemm|hgemm|f16f16|s16816gemm|_HH?S_|half|nvjet_(sm\d+_)?h"
        ),
    ),
    ("tf32", re.compile(r"tf32|s1688|nvjet_(sm\d+_)?s")),
)
"""cuBLAS names its nvjet kernels by a letter for each operand: t bf16, h fp16, s fp32, two of them
for the inputs in fp8 (nvjet_qqtst)."""


def find_dtype(work: KernelWork) -> str:
    """The dtype of a kernel's inputs: that of the recorded shapes, else by its name; fp32 if
    neither has one. tf32 is that of fp32 inputs on matrix units."""
    stated = (work.shapes or "").rpartition("]")[2].split()
    for text in (*stated, work.name):
        for dtype, pattern in _NAMED_DTYPES:
            if pattern.search(text):
                return dtype
    return "fp32"


_BACKWARD = re.compile(r"bwd|backward|dgrad|_dkv|_dq", re.IGNORECASE)


def is_backward(name: str) -> bool:
    """Whether a kernel of attention computes gradients."""
    return _BACKWARD.search(name) is not None


_KERNELS = (
    ("flash-4", re.compile(r"flash.*sm100|fa4|FlashAttention.*Sm100", re.IGNORECASE)),
    ("flash-3", re.compile(r"FlashAttn(Fwd|Bwd)Sm90|flash.*sm90|flash_attn_3", re.IGNORECASE)),
    ("cudnn", re.compile(r"cudnn|sdpa_sm\d+", re.IGNORECASE)),
    ("aiter", re.compile(r"aiter|fmha_(fwd|bwd)_hd\d+.*(bf16|fp16).*(rtne|rtna|rtz|a16|a32)")),
    ("ck", re.compile(r"ck_tile|FmhaFwdKernel|FmhaBwd")),
    ("triton", re.compile(r"^attn_(fwd|bwd)|triton_tem|^_(attn_)?(fwd|bwd)_")),
    ("flash-2", re.compile(r"flash::?|flash_(fwd|bwd)|fmha", re.IGNORECASE)),
)


def find_attention_kernel(name: str) -> str:
    """The implementation of fused attention that this kernel is of, as `attention_kernel` in
    job.toml; "" if its name says none."""
    return next((kernel for kernel, pattern in _KERNELS if pattern.search(name)), "")


# Slowdown of kernels under concurrent communication.

MIN_PLACES = 10
"""Minimum number of kernels that ran both with and without communication."""


class Contention(Struct, frozen=True):
    """Slowdown of compute under concurrent data transfer: ratio of times with and without it.

    places is the number of kernels of a step that were compared, under and alone the number of runs
    with and without communication; lost_ns is the extra time of the runs under communication, over
    all steps.
    """

    ratio: float
    places: int
    under: int
    alone: int
    lost_ns: int


def measure_contention(trace: RankTrace, steps: Steps, pieces: Pieces) -> Contention | None:
    """Compares kernels that overlap with data transfer with the same kernels that do not.

    Overlapped means for at least half of the kernel's time; None for fewer than MIN_PLACES
    comparable kernels.

    A trace has no shapes, and kernels of the same name under communication often have other shapes.
    So only the n-th run of a name in a step is compared with the n-th run in other full steps that
    run the name equally often. The ratio is between medians; each kernel is weighted by its time
    without communication. Runs overlapped for less than half their time are ignored.
    """
    rows = np.flatnonzero(trace.kinds.computes)
    start, took = trace.events.start_ns[rows], trace.events.dur_ns[rows]
    place = _number_places(trace.events.name_id[rows].astype(np.int64), start, steps.windows)
    covered_ns = _measure_covered_ns(start, took, _merge_moving(pieces))
    under, alone = (
        (place >= 0) & (2 * covered_ns >= took) & (took > 0),
        (place >= 0) & (covered_ns == 0),
    )
    both = np.intersect1d(place[under], place[alone])
    if len(both) < MIN_PLACES:
        return None
    under, alone = under & np.isin(place, both), alone & np.isin(place, both)
    runs = np.bincount(np.searchsorted(both, place[under]))
    took_ns = float(runs @ _compute_medians(place[under], took[under]))
    alone_ns = float(runs @ _compute_medians(place[alone], took[alone]))
    lost_ns = round(took_ns - alone_ns)
    return Contention(
        took_ns / max(alone_ns, 1.0), len(both), int(under.sum()), int(alone.sum()), lost_ns
    )


def _merge_moving(pieces: Pieces) -> Intervals:
    """The intervals in which data moves; a waiting call uses neither memory nor links."""
    moving = np.isin(pieces.bucket, TRANSFERS)
    return union(pieces.start_ns[moving], pieces.end_ns[moving])


def _number_places(name: Int64, start: Int64, windows: Sequence[StepWindow]) -> Int64:
    """A number for each (name, n-th run in its step); -1 outside full steps and in steps that run
    the name more or less often than usual. start ascends."""
    full = [w for w in windows if w.kind == "full"]
    step = np.searchsorted([w.start_ns for w in full], start, side="right") - 1
    inside = step >= 0
    inside[inside] &= start[inside] < np.array([w.end_ns for w in full])[step[inside]]
    place, first = np.full(len(name), -1, dtype=np.int64), 0
    rows = np.flatnonzero(inside)
    rows = rows[np.lexsort((rows, step[rows], name[rows]))]
    for same in np.split(rows, np.flatnonzero(np.diff(name[rows])) + 1):
        counts = np.bincount(step[same], minlength=len(full))
        usual = int(np.bincount(counts[counts > 0]).argmax()) if len(same) else 0
        nth = np.arange(len(same)) - np.repeat(np.cumsum(counts) - counts, counts)
        place[same] = np.where(counts[step[same]] == usual, first + nth, -1)
        first += usual
    return place


def _compute_medians(place: Int64, took: Int64) -> Int64:
    """The median of each place; for an even count the lower of the two middle values."""
    order = np.lexsort((took, place))
    _, first, count = np.unique(place[order], return_index=True, return_counts=True)
    return np.asarray(took[order][first + (count - 1) // 2])


def _measure_covered_ns(start: Int64, took: Int64, by: Intervals) -> Int64:
    """The time for which each interval is covered by the set."""
    sums = np.concatenate(([0], np.cumsum(by.end_ns - by.start_ns)))

    def until(at: Int64) -> Int64:
        begun = np.searchsorted(by.start_ns, at, side="right")
        last = np.maximum(begun - 1, 0)
        over = np.maximum(by.end_ns[last] - at, 0) if len(by) else np.zeros_like(at)
        return np.asarray(sums[begun] - np.where(begun > 0, over, 0))

    return until(start + took) - until(start)
