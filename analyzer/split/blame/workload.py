"""Why a rank computes longer than others: the same kernels slower, or more of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.readers.kernel_rules import Rules
from stepsplit.analyzer.split.classify import computing
from stepsplit.analyzer.split.compute.kernels import own_ns
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.trace import Int64, RankTrace

Float = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Workload:
    """Of each rank's compute in each of its windows, 0..1: which part is beyond that of its peers.

    slower: the same kernels took longer than the median rank's; more: it ran more of them. Each of
    shape (windows,).
    """

    slower: Float
    more: Float


def workloads(
    traces: Sequence[RankTrace], windows: Sequence[Sequence[StepWindow]], rules: Rules
) -> list[Workload]:
    """The workload of every rank, each kernel known by its name."""
    names: dict[str, int] = {}
    for trace in traces:
        for name in trace.events.names:
            names.setdefault(name, len(names))
    tables = [_table(trace, own, names, rules) for trace, own in zip(traces, windows, strict=True)]
    usual = _usual_ns(tables)
    work = [(table.count * usual).sum(axis=1) for table in tables]
    fair = _fair_ns(work, windows)
    return [
        _beyond(table.total_ns.sum(axis=1), done, expected)
        for table, done, expected in zip(tables, work, fair, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Table:
    """How often each kernel ran in each window, and how long in all: (windows, names)."""

    count: Int64
    total_ns: Int64


def _table(
    trace: RankTrace, windows: Sequence[StepWindow], names: dict[str, int], rules: Rules
) -> _Table:
    events = trace.events
    rows = np.flatnonzero(computing(trace, rules))
    took = events.dur_ns[rows] if trace.on_device else own_ns(events, rows)
    window = np.searchsorted([w.start_ns for w in windows], events.start_ns[rows], side="right") - 1
    rows, took, window = rows[window >= 0], took[window >= 0], window[window >= 0]
    number = np.array([names[name] for name in events.names], dtype=np.int64)
    shape = (len(windows), len(names))
    cell = window * shape[1] + number[events.name_id[rows]]
    count = np.bincount(cell, minlength=shape[0] * shape[1])
    total = np.bincount(cell, weights=took, minlength=shape[0] * shape[1])
    return _Table(count.reshape(shape), total.astype(np.int64).reshape(shape))


def _usual_ns(tables: Sequence[_Table]) -> Float:
    """How long one run of each kernel takes on the median rank that has it."""
    count = np.stack([table.count.sum(axis=0) for table in tables])
    total = np.stack([table.total_ns.sum(axis=0) for table in tables])
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    some = (count > 0).any(axis=0)
    usual = np.zeros(count.shape[1])
    usual[some] = np.nanmedian(mean[:, some], axis=0)
    return usual


def _fair_ns(work: Sequence[Float], windows: Sequence[Sequence[StepWindow]]) -> list[Float]:
    """What the median rank had to do in each rank's windows, by the numbers of the steps."""
    done: dict[int, list[float]] = {}
    for own, amounts in zip(windows, work, strict=True):
        for window, amount in zip(own, amounts.tolist(), strict=True):
            done.setdefault(window.step, []).append(amount)
    fair = {step: float(np.median(amounts)) for step, amounts in done.items()}
    return [np.array([fair[window.step] for window in own]) for own in windows]


def _beyond(actual_ns: Int64, work_ns: Float, fair_ns: Float) -> Workload:
    whole = np.maximum(actual_ns, 1)
    slower = np.clip((actual_ns - work_ns) / whole, 0, 1)
    more = np.clip((work_ns - fair_ns) / whole, 0, 1 - slower)
    return Workload(slower, more)
