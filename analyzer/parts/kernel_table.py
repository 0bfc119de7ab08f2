"""The kernel table: which kernels (ops of a CPU run) take the time, and how far each is from what
its device can do."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from stepsplit.analyzer.arrays import number_distinct
from stepsplit.analyzer.parts.kernel_work import Limit, estimate_work, is_product
from stepsplit.analyzer.parts.part import NO_LAYER, Part, PartKind, PartPhase
from stepsplit.analyzer.parts.part_times import RankParts
from stepsplit.analyzer.split.kernel_shapes import find_dtype
from stepsplit.analyzer.split.kernels import KernelWork
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.trace import GRID, Int64

if TYPE_CHECKING:
    from stepsplit.analyzer.parts.device_limits import DeviceLimits

MAX_NAME_CHARACTERS = 200

_Kind = TypeVar("_Kind", PartKind, PartPhase)


class KernelRow(Struct, frozen=True):
    """A kernel (on a CPU: an op, without the ops nested in it) on inputs of one shape, in the full
    steps of all ranks. The rows add up to the time of all kernels.

    Attributes:
        name: name of the kernel, cut at 200 characters.
        family: kernel family, such as "gemm".
        shapes: shapes of the inputs; None if they were not recorded.
        dtype: dtype of the inputs, such as "bf16".
        parts: kinds of the parts of the model that run it, the longest first.
        part_calls: number of calls in each of these parts; empty in older reports.
        part_ns: sum of the durations in each of these parts; empty in older reports.
        phases: phases that run it, the longest first.
        layers: number of layers that run it.
        ranks: number of ranks that run it.
        slowest_rank: rank on which it takes the most time of a step.
        calls: number of calls.
        total_ns: sum of their durations.
        step_ns: its mean time in a step of a rank.
        share: share of the time of all kernels, 0..1.
        limit: what bounds it: "compute" or "memory"; "" if its work is unknown.
        flops: FLOPs of a call; None if unknown.
        bytes: bytes that a call reads and writes at least; None if unknown.
        flops_per_s: achieved FLOP/s; None if unknown or without any.
        bytes_per_s: achieved bandwidth; None if unknown.
        peak_per_s: peak of its limit: FLOP/s of the dtype, or bytes/s; None if unknown.
        peak_share: what it reaches of that peak, 0..1; None if unknown.
        reachable_ns: time of a call at the model's rate for its shape; None if unknown.
        saves_ns: what a step would save at that rate, mean of the ranks; None if unknown.
    """

    name: str
    family: str
    shapes: str | None
    dtype: str
    parts: tuple[str, ...]
    phases: tuple[str, ...]
    layers: int
    ranks: int
    slowest_rank: int
    calls: int
    total_ns: int
    step_ns: int
    share: float
    limit: Limit = ""
    flops: int | None = None
    bytes: int | None = None
    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    peak_per_s: float | None = None
    peak_share: float | None = None
    reachable_ns: int | None = None
    saves_ns: int | None = None
    part_calls: tuple[int, ...] = ()
    part_ns: tuple[int, ...] = ()


class _Sums(Struct):
    """Of a kernel: by_part has the time and the calls by the number of its part."""

    calls: int = 0
    total_ns: int = 0
    by_rank: dict[int, float] = field(default_factory=dict)
    by_part: dict[int, tuple[int, int]] = field(default_factory=dict)


def build_kernel_table(split: RunSplit, parts: Sequence[RankParts]) -> tuple[KernelRow, ...]:
    """The kernels of the full steps of all ranks, longest first; parts has one entry per rank."""
    sums: dict[tuple[KernelWork, str], _Sums] = defaultdict(_Sums)
    numbers: dict[Part, int] = {}
    rank_steps = 0
    for rank, own in zip(split.ranks, parts, strict=True):
        compute, families = rank.kernels.compute, rank.kernels.families
        n_steps = max(1, len(compute.steps))
        rank_steps += n_steps
        work, work_id = rank.kernels.work, rank.kernels.work_id.astype(np.int64)
        if not rank.trace.on_device:
            work, work_id, families = _drop_outer_shapes(rank)
        rows = [sums[key] for key in zip(work, families, strict=True)]
        # Ranks have the same parts, numbered in another order.
        number_of = [numbers.setdefault(part, len(numbers)) for part in own.parts]
        computes = np.flatnonzero(rank.trace.kinds.computes)
        place = own.compute_part[np.searchsorted(computes, compute.row)]
        codes, code = number_distinct(work_id * len(own.parts) + place, len(work) * len(own.parts))
        calls = np.bincount(code, minlength=len(codes)).tolist()
        took = np.zeros(len(codes), dtype=np.int64)
        np.add.at(took, code, compute.took_ns)
        for one, count, ns in zip(codes.tolist(), calls, took.tolist(), strict=True):
            work_number, part_number = divmod(one, len(own.parts))
            row, part = rows[work_number], number_of[part_number]
            row.calls += count
            row.total_ns += ns
            row.by_rank[own.rank] = row.by_rank.get(own.rank, 0.0) + ns / n_steps
            part_ns, part_calls = row.by_part.get(part, (0, 0))
            row.by_part[part] = part_ns + ns, part_calls + count
    everything = sum(row.total_ns for row in sums.values()) or 1
    on_device = all(rank.trace.on_device for rank in split.ranks)
    device = next((rank.trace.device for rank in split.ranks if rank.trace.device), "")
    limits = None
    if on_device:
        # What a CPU reaches is not known, and the model takes a tenth of a second to import.
        from stepsplit.analyzer.parts.device_limits import find_limits

        limits = find_limits(device)
    known = list(numbers)
    table = [
        _build_row(key, row, known, everything, rank_steps, on_device, limits)
        for key, row in sums.items()
        if row.calls
    ]
    return tuple(sorted(table, key=lambda row: (-row.total_ns, row.name, row.shapes or "")))


def _drop_outer_shapes(rank: RankSplit) -> tuple[tuple[KernelWork, ...], Int64, tuple[str, ...]]:
    """The work of ops, without the shapes of a product that runs another one: an op on DTensors has
    the shapes of all ranks, the one that it calls those of its own."""
    events, sums = rank.trace.events, rank.kernels
    rows, work = sums.compute.row.astype(np.int64), sums.work
    work_id = sums.work_id.astype(np.int64)
    counts = np.array([is_product(one.name) for one in work], dtype=np.bool_)[work_id]
    products = np.flatnonzero(counts)
    start, end = events.start_ns[rows[products]], events.ends_of(rows[products])
    lane = events.lane[rows[products]]
    order = np.lexsort((-end, start, lane))
    is_outer = (lane[order][1:] == lane[order][:-1]) & (start[order][1:] < end[order][:-1])
    outer = products[order[:-1][is_outer]]
    bare, bare_id = np.unique(work_id[outer], return_inverse=True)
    changed = work_id.copy()
    changed[outer] = len(work) + bare_id
    return (
        (*work, *(KernelWork(work[one].name, None) for one in bare.tolist())),
        changed,
        (*sums.families, *(sums.families[one] for one in bare.tolist())),
    )


def _build_row(
    key: tuple[KernelWork, str],
    sums: _Sums,
    parts: Sequence[Part],
    everything: int,
    rank_steps: int,
    on_device: bool,
    limits: DeviceLimits | None,
) -> KernelRow:
    one, family = key
    shapes = None if one.shapes is None or one.shapes.startswith(GRID) else one.shapes
    dtype = find_dtype(one)
    kinds, phases, calls = Counter[PartKind](), Counter[PartPhase](), Counter[PartKind]()
    for number, (ns, count) in sums.by_part.items():
        part = parts[number]
        kinds[part.kind] += ns
        phases[part.phase] += ns
        calls[part.kind] += count
    longest = _sort_by_time(kinds)
    row = KernelRow(
        name=one.name[:MAX_NAME_CHARACTERS],
        family=family,
        shapes=shapes,
        dtype=dtype,
        parts=tuple(kind.label for kind in longest),
        phases=tuple(phase.label for phase in _sort_by_time(phases)),
        layers=len({parts[number].layer for number in sums.by_part} - {NO_LAYER}),
        ranks=len(sums.by_rank),
        slowest_rank=max(sums.by_rank, key=lambda rank: (sums.by_rank[rank], -rank)),
        calls=sums.calls,
        total_ns=sums.total_ns,
        step_ns=sums.total_ns // max(1, rank_steps),
        share=sums.total_ns / everything,
        part_calls=tuple(calls[kind] for kind in longest),
        part_ns=tuple(kinds[kind] for kind in longest),
    )
    work = estimate_work(one, family, on_device)
    if work is None or not sums.total_ns:
        return row
    call_ns = sums.total_ns / sums.calls
    peak = None if limits is None else limits.find_peak(dtype, work.limit)
    achieved = (work.flops if work.limit == "compute" else work.bytes) / call_ns * 1e9
    if peak is not None and achieved > peak:
        # More than the device can do: the inputs are views of which a part is read, lie in a cache,
        # are those of another op, or are multiplied in another dtype (TF32).
        return row
    reachable_ns = None if limits is None else limits.compute_reachable_ns(one, work, family)
    saves_ns = None
    if reachable_ns is not None:
        saves_ns = max(0, round((call_ns - reachable_ns) * sums.calls / max(1, rank_steps)))
    return replace(
        row,
        limit=work.limit,
        flops=work.flops,
        bytes=work.bytes,
        flops_per_s=work.flops / call_ns * 1e9 if work.flops else None,
        bytes_per_s=work.bytes / call_ns * 1e9,
        peak_per_s=peak,
        peak_share=None if peak is None else achieved / peak,
        reachable_ns=None if reachable_ns is None else round(reachable_ns),
        saves_ns=saves_ns,
    )


def _sort_by_time(ns: Mapping[_Kind, int]) -> list[_Kind]:
    return sorted(ns, key=lambda one: (-ns[one], one))
