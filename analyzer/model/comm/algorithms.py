"""What each of NCCL's algorithms takes for a collective: latency and bytes over bandwidth."""

from __future__ import annotations

import math

from stepsplit.analyzer.model.comm import rates
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.spec.hardware import Hardware
from stepsplit.analyzer.model.spec.span import Span
from stepsplit.analyzer.ops import busbw_factor

RING = Formula(
    "comm.ring",
    "t = base + steps a + S f / (B e); steps 2(n-1) all_reduce, n-1 otherwise;"
    " f = 2(n-1)/n all_reduce, (n-1)/n all_gather and reduce_scatter, 1 broadcast and reduce;"
    " over k nodes 2(k-1) or k-1 of the steps are between nodes, large messages wait for these"
    " and for one node's own, and B = min(NVLink, ranks of a node x NIC)",
    "NVIDIA/nccl src/graph/tuning.cc; NVIDIA/nccl-tests doc/PERFORMANCE.md",
)
TREE = Formula(
    "comm.tree",
    "t = base + 2 ((g-1) a_intra + log2(k) a_inter) + 2 S / B_tree; two nodes: S / NIC",
    "NVIDIA/nccl src/graph/tuning.cc; not 2 log2(n) S: a double tree moves 2 S, log2 is latency",
)
NVLS = Formula(
    "comm.nvls",
    "t = base + S / algbw, algbw = nvls B / (2 (8-1)/8) on any number of ranks of a switch",
    "NVIDIA/nccl src/graph/tuning.cc; ml-engineering network/README.md, 8xH200 rows",
)
_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "reduce": 1}


def ring_ns(op: str, message_bytes: float, span: Span, hardware: Hardware) -> float:
    """A ring's time in ns, by the best of NCCL's protocols (RING)."""
    moved_ns = message_bytes * busbw_factor(op, span.ranks) / ring_bytes_per_s(span, hardware) * 1e9
    hops_ns, large_hops_ns = _ring_hops_ns(op, span, hardware)
    simple = rates.SIMPLE_BASE_NS.value + large_hops_ns + moved_ns
    ll = rates.LL_BASE_NS.value + hops_ns * rates.LL_STEP.value + moved_ns / rates.LL_RATE.value
    if span.nodes > 1 or not hardware.intra.name.startswith(rates.LL128_LINKS):
        return min(simple, ll)
    ll128 = rates.LL128_BASE_NS.value + hops_ns * rates.LL128_STEP.value
    return min(simple, ll, ll128 + moved_ns / rates.LL128_RATE.value)


def _ring_hops_ns(op: str, span: Span, hardware: Hardware) -> tuple[float, float]:
    """(all steps; those that a large message waits for: a node's own and those between nodes)."""
    rounds, here = _STEPS[op], span.ranks_per_node - 1
    between = rounds * (span.nodes - 1)
    steps = rounds * (span.ranks - 1) - between
    between_ns = between * hardware.inter.latency_ns
    own_ns = rounds * here * hardware.intra.latency_ns
    return steps * hardware.intra.latency_ns + between_ns, own_ns + between_ns


def ring_bytes_per_s(span: Span, hardware: Hardware) -> float:
    """busbw of a large ring: the slower of the node's links and all its ranks' NICs."""
    if span.nodes == 1:
        return intra_bytes_per_s(span, hardware)
    nics = nics_bytes_per_s(span, hardware)
    return nics if span.ranks_per_node == 1 else min(nics, intra_bytes_per_s(span, hardware))


def intra_bytes_per_s(span: Span, hardware: Hardware) -> float:
    """busbw of a large ring inside a node; a mesh lends a small group only some of its links."""
    link = hardware.intra
    rate = link.bytes_per_s * link.ring
    if not link.name.startswith(rates.MESHES) or hardware.gpus_per_node < 2:
        return rate
    return rate * min(1.0, (span.ranks_per_node - 1) / (hardware.gpus_per_node - 1))


def nics_bytes_per_s(span: Span, hardware: Hardware) -> float:
    """What the ranks of one node send to other nodes together."""
    return span.ranks_per_node * hardware.inter.bytes_per_s * hardware.inter.ring


def tree_ns(message_bytes: float, span: Span, hardware: Hardware) -> float:
    """A double binary tree's all_reduce in ns, by the best of NCCL's protocols (TREE)."""
    depth = math.log2(span.nodes)
    inside_ns = 2 * (span.ranks_per_node - 1) * hardware.intra.latency_ns
    level_ns = 2 * depth * hardware.inter.latency_ns
    moved_ns = message_bytes / _tree_bytes_per_s(span, hardware) * 1e9
    ll = rates.LL_BASE_NS.value + inside_ns * rates.LL_STEP.value
    ll += level_ns * rates.TREE_LL_LEVEL.value
    whole_ns = 2 * message_bytes / ring_bytes_per_s(span, hardware) * 1e9
    nodes_ns = (span.nodes - 2) * rates.TREE_NODE.value * hardware.inter.latency_ns
    simple = rates.SIMPLE_BASE_NS.value + inside_ns + level_ns + max(0.0, nodes_ns)
    return min(ll + whole_ns / rates.TREE_LL_RATE.value, simple + moved_ns)


def _tree_bytes_per_s(span: Span, hardware: Hardware) -> float:
    """algbw of a large tree. Between two nodes each byte crosses once a direction, not twice."""
    inside = rates.TREE_RATE.value * intra_bytes_per_s(span, hardware) / 2
    if span.nodes == 1:
        return inside
    nics = nics_bytes_per_s(span, hardware)
    if span.nodes > 2:
        nics *= rates.TREE_REACHED.value / 2
    return nics if span.ranks_per_node == 1 else min(nics, inside)


def tree_until_bytes(span: Span, hardware: Hardware) -> float:
    """The size up to which NCCL expects a tree over nodes to beat a ring; inf for two nodes."""
    if span.nodes <= 2:
        return math.inf
    hops_ns, _ = _ring_hops_ns("all_reduce", span, hardware)
    slower_ns = 2e9 / ring_bytes_per_s(span, hardware) * (1 / rates.TREE_EXPECTED.value - 1)
    return hops_ns * rates.PLATEAU.value / slower_ns


def nvls_ns(message_bytes: float, span: Span, hardware: Hardware) -> float:
    """An all_reduce that the switch sums, in ns; inf where NCCL does not use it (NVLS)."""
    link = hardware.intra
    least = next(ranks for below, ranks in rates.NVLS_FROM if link.bytes_per_s < below)
    if hardware.nvls == 0 or span.nodes > 1 or span.ranks < least:
        return math.inf
    factor = busbw_factor("all_reduce", rates.NVLS_REFERENCE_RANKS)
    algbw = hardware.nvls * link.bytes_per_s / factor
    return rates.NVLS_FILL_NS.value + message_bytes / algbw * 1e9
