"""The plan of a recording: steps, ranks and detail."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stepsplit.collectors.formats.json_decode import select_known_fields
from stepsplit.collectors.formats.run_spec import GroupInfo, Mesh, check_role

Detail = Literal["full", "thin", "none"]

PLAN_VARIABLE = "STEPSPLIT_PLAN"
"""Environment variable that passes the plan to the agent, as JSON."""

SMALL_JOB = 8
"""Largest job of which `auto` records all ranks in full."""


@dataclass(frozen=True, slots=True)
class RecordPlan:
    """The plan of one recording. Steps are counted from 0, the first step of the process.

    Steps first to first + steps - 1 are recorded; the profiler warms up in the `warmup` steps
    before. If first is None, recording starts when an attach requests it (standby). ranks is "all",
    "auto" (one pipeline in full, the others thin) or a list such as "0-7,16". memory measures the
    allocations of the steps; stacks and shapes are options of the profiler. mesh is the job's mesh
    as the user states it, such as "pp=2,tp=4"; "" if unknown. share takes the trace of the script's
    own profiler if that one runs in the steps to record. modules names the model's modules in the
    first recorded step; None names them in the last one where that is cheap and changes nothing
    (module_choice.py). role is what the ranks do in a job of several roles, "" for the only one;
    each role has a folder of its own.
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
    mesh: str = ""
    share: bool = False
    modules: bool | None = False
    role: str = ""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0 or (self.first is not None and self.first < 0):
            raise ValueError(
                f"no step to record: first {self.first}, warmup {self.warmup}, steps {self.steps}"
            )
        if self.ranks not in ("all", "auto"):
            parse_ranks(self.ranks)
        check_role(self.role)
        if self.mesh:
            Mesh.parse(self.mesh)

    def format_json(self) -> str:
        """JSON on one line, as read by parse_plan."""
        return json.dumps(asdict(self))


def parse_plan(text: str | bytes) -> RecordPlan:
    """Parses a plan in JSON. Raises ValueError if it is invalid."""
    body = json.loads(text)
    try:
        return decode_plan(body)
    except TypeError as error:
        raise ValueError(f"invalid plan: {error}") from None


def decode_plan(body: Mapping[str, Any]) -> RecordPlan:
    """Builds a plan from its fields, ignoring unknown ones. Raises TypeError if one is missing."""
    return RecordPlan(**select_known_fields(RecordPlan, body))


def parse_ranks(ranks: str) -> frozenset[int]:
    """Parses a list of ranks such as "0-7,16". Raises ValueError if it is invalid."""
    ranks_found: set[int] = set()
    for part in ranks.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{ranks!r} is not a list of ranks; use all, auto or 0-7,16")
        ranks_found.update(range(int(first), int(last or first) + 1))
    return frozenset(ranks_found)


def choose_detail(ranks: str, rank: int, world_size: int, groups: tuple[GroupInfo, ...]) -> Detail:
    """The detail in which a rank is recorded. groups: the process groups of this rank."""
    if ranks == "all" or (ranks == "auto" and world_size <= SMALL_JOB):
        return "full"
    if ranks != "auto":
        return "full" if rank in parse_ranks(ranks) else "none"
    # The ranks of one pipeline wait for each other: only all of them in full show a bubble and its
    # cause.
    pipelines = [group.ranks for group in groups if _is_pipeline(group.description)]
    first_pipeline = min(pipelines, default=(rank,))
    return "full" if 0 in first_pipeline else "thin"


def _is_pipeline(description: str) -> bool:
    words = description.lower().replace("mesh_", "").split("_")
    return words[0] in ("pp", "pipe", "pipeline")
