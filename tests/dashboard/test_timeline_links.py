"""What a finding says is where its link to the timeline leads."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from support.samples import read_golden

from stepsplit.analyzer.report.report import EventRef, Finding, Report
from stepsplit.dashboard.pages.timeline_links import build_evidence_url

RUN = "abcdef012345"


def find_evidence(report: Report, code: str, **changes: object) -> dict[str, str]:
    finding = next(one for one in report.findings if one.code == code)
    finding = msgspec.structs.replace(finding, **changes)
    return parse(build_evidence_url(report, finding, RUN))


def parse(url: str | None) -> dict[str, str]:
    assert url is not None
    parts = urlsplit(url)
    assert parts.path == f"/run/{RUN}/timeline"
    return {name: values[0] for name, values in parse_qs(parts.query).items()}


def test_a_straggler_is_shown_with_who_waits_for_it_in_its_step() -> None:
    report = read_golden("built_tp_pp_dp_slow_rank")
    asked = find_evidence(report, "slow_rank")
    event = next(one for one in report.findings if one.code == "slow_rank").events[0]
    # Most waits for rank 3 are those of rank 1, its peer along dp_replicate.
    assert (asked["rank"], asked["show"], asked["open"]) == ("3", "1,3", "3,1")
    assert asked["measure"] == f"{event.start_ns}-{event.start_ns + event.dur_ns}"
    (row,) = [one for one in report.steps if one.rank == 3 and str(one.step) == asked["step"]]
    assert row.start_ns <= event.start_ns < row.start_ns + row.step_ns


def test_a_long_event_is_shown_with_what_comes_after_it() -> None:
    report = read_golden("built_ddp_host_stall")
    asked = find_evidence(report, "allocation")
    event = report.findings[0].events[0]
    assert int(asked["from"]) < event.start_ns
    assert int(asked["to"]) > event.start_ns + 2 * event.dur_ns
    # All four ranks of the run are in the group: nothing is to be left out.
    assert "show" not in asked and asked["open"] == "0,1,2"


def test_a_finding_on_all_ranks_is_shown_on_the_one_with_most_of_it() -> None:
    report = read_golden("h100_pp2")
    asked = find_evidence(report, "host_bound")
    assert report.summary is not None
    worst = {row.bucket: row.worst_rank for row in report.summary.buckets}
    assert (asked["rank"], asked["step"]) == (str(worst["idle"]), "5")


def test_a_finding_of_many_ranks_shows_some_of_them() -> None:
    report = read_golden("built_tp_pp_dp_slow_rank")
    every = tuple(range(8))
    asked = find_evidence(report, "slow_rank", ranks=every, events=())
    assert asked["open"] == "0,1" and "show" not in asked


@pytest.mark.parametrize("changes", [{"steps": ()}, {"events": ()}])
def test_a_finding_without_steps_or_events_has_a_place(changes: dict[str, object]) -> None:
    report = read_golden("built_tp_pp_dp_slow_rank")
    assert find_evidence(report, "slow_rank", **changes)["step"]


def test_an_event_between_two_steps_is_shown_by_its_time() -> None:
    report = read_golden("built_ddp_host_stall")
    event = msgspec.structs.replace(report.findings[0].events[0], start_ns=-(10**15))
    assert isinstance(event, EventRef)
    asked = find_evidence(report, "allocation", events=(event,))
    assert int(asked["from"]) < event.start_ns < int(asked["to"]) and "step" not in asked


def test_without_a_step_there_is_no_place() -> None:
    report = read_golden("h100_pp2")
    finding: Finding = report.findings[0]
    assert build_evidence_url(msgspec.structs.replace(report, steps=()), finding, RUN) is None
