"""The debug log of NCCL (2.4 to 2.30) or RCCL, of one process or of a whole job on one stream."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from stepsplit.analyzer.readers.nccl.coll import CollRows, rank_calls
from stepsplit.analyzer.readers.nccl.communicators import Joined, World, joined, world_of
from stepsplit.analyzer.readers.nccl.costs import Tables, is_table
from stepsplit.analyzer.readers.nccl.graphs import Graph, Graphs
from stepsplit.analyzer.readers.nccl.lines import Message, Speaker, Splitter, versions_in
from stepsplit.analyzer.readers.nccl.members import Handles
from stepsplit.analyzer.readers.nccl.messages import (
    Channels,
    Init,
    InitTime,
    Network,
    Said,
    Topology,
    parser_of,
)
from stepsplit.analyzer.readers.nccl.nouns import (
    Choice,
    CostTable,
    GraphPattern,
    Link,
    NcclLog,
    Ring,
    RingNeighbors,
    Setting,
    SystemBandwidth,
    TreeNode,
    Warned,
)
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.unpack import unpacked
from stepsplit.analyzer.trace import Note, RankCalls

_WRITTEN = re.compile(
    rb"(?:^|\[\d{1,5}\] +(?:\d{16} )?|:\d+ (?:\([^)\n]{1,80}\) )?)NCCL (?:INFO|WARN) \S", re.M
)


def recognizes(head: bytes) -> bool:
    """Whether NCCL wrote some of these first bytes; a page that quotes its lines counts."""
    return _WRITTEN.search(head) is not None


def read_nccl_log(source: Source) -> NcclLog:
    """What the log tells; whole messages are taken out of lines that ran into one another.

    Memory grows with what is kept: 72 bytes a call, a record a connection. Raises DataError where
    the file cannot be opened.
    """
    reading = _Reading()
    with unpacked(source) as content:
        for line in content.lines():
            reading.take(line)
    return reading.log(source.where, content.torn)


@dataclass(slots=True)
class _Reading:
    """All that the lines said so far."""

    lines: int = 0
    nccl_lines: int = 0
    torn: int = 0
    splitter: Splitter = field(default_factory=Splitter)
    handles: Handles = field(default_factory=Handles)
    rows: CollRows = field(default_factory=CollRows)
    versions: dict[str, None] = field(default_factory=dict)
    told: dict[GraphPattern | SystemBandwidth | Network | Setting, None] = field(
        default_factory=dict
    )
    choices: Counter[Choice] = field(default_factory=Counter)
    warned: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    graphs: list[tuple[int, Graph]] = field(default_factory=list)
    tables: Tables = field(default_factory=Tables)

    def take(self, line: bytes) -> None:
        """Takes over what a line says."""
        self.lines += 1
        if b"CCL" not in line:
            self.torn += b" [nranks=" in line  # the rest of a line that another cut
            return
        if b"CCL version" in line:
            self.versions |= dict.fromkeys(versions_in(line))
        messages = self.splitter.messages(line)
        if messages:
            self.nccl_lines += 1
            self.torn += len(messages) > sum(self._whole(message) for message in messages)

    def _whole(self, message: Message) -> bool:
        """Takes a message over; False where it is cut."""
        by, stamp_ns, level, text = message
        if b": opCount " in text:
            return self.rows.take(by, stamp_ns, text, self.handles)
        told = text.decode(errors="replace")
        if level == b"WARN":
            self.warned[told, by.host, by.pid] += 1
            return bool(told)
        if is_table(told):
            return self.tables.take(by, self.handles.slot(by), told)
        parse = parser_of(told)
        if parse is None:
            return bool(told)
        said = parse(told)
        if said is not None:
            self._keep(by, said)
        return said is not None

    def _keep(self, by: Speaker, said: Said) -> None:
        match said:
            case Init():
                self.handles.see_init(by, said)
            case Topology():
                self.handles.see_topology(by, said)
            case InitTime():
                self.handles.see_init_time(by, said)
            case Channels():
                self.handles.see_channels(by, said)
            case Graphs():
                slot = self.handles.slot(by, said.pointer)
                self.graphs += [(slot, graph) for graph in said.graphs]
            case Choice():
                self.choices[said] += 1
            case _:
                self.told[said] = None

    def log(self, source: str, torn_end: str) -> NcclLog:
        """All of it, with each record's communicator."""
        joint = joined(self.handles.all)
        world = world_of(joint.communicators)
        told = tuple(self.told)
        comm = [joint.comm_of[i] if i >= 0 else -1 for i in self.handles.in_slots()]
        graphs = [replace(graph, comm=comm[slot]) for slot, graph in self.graphs]
        calls = rank_calls(source, self.rows.tables(), self.handles.all, joint, world)
        return NcclLog(
            source=source,
            versions=tuple(self.versions),
            communicators=joint.communicators,
            rings=tuple(one for one in graphs if isinstance(one, Ring)),
            neighbors=tuple(one for one in graphs if isinstance(one, RingNeighbors)),
            trees=tuple(one for one in graphs if isinstance(one, TreeNode)),
            links=tuple(one for one in graphs if isinstance(one, Link)),
            patterns=tuple(one for one in told if isinstance(one, GraphPattern)),
            systems=tuple(one for one in told if isinstance(one, SystemBandwidth)),
            networks=tuple(one.name for one in told if isinstance(one, Network)),
            settings=tuple(one for one in told if isinstance(one, Setting)),
            calls=calls,
            costs=tuple(
                CostTable(comm[table.slot], table.host, table.pid, tuple(table.cells))
                for table in self.tables.all
                if table.cells
            ),
            choices=tuple(replace(one, count=times) for one, times in self.choices.items()),
            warnings=tuple(Warned(*warned, count) for warned, count in self.warned.items()),
            lines=self.lines,
            nccl_lines=self.nccl_lines,
            torn=self.torn,
            notes=tuple(_notes(self.torn, torn_end, joint, world, calls)),
        )


def _notes(
    torn: int, torn_end: str, joint: Joined, world: World, calls: Sequence[RankCalls]
) -> Iterator[Note]:
    if torn:
        yield Note("nccl_torn_lines", f"{torn} lines are cut or run into one another")
    if torn_end:
        yield Note("nccl_torn_file", f"the file ends early ({torn_end})")
    if joint.alone:
        yield Note(
            "nccl_alone", f"{joint.alone} communicators print no id and stand alone, a process each"
        )
    if world.comm >= 0:
        name = joint.communicators[world.comm].id
        yield Note("nccl_world", f"ranks are those of {name}, the largest ({world.size} ranks)")
    elif calls:
        yield Note("nccl_no_world", "no communicator of all processes: global ranks are unknown")
    if any((one.calls.issued_ns >= 0).any() for one in calls):
        yield Note("nccl_clock", "times without a zone are read as UTC")
