"""How long one collective or message takes, and how sure that is."""

from __future__ import annotations

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.comm.algorithms import nvls_ns, ring_ns, tree_ns, tree_until_bytes
from stepsplit.analyzer.model.comm.pairs import all_to_all_ns, send_ns
from stepsplit.analyzer.model.comm.spread import SWITCH, spread_of
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.prediction import Band
from stepsplit.analyzer.model.spec.hardware import Hardware
from stepsplit.analyzer.model.spec.span import Span

CHOICE = Formula(
    "comm.choice",
    "all_reduce: least of ring, tree and NVLS; over more than two nodes the tree until NCCL"
    " expects the ring to win; other collectives: the ring",
    "NVIDIA/nccl src/graph/tuning.cc",
)
OPS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send",
    "recv",
)  # fmt: skip


def time_of(op: str, message_bytes: float, span: Span, hardware: Hardware) -> Band:
    """One call by the closed form, in ns; message_bytes as nccl-tests count them (CHOICE).

    A rank alone, or no bytes, costs nothing. A larger message never costs less. Raises UsageError.
    """
    _check(op, message_bytes, span)
    if span.ranks == 1 or message_bytes == 0:
        return Band(0.0, 0.0, 0.0)
    ns = _closed_form_ns(op, message_bytes, span, hardware)
    low, high = spread_of(message_bytes, span)
    if op != "all_reduce" or span.nodes <= 2:
        return Band(ns, ns * low, ns * high)
    until = tree_until_bytes(span, hardware)
    if not until / SWITCH < message_bytes < until * SWITCH:
        return Band(ns, ns * low, ns * high)
    either = ring_ns(op, message_bytes, span, hardware), tree_ns(message_bytes, span, hardware)
    return Band(ns, min(ns * low, *either), max(ns * high, *either))


def _check(op: str, message_bytes: float, span: Span) -> None:
    if op not in OPS:
        raise UsageError(f"no time is modelled for {op!r}; write one of {', '.join(OPS)}")
    if message_bytes < 0:
        raise UsageError(f"a message of {message_bytes} bytes cannot be; write 0 or more")
    if not 1 <= span.ranks_per_node <= span.ranks:
        raise UsageError(
            f"{span.ranks_per_node} of {span.ranks} ranks on a node cannot be;"
            f" write 1 to {max(1, span.ranks)}"
        )


def _closed_form_ns(op: str, message_bytes: float, span: Span, hardware: Hardware) -> float:
    if op in ("send", "recv"):
        return send_ns(message_bytes, span, hardware)
    if op == "all_to_all":
        return all_to_all_ns(message_bytes, span, hardware)
    if op == "all_reduce":
        return _all_reduce_ns(message_bytes, span, hardware)
    return ring_ns(op, message_bytes, span, hardware)


def _all_reduce_ns(message_bytes: float, span: Span, hardware: Hardware) -> float:
    """A message just past the tree takes at least what the last one by tree took."""
    ring = ring_ns("all_reduce", message_bytes, span, hardware)
    tree = tree_ns(message_bytes, span, hardware)
    if span.nodes <= 2:
        return min(ring, tree, nvls_ns(message_bytes, span, hardware))
    until = tree_until_bytes(span, hardware)
    return tree if message_bytes <= until else max(ring, tree_ns(until, span, hardware))
