"""What agents read: SKILL.md in the wheel, and llms.txt of the docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from generate.docs_llms import DOCS, build_llms
from support.tokens import count_tokens

from stepsplit.dashboard import cli
from stepsplit.dashboard.agents.answers import Reason
from stepsplit.dashboard.agents.tools import TOOLS

ROOT = DOCS.parent
SKILL = ROOT / "dashboard" / "agents" / "SKILL.md"


def list_rows(text: str, head: str) -> list[list[str]]:
    """The rows of the table with this head."""
    _, _, after = text.partition(f"{head}\n")
    lines = after.splitlines()[1:]
    end = next((at for at, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]]


def test_every_tool_has_its_question_and_every_command_exists() -> None:
    rows = list_rows(SKILL.read_text(), "| question | tool | command |")

    assert [row[1] for row in rows] == [*dict.fromkeys(row[1] for row in rows)]
    assert {row[1] for row in rows} == set(TOOLS)
    commands = re.findall(r"`stepsplit ([a-z-]+)", SKILL.read_text())
    assert set(commands) <= set(cli.COMMANDS)


def test_the_skill_names_every_reason_and_is_short() -> None:
    text = SKILL.read_text()

    assert all(f"`{reason}`" in text for reason in get_args(Reason))
    assert count_tokens(text) < 2_000
    # As the format of skills wants it: a name, and a description of at most 1,024 characters.
    name, described = re.findall(r"\A---\nname: (.*)\ndescription: (.*)\n---\n", text)[0]
    assert name == "stepsplit" and len(described) <= 1_024


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["skill", "--print"]) == 0
    assert capsys.readouterr().out == SKILL.read_text()
    assert cli.run(["skill"]) == 0
    assert Path(capsys.readouterr().out.strip()).read_text() == SKILL.read_text()


def test_the_docs_have_every_tool_and_reason() -> None:
    page = (DOCS / "agents.md").read_text()

    named = ", ".join(row[0] for row in list_rows(page, "| tool | answers |"))
    assert sorted(named.split(", ")) == sorted(TOOLS)
    reasons = [row[0].strip("`") for row in list_rows(page, "| reason | |")]
    assert sorted(reasons) == sorted(get_args(Reason))


def test_llms_txt_lists_every_page_once() -> None:
    text = (DOCS / "llms.txt").read_text()

    assert text == build_llms(), "python -m generate.docs_llms rewrites it"
    linked = re.findall(r"\]\(([^)]*)\)", text)
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(one for one in linked if one.endswith(".md")) == sorted(pages)
