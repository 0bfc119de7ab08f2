"""Layers from the repeating sequence of kernels, where nothing of the host was recorded.

A forward and a backward pass differ by the names of their attention cores; a backward runs the
products of its forward in reverse, two for each or one. Passes end at messages, losses and steps.
What is not as regular as that is not placed.
"""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer.arrays import list_distinct
from stepsplit.analyzer.parts.layer_sequence import (
    CORE,
    EMBEDDING,
    GEMM,
    LOSS,
    find_letter,
    label_pass,
)
from stepsplit.analyzer.parts.part import Part, PartPhase
from stepsplit.analyzer.parts.scope_names import find_said_kind
from stepsplit.analyzer.split.kernel_shapes import is_backward
from stepsplit.analyzer.split.run import RankSplit
from stepsplit.analyzer.trace import Int64


def find_kernel_parts(rank: RankSplit) -> tuple[Int64, list[Part]]:
    """The rows of the kernels of all regular passes, and the part of each; empty where the passes
    of a rank differ from each other."""
    trace, events = rank.trace, rank.trace.events
    computes = np.flatnonzero(trace.kinds.computes)
    nothing = np.empty(0, dtype=np.int64), list[Part]()
    if not len(computes):
        return nothing
    work = np.bincount(events.lane[computes], events.dur_ns[computes])
    rows = computes[events.lane[computes] == int(work.argmax())]
    used = list_distinct(events.name_id[rows])
    letters = {number: find_letter(events.names[number]) for number in used.tolist()}
    if CORE not in letters.values():
        return nothing
    backward = {number: is_backward(events.names[number]) for number in used.tolist()}
    starts = [window.start_ns for window in rank.windows.windows]
    messages = events.start_ns[trace.calls.event[trace.calls.is_message]]
    edges = np.sort(np.concatenate((messages, np.array(starts, dtype=np.int64))))
    span = np.searchsorted(edges, events.start_ns[rows], side="right")
    passes, first, has_core, item = list[tuple[int, int]](), 0, False, -1
    name_id = events.name_id[rows]
    names = name_id.tolist()
    # Some libraries name their products by their direction too.
    are_named = any(letters[name] == GEMM and backward[name] for name in letters)
    is_item, loses = np.zeros((2, len(events.names)), dtype=np.bool_)
    for name, letter in letters.items():
        is_item[name], loses[name] = bool(letter), letter == LOSS and not backward[name]
    crosses = np.diff(span, prepend=span[:1]) != 0
    has_lost = np.append(False, loses[name_id[:-1]])
    # Only these rows begin a pass or say something of one; the others are most of a trace.
    for at in np.flatnonzero(is_item[name_id] | crosses | has_lost).tolist():
        name = names[at]
        letter = letters[name]
        begins = crosses[at] or (has_lost[at] and letter != LOSS)
        # An embedding begins a forward, and ends a backward.
        begins |= letter == EMBEDDING and has_core and not backward[name]
        if letter and item >= 0:
            turns = backward[name] != backward[names[item]]
            begins |= turns and (are_named or (letter == LOSS and backward[name]))
        if begins:
            passes.append((first, at))
            first, has_core = at, False
        has_core |= letter == CORE
        item = at if letter else item
    passes.append((first, len(names)))
    # Of each pass with cores of one direction: its edges, its items, and their letters.
    regular = list[tuple[int, int, list[int], str, bool]]()
    for low, high in passes:
        own = names[low:high]
        items = [at for at, name in enumerate(own) if letters[name]]
        cores = {backward[own[at]] for at in items if letters[own[at]] == CORE}
        if len(cores) == 1:
            sequence = "".join(letters[own[at]] for at in items)
            regular.append((low, high, items, sequence, cores.pop()))
    products = {
        direction: {one[3].count(GEMM) for one in regular if one[4] == direction}
        for direction in (False, True)
    }
    # All forwards are alike, all backwards too: these have one product for each, or two.
    if any(len(counts) != 1 for counts in products.values()):
        return nothing
    ratio, rest = divmod(products[True].pop(), max(1, products[False].pop()))
    if ratio not in (1, 2) or rest:
        return nothing
    found_rows, parts, layers = list[Int64](), list[Part](), set[int]()
    for low, _, items, sequence, is_back in regular:
        places = label_pass(sequence[::-1] if is_back else sequence, ratio if is_back else 1, True)
        if places is None:
            return nothing
        places = places[::-1] if is_back else places
        for item, place in zip(items, places, strict=True):
            said = find_said_kind(events.names[names[low + item]])
            if said not in (None, place[1]):
                return nothing
        layers.add(1 + max(layer for layer, _ in places))
        phase = PartPhase.BACKWARD if is_back else PartPhase.FORWARD
        # A kernel that says nothing is of the part before it; what follows the last one is not of
        # the pass: sums and norms of gradients, the optimizer.
        count = items[-1] + 1
        of_item = np.maximum(np.searchsorted(items, np.arange(count), side="right") - 1, 0)
        parts += [Part(places[item][0], places[item][1], phase) for item in of_item.tolist()]
        found_rows.append(rows[low : low + count])
    if len(layers) != 1:
        return nothing
    return np.concatenate(found_rows), parts
