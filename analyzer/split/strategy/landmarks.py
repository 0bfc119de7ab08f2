"""The ops by which one tells where in the model a rank is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import numpy as np

from stepsplit.analyzer.arrays import Intervals, inside, union
from stepsplit.analyzer.trace import Bool, Category, Events, Int64

PRODUCT, ATTENTION, EMBEDDING, ROUTING = "LAEK"
"""Letters of the kinds: products with weights, attention, look-ups, the choice of experts."""
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


@dataclass(frozen=True, slots=True)
class Landmarks:
    """Landmarks in order of time: when they begin and their letters, as codes of ASCII.

    outside: which are forward work, in no backward and no optimizer. engine is autograd's work,
    optimizer that of optimizers.
    """

    start_ns: Int64
    letter: Int64
    outside: Bool
    engine: Intervals
    optimizer: Intervals


def landmarks_of(events: Events) -> Landmarks:
    """The landmarks of a rank."""
    letters = np.array([ord(_letter(name)) for name in events.names], dtype=np.int64)
    rows = np.flatnonzero(events.of(Category.OP) & (letters[events.name_id] != ord(" ")))
    start = events.start_ns[rows]
    engine = spans_of(events, "autograd::engine")
    optimizer = spans_of(events, "Optimizer.step#")
    return Landmarks(
        start_ns=start,
        letter=letters[events.name_id[rows]],
        outside=~(inside(engine, start) | inside(optimizer, start)),
        engine=engine,
        optimizer=optimizer,
    )


def spans_of(events: Events, *prefixes: str) -> Intervals:
    """The instants in which the host was in something whose name begins so."""
    named = events.name_mask(tuple(name.startswith(prefixes) for name in events.names))
    mask = named & events.of(Category.OP, Category.ANNOTATION)
    return union(events.start_ns[mask], events.end_ns[mask])


@cache
def _letter(name: str) -> str:
    if name in _KINDS:
        return _KINDS[name]
    attends = not name.startswith(_WRAPS) and _ATTENTION.search(name) is not None
    return ATTENTION if attends and "ackward" not in name else " "
