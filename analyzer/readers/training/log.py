"""A training run's own log -> TrainLog: its steps, memory and timers as the framework printed them.

Megatron-LM, Megatron-DeepSpeed, GPT-NeoX, DeepSpeed, torchtitan, NeMo, nanotron, MaxText, nanoGPT,
Composer (LLM Foundry), ms-swift.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.training.lines import (
    FAMILIES,
    STEP_SIGNS,
    MemoryLine,
    StepLine,
    Timer,
    memory_in,
    step_below,
    step_in,
    timers_in,
)
from stepsplit.analyzer.readers.training.run import (
    arguments_in,
    cause_in,
    clock_ns_in,
    framework_in,
    is_cancellation,
    is_failure,
    mesh_in,
    mesh_of,
    printer_of,
    world_size_in,
)
from stepsplit.analyzer.readers.training.tables import (
    Printed,
    RankMemory,
    TrainSteps,
    TrainTimers,
    to_memory,
    to_steps,
    to_timers,
)
from stepsplit.analyzer.readers.unpack import HEAD_BYTES, Unpacked, unpacked
from stepsplit.analyzer.trace import Note


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


def recognizes(head: bytes) -> bool:
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
