"""The plan of a recording: steps, ranks and detail."""

from dataclasses import replace

import pytest

from stepsplit.collectors.formats.run_spec import GroupInfo
from stepsplit.collectors.record.plan import RecordPlan, choose_detail, parse_plan, parse_ranks


def test_a_plan_round_trips() -> None:
    asked = RecordPlan(out="/runs/a", name="a", first=10, steps=3, ranks="0-7,16", memory=True)
    asked = replace(asked, mesh="pp=2,tp=4")

    assert parse_plan(asked.format_json()) == asked


def test_unknown_fields_of_a_newer_plan_are_ignored() -> None:
    assert parse_plan('{"out": "o", "name": "n", "first": null, "novel": 1}') == RecordPlan(
        "o", "n", None
    )


@pytest.mark.parametrize("text", ["3", "{}", '{"out": "o", "name": "n", "first": -1}', "[",
    '{"out": "o", "name": "n", "first": 1, "mesh": "tp"}'])  # fmt: skip
def test_an_invalid_plan_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_plan(text)


def test_ranks_are_parsed_from_lists_and_ranges() -> None:
    assert parse_ranks("0-2, 7") == {0, 1, 2, 7}
    with pytest.raises(ValueError, match="use all, auto or 0-7,16"):
        parse_ranks("one")


PIPELINES = [GroupInfo("3", "mesh_pp", (0, 4, 8, 12)), GroupInfo("4", "mesh_pp", (1, 5, 9, 13))]


@pytest.mark.parametrize(
    ("ranks", "rank", "groups", "kept"),
    [
        ("all", 5, PIPELINES[1:], "full"),
        ("auto", 8, PIPELINES[:1], "full"),
        ("auto", 9, PIPELINES[1:], "thin"),
        ("auto", 0, [], "full"),
        ("auto", 3, [GroupInfo("1", "mesh_dp", (0, 1, 2, 3))], "thin"),
        ("0-3", 3, PIPELINES[1:], "full"),
        ("0-3", 4, PIPELINES[:1], "none"),
    ],
)
def test_auto_records_the_pipeline_of_rank_0_in_full_and_the_others_thin(
    ranks: str, rank: int, groups: list[GroupInfo], kept: str
) -> None:
    assert choose_detail(ranks, rank, 16, tuple(groups)) == kept


def test_auto_records_all_ranks_of_a_small_job_in_full() -> None:
    assert {choose_detail("auto", rank, 8, ()) for rank in range(8)} == {"full"}
