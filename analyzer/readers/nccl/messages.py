"""Parsers of NCCL and RCCL log messages: init, cost tables, algorithm choices, rings, trees."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import Struct

from stepsplit.analyzer.ops import parse_op
from stepsplit.analyzer.readers.nccl import records

# Parsers of single messages of NCCL 2.4 to 2.30 or RCCL; they return None for a truncated message.


class Init(Struct, frozen=True):
    """An init message of a communicator; -1, "" and None for missing fields."""

    pointer: str
    rank: int
    nranks: int
    complete: bool
    cuda_dev: int
    nvml_dev: int
    bus_id: str
    comm_id: str
    parent: str
    split: int
    color: int | None
    key: int | None


# comm 0x55d0 rank 0 nranks 8 cudaDev 0 nvmlDev 0 busId 1b000 commId 0x8a1f - Init START
_INIT = re.compile(r"\bcomm (\S+) rank (\d{1,6}) n[Rr]anks (\d{1,6}) (.*)- Init (START|COMPLETE)")

# splitCount is written by ncclCommSplit; childCount is its name in newer versions.
_FIELD = re.compile(
    r"\b(cudaDev|nvmlDev|busId|commId|parent|splitCount|childCount|color|key) (-?[^\s-]+)"
)


def parse_init(text: str) -> Init | None:
    """Parses "Init START" or "Init COMPLETE"."""
    match = _INIT.search(text)
    if match is None:
        return None
    fields = dict(_FIELD.findall(match[4]))
    return Init(
        pointer=match[1],
        rank=int(match[2]),
        nranks=int(match[3]),
        complete=match[5] == "COMPLETE",
        cuda_dev=_parse_number(fields.get("cudaDev")),
        nvml_dev=_parse_number(fields.get("nvmlDev")),
        bus_id=fields.get("busId", ""),
        comm_id=fields.get("commId", ""),
        parent=fields.get("parent", ""),
        split=_parse_number(fields.get("splitCount", fields.get("childCount"))),
        color=_parse_int(fields.get("color")),
        key=_parse_int(fields.get("key")),
    )


def _parse_int(text: str | None) -> int | None:
    return int(text) if text and text.lstrip("-").isdecimal() and len(text) < 19 else None


def _parse_number(text: str | None) -> int:
    value = _parse_int(text)
    return -1 if value is None else value


class Topology(Struct, frozen=True):
    """The number of nodes of a communicator, and its number of ranks on this node."""

    pointer: str
    rank: int
    nranks: int
    nodes: int
    local_ranks: int


# comm 0x55d0 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0
_TOPOLOGY = re.compile(
    r"\bcomm (\S+) rank (\d{1,6}) n[Rr]anks (\d{1,6}) nNodes (\d{1,6}) localRanks (\d{1,6}) "
    r"localRank \d{1,6}"
)


def parse_topology(text: str) -> Topology | None:
    """Parses "comm 0x rank 0 nRanks 16 nNodes 2 ..."."""
    match = _TOPOLOGY.search(text)
    return match and Topology(match[1], *(int(match[i]) for i in range(2, 6)))


class InitTime(Struct, frozen=True):
    """The time in which a rank initialized a communicator."""

    rank: int
    nranks: int
    init_ns: int


# Init timings - ncclCommInitRank: rank 0 nranks 8 total 1.25 (kernels 0.20, ...)
_TIMINGS = re.compile(
    r"Init timings(?: - \w+)?: rank (\d{1,6}) nranks (\d{1,6}) total (\d{1,9}\.\d+)"
)


def parse_init_time(text: str) -> InitTime | None:
    """Parses the total of "Init timings"."""
    match = _TIMINGS.search(text)
    return match and InitTime(int(match[1]), int(match[2]), round(float(match[3]) * 1e9))


class Channels(Struct, frozen=True):
    """The number of channels for collectives and for messages."""

    coll: int
    p2p: int


# 24 coll channels, 16 nvls channels, 32 p2p channels, 32 p2p channels per peer
_CHANNELS = re.compile(
    r"(\d{1,6}) coll channels,(?: \d{1,6} (?:collnet|nvls) channels,)* (\d{1,6}) p2p channels"
)


def parse_channels(text: str) -> Channels | None:
    """Parses the number of channels of a communicator."""
    match = _CHANNELS.search(text)
    return match and Channels(int(match[1]), int(match[2]))


class Network(Struct, frozen=True):
    """NCCL's name of the network between the nodes."""

    name: str


# "Using network IB", and from 2.23 on "Assigned NET plugin IB to comm".
_NETWORK = re.compile(r"(?:Using network |Assigned NET plugin (?=.* to comm))(.+?)(?: to comm)?$")

# "NCCL_ALGO set by environment to Ring.", "Comm config minCTAs reset to NCCL_MIN_CTAS=4".
_SETTING = re.compile(
    r"\b(\w+) set by environment to (.*?)\.?$|Comm config \w+ reset to (\w+)=(\S+)$"
)


def parse_network(text: str) -> Network | None:
    """Parses the name of the network."""
    match = _NETWORK.match(text)
    return match and Network(match[1])


def parse_setting(text: str) -> records.NcclSetting | None:
    """Parses the name and value of an environment variable."""
    match = _SETTING.search(text)
    return match and records.NcclSetting(match[1] or match[3], match[2] or match[4] or "")


class Graphs(Struct, frozen=True):
    """Rings, trees or links of one message; pointer is the communicator's, often ""."""

    pointer: str
    graphs: tuple[Graph, ...]


ParsedMessage = (
    Init | Topology | InitTime | Channels | Graphs | Network
    | records.GraphPattern | records.SystemBandwidth | records.NcclSetting | records.AlgorithmChoice
)  # fmt: skip

_GRAPHS = re.compile(r"(?:Channel|Ring|Tree|CollNet) \d{1,6}(?:/\d{1,6})? :|Trees \[")


def parse_choice(text: str) -> records.AlgorithmChoice | None:
    """Parses "N Bytes -> ..."; None if the line is truncated.

    With algorithm numbers (up to NCCL 2.23) the bytes are those of the full buffer; with names
    (from 2.24) those of one rank's input: https://github.com/NVIDIA/nccl, src/enqueue.cc.
    """
    if match := _NAMED.match(text):
        names = (_normalize_name(match[3]), _normalize_name(match[4]))
        channels = int(match[6]) - int(match[5]) + 1
        return records.AlgorithmChoice(
            parse_op(match[1]), int(match[2]), "per_rank", *names, -1, channels, 1
        )
    if match := _NUMBERED.match(text):
        op = parse_op(match[1]) if match[1] else ""
        names = (
            _look_up_name(_ALGORITHMS, int(match[3])),
            _look_up_name(_PROTOCOLS, int(match[4])),
        )
        time_ns = round(float(match[5]) * 1000)
        return records.AlgorithmChoice(op, int(match[2]), "global", *names, time_ns, -1, 1)
    if match := _OTHER.match(text):
        channels = int(match[5]) if match[5] else -1
        op = parse_op(match[1])
        return records.AlgorithmChoice(op, int(match[3]), "", match[4], match[2], -1, channels, 1)
    return None


def parse_pattern(text: str) -> records.GraphPattern | None:
    """Parses the result of NCCL's graph search for one pattern."""
    match = _PATTERN.match(text)
    if match is None:
        return None
    cross_nic, channels = int(match[2]), int(match[3])
    intra, inter = _parse_gigabytes(match[4]), _parse_gigabytes(match[5])
    return records.GraphPattern(
        int(match[1]), cross_nic, channels, intra, inter, match[6], match[7]
    )


def parse_system(text: str) -> records.SystemBandwidth | None:
    """Parses "=== System : maxBw 48.0 totalBw 370.8 ==="."""
    match = _SYSTEM.match(text)
    return match and records.SystemBandwidth(_parse_gigabytes(match[1]), _parse_gigabytes(match[2]))


# In the order in which they are tried. A text is searched for in each line, so that only few lines
# are matched against a pattern.
_FAMILIES: tuple[tuple[str, Callable[[str], ParsedMessage | None]], ...] = (
    (" Init START", parse_init),
    (" Init COMPLETE", parse_init),
    (" nNodes ", parse_topology),
    ("Init timings", parse_init_time),
    (" coll channels", parse_channels),
    (" Bytes -> ", parse_choice),
    ("Pattern ", parse_pattern),
    ("=== System", parse_system),
    (" set by environment to", parse_setting),
    (" reset to NCCL_", parse_setting),
    ("Using network ", parse_network),
    ("Assigned NET plugin ", parse_network),
)


def find_parser(text: str) -> Callable[[str], ParsedMessage | None] | None:
    """The parser for this kind of message; None if the message is not used."""
    if _GRAPHS.match(text):
        return parse_graphs
    return next((parse for marker, parse in _FAMILIES if marker in text), None)


# NCCL's cost tables and algorithm choices.

_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")

_PROTOCOLS = ("LL", "LL128", "Simple")

_TABLE_NAMES = {name.upper(): name for name in (*_ALGORITHMS, *_PROTOCOLS)}

# AllReduce: 4096 Bytes -> Algo 1 proto 0 time 12.5
_NUMBERED = re.compile(
    r"\A(?:(\w+): +)?(\d{1,18}) Bytes -> Algo (\d{1,2}) +proto (\d{1,2}) +time (\d{1,12}\.\d+)"
)

# AllReduce: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}
_NAMED = re.compile(
    r"\A(\w+): +(\d{1,18}) Bytes -> Algo (\w+) +proto (\w+) +"
    r"channel\{Lo\.\.Hi\}=\{(\d{1,4})\.\.(\d{1,4})\}"
)

# AllReduce [Symmetric]: 4096 Bytes -> Kernel AllReduce_RSxLD_AGxST nchannels 8
_OTHER = re.compile(
    r"\A(\w+) \[([^\]]+)\]: +(\d{1,18}) Bytes -> (?:Kernel )?(\S.*?)(?: nchannels (\d{1,4}).*)?$"
)


def _normalize_name(upper: str) -> str:
    return _TABLE_NAMES.get(upper.replace("_", ""), upper)


def _look_up_name(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else str(number)


def number_algorithm(name: str) -> str:
    """NCCL's number of an algorithm, as NCCL up to 2.23 prints it."""
    return str(_ALGORITHMS.index(name)) if name in _ALGORITHMS else name


def number_protocol(name: str) -> str:
    """NCCL's number of a protocol."""
    return str(_PROTOCOLS.index(name)) if name in _PROTOCOLS else name


class CostColumns(Struct, frozen=True):
    """The columns of a cost table, from the heading lines read so far."""

    algorithms: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ()
    max_threads: tuple[int, ...] = ()


# Microseconds and GB/s: "  7.9/   0.0".
_CELL = re.compile(r"(\d{1,12}\.\d{1,6})/ *(\d{1,12}\.\d{1,6})")

_OPS = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce")


def is_table(text: str) -> bool:
    """Whether the message is a line of a cost table."""
    return text.endswith("|") and text.partition("|")[0].strip() in (
        "Latency/AlgBw", "Algorithm", "Protocol", "Max NThreads", *_OPS,
    )  # fmt: skip


def _parse_heading(columns: CostColumns, text: str) -> CostColumns | None:
    """The columns updated by a heading line; None for a line of costs."""
    name, *cells = (cell.strip() for cell in text.rstrip("|").split("|"))
    if name == "Latency/AlgBw":
        pairs = [[part.strip() for part in cell.partition("/")] for cell in cells]
        return CostColumns(tuple(pair[0] for pair in pairs), tuple(pair[2] for pair in pairs))
    if name == "Algorithm":
        return CostColumns(tuple(algorithm for algorithm in cells for _ in _PROTOCOLS))
    if name == "Protocol":  # lists three algorithms' protocols even if the last block has one
        return CostColumns(columns.algorithms, tuple(cells[: len(columns.algorithms)]))
    if name == "Max NThreads":
        threads = tuple(int(cell) if cell.isdecimal() and len(cell) < 10 else -1 for cell in cells)
        return CostColumns(columns.algorithms, columns.protocols, threads)
    return None


def _parse_costs(columns: CostColumns, text: str) -> tuple[records.CostCell, ...]:
    """The costs of one op; empty if the numbers of cells and columns differ."""
    name, *cells = (cell.strip() for cell in text.rstrip("|").split("|"))
    costs = [_CELL.fullmatch(cell) for cell in cells]
    if len(costs) != len(columns.algorithms) or len(costs) != len(columns.protocols):
        return ()
    return tuple(
        records.CostCell(
            op=parse_op(name),
            algorithm=columns.algorithms[i],
            protocol=columns.protocols[i],
            latency_ns=round(float(cost[1]) * 1e3),
            bandwidth_bytes_per_s=round(float(cost[2]) * 1e9),
            max_threads=columns.max_threads[i] if i < len(columns.max_threads) else -1,
        )
        for i, cost in enumerate(costs)
        if cost is not None  # a cell that is not a pair of numbers has no cost
    )


@dataclass(slots=True)
class PrintedCostTable:
    """A cost table that is being read; slot is that of the printing thread."""

    slot: int
    host: str
    pid: int
    cells: list[records.CostCell] = field(default_factory=list)
    columns: CostColumns = field(default_factory=CostColumns)


@dataclass(slots=True)
class CostTables:
    """The cost tables of a log; each thread prints one at a time, in one or several blocks."""

    all: list[PrintedCostTable] = field(default_factory=list)
    _open: dict[tuple[str, int, int], PrintedCostTable] = field(default_factory=dict)

    def add_line(self, speaker: records.Speaker, slot: int, text: str) -> bool:
        """Adds a line of a table; False if it does not match the heading."""
        table = self._open.get(speaker[:3])
        columns = _parse_heading(table.columns if table else CostColumns(), text)
        # A heading with algorithms that the table already has begins the next table; other
        # algorithms are its next block. The line of threads belongs to the heading before it.
        if table is None or (
            columns is not None
            and not columns.max_threads
            and not {cell.algorithm for cell in table.cells}.isdisjoint(columns.algorithms)
        ):
            table = self._open[speaker[:3]] = PrintedCostTable(slot, speaker.host, speaker.pid)
            self.all.append(table)
        if columns is not None:
            table.columns = columns
            return True
        cells = _parse_costs(table.columns, text)
        table.cells += cells
        return bool(cells)


# Rings, trees and links built by NCCL, and the bandwidths of its graph search.

Graph = records.Ring | records.RingNeighbors | records.TreeNode | records.TopologyLink

# Channel 00/02 : 0 1 2 3
_RING = re.compile(r"Channel (\d{1,6})(?:/\d{1,6})? : +(\d{1,6}(?: +\d{1,6})*)$")

# Ring 00 : 3 -> 0 -> 1
_NEIGHBORS = re.compile(r"Ring (\d{1,6}) : (-?\d{1,6}) -> (-?\d{1,6}) -> (-?\d{1,6})$")

# Tree 0 : -1 -> 0 -> 1/2/-1
_TREE = re.compile(r"Tree (\d{1,6}) : (-?\d{1,6}) -> (-?\d{1,6}) -> (-?\d{1,6}(?:/-?\d{1,6})+)$")

# Trees [0] 1/2/-1->0->-1 [1] -1/-1/-1->0->3
_TREES = re.compile(
    r"\[(\d{1,6})\] (-?\d{1,6}(?:/-?\d{1,6})*)->(-?\d{1,6})->(-?\d{1,6}(?:/-?\d{1,6})*)"
)


def _parse_ring(text: str) -> records.Ring | records.RingNeighbors | None:
    """Parses "Channel 00/02 : 0 1 2 3" or "Ring 00 : 3 -> 0 -> 1"."""
    if match := _RING.match(text):
        return records.Ring(-1, int(match[1]), tuple(int(rank) for rank in match[2].split()))
    match = _NEIGHBORS.match(text)
    return match and records.RingNeighbors(-1, *(int(number) for number in match.groups()))


def parse_tree_nodes(text: str) -> tuple[records.TreeNode, ...]:
    """Parses "Tree 0 : -1 -> 0 -> 1/2/-1" or "Trees [0] 1/2/-1->0->-1 [1] ...".

    Before NCCL 2.8 each node is also printed in the reverse direction; before 2.5 the parent comes
    first. The side with slashes has the children.
    """
    match = _TREE.match(text)
    matches = [match.groups()] if match else _TREES.findall(text)
    nodes = []
    for channel, left, rank, right in matches:
        if ("/" in left) != ("/" in right):
            up, down = (right, left) if "/" in left else (left, right)
            children = tuple(int(child) for child in down.split("/") if child.isdecimal())
            nodes.append(records.TreeNode(-1, int(channel), int(up), int(rank), children))
    return tuple(nodes)


# Channel 00/0 : 1[1] -> 0[0] [send] via NET/IB/0/GDRDMA
_LINK = re.compile(
    r"(?:Channel|Ring|CollNet) (\d{1,6})(?:/\d{1,6})? : "
    r"(\d{1,6})(?:\[\w+\])?(?: -> (\d{1,6})(?:\[\w+\])?)?"
    r" (?:\[(send|receive)\] )?via (\S.*)$"
)

# IB/0/GDRDMA, Socket/1/Shared or AWS Libfabric/0(2)/GDRDMA
_NET = re.compile(r"\A(.+?)/(\d{1,6})(?:\(\d{1,6}\))?(?:/(.*))?$")


def _parse_link(text: str) -> records.TopologyLink | None:
    """Parses "Channel 00/0 : 1[1] -> 0[0] [send] via NET/IB/0/GDRDMA"."""
    match = _LINK.match(text)
    if match is None:
        return None
    ends = (-1, int(match[2]), int(match[3] or -1), int(match[1]))
    transport, _, detail = match[5].partition("/")
    if match[5] == "direct shared memory":
        transport, detail = "SHM", match[5]
    net = _NET.match(detail) if transport in ("NET", "COLLNET") else None
    if net is None:
        return records.TopologyLink(*ends, transport, detail, match[4] or "")
    side, device = match[4] or "", int(net[2])
    return records.TopologyLink(*ends, transport, net[3] or "", side, net[1], device)


_POINTER = re.compile(r" comm (0x[0-9a-f]+)(?: .*)?$")


def parse_graphs(text: str) -> Graphs | None:
    """Parses a message that begins with Channel, CollNet, Ring or Tree; RCCL adds a pointer."""
    match = _POINTER.search(text)
    text, pointer = (text, "") if match is None else (text[: match.start()], match[1])
    if text.startswith("Tree"):
        parsed: tuple[Graph | None, ...] = parse_tree_nodes(text)
    else:
        parsed = (_parse_link(text) or _parse_ring(text),)
    graphs = tuple(graph for graph in parsed if graph is not None)
    return Graphs(pointer, graphs) if graphs else None


# Pattern 4, crossNic 0, nChannels 12, bw 20.0/20.0, type NVL/PIX, sameChannels 1
_PATTERN = re.compile(
    r"Pattern (\d{1,6}), crossNic (\d{1,6}), nChannels (\d{1,6}), (?:speed|bw) ([\d.]+)/([\d.]+),"
    r"(?: nHops \d{1,6},)? type (\w+)/(\w+), "
)

# === System : maxBw 48.0 totalBw 370.8 ===
_SYSTEM = re.compile(
    r"=== System : max(?:Width|Bw) (\d[\d.]*)(?: total(?:Width|Bw) (\d[\d.]*))? ==="
)


def _parse_gigabytes(text: str | None) -> int:
    try:
        return -1 if text is None else round(float(text) * 1e9)
    except (ValueError, OverflowError):
        return -1
