"""The constants of collective time, each with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.comm.fitted_rows import (
    ALPS_NODES,
    B200,
    GIB,
    H200,
    MIB,
    alps,
    busbw,
    sweep,
)

_TUNING = "NVIDIA/nccl src/graph/tuning.cc"


@dataclass(frozen=True, slots=True)
class Constant:
    """A number that was fitted on published rows (their ids) or copied from a source."""

    value: float
    source: str
    rows: tuple[str, ...] = ()


LL_STEP = Constant(0.18, f"{_TUNING}: ring LL / ring Simple = 0.6/3.4, 1.0/5.7, 2.7/14")
"""A step with the LL protocol, over Link.latency_ns (a ring step with Simple)."""
LL128_STEP = Constant(0.5, f"{_TUNING}: ring LL128 / ring Simple = 1.9/3.4, 2.5/5.7, 4.0/14")
TREE_LL_LEVEL = Constant(0.36, f"{_TUNING}: tree LL / ring Simple between nodes = 5.0/14")
LL128_LINKS = ("nvlink",)
"""Links, by the beginning of their name, that keep the 128 bytes of a word together."""
LL_RATE = Constant(0.5, f"{_TUNING}: half of each LL word is a flag")
LL128_RATE = Constant(0.92, f"{_TUNING}: 120 of 128 bytes are data, rounded down")
TREE_LL_RATE = Constant(1 / 3.8, f"{_TUNING}: tree LL")
TREE_RATE = Constant(0.92, f"{_TUNING}: tree against ring inside a node")
LL_BASE_NS = Constant(6_600.0, f"{_TUNING}: base latency of ring LL (tree: 6.8 us)")
LL128_BASE_NS = Constant(14_000.0, f"{_TUNING}: base latency of LL128")
SIMPLE_BASE_NS = Constant(8_400.0, f"{_TUNING}: base latency of Simple")
PLATEAU = Constant(1.4, f"{_TUNING}: what NCCL adds to a large ring's latency between nodes")

NVLS_REFERENCE_RANKS = 8
"""Hardware.nvls is a busbw on this many ranks. The switch makes algbw the same on any number."""
NVLS_ROWS = busbw(H200, "all_reduce_4", "all_reduce_5")
NVLS_FROM = ((600e9, 5), (float("inf"), 6))
"""(Link.bytes_per_s below, ranks from which NVLS is used): 5 on H200, 6 on B200. From NVLS_ROWS
(ml-engineering network/README.md)."""
NVLS_FILL_NS = Constant(
    90_000.0,
    "1x8 B200 all_reduce, 128 MiB, 512 MiB and 2 GiB (NCCL's own constant is 25 us)",
    sweep(B200, (128 * MIB, 512 * MIB, 2 * GIB)),
)

ALPS_FIT = "Alps GH200 all_reduce, 4 to 256 nodes, 32, 128 and 512 MiB and 2 GiB"
ALPS_ROWS = alps(ALPS_NODES[1:], (32 * MIB, 128 * MIB, 512 * MIB, 2 * GIB))
TREE_EXPECTED = Constant(
    0.68,
    "Alps GH200 all_reduce, 4 to 64 nodes, 32, 128 and 512 MiB: still a tree",
    alps((4, 16, 64), (32 * MIB, 128 * MIB, 512 * MIB)),
)
"""What NCCL takes a tree over more than two nodes to reach of a ring's busbw, when it chooses."""
TREE_REACHED = Constant(0.6, ALPS_FIT, ALPS_ROWS)
"""What such a tree does reach."""
TREE_NODE = Constant(0.6, ALPS_FIT, ALPS_ROWS)
"""What each further node adds to a tree with Simple, over the latency of the link between nodes."""

MESHES = ("xgmi",)
"""Links, by the beginning of their name, of which a GPU has one to each other GPU of its node: a
group of n ranks uses n-1 of them. ml-engineering network/README.md, 8xMI300X 4 GiB rows."""


def fitted_rows() -> frozenset[str]:
    """The ids of all rows that a constant of this module was fitted on."""
    constants = (each for each in globals().values() if isinstance(each, Constant))
    return frozenset(NVLS_ROWS).union(*(each.rows for each in constants))
