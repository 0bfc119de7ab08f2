"""What to change before a replay, in words: "link:tp=2", "microbatches=8"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepsplit.analyzer.errors import UsageError

PLAIN = ("even", "even-ranks", "even-stages", "no-slow-ranks", "no-idle", "overlap")
EXAMPLES = (*PLAIN, "link:tp=2", "microbatches=8", "schedule=zb-h1", "replicas=2")
USUAL = (*PLAIN, "link:all=2", "replicas=2")
"""What is replayed where nobody says what."""
_FORM = re.compile(
    r"(link):([a-z_]+)=([0-9.]+)|(microbatches|replicas)=(\d+)|(schedule)=([a-z0-9-]+)"
)


@dataclass(frozen=True, slots=True)
class Change:
    """One change: kind is a word of PLAIN, link, microbatches, replicas or schedule.

    axis is the link's ("all" for every one), times how many times as fast, count how many
    microbatches, or how many times the replicas; name is the schedule's.
    """

    kind: str
    axis: str = ""
    times: float = 1.0
    count: int = 0
    name: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "link":
                return f"link:{self.axis}={self.times:g}"
            case "schedule":
                return f"schedule={self.name}"
            case "microbatches" | "replicas":
                return f"{self.kind}={self.count}"
        return self.kind


def change_of(words: str) -> Change:
    """The change that the words name. Raises UsageError, which shows how to write one."""
    if words in PLAIN:
        return Change(words)
    found = _FORM.fullmatch(words)
    if found is None or float(found[3] or found[5] or 1) <= 0:
        raise UsageError(f"{words!r} is no change; write {', '.join(EXAMPLES)}")
    if found[1]:
        return Change("link", axis=found[2], times=float(found[3]))
    if found[4]:
        return Change(found[4], count=int(found[5]))
    return Change("schedule", name=found[7])
