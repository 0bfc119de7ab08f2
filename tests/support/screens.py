"""What the terminal shows, as lines."""

from __future__ import annotations

from rich.console import Console, RenderableType


def print_lines(*screens: RenderableType, width: int) -> list[str]:
    """The lines of these screens on a terminal so wide, without the spaces at their ends."""
    console = Console(width=width, highlight=False, no_color=True)
    with console.capture() as capture:
        for screen in screens:
            console.print(screen)
    return [line.rstrip() for line in capture.get().splitlines()]
