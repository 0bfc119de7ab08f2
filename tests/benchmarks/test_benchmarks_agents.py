"""The questions of docs/agents.md: the tools and SKILL.md's table lead to the truth."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.required import absent

from benchmarks.agent_questions import (
    REFUSED,
    REPRO,
    ask_all,
    find_tool,
    format_table,
    judge,
    list_repro_questions,
    list_sample_questions,
)
from stepsplit.dashboard.agents.answers import MAX_TOKENS

pytestmark = pytest.mark.slow


def test_the_samples_are_answered_rightly_or_refused() -> None:
    outcomes = ask_all(list_sample_questions())

    assert {one.verdict for one in outcomes} == {"right", "refused rightly"}, format_table(outcomes)
    assert max(one.tokens for one in outcomes) <= MAX_TOKENS


def test_other_jobs_are_answered_rightly() -> None:
    if not REPRO.is_dir():
        absent("traces", "the recordings of other jobs are not on this machine")
    outcomes = ask_all(list_repro_questions())
    right = sum(one.verdict == "right" for one in outcomes)

    assert right >= 0.85 * len(outcomes), format_table(outcomes)
    assert sum(one.verdict == "wrong" for one in outcomes) < 0.1 * len(outcomes)


def test_there_are_forty_and_a_wrong_answer_is_wrong() -> None:
    questions = list_sample_questions()
    if REPRO.is_dir():
        assert len(questions) + len(list_repro_questions()) == 40
    verdicts = [judge(one, one.truth) for one in questions]
    assert {*verdicts} == {"right", "refused rightly"}
    assert {judge(one, "x") for one in questions} == {"wrong"}
    assert {judge(replace(one, truth=1.0), REFUSED) for one in questions} == {"refused wrongly"}
    assert {find_tool(one.kind) for one in questions} >= {"findings", "summary", "check"}
