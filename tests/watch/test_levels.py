"""A change of the step time is found once, with its first step, and explained by the samples."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.watch.levels import (
    SampleSplit,
    StepLevel,
    StepTimeChange,
    explain_change,
    summarize_sample,
)
from stepsplit.analyzer.watch.records import RankSample, WatchSample
from stepsplit.collectors.watch_notes import RankWindow

MS = 1_000_000


def build_window(number: int, step_ms: float, steps: int = 20) -> RankWindow:
    first, step_ns = steps * number, round(step_ms * MS)
    return RankWindow(
        rank=0, first_step=first, last_step=first + steps - 1, start_unix_ns=number,
        end_unix_ns=number + 1, steps=steps, min_step_ns=step_ns, median_step_ns=step_ns,
        max_step_ns=step_ns,
    )  # fmt: skip


def follow(steps_ms: Iterable[float], point_steps: int = 20) -> list[tuple[int, StepTimeChange]]:
    """(number of the window, change) of the changes that begin or end."""
    level, found = StepLevel(), []
    for number, step_ms in enumerate(steps_ms):
        level, change = level.add(build_window(number, step_ms), point_steps)
        found += [] if change is None else [(number, change)]
    return found


def vary(count: int, step_ms: float = 10.0, seed: int = 0) -> list[float]:
    draw = Random(seed)
    return [step_ms * (1 + draw.gauss(0, 0.01)) for _ in range(count)]


def test_slower_steps_are_a_change_since_their_first_and_end_when_they_are_over() -> None:
    (begin, change), (end, over) = follow([10.0] * 100 + [12.0] * 30 + [10.0] * 60)

    assert (begin, change) == (102, StepTimeChange(2_000, 100, 10 * MS, 12 * MS))
    assert change.describe() == "steps take 12.0 ms since step 2000, 10.0 ms before (+20.0 %)"
    assert (end, over.is_over, over.step) == (132, True, 2_000)
    assert over.describe() == "steps take 10.0 ms again, as before step 2000"


def test_a_change_that_lasts_becomes_the_level_and_the_next_one_is_found() -> None:
    found = follow(vary(100) + vary(100, 12.0) + vary(60, 14.0))

    assert [change.step // 20 for _, change in found] == [100, 200]
    assert [change.is_over for _, change in found] == [False, False]


def test_single_slow_points_and_noise_are_no_change() -> None:
    steps_ms = vary(2_000)
    for spike in range(70, 2_000, 97):
        steps_ms[spike] *= 3
    assert follow(steps_ms) == []


def test_below_five_percent_is_no_change_however_quiet_the_steps_are() -> None:
    assert follow([10.0] * 100 + [10.49] * 100) == []
    assert len(follow([10.0] * 100 + [10.51] * 100)) == 1


def test_a_point_has_the_steps_between_two_samples() -> None:
    ((number, change),) = follow([10.0] * 240 + [12.0] * 30, point_steps=80)
    # Four windows of 20 steps are a point: the third of the new ones is complete with the twelfth.
    assert (number, change.step) == (251, 4_800)


def build_sample(step: int, idle_ms: int, caused_ms: int) -> WatchSample:
    ranks = tuple(
        RankSample(
            rank=rank,
            split=Split(
                compute_ns=8 * MS, skew_ns=(1 - rank) * caused_ms * MS, idle_ns=idle_ms * MS
            ),
            caused_wait_ns=rank * caused_ms * MS,
        )
        for rank in (0, 1)
    )
    return WatchSample(id=str(step), step=step, steps=2, unix_ns=step, ranks=ranks)


def test_a_change_is_explained_by_the_bucket_that_grew_and_the_rank_that_others_wait_for() -> None:
    before = [summarize_sample(build_sample(step, 1, 0)) for step in (100, 200, 300)]
    slow, now = build_sample(400, 1, 4), build_sample(400, 3, 0)

    assert summarize_sample(slow) == SampleSplit(
        400, Split(compute_ns=8 * MS, skew_ns=2 * MS, idle_ns=MS), 1, 4 * MS
    )
    assert explain_change(before, summarize_sample(slow)) == (
        "mostly skew: +2.00 ms in the mean of the ranks; others wait 4.00 ms for rank 1"
    )
    assert explain_change(before, summarize_sample(now)) == (
        "mostly idle: +2.00 ms in the mean of the ranks"
    )
    assert explain_change([], summarize_sample(now)) == (
        "no sample before the change to compare with"
    )
