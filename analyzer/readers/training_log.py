"""Training logs of Megatron-LM, torchtitan, DeepSpeed and others: steps, loss, throughput."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from math import prod

import msgspec
import numpy as np

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.compression import HEAD_BYTES, Unpacked, unpacked
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.training_log_formats import (
    FAMILIES,
    STEP_SIGNS,
    MemoryLine,
    Printed,
    RankMemory,
    StepLine,
    Timer,
    TrainSteps,
    TrainTimers,
    memory_in,
    step_below,
    step_in,
    timers_in,
    to_memory,
    to_steps,
    to_timers,
)
from stepsplit.analyzer.trace import Note

# The golden values of Megatron-LM's continuous integration -> TrainLog.
#
# One JSON file a test case and machine: a series by step each for loss, seconds a step and bytes.

_Value = float | str | None


class _Series(msgspec.Struct):
    """A value a step: by the step's number, or (older files) from start_step on."""

    start_step: int
    step_interval: int
    values: dict[int, _Value] | list[_Value]

    def by_step(self) -> dict[int, _Value]:
        if isinstance(self.values, dict):
            return self.values
        return {
            self.start_step + at * self.step_interval: value for at, value in enumerate(self.values)
        }


_BEGIN = re.compile(rb'\s*\{\s*"[^"]{1,80}":\s*\{\s*"start_step":\s*\d')


def is_golden_values(head: bytes) -> bool:
    """Whether the file holds series by step as Megatron-LM's tests keep them."""
    return bool(_BEGIN.match(head))


def read_golden_values(source: Source) -> TrainLog:
    """The steps of the run that set the values: each row is one step, and rows skip steps.

    Ranks, mesh and arguments are not in the file. Raises DataError where it is no such file.
    """
    with unpacked(source) as content:
        body = b"".join(_blocks(content))
        torn = content.torn
    try:
        told = msgspec.json.decode(body, type=dict[str, _Series])
    except (msgspec.DecodeError, ValueError) as error:
        raise DataError(
            source.where, f"not golden values ({torn or error})", "copy it again"
        ) from None
    series = {name: values.by_step() for name, values in told.items()}
    if "iteration-time" not in series:
        raise DataError(source.where, "golden values without iteration-time", "leave it out")
    steps = to_steps([Printed(line, "", -1, 0) for line in _lines(series)])
    return TrainLog(
        source=source.where,
        framework="megatron",
        world_size=-1,
        mesh=(),
        arguments=(),
        steps=replace(steps, steps_in_row=np.ones(len(steps), dtype=np.int64)),
        memory=to_memory(list(_memory(series))),
        timers=to_timers([]),
        restarts=0,
        crashed=False,
        error="",
        unparsed=0,
    )


_Table = dict[str, dict[int, _Value]]


def _lines(series: _Table) -> Iterator[StepLine]:
    losses = series.get("lm loss", {})
    for step, seconds in sorted(series["iteration-time"].items()):
        loss = losses.get(step)
        known_loss = loss if isinstance(loss, float) else math.nan
        yield StepLine(0, step, step_ns=_whole(seconds, 10**9), loss=known_loss)


def _memory(series: _Table) -> Iterator[MemoryLine]:
    allocated = series.get("mem-allocated-bytes", {})
    largest = series.get("mem-max-allocated-bytes", {})
    for step in sorted({*allocated, *largest}):
        yield MemoryLine(-1, step, _whole(allocated.get(step), 1), _whole(largest.get(step), 1))


def _whole(value: _Value, scale: int) -> int:
    if not isinstance(value, float) or not 0 <= value * scale < 2**62:
        return -1
    return round(value * scale)


# A training run's own log -> TrainLog: its steps, memory and timers as the framework printed
# them.
#
# Megatron-LM, Megatron-DeepSpeed, GPT-NeoX, DeepSpeed, torchtitan, NeMo, nanotron, MaxText,
# nanoGPT, Composer (LLM Foundry), ms-swift.


@dataclass(frozen=True, slots=True)
class TrainLog:
    """What a training run says of itself.

    framework is "" and world_size -1 where the log does not say; mesh is outermost axis first with
    ep beside it, () unknown; arguments are as printed, the last of each name. restarts counts how
    often the steps began anew. crashed: the run broke after its last step; a job that was canceled
    did not crash. error is the last error line, "" for none. unparsed counts lines on a step that
    could not be read.
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


_JSON = re.compile(rb'\s*(?:\{\s*"|\[\s*[\[{"])')

_ECHO = re.compile(rb"(?m)^\++ .*(?:torch|deepspeed|megatron)")

_QUOTES = re.compile(rb"#!|\s*#+ .*\n(?s:.*)\n```")


def is_training_log(head: bytes) -> bool:
    """Whether the file is a training log: it has steps, or a framework's way of starting up.

    A head that is full of what a batch script echoes may have all of that still to come. JSON, a
    script, and a page of prose that quotes a log are something else.
    """
    if _JSON.match(head) or _QUOTES.match(head):
        return False
    if any(framework_in(text) or step_in(text) for text in _texts([head])):
        return True
    return len(head) >= HEAD_BYTES and b"NCCL" not in head and bool(_ECHO.search(head))


def read_train_log(source: Source) -> TrainLog:
    """The run that a log tells. Raises DataError where the file tells of none.

    A packed file that was cut is read up to there; a number that an unfinished last line ends in is
    not taken for one.
    """
    reading = _Reading()
    with unpacked(source) as content:
        for text in _texts(_blocks(content)):
            reading.take(text)
        torn = content.torn
    if not reading.tells:
        raise DataError(source.where, "no training run in it", "give the output of a training run")
    return reading.log(source.where, torn)


_ENDS = re.compile(rb"[\r\n]+")

_COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\[(?:\d;)?(?:0|[39]\d)m")
"""Where a log was copied off a page, the first byte of a color may be lost."""

_WIDE = " " * 16

_WIDER = re.compile(r"\s{16,}")
"""A gap as wide as a damaged line may have costs the patterns its square."""

_UNFINISHED = re.compile(r"[\d.,]+$")

_LONGEST_BYTES = 1 << 16


def _blocks(content: Unpacked) -> Iterator[bytes]:
    while block := content.read(1 << 20):
        yield block


def _texts(blocks: Iterable[bytes]) -> Iterator[str]:
    """The lines, and what a progress bar wrote over one another, without colors."""
    rest = b""
    for block in blocks:
        *whole, rest = _ENDS.split(rest + block)
        yield from map(_text, whole)
        if len(rest) > _LONGEST_BYTES:
            yield _text(rest)
            rest = b""
    yield _UNFINISHED.sub("", _text(rest))


def _text(line: bytes) -> str:
    text = line[:_LONGEST_BYTES].decode("utf-8", "replace")
    if _WIDE in text:
        text = _WIDER.sub(_WIDE, text)
    return _COLORS.sub("", text) if "\x1b" in text or "mstep:" in text else text


_STARTING_UP = (
    "using world size:", "- arguments -", "Starting job:", "Training starts at step",
    "DeepSpeed info: version", "device mesh with",
)  # fmt: skip


@dataclass(slots=True)
class _Reading:
    """What the lines have told so far."""

    printed: list[Printed] = field(default_factory=list)
    memory: dict[MemoryLine, None] = field(default_factory=dict)
    timers: list[tuple[int, Timer]] = field(default_factory=list)
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
    def tells(self) -> bool:
        return bool(self.frameworks or self.printed or self.memory or self.unparsed)

    def take(self, text: str) -> None:
        if line := step_in(text):
            self._take_step(line, text)
        elif self.printed and (line := step_below(text, self.printed[-1].line)):
            self.printed[-1] = replace(self.printed[-1], line=line)
        elif any(sign in text for sign in STEP_SIGNS):
            self.unparsed += 1
        self.memory.update(dict.fromkeys(memory_in(text)))
        step = self.printed[-1].line.step if self.printed else -1
        self.timers += [(step, timer) for timer in timers_in(text)]
        self._take_start(text)
        self._take_end(text)

    def _take_step(self, line: StepLine, text: str) -> None:
        self.printed.append(Printed(line, printer_of(text), clock_ns_in(text), self.launch))
        self.crashed, self.canceled, self.cause, self.failure = False, False, "", ""

    def _take_start(self, text: str) -> None:
        if any(sign in text for sign in _STARTING_UP):
            self.launch = self.printed[-1].launch + 1 if self.printed else 0
        self.arguments.update(arguments_in(text))
        if framework := framework_in(text):
            self.frameworks.add(framework)
        self.mesh = mesh_in(text) or self.mesh
        self.world_size = max(world_size_in(text), self.world_size)

    def _take_end(self, text: str) -> None:
        self.cause = cause_in(text) or self.cause
        if is_failure(text) and not self.canceled:
            self.failure, self.crashed = text.strip(), True
        if is_cancellation(text):
            self.failure, self.canceled = text.strip(), True

    def log(self, where: str, torn: str) -> TrainLog:
        arguments = tuple(self.arguments.items())
        mesh = mesh_of(arguments) or self.mesh
        steps = self._steps()
        return TrainLog(
            source=where,
            framework=self._framework(),
            world_size=self._world_size(mesh),
            mesh=mesh,
            arguments=arguments,
            steps=steps,
            memory=to_memory(list(self.memory)),
            timers=to_timers(self.timers),
            restarts=int(steps.start[-1]) if len(steps) else 0,
            crashed=self.crashed,
            error=self.cause or self.failure,
            unparsed=self.unparsed,
            notes=tuple(self._notes(where, torn, steps)),
        )

    def _steps(self) -> TrainSteps:
        interval = self._whole("log_interval", "steps_per_print")
        batch = self._whole("train_batch_size", "global batch size")
        return to_steps(self.printed, interval, batch)

    def _whole(self, *names: str) -> int:
        """The first of these arguments that is a number, -1 for none."""
        told = (self.arguments.get(name, "") for name in names)
        return next((int(text) for text in told if re.fullmatch(r"\d{1,18}", text)), -1)

    def _framework(self) -> str:
        steps = {FAMILIES[each.line.family].framework for each in self.printed}
        seen = steps | self.frameworks
        if {"megatron", "deepspeed"} <= seen:
            return "megatron-deepspeed"
        order = (*(family.framework for family in FAMILIES), "")
        return next((name for name in order if name in steps), min(seen, default=""))

    def _world_size(self, mesh: tuple[tuple[str, int], ...]) -> int:
        stated = max(self._whole("world_size"), self.world_size)
        if stated > 0 or "torchtitan" not in self.frameworks or not mesh:
            return stated
        return prod(size for axis, size in mesh if axis != "ep")

    def _notes(self, where: str, torn: str, steps: TrainSteps) -> Iterator[Note]:
        if not len(steps):
            yield Note("no_steps", f"{where} states no step")
        elif not (steps.step_ns >= 0).any():
            yield Note("no_step_time", f"{where} states no step time, nor time stamps that give it")
        elif not any(each.line.step_ns >= 0 for each in self.printed):
            yield Note("step_time_by_clock", f"{where} states no step time; time stamps give it")
        if self.unparsed:
            yield Note("odd_lines", f"{self.unparsed} lines on steps in {where} cannot be read")
        if torn:
            yield Note("file_torn", f"{where} ends early ({torn})")


# What one line of a training log says of the run: arguments, mesh, errors, who spoke and when.

_DEEPSPEED = re.compile(r"\[INFO\] \[\w+\.py:\d+:\w+\]")

_TITAN_SIGNS = ("[titan] ", "device mesh with parallelism:", "D device mesh with ")

_TRANSFORMERS = re.compile(r"(?:^|[\])>|]:?)\s*\{'(?:loss|train_runtime)': .*'epoch': ")

_MEGATRON_SIGNS = ("using world size:", " tensor_model_parallel_size ...")


def framework_in(text: str) -> str:
    """The framework that starts up with such a line, "" for none."""
    if any(sign in text for sign in _MEGATRON_SIGNS):
        return "megatron"
    if any(sign in text for sign in _TITAN_SIGNS):
        return "torchtitan"
    if "'epoch': " in text and _TRANSFORMERS.search(text):
        return "transformers"
    return "deepspeed" if "[INFO] [" in text and _DEEPSPEED.search(text) else ""


_ARGUMENT = re.compile(r"(?:^|[\]:])\s*(\w+) \.{3,} (?!\[(?:NO|YES|OKAY|FAIL)\])(\S.*)")

_TRAINER = re.compile(r"((?:local|global) batch size|sequence length) (\d+)")


def arguments_in(text: str) -> tuple[tuple[str, str], ...]:
    """The arguments that a line prints, by their names in the log."""
    if " ..." in text and (found := _ARGUMENT.search(text)):
        return ((found[1], found[2].rstrip()),)
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


def mesh_in(text: str) -> tuple[tuple[str, int], ...]:
    """The mesh that a line states, outermost axis first, ep beside it; () where it states none."""
    if "using world size:" in text:
        sizes = {_AXIS[name]: int(size) for name, size in _MEGATRON_SIZES.findall(text)}
        return tuple((axis, sizes[axis]) for axis in _OUTERMOST_FIRST if axis in sizes)
    if "device mesh with parallelism:" in text:
        return tuple((axis, int(size)) for axis, size in _TITAN_SIZES.findall(text))
    if "device mesh with" in text and (found := _TITAN_MESH.search(text)):
        names, counts = re.findall(r"\w+", found[1]), re.findall(r"\d{1,9}", found[2])
        return tuple((name, int(size)) for name, size in zip(names, counts, strict=False))
    return ()


_ARGUMENT_OF = {
    "pp": ("pipeline_model_parallel_size", "pipe_parallel_size"),
    "dp": ("data_parallel_size",),
    "cp": ("context_parallel_size",),
    "tp": ("tensor_model_parallel_size", "model_parallel_size"),
    "ep": ("expert_model_parallel_size",),
}


def mesh_of(arguments: tuple[tuple[str, str], ...]) -> tuple[tuple[str, int], ...]:
    """The mesh that Megatron's arguments tell, outermost axis first, ep beside it; () for none."""
    told = dict(arguments)
    # With this argument dp is laid around pp; else pp is outermost.
    around = ("dp", "pp") if told.get("use_tp_pp_dp_mapping") == "True" else ("pp", "dp")
    sizes = {
        axis: int(told[name])
        for axis, names in _ARGUMENT_OF.items()
        for name in names
        if re.fullmatch(r"[1-9]\d{0,8}", told.get(name, ""))
    }
    return tuple((axis, sizes[axis]) for axis in (*around, "cp", "tp", "ep") if axis in sizes)


_WORLD_SIZE = re.compile(r"(?:using world size: |dist_world_size=)(\d{1,9})")


def world_size_in(text: str) -> int:
    """The world size that a launcher's or Megatron's line states, -1 for none."""
    found = "world" in text and _WORLD_SIZE.search(text)
    return int(found[1]) if found else -1


_FAILURES = (
    "Traceback (most recent call last)", "out of memory", "OutOfMemoryError",
    "collective operation timeout", "ChildFailedError", "Segmentation fault", "Bus error",
    "Fatal Python error", "oom-kill", "oom_kill", "NCCL error", "srun: error:",
)  # fmt: skip


def is_failure(text: str) -> bool:
    """Whether a line says that the run broke."""
    return any(failure in text for failure in _FAILURES)


def is_cancellation(text: str) -> bool:
    """Whether a line says that the scheduler ended the job: by a person's wish, or out of time."""
    return "slurmstepd: error:" in text and "CANCELLED" in text


_RAISED = re.compile(r"(?:^|[\s:\]])((?:\w+\.)*\w*(?<!ChildFailed)(?:Error|Exception): .+)")

_DEATHS = ("out of memory", "operation timeout", "oom-kill", "oom_kill")


def cause_in(text: str) -> str:
    """The error that a line names, "" where it names none or only says that there was one."""
    if "Error: " in text or "Exception: " in text:
        found = _RAISED.search(text)
        return found[1].strip() if found else ""
    return text.strip() if any(death in text for death in _DEATHS) else ""


_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)[,.](\d{3,6})")

_EPOCH = datetime(1970, 1, 1)


def clock_ns_in(text: str) -> int:
    """The time stamp of a line, ns of the log's local time; -1 for none, or for whole seconds."""
    found = _CLOCK.search(text)
    if found is None:
        return -1
    try:
        at = datetime.fromisoformat(f"{found[1]}T{found[2]}.{found[3][:6].ljust(6, '0')}")
    except ValueError:
        return -1
    return (at - _EPOCH) // timedelta(microseconds=1) * 1000


_PRINTER = re.compile(r"(?:\s*(?:\[[A-Za-z]+ ?\d+\]|\d+): ?|[\w.-]+: (?=\[\d{4}-))*")


def printer_of(text: str) -> str:
    """Who printed a line, by what a launcher put before it; "" where it put nothing."""
    found = _PRINTER.match(text)
    return found[0].strip() if found else ""
