"""Closed forms of the bubble against the published table and the simulation."""

from __future__ import annotations

import csv

import pytest

from stepsplit.analyzer.model.schedule_graph import ScheduleTimeline, build_graph, simulate
from stepsplit.analyzer.model.schedule_names import Schedule
from stepsplit.analyzer.model.schedule_time import compute_bubble_ns, compute_bubble_rate
from stepsplit.analyzer.validation.tables import PUBLISHED

TABLE_5 = PUBLISHED / "zero_bubble_table5_9_bubble_rates.csv"
TIMES = (10.0, 9.0, 5.0)


def published() -> list[dict[str, str]]:
    with TABLE_5.open(newline="") as file:
        return list(csv.DictReader(file))


def played(
    schedule: Schedule,
    p: int,
    m: int,
    times: tuple[float, float, float] = TIMES,
    chunks: int = 1,
    transfer_ns: float = 0.0,
) -> ScheduleTimeline:
    forward, inputs, weights = times
    costs = ((forward / chunks, inputs / chunks, weights / chunks),) * (p * chunks)
    return simulate(build_graph(schedule, p, m, chunks), costs, transfer_ns)


def own_idle_ns(timeline: ScheduleTimeline) -> float:
    """The longest idle time of a rank between its own first forward and its own last pass."""
    return max(
        ends[-1] - starts[0] - busy
        for starts, ends, busy in zip(
            timeline.starts_ns, timeline.ends_ns, timeline.busy_ns, strict=True
        )
    )


@pytest.mark.parametrize(
    ("schedule", "column"),
    [
        ("1f1b", "bubble_1F1B"),
        ("interleaved", "bubble_1F1B_I"),
        ("zb-h1", "bubble_ZB_H1"),
        ("zb-h1", "bubble_ZB_1p"),
        ("zb-h2", "bubble_ZB_H2"),
    ],
)
def test_the_bubble_rates_that_the_zero_bubble_paper_prints(schedule: str, column: str) -> None:
    """Qi et al., table 5 from the times of table 9."""
    for row in published():
        forward, inputs, weights = (float(row[f"{kind}_ms"]) for kind in ("TF", "TB", "TW"))
        p, m, chunks = (int(row[key]) for key in ("pp", "num_microbatches", "vpp_max_chunks"))
        rate = compute_bubble_rate(
            schedule, p, m, (forward, inputs, weights), chunks, float(row["Tcomm_ms"])
        )
        assert rate == pytest.approx(float(row[column]), abs=1e-4)


@pytest.mark.parametrize(
    ("schedule", "column"),
    [("1f1b", "bubble_1F1B"), ("zb-h1", "bubble_ZB_H1"), ("zb-h2", "bubble_ZB_H2")],
)
def test_simulating_the_orders_gives_the_published_rates(schedule: Schedule, column: str) -> None:
    """Messages delay the receiver; in the paper senders never wait."""
    for row in published():
        times = (float(row["TF_ms"]), float(row["TB_ms"]), float(row["TW_ms"]))
        p, m = int(row["pp"]), int(row["num_microbatches"])
        idle = own_idle_ns(played(schedule, p, m, times, 1, float(row["Tcomm_ms"])))
        assert idle / (idle + m * sum(times)) == pytest.approx(float(row[column]), abs=1e-4)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("transfer_ns", [0.0, 0.01])
def test_the_bubble_of_equal_stages_matches_the_closed_form(
    schedule: Schedule, transfer_ns: float
) -> None:
    for p in (2, 4, 5, 8):
        for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 21, 24):
            closed = compute_bubble_ns(schedule, p, m, TIMES, 1, transfer_ns)
            timeline = played(schedule, p, m, TIMES, 1, transfer_ns)
            assert own_idle_ns(timeline) == pytest.approx(closed), (p, m)


@pytest.mark.parametrize(("p", "m", "chunks"), [(2, 4, 2), (4, 4, 3), (4, 16, 2), (8, 24, 3)])
def test_interleaved_idles_p_messages_longer_than_the_paper_counts(
    p: int, m: int, chunks: int
) -> None:
    closed = compute_bubble_ns("interleaved", p, m, TIMES, chunks)
    assert own_idle_ns(played("interleaved", p, m, TIMES, chunks)) == pytest.approx(closed)
    with_messages = compute_bubble_ns("interleaved", p, m, TIMES, chunks, transfer_ns=0.01)
    assert with_messages is not None
    timeline = played("interleaved", p, m, TIMES, chunks, transfer_ns=0.01)
    assert own_idle_ns(timeline) == pytest.approx(with_messages + p * 0.01)


def test_with_no_more_microbatches_than_ranks_only_one_weight_gradient_is_not_hidden() -> None:
    """Qi et al., appendix H: makespan (m + p - 1) (TF + TB) + TW, and (m + p - 1) T for 1F1B."""
    p, m, (forward, inputs, weights) = 8, 5, TIMES
    split = (m + p - 1) * (forward + inputs) + weights
    assert played("zb-h1", p, m).makespan_ns == split
    assert compute_bubble_ns("zb-h1", p, m, TIMES) == split - m * sum(TIMES)
    assert played("1f1b", p, m).makespan_ns == (m + p - 1) * sum(TIMES)


def test_the_window_of_zb_h2_has_at_least_the_forwards_that_the_last_rank_waits_for() -> None:
    timeline = played("zb-h2", 4, 16)
    assert own_idle_ns(timeline) == compute_bubble_ns("zb-h2", 4, 16, TIMES) == 3 * (10 + 9 - 2 * 5)
    assert timeline.bubbles_ns == (3 * 10,) * 4


def test_schedules_without_a_closed_form_have_none() -> None:
    assert compute_bubble_ns("zb-v", 4, 8, TIMES) is None
    assert compute_bubble_ns("interleaved", 4, 6, TIMES, 2) is None
    assert compute_bubble_rate("dualpipe", 4, 8, TIMES) is None


def test_the_rate_is_of_the_whole() -> None:
    assert compute_bubble_rate("1f1b", 4, 9, (1.0, 1.0, 1.0)) == 3 / 12
