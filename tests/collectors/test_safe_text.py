"""What is shown instead of a character or a mark that a terminal or a CI runner would execute."""

from __future__ import annotations

import io
import json
from typing import cast

import pytest

from stepsplit.collectors.safe_io.safe_text import (
    COLORS,
    SafeStream,
    escape_controls,
    escape_json,
    format_workflow_command,
)

SHOWN = (
    ("rank 0 of c:\\temp", "rank 0 of c:\\temp"),
    ("名前 é नमस्ते 👍🏽 a\u3000b\xa0c", "名前 é नमस्ते 👍🏽 a\u3000b\xa0c"),
    ("\x1b[31mred\x9b0m", r"\x1b[31mred\x9b0m"),
    ("\x1b]0;t\x07", r"\x1b]0;t\x07"),
    ("a\r\n\tb\x0b\x85c\u2028d\u2029", r"a\r\n\tb\x0b\x85c\u2028d\u2029"),
    ("a\u202eb\u2066c\u200f", r"a\u202eb\u2066c\u200f"),
    ("a\u200bb\u200dc\xad\ufeff\U000e0041", r"a\u200bb\u200dc\xad\ufeff\U000e0041"),
    ("\0\x7f\ud800\uffff", r"\x00\x7f\ud800\uffff"),
    ("a ##[add-mask]b", r"a ##\x5badd-mask]b"),
    ("##vso[task.x]b ##teamcity[c ", r"##vso\x5btask.x]b ##teamcity\x5bc "),
    ("## [a] #[b] std::c", "## [a] #[b] std::c"),
)


@pytest.mark.parametrize("text, shown", SHOWN)
def test_controls_are_shown(text: str, shown: str) -> None:
    assert escape_controls(text) == shown
    assert escape_controls(shown) == shown


def test_a_json_document_keeps_its_values() -> None:
    values = [text for text, _ in SHOWN]

    document = escape_json(json.dumps(values, ensure_ascii=False, indent=1))

    assert json.loads(document) == values
    assert escape_controls(document.replace("\n", "")) == document.replace("\n", "")


WRITTEN = (
    (("a\nb\n\n", "c"), "a\nb\n\nc"),
    (("\x1b[1;31ma\x1b[0m\n",), "\x1b[1;31ma\x1b[0m\n"),
    (("\x1b[2Ja\x1b]0;t\x07\r",), r"\x1b[2Ja\x1b]0;t\x07\r"),
    (("::error::a\n  ::b",), ":\\x3aerror::a\n  :\\x3ab"),
    (("\x1b[31m::error::a",), "\x1b[31m:\\x3aerror::a"),
    (("\u3000\xa0::b",), "\u3000\xa0:\\x3ab"),
    (("x\n ", ":", ":error::a", "::b"), "x\n :\\x3aerror::a::b"),
    (("std", "::vector"), "std::vector"),
    (("a" * 64, "::b"), f"{'a' * 64}::b"),
    (("a #", "#vs", "o[b]"), r"a ##vso\x5bb]"),
)


@pytest.mark.parametrize("parts, written", WRITTEN)
def test_a_stream_has_no_command_of_a_runner(parts: tuple[str, ...], written: str) -> None:
    stream = io.StringIO()
    safe = SafeStream(stream, COLORS)
    for part in parts:
        safe.write(part)

    assert stream.getvalue() == written


def test_a_stream_has_no_way_around() -> None:
    stream = SafeStream(cast(io.StringIO, io.TextIOWrapper(io.BytesIO())))
    assert not hasattr(stream, "buffer")


def test_an_annotation_is_one_command() -> None:
    line = format_workflow_command("error", "a:b,c\n::d", "100 % \r\n::stop-commands::x\x1b[2J")

    assert line == (r"::error title=a%3Ab%2Cc\n%3A%3Ad::100 %25 \r\n::stop-commands::x\x1b[2J")
