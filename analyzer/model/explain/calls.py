"""Why the costliest calls take so long, with the job's links."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stepsplit.analyzer import units
from stepsplit.analyzer.model.comm.algorithms import (
    NVLS,
    RING,
    TREE,
    intra_bytes_per_s,
    nvls_ns,
    ring_bytes_per_s,
    ring_ns,
    tree_ns,
)
from stepsplit.analyzer.model.comm.pairs import ALL_TO_ALL
from stepsplit.analyzer.model.comm.sweep import SWEEP
from stepsplit.analyzer.model.comm.table import TUNER
from stepsplit.analyzer.model.comm.time import CHOICE
from stepsplit.analyzer.model.explain.explained import (
    Explained,
    RuleOfThumb,
    Symbol,
    Unit,
    differing,
)
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.prediction import Communication, Message, Prediction
from stepsplit.analyzer.model.spec.hardware import Link
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.span import Span, span_of
from stepsplit.analyzer.ops import busbw_factor

_RINGS = ("all_reduce", "all_gather", "reduce_scatter")
_CLOSE = 1e-4
"""A closed form that comes this close to the predicted time is where it came from."""
_LARGE_BYTES = 2**20
"""Below, it is latency that decides between ring and tree."""
_AXES = ("tp", "cp", "dp", "dp_cp", "dp_shard", "dp_replicate", "expert_dp")


def of_calls(job: Job, prediction: Prediction) -> Iterator[Explained]:
    """One call of the ring and of the all_to_all that cost most, and the tree beside the ring."""
    rows = [
        row
        for row in prediction.communication
        if row.message.op in _RINGS and row.message.axis in _AXES and row.message.count
    ]
    if rows:
        yield _costliest(job, prediction, max(rows, key=lambda row: row.time.ns))
    exchanged = [row for row in prediction.communication if row.message.op == "all_to_all"]
    if exchanged:
        yield _all_to_all(job, max(exchanged, key=lambda row: row.time.ns))
    reduced = [row for row in rows if _large_sum(job, row)]
    if reduced:
        yield _tree(job, max(reduced, key=lambda row: row.message.message_bytes))


def _large_sum(job: Job, row: Communication) -> bool:
    message = row.message
    large = message.op == "all_reduce" and message.message_bytes >= _LARGE_BYTES
    return large and _span(job, message).ranks > 2


def _span(job: Job, message: Message) -> Span:
    """The ranks of a call; those that sum gradients over cp too are span_of's dp."""
    return span_of(job, "dp" if message.axis == "dp_cp" else message.axis)


def _costliest(job: Job, prediction: Prediction, row: Communication) -> Explained:
    message, span = row.message, _span(job, row.message)
    value, both = row.time.ns / message.count, 2 * job.hardware.intra.bytes_per_s
    rule = RuleOfThumb(
        f"size / {units.gigabytes_per_second(both)}, the link's rate on the data sheet",
        message.message_bytes / both * 1e9,
        "that rate is of both directions together, no ring reaches all of it"
        + (f", all_reduce sends {message.wire_bytes / message.message_bytes:.2f} times its buffer")
        * (message.wire_bytes > message.message_bytes)
        + ", and between nodes the network is the narrower part" * _by_network(job, span),
    )
    what = f"time of one {message.op} on {message.axis} ({message.phase})"
    symbols = (
        Symbol("S", "message", message.message_bytes, "bytes"),
        Symbol("f", "of it, what each rank sends", busbw_factor(message.op, span.ranks)),
        *_links(job, span),
    )
    formula = _closed_form(job, row, span) or _measured(prediction) or CHOICE
    return Explained(formula, what, symbols, value, "ns", differing(value, [rule]))


def _links(job: Job, span: Span) -> tuple[Symbol, ...]:
    hardware, rate = job.hardware, ring_bytes_per_s(span, job.hardware)
    link = hardware.inter if _by_network(job, span) else hardware.intra
    latency = (hardware.intra if span.nodes == 1 else hardware.inter).latency_ns
    adapters = span.ranks_per_node if link is hardware.inter else 1
    of = f"{adapters} GPUs of a node" if adapters > 1 else "one GPU"
    return (
        Symbol("n", "ranks", span.ranks),
        Symbol("k", "nodes that they are on", span.nodes),
        Symbol("B", f"{link.name}, one direction of {of}", rate / link.ring, "bytes_per_s"),
        Symbol("e", "share of it that large rings reach", link.ring, "ratio"),
        Symbol("a", f"latency of a step {_where(span)}", latency, "ns"),
    )


def _by_network(job: Job, span: Span) -> bool:
    """Whether the adapters of a node, all together, are slower than its own links."""
    rate = ring_bytes_per_s(span, job.hardware)
    return span.nodes > 1 and (
        span.ranks_per_node == 1 or rate < intra_bytes_per_s(span, job.hardware)
    )


def _where(span: Span) -> str:
    return "inside the node" if span.nodes == 1 else "between nodes"


def _all_to_all(job: Job, row: Communication) -> Explained:
    message, span, hardware = row.message, _span(job, row.message), job.hardware
    links = [hardware.intra] * (span.ranks_per_node > 1) + [hardware.inter] * (span.nodes > 1)
    symbols = (
        Symbol("S", "message", message.message_bytes, "bytes"),
        Symbol("n", "ranks", span.ranks),
        Symbol("g", "of them on a node", span.ranks_per_node),
        *(Symbol(*_reached(link, link is hardware.intra)) for link in links),
    )
    what = f"time of one all_to_all on {message.axis} ({message.phase})"
    return Explained(ALL_TO_ALL, what, symbols, row.time.ns / message.count, "ns")


def _reached(link: Link, inside: bool) -> tuple[str, str, float, Unit]:
    rate = link.bytes_per_s * link.ring
    return (
        "NVLink" if inside else "NIC",
        f"what one GPU reaches over {link.name}",
        rate,
        "bytes_per_s",
    )


def _closed_form(job: Job, row: Communication, span: Span) -> Formula | None:
    """The algorithm whose closed form gives the time; None where none does."""
    message, hardware = row.message, job.hardware
    size, value = message.message_bytes, row.time.ns / message.count
    times = [(ring_ns(message.op, size, span, hardware), RING)]
    if message.op == "all_reduce":
        times += [(tree_ns(size, span, hardware), TREE), (nvls_ns(size, span, hardware), NVLS)]
    near, formula = min(times, key=lambda time: abs(time[0] - value))
    return formula if abs(near - value) <= _CLOSE * value else None


def _measured(prediction: Prediction) -> Formula | None:
    """What the prediction has of the links instead of closed forms."""
    return next((each for each in (SWEEP, TUNER) if each in prediction.formulas), None)


def _tree(job: Job, row: Communication) -> Explained:
    size, ranks = row.message.message_bytes, _span(job, row.message).ranks
    value = 2 * size
    rule = RuleOfThumb(
        "a tree moves 2 log2(n) times the buffer",
        2 * math.log2(ranks) * size,
        "log2 is the depth, in the latency; each rank sends its buffer up once and down once",
        ("tree-volume",),
    )
    symbols = (Symbol("S", "message", size, "bytes"), Symbol("n", "ranks", ranks))
    what = f"bytes a rank sends for one all_reduce on {row.message.axis}, were it a tree"
    return Explained(TREE, what, symbols, value, "bytes", differing(value, [rule]))
