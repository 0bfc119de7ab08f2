"""What a command found as JSON, where --json asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from stepsplit.analyzer.errors import write

Found = TypeVar("Found")


def put_json(found: Found, to_json: Callable[[Found], str | bytes], json_file: str | None) -> bool:
    """Writes the JSON of what was found into the file, "-" for standard output, None for nowhere.

    Whether standard output has it, which then has nothing else. Raises UsageError where the file
    cannot be written.
    """
    if json_file is None:
        return False
    text = to_json(found)
    if json_file == "-":
        click.echo(text, nl=False)
        return True
    write(Path(json_file), text.encode() if isinstance(text, str) else text)
    return False
