"""Why the costliest collective takes so long, with the job's links."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stepsplit.analyzer import units
from stepsplit.analyzer.model.comm.algorithms import (
    NVLS,
    RING,
    TREE,
    nvls_ns,
    ring_ns,
    tree_ns,
)
from stepsplit.analyzer.model.comm.time import CHOICE
from stepsplit.analyzer.model.explain.explained import Explained, RuleOfThumb, Symbol, differing
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.prediction import Communication, Prediction
from stepsplit.analyzer.model.spec.hardware import Link
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.span import Span, span_of

NVLINK = Formula(
    "link.nvlink",
    "bytes a second of one GPU in one direction: what a collective's busbw compares with",
    "NVIDIA data sheets, which add up both directions",
)
_RINGS = ("all_reduce", "all_gather", "reduce_scatter")
_CLOSE = 1e-4
"""A closed form that comes this close to the predicted time is where it came from."""
_LARGE_BYTES = 2**20
"""Below, it is latency that decides between ring and tree."""
_AXES = ("tp", "cp", "dp", "dp_shard", "dp_replicate", "expert_dp")


def of_links(job: Job, prediction: Prediction) -> Iterator[Explained]:
    """One call of the collective that costs most, the tree beside the ring, and the link's rate."""
    rows = [
        row
        for row in prediction.communication
        if row.message.op in _RINGS and row.message.axis in _AXES and row.message.count
    ]
    if rows:
        yield _costliest(job, max(rows, key=lambda row: row.time.ns))
    reduced = [row for row in rows if _large_sum(job, row)]
    if reduced:
        yield _tree(job, max(reduced, key=lambda row: row.message.message_bytes))
    if job.hardware.intra.name.startswith("nvlink"):
        yield _nvlink(job.hardware.intra)


def _large_sum(job: Job, row: Communication) -> bool:
    message = row.message
    large = message.op == "all_reduce" and message.message_bytes >= _LARGE_BYTES
    return large and span_of(job, message.axis).ranks > 2


def _costliest(job: Job, row: Communication) -> Explained:
    message, span = row.message, span_of(job, row.message.axis)
    value, both = row.time.ns / message.count, 2 * job.hardware.intra.bytes_per_s
    rule = RuleOfThumb(
        f"size / {units.gigabytes_per_second(both)}, the link's rate on the data sheet",
        message.message_bytes / both * 1e9,
        "that rate is of both directions together, no ring reaches all of it"
        + (f", all_reduce sends {message.wire_bytes / message.message_bytes:.2f} times its buffer")
        * (message.wire_bytes > message.message_bytes)
        + (", and between nodes the network is the narrower part" if span.nodes > 1 else ""),
    )
    what = f"one {message.op} on {message.axis}, {message.phase}"
    symbols = (Symbol("S", "message", message.message_bytes, "bytes"), *_links(job, span))
    formula = _formula(job, row, span)
    return Explained(formula, what, symbols, value, "ns", differing(value, [rule]))


def _links(job: Job, span: Span) -> tuple[Symbol, ...]:
    link = job.hardware.intra if span.nodes == 1 else job.hardware.inter
    return (
        Symbol("n", "ranks", span.ranks),
        Symbol("nodes", "nodes that they are on", span.nodes),
        Symbol("B", f"{link.name}, one direction of one GPU", link.bytes_per_s, "bytes_per_s"),
        Symbol("e", "share of it that large rings reach", link.ring, "ratio"),
        Symbol("a", "latency of one step over it", link.latency_ns, "ns"),
    )


def _formula(job: Job, row: Communication, span: Span) -> Formula:
    """The algorithm whose closed form gives the time; the choice between them where none does."""
    message, hardware = row.message, job.hardware
    if message.op != "all_reduce":
        return RING
    size, value = message.message_bytes, row.time.ns / message.count
    times = (
        (ring_ns("all_reduce", size, span, hardware), RING),
        (tree_ns(size, span, hardware), TREE),
        (nvls_ns(size, span, hardware), NVLS),
    )
    near, formula = min(times, key=lambda time: abs(time[0] - value))
    return formula if abs(near - value) <= _CLOSE * value else CHOICE


def _tree(job: Job, row: Communication) -> Explained:
    size, ranks = row.message.message_bytes, span_of(job, row.message.axis).ranks
    value = 2 * size
    rule = RuleOfThumb(
        "a tree moves 2 log2(n) times the buffer",
        2 * math.log2(ranks) * size,
        "log2 is the depth, in the latency; each rank sends its buffer up once and down once",
    )
    symbols = (Symbol("S", "message", size, "bytes"), Symbol("n", "ranks", ranks))
    what = f"bytes a rank sends for one all_reduce on {row.message.axis}, were it a tree"
    return Explained(TREE, what, symbols, value, "bytes", differing(value, [rule]))


def _nvlink(link: Link) -> Explained:
    rule = RuleOfThumb(
        "the rate on the data sheet", 2 * link.bytes_per_s,
        "it adds up both directions; data of one collective flows out at half of it",
    )  # fmt: skip
    symbols = (Symbol("e", "share of it that large rings reach", link.ring, "ratio"),)
    value = link.bytes_per_s
    what = f"rate of {link.name}"
    return Explained(NVLINK, what, symbols, value, "bytes_per_s", differing(value, [rule]))
