"""Progress bars of long reads and uploads, on standard error if it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stepsplit.analyzer.readers.workers import Progress as OnProgress
from stepsplit.collectors.safe_io.safe_text import DRAWING
from stepsplit.dashboard.reporters.console import SafeConsole

if TYPE_CHECKING:
    from rich.progress import Progress

LONG_BYTES = 200 << 20
"""Smaller recordings are read before a progress bar would help."""


@contextmanager
def show_reading_bar() -> Iterator[OnProgress]:
    """A callback for a reader: (bytes done, total bytes). Draws only on a terminal."""
    with _show_progress() as bar:
        if bar is None:
            yield lambda done_bytes, all_bytes: None
            return
        task = bar.add_task("reading", visible=False)

        def show(done_bytes: int, all_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=all_bytes, visible=all_bytes >= LONG_BYTES)

        yield show


@contextmanager
def show_sending_bar(all_bytes: int) -> Iterator[Callable[[int], None]]:
    """A callback for an upload: the bytes of each part that arrived. Draws only on a terminal."""
    with _show_progress() as bar:
        if bar is None:
            yield lambda sent_bytes: None
            return
        task = bar.add_task("sending", total=all_bytes)
        yield lambda sent_bytes: bar.advance(task, sent_bytes)


@contextmanager
def _show_progress() -> Iterator[Progress | None]:
    """A bar on stderr; None if that is no terminal, where rich up to 14 writes an empty line even
    with a disabled bar."""
    console = SafeConsole(sys.stderr, allowed=DRAWING)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        yield bar
