"""What messages between pairs of ranks take: send and all_to_all."""

from __future__ import annotations

from stepsplit.analyzer.model.comm import rates
from stepsplit.analyzer.model.comm.algorithms import intra_bytes_per_s, nics_bytes_per_s
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.spec.hardware import Hardware
from stepsplit.analyzer.model.spec.span import Span

SEND = Formula(
    "comm.send",
    "t = base + a + S / (B e), of the link between the two ranks",
    "Hockney, Parallel Computing 1994 (alpha-beta); base as in NVIDIA/nccl src/graph/tuning.cc",
)
ALL_TO_ALL = Formula(
    "comm.all_to_all",
    "t = base + a + max((g-1)/n S / NVLink, (n-g)/n S / NIC); n ranks, g of them on a node",
    "NVIDIA/nccl-tests doc/PERFORMANCE.md: every rank sends S/n to each other one",
)


def send_ns(message_bytes: float, span: Span, hardware: Hardware) -> float:
    """One message in ns; between nodes where the span has several: its slowest pair (SEND)."""
    if span.nodes > 1:
        rate, latency_ns = nics_bytes_per_s(Span(2, 1), hardware), hardware.inter.latency_ns
    else:
        rate, latency_ns = intra_bytes_per_s(Span(2, 2), hardware), hardware.intra.latency_ns
    moved_ns = message_bytes / rate * 1e9
    ll = rates.LL_BASE_NS.value + latency_ns * rates.LL_STEP.value + moved_ns / rates.LL_RATE.value
    return min(ll, rates.SIMPLE_BASE_NS.value + latency_ns + moved_ns)


def all_to_all_ns(message_bytes: float, span: Span, hardware: Hardware) -> float:
    """Equal parts from each rank to each other, in ns, nodes and NICs at once (ALL_TO_ALL)."""
    here, others = span.ranks_per_node - 1, span.ranks - span.ranks_per_node
    part = message_bytes / span.ranks * 1e9
    inside_ns = part * here / intra_bytes_per_s(span, hardware) if here else 0.0
    across_ns = part * others / nics_bytes_per_s(Span(2, 1), hardware) if others > 0 else 0.0
    latency_ns = hardware.intra.latency_ns if here else 0.0
    if others > 0:
        farther = 1 + rates.LL_STEP.value * (span.nodes - 2)
        latency_ns = max(latency_ns, hardware.inter.latency_ns * farther)
    return rates.SIMPLE_BASE_NS.value + latency_ns + max(inside_ns, across_ns)
