"""What makes a job impossible."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that cannot be: the arithmetic, and the mend."""

    problem: str
    mend: str


def uneven(what: str, count: int, axis: str, ranks: int, mend: str = "") -> Fault | None:
    """The fault of a count that the axis does not divide."""
    return rest_of(what, count, f"{axis} {ranks}", ranks, mend or f"mend {what} or {axis}")


def rest_of(what: str, count: int, over: str, parts: int, mend: str) -> Fault | None:
    """The fault of a count that does not divide into so many parts; over says what they are."""
    if count % parts == 0:
        return None
    return Fault(f"{what} {count} / {over} = {count / parts:g}", mend)
