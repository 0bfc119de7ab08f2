"""One message of NCCL 2.4 to 2.30 or RCCL -> what it says; None where it is cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from stepsplit.analyzer.readers.nccl.records import Choice, GraphPattern, Setting, SystemBandwidth
from stepsplit.analyzer.readers.nccl.tuning import (
    Graphs,
    choice_in,
    graphs_in,
    pattern_in,
    system_in,
)


@dataclass(frozen=True, slots=True)
class Init:
    """A line that names a communicator by its pointer; -1, "" and None where it says less."""

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


_INIT = re.compile(r"\bcomm (\S+) rank (\d{1,6}) n[Rr]anks (\d{1,6}) (.*)- Init (START|COMPLETE)")
_FIELD = re.compile(
    r"\b(cudaDev|nvmlDev|busId|commId|parent|splitCount|childCount|color|key) (-?[^\s-]+)"
)


def init_in(text: str) -> Init | None:
    """What an "Init START" or "Init COMPLETE" says."""
    match = _INIT.search(text)
    if match is None:
        return None
    said = dict(_FIELD.findall(match[4]))
    return Init(
        pointer=match[1],
        rank=int(match[2]),
        nranks=int(match[3]),
        complete=match[5] == "COMPLETE",
        cuda_dev=_number(said.get("cudaDev")),
        nvml_dev=_number(said.get("nvmlDev")),
        bus_id=said.get("busId", ""),
        comm_id=said.get("commId", ""),
        parent=said.get("parent", ""),
        split=_number(said.get("splitCount", said.get("childCount"))),
        color=_int(said.get("color")),
        key=_int(said.get("key")),
    )


def _int(text: str | None) -> int | None:
    return int(text) if text and text.lstrip("-").isdecimal() and len(text) < 19 else None


def _number(text: str | None) -> int:
    found = _int(text)
    return -1 if found is None else found


@dataclass(frozen=True, slots=True)
class Topology:
    """Over how many nodes a communicator spans, and its ranks on this one."""

    pointer: str
    rank: int
    nranks: int
    nodes: int
    local_ranks: int


_TOPOLOGY = re.compile(
    r"\bcomm (\S+) rank (\d{1,6}) n[Rr]anks (\d{1,6}) nNodes (\d{1,6}) localRanks (\d{1,6}) "
    r"localRank \d{1,6}"
)


def topology_in(text: str) -> Topology | None:
    """What "comm 0x rank 0 nRanks 16 nNodes 2 ..." says."""
    match = _TOPOLOGY.search(text)
    return match and Topology(match[1], *(int(match[i]) for i in range(2, 6)))


@dataclass(frozen=True, slots=True)
class InitTime:
    """How long a rank took to set a communicator up."""

    rank: int
    nranks: int
    init_ns: int


_TIMINGS = re.compile(
    r"Init timings(?: - \w+)?: rank (\d{1,6}) nranks (\d{1,6}) total (\d{1,9}\.\d+)"
)


def init_time_in(text: str) -> InitTime | None:
    """The total of an "Init timings"."""
    match = _TIMINGS.search(text)
    return match and InitTime(int(match[1]), int(match[2]), round(float(match[3]) * 1e9))


@dataclass(frozen=True, slots=True)
class Channels:
    """How many channels collectives and messages use."""

    coll: int
    p2p: int


_CHANNELS = re.compile(
    r"(\d{1,6}) coll channels,(?: \d{1,6} (?:collnet|nvls) channels,)* (\d{1,6}) p2p channels"
)


def channels_in(text: str) -> Channels | None:
    """How many channels a communicator has."""
    match = _CHANNELS.search(text)
    return match and Channels(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class Network:
    """The network that connects the nodes, by NCCL's name."""

    name: str


_NETWORK = re.compile(r"(?:Using network |Assigned NET plugin (?=.* to comm))(.+?)(?: to comm)?$")
_SETTING = re.compile(
    r"\b(\w+) set by environment to (.*?)\.?$|Comm config \w+ reset to (\w+)=(\S+)$"
)


def network_in(text: str) -> Network | None:
    """The network that is used."""
    match = _NETWORK.match(text)
    return match and Network(match[1])


def setting_in(text: str) -> Setting | None:
    """The variable of the environment that a message names."""
    match = _SETTING.search(text)
    return match and Setting(match[1] or match[3], match[2] or match[4] or "")


Said = (
    Init | Topology | InitTime | Channels | Graphs | GraphPattern | SystemBandwidth | Network
    | Setting | Choice
)  # fmt: skip
_GRAPHS = re.compile(r"(?:Channel|Ring|Tree|CollNet) \d{1,6}(?:/\d{1,6})? :|Trees \[")
_FAMILIES: tuple[tuple[str, Callable[[str], Said | None]], ...] = (
    (" Init START", init_in),
    (" Init COMPLETE", init_in),
    (" nNodes ", topology_in),
    ("Init timings", init_time_in),
    (" coll channels", channels_in),
    (" Bytes -> ", choice_in),
    ("Pattern ", pattern_in),
    ("=== System", system_in),
    (" set by environment to", setting_in),
    (" reset to NCCL_", setting_in),
    ("Using network ", network_in),
    ("Assigned NET plugin ", network_in),
)


def parser_of(text: str) -> Callable[[str], Said | None] | None:
    """What reads a message of this kind; None where nobody asks for what it says."""
    if _GRAPHS.match(text):
        return graphs_in
    return next((parse for words, parse in _FAMILIES if words in text), None)
