"""Formats of training logs: line patterns and their columns."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.trace import Bool, Int32, Int64

# The tables of a training log: its lines -> steps, one row each, memory and timers, in columns.

Float64 = npt.NDArray[np.float64]

SLOW_RATIO = 1.25
"""A start is still warming up while its steps take so many times the median of the others."""


@dataclass(frozen=True, slots=True)
class TrainSteps:
    """A row a logged step, in the order of the log; -1 and nan are unknown.

    start counts the starts of the run, from 0; step is the log's own number and may repeat in a
    later start. A row states the mean of the steps_in_row steps that end with it: since the row
    before, or for the first of a start as many as the log interval, 1 where that is not told.
    step_ns is what the text says, to its last digit. warmup marks the first row of every start and
    those that follow it while step_ns exceeds SLOW_RATIO times the median of the rows that are not
    the first of a start.
    """

    start: Int64
    step: Int64
    steps_in_row: Int64
    step_ns: Int64
    warmup: Bool
    flops_per_s_per_gpu: Float64
    mfu: Float64
    tokens_per_s_per_gpu: Float64
    samples_per_s: Float64
    loss: Float64
    global_batch: Int64

    def __len__(self) -> int:
        return len(self.step)

    @property
    def median_step_ns(self) -> int | None:
        """The median of the rows that are not warm-up; None where none states a time."""
        return _median_ns(self.step_ns[~self.warmup])


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory as ranks printed it, a row a statement; -1 is unknown.

    rank is global and told by Megatron alone; step is the log's own number.
    """

    rank: Int64
    step: Int64
    allocated_bytes: Int64
    max_allocated_bytes: Int64
    reserved_bytes: Int64
    max_reserved_bytes: Int64

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True)
class TrainTimers:
    """The framework's own timers, a row a statement; name_id indexes names.

    step is that of the last step printed before, -1 for set-up. min_ns and max_ns are over the
    ranks; both are the same where one rank states its own, and min_ns is -1 where only the largest
    is stated.
    """

    step: Int64
    name_id: Int32
    min_ns: Int64
    max_ns: Int64
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True)
class Printed:
    """A line on a step, with who printed it, when (ns of local time, -1 unknown), in what launch.

    printer is what a launcher put before the line. A launch is what starts up and then steps.
    """

    line: StepLine
    printer: str
    clock_ns: int
    launch: int


@dataclass(frozen=True, slots=True)
class _Row:
    start: int
    printed: Printed

    @property
    def step(self) -> int:
        return self.printed.line.step


def to_steps(printed: Sequence[Printed], log_interval: int = -1, batch: int = -1) -> TrainSteps:
    """One row a step and start, however many ranks printed it and in however many lines.

    Where lines state no time, it is the time from line to line. batch is the global batch of rows
    that do not say.
    """
    rows = _rows(printed)
    lines = [row.printed.line for row in rows]
    start = np.array([row.start for row in rows], dtype=np.int64)
    step = np.array([line.step for line in lines], dtype=np.int64)
    is_first = np.diff(start, prepend=-1) != 0
    at_first = np.maximum(np.minimum(step, max(log_interval, 1)), 1)
    in_row = np.where(is_first, at_first, np.diff(step, prepend=0))
    step_ns = np.array([line.step_ns for line in lines], dtype=np.int64)
    if not (step_ns >= 0).any():
        step_ns = _clocked_ns(rows, is_first, in_row)
    return TrainSteps(
        start=start,
        step=step,
        steps_in_row=in_row,
        step_ns=step_ns,
        warmup=_warmup(is_first, step_ns),
        flops_per_s_per_gpu=np.array([line.flops_per_s_per_gpu for line in lines]),
        mfu=np.array([line.mfu for line in lines]),
        tokens_per_s_per_gpu=np.array([line.tokens_per_s_per_gpu for line in lines]),
        samples_per_s=np.array([line.samples_per_s for line in lines]),
        loss=np.array([line.loss for line in lines]),
        global_batch=np.array(
            [batch if line.global_batch < 0 else line.global_batch for line in lines],
            dtype=np.int64,
        ),
    )


def to_memory(lines: Sequence[MemoryLine]) -> RankMemory:
    """The lines as columns."""

    def column(name: str) -> Int64:
        return np.array([getattr(line, name) for line in lines], dtype=np.int64)

    return RankMemory(*(column(each.name) for each in fields(RankMemory)))


def to_timers(stated: Sequence[tuple[int, Timer]]) -> TrainTimers:
    """The timers with the steps that they follow, as columns."""
    names = tuple(dict.fromkeys(timer.name for _, timer in stated))
    code = {name: i for i, name in enumerate(names)}
    return TrainTimers(
        step=np.array([step for step, _ in stated], dtype=np.int64),
        name_id=np.array([code[timer.name] for _, timer in stated], dtype=np.int32),
        min_ns=np.array([timer.min_ns for _, timer in stated], dtype=np.int64),
        max_ns=np.array([timer.max_ns for _, timer in stated], dtype=np.int64),
        names=names,
    )


def _rows(printed: Sequence[Printed]) -> list[_Row]:
    """The lines of the family that counts the steps, filled from all others on the same step."""
    counting = min((each.line.family for each in printed), default=-1)
    rows: list[_Row] = []
    ahead: dict[int, StepLine] = {}
    at: dict[int, int] = {}
    for each in printed:
        step = each.line.step
        if each.line.family == counting and _is_new(each, rows):
            begins = not rows or _restarts(each, rows)
            if begins:
                at = {}
            at[step] = len(rows)
            line = each.line.filled(ahead.pop(step, each.line))
            start = (rows[-1].start + begins) if rows else 0
            rows.append(_Row(start, replace(each, line=line)))
        elif step in at and rows[at[step]].printed.launch == each.launch:
            row = rows[at[step]]
            whole = replace(row.printed, line=row.printed.line.filled(each.line))
            rows[at[step]] = replace(row, printed=whole)
        elif each.line.family != counting:
            ahead[step] = each.line
    return rows


def _is_new(each: Printed, rows: Sequence[_Row]) -> bool:
    return not rows or each.line.step > rows[-1].step or _restarts(each, rows)


def _restarts(each: Printed, rows: Sequence[_Row]) -> bool:
    """Whether the run began anew: another launch, or the same printer is back at earlier steps.

    The line of the row just before, once more, is no restart: another rank was late to print it.
    """
    last = rows[-1].printed
    if each.launch != last.launch:
        return True
    before = rows[-2].printed.line if len(rows) > 1 else None
    is_late = before is not None and (before.step, before.step_ns) == (
        each.line.step,
        each.line.step_ns,
    )
    return each.line.step < last.line.step and each.printer == last.printer and not is_late


def _clocked_ns(rows: Sequence[_Row], is_first: Bool, in_row: Int64) -> Int64:
    """Mean step times by the lines' time stamps; -1 for a first row, or where one is missing."""
    clock_ns = np.array([row.printed.clock_ns for row in rows], dtype=np.int64)
    since_ns = np.diff(clock_ns, prepend=-1)
    known = ~is_first & (clock_ns >= 0) & (clock_ns - since_ns >= 0) & (since_ns >= 0)
    return np.where(known, since_ns // in_row, -1)


def _warmup(is_first: Bool, step_ns: Int64) -> Bool:
    usual_ns = _median_ns(step_ns[~is_first])
    slow = is_first if usual_ns is None else is_first | (step_ns > SLOW_RATIO * usual_ns)
    # A row is warm-up where nothing but slow rows lies between it and the first of its start.
    rows = np.arange(len(slow))
    first = np.maximum.accumulate(np.where(is_first, rows, 0))
    quick = np.maximum.accumulate(np.where(slow, -1, rows))
    return slow & (quick < first)


def _median_ns(step_ns: Int64) -> int | None:
    known = step_ns[step_ns >= 0]
    return int(np.median(known)) if len(known) else None


# What one line of a training log measures: a step, memory, timers.

NAN = math.nan

NUMBER = r"[-+]?\d++(?:,\d{3})*+(?:\.\d*+)?(?:[eE][-+]?\d{1,4})?"

_NUMBER = re.compile(NUMBER)


@dataclass(frozen=True, slots=True)
class StepLine:
    """What a line says of a step; -1 and nan are unknown. Times are of the mean step of its row.

    family indexes FAMILIES, of which the first that a log holds is the one that counts its steps.
    """

    family: int
    step: int
    step_ns: int = -1
    flops_per_s_per_gpu: float = NAN
    mfu: float = NAN
    tokens_per_s_per_gpu: float = NAN
    samples_per_s: float = NAN
    loss: float = NAN
    global_batch: int = -1

    def filled(self, other: StepLine) -> StepLine:
        """The same with what it does not know taken from another line on the step."""
        known = {
            field.name: getattr(other, field.name)
            for field in fields(self)
            if _missing(getattr(self, field.name))
        }
        return replace(self, **known)


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """A rank's memory as a line states it; -1 is unknown."""

    rank: int = -1
    step: int = -1
    allocated_bytes: int = -1
    max_allocated_bytes: int = -1
    reserved_bytes: int = -1
    max_reserved_bytes: int = -1


@dataclass(frozen=True, slots=True)
class Timer:
    """A named time: the least and the largest of the ranks, or one rank's as both; -1 unknown."""

    name: str
    min_ns: int
    max_ns: int


@dataclass(frozen=True, slots=True)
class _Family:
    """How one program prints its steps: needle is in each such line, pattern begins its fields."""

    framework: str
    needle: str
    pattern: re.Pattern[str]
    field: re.Pattern[str]


_BAR = rf"([^|\s][^|]{{0,60}}?)\s*[:=\s]\s*({NUMBER})\s*([A-Za-z%/]*)\s*(?=\||$)"

_BARRED = re.compile(rf"(?:^|\|)\s*{_BAR}")

_BARRED_BY_TOKENS = re.compile(rf"(?:^|\|)\s*(?!global_batch_size){_BAR}")
"""nanotron's global batch is of tokens since its time is no longer called elapsed."""

_PAIRS = re.compile(rf"([A-Za-z][\w /.()-]{{0,60}}?)\s*[:=]\s*({NUMBER})([A-Za-z%]*)")

_QUOTED = re.compile(rf"'(\w+)': '?({NUMBER})('?)(?=[,}}])")

_PER_GPU = re.compile(rf"\| (loss|tps(?= [\d.]+\()) (?:[\d.]+\()?({NUMBER})(/gpu)?")

_WORDS = re.compile(rf"(loss|time|mfu) ({NUMBER})(ms|%)?")

_STEP = r"(?P<step>\d{1,18})"

FAMILIES = (
    _Family("nemo", "Training epoch",
            re.compile(rf"Training epoch \d+, iteration {_STEP}/\d+ (?=\|)"), _BARRED),
    _Family("nemo", "global_step=",
            re.compile(rf"Epoch \d+:.{{0,600}}\bglobal_step={_STEP}(?:\.0*)?(?=[,\]])"), _PAIRS),
    _Family("nemo", "| epoch ",
            re.compile(rf"\| step {_STEP} \| epoch \d+ (?=\| loss )"), _PER_GPU),
    _Family("nanotron", "| time_per_iteration_ms: ",
            re.compile(rf"\biteration: {_STEP} / \d+ (?=\|)"), _BARRED_BY_TOKENS),
    _Family("nanotron", "iteration: ",
            re.compile(rf"\biteration: {_STEP} / \d+ (?=\|)"), _BARRED),
    _Family("megatron", "iteration",
            re.compile(rf"(?:samples/sec: [\d.]+ \| )?\biteration[=\s]\s*{_STEP}\s*/\s*\d+\s*"
                       r"(?=\|)"), _BARRED),
    _Family("torchtitan", "step:",
            re.compile(rf"(?<!validate )\bstep:\s*{_STEP}\s+loss:"), _PAIRS),
    _Family("deepspeed", "iter time (s):",
            re.compile(rf"\bsteps: {_STEP} loss: \S+ iter time \(s\):"), _PAIRS),
    _Family("deepspeed", "AvgSamplesPerSec=",
            re.compile(rf"\bglobal_step={_STEP}, RunningAvgSamplesPerSec="), _PAIRS),
    _Family("deepspeed", "SamplesPerSec=",
            re.compile(rf"\b\d+/{_STEP}, (?:RunningAvg)?SamplesPerSec="), _PAIRS),
    _Family("maxtext", "completed step:", re.compile(rf"\bcompleted step: {_STEP}, "), _PAIRS),
    _Family("ms-swift", "'global_step/max_steps': '",
            re.compile(r"(?:^|[\])>|]:?)\s*\{'loss': .{1,8000}'global_step/max_steps': '"
                       rf"{_STEP}/"), _QUOTED),
    _Family("nanogpt", "iter ", re.compile(rf"(?:^|\s)iter {_STEP}: loss "), _WORDS),
    _Family("composer", "[batch=",
            re.compile(rf"(?:\[epoch=(?P<epoch>\d{{1,9}})\])?\[batch={_STEP}/(?P<of>\d{{1,9}})\]:"),
            _PAIRS),
)  # fmt: skip

STEP_SIGNS = (
    "elapsed time per iteration", "SamplesPerSec=", "iter time (s):", "train_step_timing in s",
    "{'loss': ",
)  # fmt: skip
"""What only a line on a step holds: where it cannot be read, it is odd.

Those of transformers' Trainer do not say which step they are about.
"""

_MS, _S, _TERA = 10**6, 10**9, 10**12

_COLUMN = {
    "elapsed time per iteration(ms)": ("step_ns", _MS),
    "elapsed time per iteration(s)": ("step_ns", _S),
    "elapsed time per iteration ms": ("step_ns", _MS),
    "time per iteration ms": ("step_ns", _MS),
    "train step timing in s": ("step_ns", _S),
    "iter time(s)": ("step_ns", _S),
    "seconds": ("step_ns", _S),
    "time": ("step_ns", _MS),
    "throughput per gpu(tflop/s/gpu)": ("flops_per_s_per_gpu", _TERA),
    "approx flops per gpu": ("flops_per_s_per_gpu", _TERA),
    "model tflops per gpu": ("flops_per_s_per_gpu", _TERA),
    "tflop/s/device": ("flops_per_s_per_gpu", _TERA),
    "tflop/s": ("flops_per_s_per_gpu", _TERA),
    "tflops": ("flops_per_s_per_gpu", _TERA),
    "tflops per gpu": ("flops_per_s_per_gpu", _TERA),
    "train throughput/device/flops per sec": ("flops_per_s_per_gpu", 1),
    "mfu": ("mfu", 1),
    "train throughput/device/mfu": ("mfu", 1),
    "tps": ("tokens_per_s_per_gpu", 1),
    "wps": ("tokens_per_s_per_gpu", 1),
    "tokens per gpu per second(tgs)": ("tokens_per_s_per_gpu", 1),
    "tokens per gpu per second tgs": ("tokens_per_s_per_gpu", 1),
    "tokens per sec per gpu": ("tokens_per_s_per_gpu", 1),
    "tokens/s/device": ("tokens_per_s_per_gpu", 1),
    "tokens/sec/gpu": ("tokens_per_s_per_gpu", 1),
    "train throughput/device/tokens per sec": ("tokens_per_s_per_gpu", 1),
    "samples per second": ("samples_per_s", 1),
    "samples/sec": ("samples_per_s", 1),
    "samplespersec": ("samples_per_s", 1),
    "currsamplespersec": ("samples_per_s", 1),
    "train throughput/samples per sec": ("samples_per_s", 1),
    "lm loss": ("loss", 1),
    "loss": ("loss", 1),
    "reduced train loss": ("loss", 1),
    "train loss/train/total": ("loss", 1),
    "global batch size": ("global_batch", 1),
    "global step": ("step", 1),
}

_WHOLE = ("step_ns", "global_batch", "step")

_UNIT = {"K": 1_000, "M": 10**6, "B": 10**9, "G": 10**9}


def step_in(text: str) -> StepLine | None:
    """The step that a line is about; None where it is about none."""
    for number, family in enumerate(FAMILIES):
        if family.needle in text and (found := family.pattern.search(text)):
            known = {"step": _step(found.groupdict()), **_known(family, text[found.start() :])}
            return StepLine(number, **known)
    return None


def step_below(text: str, above: StepLine) -> StepLine | None:
    """The step above with what this line adds to it; None for nothing. Composer's have many."""
    family = FAMILIES[above.family]
    if family.framework != "composer" or "Train " not in text:
        return None
    return above.filled(StepLine(above.family, above.step, **_known(family, text)))


def _step(told: dict[str, str | None]) -> int:
    """The step of the run; Composer may count batches within an epoch."""
    before = (int(told.get("epoch") or 1) - 1) * int(told.get("of") or 0)
    return before + int(told["step"] or 0)


def _known(family: _Family, text: str) -> dict[str, Any]:
    """The columns that the text states."""
    known: dict[str, Any] = {}
    for name, value, unit in family.field.findall(text):
        column, scale = _COLUMN.get(_plain(name), ("", 0))
        if column:
            known[column] = _value(column, value, scale * _UNIT.get(unit, 1), unit)
    return known


def _plain(name: str) -> str:
    """The name as _COLUMN has it, however it is spelled."""
    return name.lower().replace("_", " ").replace(" (", "(")


def _value(column: str, text: str, scale: int, unit: str) -> int | float:
    if column in _WHOLE:
        return whole(text, scale)
    found = float(text.replace(",", "")) * scale
    if unit == "%":
        found /= 100
    # Early logs of nanoGPT say -100 %, torchtitan's a loss of -1 on ranks without the last stage.
    return NAN if found < 0 or not math.isfinite(found) else found


def _missing(value: float) -> bool:
    return value == -1 or value != value


def whole(text: str, scale: int) -> int:
    """A decimal number in text times scale, exact; -1 for none, a negative or one over 64 bits."""
    plain = text.replace(",", "")
    if not _NUMBER.fullmatch(plain) or not 0 <= float(plain) * scale < 2**63 - 1024:
        return -1
    return round(Decimal(plain) * scale)


_MEGATRON_MEMORY = re.compile(
    r"(?:\[Rank (\d{1,9})\] )?\(?after (\d{1,18}) iterations\)? memory \(MB\) \| "
    r"allocated: ([\d.]+) \| max allocated: ([\d.]+) \| (?:reserved|cached): ([\d.]+) \| "
    r"max (?:reserved|cached): (\d+(?:\.\d*)?)"
)

_USAGE = re.compile(r"\bMA ([\d.]+) GB\s+Max_MA ([\d.]+) GB\s+CA ([\d.]+) GB\s+Max_CA ([\d.]+) GB")

_TIMER_MEMORY = re.compile(
    r"(?:global_step=|\b\d+/)(\d{1,18}),.{0,200}[ ,]MemAllocated=([\d.]+)GB, "
    r"MaxMemAllocated=([\d.]+)GB"
)

_TITAN_MEMORY = re.compile(r"(?<!validate )\bstep:\s*(\d{1,18})\s.{0,200}memory:\s*([\d.]+)GiB")

_NEMO_MEMORY = re.compile(
    r"global_step: (\d{1,18}) \|.{0,200}max_memory_reserved: (\d+) \| max_memory_allocated: (\d+)"
)

_MIB, _GIB = 1 << 20, 1 << 30


def memory_in(text: str) -> tuple[MemoryLine, ...]:
    """What a line, or several ranks' lines run into one, say of memory.

    DeepSpeed's GB are GiB. torchtitan's number is the peak that was reserved. Only Megatron's lines
    tell the global rank: a launcher's prefix counts within its node.
    """
    if "memory (MB)" in text:
        return tuple(
            MemoryLine(int(rank or -1), int(step), *(whole(size, _MIB) for size in sizes))
            for rank, step, *sizes in _MEGATRON_MEMORY.findall(text)
        )
    if "Max_MA" in text and (found := _USAGE.search(text)):
        return (MemoryLine(-1, -1, *(whole(size, _GIB) for size in found.groups())),)
    if "MaxMemAllocated" in text and (found := _TIMER_MEMORY.search(text)):
        return (MemoryLine(-1, int(found[1]), whole(found[2], _GIB), whole(found[3], _GIB)),)
    if "max_memory_reserved" in text and (found := _NEMO_MEMORY.search(text)):
        reserved, allocated = (whole(size, 1) for size in found.groups()[1:])
        peaks = {"max_allocated_bytes": allocated, "max_reserved_bytes": reserved}
        return (MemoryLine(-1, int(found[1]), **peaks),)
    if "GiB" in text and (found := _TITAN_MEMORY.search(text)):
        return (MemoryLine(-1, int(found[1]), max_reserved_bytes=whole(found[2], _GIB)),)
    return ()


_ACROSS = re.compile(r"(?:^|[\]:>])\s*(\S{1,80}) \.*: (?:\(([\d.]+), ([\d.]+)\)|(\d+\.\d\d)\s*$)")

_ONE = re.compile(rf"\|\s*([^|:]{{1,80}}): ({NUMBER})\s*(?=\||$)")


def timers_in(text: str) -> tuple[Timer, ...]:
    """The timers of a line: one rank's `time (ms) |` row, or a name with its (min, max)."""
    if "time (ms) |" in text:
        row = text[text.index("time (ms) |") :]
        found = [(name.strip(), whole(value, _MS)) for name, value in _ONE.findall(row)]
        return tuple(Timer(name, value_ns, value_ns) for name, value_ns in found)
    if ".: " in text and (across := _ACROSS.search(text)):
        name, least, largest, only = across.groups()
        return (Timer(name, whole(least or "", _MS), whole(largest or only, _MS)),)
    return ()
