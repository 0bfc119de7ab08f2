"""What disks, networks, killed jobs and careless tools do to a file, by chance of a seed."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pyarrow as pa
from support.builders import GpuTrace

_SAMPLES = Path(__file__).parents[2] / "sample_traces"

Damage = Callable[[Random, bytes], bytes]

POISON = (
    b"NaN", b"-Infinity", b"Infinity", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\n", b"\t",
    b"\x1b[31m", b'"', b'\\"', b"\\", b"\\ud800", b"\\u00", b"{", b"}", b"[", b"]", b",", b":",
    b"},{", b"}{", b"]}", b"null", b"9" * 400, b"1e999", b"-", b"[" * 10_000, b'{"a":' * 10_000,
    b"x" * 100_000, b"}" * 3000, b'"traceEvents": [', b"\r\n", b"//", b"/*", b" " * 5000,
)  # fmt: skip
VALUES = (
    b"null", b"true", b"-1", b"-5.5", b"0", b"1e308", b"1e999", b"1e99999999999999999999", b"NaN",
    b"-Infinity", b"9223372036854775807", b"-9223372036854775809", b"9" * 30, b"9" * 5000,
    b"1e-320",
    b'""', b'"x"', b'"NaN"', b'"-12.5"', b'"1e1000000"', b'"\\ud800"', b'"\xff"', b'"\\u0000"',
    b"[]", b"{}", b"[1, [2, [{}]]]", b'{"a": {"b": [{"c": 1}, {"d": 2}]}}', b"4611686018427387904",
    b"2305843009213693951.999", b"1721000000000001.123", b"[" * 900 + b"]" * 900, b"0.0000001",
    b'"' + b"long " * 2000 + b'"', b"2147483648", b"-2147483649", b"1.5", b"\"'\"", b'"X"', b'"M"',
)  # fmt: skip
_FIELD = re.compile(rb'"[^"\\]{1,40}"\s*:\s*("[^"\\]*"|-?[0-9.eE+-]+|\{\}|\[[^\[\]{}]*\]|\{)')
_PAIR = re.compile(rb'"[^"\\]{1,40}"\s*:\s*("[^"\\]*"|-?[0-9.eE+-]+)\s*,')


def flipped(random: Random, content: bytes) -> bytes:
    """A few bits are others."""
    damaged = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 8))):
        damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
    return bytes(damaged)


def deleted(random: Random, content: bytes) -> bytes:
    """A span is missing."""
    begin, end = _span(random, content)
    return content[:begin] + content[end:]


def duplicated(random: Random, content: bytes) -> bytes:
    """A span is there twice."""
    begin, end = _span(random, content)
    return content[:end] + content[begin:]


def moved(random: Random, content: bytes) -> bytes:
    """A span is also elsewhere."""
    begin, end = _span(random, content)
    at = random.randrange(len(content))
    return content[:at] + content[begin:end] + content[at:]


def overwritten(random: Random, content: bytes) -> bytes:
    """A span is zeros, as after a crash of the machine."""
    begin, end = _span(random, content)
    return content[:begin] + bytes(end - begin) + content[end:]


def halves_swapped(random: Random, content: bytes) -> bytes:
    """The second part comes first."""
    at = random.randrange(len(content))
    return content[at:] + content[:at]


def cut(random: Random, content: bytes) -> bytes:
    """The end is missing."""
    return content[: random.randrange(len(content))]


def poisoned(random: Random, content: bytes) -> bytes:
    """Something that JSON does not expect is in between."""
    at = random.randrange(len(content))
    return content[:at] + random.choice(POISON) + content[at:]


def misstated(random: Random, content: bytes) -> bytes:
    """A few fields hold odd values."""
    for _ in range(random.choice((1, 1, 3))):
        if (match := _match(random, _FIELD, content)) is not None and match[1] != b"{":
            content = content[: match.start(1)] + random.choice(VALUES) + content[match.end(1) :]
    return content


def misstated_everywhere(random: Random, content: bytes) -> bytes:
    """One field holds an odd value in each entry, as where the writer has a bug."""
    if (match := _match(random, _PAIR, content)) is None:
        return content
    key = match[0][: match[0].index(b":")]
    fields = re.compile(re.escape(key) + rb'\s*:\s*(?:"[^"\\]*"|-?[0-9.eE+-]+)')
    odd = random.choice(VALUES)
    return fields.sub(lambda _: key + b": " + odd, content, count=200)


def said_twice(random: Random, content: bytes) -> bytes:
    """An object has a key twice."""
    match = _match(random, _PAIR, content)
    if match is None:
        return content
    again = match[0].replace(match[1], random.choice(VALUES))
    return content[: match.end()] + again + content[match.end() :]


def wrapped(random: Random, content: bytes) -> bytes:
    """Another tool's encoding, or its text around the file's."""
    text = content.decode(errors="replace")
    return random.choice((
        b"\xef\xbb\xbf" + content, text.encode("utf-16"), text.encode("utf-32-le"), b"",
        content + content, b"\n" * 70_000 + content, content + b"\0" * 4096, b"junk" + content,
        content.replace(b"\n", b"\r\n"), b"callback(" + content + b")", content.replace(b'"', b"'"),
    ))  # fmt: skip


DAMAGES: tuple[Damage, ...] = (
    flipped, deleted, duplicated, moved, overwritten, halves_swapped, cut, poisoned, poisoned,
    misstated, misstated, misstated_everywhere, said_twice, wrapped,
)  # fmt: skip


def damaged(random: Random, content: bytes) -> bytes:
    """The content after one damage, at times two."""
    for _ in range(random.choice((1, 1, 1, 2))):
        content = random.choice(DAMAGES)(random, content) or content
    return content


def zipped(content: bytes) -> bytes:
    """An archive of one trace."""
    room = io.BytesIO()
    with zipfile.ZipFile(room, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("run/rank0_trace.json", content)
    return room.getvalue()


def tarred(content: bytes) -> bytes:
    """A packed archive of one trace."""
    room = io.BytesIO()
    with tarfile.open(fileobj=room, mode="w:gz", compresslevel=1) as archive:
        member = tarfile.TarInfo("run/rank0_trace.json")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return room.getvalue()


def in_one_tar(content: bytes) -> bytes:
    """An archive that is not packed."""
    return gzip.decompress(tarred(content))


def _zstd(content: bytes) -> bytes:
    packed: bytes = pa.compress(content, codec="zstd", asbytes=True)
    return packed


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "trace.json.gz": lambda content: gzip.compress(content, 1),
    "two.json.gz": lambda content: gzip.compress(content[:999]) + gzip.compress(content[999:]),
    "trace.json.zst": _zstd,
    "trace.json.xz": lambda content: lzma.compress(content, preset=0),
    "trace.json.bz2": lambda content: bz2.compress(content, 1),
    "traces.zip": zipped,
    "traces.tar.gz": tarred,
    "traces.tar": in_one_tar,
}
"""Each way to pack a trace, by a name that files so packed have."""


def badly_packed(random: Random, content: bytes) -> tuple[str, bytes]:
    """A name, and a packed file of it that is damaged, or packs what was."""
    name = random.choice(tuple(PACKERS))
    if random.random() < 0.3:
        return name, PACKERS[name](damaged(random, content))
    harm = random.choice((flipped, flipped, cut, cut, deleted, duplicated, overwritten, moved))
    return name, harm(random, PACKERS[name](content))


def _span(random: Random, content: bytes) -> tuple[int, int]:
    begin = random.randrange(len(content))
    return begin, min(begin + random.choice((1, 3, 30, 300, 3000)), len(content))


def _match(random: Random, pattern: re.Pattern[bytes], content: bytes) -> re.Match[bytes] | None:
    """A match at a random place."""
    found = pattern.search(content, random.randrange(len(content) + 1))
    return found or pattern.search(content)


def traces() -> Iterator[bytes]:
    """Small traces to damage: of the samples, and by hand."""
    for sample in ("dp4/rank0", "pp2_m2/rank1", "tp2_pp2/rank2"):
        body = json.loads(gzip.decompress((_SAMPLES / f"{sample}_trace.json.gz").read_bytes()))
        everything = body.pop("traceEvents")
        steps = [e for e in everything if str(e.get("name")).startswith("ProfilerStep")]
        some = steps + everything[:: max(len(everything) // 300, 1)][:300]
        yield json.dumps(body | {"traceEvents": some}, indent=1).encode()
        yield json.dumps({"traceEvents": some} | body, separators=(",", ":")).encode()
    trace = GpuTrace(0, 2, groups=[("0", "default", [0, 1])])
    for start in range(0, 3000, 1000):
        trace.step(start // 1000, start, start + 900).memcpy(start + 10, start + 20)
        trace.kernel("gemm", start + 20, start + 90, launched=start + 1)
        trace.all_reduce(start + 100, start + 200).message("send", 1, start + 800, start + 850)
    yield json.dumps(trace.body()).encode()


def others() -> dict[str, bytes]:
    """Small files of the other kinds to damage."""
    flight = gzip.decompress((_SAMPLES / "tp2_pp2" / "rank0_flight.json.gz").read_bytes())
    call = (
        "h:1:2 [0] NCCL INFO AllReduce: opCount {:x} sendbuff 0x1 recvbuff 0x2 count 9 datatype 7 "
    )
    step = " iteration {:8}/ 100 | elapsed time per iteration (ms): 1381.{} | lm loss: 3.1E+00 |\n"
    comm = {"header": {"id": "0xa", "rank": 0, "n_ranks": 2, "nnodes": 1}, "metadata": {
        "inspector_output_format_version": "v4.0", "hostname": "h", "pid": 1,
        "dump_timestamp_us": 1}}  # fmt: skip
    perf = {"coll": "AllReduce", "coll_sn": 1, "coll_msg_size_bytes": 9, "coll_exec_time_us": 5}
    node = {"id": 2, "name": "record_param_comms", "ctrl_deps": 1, "attrs": [],
            "inputs": {"values": [[1]], "shapes": [[4]], "types": ["int"]}}  # fmt: skip
    block = {"address": 0, "size": 512, "requested_size": 500, "state": "active_allocated"}
    segment = {"device": 0, "address": 0, "total_size": 512, "stream": 0, "blocks": [block]}
    happened = {"action": "alloc", "addr": 0, "size": 500, "stream": 0, "time_us": 1}
    return {
        "flight.json": flight,
        "flight.pickle": pickle.dumps(json.loads(flight), 4),
        "nccl.log": "".join(
            call.format(i) + "op 0 root 0 comm 0x3 [nranks=2] stream 0x4\n" for i in range(20)
        ).encode(),
        "train.log": "".join(step.format(i, i) for i in range(20)).encode(),
        "inspector.jsonl": "".join(
            json.dumps(comm | {"coll_perf": perf}) + "\n" for _ in range(20)
        ).encode(),
        "et.json": json.dumps(
            {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "start_ts": 1, "nodes": [node] * 9}
        ).encode(),
        "memory.pickle": pickle.dumps(
            {"segments": [segment], "device_traces": [[happened] * 5]}, 4
        ),
    }  # fmt: skip
