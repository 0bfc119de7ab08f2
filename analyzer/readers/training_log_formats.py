"""Formats of training logs: patterns of lines, and conversion to columns."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from stepsplit.analyzer.trace import Bool, Int32, Int64

Float64 = npt.NDArray[np.float64]

SLOW_RATIO = 1.25
"""Steps after a start are warm-up while they take more than this times the median."""


@dataclass(frozen=True, slots=True)
class TrainSteps:
    """The logged steps, one row each in log order; -1 and nan are unknown.

    A row has the mean over steps_in_row steps. Columns of shape (n,).

    Attributes:
        start: Number of the start of the run, from 0.
        step: Step number in the log; may repeat after a restart.
        steps_in_row: Number of steps that the row averages over and ends with: since the previous
            row, or for the first row of a start the log interval (1 if unknown).
        step_ns: Mean step time in ns, exactly as printed.
        warmup: True for the first row of every start, and the following rows while step_ns exceeds
            1.25 times the median of the rows that are not the first of a start.
        flops_per_s_per_gpu: Model FLOPs per second and GPU.
        mfu: Model FLOPs utilization, 0..1.
        tokens_per_s_per_gpu: Tokens per second and GPU.
        samples_per_s: Samples per second of the whole job.
        loss: Training loss.
        global_batch: Global batch size in samples.
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
        """The median of step_ns over the rows that are not warm-up; None if no time is known."""
        return _compute_median_ns(self.step_ns[~self.warmup])


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory that ranks printed, one row per line; -1 is unknown.

    Columns of shape (n,), sizes in bytes.

    Attributes:
        rank: Global rank; only known from Megatron.
        step: Step number in the log.
        allocated_bytes: Allocated memory.
        max_allocated_bytes: Peak of the allocated memory.
        reserved_bytes: Reserved memory.
        max_reserved_bytes: Peak of the reserved memory.
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
    """The framework's own timers, one row per printed timer.

    Columns of shape (n,).

    Attributes:
        step: The last step printed before, -1 for set-up.
        name_id: Index into names.
        min_ns: Minimum over ranks in ns; equal to max_ns if printed by one rank, -1 if unknown.
        max_ns: Maximum over ranks in ns.
        names: The distinct names.
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
    """A line about a step, with its printer, time (ns of local time, -1 unknown) and launch.

    printer is the launcher's prefix of the line. launch counts the start-ups before the line.
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


def build_steps(printed: Sequence[Printed], log_interval: int = -1, batch: int = -1) -> TrainSteps:
    """One row per step and start, merged from the lines of all ranks.

    Without printed times, the times are computed from the time stamps of the lines. batch is the
    global batch of rows without one.
    """
    rows = _build_rows(printed)
    lines = [row.printed.line for row in rows]
    start = np.array([row.start for row in rows], dtype=np.int64)
    step = np.array([line.step for line in lines], dtype=np.int64)
    is_first = np.diff(start, prepend=-1) != 0
    # The first row may end fewer steps than an interval, if the count begins at 0.
    at_first = np.maximum(np.minimum(step, max(log_interval, 1)), 1)
    in_row = np.where(is_first, at_first, np.diff(step, prepend=0))
    step_ns = np.array([line.step_ns for line in lines], dtype=np.int64)
    if not (step_ns >= 0).any():
        # Mean step times from time stamps; -1 for the first row of a start, or if one is missing.
        clock_ns = np.array([row.printed.clock_ns for row in rows], dtype=np.int64)
        since_ns = np.diff(clock_ns, prepend=-1)
        known = ~is_first & (clock_ns >= 0) & (clock_ns - since_ns >= 0) & (since_ns >= 0)
        step_ns = np.where(known, since_ns // in_row, -1)
    usual_ns = _compute_median_ns(step_ns[~is_first])
    slow = is_first if usual_ns is None else is_first | (step_ns > SLOW_RATIO * usual_ns)
    # A row is warm-up if all rows from the first of its start up to it are slow.
    numbers = np.arange(len(rows))
    first = np.maximum.accumulate(np.where(is_first, numbers, 0))
    last_quick = np.maximum.accumulate(np.where(slow, -1, numbers))
    return TrainSteps(
        start=start,
        step=step,
        steps_in_row=in_row,
        step_ns=step_ns,
        warmup=slow & (last_quick < first),
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


def build_memory(lines: Sequence[MemoryLine]) -> RankMemory:
    """Converts the lines to columns."""

    def column(name: str) -> Int64:
        return np.array([getattr(line, name) for line in lines], dtype=np.int64)

    return RankMemory(*(column(each.name) for each in fields(RankMemory)))


def build_timers(timers: Sequence[tuple[int, Timer]]) -> TrainTimers:
    """Converts the timers, each with the step it follows, to columns."""
    names = tuple(dict.fromkeys(timer.name for _, timer in timers))
    code = {name: i for i, name in enumerate(names)}
    return TrainTimers(
        step=np.array([step for step, _ in timers], dtype=np.int64),
        name_id=np.array([code[timer.name] for _, timer in timers], dtype=np.int32),
        min_ns=np.array([timer.min_ns for _, timer in timers], dtype=np.int64),
        max_ns=np.array([timer.max_ns for _, timer in timers], dtype=np.int64),
        names=names,
    )


def _build_rows(printed: Sequence[Printed]) -> list[_Row]:
    """The lines of the family that counts the steps, merged with others about the same step."""
    counting = min((each.line.family for each in printed), default=-1)
    rows: list[_Row] = []
    pending: dict[int, StepLine] = {}
    at: dict[int, int] = {}
    for entry in printed:
        step = entry.line.step
        is_start = not rows or _is_restart(entry, rows)
        if entry.line.family == counting and (is_start or step > rows[-1].step):
            if is_start:
                at = {}
            at[step] = len(rows)
            line = entry.line.fill_from(pending.pop(step, entry.line))
            start = (rows[-1].start + is_start) if rows else 0
            rows.append(_Row(start, replace(entry, line=line)))
        elif step in at and rows[at[step]].printed.launch == entry.launch:
            row = rows[at[step]]
            merged = replace(row.printed, line=row.printed.line.fill_from(entry.line))
            rows[at[step]] = replace(row, printed=merged)
        elif entry.line.family != counting:
            pending[step] = entry.line
    return rows


def _is_restart(entry: Printed, rows: Sequence[_Row]) -> bool:
    """Whether the run restarted: another launch, or the same printer is at an earlier step.

    A repetition of the previous row is not a restart, but a late line of another rank.
    """
    last = rows[-1].printed
    # The start-up lines between two steps say that they are of two launches.
    if entry.launch != last.launch:
        return True
    before = rows[-2].printed.line if len(rows) > 1 else None
    is_late = before is not None and (before.step, before.step_ns) == (
        entry.line.step,
        entry.line.step_ns,
    )
    return entry.line.step < last.line.step and entry.printer == last.printer and not is_late


def _compute_median_ns(step_ns: Int64) -> int | None:
    known = step_ns[step_ns >= 0]
    return int(np.median(known)) if len(known) else None


# Parsing of single lines: a step, memory, timers.

NAN = math.nan

NUMBER = r"[-+]?\d++(?:,\d{3})*+(?:\.\d*+)?(?:[eE][-+]?\d{1,4})?"

_NUMBER = re.compile(NUMBER)


@dataclass(frozen=True, slots=True)
class StepLine:
    """The values of a step in a line; -1 and nan are unknown. Times are means over the row.

    family indexes FAMILIES; the first family that occurs in a log counts its steps.
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

    def fill_from(self, line: StepLine) -> StepLine:
        """A copy with unknown values taken from another line about the same step."""
        values = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value == -1 or value != value:
                values[field.name] = getattr(line, field.name)
        return replace(self, **values)


class MemoryLine(Struct, frozen=True):
    """The memory of a rank in a line; -1 is unknown."""

    rank: int = -1
    step: int = -1
    allocated_bytes: int = -1
    max_allocated_bytes: int = -1
    reserved_bytes: int = -1
    max_reserved_bytes: int = -1


class Timer(Struct, frozen=True):
    """A named time: minimum and maximum over ranks, or one rank's time as both; -1 unknown."""

    name: str
    min_ns: int
    max_ns: int


class _Family(Struct, frozen=True):
    """The step lines of one program: each contains needle; pattern matches before the fields. If
    mfu_in_percent, it has no sign."""

    framework: str
    needle: str
    pattern: re.Pattern[str]
    field: re.Pattern[str]
    mfu_in_percent: bool = False


_MEAN = rf"(?:/{NUMBER}| \(avg {NUMBER}\))?"
"""Primus adds the mean of the run to the value of the row: 5000.0/5004.2, or 401.5 (avg 398.2)."""

_BAR = rf"([^|\s][^|]{{0,60}}?)\s*[:=\s]\s*({NUMBER}){_MEAN}\s*([A-Za-z%/]*)\s*(?=\||$)"

# | lm loss: 2.5E+00 | elapsed time per iteration (ms): 1250.4 |
_BARRED = re.compile(rf"(?:^|\|)\s*{_BAR}")

_BARRED_BY_TOKENS = re.compile(rf"(?:^|\|)\s*(?!global_batch_size){_BAR}")
"""In newer nanotron logs, global_batch_size is in tokens and is ignored."""

# loss: 2.5  memory: 40.1GiB(50.2%)  tps: 5,120  mfu: 41.2%
_PAIRS = re.compile(rf"([A-Za-z][\w /.()-]{{0,60}}?)\s*[:=]\s*({NUMBER})([A-Za-z%]*)")

# 'loss': 2.5, 'grad_norm': '1.25'
_QUOTED = re.compile(rf"'(\w+)': '?({NUMBER})('?)(?=[,}}])")

_PER_GPU = re.compile(rf"\| (loss|tps(?= [\d.]+\()) (?:[\d.]+\()?({NUMBER})(/gpu)?")

# iter 10: loss 2.5000, time 1250.40ms, mfu 41.20%
_WORDS = re.compile(rf"(loss|time|mfu) ({NUMBER})(ms|%)?")

# step:12 - actor/loss:0.12 - timing_s/step:np.float64(21.5)
_DASHED = re.compile(rf"(?:^|\s)([A-Za-z][\w/]{{0,60}}):(?:np\.float\d\d\()?({NUMBER})()")

_COLONS = re.compile(rf"(\w{{1,60}}):({NUMBER})()")

_LITGPT = re.compile(rf"\| (loss|iter time)(?: train)?: ({NUMBER})( ms)?")

_LITGPT_LOSS = re.compile(rf"\| (loss) train: ({NUMBER})()")

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
    # verl's LocalLogger; a line of validation alone is about no step.
    _Family("verl", "timing_s/step:",
            re.compile(rf"\bstep:{_STEP} - (?=\S)"), _DASHED),
    # StdoutLogger and DiskLogger of torchtune's metric_logging.
    _Family("torchtune", "Step ", re.compile(rf"(?:^|\s)Step {_STEP} \| (?=loss:)"), _COLONS),
    # scripts/base_train.py of nanochat; its tokens are those of the whole job.
    _Family("nanochat", "tok/sec: ",
            re.compile(rf"\bstep {_STEP}(?:/\d+)? \([\d.]+%\) (?=\| loss: )"), _BARRED, True),
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
    # litgpt's time is that of a microbatch: of a step where it has one, else not known.
    _Family("litgpt", " | loss train: ",
            re.compile(rf"\biter {_STEP} step (?P=step) (?=\| loss train:)"), _LITGPT),
    _Family("litgpt", " | loss train: ",
            re.compile(rf"\biter \d+ step {_STEP} (?=\| loss train:)"), _LITGPT_LOSS),
    _Family("composer", "[batch=",
            re.compile(rf"(?:\[epoch=(?P<epoch>\d{{1,9}})\])?\[batch={_STEP}/(?P<of>\d{{1,9}})\]:"),
            _PAIRS),
    # Its lines have no step number: see TrainerSteps.
    _Family("transformers", "\0", re.compile(r"(?!)"), _QUOTED),
)  # fmt: skip

STEP_SIGNS = (
    "elapsed time per iteration", "SamplesPerSec=", "iter time (s):", "train_step_timing in s",
)  # fmt: skip
"""Texts that occur only in lines about a step; used to count lines that cannot be parsed."""

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
    "iter time": ("step_ns", _MS),
    "dt": ("step_ns", _MS),
    "timing s/step": ("step_ns", _S),
    "compute per gpu(tflop/s/gpu)": ("flops_per_s_per_gpu", _TERA),
    "throughput per gpu(tflop/s/gpu)": ("flops_per_s_per_gpu", _TERA),
    "approx flops per gpu": ("flops_per_s_per_gpu", _TERA),
    "model tflops per gpu": ("flops_per_s_per_gpu", _TERA),
    "tflop/s/device": ("flops_per_s_per_gpu", _TERA),
    "tflop/s": ("flops_per_s_per_gpu", _TERA),
    "tflop/s/gpu": ("flops_per_s_per_gpu", _TERA),
    "tflops": ("flops_per_s_per_gpu", _TERA),
    "tflops per gpu": ("flops_per_s_per_gpu", _TERA),
    "train throughput/device/flops per sec": ("flops_per_s_per_gpu", 1),
    "mfu": ("mfu", 1),
    "bf16 mfu": ("mfu", 1),
    "perf/mfu/actor": ("mfu", 1),
    "train throughput/device/mfu": ("mfu", 1),
    "tps": ("tokens_per_s_per_gpu", 1),
    "wps": ("tokens_per_s_per_gpu", 1),
    "tokens per gpu per second(tgs)": ("tokens_per_s_per_gpu", 1),
    "tokens per gpu per second tgs": ("tokens_per_s_per_gpu", 1),
    "tokens per sec per gpu": ("tokens_per_s_per_gpu", 1),
    "tokens per gpu(tokens/s/gpu)": ("tokens_per_s_per_gpu", 1),
    "tokens/s/gpu inst/harmonic mean": ("tokens_per_s_per_gpu", 1),
    "tokens per second per gpu": ("tokens_per_s_per_gpu", 1),
    "perf/throughput": ("tokens_per_s_per_gpu", 1),
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

# Exact as decimals: a float of nanoseconds loses digits.
_WHOLE = ("step_ns", "global_batch", "step")

_UNIT = {"K": 1_000, "M": 10**6, "B": 10**9, "G": 10**9}


def parse_step(text: str) -> StepLine | None:
    """The step in a line; None if the line is not about a step."""
    for number, family in enumerate(FAMILIES):
        if family.needle in text and (match := family.pattern.search(text)):
            # The step number; Composer may count batches within an epoch.
            groups = match.groupdict()
            before = (int(groups.get("epoch") or 1) - 1) * int(groups.get("of") or 0)
            values = {
                "step": (before + int(groups["step"] or 0)),
                **_parse_columns(family, text[match.start() :]),
            }
            return StepLine(number, **values)
    return None


def parse_continuation(text: str, previous: StepLine) -> StepLine | None:
    """The previous step with the values of this line, for Composer's multi-line steps; or None."""
    family = FAMILIES[previous.family]
    if family.framework != "composer" or "Train " not in text:
        return None
    return previous.fill_from(
        StepLine(previous.family, previous.step, **_parse_columns(family, text))
    )


def _parse_columns(family: _Family, text: str) -> dict[str, Any]:
    """The columns in the text."""
    columns: dict[str, Any] = {}
    for name, value, unit in family.field.findall(text):
        column, scale = _COLUMN.get(_normalize_name(name), ("", 0))
        if column == "mfu" and family.mfu_in_percent:
            unit = "%"
        if column:
            columns[column] = _parse_value(column, value, scale * _UNIT.get(unit, 1), unit)
    return columns


def _normalize_name(name: str) -> str:
    """The name in the spelling of _COLUMN."""
    return name.lower().replace("_", " ").replace(" (", "(")


def _parse_value(column: str, text: str, scale: int, unit: str) -> int | float:
    if column in _WHOLE:
        return parse_scaled_int(text, scale)
    number = float(text.replace(",", "")) * scale
    if unit == "%":
        number /= 100
    # nanoGPT prints an MFU of -100 % at first; torchtitan a loss of -1 without the last stage.
    return NAN if number < 0 or not math.isfinite(number) else number


def parse_scaled_int(text: str, scale: int) -> int:
    """A decimal text times scale, exact; -1 if it is not a number, negative or over 64 bits."""
    plain = text.replace(",", "")
    if not _NUMBER.fullmatch(plain) or not 0 <= float(plain) * scale < 2**63 - 1024:
        return -1
    # By decimals: 0.1 s are 100,000,000 ns and not one less.
    return round(Decimal(plain) * scale)


# Lines of transformers' Trainer: {'loss': 1.25, ..., 'epoch': 0.5} without a step number, states of
# its progress bar, and {'train_runtime': 36.5, 'train_steps_per_second': 0.25, ...} at the end.

_TRAINER_ROW = re.compile(r"(?:^|[\])>|]:?)\s*\{'loss': .*'epoch': ")

# 10%|#         | 100/1000 [01:40<15:00,  1.00s/it]
_TRAINER_BAR = re.compile(
    r"%\|[^|]*\| (?P<step>\d{1,12})/(?P<of>\d{1,12}) "
    r"\[(?:(?P<hours>\d{1,6}):)?(?P<minutes>\d\d):(?P<seconds>\d\d)<"
)

_LEAST_BAR_S = 20
"""A progress bar shows whole seconds: a row of at least this time has it within 5 %."""

_MOST_DOUBT = 0.4
"""A step number that rests on rounded numbers is used if they leave less than this of a step."""


@dataclass(frozen=True, slots=True)
class TrainerRow:
    """A line with a loss: its values, and the bar that was drawn after it (-1: none)."""

    line: StepLine
    epoch: str
    printer: str
    launch: int
    bar_step: int = -1
    bar_s: int = -1


@dataclass(slots=True)
class TrainerSteps:
    """The steps of transformers' Trainer, whose lines do not name them.

    The bar that is drawn after a line stands at its step. Without a bar the step is the line's
    part of the last epoch, times the steps of the run, if the rounded numbers leave no doubt.
    """

    rows: list[TrainerRow]
    runtime_s: str = ""
    steps_per_s: str = ""
    epochs: str = ""
    waiting: int = 0
    """So many of the last rows have no bar yet."""

    def add_line(self, text: str, printer: str, launch: int) -> None:
        """Takes what a line of the Trainer says; ignores others."""
        if "'epoch': " in text and (match := _TRAINER_ROW.search(text)):
            values = {name: value for name, value, _ in _QUOTED.findall(text)}
            columns = _parse_columns(FAMILIES[-1], text[match.start() :])
            line = StepLine(len(FAMILIES) - 1, -1, **columns)
            self.rows.append(TrainerRow(line, values.get("epoch", ""), printer, launch))
            self.waiting += 1
        elif "'train_runtime': " in text:
            values = {name: value for name, value, _ in _QUOTED.findall(text)}
            self.runtime_s = values.get("train_runtime", "")
            self.steps_per_s = values.get("train_steps_per_second", "")
            self.epochs = values.get("epoch", "")
        elif self.waiting and "%|" in text and (bar := _TRAINER_BAR.search(text)):
            elapsed_s = 3600 * int(bar["hours"] or 0) + 60 * int(bar["minutes"])
            elapsed_s += int(bar["seconds"])
            self.rows[-1] = replace(self.rows[-1], bar_step=int(bar["step"]), bar_s=elapsed_s)
            self.waiting = 0

    @property
    def mean_step_ns(self) -> int | None:
        """The mean step with all that the run did between steps; None if it did not end."""
        rate = _parse_number(self.steps_per_s)
        return round(10**9 / rate) if rate > 0 else None

    def build(self) -> list[Printed]:
        """The rows whose steps are known."""
        # The steps of an epoch by the end of the run, and by how much that may be wrong: time and
        # rate are printed rounded, and their product leaves a doubt of less than a step.
        runtime_s, rate = _parse_number(self.runtime_s), _parse_number(self.steps_per_s)
        epochs, steps = _parse_number(self.epochs), runtime_s * rate
        rounding = _get_rounding(self.steps_per_s) * runtime_s
        rounding += _get_rounding(self.runtime_s) * rate
        per_epoch = doubt = NAN
        if epochs > 0 and rounding < _MOST_DOUBT and steps <= 2**53:
            per_epoch = round(steps) / epochs
            doubt = per_epoch * _get_rounding(self.epochs) / epochs
        printed: list[Printed] = []
        before: TrainerRow | None = None
        for row in self.rows:
            step = row.bar_step
            if step < 0:
                epoch = _parse_number(row.epoch)
                # With nan, which is no step of an epoch or no end of the run, no step is known.
                if epoch * doubt + _get_rounding(row.epoch) * per_epoch < _MOST_DOUBT:
                    step = round(epoch * per_epoch)
            if step >= 0:
                line = replace(row.line, step=step, step_ns=_compute_bar_step_ns(before, row))
                printed.append(Printed(line, row.printer, -1, row.launch))
                before = row
        return printed


def _parse_number(text: str) -> float:
    return float(text.replace(",", "") or "nan")


def _get_rounding(text: str) -> float:
    """By how much a printed number may differ from the exact one."""
    exponent = Decimal(text.replace(",", "")).as_tuple().exponent if text else 0
    return 0.5 * 10.0**exponent if isinstance(exponent, int) else NAN


def _compute_bar_step_ns(before: TrainerRow | None, row: TrainerRow) -> int:
    """Mean step since the row before by the bars' seconds; -1 if these are too few."""
    at_step, at_s = (before.bar_step, before.bar_s) if before is not None else (0, 0)
    steps, elapsed_s = row.bar_step - at_step, row.bar_s - at_s
    if row.bar_step < 0 or at_step < 0 or steps <= 0 or elapsed_s < _LEAST_BAR_S:
        return -1
    return elapsed_s * 10**9 // steps


# (after 2 iterations) memory (MB) | allocated: 1000.5 | max allocated: 2000.5 | ...
_MEGATRON_MEMORY = re.compile(
    r"(?:\[Rank (\d{1,9})\] )?\(?after (\d{1,18}) iterations\)? memory \(MB\) \| "
    r"allocated: ([\d.]+) \| max allocated: ([\d.]+) \| (?:reserved|cached): ([\d.]+) \| "
    r"max (?:reserved|cached): (\d+(?:\.\d*)?)"
)

# MA 10.5 GB         Max_MA 12.0 GB         CA 13.0 GB         Max_CA 14 GB
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


def parse_memory(text: str) -> tuple[MemoryLine, ...]:
    """The memory in a line, which may contain the output of several ranks.

    DeepSpeed's GB are GiB. torchtitan prints the peak of the reserved memory. Only Megatron prints
    the global rank; a launcher's prefix is a local rank.
    """
    if "memory (MB)" in text:
        return tuple(
            MemoryLine(
                int(rank or -1), int(step), *(parse_scaled_int(size, _MIB) for size in sizes)
            )
            for rank, step, *sizes in _MEGATRON_MEMORY.findall(text)
        )
    if "Max_MA" in text and (match := _USAGE.search(text)):
        return (MemoryLine(-1, -1, *(parse_scaled_int(size, _GIB) for size in match.groups())),)
    if "MaxMemAllocated" in text and (match := _TIMER_MEMORY.search(text)):
        return (
            MemoryLine(
                -1,
                int(match[1]),
                parse_scaled_int(match[2], _GIB),
                parse_scaled_int(match[3], _GIB),
            ),
        )
    if "max_memory_reserved" in text and (match := _NEMO_MEMORY.search(text)):
        reserved, allocated = (parse_scaled_int(size, 1) for size in match.groups()[1:])
        peaks = {"max_allocated_bytes": allocated, "max_reserved_bytes": reserved}
        return (MemoryLine(-1, int(match[1]), **peaks),)
    if "GiB" in text and (match := _TITAN_MEMORY.search(text)):
        return (MemoryLine(-1, int(match[1]), max_reserved_bytes=parse_scaled_int(match[2], _GIB)),)
    return ()


# forward-backward ...............................: (1000.25, 1003.50)
_ACROSS = re.compile(r"(?:^|[\]:>])\s*(\S{1,80}) \.*: (?:\(([\d.]+), ([\d.]+)\)|(\d+\.\d\d)\s*$)")

_ONE = re.compile(rf"\|\s*([^|:]{{1,80}}): ({NUMBER})\s*(?=\||$)")


def parse_timers(text: str) -> tuple[Timer, ...]:
    """The timers in a line: one rank's `time (ms) |` row, or a name with (min, max)."""
    if "time (ms) |" in text:
        row = text[text.index("time (ms) |") :]
        values = [(name.strip(), parse_scaled_int(value, _MS)) for name, value in _ONE.findall(row)]
        return tuple(Timer(name, value_ns, value_ns) for name, value_ns in values)
    if ".: " in text and (across := _ACROSS.search(text)):
        name, least, largest, only = across.groups()
        return (
            Timer(name, parse_scaled_int(least or "", _MS), parse_scaled_int(largest or only, _MS)),
        )
    return ()
