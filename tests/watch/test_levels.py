"""A change of the step time or of a rank's lateness is found once, with its first step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import pytest
from msgspec.structs import replace

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.watch.levels import (
    ChangeCause,
    HostLateness,
    OnlineChange,
    SampleSplit,
    StepLevel,
    describe_step_change,
    explain_change,
    explain_drift,
    summarize_sample,
)
from stepsplit.analyzer.watch.records import RankFinding, RankSample, WatchSample
from stepsplit.collectors.formats.watch_notes import RankWindow

MS = 1_000_000


def build_window(
    number: int, step_ms: float, steps: int = 20, rank: int = 0, local_ms: float = 0.0
) -> RankWindow:
    first, step_ns = steps * number, round(step_ms * MS)
    return RankWindow(
        rank=rank, first_step=first, last_step=first + steps - 1, start_unix_ns=number,
        end_unix_ns=number + 1, steps=steps, min_step_ns=step_ns, median_step_ns=step_ns,
        max_step_ns=step_ns, local_ns=round(local_ms * MS),
    )  # fmt: skip


def follow(steps_ms: Iterable[float], point_steps: int = 20) -> list[tuple[int, OnlineChange]]:
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

    assert (begin, change) == (102, OnlineChange(2_000, 100, 10 * MS, 12 * MS))
    assert (
        describe_step_change(change)
        == "steps take 12.0 ms since step 2000, 10.0 ms before (+20.0 %)"
    )
    assert (end, over.is_over, over.step) == (132, True, 2_000)
    assert describe_step_change(over) == "steps take 10.0 ms again, as before step 2000"


def test_a_change_that_lasts_becomes_the_level_and_the_next_one_is_found() -> None:
    found = follow(vary(100) + vary(100, 12.0) + vary(60, 14.0))

    assert [change.step // 20 for _, change in found] == [100, 200]
    assert [change.is_over for _, change in found] == [False, False]


def test_a_further_change_is_found_while_the_first_is_open() -> None:
    first, second = follow(vary(100) + vary(20, 12.0) + vary(30, 15.0))

    assert [change.step // 20 for _, change in (first, second)] == [100, 120]
    assert second[0] == 122
    assert second[1].before_ns == pytest.approx(12 * MS, rel=0.02)
    assert second[1].after_ns == pytest.approx(15 * MS, rel=0.02)


def test_single_slow_points_and_noise_are_no_change() -> None:
    steps_ms = vary(2_000)
    for spike in range(70, 2_000, 97):
        steps_ms[spike] *= 3
    assert follow(steps_ms) == []


def test_at_the_begin_twenty_points_are_a_reference_of_wider_limits() -> None:
    ((_, change),) = follow([10.0] * 20 + [11.0] * 5)
    assert change.step == 400
    assert follow([10.0] * 19 + [11.0] * 4) == []
    assert follow([10.0] * 20 + [10.7] * 5) == []


def test_below_five_percent_is_no_change_however_quiet_the_steps_are() -> None:
    assert follow([10.0] * 100 + [10.49] * 100) == []
    assert len(follow([10.0] * 100 + [10.51] * 100)) == 1


def restart(
    level: StepLevel, steps_ms: Iterable[float], point_steps: int = 20
) -> tuple[StepLevel, list[str]]:
    """The level of a further start with these windows, and its comparisons with the last one."""
    level, texts = level.restart(), []
    for number, step_ms in enumerate(steps_ms):
        level, change = level.add(build_window(number, step_ms), point_steps)
        assert change is None
        texts += filter(None, [level.describe_restart()])
    return level, texts


def test_a_restart_is_compared_with_the_last_level_once() -> None:
    first, texts = restart(StepLevel(), [10.0] * 30)
    assert texts == []

    second, texts = restart(first, [12.0] * 60)
    assert texts == ["steps take 12.0 ms since this start, 10.0 ms before the restart (+20.0 %)"]

    short, texts = restart(second, [500.0] * 4)
    assert texts == [], "too few points to compare"
    _, texts = restart(short, [11.0] * 40, point_steps=80)
    assert texts == ["steps take 11.0 ms since this start, 12.0 ms before the restart (-8.3 %)"]


def test_after_a_change_a_restart_is_compared_with_the_level_since_then() -> None:
    level = StepLevel()
    for number, step_ms in enumerate([10.0] * 100 + [12.0] * 20):
        level, _ = level.add(build_window(number, step_ms), 20)

    _, texts = restart(level, [10.0] * 5)

    assert texts == ["steps take 10.0 ms since this start, 12.0 ms before the restart (-16.7 %)"]


def test_a_point_has_the_steps_between_two_samples() -> None:
    ((number, change),) = follow([10.0] * 240 + [12.0] * 30, point_steps=80)
    # Four windows of 20 steps are a point: the third of the new ones is complete with the twelfth.
    assert (number, change.step) == (251, 4_800)


def follow_ranks(local_ms: Iterable[Sequence[float]], step_ms: float = 10.0) -> list[str]:
    """The drifts of a host whose ranks have these local times, a window each."""
    known, found = HostLateness(), []
    for number, own in enumerate(local_ms):
        windows = [
            build_window(number, step_ms, rank=rank, local_ms=ms) for rank, ms in enumerate(own)
        ]
        known, drifts = known.add(windows, range(len(own)), 20)
        found += [drift.describe() for drift in drifts]
    return found


def test_a_rank_that_becomes_later_than_the_others_is_named_until_it_is_not_any_more() -> None:
    usual, late = [6.0, 6.0, 6.1, 6.0], [6.0, 6.0, 8.1, 6.0]

    assert follow_ranks([usual] * 100 + [late] * 20 + [usual] * 20) == [
        "rank 2 is 2.10 ms later than the other ranks of its host since step 2000, 0.10 ms before",
        "rank 2 is 0.10 ms late again, as before step 2000",
    ]


def test_of_two_ranks_the_later_one_is_named() -> None:
    assert follow_ranks([[6.0, 6.0]] * 100 + [[7.0, 6.0]] * 20) == [
        "rank 0 is 1.00 ms later than the other ranks of its host since step 2000, 0.00 ms before"
    ]


def test_ranks_that_become_slower_together_are_their_hosts() -> None:
    assert follow_ranks([[6.0, 6.1, 6.0]] * 100 + [[8.0, 8.1, 8.0]] * 20) == [
        "the ranks of this host need 8.00 ms to their last gradient since step 2000, 6.00 ms before"
    ]


def test_what_is_below_five_percent_of_the_step_or_earlier_or_unknown_is_no_drift() -> None:
    assert follow_ranks([[6.0, 6.0]] * 100 + [[6.49, 6.0]] * 50) == []
    assert follow_ranks([[6.0, 6.0, 6.0]] * 100 + [[6.0, 4.0, 6.0]] * 50) == []
    assert follow_ranks([[6.0, 0.0]] * 100 + [[9.0, 0.0]] * 50) == []


def test_ranks_whose_windows_come_late_or_are_of_other_lengths_are_compared_by_their_steps() -> (
    None
):
    known, found = HostLateness(), []
    for number in range(60):
        # Rank 1 closes one window where rank 0 closes two, and is read later.
        own = [build_window(2 * number + each, 10, 20, 0, 6) for each in (0, 1)]
        known, drifts = known.add(own, (0, 1), 40)
        found += drifts
        late_ms = 6 if number < 56 else 9
        known, drifts = known.add([build_window(number, 10, 40, 1, late_ms)], (0, 1), 40)
        found += drifts

    assert [(each.rank, each.change.step) for each in found] == [(1, 40 * 56)]


def build_sample(step: int, idle_ms: Sequence[int], late_rank: int | None = None) -> SampleSplit:
    """All wait for the late rank for as long as it is idle longer than the others."""
    least, most = min(idle_ms), max(idle_ms)
    ranks = tuple(
        RankSample(
            rank=rank,
            split=Split(compute_ns=8 * MS, idle_ns=own * MS, skew_ns=(most - own) * MS),
            caused_wait_ns=(most - least) * MS if rank == late_rank else 0,
        )
        for rank, own in enumerate(idle_ms)
    )
    whole = WatchSample(id=str(step), step=step, steps=2, unix_ns=step, ranks=ranks)
    return summarize_sample(whole, own=(0, 1))


BEFORE = [build_sample(step, (1, 1, 1)) for step in (100, 200, 300)]


def test_a_change_is_explained_by_what_grew_on_the_rank_that_others_wait_for() -> None:
    """Rank 1 becomes idle; on the two that wait it is skew that grows, more in the mean."""
    since = [build_sample(step, (1, 5, 1), late_rank=1) for step in (400, 500)]

    found = explain_change(BEFORE, since)

    assert found == ChangeCause("rank 1: mostly idle: +4.00 ms; others wait 4.00 ms for it", 1)
    assert explain_drift(BEFORE, since, 1) == "rank 1: mostly idle: +4.00 ms"
    # Rank 0 waits longer, which is not its own doing.
    assert explain_drift(BEFORE, since, 0) == "rank 0: mostly compute: 0.00 ms"


def test_a_finding_that_blames_the_rank_for_what_has_grown_follows() -> None:
    """Rank 1 has more compute as well, as before: that does not explain why it has become idle."""
    loading = replace(
        build_sample(400, (1, 5, 1), late_rank=1),
        rank_findings=(
            RankFinding(1, "compute", "rank 1 has 45 % more compute"),
            RankFinding(1, "idle", "rank 1 waits for its data loader 31 % of the step"),
        ),
    )

    text = "rank 1: mostly idle: +4.00 ms (rank 1 waits for its data loader 31 % of the step)"
    assert explain_drift(BEFORE, [loading], 1) == text
    found = explain_change(BEFORE, [loading])
    assert found == ChangeCause(f"{text}; others wait 4.00 ms for it", 1)
    assert "data loader" not in explain_drift(BEFORE, [loading], 0)


def test_a_change_of_all_ranks_is_explained_by_their_mean() -> None:
    since = [build_sample(400, (4, 3, 2))]

    text = "mostly idle: +2.00 ms in the mean of the ranks"
    assert explain_change(BEFORE, since) == ChangeCause(text)
    assert explain_change(since, BEFORE) == ChangeCause(text.replace("+", "-"))
    text = "no sample before the change to compare with"
    assert explain_change([], since) == ChangeCause(text)


def test_a_slow_link_is_explained_by_the_axis_of_its_communication() -> None:
    def linked(step: int, tp_ms: int, dp_ms: int) -> SampleSplit:
        split = Split(compute_ns=8 * MS, collective_ns=(tp_ms + dp_ms) * MS)
        exposed_ns = {"tp": tp_ms * MS, "dp": dp_ms * MS, "": 20 * step * MS}
        ranks = tuple(RankSample(rank=r, split=split, exposed_ns=exposed_ns) for r in (0, 1))
        whole = WatchSample(id=str(step), step=step, steps=2, unix_ns=step, ranks=ranks)
        return summarize_sample(whole, own=(0, 1))

    text = "mostly collective: +2.00 ms in the mean of the ranks"
    found = explain_change([linked(1, 1, 2)], [linked(2, 3, 2)])
    assert found == ChangeCause(f"{text}; exposed communication of tp +2.00 ms")


def test_one_odd_sample_explains_nothing() -> None:
    odd, calm = build_sample(400, (1, 9, 1), late_rank=1), build_sample(400, (3, 3, 3))

    found = explain_change([*BEFORE, odd], [odd, calm, calm])

    assert found == ChangeCause("mostly idle: +2.00 ms in the mean of the ranks")


def test_a_rank_of_another_host_is_compared_with_the_mean_of_the_ranks() -> None:
    late = build_sample(400, (1, 1, 4), late_rank=2)

    assert [each.rank for each in late.ranks] == [0, 1, 2]
    assert [each.rank for each in BEFORE[0].ranks] == [0, 1]
    assert explain_drift(BEFORE, [late], 2) == "rank 2: mostly idle: +3.00 ms"
