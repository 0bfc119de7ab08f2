"""The time of each part of the model: every instant of a step in exactly one part and bucket."""

from __future__ import annotations

from typing import Literal

import numpy as np
from msgspec import Struct, structs

from stepsplit.analyzer.arrays import (
    Intervals,
    intersect,
    list_distinct,
    number_distinct,
    trim_overlaps,
)
from stepsplit.analyzer.buckets import BUCKETS, COMMUNICATION, Bucket
from stepsplit.analyzer.parts.host_scopes import (
    OUTSIDE_PASSES,
    HostScopes,
    PartNumbers,
    find_host_scopes,
)
from stepsplit.analyzer.parts.kernel_modules import find_stated_parts
from stepsplit.analyzer.parts.kernel_sequence import find_kernel_parts
from stepsplit.analyzer.parts.layer_sequence import Size, find_size
from stepsplit.analyzer.parts.part import NO_LAYER, UNPLACED, Part, PartKind, PartPhase
from stepsplit.analyzer.parts.scope_names import find_fused_kind, find_said_kind
from stepsplit.analyzer.readers.kineto.captured_graphs import find_captured_launches
from stepsplit.analyzer.split.call_purposes import find_issue_ns, has_engine, is_in_gradient_hook
from stepsplit.analyzer.split.kernel_shapes import is_backward
from stepsplit.analyzer.split.kernels import find_kernel_work
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.split.work import mask_families
from stepsplit.analyzer.trace import Category, EventKind, Int32, Int64, UInt8

Evidence = Literal["modules", "sequence", "ranges", "none"]
"""What places work in the model: ranges of its modules; the repeating sequence of ops, or that of
kernels where the host says no layers; other ranges and ops by their names, which have kinds and no
layers; nothing."""


class RankParts(Struct, frozen=True):
    """The time of a rank by part.

    Attributes:
        rank: Global rank.
        parts: The distinct parts.
        ns: Time by step of the rank, part and bucket, in ns; those of a step add up to its buckets.
        compute_part: The part of each event that computes, in their order, as an index of parts.
        evidence: What places most of it.
    """

    rank: int
    parts: tuple[Part, ...]
    ns: Int64
    compute_part: Int32
    evidence: Evidence


def compute_part_times(split: RunSplit) -> tuple[RankParts, ...]:
    """The time by part of each rank, in order. Layers whose numbers the recording does not state
    count from the first of the first stage."""
    found = [_compute_rank(rank) for rank in split.ranks]
    layers_of_stage: dict[int, int] = {}
    stages = [split.layout.find_stage(rank.trace.rank) for rank in split.ranks]
    for stage, (one, _) in zip(stages, found, strict=True):
        count = 1 + max((part.layer for part in one.parts), default=NO_LAYER)
        layers_of_stage[stage] = max(count, layers_of_stage.get(stage, 0))
    rows = []
    for stage, (one, are_stated) in zip(stages, found, strict=True):
        before = sum(layers_of_stage.get(other, 0) for other in range(stage))
        if are_stated or not before:
            rows.append(one)
            continue
        parts = tuple(
            Part(part.layer + before * (part.layer != NO_LAYER), part.kind, part.phase)
            for part in one.parts
        )
        rows.append(RankParts(one.rank, parts, one.ns, one.compute_part, one.evidence))
    return tuple(rows)


def _compute_rank(rank: RankSplit) -> tuple[RankParts, bool]:
    """The parts of a rank, and whether its layers have the numbers of the model."""
    numbers = PartNumbers()
    trace, band = rank.trace, rank.attribution.band
    scopes = find_host_scopes(trace, numbers)
    event_part, has_stated = _place_events(rank, scopes)
    has_layers = scopes.n_layers > 0 or has_stated
    evidence: Evidence = "ranges"
    if not has_layers and trace.on_device:
        rows, parts = find_kernel_parts(rank)
        event_part[rows] = [numbers[part] for part in parts]
        evidence = "sequence" if parts else evidence
    if trace.on_device and (not has_layers or scopes.by_sequence):
        _place_in_slots(rank, event_part, numbers, is_unplaced=not has_layers)
    if trace.on_device:
        _place_products_by_size(rank, event_part, numbers)
    if has_layers or scopes.by_sequence:
        evidence = "sequence" if scopes.by_sequence and not has_stated else "modules"
    elif evidence == "ranges" and scopes.has_names:  # of a model without layers
        evidence = "modules"
    call_parts = _place_calls(rank, scopes)
    exposed_part = call_parts[rank.attribution.exposed.call]
    exposed = rank.attribution.exposed
    pieces: list[_Bands] = [
        (exposed.window, exposed.bucket, exposed_part, exposed.end_ns - exposed.start_ns)
    ]
    rest = np.flatnonzero(~np.isin(band.bucket, COMMUNICATION))
    if trace.on_device:
        pieces.append(_place_device_bands(rank, scopes, event_part, call_parts, rest))
    else:
        # On a CPU the host itself works: its bands, cut where its place in the model changes.
        line = scopes.timelines.get(scopes.main)
        inner = line.edges_ns[1:] if line else np.empty(0, dtype=np.int64)
        edges = np.concatenate(([_LEAST], inner, [_MOST]))
        cut = intersect(
            Intervals(band.start_ns[rest], band.end_ns[rest]), Intervals(edges[:-1], edges[1:])
        )
        own = rest[cut.left]
        place = scopes.find_parts(np.full(len(own), scopes.main), cut.start_ns)
        pieces.append((band.window[own], band.bucket[own], place, cut.end_ns - cut.start_ns))
    window, bucket, part, ns = (np.concatenate(column) for column in zip(*pieces, strict=True))
    total = np.zeros((len(rank.steps), len(numbers), len(BUCKETS)), dtype=np.int64)
    np.add.at(total, (window, part, bucket), ns)
    for step, by_bucket in zip(rank.steps, total.sum(axis=1).tolist(), strict=True):
        assert tuple(by_bucket) == step.split.buckets_ns, f"parts do not fill {step}"
    if not total[:, 1:].any():
        evidence = "none"
    # Only these are kept, since a recording may have thousands of ranks.
    compute_part = event_part[trace.kinds.computes].astype(np.int32)
    are_numbered = scopes.has_names or has_stated
    return RankParts(trace.rank, tuple(numbers), total, compute_part, evidence), are_numbered


def _place_events(rank: RankSplit, scopes: HostScopes) -> tuple[Int64, bool]:
    """The part of each event that computes or copies, and whether kernels state layers: that of its
    launch, or of its own start on a host; else of the module that it states itself; a kernel
    outside of everything by its family."""
    trace, events = rank.trace, rank.trace.events
    part = np.zeros(len(events), dtype=np.int64)
    rows = np.flatnonzero(trace.kinds.computes | trace.kinds.is_kind(EventKind.COPY))
    at = rows
    if trace.on_device:
        communicates = trace.kinds.is_kind(EventKind.COMMUNICATION)
        at = find_captured_launches(events, communicates)[rows]
    part[rows] = scopes.find_parts_of(at)
    parts, has_layers = list(scopes.numbers), False
    for row, stated in find_stated_parts(events, rows).items():
        one = parts[part[row]]
        if one.kind == PartKind.OTHER and one.layer == NO_LAYER:
            phase = stated.phase if one.phase == PartPhase.OTHER else one.phase
            part[row] = scopes.numbers[structs.replace(stated, phase=phase)]
            has_layers |= stated.layer != NO_LAYER
    if trace.on_device:
        computes = np.flatnonzero(trace.kinds.computes)
        part[computes] = _refine_by_name(rank, computes, part[computes], scopes.numbers)
    return part, has_layers


_KIND_OF_FAMILY = {
    "attention": PartKind.ATTENTION,
    "optimizer": PartKind.OPTIMIZER,
    "embedding": PartKind.EMBEDDING,
    "normalization": PartKind.NORM,
    "moe": PartKind.EXPERTS,
}


def _refine_by_name(rank: RankSplit, rows: Int64, part: Int64, numbers: PartNumbers) -> Int64:
    """The parts, of a kind by what the kernels fuse, their family, or their own name, where the
    ranges say none."""
    kinds, events = rank.trace.kinds, rank.trace.events
    parts = list(numbers)
    codes, inverse = number_distinct(
        part * len(events.names) + events.name_id[rows], len(parts) * len(events.names)
    )
    kind_of_name, turned = dict[int, PartKind | None](), set[PartKind | None]()
    for number in {code % len(events.names) for code in codes.tolist()}:
        name, family = events.names[number], kinds.find_family(number)
        kind = find_fused_kind(name)
        if kind is None:
            kind = _KIND_OF_FAMILY.get(family, find_said_kind(name))
        kind_of_name[number] = kind
        turned |= {kind} if is_backward(name) else set()
    has_experts = PartKind.EXPERTS in kind_of_name.values()
    refined = []
    for code in codes.tolist():
        place, number = divmod(code, len(events.names))
        one, kind = parts[place], kind_of_name[number]
        if kind == PartKind.MLP and has_experts:
            # Experts run the same activations.
            kind = None
        if one.kind != PartKind.OTHER or kind is None:
            refined.append(place)
        elif kind == PartKind.OPTIMIZER:
            # Lists of tensors are also clipped, scaled and copied elsewhere.
            is_outside = one.layer == NO_LAYER and one.phase == PartPhase.OTHER
            refined.append(numbers[Part(kind=kind)] if is_outside else place)
        else:
            phase = one.phase
            if one == UNPLACED and kind in turned:
                # Those that are not named so are the forward.
                is_back = is_backward(events.names[number])
                phase = PartPhase.BACKWARD if is_back else PartPhase.FORWARD
            refined.append(numbers[Part(one.layer, kind, phase)])
    return np.array(refined, dtype=np.int64)[inverse]


def _place_in_slots(
    rank: RankSplit, event_part: Int64, numbers: PartNumbers, is_unplaced: bool
) -> None:
    """Gives what nothing places in a pass that of the pipeline's schedule at its time.

    is_unplaced: whether no layer is known; else only without autograd's ranges. An op's name alone
    does not say of which pass it is, that of a kernel may.
    """
    trace, slots, has_autograd = rank.trace, rank.slots.slots, has_engine(rank.trace.events)
    if not slots or (has_autograd and not is_unplaced):
        return
    unsure = [PartPhase.OTHER]
    if not has_autograd and not any(map(is_backward, trace.events.names)):
        unsure.append(PartPhase.FORWARD)
    parts = list(numbers)
    outside = [
        place
        for place, one in enumerate(parts)
        if one.phase in unsure and one.kind not in OUTSIDE_PASSES
    ]
    rows = np.flatnonzero(trace.kinds.computes & np.isin(event_part, outside))
    begins = np.array([slot.start_ns for slot in slots], dtype=np.int64)
    ends = np.array([slot.end_ns for slot in slots], dtype=np.int64)
    at = begins.searchsorted(trace.events.start_ns[rows], side="right") - 1
    inside = (at >= 0) & (trace.events.ends_of(rows) <= ends[at])
    rows = rows[inside]
    is_forward = np.array([slot.phase == "forward" for slot in slots])[at[inside]]
    # Many events are of one part in one pass.
    pairs = list(zip(event_part[rows].tolist(), is_forward.tolist(), strict=True))
    placed = {
        (place, forward): numbers[
            structs.replace(
                parts[place], phase=PartPhase.FORWARD if forward else PartPhase.BACKWARD
            )
        ]
        for place, forward in dict.fromkeys(pairs)
    }
    event_part[rows] = [placed[pair] for pair in pairs]


def _place_products_by_size(rank: RankSplit, event_part: Int64, numbers: PartNumbers) -> None:
    """Places the products of a backward that nothing else does: torch.compile makes one node of a
    whole backward, and names only what it fuses. The two products of a gradient have the sizes of
    their forward's in another order, so they are of its kind if all forwards of these sizes are."""
    parts = list(numbers)
    is_plain = [one.kind == PartKind.OTHER and one.phase == PartPhase.BACKWARD for one in parts]
    rows = np.flatnonzero(mask_families(rank.trace, {"gemm"}))
    if not np.array(is_plain)[event_part[rows]].any():
        return
    work, work_id = find_kernel_work(rank.trace, rows)
    sizes = [find_size(one.shapes) for one in work]
    # Many products are of one work in one part.
    codes, code = number_distinct(work_id * len(parts) + event_part[rows], len(work) * len(parts))
    pairs = [divmod(one, len(parts)) for one in codes.tolist()]
    kinds: dict[Size, set[PartKind]] = {}
    for number, place in pairs:
        size = sizes[number]
        if size is not None and parts[place].phase == PartPhase.FORWARD:
            kinds.setdefault(size, set()).add(parts[place].kind)
    placed = []
    for number, place in pairs:
        found = kinds.get(sizes[number] or (), set())
        if is_plain[place] and len(found) == 1:
            place = numbers[structs.replace(parts[place], kind=next(iter(found)))]
        placed.append(place)
    event_part[rows] = np.array(placed, dtype=np.int64)[code]


def _place_calls(rank: RankSplit, scopes: HostScopes) -> Int64:
    """The part of each call: the reduction of gradients, else where the host issued it."""
    trace, numbers = rank.trace, scopes.numbers
    calls, events = trace.calls, trace.events
    when = find_issue_ns(trace)
    launches = events.find_launches(calls.event)
    row = np.where(launches >= 0, launches, calls.event)
    thread = scopes.thread_of_lane[events.lane[row]]
    part = scopes.find_parts(thread, np.where(launches >= 0, events.start_ns[row], when))
    # The worker of a gloo call has no ranges: the thread that issued it, which steps the job.
    if scopes.main >= 0:
        unknown = part == 0
        main = np.full(int(unknown.sum()), scopes.main)
        part[unknown] = scopes.find_parts(main, when[unknown])
    reduces = is_in_gradient_hook(events, when) & ~calls.is_message
    of_phase = np.array([phase == "grad_sync" for phase in rank.phase], dtype=np.bool_)
    reduces[rank.attribution.exposed.call[of_phase]] = True
    parts = list(numbers)
    for place in list_distinct(part[reduces]).tolist():
        of_layer = Part(parts[place].layer, PartKind.GRADIENT_REDUCTION, PartPhase.OTHER)
        part[reduces & (part == place)] = numbers[of_layer]
    return part


_Bands = tuple[Int32, UInt8, Int64, Int64]
"""Window, bucket, part and duration of each piece of the bands."""


_LEAST, _MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def _place_device_bands(
    rank: RankSplit, scopes: HostScopes, event_part: Int64, call_parts: Int64, rows: Int64
) -> _Bands:
    """Compute and copies are of the event that runs, of several the first; idle time is of the
    event that ends it, whose launch was late, or of what the host does after the last one."""
    trace, band = rank.trace, rank.attribution.band
    events = trace.events
    pieces: list[_Bands] = []
    for bucket, mask in (
        (Bucket.COMPUTE, trace.kinds.computes),
        (Bucket.COPY, trace.kinds.is_kind(EventKind.COPY)),
    ):
        here = rows[band.bucket[rows] == bucket]
        of_bucket = np.flatnonzero(mask)
        start = events.start_ns[of_bucket]
        owned = trim_overlaps(start, events.ends_of(of_bucket))
        left = owned.end_ns > owned.start_ns
        both = intersect(
            Intervals(owned.start_ns[left], owned.end_ns[left]),
            Intervals(band.start_ns[here], band.end_ns[here]),
        )
        own = here[both.right]
        pieces.append(
            (band.window[own], band.bucket[own], event_part[of_bucket[left][both.left]],
             both.end_ns - both.start_ns)
        )  # fmt: skip
    idle = rows[band.bucket[rows] == Bucket.IDLE]
    call_part = np.zeros(len(events), dtype=np.int64)
    call_part[trace.calls.event] = call_parts
    starts = np.flatnonzero(events.is_category(Category.KERNEL, Category.MEMCPY, Category.MEMSET))
    after = np.searchsorted(events.start_ns[starts], band.end_ns[idle], side="left")
    windows = rank.windows.windows
    window_end = np.array([window.end_ns for window in windows], dtype=np.int64)
    following = starts[np.minimum(after, len(starts) - 1)]
    is_last = (after >= len(starts)) | (events.start_ns[following] >= window_end[band.window[idle]])
    part = np.maximum(event_part[following], call_part[following])
    if scopes.main >= 0:
        main = np.full(int(is_last.sum()), scopes.main)
        part[is_last] = scopes.find_parts(main, band.start_ns[idle][is_last])
    else:
        part[is_last] = 0
    pieces.append(
        (band.window[idle], band.bucket[idle], part, band.end_ns[idle] - band.start_ns[idle])
    )
    return tuple(np.concatenate(column) for column in zip(*pieces, strict=True))  # type: ignore
