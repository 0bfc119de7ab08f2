"""Bugs to plant in the analyzer, one at a time: each is a mistake that somebody might make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from stepsplit.analyzer.readers.kineto import device_calls
from stepsplit.analyzer.split import (
    align,
    arrivals,
    attribute,
    classify,
    clock_fit,
    identity,
    lags,
    levels,
    run_split,
    steps,
    waits,
)
from stepsplit.analyzer.split.arrivals import Arrivals
from stepsplit.analyzer.split.intervals import Intervals, empty
from stepsplit.analyzer.split.lags import Lags
from stepsplit.analyzer.split.waits import BUBBLE, SKEW, Pieces

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug, and the scenario whose truth it contradicts."""

    name: str
    scenario: str
    plant: Plant


def _wrapped(module: Any, name: str, around: Callable[..., Any]) -> Plant:
    """Plants around(original, *arguments) in the place of a function."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(module, name)
        patch.setattr(module, name, lambda *a, **k: around(original, *a, **k))

    return plant


def _skew_and_bubble_swapped(original: Any, *args: Any) -> Any:
    bucket = original(*args)
    return np.where(bucket == SKEW, BUBBLE, SKEW).astype(np.uint8)


def _offset_dropped(original: Any, *args: Any) -> Any:
    return replace(original(*args), offset_ns=0, drift_ppm=None)


def _drift_dropped(original: Any, *args: Any) -> Any:
    return 0.0, 0.0


def _no_gap_rule(original: Any, pieces: Pieces, compute: Intervals) -> Pieces:
    return pieces


def _waiting_is_transfer(original: Any, *args: Any) -> Arrivals:
    found = original(*args)
    return replace(found, moves_ns=found.start_ns)


def _first_instead_of_last(original: Any, *args: Any) -> Any:
    came = original(*args)
    matched, start = args[0], args[1]
    least = arrivals.least_of(matched.shared, start, int(matched.shared.max(initial=-1)) + 1)
    return replace(came, at_ns=np.where(matched.shared >= 0, least[matched.shared], came.at_ns))


def _copies_compute(original: Any, *args: Any) -> Any:
    work = original(*args)
    both = classify.union(
        np.concatenate((work.compute.start_ns, work.copy.start_ns)),
        np.concatenate((work.compute.end_ns, work.copy.end_ns)),
    )
    return replace(work, compute=both, copy=empty())


def _ends_with_anything(original: Any, trace: Any, device: Any) -> Any:
    return np.ones(len(device), dtype=np.bool_)


def _batches_unread(original: Any, events: Any, posts: Any, launches: Any) -> Any:
    return [[] for _ in range(len(launches))]


def _next_message(original: Any, *args: Any) -> Any:
    found = original(*args)
    return replace(found, place=found.place + 1)


def _one_stream_computes(original: Any, trace: Any, *args: Any) -> Any:
    found = original(trace, *args)
    events = trace.events
    busy = np.bincount(events.lane[found], weights=events.dur_ns[found])
    return found & (events.lane == int(busy.argmax()))


def _never_passed_on(original: Any, *args: Any) -> Lags:
    found = original(*args)
    whole = found.direct.sum(axis=1, keepdims=True)
    direct = np.where(whole > 0, found.direct / np.where(whole > 0, whole, 1), 0.2)
    return replace(found, direct=direct, passed=np.zeros_like(found.passed))


def _level_at_arrival(original: Any, trace: Any, rows: Any, found: Any, came: Any) -> Any:
    return came.start_ns[rows]


BUGS = (
    Bug("skew and bubble swapped", "tp_slow_rank", _wrapped(waits, "_wait_bucket", _skew_and_bubble_swapped)),
    Bug("an offset dropped", "ddp_slow_rank", _wrapped(align, "_clock_of", _offset_dropped)),
    Bug("a drift dropped", "fsdp_four_hosts", _wrapped(clock_fit, "_drift", _drift_dropped)),
    Bug("the gap rule forgotten", "fsdp", _wrapped(attribute, "held_up", _no_gap_rule)),
    Bug("waiting taken for transfer", "ddp_host_stall", _wrapped(run_split, "arrivals_of", _waiting_is_transfer)),
    Bug("the first arrival instead of the last", "ep_hot_expert", _wrapped(arrivals, "_last_to_come", _first_instead_of_last)),
    Bug("copies taken for compute", "ddp_slow_copy", _wrapped(run_split, "work_of", _copies_compute)),
    Bug("steps end with what outlives them", "ddp_runs_ahead", _wrapped(steps, "_on_main_stream", _ends_with_anything)),
    Bug("batches unread", "pp_1f1b", _wrapped(device_calls, "posted_before", _batches_unread)),
    Bug("messages off by one", "pp_gpipe", _wrapped(identity, "_received", _next_message)),
    Bug("one stream alone computes", "ep_two_streams", _wrapped(classify, "computing", _one_stream_computes)),
    Bug("blame never passed on", "pp_slow_stage", _wrapped(lags, "_shared", _never_passed_on)),
    Bug("lags counted from the arrival", "ddp_host_stall", _wrapped(levels, "_level_ns", _level_at_arrival)),
)  # fmt: skip
