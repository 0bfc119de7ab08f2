"""What a command needs beyond the base install, asked for by name."""

from __future__ import annotations

from importlib.util import find_spec

from stepsplit.analyzer import UsageError


def need(module: str, extra: str) -> None:
    """Raises UsageError, with the command that installs it, where the module is missing."""
    if find_spec(module) is None:
        raise UsageError(f"this needs {module}; install it with: pip install 'stepsplit[{extra}]'")
