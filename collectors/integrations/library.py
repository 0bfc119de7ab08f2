"""The library that an integration is for: imported when used, and named where it is absent."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def library(module: str, install: str) -> Any:
    """The module of that name. Raises ImportError on one line, with the command that mends it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # A library that is there but lacks something itself says so best.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        mend = f"pip install {install}"
        raise ImportError(f"{module} is not installed, and this records it: {mend}") from None
