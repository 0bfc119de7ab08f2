"""What an NCCL or RCCL debug log tells: the nouns that read_nccl_log yields."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.trace import Note, RankCalls


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a communicator and the process that it is; init_ns is what its setup took.

    rank is the rank in the communicator, -1 where only calls name it. pointer is the handle that
    the process prints; bus_id is hexadecimal. -1 or "" is unknown.
    """

    rank: int
    host: str
    pid: int
    cuda_dev: int
    nvml_dev: int
    bus_id: str
    pointer: str
    init_ns: int


@dataclass(frozen=True, slots=True)
class Communicator:
    """A communicator as its members print it, by their rank; the log may name only some of them.

    id is the commId, else pointer@host:pid of the lowest rank. parent indexes the log's
    communicators; color and key are None where it is no split. -1 is unknown.
    """

    id: str
    nranks: int
    members: tuple[Member, ...]
    nodes: int = -1
    local_ranks: int = -1
    coll_channels: int = -1
    p2p_channels: int = -1
    parent: int = -1
    color: int | None = None
    key: int | None = None


@dataclass(frozen=True, slots=True)
class Ring:
    """The ranks of one channel in the order of its ring; a line cut by NCCL holds the first."""

    comm: int
    channel: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RingNeighbors:
    """Between whom a rank stands in the ring of a channel."""

    comm: int
    channel: int
    before: int
    rank: int
    after: int


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A rank in the tree of a channel: its parent (-1: it is the root) and its children."""

    comm: int
    channel: int
    parent: int
    rank: int
    children: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """A connection of one channel, as one end prints it; side is "send", "receive" or "".

    transport is the first word ("P2P", "SHM", "NET", "COLLNET"), detail what follows it. net and
    net_device are the network's, "" and -1 elsewhere. gdr: the NIC reads and writes GPU memory.
    """

    comm: int
    src_rank: int
    dst_rank: int
    channel: int
    transport: str
    detail: str
    side: str = ""
    net: str = ""
    net_device: int = -1
    gdr: bool = False


@dataclass(frozen=True, slots=True)
class GraphPattern:
    """What NCCL's search found for a pattern (by its number); bandwidth is that of one channel."""

    pattern: int
    cross_nic: int
    channels: int
    intra_bytes_per_s: int
    inter_bytes_per_s: int
    intra_type: str
    inter_type: str


@dataclass(frozen=True, slots=True)
class SystemBandwidth:
    """The fastest link of a GPU, and all of its links together; -1 where old versions say less."""

    max_bytes_per_s: int
    total_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable of the environment that NCCL read."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class CostCell:
    """NCCL's own cost of an op by algorithm and protocol; a bandwidth of 0 is never chosen."""

    op: str
    algorithm: str
    protocol: str
    latency_ns: int
    bandwidth_bytes_per_s: int
    max_threads: int


@dataclass(frozen=True, slots=True)
class CostTable:
    """The cost table that rank 0 of one communicator prints; comm is -1 where the log is silent."""

    comm: int
    host: str
    pid: int
    cells: tuple[CostCell, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """How NCCL runs an op of a size, and how many lines said so; op is "" where none is named.

    bytes_are says of what: "global" (the full buffer), "per_rank", or "" where nobody documents it.
    time_ns is NCCL's prediction; time_ns and channels are -1 where the version prints none.
    """

    op: str
    bytes: int
    bytes_are: str
    algorithm: str
    protocol: str
    time_ns: int
    channels: int
    count: int


@dataclass(frozen=True, slots=True)
class Warned:
    """An NCCL WARN of one process, and how often it came."""

    text: str
    host: str
    pid: int
    count: int


@dataclass(frozen=True, slots=True)
class NcclLog:
    """All that one log tells. comm of a record indexes communicators, -1 unknown.

    A call's rank is global: that of its process in the largest communicator of the log (or RCCL's
    globalrank), -1 where two communicators could be the largest. calls has one entry a process
    and device. torn counts the lines that NCCL wrote but that are cut or run into one another.
    """

    source: str
    versions: tuple[str, ...]
    communicators: tuple[Communicator, ...]
    rings: tuple[Ring, ...]
    neighbors: tuple[RingNeighbors, ...]
    trees: tuple[TreeNode, ...]
    links: tuple[Link, ...]
    patterns: tuple[GraphPattern, ...]
    systems: tuple[SystemBandwidth, ...]
    networks: tuple[str, ...]
    settings: tuple[Setting, ...]
    calls: tuple[RankCalls, ...]
    costs: tuple[CostTable, ...]
    choices: tuple[Choice, ...]
    warnings: tuple[Warned, ...]
    lines: int
    nccl_lines: int
    torn: int
    notes: tuple[Note, ...]
