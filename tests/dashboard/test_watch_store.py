"""Batches of a watched run count once; slots keep the shortest, the longest and all steps."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from support.watch_builders import MS, RUN, SECOND_NS, batch, event, rank_sample, sample, window

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.errors import UsageError
from stepsplit.collectors.formats.watch_notes import RankWindow
from stepsplit.dashboard.store.database import open_database
from stepsplit.dashboard.store.runs import Tag
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.store.watch import WatchedRun, WatchRange, WatchStore
from stepsplit.dashboard.store.watch_slots import (
    DAY_S,
    HOUR_S,
    KEPT_S,
    LEVELS_S,
    MINUTE_S,
    StepSummary,
)

MIDNIGHT_S = 1_790_035_200
NOON_NS = (MIDNIGHT_S + 12 * HOUR_S) * SECOND_NS
EVER = 9 * 10**9


@pytest.fixture
def watches(database_url: str) -> Iterator[WatchStore]:
    database = open_database(database_url)
    yield WatchStore(database, now_ns=lambda: NOON_NS + 400 * DAY_S * SECOND_NS)
    database.close()


def _found(watches: WatchStore) -> WatchedRun:
    found = watches.find_watch(RUN)
    assert found is not None
    return found


def _summaries(watches: WatchStore, level_s: int) -> dict[int, StepSummary]:
    slots = watches.read_steps(_found(watches).id, WatchRange(0, EVER, level_s))
    return {slot.start_unix_s: slot.summary for slot in slots}


def test_the_same_batch_twice_counts_once(watches: WatchStore) -> None:
    one = batch(
        unix_ns=NOON_NS,
        windows=(window(0, NOON_NS),),
        samples=(sample(7, NOON_NS, rank_sample(0)),),
        events=(event("started", NOON_NS, "the job started"),),
        dropped={"spool full": 3},
    )

    receipts = [watches.add_batch(one) for _ in range(3)]

    assert [(one.accepted, one.is_new_run) for one in receipts] == [
        (True, True), (False, False), (False, False),
    ]  # fmt: skip
    found, ever = _found(watches), WatchRange(0, EVER, MINUTE_S)
    assert (found.batches, dict(found.dropped)) == (1, {"spool full": 3})
    assert [one.summary.steps for one in watches.read_steps(found.id, ever)] == [20]
    assert [one.rank_samples for one in watches.read_splits(found.id, ever)] == [1]
    assert len(watches.read_events(found.id, ever, 10)) == len(watches.list_samples(found.id, 9))


def test_a_sample_that_comes_in_two_batches_counts_once(watches: WatchStore) -> None:
    for name in ("one", "two"):
        again = sample(7, NOON_NS, rank_sample(0))
        watches.add_batch(batch(id=name, unix_ns=NOON_NS, samples=(again,)))

    (slot,) = watches.read_splits(_found(watches).id, WatchRange(0, EVER, DAY_S))
    assert (slot.samples, slot.rank_samples) == (1, 1)


@pytest.mark.parametrize("seed", range(3))
def test_every_level_keeps_the_shortest_the_longest_and_all_steps(
    watches: WatchStore, seed: int
) -> None:
    """Also where batches come in any order, and cut a minute anywhere."""
    rng = random.Random(seed)
    windows = [
        RankWindow(
            rank=rng.randrange(4), first_step=1, last_step=9, start_unix_ns=NOON_NS,
            end_unix_ns=NOON_NS + rng.randrange(7_000 * SECOND_NS), steps=rng.randrange(1, 50),
            min_step_ns=rng.randrange(10, 20) * MS, median_step_ns=rng.randrange(20, 30) * MS,
            max_step_ns=rng.randrange(30, 900) * MS,
        )
        for _ in range(200)
    ]  # fmt: skip
    for number in range(20):
        part = tuple(windows[10 * number : 10 * number + 10])
        closed = NOON_NS + (7_000 + rng.randrange(2) * 60 + number) * SECOND_NS
        watches.add_batch(batch(id=str(number), unix_ns=closed, windows=part))
    watches.add_batch(batch(id="last", unix_ns=NOON_NS + 8_000 * SECOND_NS))

    for level_s in LEVELS_S:
        for start_s, got in _summaries(watches, level_s).items():
            own = [w for w in windows if 0 <= w.end_unix_ns // SECOND_NS - start_s < level_s]
            steps = [sum(w.steps for w in own if w.rank == rank) for rank in range(4)]
            assert got.steps == max(steps)
            assert got.min_step_ns == min(w.min_step_ns for w in own)
            assert got.max_step_ns == max(w.max_step_ns for w in own)
            assert got.ranks == len({w.rank for w in own})
            medians = [w.median_step_ns for w in own]
            assert min(medians) <= got.median_step_ns <= max(medians)
    assert len(_summaries(watches, DAY_S)) == 1


def test_the_median_of_a_slot_is_that_of_its_medians_weighted_by_their_steps(
    watches: WatchStore,
) -> None:
    """A pause of one step, which fills a window alone, does not move it."""
    parts = (
        window(0, NOON_NS, 100 * MS, steps=20),
        window(0, NOON_NS + SECOND_NS, 104 * MS, steps=15),
        window(0, NOON_NS + 2 * SECOND_NS, 9_000 * MS, steps=1),
        window(1, NOON_NS, 110 * MS, steps=20),
        window(2, NOON_NS, 90 * MS, steps=20),
    )
    watches.add_batch(batch(unix_ns=NOON_NS + 3 * SECOND_NS, windows=parts))

    for level_s in LEVELS_S:
        (got,) = _summaries(watches, level_s).values()
        assert (got.median_step_ns, got.max_step_ns) == (100 * MS, 9_001 * MS)
        assert (got.slowest_rank, got.slowest_median_ns) == (1, 110 * MS)


def test_the_sums_of_a_slot_are_those_of_its_samples(watches: WatchStore) -> None:
    """Seven buckets add up to the steps, to the nanosecond."""
    rng = random.Random(1)
    splits = [Split(*(rng.randrange(10**9) for _ in range(7))) for _ in range(30)]
    for number, split in enumerate(splits):
        at = NOON_NS + 90 * number * SECOND_NS
        ranks = (rank_sample(number % 4, wait_ns=number, split=split),)
        one = sample(number, at, *ranks, id=f"s{number}")
        watches.add_batch(batch(id=str(number), unix_ns=at, samples=(one,)))

    for level_s in LEVELS_S:
        slots = watches.read_splits(_found(watches).id, WatchRange(0, EVER, level_s))
        total = [sum(one) for one in zip(*(s.total.buckets_ns for s in slots), strict=True)]
        assert total == [sum(one) for one in zip(*(s.buckets_ns for s in splits), strict=True)]
        assert sum(slot.rank_samples for slot in slots) == 30
        assert sum(slot.exposed_ns["dp"] for slot in slots) == 30 * 14 * MS
    first_s = MIDNIGHT_S + 12 * HOUR_S
    grid = watches.read_waits(_found(watches).id, WatchRange(first_s, first_s, HOUR_S), HOUR_S)
    means = [sum(range(rank, 30, 4)) / len(range(rank, 30, 4)) for rank in range(4)]
    assert grid.mean_ns[:, 0].tolist() == pytest.approx(means)


def test_lateness_is_that_above_the_median_of_the_ranks_at_every_level(
    watches: WatchStore,
) -> None:
    """Weighted by steps; a rank without local times is left out, and none is early."""
    for number, (steps, of_rank_2) in enumerate([(20, 70), (60, 78)]):
        at = NOON_NS + number * SECOND_NS
        windows = [window(rank, at, steps=steps, local_ns=60 * MS) for rank in (0, 1)]
        windows += [window(2, at, steps=steps, local_ns=of_rank_2 * MS), window(3, at)]
        windows += [window(4, at, steps=steps, local_ns=40 * MS)]
        part = tuple(windows)
        watches.add_batch(batch(id=str(number), unix_ns=at, world_size=5, windows=part))
    watches.add_batch(batch(id="last", unix_ns=NOON_NS + 120 * SECOND_NS))

    for level_s in LEVELS_S:
        first_s = NOON_NS // SECOND_NS // level_s * level_s
        within = WatchRange(first_s, first_s, level_s)
        grid = watches.read_lateness(_found(watches).id, within, level_s)
        late_ms = (grid.mean_ns[:, 0] / MS).tolist()
        assert late_ms == pytest.approx([0, 0, 16, math.nan, 0], nan_ok=True)


def test_the_run_of_the_sample_nearest_in_time_is_found(
    watches: WatchStore, database_url: str, tmp_path: Path
) -> None:
    for number in range(3):
        at = NOON_NS + 600 * number * SECOND_NS
        one = sample(number, at, rank_sample(0), id=f"s{number}")
        watches.add_batch(batch(id=str(number), unix_ns=at, samples=(one,)))
    watch_id = _found(watches).id
    assert watches.find_run_of_sample(watch_id, NOON_NS) is None

    with closing(Store.open(database_url, tmp_path)) as store:
        runs = [store.add(name, [Tag("sample", name)]) for name in ("s0", "s2", "other")]

    near = [watches.find_run_of_sample(watch_id, NOON_NS + s * SECOND_NS) for s in (-9, 500, 700)]
    assert near == [runs[0], runs[0], runs[1]]


def test_a_restart_begins_a_new_incarnation_in_the_same_run(watches: WatchStore) -> None:
    for number, (world_size, median_ms) in enumerate([(4, 100), (2, 150)]):
        at = NOON_NS + number * 5 * SECOND_NS
        watches.add_batch(
            batch(
                id=str(number), incarnation=number, world_size=world_size, unix_ns=at,
                windows=(window(0, at, median_ms * MS),), overhead=0.004 - number / 1000,
            )
        )  # fmt: skip

    found = _found(watches)
    assert [(one.incarnation, one.world_size) for one in found.starts] == [(0, 4), (1, 2)]
    slots = watches.read_steps(found.id, WatchRange(0, EVER, MINUTE_S))
    assert [(one.incarnation, one.summary.median_step_ns) for one in slots] == [
        (0, 100 * MS), (1, 150 * MS),
    ]  # fmt: skip
    assert (found.overhead, found.interval_steps) == (0.003, 200)


def test_a_sample_without_data_has_a_reason_and_no_split(watches: WatchStore) -> None:
    broken = sample(7, NOON_NS, rank_sample(0), no_data="no kernels in the trace")
    watches.add_batch(batch(unix_ns=NOON_NS, samples=(broken,)))

    (slot,) = watches.read_splits(_found(watches).id, WatchRange(0, EVER, HOUR_S))
    assert (slot.rank_samples, slot.total) == (0, Split())
    assert slot.no_data == {"no kernels in the trace": 1}
    (stored,) = watches.list_samples(_found(watches).id, 5)
    assert (stored.sample.no_data, stored.sample.ranks) == ("no kernels in the trace", ())


def test_reasons_without_number_stay_small(watches: WatchStore) -> None:
    for number in range(60):
        one = sample(number, NOON_NS, id=str(number), no_data=f"rank 3 was {number} ms late")
        watches.add_batch(batch(id=str(number), unix_ns=NOON_NS, samples=(one,)))

    (slot,) = watches.read_splits(_found(watches).id, WatchRange(0, EVER, DAY_S))
    assert (sum(slot.no_data.values()), len(slot.no_data)) == (60, 25)


def test_hosts_that_send_at_once_lose_nothing(watches: WatchStore) -> None:
    """Also the first batches of a new run, of which each host may be the first."""

    def send(host: int) -> list[bool]:
        return [
            watches.add_batch(
                batch(
                    id=f"{host}-{number}", host=f"node{host}", unix_ns=NOON_NS + number,
                    windows=(window(host % 4, NOON_NS + number),), dropped={"spool full": 1},
                )
            ).is_new_run
            for number in range(10)
        ]  # fmt: skip

    with ThreadPoolExecutor(8) as pool:
        is_new_run = [one for sent in pool.map(send, range(8)) for one in sent]

    found = _found(watches)
    assert (is_new_run.count(True), found.batches, len(found.hosts)) == (1, 80, 8)
    assert dict(found.dropped) == {"spool full": 80}
    (slot,) = _summaries(watches, MINUTE_S).values()
    assert (slot.steps, slot.ranks) == (2 * 10 * 20, 4)


def test_old_slots_go_and_longer_ones_stay(watches: WatchStore) -> None:
    days = KEPT_S[HOUR_S] // DAY_S + 2
    for day in range(days):
        at = NOON_NS + day * DAY_S * SECOND_NS
        watches.add_batch(
            batch(
                id=str(day), unix_ns=at, windows=(window(0, at),),
                samples=(sample(day, at, rank_sample(0), id=str(day)),),
            )
        )  # fmt: skip

    assert [len(_summaries(watches, level)) for level in LEVELS_S] == [5, 15, 101, days]
    ever = WatchRange(0, EVER, DAY_S)
    assert len(watches.read_splits(_found(watches).id, ever)) == days
    assert len(watches.list_samples(_found(watches).id, 1_000)) == 9


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"run": "a/b"}, "without / "),
        ({"run": ""}, "1 to 200 printable characters"),
        ({"world_size": 0}, "a world_size of 1 to"),
        ({"incarnation": 1 << 80}, "the numbers of a batch must be"),
        ({"dropped": {"x": -1}}, "the numbers of a batch must be"),
        ({"budget": 5.0}, "parts of the training time"),
        ({"windows": (window(9, NOON_NS),)}, "not below its world_size 4"),
        ({"windows": (window(0, NOON_NS, spread_ns=-1),)}, "of rank 0 are not min <= median"),
        ({"windows": (window(0, NOON_NS - 2 * DAY_S * SECOND_NS),)}, "of the day before"),
        ({"unix_ns": NOON_NS + 401 * DAY_S * SECOND_NS}, "clock of host a is over an hour ahead"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_stored_is_refused(
    tmp_path: Path, parts: dict[str, object], reason: str
) -> None:
    database = open_database(f"sqlite:///{tmp_path}/runs.db")
    watches = WatchStore(database, now_ns=lambda: NOON_NS + 400 * DAY_S * SECOND_NS)

    with pytest.raises(UsageError, match=reason):
        watches.add_batch(batch(**{"unix_ns": NOON_NS, **parts}))

    assert watches.list_watches() == ()
    database.close()


def test_a_batch_of_last_week_is_refused(watches: WatchStore) -> None:
    """Its id may be forgotten, so that it could count twice."""
    watches.add_batch(batch(unix_ns=NOON_NS))

    with pytest.raises(UsageError, match="over 3 days older than the newest of its run; drop it"):
        watches.add_batch(batch(id="old", unix_ns=NOON_NS - 4 * DAY_S * SECOND_NS))
