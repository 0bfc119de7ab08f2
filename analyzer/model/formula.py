"""A formula that a prediction rests on, and who says so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Formula:
    """One formula: its id (module.name), the text with its symbols, and the citation."""

    id: str
    text: str
    citation: str
