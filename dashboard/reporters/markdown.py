"""A verdict as markdown: a pull request's comment, or the summary of a workflow's step."""

from __future__ import annotations

from collections.abc import Sequence

from stepsplit.analyzer.regression.check_result import Judged, Verdict
from stepsplit.dashboard.reporters.verdict_words import (
    MARKS,
    change,
    detectable,
    headline,
    interval,
    sides,
    value,
)

COMMENT_BYTES = 64 << 10
"""GitHub refuses longer comments."""
_CUT = "\n\n(cut: the whole verdict is in the JSON file)\n"
_GATED = ("metric", "budget", "baseline", "candidate", "change", "96 % interval", "detectable", "")
_CALLS = ("calls a step", "of", "baseline", "candidate")
_MOST_CALLS = 20


def markdown(verdict: Verdict, most_bytes: int = COMMENT_BYTES) -> str:
    """The verdict, at most so many bytes of it."""
    blocks = [
        f"### stepsplit {MARKS[verdict.answer]} {_plain(headline(verdict))}",
        _plain(sides(verdict)),
        *(f"> {_plain(one)}" for one in verdict.warnings),
        _table(_GATED, [_gated(one) for one in verdict.gated]),
        *(f"{_code(one.metric)}: {_plain(one.note)}" for one in verdict.gated if one.note),
        *_why(verdict),
        *_calls(verdict),
    ]
    return _cut("\n\n".join(blocks) + "\n", most_bytes)


def _gated(one: Judged) -> list[str]:
    return [
        _code(one.metric), _code(one.budget), value(one.metric, one.baseline),
        value(one.metric, one.candidate), change(one), interval(one), detectable(one),
        f"{MARKS[one.answer]} {one.answer}",
    ]  # fmt: skip


def _why(verdict: Verdict) -> list[str]:
    if not verdict.causes:
        return []
    told = [f"{i}. {_plain(cause.message)}" for i, cause in enumerate(verdict.causes, 1)]
    url = verdict.compare_url
    link = [] if url is None else [f"[Both sides, page by page]({url})"]
    return ["**Why**", "\n".join(told), *link]


def _calls(verdict: Verdict) -> list[str]:
    rows = [
        [_code(f"{row.axis} {row.op}"), value("bytes", row.message_bytes), f"{row.baseline:,}",
         f"{row.candidate:,}"]
        for row in verdict.calls[:_MOST_CALLS]
    ]  # fmt: skip
    return [_table(_CALLS, rows)] if rows else []


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _code(text: str) -> str:
    kept = (letter for letter in text if letter.isprintable() and letter not in "`|")
    return f"`{''.join(kept)}`"


def _plain(text: str) -> str:
    """Text of a recording, which must not become markup, links or mentions."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    for mark in "\\`*_[]<>|#@":
        text = text.replace(mark, f"\\{mark}" if mark not in "<>@" else f"&#{ord(mark)};")
    return " ".join(text.split())


def _cut(text: str, most_bytes: int) -> str:
    body = text.encode()
    if len(body) <= most_bytes:
        return text
    if most_bytes < len(_CUT.encode()):
        return ""
    kept = body[: most_bytes - len(_CUT.encode())].decode(errors="ignore")
    return kept.rpartition("\n")[0] + _CUT
