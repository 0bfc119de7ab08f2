"""The compiled scanner gives the numbers of the pure reader, or leaves the block to it."""

from __future__ import annotations

import dataclasses
import gzip
import io
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from fuzz.damage import VALUES, damaged, traces
from support.compiled_scanner import compile_scanner, load_scanner

from stepsplit.analyzer.readers.kineto import json_stream, scanned_block
from stepsplit.analyzer.readers.kineto.trace_file import join_parts, parse_opening, read_part

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "traces"

PLAIN = b"""[
 {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": "main", "ts": 100.5, "dur": 9,
  "args": {"Sequence number": 3, "Input Dims": [[2, 3], [], [3]], "Input type": ["c10::Half"]}},
 {"ph": "i", "s": "g", "name": "x", "ts": "any"}, {"ph": "M", "name": "process_name", "pid": 7,
  "args": {"name": "python \\\\ e"}},
 {"name": "gemm", "cat": "kernel", "ph": "X", "pid": 0, "tid": 7, "ts": -3.0005, "dur": 1.0015,
  "args": {"device": 1, "stream": 7, "correlation": 12, "grid": [4, 1, 1], "x": {"y": [1e5]}}},
 {"ph": "X", "cat": "Kernel", "name": "ncclKernel", "ts": 1, "args":
  {"stream": 4294967295, "correlation": -1, "grid": "g(1,)", "Collective name": "x"}}
]"""


@pytest.fixture(scope="module")
def scanner(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return load_scanner(compile_scanner(tmp_path_factory.mktemp("scanner"), "-O2"))


def read(text: bytes, scanner: ModuleType | None) -> tuple[list[Any], int]:
    """All that the reader finds in a trace, and how many blocks were scanned."""
    scans = []

    def scan(block: Any) -> scanned_block.ScannedBlock | None:
        found = scan_block(block)
        scans.append(found is not None)
        return found

    scan_block = json_stream.scan_block
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanned_block, "event_scanner", scanner)
        patch.setattr(json_stream, "scan_block", scan)
        stream = io.BytesIO(text)
        opening = parse_opening(stream)
        if opening is None:
            return [None], 0
        part = read_part(stream, opening.begin)
        return list_values([part, join_parts(opening, [part])]), sum(scans)


def list_values(found: Any) -> list[Any]:
    """The values in arrays, structs and sequences, with their types, to compare."""
    if isinstance(found, np.ndarray):
        return [found.dtype.str, found.tobytes()]
    if dataclasses.is_dataclass(found):
        return [list_values(getattr(found, one.name)) for one in dataclasses.fields(found)]
    if isinstance(found, msgspec.Struct):
        return [list_values(getattr(found, name)) for name in found.__struct_fields__]
    if isinstance(found, list | tuple):
        return [type(found), *map(list_values, found)]
    return [type(found), found]


def assert_same(text: bytes, scanner: ModuleType) -> int:
    """Returns the number of blocks that were scanned."""
    pure, none = read(text, None)
    found, scanned = read(text, scanner)
    assert none == 0
    assert found == pure
    return scanned


def test_a_plain_block_is_scanned_with_the_numbers_of_the_pure_reader(scanner: ModuleType) -> None:
    assert assert_same(PLAIN, scanner) == 2  # the last entry is on its own
    entries, _, _, events, *_ = scanner.scan(PLAIN)
    assert entries == 5
    found = np.frombuffer(events, dtype=scanned_block._EVENT)
    assert found["start_ns"].tolist() == [100_500, -3_000, 1_000]
    assert found["dur_ns"].tolist() == [9_000, 1_002, 0]
    assert found["correlation"].tolist() == [-1, 12, -1]
    assert found["sequence"].tolist() == [3, -1, -1]
    assert found["names_collective"].tolist() == [0, 0, 1]
    text = [bytes(PLAIN[begin:end]) for begin, end in found["args"].tolist()]
    assert text[1].startswith(b'{"device": 1') and text[1].endswith(b"[1e5]}}")


@pytest.mark.parametrize("number", range(6))
def test_a_sample_is_scanned_as_it_is_read(scanner: ModuleType, number: int) -> None:
    sample = sorted((ROOT / "sample_traces").rglob("rank0_trace.json.gz"))[number]
    assert assert_same(gzip.decompress(sample.read_bytes()), scanner) > 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"aten::mm", "é".encode()),  # not ASCII
        (b"aten::mm", b"a\\u0041"),
        (b"aten::mm", b'a\\"'),
        (b"aten::mm", b"a\x01"),
        (b'"name": "aten::mm"', b'"name": 5'),
        (b'"name": "aten::mm"', b'"name": "a", "name": "b"'),
        (b'"name": "aten::mm"', b'"name": "a", "n\\u0061me": "b"'),
        (b'"pid": 7, "tid"', b'"pid": 7.0, "tid"'),
        (b'"pid": 7, "tid"', b'"pid": -0, "tid"'),
        (b'"pid": 7, "tid"', b'"pid": null, "tid"'),
        (b"100.5", b"1e2"),
        (b"100.5", b'"100.5"'),
        (b"100.5", b"null"),
        (b"100.5", b"2305843009213693"),
        (b"100.5", b"0.0000000000000001"),
        (b"100.5", b"010"),
        (b'"dur": 9', b'"dur": null'),
        (b'"Sequence number": 3', b'"Sequence number": 3.0'),
        (b'"Sequence number": 3', b'"Sequence number": 9223372036854775808'),
        (b'"Sequence number": 3', b'"Sequence number": 3, "Sequence number": 4'),
        (b'"Sequence number": 3', b'"Sequence number": 3, "x": {"Input Dims": 1}'),
        (b'"Sequence number": 3', b'"Sequence number": 3, "x": "Input Dims"'),
        (b'[[2, 3], [], [3]]', b'[[2, 3], ["]"], [3]]'),
        (b'[[2, 3], [], [3]]', b'"[2]"'),
        (b'{"ph": "i"', b'{"ph": "y"'),
        (b'{"ph": "i"', b'{"ph": 1'),
        (b'{"ph": "i"', b'{"p": "i"'),
        (b'"grid": [4, 1, 1]', b'"grid": [4, [1], 1]'),
        (b'"grid": [4, 1, 1]', b'"grid": [' + b"9" * 5000 + b"]"),
        (b'"ts": -3.0005', b'"ts": -2305843009213691.000499999999999'),
        (b'"grid": [4, 1, 1]', b'"grid": [4, 1.5, 1]'),
        (b'"args":\n', b'"args": null, "arg":\n'),
        (b'"y": [1e5]', b'"y": ' + b"[" * 40 + b"]" * 40),
        (b'"y": [1e5]', b'"y": [1e]'),
        (b'"y": [1e5]', b'"y": [tru]'),
        (b'"y": [1e5]', b'"y": [1,]'),
        (b'"y": [1e5]', b'"y": [,1]'),
    ],
)  # fmt: skip
def test_what_is_not_plain_is_left_to_the_pure_reader(
    scanner: ModuleType, old: bytes, new: bytes
) -> None:
    assert old in PLAIN
    text = PLAIN.replace(old, new, 1)
    assert scanner.scan(text) is None
    assert_same(text, scanner)


def test_a_type_outside_of_the_arguments_is_not_theirs(scanner: ModuleType) -> None:
    text = PLAIN.replace(b'["c10::Half"]}}', b'["vector<c10::Half>"]}, "x": ["c10::Half"]}')
    assert text != PLAIN
    assert scanner.scan(text) is not None
    assert_same(text, scanner)


def test_a_type_without_shapes_is_no_shape(scanner: ModuleType) -> None:
    """Of three ops the second has its type alone, the third no arguments."""
    op = '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "args": {'
    dims, dtype = '"Input Dims": [[2, 3]]', '"Input type": ["c10::BFloat16"]'
    args = (f"{dims}, {dtype}", dtype, "")
    text = f"[{', '.join(op + each + '}}' for each in args)}, {{}}]"
    assert assert_same(text.encode(), scanner) > 0


def test_names_that_collide_are_left_to_the_pure_reader(scanner: ModuleType) -> None:
    """No text makes a table slow: many names, all of them in the table, are fine."""
    events = [f'{{"ph": "X", "name": "n{i}", "ts": {i}, "dur": 1}}' for i in range(50_000)]
    assert assert_same(f"[{','.join(events)}]".encode(), scanner) > 0


@pytest.mark.parametrize("text", [b"", b"[", b"[]", b"{}", b"[{}]", b"[{}", b'[{"ph": "X"', b"[1]"])
def test_what_is_no_array_of_entries_is_not_scanned(scanner: ModuleType, text: bytes) -> None:
    assert scanner.scan(text) is None


def test_a_scanner_of_another_version_is_not_used(
    scanner: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "stepsplit.analyzer.readers.kineto.event_scanner"
    monkeypatch.setitem(sys.modules, name, scanner)
    assert scanned_block._import_scanner() is scanner
    monkeypatch.setattr(scanned_block, "VERSION", scanned_block.VERSION + 1)
    assert scanned_block._import_scanner() is None


def test_only_bytes_are_scanned(scanner: ModuleType) -> None:
    with pytest.raises(TypeError):
        scanner.scan("[]")


@pytest.mark.slow
def test_mutants_are_read_as_the_pure_reader_reads_them(scanner: ModuleType) -> None:
    """Half of them are damaged anywhere; in the others a value is an odd one."""
    seeds, scanned = list(traces()), 0
    for seed in range(2000 if os.environ.get("STEPSPLIT_EVERY") else 250):
        random = Random(seed)
        text = random.choice(seeds)
        if seed % 2:
            text = damaged(random, text)
        else:
            for _ in range(random.choice((1, 3, 20))):
                begin = text.find(b'":', random.randrange(len(text))) + 2
                end = min(text.find(stop, begin) % len(text) for stop in (b",", b"\n", b"}"))
                text = text[:begin] + random.choice(VALUES) + text[end:]
        scanned += assert_same(text, scanner)
    assert scanned > 10


@pytest.mark.slow
def test_real_traces_are_read_as_the_pure_reader_reads_them(scanner: ModuleType) -> None:
    if not SHARED.is_dir():
        pytest.skip("no real traces beside the project")
    scanned = 0
    for path in sorted(SHARED.rglob("*.json*")):
        content = path.read_bytes()
        text = gzip.decompress(content) if path.suffix == ".gz" else content
        scanned += assert_same(text, scanner)
    assert scanned > 100


@pytest.mark.slow
def test_no_mutant_makes_the_scanner_read_outside_of_its_block(tmp_path: Path) -> None:
    """With the sanitizers of the compiler; 20,000 of them with STEPSPLIT_EVERY."""
    library = compile_scanner(
        tmp_path, "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
    )
    find = ["gcc", "-print-file-name=libasan.so"]
    preloaded = subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip()
    if not Path(preloaded).exists():
        pytest.skip("the compiler has no sanitizers")
    script = ROOT / "tests" / "fuzz" / "scanner_blocks.py"
    count = 20_000 if os.environ.get("STEPSPLIT_EVERY") else 3000
    done = subprocess.run(
        [sys.executable, str(script), str(library), "0", str(count)],
        env={
            **os.environ,
            "LD_PRELOAD": preloaded,
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONMALLOC": "malloc",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) > count // 50
