"""In which precisions a rank works, where its steps tell."""

from __future__ import annotations

from collections import Counter

import numpy as np

from stepsplit.analyzer.split.strategy.landmarks import spans_of
from stepsplit.analyzer.split.strategy.seen import Seen
from stepsplit.analyzer.split.strategy.strategy import Strategy
from stepsplit.analyzer.trace import Category, Events, Int64

_CASTING = ("aten::linear", "aten::matmul", "aten::conv2d")
_CASTS, _CASTS_BACK = "aten::_to_copy", "ToCopyBackward0"
_EIGHT_BITS = "aten::_scaled_mm"
_UNSCALES, _SCALES = "aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_amp_update_scale_"


def precisions(seen: Seen) -> list[Strategy]:
    """autocast, products in 8 bits, mixed precision of sharded weights, loss scaling."""
    eight = [Strategy("fp8")] if _EIGHT_BITS in seen.trace.events.names else []
    return [*_autocast(seen), *eight, *_mixed(seen), *_scaled(seen)]


def _autocast(seen: Seen) -> list[Strategy]:
    """Under autocast an op casts its inputs and calls itself: it holds casts, then its own like."""
    events = seen.trace.events
    found = any(_casts_itself(events, name) for name in _CASTING)
    return [Strategy("autocast")] if found and _CASTS_BACK in events.names else []


def _casts_itself(events: Events, name: str) -> bool:
    rows, casts = _rows_of(events, name), events.start_ns[_rows_of(events, _CASTS)]
    rows = rows[np.argsort(events.lane[rows], kind="stable")]
    start, end, lane = events.start_ns[rows], events.end_ns[rows], events.lane[rows]
    holds_next = (lane[1:] == lane[:-1]) & (start[1:] < end[:-1])
    between = np.searchsorted(casts, start[1:]) - np.searchsorted(casts, start[:-1])
    return bool((holds_next & (between > 0)).any())


def _rows_of(events: Events, name: str) -> Int64:
    """The ops of that name, in order of time."""
    chosen = events.name_mask(tuple(one == name for one in events.names))
    return np.flatnonzero(chosen & events.of(Category.OP))


def _mixed(seen: Seen) -> list[Strategy]:
    """Sharded weights are gathered in one precision and their gradients summed in another."""
    gathers = _dtype(seen, "all_gather")
    sums = _dtype(seen, "reduce_scatter")
    if gathers is None or sums is None or gathers == sums:
        return []
    text = f"weights gathered in {gathers}, gradients summed in {sums}"
    return [Strategy("mixed precision", detail=text)]


def _dtype(seen: Seen, op: str) -> str | None:
    """The type of most of FSDP's calls of the op."""
    mask = seen.shards & seen.of(op) & seen.is_tensor
    kinds = Counter(seen.trace.calls.dtype[seen.row[mask]].tolist())
    most = kinds.most_common(1)
    return seen.trace.calls.dtypes[most[0][0]] if most and most[0][0] >= 0 else None


def _scaled(seen: Seen) -> list[Strategy]:
    """Gradients are divided by the loss's scale and checked for infinity, as GradScaler does."""
    found = all(len(spans_of(seen.trace.events, name)) for name in (_UNSCALES, _SCALES))
    return [Strategy("loss scaling")] if found else []
