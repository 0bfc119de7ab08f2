"""Layers from the repeating sequence of products, where no range says what belongs to which.

A layer of a transformer multiplies by its projections, attends, projects, and runs its MLP. The
number of GEMMs before the first attention core says where in the GEMMs between two cores the next
layer begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from operator import itemgetter
from statistics import mode

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import is_inside
from stepsplit.analyzer.parts.part import NO_LAYER, PartKind
from stepsplit.analyzer.parts.scope_names import INDUCTOR, find_fused_kind
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN
from stepsplit.analyzer.split.call_purposes import (
    ENGINE,
    find_backward_spans,
    find_spans,
    has_engine,
)
from stepsplit.analyzer.split.host_threads import STEP
from stepsplit.analyzer.split.kernel_shapes import is_backward, parse_gemm
from stepsplit.analyzer.split.microbatch_marks import MARKERS, parse_marks
from stepsplit.analyzer.trace import Bool, Category, Events, Int64, RankTrace

Place = tuple[int, PartKind]
"""The layer, NO_LAYER for none, and the kind of an item of a sequence."""

CORE, GEMM, EXPERTS, NORM, EMBEDDING, LOSS = "AGMNEL"
"""The letters of the items of a sequence; others say nothing and have none."""

_LETTER_OF_FAMILY = {
    "attention": CORE, "gemm": GEMM, "moe": EXPERTS, "normalization": NORM,
}  # fmt: skip

_LOSS = re.compile(r"log_?softmax|nll_loss|cross_?entropy", re.IGNORECASE)
_EMBEDDING = re.compile(r"embedding", re.IGNORECASE)
_SOFTMAX = re.compile(r"^aten::_?softmax$")
"""The core of attention where nothing else is; else that of a router or of sampling."""

_NORM = re.compile(r"aten::rsqrt$|aten::\w*(layer|rms)_norm")
_NAMED = (
    (LOSS, _LOSS), (CORE, _SOFTMAX), (NORM, _NORM), (EMBEDDING, _EMBEDDING),
    (EXPERTS, re.compile(r"grouped_(mm|gemm)")),
)  # fmt: skip

_NO_ITEM = re.compile(
    r"bmm|split_?k_?reduce|rotary|rope(?![a-z])|flash_bwd_(dot|convert)|aten::t$|aten::transpose"
    r"|aten::_?(to|unsafe_view|view|reshape|expand)",
    re.IGNORECASE,
)
"""Products of unfused attention, second kernels, and what is part of an item beside it."""


_FUSED_LETTERS = (
    (LOSS, PartKind.LOSS), (NORM, PartKind.NORM), (EMBEDDING, PartKind.EMBEDDING),
)  # fmt: skip


@lru_cache(1 << 14)
def find_letter(name: str) -> str:
    """The letter of an op or kernel; "" for one that says nothing of the layers."""
    if name.startswith(INDUCTOR):
        kind = find_fused_kind(name)
        return next((letter for letter, own in _FUSED_LETTERS if own == kind), "")
    if _NO_ITEM.search(name):
        return ""
    for letter, pattern in _NAMED:
        if pattern.search(name):
            return letter
    return _LETTER_OF_FAMILY.get(BUILT_IN.find_family(name), "")


def label_pass(
    letters: str, products: int = 1, is_strict: bool = False, projections: int | None = None
) -> list[Place] | None:
    """The place of each item of a forward pass, in order; None without a regular sequence.

    A backward pass in reverse is like a forward with two products for each. is_strict: whether all
    layers must have as many products. projections: the products of a layer before its attention
    core, by default as many as are before the first one.
    """
    # Kernels of one core follow each other.
    cores = [i for i, letter in enumerate(letters) if letter == CORE]
    first = [i for n, i in enumerate(cores) if not n or GEMM in letters[cores[n - 1] : i]]
    if not first:
        return None
    begin = letters.rfind(EMBEDDING, 0, first[0]) + 1
    if projections is None:
        projections = letters[begin : first[0]].count(GEMM)
    if not projections and not is_strict:
        return None
    places: list[Place] = [(NO_LAYER, PartKind.OTHER)] * len(letters)
    ends = [*first[1:], len(letters)]
    sizes = [letters[at:end].count(GEMM) for at, end in zip(first, ends, strict=True)]
    output = products
    # Between two cores: the output projection, the MLP, the projections of the next layer.
    inner = [size - output - projections for size in sizes[:-1]]
    if any(count < 0 for count in inner) or (is_strict and len(set(inner)) > 1):
        return None
    # Of a single layer, the last product before a loss is the head.
    in_mlp = (
        mode(inner) if inner else sizes[-1] - output - products * (LOSS in letters[first[-1] :])
    )
    if in_mlp < 0 or sizes[-1] < output:
        return None
    for number, (at, end) in enumerate(zip(first, ends, strict=True)):
        is_last = number == len(first) - 1
        of_mlp = min(in_mlp, sizes[-1] - output) if is_last else inner[number]
        gemms = 0
        for i in range(at, end):
            letter = letters[i]
            gemms += letter == GEMM
            if letter == GEMM and gemms > output + of_mlp:
                place = (NO_LAYER, PartKind.HEAD) if is_last else (number + 1, PartKind.ATTENTION)
            elif letter == GEMM and gemms > output:
                kind = PartKind.EXPERTS if EXPERTS in letters[at:end] else PartKind.MLP
                if gemms <= output + products and EXPERTS in letters[i:end]:
                    # What experts get follows from a product before theirs.
                    kind = PartKind.ROUTER
                place = number, kind
            elif letter in (CORE, GEMM):
                place = number, PartKind.ATTENTION
            elif letter == NORM:
                follows = gemms >= output + of_mlp
                place = number + follows, PartKind.NORM
                if follows and is_last:
                    place = NO_LAYER, PartKind.NORM
            elif letter == EXPERTS:
                place = number, PartKind.EXPERTS
            elif letter == LOSS:
                place = NO_LAYER, PartKind.LOSS
            else:
                place = NO_LAYER, PartKind.EMBEDDING
            places[i] = place
    # Before the first core: embeddings, and the norm and projections of the first layer.
    of_letter = {GEMM: PartKind.ATTENTION, NORM: PartKind.NORM, EXPERTS: PartKind.EXPERTS}
    for i, letter in enumerate(letters[: first[0]]):
        if i >= begin and letter in of_letter:
            places[i] = 0, of_letter[letter]
        elif letter in (EMBEDDING, LOSS):
            places[i] = NO_LAYER, PartKind.EMBEDDING if letter == EMBEDDING else PartKind.LOSS
    return places


Size = tuple[int, ...]
"""The sizes of a product, whatever their order, and how many it is."""


def find_size(shapes: str | None) -> Size | None:
    """The sizes of the product of these input shapes; None if they are unknown."""
    one = parse_gemm(shapes)
    return None if one is None else (*sorted((one.rows, one.columns, one.inner)), one.count)


@lru_cache(1 << 10)
def label_by_sizes(letters: str, sizes: tuple[Size | None, ...]) -> Sequence[Place] | None:
    """The place of each item of a forward pass; None without a regular sequence.

    The passes of a job have few sequences, so each is labeled once.

    sizes are those of the products. Some models have products before the first layer's projections
    that other layers lack, such as gates: then a layer has as many projections as make all products
    of one size those of one kind.
    """
    usual = label_pass(letters)
    before = letters[: max(letters.find(CORE), 0)].count(GEMM)
    fewer = (label_pass(letters, projections=count) for count in range(before - 1, 0, -1))
    for places in chain((usual,), fewer):
        kinds: dict[Size, set[PartKind]] = {}
        for letter, size, place in zip(letters, sizes, places or (), strict=False):
            if letter == GEMM and size is not None:
                kinds.setdefault(size, set()).add(place[1])
        if places is not None and all(len(own) == 1 for own in kinds.values()):
            return places
    return usual


class ForwardPlaces(Struct, frozen=True):
    """Where the forward of a thread is from each instant on, in order: at places[number]."""

    start_ns: Int64
    number: Int64
    places: tuple[Place, ...]


def find_forward_places(
    trace: RankTrace, on_thread: Bool, messages_ns: Int64
) -> ForwardPlaces | None:
    """The layers of the forward passes on a thread, by the sequence of its ops; None without any
    regular one. messages_ns are the instants at which the host issued messages of a pipeline, in
    which the kinds alone are known if autograd has no ranges."""
    events = trace.events
    on_host = on_thread & events.is_category(Category.OP)
    rows, letters = _find_layer_ops(events, on_host)
    if not letters:
        return None
    start, end = events.start_ns[rows], events.ends_of(rows)
    texts, shape_ids = trace.shapes.texts, trace.shapes.find_ids(rows).tolist()
    sizes = [find_size(texts[number]) if number >= 0 else None for number in shape_ids]
    has_ranges = has_engine(events)
    if has_ranges:
        messages_ns = messages_ns[:0]
    # Without autograd's ranges its thread shows by its launches when a backward runs.
    backward_ns = messages_ns[:0] if has_ranges else find_backward_spans(trace).start_ns
    turns_ns = np.concatenate((messages_ns, backward_ns))
    # A backward on the thread of its forward (a CPU's) is of no forward.
    says_backward = {
        number: not has_ranges and is_backward(events.names[number])
        for number in np.unique(events.name_id[rows]).tolist()
    }
    backward = [says_backward[number] for number in events.name_id[rows].tolist()]
    passes = _find_forward_passes(events, letters, backward, start, turns_ns)
    between = _OpsBetween(
        *(
            _find_firsts(
                np.sort(events.start_ns[on_host & events.match_names(pattern)]), start, end
            )
            for pattern in (_RESIDUAL, _SQUARE, _PERMUTATION)
        )
    )
    # A norm op by op is an item by its rsqrt, after which it scales.
    is_whole_norm = [
        letter == NORM and "rsqrt" not in events.names[number]
        for letter, number in zip(letters, events.name_id[rows].tolist(), strict=True)
    ]
    edges: list[tuple[int, Place]] = []
    for low, high in passes:
        one = slice(low, high)
        places = label_by_sizes(letters[one], tuple(sizes[one]))
        if places is None:
            continue
        is_apart = has_ranges or len(backward_ns) or _is_whole(letters[one], places)
        if len(messages_ns) or not is_apart:
            # Passes that nothing separates look like one of more layers.
            places = [(NO_LAYER, kind) for _, kind in places]
        edges += zip(start[one].tolist(), places, strict=True)
        edges += between.list_edges(letters[one], places, low)
        # What follows a norm belongs to what comes next; what follows the pass to no layer.
        following = [*places[1:], (NO_LAYER, PartKind.OTHER)]
        edges += [
            (int(end[i]), following[i - low])
            for i in range(low, high)
            if is_whole_norm[i] or i == high - 1
        ]
    if not edges:
        return None
    edges = sorted((edge for edge in edges if edge[0] != _NONE), key=itemgetter(0))
    numbers: dict[Place, int] = {}
    number = [numbers.setdefault(place, len(numbers)) for _, place in edges]
    start_ns = np.array([at for at, _ in edges], dtype=np.int64)
    return ForwardPlaces(start_ns, np.array(number), tuple(numbers))


def _is_whole(letters: str, places: Sequence[Place]) -> bool:
    """Whether a pass shows by its own items where it begins or ends: microbatches without an
    embedding, a head and a loss, as of a stage in the middle, look like layers. The heads of
    several passes show by more products between some cores, one per pass."""
    if EMBEDDING in letters or LOSS in letters:
        return True
    has_head = (NO_LAYER, PartKind.HEAD) in places
    return has_head and label_pass(letters, is_strict=True) is not None


def _find_layer_ops(events: Events, on_host: Bool) -> tuple[Int64, str]:
    """The outermost ops of these that say something of the layers, and their letters; those of the
    optimizer and of autograd's engine are not of a forward."""
    letter_of = [""] * len(events.names)
    for number in np.unique(events.name_id[on_host]).tolist():
        letter_of[number] = find_letter(events.names[number])
    is_softmax = [_SOFTMAX.search(name) is not None for name in events.names]
    if any(a == CORE and not b for a, b in zip(letter_of, is_softmax, strict=True)):
        letter_of = ["" if b else a for a, b in zip(letter_of, is_softmax, strict=True)]
    has_letter = np.array([bool(letter) for letter in letter_of], dtype=bool)
    rows = np.flatnonzero(on_host & has_letter[events.name_id])
    rows = rows[~is_inside(find_spans(events, ENGINE, "Optimizer."), events.start_ns[rows])]
    if not len(rows):
        return rows, ""
    rows = rows[np.lexsort((-events.dur_ns[rows], events.start_ns[rows]))]
    reach = np.maximum.accumulate(events.ends_of(rows))
    rows = rows[np.append(True, events.start_ns[rows[1:]] >= reach[:-1])]
    return rows, "".join(letter_of[number] for number in events.name_id[rows].tolist())


_MARKERS = tuple(prefix for prefixes in MARKERS for prefix in prefixes)


def _find_forward_passes(
    events: Events, letters: str, backward: Sequence[bool], start_ns: Int64, turns_ns: Int64
) -> list[tuple[int, int]]:
    """The first item of each forward pass, and the one after its last.

    A pass ends where a step, a microbatch or a backward begins, after a loss, and at the next
    embedding; where autograd has no ranges, at turns_ns: the backwards of another thread, and
    messages, which may also be issued within a pass. backward is whether an item says that it
    computes gradients. A product between a backward and a forward item is the backward's.
    """
    says_begin = events.name_mask(
        tuple(
            name.startswith((STEP, ENGINE))
            or (
                name.startswith(_MARKERS)
                and any(mark.phase == "forward" for mark in parse_marks(name, 0))
            )
            for name in events.names
        )
    )
    # The device's copy of a step's mark begins while the host is in the middle of a pass.
    is_mark = says_begin & events.is_category(Category.OP, Category.ANNOTATION)
    marked_ns = np.sort(np.concatenate((events.start_ns[is_mark], turns_ns)))
    number = np.searchsorted(marked_ns, start_ns, side="right").tolist()
    begins = [0]
    # The direction of the pass that begins there.
    is_back = [backward[0]]
    for i, (before, letter) in enumerate(pairwise(letters), 1):
        turns = backward[i] != is_back[-1] and letter != GEMM
        starts_over = number[i] != number[i - 1]
        is_apart = starts_over or turns or (before == LOSS != letter)
        if is_apart or (letter == EMBEDDING and CORE in letters[begins[-1] : i]):
            begins.append(i)
            is_back.append(backward[i] or (is_back[-1] and not (starts_over or turns)))
    spans = pairwise([*begins, len(letters)])
    return [span for span, is_lost in zip(spans, is_back, strict=True) if not is_lost]


_RESIDUAL, _SQUARE = re.compile(r"^aten::add_?$"), re.compile(r"^aten::(pow|square)$")

_PERMUTATION = re.compile(r"^aten::(argsort|sort|one_hot|nonzero|index_select|index)$")
"""What puts the tokens of each expert together."""

_NONE = int(np.iinfo(np.int64).max)


def _find_firsts(starts_ns: Int64, start_ns: Int64, end_ns: Int64) -> list[int]:
    """The first of these starts in the gap before each item, which has this start and end; _NONE
    without one."""
    first = np.append(starts_ns, _NONE)[
        starts_ns.searchsorted(np.append(start_ns[:1], end_ns[:-1]))
    ]
    in_gap: list[int] = np.where(first < start_ns, first, _NONE).tolist()
    return in_gap


class _OpsBetween(Struct, frozen=True):
    """The starts of ops that are no items, but begin or end a part between two items: the first
    before each item since the one before, or _NONE."""

    residual_ns: list[int]
    square_ns: list[int]
    permutation_ns: list[int]

    def list_edges(
        self, letters: str, places: Sequence[Place], begin: int
    ) -> Iterator[tuple[int, Place]]:
        """Where a pass of these items, the first of which is item begin, changes its place between
        two of them; _NONE where it does not."""
        for i in range(1, len(letters)):
            layer, kind = places[i - 1]
            if kind == PartKind.ROUTER:
                yield self.permutation_ns[begin + i], places[i]
            if letters[i] != NORM:
                continue
            # Between two parts the residual is added; a norm op by op begins with squares.
            if kind in (PartKind.ATTENTION, PartKind.MLP, PartKind.EXPERTS):
                yield self.residual_ns[begin + i], (layer, PartKind.OTHER)
            yield self.square_ns[begin + i], places[i]
