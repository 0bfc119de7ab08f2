"""Time of one collective or message by a closed form, with an error band."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import HardwareConfig
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.prediction import Band
from stepsplit.analyzer.model.rank_layout import GroupPlacement
from stepsplit.analyzer.ops import COLLECTIVES, compute_busbw_factor, format_factors

# Time of one collective or message, and its error band.

CHOICE = Formula(
    "comm.choice",
    "all_reduce: fastest of ring, tree and NVLS; over more than two nodes the tree up to the size"
    " where NCCL switches to the ring, if that is faster; other collectives: the ring",
    "NVIDIA/nccl src/graph/tuning.cc",
)

TIMED_OPS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send",
    "recv",
)  # fmt: skip


def time_of(op: str, message_bytes: float, group: GroupPlacement, hardware: HardwareConfig) -> Band:
    """Estimates one call by the closed form, in ns; message_bytes as in nccl-tests (CHOICE).

    0 for a single rank or an empty message. A larger message never takes less. Raises UsageError.
    """
    if op not in TIMED_OPS:
        raise UsageError(f"op {op!r} has no time model; use one of {', '.join(TIMED_OPS)}")
    if message_bytes < 0:
        raise UsageError(f"message_bytes ({message_bytes}) must be >= 0")
    if not 1 <= group.ranks_per_node <= group.ranks:
        raise UsageError(
            f"ranks_per_node ({group.ranks_per_node}) must be between 1 and"
            f" ranks ({max(1, group.ranks)})"
        )
    if group.ranks == 1 or message_bytes == 0:
        return Band(0.0, 0.0, 0.0)
    ns, formulas = _compute_by_closed_form(op, message_bytes, group, hardware)
    low, high = find_error_band(message_bytes, group)
    if op != "all_reduce" or group.nodes <= 2:
        return Band(ns, ns * low, ns * high, formulas)
    tree_limit = compute_tree_limit_bytes(group, hardware)
    if not tree_limit / SWITCH_FACTOR < message_bytes < tree_limit * SWITCH_FACTOR:
        return Band(ns, ns * low, ns * high, formulas)
    either = (
        compute_ring_ns(op, message_bytes, group, hardware),
        compute_tree_ns(message_bytes, group, hardware),
    )
    return Band(ns, min(ns * low, *either), max(ns * high, *either), formulas)


_ClosedForm = tuple[float, tuple[Formula, ...]]
"""A time in ns and the formulas of its Band."""


def _compute_by_closed_form(
    op: str, message_bytes: float, group: GroupPlacement, hardware: HardwareConfig
) -> _ClosedForm:
    if op in ("send", "recv"):
        # Computes the time of a message in ns (SEND); between nodes if the group has several.
        if group.nodes > 1:
            rate, latency_ns = (
                compute_nics_bytes_per_s(GroupPlacement(2, 1), hardware),
                hardware.inter.latency_ns,
            )
        else:
            rate, latency_ns = (
                compute_intra_bytes_per_s(GroupPlacement(2, 2), hardware),
                hardware.intra.latency_ns,
            )
        moved_ns = message_bytes / rate * 1e9
        ll = LL_BASE_NS.value + latency_ns * LL_STEP.value + moved_ns / LL_RATE.value
        return min(ll, SIMPLE_BASE_NS.value + latency_ns + moved_ns), (SEND,)
    if op == "all_to_all":
        return compute_all_to_all_ns(message_bytes, group, hardware), (ALL_TO_ALL,)
    if op == "all_reduce":
        # Above the tree's size limit the time is at least that of the tree at the limit.
        ring = compute_ring_ns("all_reduce", message_bytes, group, hardware)
        tree = compute_tree_ns(message_bytes, group, hardware)
        if group.nodes <= 2:
            return _pick_fastest(ring, tree, compute_nvls_ns(message_bytes, group, hardware))
        tree_limit = compute_tree_limit_bytes(group, hardware)
        if message_bytes <= tree_limit:
            return tree, (TREE, RING_ALGORITHM, CHOICE)
        last_ns = compute_tree_ns(tree_limit, group, hardware)
        if last_ns > ring:
            return last_ns, (CHOICE, TREE, RING_ALGORITHM)
        return _pick_fastest(ring, tree, math.inf)
    return compute_ring_ns(op, message_bytes, group, hardware), (RING_ALGORITHM, CHOICE)


def _pick_fastest(ring: float, tree: float, nvls: float) -> _ClosedForm:
    """Picks the fastest algorithm; NVLS is left out if its time is infinite."""
    times = [(ring, RING_ALGORITHM), (tree, TREE)]
    if nvls < math.inf:
        times.append((nvls, NVLS))
    times.sort(key=itemgetter(0))
    return times[0][0], (*(formula for _, formula in times), CHOICE)


# Messages between pairs of ranks: send and all_to_all.

SEND = Formula(
    "comm.send",
    "t = base + a + S / (B e), with the link between the two ranks",
    "Hockney, Parallel Computing 1994 (alpha-beta); base as in NVIDIA/nccl src/graph/tuning.cc",
)

ALL_TO_ALL = Formula(
    "comm.all_to_all",
    "t = base + a + max((g-1)/n S / (0.89 NVLink), (n-g)/n S (1 + sqrt(s0 / (S/n))) / NIC); n"
    " ranks, g per node, s0 = 0.34 MB: between nodes small messages reach less of the NIC",
    "NVIDIA/nccl-tests doc/PERFORMANCE.md: every rank sends S/n to each other one; 0.89, s0: fitted"
    " on H100 over EFA and GB200",
)


def compute_all_to_all_ns(
    message_bytes: float, group: GroupPlacement, hardware: HardwareConfig
) -> float:
    """Computes an all_to_all in ns, intra-node and NIC traffic in parallel (ALL_TO_ALL)."""
    here, others = group.ranks_per_node - 1, group.ranks - group.ranks_per_node
    part_bytes = message_bytes / group.ranks
    inside_rate = compute_intra_bytes_per_s(group, hardware) * PAIRS_RATE.value
    nic_rate = compute_nics_bytes_per_s(GroupPlacement(2, 1), hardware)
    inside_ns = here * part_bytes / inside_rate * 1e9 if here else 0.0
    across_ns = others * (part_bytes + math.sqrt(PAIR_BYTES.value * part_bytes)) / nic_rate * 1e9
    latency_ns = hardware.intra.latency_ns if here else 0.0
    if others > 0:
        farther = 1 + LL_STEP.value * (group.nodes - 2)
        latency_ns = max(latency_ns, hardware.inter.latency_ns * farther)
    return SIMPLE_BASE_NS.value + latency_ns + max(inside_ns, across_ns)


# NCCL's algorithms for a collective: latency plus bytes over bandwidth.

_RING_OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")

_RING_FACTORS = ", ".join(
    f"{factor.replace(' ', '')} {' and '.join(ops)}" for factor, ops in format_factors(_RING_OPS)
)

RING_ALGORITHM = Formula(
    "comm.ring",
    "t = base + steps a + S f / (B e); steps 2(n-1) all_reduce, n-1 otherwise;"
    f" f = {_RING_FACTORS};"
    " over k nodes 2(k-1) or k-1 of the steps are between nodes; large messages wait for these"
    " and, in an all_reduce, for the steps of one node, otherwise for 0.55 of all others; B ="
    " min(NVLink, ranks per node x NIC)",
    "NVIDIA/nccl src/graph/tuning.cc; NVIDIA/nccl-tests doc/PERFORMANCE.md",
)

TREE = Formula(
    "comm.tree",
    "t = base + 2 ((g-1) a_intra + log2(k) a_inter) + 2 S / B_tree; two nodes: S / NIC",
    "NVIDIA/nccl src/graph/tuning.cc; not 2 log2(n) S: a double tree moves 2 S, log2 is latency",
)

NVLS = Formula(
    "comm.nvls",
    "t = base + S / algbw, algbw = nvls B / (2 (8-1)/8) for any number of ranks on a switch; over"
    " two nodes (NVLSTree) t = 0.27 ms + S / min(0.895 algbw, NICs of a node), each byte once",
    "NVIDIA/nccl src/graph/tuning.cc; ml-engineering network/README.md, 8xH200 rows",
)


def compute_ring_ns(
    op: str, message_bytes: float, group: GroupPlacement, hardware: HardwareConfig
) -> float:
    """Computes the time of a ring in ns, by the best of NCCL's protocols (RING_ALGORITHM)."""
    ring_bytes = message_bytes * compute_busbw_factor(op, group.ranks)
    moved_ns = ring_bytes / compute_ring_bytes_per_s(group, hardware) * 1e9
    hops_ns, large_hops_ns = _compute_ring_hops_ns(op, group, hardware)
    simple = SIMPLE_BASE_NS.value + large_hops_ns + moved_ns
    ll_ns = moved_ns / LL_RATE.value
    if group.nodes > 1:
        ll_ns = max(ll_ns, ring_bytes / LL_NODES_BYTES_PER_S.value * 1e9)
    ll = LL_BASE_NS.value + hops_ns * LL_STEP.value + ll_ns
    if not hardware.intra.name.startswith(LL128_LINKS):
        return min(simple, ll)
    ll128 = LL128_BASE_NS.value
    if group.nodes == 1:
        ll128 += hops_ns * LL128_STEP.value
    elif COLLECTIVES[op].passes_parts and hardware.inter.name.startswith(LL128_NETWORKS):
        ll128 += large_hops_ns * LL128_STEP.value
    else:
        return min(simple, ll)
    return min(simple, ll, ll128 + moved_ns / LL128_RATE.value)


def _compute_ring_hops_ns(
    op: str, group: GroupPlacement, hardware: HardwareConfig
) -> tuple[float, float]:
    """Latency in ns of all steps, and of those that a large message waits for: between nodes, and
    of one node or, where each rank's part passes all others in turn, of all nodes."""
    rounds, here = COLLECTIVES[op].rounds, group.ranks_per_node - 1
    between = rounds * (group.nodes - 1)
    steps = rounds * (group.ranks - 1) - between
    between_ns = between * hardware.inter.latency_ns
    inside_ns = steps * hardware.intra.latency_ns
    own_ns = rounds * here * hardware.intra.latency_ns
    if COLLECTIVES[op].passes_parts and group.nodes > 1:
        own_ns = inside_ns * PASS_STEP.value
    return inside_ns + between_ns, own_ns + between_ns


def compute_ring_bytes_per_s(group: GroupPlacement, hardware: HardwareConfig) -> float:
    """Computes the busbw of a large ring: the slower of the node's links and all its NICs."""
    if group.nodes == 1:
        return compute_intra_bytes_per_s(group, hardware)
    nics = compute_nics_bytes_per_s(group, hardware)
    return (
        nics if group.ranks_per_node == 1 else min(nics, compute_intra_bytes_per_s(group, hardware))
    )


def compute_intra_bytes_per_s(group: GroupPlacement, hardware: HardwareConfig) -> float:
    """Computes the busbw of a large ring inside a node; on a mesh a small group uses few links."""
    link = hardware.intra
    rate = link.bytes_per_s * link.ring
    if not link.name.startswith(MESHES) or hardware.gpus_per_node < 2:
        return rate
    return rate * min(1.0, (group.ranks_per_node - 1) / (hardware.gpus_per_node - 1))


def compute_nics_bytes_per_s(group: GroupPlacement, hardware: HardwareConfig) -> float:
    """Computes the rate at which the ranks of a node together send to other nodes."""
    return group.ranks_per_node * hardware.inter.bytes_per_s * hardware.inter.ring


def compute_tree_ns(message_bytes: float, group: GroupPlacement, hardware: HardwareConfig) -> float:
    """Computes a double binary tree all_reduce in ns, by the best of NCCL's protocols (TREE)."""
    depth = math.log2(group.nodes)
    inside_ns = 2 * (group.ranks_per_node - 1) * hardware.intra.latency_ns
    level_ns = 2 * depth * hardware.inter.latency_ns
    moved_ns = message_bytes / _compute_tree_bytes_per_s(group, hardware) * 1e9
    ll = LL_BASE_NS.value + inside_ns * LL_STEP.value
    ll += level_ns * TREE_LL_LEVEL.value
    whole_ns = 2 * message_bytes / compute_ring_bytes_per_s(group, hardware) * 1e9
    nodes_ns = (group.nodes - 2) * TREE_NODE.value * hardware.inter.latency_ns
    simple = SIMPLE_BASE_NS.value + inside_ns + level_ns + max(0.0, nodes_ns)
    return min(ll + whole_ns / TREE_LL_RATE.value, simple + moved_ns)


def _compute_tree_bytes_per_s(group: GroupPlacement, hardware: HardwareConfig) -> float:
    """algbw of a large tree. Between two nodes each byte crosses once per direction, not twice."""
    inside = TREE_RATE.value * compute_intra_bytes_per_s(group, hardware) / 2
    if group.nodes == 1:
        return inside
    nics = compute_nics_bytes_per_s(group, hardware)
    if group.nodes > 2:
        nics *= TREE_REACHED.value / 2
    return nics if group.ranks_per_node == 1 else min(nics, inside)


def compute_tree_limit_bytes(group: GroupPlacement, hardware: HardwareConfig) -> float:
    """Computes the size up to which NCCL selects a tree over nodes; inf for two nodes.

    By the rate of the links that limit the tree: a tree of this size takes as long on faster links,
    so that a faster link makes no message slower.
    """
    if group.nodes <= 2:
        return math.inf
    hops_ns, _ = _compute_ring_hops_ns("all_reduce", group, hardware)
    ring_bytes_per_s = _compute_tree_bytes_per_s(group, hardware) * 2 / TREE_REACHED.value
    slower_ns = 2e9 / ring_bytes_per_s * (1 / TREE_EXPECTED.value - 1)
    return hops_ns * PLATEAU.value / slower_ns


def compute_nvls_ns(message_bytes: float, group: GroupPlacement, hardware: HardwareConfig) -> float:
    """Computes an all_reduce in the switch, in ns (NVLS); inf if NCCL does not use it."""
    link = hardware.intra
    least = next(ranks for below, ranks in NVLS_FROM if link.bytes_per_s < below)
    if hardware.nvls == 0 or group.nodes > 2 or group.ranks_per_node < least:
        return math.inf
    factor = compute_busbw_factor("all_reduce", NVLS_REFERENCE_RANKS)
    algbw = hardware.nvls * link.bytes_per_s / factor
    if group.nodes == 1:
        return NVLS_FILL_NS.value + message_bytes / algbw * 1e9
    across = min(NVLS_TREE_RATE.value * algbw, compute_nics_bytes_per_s(group, hardware))
    return NVLS_TREE_FILL_NS.value + message_bytes / across * 1e9


# Constants of collective times, with their sources.

_TUNING = "NVIDIA/nccl src/graph/tuning.cc"


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant that was fitted on published rows (by id) or copied from a source."""

    value: float
    source: str
    rows: tuple[str, ...] = ()


LL_STEP = Constant(0.18, f"{_TUNING}: ring LL / ring Simple = 0.6/3.4, 1.0/5.7, 2.7/14")
"""Latency of a step with LL over Link.latency_ns (a ring step with Simple)."""

LL128_STEP = Constant(0.5, f"{_TUNING}: ring LL128 / ring Simple = 1.9/3.4, 2.5/5.7, 4.0/14")

TREE_LL_LEVEL = Constant(0.36, f"{_TUNING}: tree LL / ring Simple between nodes = 5.0/14")

LL128_LINKS = ("nvlink",)
"""Links, by name prefix, that store 128 bytes atomically."""

LL128_NETWORKS = ("ib-", "roce-")
"""Networks, by name prefix, over which NCCL uses LL128 (EFA's plugin and Slingshot's do not)."""

LL_RATE = Constant(0.5, f"{_TUNING}: half of each LL word is a flag")

LL_NODES_BYTES_PER_S = Constant(35e9, f"{_TUNING}: llMaxBws, Hopper, 4 nodes")
"""Most that a ring with LL moves between nodes."""

LL128_RATE = Constant(0.92, f"{_TUNING}: 120 of 128 bytes are data, rounded down")

TREE_LL_RATE = Constant(1 / 3.8, f"{_TUNING}: tree LL")

TREE_RATE = Constant(0.92, f"{_TUNING}: tree against ring inside a node")

LL_BASE_NS = Constant(6_600.0, f"{_TUNING}: base latency of ring LL (tree: 6.8 us)")

LL128_BASE_NS = Constant(14_000.0, f"{_TUNING}: base latency of LL128")

SIMPLE_BASE_NS = Constant(8_400.0, f"{_TUNING}: base latency of Simple")

PLATEAU = Constant(1.4, f"{_TUNING}: what NCCL adds to a large ring's latency between nodes")

NVLS_REFERENCE_RANKS = 8
"""HardwareConfig.nvls is a busbw on this many ranks; algbw is the same on any number."""


def list_busbw_rows(system: str, *calls: str) -> tuple[str, ...]:
    """Lists row ids of nccl_busbw_by_ranks_and_algo.csv, by collective and ranks."""
    return tuple(f"busbw/{system}_{call}" for call in calls)


H200, H200_LARGE = "8xH200 8GiB", "8xH200 16GiB"

NVLS_ROWS = list_busbw_rows(H200, "all_reduce_4", "all_reduce_5")

NVLS_FROM = ((600e9, 5), (float("inf"), 6))
"""(upper bound of Link.bytes_per_s, smallest number of ranks with NVLS): 5 on H200, 6 on B200.
From NVLS_ROWS (ml-engineering network/README.md)."""


def list_sweep_rows(system: str, sizes: Iterable[int]) -> tuple[str, ...]:
    """Lists row ids of nccl_allreduce_sweeps.csv, by system and tool."""
    return tuple(f"sweep/{system}_{size}" for size in sizes)


B200 = "1x8 B200 p6-b200 (NVLink5)_all_reduce_bench.py"

KIB, MIB, GIB = 2**10, 2**20, 2**30

NVLS_FILL_NS = Constant(
    90_000.0,
    "1x8 B200 all_reduce, 128 MiB, 512 MiB and 2 GiB (NCCL's own constant is 25 us)",
    list_sweep_rows(B200, (128 * MIB, 512 * MIB, 2 * GIB)),
)

TWO_NODES_ROWS = tuple(
    f"nodes/H100 p5.48xlarge (EFA)_all_reduce_16_{size}" for size in (128 * MIB, 512 * MIB, 2 * GIB)
)

NVLS_TREE_FILL_NS = Constant(
    270_000.0, "H100 over EFA all_reduce, 2 nodes, 128 and 512 MiB and 2 GiB", TWO_NODES_ROWS
)

NVLS_TREE_RATE = Constant(
    0.895, "H100 over EFA all_reduce, 2 nodes, 128 and 512 MiB and 2 GiB", TWO_NODES_ROWS
)
"""Rate of sums in the switches of two nodes over that in one."""

ALPS_FIT = "Alps GH200 all_reduce, 4 to 256 nodes, 32, 128 and 512 MiB and 2 GiB"


def list_alps_rows(nodes: Iterable[int], sizes: Iterable[int]) -> tuple[str, ...]:
    """Lists row ids of nccl_allreduce_alps_gh200.csv, with four GPUs per node."""
    all_sizes = tuple(sizes)
    return tuple(f"alps/{count}x4_{size}" for count in nodes for size in all_sizes)


ALPS_NODES = (1, 4, 16, 64, 256)

ALPS_ROWS = list_alps_rows(ALPS_NODES[1:], (32 * MIB, 128 * MIB, 512 * MIB, 2 * GIB))

TREE_EXPECTED = Constant(
    0.68,
    "Alps GH200 all_reduce, 4 to 64 nodes, 32, 128 and 512 MiB: still a tree",
    list_alps_rows((4, 16, 64), (32 * MIB, 128 * MIB, 512 * MIB)),
)
"""NCCL's estimate of a tree's busbw over a ring's on more than two nodes, used to choose."""

TREE_REACHED = Constant(0.6, ALPS_FIT, ALPS_ROWS)
"""The ratio that such a tree really reaches."""

TREE_NODE = Constant(0.6, ALPS_FIT, ALPS_ROWS)
"""Latency that each further node adds to a tree with Simple, over the inter-node link's."""

EFA_SIZES = (32 * MIB, 128 * MIB, 512 * MIB, 2 * GIB)

EFA_NODES = (2, 4, 8, 16, 32)


def list_efa_rows(op: str) -> tuple[str, ...]:
    """Lists row ids of nccl_sweeps_over_nodes.csv on which a constant of an op was fitted."""
    system = "H100 p5.48xlarge (EFA)"
    return tuple(f"nodes/{system}_{op}_{8 * k}_{size}" for k in EFA_NODES for size in EFA_SIZES)


PAIR_BYTES = Constant(
    0.34e6, "H100 over EFA all_to_all, 2 to 32 nodes", list_efa_rows("all_to_all")
)
"""Message to each other rank at which an all_to_all reaches half of the rate between nodes."""

GB200_ROWS = tuple(f"nodes/GB200 NVL72_all_to_all_{n}_{2**33}" for n in (4, 8, 64))

PAIRS_RATE = Constant(0.89, "GB200 all_to_all of 8 GiB in a rack, 4, 8 and 64 ranks", GB200_ROWS)
"""Share of a ring's rate that an all_to_all reaches in a node."""

PASS_STEP = Constant(0.55, "H100 over EFA all_gather, 2 to 32 nodes", list_efa_rows("all_gather"))
"""Latency of a step within a node in a ring over several, over Link.latency_ns."""

MESHES = ("xgmi-mi3",)
"""Links, by name prefix, of a full mesh: a GPU has one to each other GPU of its node, and a group
of n ranks uses n-1 of them. ml-engineering network/README.md, 8xMI300X 4 GiB rows. The dies of
MI250X are no full mesh; the rate of their link is that of one connection."""


def list_fitted_rows() -> frozenset[str]:
    """Lists the ids of all rows on which constants of this module were fitted."""
    constants = (each for each in globals().values() if isinstance(each, Constant))
    return frozenset(NVLS_ROWS).union(*(each.rows for each in constants))


ALPS_SIZES = tuple(2**power for power in range(15, 32, 2))
"""32 KiB to 2 GiB in factors of 4."""

A100 = "1x8 A100 (NVLink3)_nccl-tests"

SWEEP_SIZES = (*ALPS_SIZES, 8 * GIB)


# Error band of the closed form, by size and number of nodes.

ROWS = (
    *list_alps_rows(ALPS_NODES, ALPS_SIZES),
    *list_sweep_rows(A100, SWEEP_SIZES),
    *list_sweep_rows(B200, SWEEP_SIZES),
    *list_efa_rows("all_to_all"), *list_efa_rows("all_gather"), *list_efa_rows("all_reduce"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ErrorBand:
    """Measured / predicted time up to a size: 5th and 95th percentile over ROWS.

    At least 12 to 20 % on each side, even if the rows vary less: they cover only four clusters.
    """

    until_bytes: float
    low: float
    high: float


INTRA = (
    ErrorBand(MIB, 0.7, 1.4),
    ErrorBand(64 * MIB, 0.75, 1.4),
    ErrorBand(float("inf"), 0.87, 1.15),
)
"""Within a node. Above 64 MiB it covers the B200 switch at 8 GiB (740 to 839 GB/s)."""

INTER = (
    ErrorBand(4 * KIB, 0.7, 1.25), ErrorBand(2 * MIB, 0.8, 5.5), ErrorBand(32 * MIB, 0.85, 1.9),
    ErrorBand(float("inf"), 0.75, 1.36),
)  # fmt: skip
"""2 to 64 nodes; up to 32 MiB all on one fabric. From 4 KiB to 2 MiB that one leaves its eager
protocol, which NCCL's constants do not model: measured times are 2 to 5 times the predicted
ones."""

FAR = (
    ErrorBand(4 * KIB, 0.8, 1.25),
    ErrorBand(32 * MIB, 0.8, 5.8),
    ErrorBand(float("inf"), 0.8, 1.9),
)
"""More than FAR_NODES: times depend on the load of the fabric."""

FAR_NODES = 64
"""INTER is of the rows of up to 64 nodes, FAR of those of 256; there are none between."""

SWITCH_FACTOR = 2.0
"""Within this factor of the size at which NCCL switches algorithms, either one may run."""


def find_error_band(message_bytes: float, group: GroupPlacement) -> tuple[float, float]:
    """Finds the (low, high) factors of a predicted time, for all ops."""
    classes = FAR if group.nodes > FAR_NODES else INTER if group.nodes > 1 else INTRA
    spread = next(each for each in classes if message_bytes < each.until_bytes)
    return spread.low, spread.high


# System names in the published all_reduce rows.

MI300X = "8xMI300X 4GiB"
