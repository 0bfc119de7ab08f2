"""How far a long reading has come, on standard error, where somebody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from stepsplit.analyzer.readers.workers import Progress as OnProgress

LONG_BYTES = 200 << 20
"""Less than this is read before a bar would be of use."""


@contextmanager
def reading_bar() -> Iterator[OnProgress]:
    """What a reader calls with (bytes done, bytes in all); draws on a terminal alone."""
    console = Console(stderr=True)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("reading", visible=False)

        def show(done_bytes: int, all_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=all_bytes, visible=all_bytes >= LONG_BYTES)

        yield show


@contextmanager
def sending_bar(all_bytes: int) -> Iterator[Callable[[int], None]]:
    """What a sender calls with the bytes of each part that arrived; draws on a terminal alone."""
    console = Console(stderr=True)
    columns = (TextColumn("sending"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("sending", total=all_bytes)
        yield lambda sent_bytes: bar.advance(task, sent_bytes)
