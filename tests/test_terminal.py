"""The terminal's answer, as a person reads it."""

from __future__ import annotations

import pytest
from report_builders import analysis
from rich.console import Console

from stepsplit.dashboard.reporters.terminal import screen


def shown(width: int) -> list[str]:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(screen(analysis().report))
    return capture.get().splitlines()


def test_the_screen_answers_what_ran_where_it_went_and_why() -> None:
    text = "\n".join(shown(120))
    for part in ("run ", "steps ", "compute", "bubble fraction", "busbw", "WHY"):
        assert part in text


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(width: int) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if "…" in line]
