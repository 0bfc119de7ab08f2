"""Types of an NCCL debug log (communicators, members, choices), and the split into messages."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple

import msgspec

from stepsplit.analyzer.trace import Note, RankCalls

# The types that read_nccl_log returns for an NCCL or RCCL debug log.


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a communicator and its process; -1 or "" means unknown.

    Attributes:
        rank: Rank in the communicator; -1 if the communicator appears only in calls.
        host: Host name.
        pid: Process id.
        cuda_dev: CUDA device number in the process.
        nvml_dev: NVML device number on the host.
        bus_id: PCI bus id of the device, hexadecimal.
        pointer: Handle of the communicator, as printed by the process.
        init_ns: Duration of the initialization in ns.
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
    """A communicator with its members; -1 means unknown.

    Attributes:
        id: The commId, else pointer@host:pid of the lowest rank.
        nranks: Number of ranks.
        members: Members sorted by rank; the log may have only some of them.
        nodes: Number of nodes.
        local_ranks: Number of ranks per node; the maximum over the members.
        coll_channels: Number of channels for collectives.
        p2p_channels: Number of channels for sends and receives.
        parent: Index into the log's communicators of the one that was split; -1 also if none.
        color: Color of the split; None if it was not created by a split.
        key: Key of the first member in the split; None if it was not created by a split.
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
    """The ring of one channel.

    Attributes:
        comm: Index into the log's communicators; -1 if unknown.
        channel: Channel number.
        ranks: Ranks in ring order; only the first ones if NCCL truncated the line.
    """

    comm: int
    channel: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RingNeighbors:
    """The neighbors of a rank in the ring of a channel.

    Attributes:
        comm: Index into the log's communicators; -1 if unknown.
        channel: Channel number.
        before: Rank from which this rank receives; -1 if NCCL printed none.
        rank: The rank, in the communicator.
        after: Rank to which this rank sends; -1 if NCCL printed none.
    """

    comm: int
    channel: int
    before: int
    rank: int
    after: int


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A rank in the tree of a channel.

    Attributes:
        comm: Index into the log's communicators; -1 if unknown.
        channel: Channel number.
        parent: Rank of the parent; -1 for the root.
        rank: The rank, in the communicator.
        children: Ranks of the children; () for a leaf.
    """

    comm: int
    channel: int
    parent: int
    rank: int
    children: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TopologyLink:
    """A connection of one channel, as printed by one end.

    Attributes:
        comm: Index into the log's communicators; -1 if unknown.
        src_rank: Rank that sends.
        dst_rank: Rank that receives; -1 if not printed.
        channel: Channel number.
        transport: First word of the connection, such as "P2P", "SHM", "NET" or "COLLNET".
        detail: The text after it, for a network the text after the device number ("GDRDMA" if the
            NIC accesses GPU memory directly); "" if none.
        side: The end that printed the connection: "send", "receive", or "" if not printed.
        net: Network such as "IB" or "Socket"; "" if it is not a network.
        net_device: Number of the network device; -1 if it is not a network.
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


@dataclass(frozen=True, slots=True)
class GraphPattern:
    """The result of NCCL's graph search for one pattern.

    Bandwidths are per channel, in bytes per second; -1 if unreadable.

    Attributes:
        pattern: NCCL's number of the pattern, such as 4 for a ring.
        cross_nic: crossNic as printed: whether a ring may use different NICs on different nodes.
        channels: Number of channels.
        intra_bytes_per_s: Bandwidth in a node.
        inter_bytes_per_s: Bandwidth between nodes.
        intra_type: Type of the slowest path in a node, such as "NVL".
        inter_type: Type of the slowest path to the NIC, such as "PIX".
    """

    pattern: int
    cross_nic: int
    channels: int
    intra_bytes_per_s: int
    inter_bytes_per_s: int
    intra_type: str
    inter_type: str


@dataclass(frozen=True, slots=True)
class SystemBandwidth:
    """Bandwidth of a GPU's links; -1 if not printed (old versions).

    Attributes:
        max_bytes_per_s: Bandwidth of the fastest link in bytes per second.
        total_bytes_per_s: Bandwidth of all links in bytes per second.
    """

    max_bytes_per_s: int
    total_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class NcclSetting:
    """An environment variable read by NCCL.

    Attributes:
        name: Its name, such as "NCCL_DEBUG".
        value: Its value as printed; "" if empty.
    """

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class CostCell:
    """NCCL's cost of an op for an algorithm and protocol.

    Attributes:
        op: Item of OPS.
        algorithm: NCCL's algorithm, such as "Ring".
        protocol: NCCL's protocol, such as "LL128".
        latency_ns: Latency in ns.
        bandwidth_bytes_per_s: Algorithm bandwidth in bytes per second; a cell with 0 is never
            chosen.
        max_threads: Maximum number of threads; -1 if unknown.
    """

    op: str
    algorithm: str
    protocol: str
    latency_ns: int
    bandwidth_bytes_per_s: int
    max_threads: int


@dataclass(frozen=True, slots=True)
class CostTable:
    """The cost table printed by rank 0 of a communicator.

    Attributes:
        comm: Index into the log's communicators; -1 if unknown.
        host: Host name; "" if unknown.
        pid: Process id; -1 if unknown.
        cells: The costs, at least one.
    """

    comm: int
    host: str
    pid: int
    cells: tuple[CostCell, ...]


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """NCCL's algorithm for an op of a size.

    Attributes:
        op: Item of OPS; "" if not named.
        bytes: Size in bytes, in the meaning of bytes_are.
        bytes_are: Meaning of bytes: "global" (the full buffer), "per_rank", or "" if it is not
            documented.
        algorithm: NCCL's algorithm such as "Ring", or the name of a kernel.
        protocol: NCCL's protocol such as "LL", or the kind of a kernel such as "Symmetric".
        time_ns: NCCL's prediction in ns; -1 if not printed.
        channels: Number of channels; -1 if not printed.
        count: Number of such lines in the log.
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
class NcclWarning:
    """An NCCL WARN of one process.

    Attributes:
        text: The message.
        host: Host name; "" if unknown.
        pid: Process id; -1 if unknown.
        count: Number of occurrences.
    """

    text: str
    host: str
    pid: int
    count: int


@dataclass(frozen=True, slots=True)
class NcclLog:
    """The content of one log.

    A call's rank is global: the rank of its process in the largest communicator of the log (or
    RCCL's globalrank), -1 if the largest communicator is ambiguous. The ranks of the
    other records are those in the communicator. Settings, patterns, systems and networks are
    listed once each.

    Attributes:
        source: The file, as shown to the user.
        versions: Versions as written; those of RCCL begin with "RCCL ".
        communicators: The communicators; comm of a record indexes them, -1 means unknown.
        rings: Rings of the channels.
        neighbors: Neighbors in the rings.
        trees: Nodes of the trees.
        links: Connections of the channels.
        patterns: Results of the graph search.
        systems: Bandwidths of a GPU's links.
        networks: NCCL's names of the networks between nodes.
        settings: Environment variables that NCCL read.
        calls: The calls, one entry per process and device; () if they were not logged.
        costs: Cost tables.
        choices: Algorithm choices.
        warnings: Warnings of NCCL.
        lines: Number of lines.
        nccl_lines: Number of lines with a message of NCCL.
        torn: Number of NCCL lines that are truncated or interleaved.
        notes: Limitations of the log.
    """

    source: str
    versions: tuple[str, ...]
    communicators: tuple[Communicator, ...]
    rings: tuple[Ring, ...]
    neighbors: tuple[RingNeighbors, ...]
    trees: tuple[TreeNode, ...]
    links: tuple[TopologyLink, ...]
    patterns: tuple[GraphPattern, ...]
    systems: tuple[SystemBandwidth, ...]
    networks: tuple[str, ...]
    settings: tuple[NcclSetting, ...]
    calls: tuple[RankCalls, ...]
    costs: tuple[CostTable, ...]
    choices: tuple[AlgorithmChoice, ...]
    warnings: tuple[NcclWarning, ...]
    lines: int
    nccl_lines: int
    torn: int
    notes: tuple[Note, ...]


# One line of an NCCL or RCCL log -> its messages, with their process and time.

# The space is missing where a line was cut right after the level.
_MARK = re.compile(rb"NCCL (INFO|WARN) ?")

# host:pid:thread [device], or [device] and microseconds of Unix time
_SPEAKER = re.compile(
    rb"(?:([^\s:\[\]|]{1,255}):(\d{1,9}):(\d{1,9}) +)?(?:\[(\d{1,5})\] +)?(?:(\d{16}) )?"
    rb"(?:[^\s:\[\]]{1,255}:\d{1,9} (?:\([^)]{0,255}\) )?)?$"
)

# 2026-11-29 10:00:01.123456, [2026-11-29T10:00:01+01:00]
_STAMP = re.compile(
    rb"\[?(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9})\d*)?"
    rb"(?:Z|([+-])(\d\d):?(\d\d))?\S*\s*"
)

# Launchers color the prefixes that they put before the lines of a rank.
_COLOR = re.compile(rb"\x1b\[[\d;]*[mK]")

_REPEATED = re.compile(rb"(?<! ) *\[repeated \d+x across cluster\].*")
"""Ray's suffix on a line that it shows once for several processes."""

# A prefix is cached as it repeats in thousands of lines; with a time in it, it does not.
_MAX_PREFIXES = 20_000

_MOST_PREFIX, _MOST_BYTES = 400, 8192  # NCCL writes at most 1,024 bytes at once


class Speaker(NamedTuple):
    """The process, thread and current device that wrote a message; "" and -1 if unknown."""

    host: str
    pid: int
    tid: int
    dev: int


class LogMessage(NamedTuple):
    """One message; stamp_ns is Unix time (read as UTC if it has no time zone) or -1."""

    speaker: Speaker
    stamp_ns: int
    level: bytes
    text: bytes


@dataclass(slots=True)
class MessageSplitter:
    """Splits lines into messages; it keeps known hosts to separate interleaved lines."""

    _speaker_of_prefix: dict[bytes, Speaker] = field(default_factory=dict)
    _hosts: dict[int, set[str]] = field(default_factory=dict)

    def split_line(self, line: bytes) -> list[LogMessage]:
        """The messages of a line in order; several if the writers were interleaved."""
        line = _strip_wrapping(line)
        marks = list(_MARK.finditer(line))
        if len(marks) != 1:
            return self._split_interleaved(line, marks) if marks else []
        mark = marks[0]
        prefix, text = line[: mark.start()], line[mark.end() :][:_MOST_BYTES].rstrip()
        speaker, stamp_ns = self._speaker_of_prefix.get(prefix), -1
        if speaker is None:
            speaker, stamp_ns = self._parse_stamped(prefix[-_MOST_PREFIX:])
        return [LogMessage(speaker, stamp_ns, mark[1], text)]

    def _parse_stamped(self, prefix: bytes) -> tuple[Speaker, int]:
        """The speaker and time of a line's prefix; the part after the time is cached."""
        stamp = _STAMP.search(prefix)
        rest = prefix if stamp is None else prefix[stamp.end() :]
        speaker, stamp_ns = self._speaker_of_prefix.get(rest), -1
        if speaker is None:
            speaker, stamp_ns, _ = self._parse_head(rest)
            if stamp_ns < 0 and len(self._speaker_of_prefix) < _MAX_PREFIXES:
                self._speaker_of_prefix[rest] = speaker
        return speaker, _parse_unix_ns(stamp) if stamp and stamp_ns < 0 else stamp_ns

    def _split_interleaved(self, line: bytes, marks: list[re.Match[bytes]]) -> list[LogMessage]:
        starts = [0, *(mark.end() for mark in marks)]
        heads = [self._parse_head(line[a : m.start()]) for a, m in zip(starts, marks, strict=False)]
        # A message ends where the head of the next one begins, which is in the middle of a line.
        ends = [m.start() - head[2] for m, head in zip(marks[1:], heads[1:], strict=True)]
        return [
            LogMessage(speaker, stamp_ns, mark[1], line[mark.end() : end][:_MOST_BYTES].rstrip())
            for (speaker, stamp_ns, _), mark, end in zip(
                heads, marks, [*ends, len(line)], strict=True
            )
        ]

    def _parse_head(self, prefix: bytes) -> tuple[Speaker, int, int]:
        """The speaker, the time, and the length of both at the end of the prefix."""
        prefix = prefix[-_MOST_PREFIX:]
        match = _SPEAKER.search(prefix)
        assert match is not None  # the empty end matches
        if match[1] is None:
            host, pid, tid = "", -1, -1
        else:
            host, pid, tid = match[1].decode(errors="replace"), int(match[2]), int(match[3])
            hosts = self._hosts.setdefault(pid, set())
            if host not in hosts:
                # The end of an interrupted message may stand before the host: a known host of
                # this process that ends the word is the host.
                known_hosts = [known for known in hosts if host.endswith(known)]
                # The longest: "node1" ends in "1" too, if a host has that name.
                host = max(known_hosts, key=len, default=host)
                hosts.add(host)
        speaker = Speaker(host, pid, tid, int(match[4]) if match[4] else -1)
        # What a host name was glued to belongs to the message before.
        start = match.start() + len(match[1] or b"") - len(speaker.host.encode())
        stamp_ns = int(match[5]) * 1000 if match[5] else -1
        for stamp in _STAMP.finditer(prefix[:start]):
            stamp_ns = _parse_unix_ns(stamp)
            if stamp.end() == start:
                start = stamp.start()
        return speaker, stamp_ns, len(prefix) - start


class _Wrapped(msgspec.Struct):
    """A line of a Docker log file."""

    log: str
    time: str = ""


def _strip_wrapping(line: bytes) -> bytes:
    """The line without colors and without the wrapping of Docker or Ray; the time comes first."""
    # Docker's json-file driver writes each line as an object.
    if line.startswith(b'{"log":'):
        with suppress(msgspec.DecodeError, ValueError, RecursionError):
            wrapped = msgspec.json.decode(line, type=_Wrapped)
            line = f"{wrapped.time} {wrapped.log}".encode()
    if b"\x1b" in line:
        line = _COLOR.sub(b"", line)
    return _REPEATED.sub(b"", line) if b"x across cluster]" in line else line


def _parse_unix_ns(stamp: re.Match[bytes]) -> int:
    seconds = _parse_unix_s(stamp[1], stamp[2])
    if seconds < 0:
        return -1
    zone_offset_s = (int(stamp[5]) * 60 + int(stamp[6])) * 60 if stamp[4] else 0
    seconds -= -zone_offset_s if stamp[4] == b"-" else zone_offset_s
    return seconds * 10**9 + int((stamp[3] or b"0").ljust(9, b"0"))


@lru_cache(maxsize=16)
def _parse_unix_s(date: bytes, time: bytes) -> int:
    try:
        return int(datetime.fromisoformat(f"{date.decode()}T{time.decode()}+00:00").timestamp())
    except ValueError:
        return -1


# NCCL version 2.21.5+cuda12.4, RCCL version : 2.22.3-HEAD
_VERSION = re.compile(rb"([RN])CCL version(?: :)? (\d+\.[^\s,;]*?)(?=[RN]CCL|[\s,;]|$)")


def find_versions(line: bytes) -> tuple[str, ...]:
    """The versions in the line as written; those of RCCL are prefixed with "RCCL "."""
    return tuple(
        ("RCCL " if kind == b"R" else "") + version.decode(errors="replace")
        for kind, version in _VERSION.findall(line)
    )
