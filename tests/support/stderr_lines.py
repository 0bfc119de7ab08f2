"""The warnings of the recorder: lines on stderr that begin with "stepsplit: "."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr


@contextmanager
def warns(match: str) -> Iterator[list[str]]:
    """Asserts that the block prints a warning that matches; the list then has all warnings."""
    lines: list[str] = []
    with redirect_stderr(io.StringIO()) as text:
        yield lines
    lines += re.findall(r"^stepsplit: (.*)$", text.getvalue(), re.MULTILINE)
    assert any(re.search(match, line) for line in lines), lines
