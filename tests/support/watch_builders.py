"""Batches of watched runs for the tests of the dashboard."""

from __future__ import annotations

import random
import time
from typing import Any

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.watch.records import (
    EventKind,
    RankSample,
    WatchBatch,
    WatchEvent,
    WatchSample,
)
from stepsplit.collectors.formats.watch_notes import RankWindow

SECOND_NS, MS = 10**9, 10**6
RUN, STORY = "night", "llama-8b night 3"


def minutes_ago(minutes: float) -> int:
    """A time in ns since 1970, in the past."""
    return time.time_ns() - int(minutes * 60) * SECOND_NS


def batch(**parts: Any) -> WatchBatch:
    """A batch of host a, closed now, of the run night with four ranks."""
    usual = {
        "id": "a-0-1", "run": RUN, "incarnation": 0, "host": "a", "world_size": 4,
        "unix_ns": time.time_ns(), "interval_steps": 200, "budget": 0.005,
    }  # fmt: skip
    return WatchBatch(**{**usual, **parts})


def window(
    rank: int,
    end_ns: int,
    median_ns: int = 100 * MS,
    steps: int = 20,
    spread_ns: int = MS,
    local_ns: int = 0,
) -> RankWindow:
    """Steps that ended at this time, and take the median give or take the spread."""
    return RankWindow(
        rank=rank, first_step=1, last_step=steps, start_unix_ns=end_ns - steps * median_ns,
        end_unix_ns=end_ns, steps=steps, min_step_ns=median_ns - spread_ns,
        median_step_ns=median_ns, max_step_ns=median_ns + spread_ns, local_ns=local_ns,
    )  # fmt: skip


def rank_sample(rank: int, wait_ns: int = 0, split: Split | None = None) -> RankSample:
    """A rank's step of 100 ms, by default."""
    usual = Split(compute_ns=70 * MS, collective_ns=20 * MS, skew_ns=6 * MS, idle_ns=4 * MS)
    exposed = {"tp": 12 * MS, "dp": 14 * MS}
    return RankSample(rank=rank, split=split or usual, exposed_ns=exposed, caused_wait_ns=wait_ns)


def sample(step: int, unix_ns: int, *ranks: RankSample, **parts: Any) -> WatchSample:
    """A sample of two steps."""
    usual = {
        "id": f"0-{step}-a", "step": step, "steps": 2, "unix_ns": unix_ns, "ranks": ranks,
        "cost_ns": 300 * MS,
    }  # fmt: skip
    return WatchSample(**{**usual, **parts})


def event(kind: EventKind, unix_ns: int, text: str, step: int = 1, **parts: Any) -> WatchEvent:
    """An event of the whole job."""
    return WatchEvent(kind=kind, step=step, unix_ns=unix_ns, text=text, **parts)


def list_story(now_ns: int, hours: int = 26) -> list[WatchBatch]:
    """A watched training of 16 ranks on two hosts that ended a minute ago or goes on.

    Rank 5 slows down for the last third; one restart; a fourth of an hour without any batch, and
    another in which the profiler was busy.
    """
    rng = random.Random(4)
    minutes = hours * 60
    made = []
    for minute in range(0, minutes, 5):
        at = now_ns - (minutes - minute - 5) * 60 * SECOND_NS
        if 0.35 < minute / minutes < 0.40:
            continue
        made += [_close_story_batch(rng, host, minute, minutes, at) for host in range(2)]
    return made


CHANGE_TEXT = "steps take 494 ms since step 210000, 412 ms before (+19.9 %)"
CHANGE_CAUSE = "rank 5: mostly compute: +82.1 ms; others wait 78.0 ms for it"


def build_story_change(name: str, run: str = STORY) -> WatchBatch:
    """A batch after the story in which a host says that steps became slower, and why."""
    at_ns = minutes_ago(12)
    events = (
        event("change", at_ns, CHANGE_TEXT, 210_000, before_ns=412.0 * MS, after_ns=494.0 * MS),
        event("change", at_ns, CHANGE_CAUSE, 210_040, rank=5),
    )
    return batch(
        id=name, run=run, host="node01", world_size=16, incarnation=1, events=events,
        windows=(window(0, minutes_ago(1), 494 * MS),),
    )  # fmt: skip


def _close_story_batch(
    rng: random.Random, host: int, minute: int, minutes: int, at: int
) -> WatchBatch:
    progress = minute / minutes
    incarnation, drift = int(progress > 0.4), 1 + max(0.0, progress - 0.66) / 3
    ranks = range(8 * host, 8 * host + 8)
    windows = [
        window(
            rank, at, int(412 * MS * drift * rng.uniform(0.99, 1.01)), steps=700,
            spread_ns=int(rng.uniform(8, 20) * MS),
            local_ns=int(rng.uniform(330, 336) * MS + (rank == 5) * (drift - 1) * 412 * MS),
        )
        for rank in ranks
    ]  # fmt: skip
    events: list[WatchEvent] = []
    if minute == 0 and host == 0:
        events.append(event("started", at, "16 ranks on 2 hosts"))
    if minute % 180 == 60 and host == 0:
        events.append(event("pause", at, "a step of 9.1 s, 22 times the median", minute * 140))
        windows[0] = window(0, at, 412 * MS, steps=700, spread_ns=400 * MS)
    if incarnation and 0.40 < progress <= 0.40 + 5 / minutes + 1e-9 and host == 0:
        events.append(event("restarted", at, "the job started again, 16 ranks", minute * 140))
    samples = []
    if minute % 10 == 0:
        busy = 0.55 < progress < 0.60
        samples.append(_make_story_sample(rng, host, minute, drift, at, busy))
        if busy and host == 0:
            events.append(event("no_data", at, samples[0].no_data, minute * 140))
    return WatchBatch(
        id=f"{host}-{minute}", run=STORY, incarnation=incarnation,
        host=f"node{host + 1:02d}", world_size=16, unix_ns=at, interval_steps=1_400,
        budget=0.005, overhead=rng.uniform(0.0028, 0.0034), windows=tuple(windows),
        samples=tuple(samples), events=tuple(events),
        dropped={"batches: spool full": 2} if minute == 900 and host else {},
    )  # fmt: skip


def _make_story_sample(
    rng: random.Random, host: int, minute: int, drift: float, at: int, busy: bool
) -> WatchSample:
    ranks = []
    for rank in range(8 * host, 8 * host + 8):
        slow = (drift - 1) * 412 * MS
        waits = 0 if rank == 5 else int(slow + rng.uniform(2, 12) * MS)
        split = Split(
            compute_ns=int(280 * MS + (slow if rank == 5 else 0)),
            collective_ns=int(rng.uniform(55, 65) * MS), p2p_ns=int(9 * MS), skew_ns=waits,
            bubble_ns=int(38 * MS), copy_ns=int(3 * MS), idle_ns=int(rng.uniform(10, 16) * MS),
        )  # fmt: skip
        exposed = {"tp": int(30 * MS), "dp": split.collective_ns - 30 * MS + waits, "pp": 9 * MS}
        caused = int(slow * 15 if rank == 5 else rng.uniform(0, 8) * MS)
        ranks.append(RankSample(rank=rank, split=split, exposed_ns=exposed, caused_wait_ns=caused))
    why = "another profiler is attached (nsys)" if busy else ""
    return sample(
        minute * 140, at, *ranks, id=f"{host}-{minute}", no_data=why,
        finding="" if host or drift == 1 else "rank 5 is a straggler: its GEMMs are slower",
        cost_ns=int(rng.uniform(1.5, 1.9) * 1e9),
    )  # fmt: skip
