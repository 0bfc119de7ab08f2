"""The result of a check for GitHub: Markdown of a comment or a summary, and annotations."""

from __future__ import annotations

from collections.abc import Sequence

from stepsplit.analyzer.regression.checks import CheckResult
from stepsplit.collectors.safe_io.safe_text import escape_controls, format_workflow_command
from stepsplit.dashboard.reporters.verdict import (
    MARKS,
    format_detectable,
    format_headline,
    format_line,
    format_needs,
    format_numbers,
    format_sides,
    format_value,
    sort_exact_first,
)

# Markdown for a pull request comment, or for the summary of a workflow step.

COMMENT_BYTES = 64 << 10
"""GitHub rejects longer comments."""

_CUT = "\n\n(truncated: the complete result is in the JSON file)\n"

_GATED_COLUMNS = (
    "metric",
    "budget",
    "baseline",
    "candidate",
    "change",
    "96 % interval",
    "detectable",
    "",
)

_CALLS_COLUMNS = ("calls per step", "size", "baseline", "candidate")

_MOST_CALLS = 20


def format_markdown(verdict: CheckResult, most_bytes: int = COMMENT_BYTES) -> str:
    """The check result as markdown, truncated to most_bytes."""
    gated = [
        [
            _escape_code(one.metric),
            _escape_code(one.budget),
            *format_numbers(one),
            format_detectable(one),
            f"{MARKS[one.answer]} {one.answer}",
        ]
        for one in sort_exact_first(verdict.gated)
    ]
    blocks = [
        f"### stepsplit {MARKS[verdict.answer]} {_escape_text(format_headline(verdict))}",
        _escape_text(format_sides(verdict)),
        *(f"> {_escape_text(one)}" for one in verdict.warnings),
        _format_table(_GATED_COLUMNS, gated),
        *(
            f"{_escape_code(one.metric)}: {_escape_text(one.note)}"
            for one in verdict.gated
            if one.note
        ),
        *(_escape_text(text) for one in verdict.gated if (text := format_needs(one))),
    ]
    if verdict.causes:
        lines = (f"{i}. {_escape_text(one.message)}" for i, one in enumerate(verdict.causes, 1))
        blocks += ["**Causes**", "\n".join(lines)]
        if verdict.compare_url is not None:
            blocks.append(f"[Comparison in the dashboard]({verdict.compare_url})")
    if verdict.calls:
        calls = [
            [
                _escape_code(f"{row.axis} {row.op}"),
                format_value("bytes", row.message_bytes),
                f"{row.baseline:,}",
                f"{row.candidate:,}",
            ]
            for row in verdict.calls[:_MOST_CALLS]
        ]
        blocks.append(_format_table(_CALLS_COLUMNS, calls))
    text = "\n\n".join(blocks) + "\n"
    if len(text.encode()) <= most_bytes:
        return text
    # GitHub and GitLab refuse a longer one: it is cut after its last whole line, and says so.
    n_kept = most_bytes - len(_CUT.encode())
    if n_kept < 0:
        return ""
    kept = text.encode()[:n_kept].decode(errors="ignore")
    return kept.rpartition("\n")[0] + _CUT


def _format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _escape_code(text: str) -> str:
    return f"`{escape_controls(text).translate({ord('`'): None, ord('|'): None})}`"


def _escape_text(text: str) -> str:
    """Escapes text of a recording, so that it cannot become markup, links or mentions."""
    return " ".join(escape_controls(text).translate(_ESCAPED).split())


_ESCAPED = str.maketrans(
    {mark: f"\\{mark}" for mark in "\\`*_[]|#"} | {mark: f"&#{ord(mark)};" for mark in "<>@"}
)


# GitHub Actions: annotations and the job summary, within the limits of GitHub.

SUMMARY_BYTES = 1 << 20
"""GitHub rejects a larger summary of a step."""

MAX_ANNOTATIONS = 10
"""Maximum number of errors, and of warnings, per step; GitHub silently drops the rest."""


def format_annotations(verdict: CheckResult) -> list[str]:
    """Annotation lines to print.

    One error per regressed metric, one per cause, one warning per inconclusive metric.
    """
    errors, warnings = [], []
    for one in verdict.gated:
        if one.answer == "regressed":
            errors.append(
                format_workflow_command("error", "stepsplit: regressed", format_line(one))
            )
        elif one.answer == "inconclusive":
            text = format_line(one)
            warnings.append(format_workflow_command("warning", "stepsplit: inconclusive", text))
    errors += [
        format_workflow_command("error", "stepsplit: cause", cause.message)
        for cause in verdict.causes
    ]
    warnings += [format_workflow_command("warning", "stepsplit", text) for text in verdict.warnings]
    return [*errors[:MAX_ANNOTATIONS], *warnings[:MAX_ANNOTATIONS]]


def format_summary(verdict: CheckResult, existing_bytes: int = 0) -> str:
    """The markdown to append to a step summary, whose present size is given."""
    return format_markdown(verdict, SUMMARY_BYTES - existing_bytes)
