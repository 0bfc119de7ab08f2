"""Tables without lines, and the color of each bucket in the terminal."""

from __future__ import annotations

from rich.table import Table

BUCKET_STYLE = {
    "compute": "green",
    "collective": "blue",
    "p2p": "cyan",
    "skew": "magenta",
    "bubble": "yellow",
    "copy": "bright_black",
    "idle": "bright_black",
}
AXIS_SHORT = {"dp_replicate": "dp repl", "dp_shard": "dp shard"}
_WORDS = ("op", "phase")


def bare_table(first: str, *others: str) -> Table:
    """A table whose numbers stand right; words may fold, numbers never do.

    A last column without a name takes the room that is left.
    """
    table = Table(
        box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False, expand="" in others
    )
    table.add_column(first, no_wrap=True)
    for name in others:
        if name == "":
            table.add_column(name, no_wrap=True, ratio=1)
        elif name in _WORDS:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table
