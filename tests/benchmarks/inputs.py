"""One real trace -> the large traces that are opened."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.required import SHARED_TRACES

LARGE_BYTES = 450_000_000
SMALL_BYTES = 5_000_000
SAMPLE = Path(__file__).parents[2] / "sample_traces" / "dp4" / "rank0_trace.json.gz"
_REAL = SHARED_TRACES / "kineto_hta" / "df_index_resolver__df_index_resolver.json.gz"
_LINKS = ("correlation", "External id")
_KINETO = SHARED_TRACES / "kineto_tracelens"
_SAMPLES = SAMPLE.parents[1]
_Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The same events in one file, in two of half its size as of two ranks, and in one gzip."""

    one: Path
    two: tuple[Path, Path]
    packed: Path


def default_source() -> Path:
    """A real GPU trace where there is one beside the project, a sample otherwise."""
    return _REAL if _REAL.is_file() else SAMPLE


def built(source: Path, least_bytes: int, folder: Path) -> Inputs:
    """The trace in the source, repeated up to that size; what the folder holds is not built again.

    Each copy begins when the one before has ended, and links its kernels to its own launches.
    """
    name = f"{source.name.partition('.')[0]}_{least_bytes // 1_000_000}MB"
    home = folder / name
    if not home.is_dir():
        draft = folder / f".{name}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _build(_stated(source), least_bytes, draft)
        draft.rename(home)
    return _inputs(home)


def build_cold_traces(least_bytes: int, folder: Path) -> dict[str, Path]:
    """Four traces of that size by what is in them, each in a folder of its own: real ones repeated,
    and of one the kernels alone, as one CUDA graph of all of them runs them."""
    qwen = _KINETO / "h100__Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz"
    resnet = _KINETO / "mi300__resnet_act_checkpoint.json.gz"
    sources = {
        "V100, many collectives": ("collectives", _REAL, _keep),
        "MI300X, Python stacks": ("stacks", resnet, _keep),
        "H100, kernels of one CUDA graph": ("graphs", qwen, capture_graph),
        "H100, FSDP2, a recording of ours": (
            "ours", _SAMPLES / "h100_fsdp2" / "rank0_trace.json.gz", _keep,
        ),
    }  # fmt: skip
    paths = {}
    for title, (name, source, change) in sources.items():
        paths[title] = folder / f"{name}_{least_bytes // 1_000_000}MB" / "rank0_trace.json"
        if not paths[title].is_file():
            trace = _stated(source)
            entries = change(trace.pop("traceEvents"))
            draft = paths[title].with_suffix(".draft")
            copies = math.ceil(least_bytes / len(json.dumps(entries)))
            _write(draft, _header(trace, 0, 1), entries, copies)
            draft.rename(paths[title])
    return paths


def _keep(entries: list[_Entry]) -> list[_Entry]:
    return entries


def capture_graph(entries: list[_Entry]) -> list[_Entry]:
    """The work of the device in a step, as of one launch of a graph that has captured it."""
    kinds = ("kernel", "gpu_memset", "gpu_memcpy")
    work = sorted((one for one in entries if one.get("cat") in kinds), key=lambda one: one["ts"])
    call = next(one for one in entries if one.get("cat") == "cuda_runtime")
    begin, end = work[0]["ts"], max(one["ts"] + one["dur"] for one in work)
    graph = {"correlation": 1, "graph id": 1}
    launch = {"name": "cudaGraphLaunch", "ts": begin - 20, "dur": 10, "args": graph}
    step = {"name": "ProfilerStep#1", "cat": "user_annotation", "ts": begin - 100}
    captured = [
        {**one, "args": {**one["args"], **graph, "graph node id": node}}
        for node, one in enumerate(work, 1)
    ]
    for one in captured:
        one["args"].pop("External id", None)
    names = [one for one in entries if one["ph"] == "M"]
    whole = {**call, **step, "dur": round(end - begin + 101, 3), "args": {"External id": 1}}
    return [*names, whole, {**call, **launch}, *captured]


def _inputs(home: Path) -> Inputs:
    two = (home / "two" / "rank0_trace.json", home / "two" / "rank1_trace.json")
    return Inputs(home / "one" / "rank0_trace.json", two, home / "packed" / "rank0_trace.json.gz")


def _stated(source: Path) -> _Entry:
    open_ = gzip.open if source.suffix == ".gz" else open
    with open_(source, "rt") as file:
        stated: _Entry = json.load(file)
    return stated


def _build(trace: _Entry, least_bytes: int, home: Path) -> None:
    inputs, entries = _inputs(home), trace.pop("traceEvents")
    copies = 2 * math.ceil(least_bytes / len(json.dumps(entries)) / 2)
    _write(inputs.one, _header(trace, 0, 1), entries, copies)
    for rank, path in enumerate(inputs.two):
        _write(path, _header(trace, rank, 2), entries, copies // 2)
    inputs.packed.parent.mkdir()
    with inputs.one.open("rb") as plain, gzip.open(inputs.packed, "wb", compresslevel=1) as packed:
        shutil.copyfileobj(plain, packed, 1 << 20)


def _header(trace: _Entry, rank: int, ranks: int) -> _Entry:
    result = {**trace.get("distributedInfo", {}), "rank": rank, "world_size": ranks}
    return {**trace, "distributedInfo": result}


def _write(path: Path, header: _Entry, entries: list[_Entry], copies: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.write(json.dumps(header)[:-1] + ', "traceEvents": [')
        for i, text in enumerate(_texts(entries, copies)):
            file.write(f", {text}" if i else text)
        file.write("]}")


def _texts(entries: list[_Entry], copies: int) -> Iterator[str]:
    """Each copy of the entries, without the brackets."""
    timed = [entry for entry in entries if entry.get("ph") == "X"]
    span = max(e["ts"] + e.get("dur", 0) for e in timed) - min(e["ts"] for e in timed)
    links = 1 + max((link for entry in entries for link in _links(entry)), default=0)
    for n in range(copies):
        moved = [_moved(entry, n * math.ceil(span + 1), n * links) for entry in entries]
        yield json.dumps(moved)[1:-1]


def _links(entry: _Entry) -> Iterator[int]:
    values = (entry.get("id"), *(entry.get("args", {}).get(key) for key in _LINKS))
    yield from (value for value in values if type(value) is int)


def _moved(entry: _Entry, microseconds: int, links: int) -> _Entry:
    """The entry so much later, its links to other entries with other numbers."""
    moved = dict(entry)
    if "ts" in entry:
        moved["ts"] = round(entry["ts"] + microseconds, 3)
    if type(entry.get("id")) is int:
        moved["id"] += links
    args = entry.get("args", {})
    if changed := {key: args[key] + links for key in _LINKS if type(args.get(key)) is int}:
        moved["args"] = {**args, **changed}
    return moved
