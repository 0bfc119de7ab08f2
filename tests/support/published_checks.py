"""The model against the published tables, computed once in a process."""

from __future__ import annotations

from functools import cache

from stepsplit.analyzer.validation import validate
from stepsplit.analyzer.validation.tables import Check


@cache
def validate_published() -> tuple[Check, ...]:
    """What `validate` finds in the package's own tables, which takes ten seconds."""
    return validate()
