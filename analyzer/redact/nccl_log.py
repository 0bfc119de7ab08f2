"""Copies an NCCL log: messages that the reader parses, written anew from what it parsed.

Nothing of a line's text is copied: other messages, other output of the job, and prefixes of
launchers are dropped and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from stepsplit.analyzer.errors import make_write_error
from stepsplit.analyzer.readers.compression import open_unpacked
from stepsplit.analyzer.readers.nccl import messages, records
from stepsplit.analyzer.readers.nccl.log import CALL
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.redact.forms import VERSION, Texts
from stepsplit.analyzer.redact.pseudonyms import HEX
from stepsplit.collectors.safe_io.atomic_file import SHARED, whole_file


def copy_nccl_log(source: Source, out: Path, texts: Texts) -> int:
    """Writes the copy of a log and returns the number of dropped lines. Raises UsageError if it
    cannot be written."""
    dropped, splitter, writer = 0, records.MessageSplitter(), _MessageWriter(texts)
    try:
        with open_unpacked(source) as content, whole_file(out, SHARED) as file:
            for line in content.read_lines():
                parts = splitter.split_line(line) if b"CCL" in line else []
                found = [*writer.write_versions(line), *map(writer.write_message, parts)]
                dropped += not any(found)
                file.writelines(text.encode() + b"\n" for text in found if text)
    except OSError as error:
        raise make_write_error(out, error) from None
    return dropped


_NAME = re.compile(r"[A-Za-z][\w]{0,40}(?:[/ -][\w]{1,40}){0,6}", re.ASCII)

_VARIABLE = re.compile(r"[A-Z][A-Z\d_]{0,60}", re.ASCII)

_VALUE = re.compile(r"\^?[A-Za-z\d]{1,20}(?:[,;|][A-Za-z\d]{1,20}){0,8}", re.ASCII)

_COST = re.compile(r"\d{1,12}(?:\.\d{1,6})?(?:/ *\d{1,12}(?:\.\d{1,6})?)?", re.ASCII)


class _MessageWriter:
    """Writes messages from their parsed fields."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    def write_versions(self, line: bytes) -> Iterator[str]:
        """The versions in a line, as NCCL prints them without a prefix."""
        for version in records.find_versions(line) if b"CCL version" in line else ():
            library = "RCCL" if version.startswith("RCCL ") else "NCCL"
            number = VERSION.copy(self._texts, version.removeprefix("RCCL "))
            if number:
                yield f"{library} version {number}"

    def write_message(self, message: records.LogMessage) -> str:
        """The line of a message; "" if it is not of a known shape."""
        speaker, stamp_ns, level, text = message
        if not (body := self._write_body(level, text)):
            return ""
        host = self._texts.hide("host", speaker.host)
        who = f"{host}:{speaker.pid}:{speaker.tid} " if host else ""
        stamp = f"{stamp_ns // 1000:016d} " if stamp_ns >= 0 else ""
        dev = f"[{speaker.dev}] " if speaker.dev >= 0 else ""
        return f"{who}{dev}{stamp}NCCL {level.decode()} {body}"

    def _write_body(self, level: bytes, text: bytes) -> str:
        if (call := CALL.match(text)) is not None:
            name, seq, count, dtype, root, pointer, nranks, rank = (
                (group or b"").decode(errors="replace") for group in call.groups()
            )
            op = self._texts.names.redact_collective(name)
            line = (
                f"{op}: opCount {seq} sendbuff 0x0 recvbuff 0x0 count {count} datatype {dtype} op 0"
                f" root {root} comm {self._number('pointer', pointer)} [nranks={nranks}]"
            )
            return f"{line} stream 0x0 task 0 globalrank {rank}" if rank else line
        decoded = text.decode(errors="replace")
        if level == b"WARN":
            return self._texts.hide("warning", decoded)
        if messages.is_table(decoded):
            cells = [cell.strip() for cell in decoded.rstrip("|").split("|")]
            copied = (c if _COST.fullmatch(c) else self._copy_name(c, "cell") for c in cells)
            return " | ".join(copied) + " |"
        parse = messages.find_parser(decoded)
        parsed = parse(decoded) if parse is not None else None
        return "" if parsed is None else self._write_parsed(parsed)

    def _write_parsed(self, parsed: messages.ParsedMessage) -> str:
        match parsed:
            case messages.Init():
                return self._write_init(parsed)
            case messages.Topology():
                return (
                    f"comm {self._number('pointer', parsed.pointer)} rank {parsed.rank} nRanks"
                    f" {parsed.nranks} nNodes {parsed.nodes} localRanks {parsed.local_ranks}"
                    " localRank 0"
                )
            case messages.InitTime():
                times = (
                    f"rank {parsed.rank} nranks {parsed.nranks} total {parsed.init_ns / 1e9:.9f}"
                )
                return f"Init timings: {times}"
            case messages.Channels():
                return f"{parsed.coll} coll channels, {parsed.p2p} p2p channels"
            case messages.Graphs():
                pointer = parsed.pointer and f" comm {self._number('pointer', parsed.pointer)}"
                return self._write_graphs(parsed.graphs) + pointer
            case messages.Network():
                return f"Using network {self._copy_name(parsed.name, 'network')}"
            case records.GraphPattern():
                types = [self._copy_name(t, "path") for t in (parsed.intra_type, parsed.inter_type)]
                speeds = map(_write_gigabytes, (parsed.intra_bytes_per_s, parsed.inter_bytes_per_s))
                return (
                    f"Pattern {parsed.pattern}, crossNic {parsed.cross_nic}, nChannels"
                    f" {parsed.channels}, bw {'/'.join(speeds)}, type {'/'.join(types)},"
                    " sameChannels 1"
                )
            case records.SystemBandwidth():
                total = parsed.total_bytes_per_s
                more = f" totalBw {_write_gigabytes(total)}" if total >= 0 else ""
                return f"=== System : maxBw {_write_gigabytes(parsed.max_bytes_per_s)}{more} ==="
            case records.NcclSetting():
                name, value = parsed.name, parsed.value
                if not (_VARIABLE.fullmatch(name) and self._texts.names.is_public(name)):
                    name = self._texts.hide("setting", name)
                if not (_VALUE.fullmatch(value) and self._texts.names.is_public(value)):
                    value = self._texts.hide("text", value)
                return f"{name} set by environment to {value}"
            case records.AlgorithmChoice():
                return self._write_choice(parsed)

    def _write_init(self, init: messages.Init) -> str:
        state = "COMPLETE" if init.complete else "START"
        comm_id = init.comm_id if not init.comm_id.strip("0x") else self._number("id", init.comm_id)
        fields = {
            "cudaDev": init.cuda_dev if init.cuda_dev >= 0 else None,
            "nvmlDev": init.nvml_dev if init.nvml_dev >= 0 else None,
            "busId": self._number("bus", init.bus_id),
            "commId": comm_id,
            "parent": self._number("pointer", init.parent),
            "splitCount": init.split if init.split >= 0 else None,
            "color": init.color,
            "key": init.key,
        }
        stated = "".join(
            f"{name} {value} " for name, value in fields.items() if value not in (None, "")
        )
        pointer = self._number("pointer", init.pointer)
        return f"comm {pointer} rank {init.rank} nranks {init.nranks} {stated}- Init {state}"

    def _write_graphs(self, graphs: tuple[messages.Graph, ...]) -> str:
        first = graphs[0]
        match first:
            case records.Ring():
                return f"Channel {first.channel:02d} : {' '.join(map(str, first.ranks))}"
            case records.RingNeighbors():
                return f"Ring {first.channel:02d} : {first.before} -> {first.rank} -> {first.after}"
            case records.TopologyLink():
                link = first
                to = f" -> {link.dst_rank}" if link.dst_rank >= 0 else ""
                side = f"[{link.side}] " if link.side else ""
                detail = self._copy_name(link.detail, "link")
                if link.net:
                    net = f"{self._copy_name(link.net, 'network')}/{link.net_device}"
                    detail = f"{net}/{detail}" if detail else net
                via = self._copy_name(link.transport, "transport") + (
                    f"/{detail}" if detail else ""
                )
                if link.detail == "direct shared memory":
                    via = link.detail
                return f"Channel {link.channel:02d}/0 : {link.src_rank}{to} {side}via {via}"
        return "Trees " + " ".join(
            f"[{node.channel}] {'/'.join(map(str, (*node.children, -1, -1)))}"
            f"->{node.rank}->{node.parent}"
            for node in graphs
            if isinstance(node, records.TreeNode)
        )

    def _write_choice(self, choice: records.AlgorithmChoice) -> str:
        size = f"{choice.bytes} Bytes ->"
        algorithm, protocol = choice.algorithm, choice.protocol
        if choice.bytes_are == "per_rank":
            algorithm = self._copy_name(algorithm, "algorithm")
            protocol = self._copy_name(protocol, "protocol")
            channels = f"channel{{Lo..Hi}}={{0..{choice.channels - 1}}}"
            return f"{choice.op}: {size} Algo {algorithm} proto {protocol} {channels}"
        if choice.bytes_are == "global":
            op = f"{choice.op}: " if choice.op else ""
            names = messages.number_algorithm(algorithm), messages.number_protocol(protocol)
            return f"{op}{size} Algo {names[0]} proto {names[1]} time {choice.time_ns / 1000:.3f}"
        kernel = algorithm
        if not (_NAME.fullmatch(kernel) and self._texts.names.is_public(kernel)):
            kernel = self._texts.names.redact_kernel(kernel)
        channels = f" nchannels {choice.channels}" if choice.channels >= 0 else ""
        return (
            f"{choice.op} [{self._copy_name(protocol, 'kind')}]: {size} Kernel {kernel}{channels}"
        )

    def _number(self, kind: str, text: str) -> str:
        """The pseudonym of an address or an identifier."""
        return self._texts.pseudonyms.replace(kind, text, HEX)

    def _copy_name(self, name: str, kind: str) -> str:
        if not name or (_NAME.fullmatch(name) and self._texts.names.is_public(name)):
            return name
        return self._texts.hide(kind, name)


def _write_gigabytes(bytes_per_s: int) -> str:
    """The number as NCCL prints it; "." if it was not readable."""
    return f"{bytes_per_s / 1e9:.9f}" if bytes_per_s >= 0 else "."
