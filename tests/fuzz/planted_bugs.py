"""Bugs to plant in the analyzer, one at a time: each is a mistake that somebody might make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from simulator.program import Scenario
from simulator.scenarios import SCENARIOS

from stepsplit.analyzer.arrays import make_empty_intervals, union
from stepsplit.analyzer.buckets import Bucket
from stepsplit.analyzer.diagnose.graph import binding_paths, blame
from stepsplit.analyzer.readers.kineto import calls
from stepsplit.analyzer.split import (
    attribute,
    call_ends,
    call_identity,
    clock_fit,
    run,
    steps,
    transfers,
    work,
)
from stepsplit.analyzer.split.gaps import HeldGaps
from stepsplit.analyzer.split.transfers import Arrivals

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug, and the scenario, drawn from a seed, whose truth it contradicts."""

    name: str
    scenario: Callable[[int], Scenario]
    plant: Plant


def _wrapped(module: Any, name: str, around: Callable[..., Any]) -> Plant:
    """Plants around(original, *arguments) in the place of a function."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(module, name)
        patch.setattr(module, name, lambda *a, **k: around(original, *a, **k))

    return plant


def _swapped(original: Any, *args: Any) -> Any:
    bucket = original(*args)
    return np.where(bucket == Bucket.SKEW, Bucket.BUBBLE, Bucket.SKEW).astype(np.uint8)


def _offset_dropped(original: Any, *args: Any) -> Any:
    return structs.replace(original(*args), offset_ns=0.0)


def _drift_dropped(original: Any, *args: Any) -> Any:
    return 0.0, 0.0


def _no_waiting(original: Any, *args: Any) -> Arrivals:
    found = original(*args)
    return structs.replace(found, moves_ns=found.start_ns)


def _first_to_come(original: Any, *args: Any) -> Any:
    came = original(*args)
    matched, start = args[0], args[1]
    least = transfers.group_min(matched.shared, start, int(matched.shared.max(initial=-1)) + 1)
    return structs.replace(
        came, at_ns=np.where(matched.shared >= 0, least[matched.shared], came.at_ns)
    )


def _copies_compute(original: Any, *args: Any) -> Any:
    found = original(*args)
    both = union(
        np.concatenate((found.compute.start_ns, found.copy.start_ns)),
        np.concatenate((found.compute.end_ns, found.copy.end_ns)),
    )
    return structs.replace(found, compute=both, copy=make_empty_intervals())


def _by_the_host(original: Any, trace: Any, marked: Any, restarts: Any) -> Any:
    return steps._build_host_windows(marked, restarts)


def _batches_unread(original: Any, events: Any, posts: Any, launches: Any) -> Any:
    return [[] for _ in range(len(launches))]


def _next_message(original: Any, *args: Any) -> Any:
    found = original(*args)
    return structs.replace(found, place=found.place + 1)


def _one_stream(original: Any, events: Any, mask: Any) -> Any:
    if not mask.any():
        return original(events, mask)
    busy = np.bincount(events.lane[mask], weights=events.dur_ns[mask])
    return original(events, mask & (events.lane == int(busy.argmax())))


def _no_imbalance(original: Any, *args: Any) -> Any:
    slower, more = original(*args).T
    return np.stack((slower + more, np.zeros_like(more)), axis=1)


def _only_the_last_event(original: Any, graph: Any, paths: Any, tree: Any, waits: Any) -> Any:
    begin = paths.previous[waits.last_arrival]
    return original(graph, paths, tree, structs.replace(waits, begin=begin))


def _communication_first(patch: pytest.MonkeyPatch) -> None:
    """What compute hides counts as communication too."""
    order = (1, 2, 3, 4, 0, 5)
    table = [next((c for c in order if mask >> c & 1), Bucket.IDLE) for mask in range(512)]
    patch.setattr(attribute, "_MASK_TO_BUCKET", np.array(table, dtype=np.uint8))
    patch.setattr(HeldGaps, "select_blocking", lambda held, pieces: pieces)


def _drifting(seed: int) -> Scenario:
    """Hosts whose clocks run apart as fast as clocks do."""
    scenario = SCENARIOS["fsdp_four_hosts"](seed)
    ppm = {host: 50.0 * (-1) ** i for i, host in enumerate(scenario.drift_ppm)}
    return replace(scenario, drift_ppm=ppm)


BUGS = (
    Bug(
        "skew and bubble swapped",
        SCENARIOS["tp_slow_rank"],
        _wrapped(transfers, "_classify_waits", _swapped),
    ),
    Bug(
        "an offset dropped",
        SCENARIOS["ddp_slow_rank"],
        _wrapped(call_ends, "fit_offset_and_drift", _offset_dropped),
    ),
    Bug("a drift dropped", _drifting, _wrapped(clock_fit, "_estimate_drift", _drift_dropped)),
    Bug(
        "waiting is transfer",
        SCENARIOS["ddp_host_stall"],
        _wrapped(run, "compute_arrivals", _no_waiting),
    ),
    Bug(
        "the first to come",
        SCENARIOS["ep_hot_expert"],
        _wrapped(transfers, "_find_last_arrivals", _first_to_come),
    ),
    Bug(
        "copies compute",
        SCENARIOS["ddp_slow_copy"],
        _wrapped(run, "collect_work", _copies_compute),
    ),
    Bug(
        "steps of the host",
        SCENARIOS["ddp_runs_ahead"],
        _wrapped(steps, "_build_device_windows", _by_the_host),
    ),
    Bug(
        "batches unread",
        SCENARIOS["pp_uneven_layers"],
        _wrapped(calls, "posted_before", _batches_unread),
    ),
    Bug(
        "messages off by one",
        SCENARIOS["pp_host_stall"],
        _wrapped(call_identity, "_pair_receives", _next_message),
    ),
    Bug(
        "one stream computes",
        SCENARIOS["ep_two_streams"],
        _wrapped(work, "_merge_intervals", _one_stream),
    ),
    Bug(
        "imbalance is slowness",
        SCENARIOS["ep_hot_expert"],
        _wrapped(binding_paths, "_list_workloads", _no_imbalance),
    ),
    Bug(
        "paths of one event",
        SCENARIOS["fsdp_slow_rank"],
        _wrapped(blame, "compare_paths", _only_the_last_event),
    ),
    Bug("overlap counted twice", SCENARIOS["ddp"], _communication_first),
)
