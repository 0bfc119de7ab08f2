"""The console and the texts of all screens, on which a name of a recording is nothing but a name.

Names come with escape sequences and line breaks of a stranger. They are escaped here, before widths
are measured; pyproject.toml bans rich's own classes and click.echo elsewhere.
"""

# ruff: noqa: TID251 - the classes that replace the banned ones
from __future__ import annotations

from typing import IO, Any, Self, TextIO, cast

import rich.console
import rich.text

from stepsplit.collectors.safe_io.safe_text import COLORS, SafeStream, escape_controls

# For what explains a number, and is not the number itself.
DIM = "bright_black"


class Text(rich.text.Text):
    """A styled line of a screen. A line break in it is shown as an escape."""

    def __init__(self, text: str = "", style: str = "", **options: Any) -> None:
        super().__init__(escape_controls(text), style, **options)

    def append(self, text: rich.text.Text | str, style: Any = None) -> Self:
        """Appends a text in a style."""
        super().append(escape_controls(text) if isinstance(text, str) else text, style)
        return self


class SafeConsole(rich.console.Console):
    """A console without markup: "[red]" and ":smile:" are printed as they are.

    allowed: what may be drawn besides text, such as the movements of a progress bar.
    """

    def __init__(self, file: IO[str], allowed: Any = COLORS, **options: Any) -> None:
        stream = file and cast(TextIO, SafeStream(file, allowed))
        super().__init__(file=stream, highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> rich.text.Text:
        """The text of a cell of a table, or of print."""
        return super().render_str(escape_controls(text), **options)
