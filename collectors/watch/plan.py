"""The plan of a watched training: how often to sample, and what samples may cost."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from stepsplit.collectors.formats.json_decode import select_known_fields
from stepsplit.collectors.formats.run_spec import Mesh

WATCH_VARIABLE = "STEPSPLIT_WATCH"
"""Environment variable that passes the plan to the agent, as JSON."""

DEFAULT_BUDGET = 0.005
"""The part of the training time that samples may cost."""


@dataclass(frozen=True, slots=True)
class WatchPlan:
    """How a training is watched.

    Samples are every_steps steps or every_s seconds apart, or more if their cost would be over the
    budget (0.005: half a percent of the training time). Each records `steps` steps after `warmup`
    steps. mesh is as in RecordPlan. incarnation counts the starts of the job with this `out`.
    keep_bytes bounds the traces of a rank that are not reduced yet: beyond it the oldest go.
    """

    out: str
    name: str
    every_steps: int | None = None
    every_s: float | None = None
    steps: int = 2
    warmup: int = 1
    budget: float = DEFAULT_BUDGET
    mesh: str = ""
    incarnation: int = 0
    keep_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 1 or not 0 < self.budget <= 1:
            raise ValueError(
                f"no sample: steps {self.steps}, warmup {self.warmup}, budget {self.budget:g}"
            )
        if (self.every_steps is None) == (self.every_s is None):
            raise ValueError("give the interval of samples in steps or in seconds")
        if (self.every_steps or self.every_s or 0) <= 0:
            raise ValueError("the interval of samples must be positive")
        if self.mesh:
            Mesh.parse(self.mesh)

    def format_json(self) -> str:
        """JSON on one line, as read by read_watch_plan."""
        return json.dumps(asdict(self))


def read_watch_plan(environment: Mapping[str, str]) -> WatchPlan | None:
    """The plan in the environment; None without one. Raises ValueError if it is invalid."""
    text = environment.get(WATCH_VARIABLE)
    return None if not text else WatchPlan(**select_known_fields(WatchPlan, json.loads(text)))


_EVERY = re.compile(r"(\d+(?:\.\d+)?)\s*(steps?|s|min|h)")

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def parse_every(text: str) -> tuple[int | None, float | None]:
    """(steps, seconds) of an interval such as "200steps" or "10min"; one of them is None.

    Raises ValueError if it is not an interval.
    """
    found = _EVERY.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is not an interval; use 200steps, 30s, 10min or 1h")
    if found[2].startswith("step"):
        return max(1, int(float(found[1]))), None
    return None, float(found[1]) * _SECONDS[found[2]]
