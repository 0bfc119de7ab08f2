"""A verdict for GitHub Actions: annotations and the step's summary, within their limits."""

from __future__ import annotations

from collections.abc import Iterator

from stepsplit.analyzer.regression.check_result import Verdict
from stepsplit.dashboard.reporters.markdown import markdown
from stepsplit.dashboard.reporters.verdict_words import one_line

SUMMARY_BYTES = 1 << 20
"""A longer summary of one step is not taken at all."""
MOST = 10
"""So many errors, and so many warnings, of a step are shown; GitHub drops the others silently."""


def workflow_commands(verdict: Verdict) -> list[str]:
    """Annotations, to be printed: an error a regressed metric, then its causes; a warning an
    inconclusive one."""
    errors = [_command("error", title, text) for title, text in _errors(verdict)]
    unsure = [one for one in verdict.gated if one.answer == "inconclusive"]
    warnings = [_command("warning", "stepsplit: inconclusive", one_line(one)) for one in unsure]
    warnings += [_command("warning", "stepsplit", told) for told in verdict.warnings]
    return [*errors[:MOST], *warnings[:MOST]]


def summary(verdict: Verdict, held_bytes: int = 0) -> str:
    """What to add to a step's summary that holds so many bytes already."""
    return markdown(verdict, SUMMARY_BYTES - held_bytes)


def _errors(verdict: Verdict) -> Iterator[tuple[str, str]]:
    for one in verdict.gated:
        if one.answer == "regressed":
            yield "stepsplit: regressed", one_line(one)
    for cause in verdict.causes:
        yield "stepsplit: why", cause.message


def _command(kind: str, title: str, text: str) -> str:
    return f"::{kind} title={_property(title)}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
