"""Reads training logs of Megatron-LM, torchtitan, DeepSpeed and other frameworks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import count
from math import prod

import msgspec
import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers import training_log_formats as formats
from stepsplit.analyzer.readers.compression import HEAD_BYTES, UnpackedStream, open_unpacked
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.training_log_formats import RankMemory, TrainSteps, TrainTimers
from stepsplit.analyzer.trace import Note

# Golden values of Megatron-LM's continuous integration: one JSON file per test case and machine,
# with a series by step for loss, seconds per step and bytes.

_Value = float | str | None


class _Series(msgspec.Struct):
    """Values by step number, or (in older files) a list from start_step on."""

    start_step: int
    step_interval: int
    values: dict[int, _Value] | list[_Value]


_BEGIN = re.compile(rb'\A\s*\{\s*"[^"]{1,80}":\s*\{\s*"start_step":\s*\d')


def is_golden_values(head: bytes) -> bool:
    """Whether the bytes are the beginning of golden values of Megatron-LM's tests."""
    return bool(_BEGIN.match(head))


def read_golden_values(source: Source) -> TrainLog:
    """Reads golden values. Each row is one step; steps between rows are missing.

    Ranks, mesh and arguments are not in the file. Raises DataError if it is not such a file.
    """
    with open_unpacked(source) as content:
        body = b"".join(_read_blocks(content))
        torn = content.torn
    try:
        decoded = msgspec.json.decode(body, type=dict[str, _Series])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DataError(
            source.where, f"not golden values ({torn or error})", "copy it again"
        ) from None
    series: dict[str, dict[int, _Value]] = {}
    for name, one in decoded.items():
        if isinstance(one.values, dict):
            series[name] = one.values
        else:
            steps_of_values = count(one.start_step, one.step_interval)
            series[name] = dict(zip(steps_of_values, one.values, strict=False))
    if "iteration-time" not in series:
        raise DataError(source.where, "golden values without iteration-time", "leave it out")
    losses = series.get("lm loss", {})
    lines = []
    for step, seconds in sorted(series["iteration-time"].items()):
        loss = losses.get(step)
        lines.append(
            formats.StepLine(
                0,
                step,
                step_ns=_scale_to_int(seconds, 10**9),
                loss=loss if isinstance(loss, float) else math.nan,
            )
        )
    steps = formats.build_steps([formats.Printed(line, "", -1, 0) for line in lines])
    allocated = series.get("mem-allocated-bytes", {})
    largest = series.get("mem-max-allocated-bytes", {})
    memory = [
        formats.MemoryLine(
            -1, step, _scale_to_int(allocated.get(step), 1), _scale_to_int(largest.get(step), 1)
        )
        for step in sorted({*allocated, *largest})
    ]
    return TrainLog(
        source=source.where,
        framework="megatron",
        world_size=-1,
        mesh=(),
        arguments=(),
        steps=replace(steps, steps_in_row=np.ones(len(steps), dtype=np.int64)),
        memory=formats.build_memory(memory),
        timers=formats.build_timers([]),
        restarts=0,
        crashed=False,
        error="",
        unparsed=0,
    )


def _scale_to_int(value: _Value, scale: int) -> int:
    if not isinstance(value, float) or not 0 <= value * scale < 2**62:
        return -1
    return round(value * scale)


# Logs as printed by Megatron-LM, Megatron-DeepSpeed, GPT-NeoX, DeepSpeed, torchtitan, NeMo,
# nanotron, MaxText, nanoGPT, Composer (LLM Foundry), ms-swift and transformers' Trainer.


@dataclass(frozen=True, slots=True)
class TrainLog:
    """The log of a training run.

    Attributes:
        source: The file.
        framework: Such as "megatron" or "torchtitan", "" if unknown.
        world_size: Number of ranks, -1 if unknown.
        mesh: (axis, size) pairs, outermost axis first, then ep; () if unknown.
        arguments: (name, value) pairs as printed, the last value of each name.
        steps: The logged steps.
        memory: The printed memory of ranks.
        timers: The printed timers of the framework.
        restarts: How often the steps began anew.
        crashed: Whether the run failed after its last step; a canceled job did not crash.
        error: The last error line, "" for none.
        unparsed: Number of lines about a step that could not be parsed.
        notes: Limitations of the log.
    """

    source: str
    framework: str
    world_size: int
    mesh: tuple[tuple[str, int], ...]
    arguments: tuple[tuple[str, str], ...]
    steps: TrainSteps
    memory: RankMemory
    timers: TrainTimers
    restarts: int
    crashed: bool
    error: str
    unparsed: int
    notes: tuple[Note, ...] = ()


_JSON = re.compile(rb'\A\s*(?:\{\s*"|\[\s*[\[{"])')

# "++ torchrun train.py", as bash -x writes it.
_ECHO = re.compile(rb"(?m)^\++ .*(?:torch|deepspeed|megatron)")

# A script, or a document in Markdown with a block of code.
_QUOTES = re.compile(rb"\A(?:#!|\s*#+ .*\n(?s:.*)\n```)")


def is_training_log(head: bytes) -> bool:
    """Whether the file is a training log: it has steps, or start-up lines of a framework.

    Also true if the bytes are filled with the echo of a batch script that starts a training. JSON,
    scripts, and documents that quote a log are excluded.
    """
    if _JSON.match(head) or _QUOTES.match(head):
        return False
    if any(detect_framework(text) or formats.parse_step(text) for text in _split_lines([head])):
        return True
    return len(head) >= HEAD_BYTES and b"NCCL" not in head and bool(_ECHO.search(head))


def read_train_log(source: Source) -> TrainLog:
    """Reads a training log. Raises DataError if the file contains no training run.

    A truncated compressed file is read up to the damage. A number at the end of an incomplete last
    line is ignored.
    """
    parser = _LogParser()
    with open_unpacked(source) as content:
        for text in _split_lines(_read_blocks(content)):
            parser.add_line(text)
        torn = content.torn
    if not parser.has_content:
        raise DataError(source.where, "no training run found", "name the output of a training run")
    return parser.build_log(source.where, torn)


_ENDS = re.compile(rb"[\r\n]+")

_COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\[(?:\d;)?(?:0|[39]\d)m")
"""In a log copied from a web page, the first byte of a color code may be missing."""

_WIDE = " " * 16

_WIDER = re.compile(r"\s{16,}")
"""Long runs of spaces, as in damaged lines, cost the patterns quadratic time."""

# A number that was being written may lack digits.
_UNFINISHED = re.compile(r"(?<![\d.,])[\d.,]+$")

_MAX_LINE_BYTES = 1 << 16
"""A longer line is cut: the patterns see no more of it. Chosen, not measured."""


def _read_blocks(content: UnpackedStream) -> Iterator[bytes]:
    while block := content.read(1 << 20):
        yield block


def _split_lines(blocks: Iterable[bytes]) -> Iterator[str]:
    """The lines without colors; each state of a progress bar is a line."""
    rest = b""
    for block in blocks:
        *whole, rest = _ENDS.split(rest + block)
        yield from map(_clean_line, whole)
        if len(rest) > _MAX_LINE_BYTES:
            yield _clean_line(rest)
            rest = b""
    yield _UNFINISHED.sub("", _clean_line(rest))


def _clean_line(line: bytes) -> str:
    text = line[:_MAX_LINE_BYTES].decode("utf-8", "replace")
    if _WIDE in text:
        text = _WIDER.sub(_WIDE, text)
    return _COLORS.sub("", text) if "\x1b" in text or "mstep:" in text else text


_STARTING_UP = (
    "using world size:", "- arguments -", "Starting job:", "Training starts at step",
    "DeepSpeed info: version", "device mesh with",
)  # fmt: skip


@dataclass(slots=True)
class _LogParser:
    """Collects steps, memory, timers and arguments line by line."""

    printed: list[formats.Printed] = field(default_factory=list)
    trainer: formats.TrainerSteps = field(default_factory=lambda: formats.TrainerSteps([]))
    memory: dict[formats.MemoryLine, None] = field(default_factory=dict)
    timers: list[tuple[int, formats.Timer]] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)
    frameworks: set[str] = field(default_factory=set)
    world_size: int = -1
    mesh: tuple[tuple[str, int], ...] = ()
    launch: int = 0
    crashed: bool = False
    canceled: bool = False
    cause: str = ""
    failure: str = ""
    unparsed: int = 0

    @property
    def has_content(self) -> bool:
        return bool(self.frameworks or self.printed or self.memory or self.unparsed)

    def add_line(self, text: str) -> None:
        n_rows = len(self.trainer.rows)
        if line := formats.parse_step(text):
            self.printed.append(
                formats.Printed(line, parse_printer(text), parse_clock_ns(text), self.launch)
            )
        elif self.printed and (line := formats.parse_continuation(text, self.printed[-1].line)):
            self.printed[-1] = replace(self.printed[-1], line=line)
            line = None
        elif any(sign in text for sign in formats.STEP_SIGNS):
            self.unparsed += 1
        elif "'" in text or "%|" in text:
            self.trainer.add_line(text, parse_printer(text), self.launch)
        if line or len(self.trainer.rows) > n_rows:
            # A step after a failure: the run went on, or was started again.
            self.crashed, self.canceled, self.cause, self.failure = False, False, "", ""
        self.memory.update(dict.fromkeys(formats.parse_memory(text)))
        step = self.printed[-1].line.step if self.printed else -1
        self.timers += [(step, timer) for timer in formats.parse_timers(text)]
        self._add_start(text)
        self._add_end(text)

    def _add_start(self, text: str) -> None:
        if any(sign in text for sign in _STARTING_UP):
            self.launch = self.printed[-1].launch + 1 if self.printed else 0
        self.arguments.update(parse_arguments(text))
        if framework := detect_framework(text):
            self.frameworks.add(framework)
        self.mesh = parse_mesh(text) or self.mesh
        # The world size in a line of a launcher or Megatron, -1 for none.
        # The search of a text is far cheaper than that of a pattern, and logs have millions of
        # lines.
        match = "world" in text and _WORLD_SIZE.search(text)
        self.world_size = max(int(match[1]) if match else -1, self.world_size)

    def _add_end(self, text: str) -> None:
        self.cause = parse_error(text) or self.cause
        # A canceled job prints tracebacks as well, which are no failure.
        if any(failure in text for failure in _FAILURES) and not self.canceled:
            self.failure, self.crashed = text.strip(), True
        # Whether a line reports that the scheduler ended the job: by request or time limit.
        if "slurmstepd: error:" in text and "CANCELLED" in text:
            self.failure, self.canceled = text.strip(), True

    def build_log(self, where: str, torn: str) -> TrainLog:
        known = [] if self.printed else self.trainer.build()
        if not self.printed:
            self.unparsed += len(self.trainer.rows) - len(known)
        self.printed += known
        arguments = tuple(self.arguments.items())
        mesh = infer_mesh(arguments) or self.mesh
        steps = self._build_steps()
        in_steps = {formats.FAMILIES[each.line.family].framework for each in self.printed}
        frameworks = in_steps | self.frameworks
        if {"megatron", "deepspeed"} <= frameworks:
            framework = "megatron-deepspeed"
        else:
            # The family that counts the steps comes first; one that only starts up comes last.
            order = (family.framework for family in formats.FAMILIES)
            named = (name for name in (*order, "") if name in in_steps)
            framework = next(named, min(frameworks, default=""))
        world_size = max(self._find_number("world_size"), self.world_size)
        if world_size <= 0 and "torchtitan" in self.frameworks and mesh:
            # torchtitan prints only its mesh; ep divides ranks that the other axes have.
            world_size = prod(size for axis, size in mesh if axis != "ep")
        return TrainLog(
            source=where,
            framework=framework,
            world_size=world_size,
            mesh=mesh,
            arguments=arguments,
            steps=steps,
            memory=formats.build_memory(list(self.memory)),
            timers=formats.build_timers(self.timers),
            restarts=int(steps.start[-1]) if len(steps) else 0,
            crashed=self.crashed,
            error=self.cause or self.failure,
            unparsed=self.unparsed,
            notes=tuple(self._list_notes(where, torn, steps)),
        )

    def _build_steps(self) -> TrainSteps:
        interval = self._find_number("log_interval", "steps_per_print")
        if len(self.printed) > 1 and self.trainer.rows:
            # A line of the Trainer is about all steps since the line before.
            first, second, *_ = (each.line.step for each in self.printed)
            interval = max(interval, second - first)
        batch = self._find_number("train_batch_size", "global batch size")
        return formats.build_steps(self.printed, interval, batch)

    def _find_number(self, *names: str) -> int:
        """The first of these arguments that is a number, -1 if none is."""
        values = (self.arguments.get(name, "") for name in names)
        return next((int(text) for text in values if re.fullmatch(r"\d{1,18}", text)), -1)

    def _list_notes(self, where: str, torn: str, steps: TrainSteps) -> Iterator[Note]:
        if not len(steps):
            why = (
                ": transformers' Trainer prints no step numbers, and they do not follow from a"
                " progress bar or from exact epochs"
                if self.trainer.rows
                else ""
            )
            yield Note("no_steps", f"{where} contains no step{why}")
        elif not (steps.step_ns >= 0).any():
            mean_ns = self.trainer.mean_step_ns
            mean = (
                f"; by train_runtime its mean step, with all that is done between steps, is"
                f" {units.format_milliseconds(mean_ns)}"
                if mean_ns is not None
                else ""
            )
            yield Note(
                "no_step_time", f"{where} contains neither step times nor usable time stamps{mean}"
            )
        elif formats.FAMILIES[self.printed[0].line.family].framework == "transformers":
            yield Note(
                "step_time_by_clock",
                f"{where} contains no step times; they are computed from the seconds of its bar",
            )
        elif not any(each.line.step_ns >= 0 for each in self.printed):
            yield Note(
                "step_time_by_clock",
                f"{where} contains no step times; they are computed from time stamps",
            )
        if self.unparsed:
            yield Note(
                "odd_lines", f"{self.unparsed} lines about steps in {where} cannot be parsed"
            )
        if torn:
            yield Note("file_torn", f"{where} ends early ({torn})")


# Parsing of single lines: arguments, mesh, errors, printer and time.

_DEEPSPEED = re.compile(r"\[INFO\] \[\w+\.py:\d+:\w+\]")

_TITAN_SIGNS = ("[titan] ", "device mesh with parallelism:", "D device mesh with ")

_TRANSFORMERS = re.compile(r"(?:^|[\])>|]:?)\s*\{'(?:loss|train_runtime)': .*'epoch': ")

_MEGATRON_SIGNS = ("using world size:", " tensor_model_parallel_size ...")


def detect_framework(text: str) -> str:
    """The framework that prints such a line at start-up, "" for none."""
    if any(sign in text for sign in _MEGATRON_SIGNS):
        return "megatron"
    if any(sign in text for sign in _TITAN_SIGNS):
        return "torchtitan"
    if "'epoch': " in text and _TRANSFORMERS.search(text):
        return "transformers"
    return "deepspeed" if "[INFO] [" in text and _DEEPSPEED.search(text) else ""


# tensor_model_parallel_size ...................... 4
_ARGUMENT = re.compile(r"(?:^|[\]:])\s*(\w+) \.{3,} (?!\[(?:NO|YES|OKAY|FAIL)\])(\S.*)")

_TRAINER = re.compile(r"((?:local|global) batch size|sequence length) (\d+)")


def parse_arguments(text: str) -> tuple[tuple[str, str], ...]:
    """The arguments in a line, as (name, value) pairs."""
    if " ..." in text and (match := _ARGUMENT.search(text)):
        return ((match[1], match[2].rstrip()),)
    if "Trainer is initialized with" in text:
        return tuple(_TRAINER.findall(text))
    return ()


_TITAN_MESH = re.compile(
    r"Building \d+-D device mesh with [\[(]([^\])]{0,200})[\])], \[([\d, ]+)\]"
)

_TITAN_SIZES = re.compile(r"\b(pp|dp_replicate|dp_shard|cp|tp|ep)=(\d{1,9})\b")

_MEGATRON_SIZES = re.compile(
    r"(?<!encoder-)(pipeline-model|data|context|tensor-model)-parallel[- ]size: (\d{1,9})"
)

_AXIS = {"pipeline-model": "pp", "data": "dp", "context": "cp", "tensor-model": "tp"}

_OUTERMOST_FIRST = ("pp", "dp", "cp", "tp")


def parse_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """The mesh in a line, outermost axis first, then ep; () for none."""
    if "using world size:" in text:
        sizes = {_AXIS[name]: int(size) for name, size in _MEGATRON_SIZES.findall(text)}
        return tuple((axis, sizes[axis]) for axis in _OUTERMOST_FIRST if axis in sizes)
    if "device mesh with parallelism:" in text:
        return tuple((axis, int(size)) for axis, size in _TITAN_SIZES.findall(text))
    if "device mesh with" in text and (match := _TITAN_MESH.search(text)):
        names, counts = re.findall(r"\w+", match[1]), re.findall(r"\d{1,9}", match[2])
        return tuple((name, int(size)) for name, size in zip(names, counts, strict=False))
    return ()


_ARGUMENT_NAMES = {
    "pp": ("pipeline_model_parallel_size", "pipe_parallel_size"),
    "dp": ("data_parallel_size",),
    "cp": ("context_parallel_size",),
    "tp": ("tensor_model_parallel_size", "model_parallel_size"),
    "ep": ("expert_model_parallel_size",),
}


def infer_mesh(arguments: tuple[tuple[str, str], ...]) -> tuple[tuple[str, int], ...]:
    """The mesh from Megatron's arguments, outermost axis first, then ep; () for none."""
    values = dict(arguments)
    # With this argument dp is outermost, else pp.
    outer_axes = ("dp", "pp") if values.get("use_tp_pp_dp_mapping") == "True" else ("pp", "dp")
    sizes = {
        axis: int(values[name])
        for axis, names in _ARGUMENT_NAMES.items()
        for name in names
        if re.fullmatch(r"[1-9]\d{0,8}", values.get(name, ""))
    }
    return tuple((axis, sizes[axis]) for axis in (*outer_axes, "cp", "tp", "ep") if axis in sizes)


_WORLD_SIZE = re.compile(r"(?:using world size: |dist_world_size=)(\d{1,9})")


_FAILURES = (
    "Traceback (most recent call last)", "out of memory", "OutOfMemoryError",
    "collective operation timeout", "ChildFailedError", "Segmentation fault", "Bus error",
    "Fatal Python error", "oom-kill", "oom_kill", "NCCL error", "srun: error:",
)  # fmt: skip


_RAISED = re.compile(r"(?:^|[\s:\]])((?:\w+\.)*\w*(?<!ChildFailed)(?:Error|Exception): .+)")

_DEATHS = ("out of memory", "operation timeout", "oom-kill", "oom_kill")


def parse_error(text: str) -> str:
    """The error in a line, "" if it has none or only mentions that there was one."""
    if "Error: " in text or "Exception: " in text:
        match = _RAISED.search(text)
        return match[1].strip() if match else ""
    return text.strip() if any(death in text for death in _DEATHS) else ""


# 2026-11-29 10:00:01,123
_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)[,.](\d{3,6})")

_EPOCH = datetime(1970, 1, 1)


def parse_clock_ns(text: str) -> int:
    """The time stamp of a line in ns of local time; -1 if none, or only whole seconds."""
    match = _CLOCK.search(text)
    if match is None:
        return -1
    try:
        at = datetime.fromisoformat(f"{match[1]}T{match[2]}.{match[3][:6].ljust(6, '0')}")
    except ValueError:
        return -1
    return (at - _EPOCH) // timedelta(microseconds=1) * 1000


# "[rank0]: ", "[default0]:", "3: " of srun -l, "node-1: " before a time
_PRINTER = re.compile(r"(?:\s*(?:\[[A-Za-z]+ ?\d+\]|\d+): ?|[\w.-]+: (?=\[\d{4}-))*")


def parse_printer(text: str) -> str:
    """The launcher's prefix of a line, which identifies the printing rank; "" for none."""
    match = _PRINTER.match(text)
    return match[0].strip() if match else ""
