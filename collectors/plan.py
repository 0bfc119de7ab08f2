"""What to record: which steps, which ranks, in what detail. As an argument, in JSON in and out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stepsplit.collectors.run_spec import GroupInfo, named

Detail = Literal["full", "thin", "none"]
PLAN_VARIABLE = "STEPSPLIT_PLAN"
"""The variable that tells an agent its plan."""
SMALL_JOB = 8
"""Ranks of which `auto` records all in full."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One recording. Steps count from 0, the first that the process makes.

    The steps first to first + steps - 1 are recorded; the profiler warms up in the `warmup` steps
    before. first None: nothing until an attach says when (standby). ranks is "all", "auto" (one
    whole pipeline in full, the others thin) or a list such as "0-7,16". memory measures what the
    steps allocate, stacks and shapes are the profiler's.
    """

    out: str
    name: str
    first: int | None
    steps: int = 5
    warmup: int = 1
    ranks: str = "all"
    shapes: bool = False
    memory: bool = False
    stacks: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0 or (self.first is not None and self.first < 0):
            raise ValueError(f"no step to record: first {self.first}, {self.steps} steps")
        if self.ranks not in ("all", "auto"):
            listed(self.ranks)

    def text(self) -> str:
        """JSON on one line, that `plan` reads back."""
        return json.dumps(asdict(self))


def plan(text: str | bytes) -> Plan:
    """The plan of its text. Raises ValueError where the text is none."""
    body = json.loads(text)
    try:
        return plan_of(body)
    except TypeError as error:
        raise ValueError(f"no plan: {error}") from None


def plan_of(body: Mapping[str, Any]) -> Plan:
    """The plan of its fields; those of another version are passed over. Raises TypeError."""
    return Plan(**named(Plan, body))


def listed(ranks: str) -> frozenset[int]:
    """The ranks of "0-7,16". Raises ValueError for what is no such list."""
    found: set[int] = set()
    for part in ranks.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{ranks!r} is no list of ranks: write all, auto or 0-7,16")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def detail(ranks: str, rank: int, world_size: int, groups: tuple[GroupInfo, ...]) -> Detail:
    """In what detail the rank is recorded. groups: those that it is in."""
    if ranks == "all" or (ranks == "auto" and world_size <= SMALL_JOB):
        return "full"
    if ranks != "auto":
        return "full" if rank in listed(ranks) else "none"
    pipelines = [group.ranks for group in groups if _is_pipeline(group.description)]
    whole = min(pipelines, default=(rank,))
    return "full" if 0 in whole else "thin"


def _is_pipeline(description: str) -> bool:
    words = description.lower().replace("mesh_", "").split("_")
    return words[0] in ("pp", "pipe", "pipeline")
