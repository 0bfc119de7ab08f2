"""Span logs: files in which a framework says when its steps, checkpoints and evaluations were.

A source is an entry of SPAN_SOURCES: how its lines are read, and what its spans are in the ledger
of a job. A log lies in the folder of a watch, or is all that is known of a job without one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import IO, Any

import msgspec

from stepsplit.analyzer.readers.kineto.schema import UNDECODABLE
from stepsplit.analyzer.watch.span_log_files import list_span_logs
from stepsplit.collectors.formats.watch_notes import (
    LONG_STEP,
    WINDOW_STEPS,
    Beat,
    Note,
    RankEnded,
    RankSpan,
    RankStarted,
    RankWindow,
)
from stepsplit.collectors.safe_io.regular_file import open_regular
from stepsplit.collectors.safe_io.safe_text import escape_controls

_REFUSALS = (*UNDECODABLE, ValueError, TypeError, OverflowError)
"""Of a line that is torn, of another format, or too deep to be read."""

STEP, END = "step", "end"
"""What a span is besides a mark of the ledger: a training step, and the end of the process."""


@dataclass(frozen=True, slots=True)
class LoggedSpan:
    """A span of a rank. kind: a mark of the ledger, STEP, END or "" for any other; step: the number
    of a training step, from 0."""

    rank: int
    kind: str
    begin_unix_ns: int
    end_unix_ns: int
    step: int | None = None
    world_size: int = 0
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class SpanSource:
    """A framework that logs spans.

    name: as it is displayed. is_line: whether its lines begin so. read_line: the spans of a line;
    raises one of _REFUSALS if it is none of its lines, and gives None for a span that has no time
    or number of this world. kinds: what each span is.
    """

    name: str
    is_line: Callable[[bytes], bool]
    read_line: Callable[[bytes, Mapping[str, str]], Iterable[LoggedSpan | None]]
    kinds: Mapping[str, str]


def _name_kinds(**spans: str) -> dict[str, str]:
    """What each span is, given the spans of each kind in one text."""
    return {span: kind for kind, names in spans.items() for span in names.split()}


# torchtitan: a line when a span begins and one when it ends, which has its time in ms.


class _TitanLine(msgspec.Struct):
    rank: int
    time_us: int
    log_type_name: str | None
    source: str = ""
    host_name: str = ""
    pid: int = 0
    step: int | None = None
    value: float | None = None


_TITAN_LINE = msgspec.json.Decoder(_TitanLine)

_TITAN_SOURCES = ("training", "trainer")
"""Programs that train; ranks of generators and the controller have numbers of their own."""


def _read_titan_line(line: bytes, kinds: Mapping[str, str]) -> Iterator[LoggedSpan]:
    read = _TITAN_LINE.decode(line)
    if read.source not in _TITAN_SOURCES:
        return
    name, end = read.log_type_name or "", read.time_us * 1000
    took_ns, kind = 0, ""
    if name.endswith("_end") and read.value is not None:
        took_ns, kind = round(read.value * 1e6), kinds.get(name.removesuffix("_end"), "")
    step = None if read.step is None else read.step - 1
    yield LoggedSpan(
        read.rank, kind, end - took_ns, end, step, host=read.host_name, pid=read.pid
    )  # fmt: skip


# OpenTelemetry: the spans of its SDK as JSON (nemo.lens writes them so with MEGATRON_OTEL_EXPORTER=
# console), and OTLP's JSON encoding, which the collector's file exporter writes.


class _SdkResource(msgspec.Struct):
    attributes: dict[str, Any] = {}


class _SdkSpan(msgspec.Struct):
    name: str
    start_time: datetime
    end_time: datetime
    attributes: dict[str, Any] | None = None
    resource: _SdkResource = msgspec.field(default_factory=_SdkResource)


class _OtlpAttribute(msgspec.Struct):
    key: str
    value: dict[str, Any] = {}


class _OtlpSpan(msgspec.Struct):
    name: str
    start: str | int = msgspec.field(name="startTimeUnixNano")
    end: str | int = msgspec.field(name="endTimeUnixNano")
    attributes: list[_OtlpAttribute] = []


class _OtlpScope(msgspec.Struct):
    spans: list[msgspec.Raw] = []


class _OtlpResource(msgspec.Struct):
    attributes: list[_OtlpAttribute] = []


class _OtlpPart(msgspec.Struct, rename="camel"):
    resource: _OtlpResource = msgspec.field(default_factory=_OtlpResource)
    scope_spans: list[_OtlpScope] = []


class _OtlpLine(msgspec.Struct, rename="camel"):
    resource_spans: list[_OtlpPart]


_SDK_SPAN = msgspec.json.Decoder(_SdkSpan)
_OTLP_LINE = msgspec.json.Decoder(_OtlpLine)
_OTLP_SPAN = msgspec.json.Decoder(_OtlpSpan)
_OTLP_HEAD = b'{"resourceSpans"'
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _read_sdk_line(line: bytes, kinds: Mapping[str, str]) -> Iterator[LoggedSpan]:
    span = _SDK_SPAN.decode(line)
    # As whole microseconds: a float of seconds since 1970 has fewer digits.
    times = [
        (one if one.tzinfo else one.replace(tzinfo=UTC)) - _EPOCH
        for one in (span.start_time, span.end_time)
    ]
    begin, end = (one // timedelta(microseconds=1) * 1000 for one in times)
    yield from _name_span(
        span.name, begin, end, span.attributes or {}, span.resource.attributes, kinds
    )


def _read_otlp_line(line: bytes, kinds: Mapping[str, str]) -> Iterator[LoggedSpan | None]:
    for part in _OTLP_LINE.decode(line).resource_spans:
        resource = _collect(part.resource.attributes)
        for raw in (raw for scope in part.scope_spans for raw in scope.spans):
            # One odd span must not take the hundreds with it that are in its line.
            try:
                span = _OTLP_SPAN.decode(raw)
                own = _collect(span.attributes)
                times = int(span.start), int(span.end)
                yield from _name_span(span.name, *times, own, resource, kinds)
            except _REFUSALS:
                yield None


def _collect(attributes: Sequence[_OtlpAttribute]) -> dict[str, Any]:
    """The values of attributes, of which each is {"intValue": "3"}, {"stringValue": ...}, ..."""
    return {one.key: next(iter(one.value.values()), None) for one in attributes}


def _name_span(
    name: str,
    begin: int,
    end: int,
    attributes: Mapping[str, Any],
    resource: Mapping[str, Any],
    kinds: Mapping[str, str],
) -> Iterator[LoggedSpan]:
    # A span that was still open when the telemetry was shut down has an end of its own making.
    if attributes.get("nemo.span.truncated"):
        return
    step = attributes.get("megatron.iteration", attributes.get("dl.iteration"))
    yield LoggedSpan(
        int(resource["dl.rank"] if "dl.rank" in resource else resource.get("rank", 0)),
        kinds.get(name, ""), begin, end, None if step is None else int(step),
        int(resource.get("dl.world_size", 0)), str(resource.get("host.name", ""))[:200],
        int(resource.get("process.pid", 0)),
    )  # fmt: skip


_MEGATRON = _name_kinds(
    step="megatron.train.iteration megatron.train_step",
    checkpoint="megatron.checkpoint.save megatron.checkpoint.exposed_save"
    " megatron.checkpoint.save.finalize megatron.checkpoint.exit_finalize"
    " megatron.save_checkpoint",
    load="megatron.checkpoint.load megatron.load_checkpoint",
    evaluation="megatron.evaluate",
    imports="megatron.startup.imports",
    end="megatron.pretrain",
)

SPAN_SOURCES = (
    # pytorch/torchtitan b5bcd76c: observability/structured_logger/jsonl_handler.py writes
    # structured_logs/SOURCE.global_rank_R.TIME-RANDOM.jsonl; spans of trainer.py, train.py,
    # components/checkpointer/dcp.py, components/validate.py and experiments/rl/actors/trainer.py.
    # A step has its checkpoint and its validation in it.
    SpanSource(
        "torchtitan's structured log",
        lambda head: b'"log_type_name"' in head and b'"time_us"' in head,
        _read_titan_line,
        _name_kinds(
            step="step optim_step",
            checkpoint="checkpoint_save save_checkpoint",
            load="checkpoint_load",
            evaluation="eval validate",
            process_group="torch_distributed_init",
            end="torch_distributed_teardown",
        ),
    ),
    # NVIDIA/Megatron-LM d98e8a64 (megatron/training/training.py; docs/user-guide/observability/
    # span-groups.md has the names before) by NVIDIA-NeMo/Lens b85578fc, whose providers.py sets
    # dl.rank and dl.world_size of the resource and writes JSON lines. By default one rank exports,
    # and steps only with the span group `step`.
    SpanSource(
        "OpenTelemetry spans",
        lambda head: b'"start_time"' in head and b'"trace_id"' in head,
        _read_sdk_line,
        _MEGATRON,
    ),
    SpanSource("OTLP spans", lambda head: head.startswith(_OTLP_HEAD), _read_otlp_line, _MEGATRON),
)
"""The table: a framework that logs spans is an entry."""


# Reading.

MAX_LINE_BYTES = 16 << 20
"""A line of the collector's file exporter has hundreds of spans; longer ones are left out."""

MAX_SPANS = 1_000_000
"""Steps and marks of all logs of a folder that are read."""

_MOST_LONG_BYTES = 256 << 20
"""Of the longer lines of a file. What comes after more, as in a sparse file, is not looked for."""

_HEAD_BYTES = 4096
"""By which a log is recognized: more than the first line of each source."""

_MOST_NS = 1 << 62
"""Times beyond it are not of this world (the year 2116), and sums of them would leave int64."""


@dataclass(slots=True)
class SpanLogs:
    """The spans of all logs of a folder, by file, and what is to be said of its files.

    has_lost: whether lines or spans are left out, which may have been steps.
    """

    spans: dict[str, list[LoggedSpan]] = field(default_factory=dict)
    lacks: list[str] = field(default_factory=list)
    has_lost: bool = False


def read_span_logs(folder: Path, is_watch: bool = False) -> SpanLogs:
    """Reads the span logs of a folder; a file that is none, or cannot be read, is a lack.

    is_watch: whether it is the folder of a watch, in which other files may lie too, and of whose
    job the marks alone are wanted.
    """
    logs, number = SpanLogs(), 0
    for path in list_span_logs(folder):
        name = escape_controls(str(path.relative_to(folder)))
        source = find_span_source(path)
        if source is None:
            if not (is_watch and path.parent == folder):
                logs.lacks.append(f"{name} is left out: not a span log, or of none that is known")
            continue
        spans: list[LoggedSpan] = []
        # Of what is neither a step nor a mark, only the first and the last time count.
        others: dict[tuple[int, str, int], LoggedSpan] = {}
        lost = 0
        try:
            with open_regular(path) as raw, BufferedReader(raw, 1 << 20) as file:
                for line in _list_lines(file):
                    if line is None:
                        logs.lacks.append(f"{name}: what follows lines without an end is left out")
                        logs.has_lost = True
                        break
                    new: list[LoggedSpan | None] = []
                    try:
                        new += source.read_line(line, source.kinds)
                    except _REFUSALS:
                        new = [None]
                    for one in new:
                        if one is None or not _is_sane(one):
                            lost += 1
                        elif is_watch:
                            spans += [one] * _is_mark(one)
                        elif one.kind:
                            spans.append(one)
                        else:
                            key = one.rank, one.host, one.pid
                            known = others.setdefault(key, one)
                            begin = min(known.begin_unix_ns, one.begin_unix_ns)
                            end = max(known.end_unix_ns, one.end_unix_ns)
                            others[key] = replace(known, begin_unix_ns=begin, end_unix_ns=end)
                    if number + len(spans) > MAX_SPANS:
                        logs.lacks.append(f"{name}: what follows {MAX_SPANS:,} spans is left out")
                        logs.has_lost = True
                        break
        except OSError as error:
            logs.lacks.append(f"{name} is left out: {error.strerror}")
        if lost:
            logs.lacks.append(f"{name}: {lost:,} lines or spans are torn or of another format")
            logs.has_lost = True
        logs.spans[name] = [*spans, *others.values()]
        number += len(spans)
    return logs


def find_span_source(path: Path) -> SpanSource | None:
    """What has written the span log; None if the file is none, or cannot be read."""
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD_BYTES) or b""
    except OSError:
        return None
    return next((one for one in SPAN_SOURCES if one.is_line(head)), None)


def _list_lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """The lines that have an end; b"" for one that is too long, and None for too many of them."""
    long_bytes = 0
    while line := file.readline(MAX_LINE_BYTES):
        if line.endswith(b"\n"):
            yield line
            continue
        if len(line) < MAX_LINE_BYTES:
            # The last one, which is being written.
            return
        while not line.endswith(b"\n"):
            long_bytes += len(line)
            if long_bytes > _MOST_LONG_BYTES:
                yield None
                return
            if not (line := file.readline(MAX_LINE_BYTES)):
                break
        yield b""


def _is_sane(span: LoggedSpan) -> bool:
    begin, end, step = span.begin_unix_ns, span.end_unix_ns, span.step or 0
    is_time = 0 < begin <= end < _MOST_NS
    is_place = 0 <= span.rank < _MOST_RANKS and 0 <= span.world_size <= _MOST_RANKS
    return is_time and is_place and -1 <= step < _MOST_STEPS and 0 <= span.pid < 1 << 32


_MOST_STEPS, _MOST_RANKS = 1 << 53, 1 << 20


def _is_mark(span: LoggedSpan) -> bool:
    """Whether the span is a mark of the ledger."""
    return span.kind not in ("", STEP, END)


# To notes, as ranks of a watch would have written them.


@dataclass(frozen=True, slots=True)
class LoggedJob:
    """The notes of a job of which there are span logs alone, its newest steps by (rank, start), and
    the ranks of which a process has logged no numbered step."""

    notes: dict[int, list[Note]]
    beats: dict[tuple[int, int], Beat]
    without_steps: tuple[int, ...]


def build_logged_job(logs: SpanLogs) -> LoggedJob:
    """The notes of a job by its span logs: a file of torchtitan's is a process, and if a file has
    several ranks or starts, their ranks and pids differ.

    A start of the job begins when a rank begins that is there already, or goes back to a step
    before: in a container every process may have the pid 1.
    """
    processes: dict[tuple[str, int, str, int], list[LoggedSpan]] = defaultdict(list)
    for name, spans in logs.spans.items():
        for span in spans:
            processes[name, span.rank, span.host, span.pid].append(span)
    ordered = [life for own in processes.values() for life in _split_at_restarts(own)]
    ordered.sort(key=lambda own: min(one.begin_unix_ns for one in own))
    notes: dict[int, list[Note]] = defaultdict(list)
    beats: dict[tuple[int, int], Beat] = {}
    stated = max((one.world_size for own in ordered for one in own), default=0)
    world_size = max([stated, *(own[0].rank + 1 for own in ordered)])
    number, present, without_steps = 0, set[int](), set[int]()
    for own in ordered:
        rank = own[0].rank
        if rank in present:
            number, present = number + 1, set()
        present.add(rank)
        steps = _order_steps(own)
        begin = min(one.begin_unix_ns for one in own)
        last = max(one.end_unix_ns for one in own)
        first = steps[0] if steps else None
        if first is None:
            # When its start-up ended is not known: all that is not marked is unknown.
            without_steps.add(rank)
        notes[rank].append(
            RankStarted(
                rank,
                world_size,
                own[0].host,
                own[0].pid,
                number,
                0.0,
                first.end_unix_ns if first else begin,
                begin,
                first_step_unix_ns=first.end_unix_ns if first else 0,
                steps_before=first.step if first else None,
            )
        )
        notes[rank] += _build_windows(steps)
        notes[rank] += list_marks(own)
        if steps:
            newest = steps[-1]
            beats[rank, number] = Beat(newest.step or 0, newest.end_unix_ns, last)
        if any(one.kind == END for one in own):
            notes[rank].append(RankEnded(rank, (steps[-1].step or 0) + 1 if steps else 0, last))
    return LoggedJob(dict(notes), beats, tuple(sorted(without_steps)))


def _split_at_restarts(spans: Sequence[LoggedSpan]) -> Iterator[list[LoggedSpan]]:
    """The spans of a process, by its starts: one begins with a step that comes after another one
    with a higher number, or with what is loaded before it."""
    cuts: list[int] = []
    begins = sorted(one.begin_unix_ns for one in spans if one.kind in _BEFORE_STEPS)
    newest: LoggedSpan | None = None
    for one in sorted(spans, key=lambda one: one.end_unix_ns):
        if one.kind != STEP or one.step is None or one.step < 0:
            continue
        # Steps that overlap are parts of one step, which may be numbered otherwise.
        if newest and one.step < (newest.step or 0) and one.begin_unix_ns >= newest.end_unix_ns:
            place = bisect_left(begins, newest.end_unix_ns)
            cuts.append(min([one.begin_unix_ns, *begins[place : place + 1]]))
            newest = None
        if newest is None or one.step > (newest.step or 0):
            newest = one
    if not cuts:
        yield list(spans)
        return
    lives: list[list[LoggedSpan]] = [[] for _ in range(len(cuts) + 1)]
    for one in spans:
        if not one.kind:
            # Of these only the first and the last time are known.
            lives[0].append(replace(one, end_unix_ns=one.begin_unix_ns))
            lives[-1].append(replace(one, begin_unix_ns=one.end_unix_ns))
            continue
        place = bisect_left(cuts, one.end_unix_ns)
        begin = max([one.begin_unix_ns, *cuts[place - 1 : place]]) if place else one.begin_unix_ns
        lives[place].append(replace(one, begin_unix_ns=begin))
    yield from lives


_BEFORE_STEPS = ("imports", "process_group", "load")


def list_marks(spans: Iterable[LoggedSpan]) -> list[RankSpan]:
    """The spans that are marks of the ledger, as notes."""
    return [
        RankSpan(one.rank, one.kind, one.begin_unix_ns, one.end_unix_ns)
        for one in sorted(spans, key=lambda one: one.begin_unix_ns)
        if _is_mark(one)
    ]


def _order_steps(spans: Iterable[LoggedSpan]) -> list[LoggedSpan]:
    """The steps with a number, of which each follows the one before."""
    steps: list[LoggedSpan] = []
    numbered = (one for one in spans if one.kind == STEP and one.step is not None and one.step >= 0)
    for one in sorted(numbered, key=lambda one: one.end_unix_ns):
        if not steps or (one.step or 0) > (steps[-1].step or 0):
            steps.append(one)
    return steps


def _build_windows(steps: Sequence[LoggedSpan]) -> Iterator[RankWindow]:
    """Windows of the steps after the first one. A step lasts from the end of the one before, as of
    a watch: what a loop does between its steps is part of them. Steps whose lines are lost are a
    window with the next one, in which each has the same time."""
    timed: list[tuple[int, int, int]] = []
    for one, two in pairwise(steps):
        first, last = (one.step or 0) + 1, two.step or 0
        if first == last:
            timed.append((last, one.end_unix_ns, two.end_unix_ns))
        if timed and (first < last or len(timed) == WINDOW_STEPS):
            yield _build_window(two.rank, timed)
            timed = []
        if first < last:
            number, begin, end = last - first + 1, one.end_unix_ns, two.end_unix_ns
            each = (end - begin) // number
            yield RankWindow(two.rank, first, last, begin, end, number, each, each, each, 0, ())
    if timed:
        yield _build_window(steps[0].rank, timed)


def _build_window(rank: int, timed: Sequence[tuple[int, int, int]]) -> RankWindow:
    """The window of successive steps, each with its number, begin and end."""
    times = [end - begin for _, begin, end in timed]
    usual = int(median(times))
    return RankWindow(
        rank, timed[0][0], timed[-1][0], timed[0][1], timed[-1][2], len(timed),
        min(times), usual, max(times), 0,
        tuple((step, end, end - begin) for step, begin, end in timed
              if end - begin > LONG_STEP * usual),
    )  # fmt: skip
