"""The tables of a training log: its lines -> steps, one row each, memory and timers, in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.readers.training.lines import MemoryLine, StepLine, Timer
from stepsplit.analyzer.trace import Bool, Int32, Int64

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
