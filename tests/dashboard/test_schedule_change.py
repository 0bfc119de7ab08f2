"""The page Pipeline says what its bubble consists of, and what another schedule would do."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from dash import html
from support.page_text import find, read_cards, read_text
from support.report_builders import MS
from support.samples import SAMPLES

from stepsplit.analyzer import examine
from stepsplit.analyzer.units import format_signed_milliseconds
from stepsplit.dashboard.pages.address import AddressQuery
from stepsplit.dashboard.pages.communication import build_pipeline_page
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.pages.schedule_change import (
    MeasuredPipeline,
    build_change_section,
    build_verdict,
    explain_bubble,
    measure_pipeline,
)

PIPELINES = (
    "h100_pp2", "pp2_m2", "pp2_m8", "tp2_pp2", "tp2_pp2_dp2", "built_tp_pp_dp_slow_rank",
    "built_zero_bubble",
)  # fmt: skip
RUN = "abcdef012345"


def load(name: str) -> View:
    made = examine([SAMPLES / name])
    return View(name, made.report, made.tables, RUN)


def measure(view: View) -> MeasuredPipeline:
    assert view.tables is not None
    measured = measure_pipeline(view.report, view.tables.boxes)
    assert measured is not None
    return measured


@pytest.mark.parametrize("name", PIPELINES)
def test_the_parts_add_up_to_the_measured_bubble(name: str) -> None:
    view = load(name)
    pipeline = view.report.pipeline
    assert pipeline is not None
    parts = explain_bubble(pipeline, measure(view))
    assert sum(one.share for one in parts) == pytest.approx(pipeline.bubble_fraction, abs=1e-9)
    # The schedule's part is the ideal that the report has, which is at most the measured bubble.
    ideal = min(parts[0].share, pipeline.bubble_fraction)
    assert ideal == pytest.approx(pipeline.ideal_bubble_fraction, abs=2e-3)
    text = read_text(build_pipeline_page(view, AddressQuery()))
    assert text.startswith("Verdict"), "the verdict is first"


def test_a_bubble_below_that_of_equal_stages_is_not_said_to_be_the_ideal() -> None:
    view = load("tp2_pp2_dp2")
    pipeline = view.report.pipeline
    assert pipeline is not None and pipeline.bubble_fraction < 1 / 3, "(p - 1) / (m + p - 1)"
    page = build_pipeline_page(view, AddressQuery())
    words = (
        "bubble, less than the 33.3 % of 1F1B with 2 microbatches and equal stages, and in this run"
    )
    assert words in read_text(page)
    assert read_cards(page)["pipeline bubble"][1] == "idle / window; not above its ideal"
    assert "dashed: of all stages, not above its ideal" in read_text(page)


def test_the_card_and_the_verdict_name_the_ideal() -> None:
    view = load("tp2_pp2_dp2")
    assert view.report.pipeline is not None
    above = msgspec.structs.replace(
        view.report.pipeline, bubble_fraction=0.4, ideal_bubble_fraction=1 / 3
    )
    report = msgspec.structs.replace(view.report, pipeline=above)
    page = build_pipeline_page(View(view.name, report, None), AddressQuery())
    assert read_cards(page)["pipeline bubble"] == ("40.0 %", "idle / window; ideal 33.3 %")
    assert "40.0 % of the pipeline window is bubble; ideal 33.3 %." in read_text(page)


def make_pipeline(*costs: float, microbatches: int = 4, transfer_ns: float = 0.0):  # type: ignore[no-untyped-def]
    """Stages that take so many ms for a forward, and twice that for a backward."""
    passes = tuple((one * MS, one * MS, one * MS) for one in costs)
    return MeasuredPipeline("1f1b", len(costs), microbatches, 1, passes, transfer_ns)


def test_stages_of_equal_length_have_the_bubble_of_the_formula() -> None:
    measured = make_pipeline(1.0, 1.0, microbatches=4)
    now = measured.simulate(measured.costs, 0.0)
    assert now.bubble_fraction == pytest.approx(1 / 5)
    assert now.makespan_ns == pytest.approx(5 * 3 * MS)
    # Twice as many microbatches of half the size: (p - 1) / (m + p - 1), the same work.
    new = measured.simulate(measured.costs, 0.0, microbatches=8)
    assert new.bubble_fraction == pytest.approx(1 / 9)
    assert new.makespan_ns == pytest.approx(9 * 1.5 * MS)


def test_what_makes_the_rest_is_named_by_its_cause() -> None:
    view = load("h100_pp2")
    assert view.report.pipeline is not None
    pipeline = msgspec.structs.replace(view.report.pipeline, bubble_fraction=0.5)
    even = {one.words: one.share for one in explain_bubble(pipeline, make_pipeline(1.0, 1.0))}
    assert even["stages of unequal length"] == even["messages between stages"] == 0
    uneven = {one.words: one.share for one in explain_bubble(pipeline, make_pipeline(1.0, 2.0))}
    assert uneven["stages of unequal length"] > 0.1
    slow = make_pipeline(1.0, 1.0, transfer_ns=1.0 * MS)
    sent = {one.words: one.share for one in explain_bubble(pipeline, slow)}
    assert sent["messages between stages"] > 0.05 and sent["stages of unequal length"] == 0


def test_controls_are_in_the_address_and_change_the_step() -> None:
    view = load("h100_pp2")
    measured = measure(view)

    def ask(**values: str) -> tuple[str, dict[str, tuple[str, str]]]:
        section = build_change_section(view, measured, AddressQuery(values))
        return read_text(section), read_cards(section)

    text, same = ask()
    assert same["change of the step"] == ("none", "of the mean step of 22.15 ms")
    assert "as efficient" not in text
    _, equal = ask(stages="equal")
    assert equal["change of the step"][0].startswith("-")
    text, more = ask(microbatches="8")
    assert "as efficient on smaller microbatches" in text
    assert float(more["simulated bubble"][0].split()[0]) < float(
        same["simulated bubble"][0].split()[0]
    )
    _, free = ask(messages="free")
    _, half = ask(messages="half")
    windows = [float(one["simulated window"][0].split()[0]) for one in (free, half, same)]
    assert windows == sorted(windows)
    # What cannot be is said, and odd choices are those as recorded.
    assert "at most 4,096" in ask(microbatches="9999999")[0]
    assert ask(microbatches="0", schedule="<b>", stages="x", messages="y")[1] == same
    assert build_change_section(replace(view, run_id=""), measured, AddressQuery()) == []


def test_only_schedules_that_fit_are_offered() -> None:
    measured = make_pipeline(1.0, 1.0)
    assert set(measured.list_schedules(4)) >= {"1f1b", "gpipe", "zb-h1"}
    assert not {"interleaved", "zb-v", "dualpipe-v"} & set(measured.list_schedules(4))
    section = build_change_section(load("h100_pp2"), measured, AddressQuery({"schedule": "zb-h1"}))
    (menu,) = [one for one in find(section, html.Select)
               if getattr(one, "data-choice") == "schedule"]  # fmt: skip
    assert [one.value for one in menu.children if one.selected] == ["zb-h1"]


def test_a_pipeline_of_an_unknown_schedule_has_its_measured_bubble_only() -> None:
    view = load("h100_pp2")
    assert view.report.pipeline is not None and view.tables is not None
    pipeline = msgspec.structs.replace(
        view.report.pipeline, schedule=None, ideal_bubble_fraction=None
    )
    report = msgspec.structs.replace(view.report, pipeline=pipeline)
    assert measure_pipeline(report, view.tables.boxes) is None
    words = read_text(build_verdict(pipeline, None))
    assert "48.3 % of the pipeline window is bubble; the schedule is unknown" in words
    assert "Verdict" in read_text(build_pipeline_page(replace(view, report=report), AddressQuery()))


def test_the_straggler_is_left_out_by_the_replay_of_its_finding() -> None:
    view = load("built_tp_pp_dp_slow_rank")
    finding = next(one for one in view.report.findings if one.ranks)
    (rank,) = finding.ranks

    def show(**chosen: str) -> object:
        return build_change_section(view, measure(view), AddressQuery(chosen))

    (menu,) = [one for one in find(show(), html.Select) if getattr(one, "data-choice") == "without"]
    assert [one.value for one in menu.children][:2] == ["", str(rank)]
    before, after = read_cards(show()), read_cards(show(without=str(rank)))
    label = f"without rank {rank}"
    assert label not in before and before.items() <= after.items(), "the schedule stays"
    assert after[label][0] == format_signed_milliseconds(-finding.gain_ns)
    assert finding.message in read_text(show(without=str(rank)))
    assert read_cards(show(without="99")) == before
    assert not find_menu(load("pp2_m2"), "without")


def find_menu(view: View, name: str) -> list[object]:
    section = build_change_section(view, measure(view), AddressQuery())
    return [one for one in find(section, html.Select) if getattr(one, "data-choice") == name]
