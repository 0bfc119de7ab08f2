"""Watched runs for Prometheus: gauges of the runs with data in the last hour, read at each scrape.

They are as old as the run's newest data, whose time is served with them: a gauge that does not
change raises no alarm by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from stepsplit.dashboard.pages.watch import read_first_hour
from stepsplit.dashboard.sinks.scalars import (
    DROPPED,
    LAST_DATA,
    LAST_SAMPLE,
    LEVEL,
    METRICS,
    OVERHEAD,
    Scalar,
    build_exposed_scalars,
    build_late_scalars,
    build_ledger_scalars,
    build_split_scalars,
    build_step_scalars,
)
from stepsplit.dashboard.store.watch import StoredSample, WatchedRun, WatchRange, WatchStore
from stepsplit.dashboard.store.watch_slots import HOUR_S, MINUTE_S, compute_slot_start

MOST_RUNS = 100
"""Runs that are served, those with the newest batches."""

_SECOND_NS = 10**9

_LAST_SAMPLES = 5
"""Newest sampled steps, among which the newest one that counts is looked for."""


class WatchCollector:
    """The gauges of the watched runs of a store."""

    def __init__(self, watches: WatchStore, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._watches, self._now_ns = watches, now_ns

    def collect(self) -> Iterator[Metric]:
        """The metrics of the watched runs."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for metric in METRICS:
            labels = ["run", metric.label] if metric.label else ["run"]
            kind = CounterMetricFamily if metric is DROPPED else GaugeMetricFamily
            families[metric.prometheus] = kind(metric.prometheus, metric.text, labels=labels)
        since_ns = self._now_ns() - HOUR_S * _SECOND_NS
        for run in self._watches.list_watches(since_ns)[:MOST_RUNS]:
            # What is known of a run by its newest data; what is not known is left out.
            scalars = [Scalar(LAST_DATA, run.newest_unix_ns / _SECOND_NS)]
            scalars += [
                Scalar(DROPPED, number, reason) for reason, number in sorted(run.dropped.items())
            ]
            if run.overhead is not None:
                scalars.append(Scalar(OVERHEAD, run.overhead))
            for one in (
                *scalars,
                *_read_step_scalars(self._watches, run),
                *build_late_scalars(_read_lateness_ns(self._watches, run)),
                *_read_sample_scalars(self._watches, run),
                *_read_ledger_scalars(self._watches, run),
            ):
                values = [run.name, one.key] if one.metric.label else [run.name]
                families[one.metric.prometheus].add_metric(values, one.value)
        yield from families.values()


def _read_ledger_scalars(watches: WatchStore, run: WatchedRun) -> tuple[Scalar, ...]:
    stored = watches.read_ledger(run.id)
    return () if stored is None else build_ledger_scalars(stored.ledger)


def _read_lateness_ns(watches: WatchStore, run: WatchedRun) -> dict[int, float]:
    """The lateness of each rank in the newest ten minutes of this start, where it is known."""
    newest = run.newest_minutes
    first_s = max(newest.first_unix_s, run.start.first_unix_ns // _SECOND_NS)
    within = WatchRange(first_s, newest.last_unix_s, MINUTE_S)
    grid = watches.read_lateness(run.id, within, MINUTE_S)
    known = np.isfinite(grid.mean_ns)
    sums, minutes = np.where(known, grid.mean_ns, 0.0).sum(axis=1), known.sum(axis=1)
    return {int(r): float(sums[r] / minutes[r]) for r in np.flatnonzero(minutes)}


def _read_step_scalars(watches: WatchStore, run: WatchedRun) -> tuple[Scalar, ...]:
    """The step times of the newest ten minutes, and their level."""
    slots = watches.read_steps(run.id, run.newest_minutes)
    own = [one.summary for one in slots if one.incarnation == run.start.incarnation]
    if not own:
        return ()
    median_ns = median(one.median_step_ns for one in own)
    times = build_step_scalars(
        min(one.min_step_ns for one in own), median_ns, max(one.max_step_ns for one in own)
    )
    is_young = run.newest_unix_ns - run.start.first_unix_ns < HOUR_S * _SECOND_NS
    first = None if is_young else read_first_hour(watches, run)
    if first is None or not first.median_step_ns:
        return times
    return (*times, Scalar(LEVEL, median_ns / first.median_step_ns, "step_time"))


def _read_sample_scalars(watches: WatchStore, run: WatchedRun) -> tuple[Scalar, ...]:
    """What a step is made of, by the newest sample that counts, of all hosts."""
    stored = watches.list_samples(run.id, _LAST_SAMPLES)
    newest = next((one for one in stored if one.sample.ranks), None)
    if newest is None:
        return ()
    key = (newest.incarnation, newest.sample.step)
    parts = [one for one in stored if (one.incarnation, one.sample.step) == key]
    ranks = [rank for one in parts for rank in one.sample.ranks]
    last = Scalar(LAST_SAMPLE, newest.sample.unix_ns / _SECOND_NS)
    return (last, *build_split_scalars(ranks), *_read_exposed_scalars(watches, run, parts))


def _read_exposed_scalars(
    watches: WatchStore, run: WatchedRun, parts: list[StoredSample]
) -> tuple[Scalar, ...]:
    """Exposed communication in the minutes of the sample."""
    starts = [compute_slot_start(one.sample.unix_ns, MINUTE_S) for one in parts]
    slots = watches.read_splits(run.id, WatchRange(min(starts), max(starts), MINUTE_S))
    own = [one for one in slots if one.incarnation == parts[0].incarnation]
    sums: dict[str, int] = {}
    for slot in own:
        for axis, ns in slot.exposed_ns.items():
            sums[axis] = sums.get(axis, 0) + ns
    ranks = sum(slot.rank_samples for slot in own)
    return build_exposed_scalars(sums, ranks) if ranks else ()
