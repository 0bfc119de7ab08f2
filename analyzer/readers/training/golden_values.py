"""The golden values of Megatron-LM's continuous integration -> TrainLog.

One JSON file a test case and machine: a series by step each for loss, seconds a step and bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.training.lines import MemoryLine, StepLine
from stepsplit.analyzer.readers.training.log import TrainLog
from stepsplit.analyzer.readers.training.tables import Printed, to_memory, to_steps, to_timers
from stepsplit.analyzer.readers.unpack import Unpacked, unpacked

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


def recognizes(head: bytes) -> bool:
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


def _blocks(content: Unpacked) -> Iterator[bytes]:
    while block := content.read(1 << 20):
        yield block


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
