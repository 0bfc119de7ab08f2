"""Why a rank computes longer than others: slower kernels, or more work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.split.kernels import KernelWork, compute_self_ns, find_kernel_work
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.trace import Float, Int64, RankTrace


class Workload(Struct, frozen=True):
    """The fraction of a rank's compute beyond that of its peers, per window, 0..1.

    slower: the same kernels took longer than on the median rank; more: it ran more kernels, or the
    same on larger inputs. Both of shape (windows,).
    """

    slower: Float
    more: Float


def compute_workloads(
    traces: Sequence[RankTrace], windows: Sequence[Sequence[StepWindow]], stages: Sequence[int]
) -> list[Workload]:
    """The workload of every rank; stages has one entry per trace.

    Kernels are identified by name and shapes; without shapes, the kernels of the only rank of a
    stage are compared with no others.
    """
    peers = Counter(stages)
    tables = [
        _build_kernel_table(trace, own, None if peers[stage] > 1 or len(peers) == 1 else stage)
        for trace, own, stage in zip(traces, windows, stages, strict=True)
    ]
    usual_ns = _compute_median_ns(tables)
    work = [table.count @ usual for table, usual in zip(tables, usual_ns, strict=True)]
    # A rank is compared with the median rank in the same step, as the work may differ between
    # steps.
    by_step: dict[int, list[float]] = {}
    for own, done in zip(windows, work, strict=True):
        for window, amount in zip(own, done.tolist(), strict=True):
            by_step.setdefault(window.step, []).append(amount)
    fair = {step: float(np.median(amounts)) for step, amounts in by_step.items()}
    loads = []
    for table, done, own in zip(tables, work, windows, strict=True):
        spent = table.total_ns.sum(axis=1)
        whole = np.maximum(spent, 1)
        # done is what its kernels take on the median rank: what it spent beyond that is slower,
        # and what that is beyond the median rank's work is more work.
        slower = np.clip((spent - done) / whole, 0, 1)
        expected = np.array([fair[window.step] for window in own])
        loads.append(Workload(slower, np.clip((done - expected) / whole, 0, 1 - slower)))
    return loads


class _KernelTable(Struct, frozen=True):
    """Number of runs and total time of each kernel of a rank per window, shape (windows, work).

    work holds what ranks have in common: the kernel, and its stage if it is comparable only there.
    """

    work: tuple[tuple[KernelWork, int | None], ...]
    count: Int64
    total_ns: Int64


def _build_kernel_table(
    trace: RankTrace, windows: Sequence[StepWindow], only_stage: int | None
) -> _KernelTable:
    events = trace.events
    rows = np.flatnonzero(trace.kinds.computes)
    took = events.dur_ns[rows] if trace.on_device else compute_self_ns(events, rows)
    window = np.searchsorted([w.start_ns for w in windows], events.start_ns[rows], side="right") - 1
    rows, took, window = rows[window >= 0], took[window >= 0], window[window >= 0]
    work, work_id = find_kernel_work(trace, rows)
    shape = (len(windows), len(work))
    cell = window * shape[1] + work_id
    count = np.bincount(cell, minlength=shape[0] * shape[1])
    total = np.bincount(cell, weights=took, minlength=shape[0] * shape[1])
    comparable = ((one, only_stage if one.shapes is None else None) for one in work)
    return _KernelTable(
        tuple(comparable), count.reshape(shape), total.astype(np.int64).reshape(shape)
    )


def _compute_median_ns(tables: Sequence[_KernelTable]) -> list[Float]:
    """For each rank, the duration of each of its kernels on the median rank that runs it."""
    numbers: dict[tuple[KernelWork, int | None], int] = {}
    place = [
        np.array([numbers.setdefault(one, len(numbers)) for one in table.work], dtype=np.int64)
        for table in tables
    ]
    label = np.concatenate(place)
    mean = np.concatenate([t.total_ns.sum(axis=0) / t.count.sum(axis=0) for t in tables])
    order = np.lexsort((mean, label))
    first = np.searchsorted(label[order], np.arange(len(numbers) + 1))
    low, high = (first[:-1] + first[1:] - 1) // 2, (first[:-1] + first[1:]) // 2
    usual = (mean[order][low] + mean[order][high]) / 2
    return [usual[own] for own in place]
