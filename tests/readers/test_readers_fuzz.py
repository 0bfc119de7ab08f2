"""Fuzzing: data before a cut is read exactly, and damage raises only DataError."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import subprocess
import sys
import time
import zlib
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fuzz.damage import badly_packed, damaged, others, traces
from support.ground_truth import SEED
from support.machine import slowness
from support.nsys_builders import Export
from support.reading import on_disk

from stepsplit.analyzer import DataError, KinetoFile, analyze
from stepsplit.analyzer.readers.file_kinds import find_kinds, list_formats
from stepsplit.analyzer.readers.kineto import json_stream
from stepsplit.analyzer.readers.kineto.json_stream import split_ranges
from stepsplit.analyzer.readers.kineto.trace_file import (
    join_parts,
    read_kineto,
    read_opening,
    read_range,
)
from stepsplit.analyzer.readers.recording import read_recording

SAMPLES = Path(__file__).parents[2] / "sample_traces"
HOSTILE = (
    "},{", '{"ph":"X","ts":1,"dur":2},{"ph":"X","ts":1}', "a\\", '\\"', '"},{"', "é漢\U0001f600",
    "\\\\", "],\"x\":[{", "traceEvents\": [", '"traceEvents": [{"ph":"X"}',
)  # fmt: skip
MOST_SECONDS = 5
PART = 2 if os.environ.get("STEPSPLIT_EVERY") else 8
SLOW_IN_TURN = (pytest.mark.slow, pytest.mark.in_turn("analyzer/readers/kineto"))
MOST_BYTES = 1 << 30
_BLANK = re.compile(r"[\s,]*")
_DECODER = json.JSONDecoder()


def event(number: int, name: str) -> dict[str, Any]:
    """A complete event whose strings and arguments look like others."""
    nested = [{"ph": "X", "ts": 5, "dur": 1}, {"a": name}, {"b": [{"c": 1}, {"d": 2}]}]
    times = {"ts": 100.5 + number * 7.25 - number % 3 * 20, "dur": number + 0.125}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2, **times,
            "args": {"deep": nested, "name": name}}  # fmt: skip


EVENTS = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "x"}}]
for _number, _name in enumerate(HOSTILE):
    EVENTS += [event(_number, _name), {"ph": "i", "s": "g", "name": _name, "ts": 3}]

SHAPES: dict[str, Any] = {
    "list": EVENTS,
    "first": {"traceEvents": EVENTS, "traceName": "x", "deviceProperties": [{"name": "A"}]},
    "last": {"note": '"traceEvents": [{"ph":"X"}]', "a": {"traceEvents": [{"ph": "X"}, {"b": 2}]},
             "traceEvents": EVENTS},
    "amid": {"x\\": "\\", "traceEvents": EVENTS, "t": "]}"},
}  # fmt: skip


def entry_ends(text: str) -> tuple[int, list[tuple[int, dict[str, Any]]]]:
    """Where the array of a whole trace begins, and each entry with its end; by json alone."""
    at = text.index("[") + 1 if text.lstrip().startswith("[") else _array_of(text)
    begin, ends = at, []
    while text[at := _BLANK.match(text, at).end()] != "]":  # type: ignore[union-attr]
        entry, at = _DECODER.raw_decode(text, at)
        ends.append((len(text[:at].encode()), entry))
    return len(text[:begin].encode()), ends


def _array_of(text: str) -> int:
    at = text.index("{") + 1
    while True:
        key, at = _DECODER.raw_decode(text, _BLANK.match(text, at).end())  # type: ignore[union-attr]
        at = re.compile(r"\s*:\s*").match(text, at).end()  # type: ignore[union-attr]
        if key == "traceEvents":
            return at + 1
        _, at = _DECODER.raw_decode(text, at)


def times_of(entries: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    return sorted(
        (round(e["ts"] * 1000), round(e["dur"] * 1000), e["name"])
        for e in entries
        if e["ph"] == "X"
    )


def times_in(file: KinetoFile) -> list[tuple[int, int, str]]:
    events, t0 = file.rows.events, file.rows.t0_unix_ns - file.header.base_ns
    rows = zip(events.start_ns.tolist(), events.dur_ns.tolist(), strict=True)
    return sorted((s + t0, d, events.name_of(row)) for row, (s, d) in enumerate(rows))


def assert_whole_before(content: bytes, file: Path, whole: list[dict[str, Any]]) -> None:
    found = read_kineto(on_disk(file))
    assert found is not None, content[-60:]
    assert times_in(found) == times_of(whole), content[-60:]
    counts = found.rows.counts
    assert (counts.entries, counts.lost) == (len(whole), 0), content[-60:]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("block_bytes", "stride"),
    [
        (300, 29),
        pytest.param(300, 5, marks=SLOW_IN_TURN),
        pytest.param(json_stream.BLOCK_BYTES, 1, marks=SLOW_IN_TURN),
    ],
)
def test_a_truncated_trace_gives_every_complete_event(
    shape: str, indent: int | None, block_bytes: int, stride: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(json_stream, "BLOCK_BYTES", block_bytes)
    text = json.dumps(SHAPES[shape], indent=indent, ensure_ascii=False)
    content, file = text.encode(), tmp_path / "trace.json"
    begin, ends = entry_ends(text)
    for cut in range(0, len(content) + 1, stride):
        file.write_bytes(content[:cut])
        if cut < begin:
            assert read_kineto(on_disk(file)) is None
        else:
            assert_whole_before(content[:cut], file, [entry for end, entry in ends if end <= cut])


@pytest.mark.parametrize("sample", ["dp4/rank0", "tp2_pp2/rank1"])
def test_a_truncated_gzip_gives_all_readable_events(sample: str, tmp_path: Path) -> None:
    packed = (SAMPLES / f"{sample}_trace.json.gz").read_bytes()
    text = gzip.decompress(packed).decode()
    begin, ends = entry_ends(text)
    file = tmp_path / "trace.json.gz"
    for cut in sorted(Random(7).sample(range(len(packed)), 6)):
        file.write_bytes(packed[:cut])
        there = len(zlib.decompressobj(wbits=31).decompress(packed[:cut]))
        whole = [entry for end, entry in ends if end <= there]
        if there >= begin:
            found = read_kineto(on_disk(file))
            assert found is not None
            assert found.rows.counts.entries == len(whole)
            assert len(found.rows.events) == sum(entry["ph"] == "X" for entry in whole)


def export(folder: Path) -> bytes:
    """An export of Nsight Systems to damage."""
    one = Export().range("ncclAllReduce", 10, 20, comm=7, size=1024)
    for start in range(0, 1000, 100):
        one.kernel("ncclDevKernel_AllReduce" if start % 300 else "gemm", start, start + 80)
    return one.write(folder / "seed.sqlite").read_bytes()


class Trial:
    """Damaged files, each read once; counts which still gave something."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.tried, self.gave, self.slowest_s = folder, 0, 0, 0.0

    def read(self, name: str, content: bytes, seed: int, read: Any) -> None:
        file = self._folder / name
        file.write_bytes(content)
        begin = time.perf_counter()
        try:
            self.gave += bool(read(file))
        except DataError as error:
            assert "\n" not in str(error), (seed, str(error))
            assert str(file) in str(error), (seed, str(error))
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {name}: {error!r}") from error
        self.tried += 1
        self.slowest_s = max(self.slowest_s, time.perf_counter() - begin)

    def judge(self, least_share: float, timed: bool) -> None:
        """Fails where too few gave something or, if timed, one took too long; prints both."""
        share = self.gave / self.tried
        sys.stdout.write(
            f"{self.tried} damaged, {share:.0%} read, slowest {self.slowest_s:.2f} s\n"
        )
        assert share >= least_share
        assert not timed or self.slowest_s < MOST_SECONDS
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 4 * MOST_BYTES


def traces_read(file: Path) -> bool:
    return bool(read_recording([file]).traces)


def anything_read(file: Path) -> bool:
    return bool([kind.read(on_disk(file)) for kind in find_kinds(on_disk(file), list_formats())])


FEW = [pytest.param(1, 100), pytest.param(2 + SEED % PART, PART, marks=pytest.mark.slow)]
"""The seeds' millions, and by what the counts of a full run are divided."""


@pytest.mark.parametrize(("million", "divisor"), FEW)
@pytest.mark.timeout(900)
def test_damaged_traces_are_read_or_refused_in_one_line(
    million: int, divisor: int, tmp_path: Path
) -> None:
    """24,000 for each full million; at least half of them still give events."""
    trial, seeds = Trial(tmp_path), list(traces())
    for seed in range(million * 1_000_000, million * 1_000_000 + 24_000 // divisor):
        random = Random(seed)
        content = damaged(random, random.choice(seeds))
        trial.read("rank0_trace.json", content, seed, traces_read)
    trial.judge(0.5, timed=divisor == PART)


@pytest.mark.parametrize(("million", "divisor"), FEW)
@pytest.mark.timeout(900)
def test_damaged_archives_are_read_or_refused_in_one_line(
    million: int, divisor: int, tmp_path: Path
) -> None:
    trial, seeds = Trial(tmp_path), list(traces())
    for seed in range(million * 1_000_000, million * 1_000_000 + 8_000 // divisor):
        random = Random(seed)
        trial.read(*badly_packed(random, random.choice(seeds)), seed, traces_read)
    trial.judge(0.2, timed=divisor == PART)


@pytest.mark.parametrize(("million", "divisor"), FEW)
@pytest.mark.timeout(900)
def test_damaged_files_of_other_kinds_are_read_or_refused_in_one_line(
    million: int, divisor: int, tmp_path: Path
) -> None:
    trial, seeds = Trial(tmp_path), others()
    seeds["nsys.sqlite"] = export(tmp_path)
    for seed in range(million * 1_000_000, million * 1_000_000 + 8_000 // divisor):
        random = Random(seed)
        name = random.choice(list(seeds))
        trial.read(name, damaged(random, seeds[name]), seed, anything_read)
    trial.judge(0.3, timed=divisor == PART)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_damaged_traces_can_be_analyzed(tmp_path: Path) -> None:
    trial, seeds = Trial(tmp_path), list(traces())
    for seed in range(20_000_000, 20_000_000 + 2_000 // PART):
        random = Random(seed)
        content = damaged(random, random.choice(seeds))
        trial.read("rank0_trace.json", content, seed, lambda file: analyze(file) is not None)
    trial.judge(0.5, timed=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_ranges_of_a_hostile_trace_add_up_to_the_trace(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_stream, "LEAST_RANGE_BYTES", 100)
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(SHAPES[shape]))
    opening, whole = read_opening(on_disk(file)), read_kineto(on_disk(file))
    assert opening is not None
    assert whole is not None
    for most in range(2, 8):
        ranges = split_ranges(file, opening.array_at, most)
        found = join_parts(opening, [read_range(file, one) for one in ranges])
        assert times_in(found) == times_in(whole)
        assert (found.header, found.rows.counts) == (whole.header, whole.rows.counts)


BOMBS = {
    "spaces": (b"{", b" "),
    "zeros": (b'{"traceEvents": [', b"\0"),
    "one event again and again": (b'{"traceEvents": [', b'{"ph":"X","ts":1,"dur":2},'),
    "one long string": (b'{"traceEvents": [{"ph":"X","ts":1,"name":"', b"long "),
    "nested lists": (b'{"traceEvents": [', b"["),
    "entries that do not end": (b'{"traceEvents": [', b'{"ph":"X","ts":1,"args":{"a":1},'),
    "a header without end": (b'{"a": "', b"long "),
}


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_of_a_gigabyte_is_refused_or_bounded(bomb: str, tmp_path: Path) -> None:
    begin, unit = BOMBS[bomb]
    block = unit * ((4 << 20) // len(unit))
    file = tmp_path / "rank0_trace.json.gz"
    file.write_bytes(gzip.compress(begin) + gzip.compress(block) * 256)
    # ru_maxrss would count the process of the tests, too, of which this one is a fork.
    program = (
        "import re, sys, time; from stepsplit.analyzer import DataError, analyze\n"
        "try: analyze(sys.argv[1])\n"
        "except DataError as error: assert len(str(error).splitlines()) == 1\n"
        "peak = re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())\n"
        "print(time.process_time(), peak[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, file], capture_output=True, text=True, check=True
    )
    seconds, kibibytes = map(float, done.stdout.split())
    assert kibibytes * 1024 < MOST_BYTES
    assert seconds < 1.5 * MOST_SECONDS * slowness()  # with what it takes to start
