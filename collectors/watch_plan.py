"""The plan of a watched training: when to sample which ranks, and what samples may cost."""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from stepsplit.collectors.run_spec import Mesh, select_known_fields
from stepsplit.collectors.watch_notes import RankWindow, SampleReport

WATCH_VARIABLE = "STEPSPLIT_WATCH"
"""Environment variable that passes the plan to the agent, as JSON."""

DEFAULT_EVERY = "10min"

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


# Tier 0: the times of the unprofiled steps of a rank.

WINDOW_STEPS, WINDOW_NS = 20, 60_000_000_000
"""A window is closed after so many steps or so long, whichever is first."""


class StepRing:
    """Collects step times, and closes them into windows. recent_ns: the last WINDOW_STEPS."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.recent_ns: deque[int] = deque(maxlen=WINDOW_STEPS)
        self._times_ns: list[int] = []
        self._local_ns: list[int] = []
        self._first = self._last = self._start_unix_ns = self._length_ns = 0

    def add(self, step: int, took_ns: int, local_ns: int = 0) -> RankWindow | None:
        """Adds an unprofiled step that ended just now; the window that it closes, or None.

        local_ns: the newest local time that is known; 0 for none.
        """
        if not self._times_ns:
            self._first, self._length_ns = step, 0
            self._start_unix_ns = time.time_ns() - took_ns
        self._times_ns.append(took_ns)
        if local_ns:
            self._local_ns.append(local_ns)
        self.recent_ns.append(took_ns)
        self._last = step
        self._length_ns += took_ns
        is_full = len(self._times_ns) >= WINDOW_STEPS or self._length_ns >= WINDOW_NS
        return self.close() if is_full else None

    def close(self) -> RankWindow | None:
        """Closes the window; None if it has no step."""
        times, self._times_ns = self._times_ns, []
        local, self._local_ns = self._local_ns, []
        if not times:
            return None
        return RankWindow(
            rank=self._rank,
            first_step=self._first,
            last_step=self._last,
            start_unix_ns=self._start_unix_ns,
            end_unix_ns=time.time_ns(),
            steps=len(times),
            min_step_ns=min(times),
            median_step_ns=int(median(times)),
            max_step_ns=max(times),
            local_ns=int(median(local)) if local else 0,
        )


# Tier 1: which ranks are sampled, and at which steps.


@dataclass(frozen=True, slots=True)
class NextSample:
    """A sample as rank 0 announces it: its number, its first recorded step, and its pivot.

    step is counted from the start of the process. pivot: None for all ranks. is_capture: whether it
    was requested. ended: why there are
    no more samples; "" if this is one. overhead: the part of the training time that samples have
    cost so far; None before the first.
    """

    number: int
    step: int
    incarnation: int
    pivot: int | None = None
    interval_steps: int = 0
    overhead: float | None = None
    ended: str = ""
    is_capture: bool = False

    def format_json(self) -> str:
        """JSON on one line, as read by parse_next_sample."""
        return json.dumps(asdict(self))


def parse_next_sample(text: str) -> NextSample:
    """Parses an announced sample. Raises TypeError or ValueError if it is invalid."""
    return NextSample(**select_known_fields(NextSample, json.loads(text)))


def choose_pivot(mesh: Mesh, number: int) -> int:
    """The pivot of a sample: over the samples, the groups of the longest axis are visited in turn.

    Each visit takes another member of the group, so that every rank is the pivot at some time.
    """
    longest = max(mesh.axes, key=mesh.size)
    heads = [r for r in range(mesh.world_size) if mesh.coordinate(r, longest) == 0]
    members = mesh.line(heads[number % len(heads)], longest)
    return members[number // len(heads) % len(members)]


def list_cross(mesh: Mesh, pivot: int) -> frozenset[int]:
    """The pivot and all members of its groups on every axis of the mesh."""
    return frozenset(rank for axis in mesh.axes for rank in mesh.line(pivot, axis))


# What a sample costs.

MAX_FAULTS = 3
"""Samples in a row that failed, after which there are no more."""


def compute_cost_ns(before_ns: Sequence[int], under_ns: Sequence[int], own_ns: int) -> int:
    """The training time that a sample cost: its steps above the median of those before.

    own_ns: the time measured in the profiler's start, stop and export, which is the least.
    """
    if not before_ns:
        return own_ns
    return max(own_ns, sum(under_ns) - round(len(under_ns) * median(before_ns)))


RISE_STEPS, LEAST_RISE_STEPS = 200, 20

LEAST_RISE, LEAST_RISE_MADS = 0.05, 4.0

_SETTLING_STEPS = 5


class FirstSampleRise:
    """Whether the steps of a process stay slower after its first sample.

    On CUDA, CUPTI stays attached after its first use, and steps may take 10 to 20 % longer from
    then on (pytorch/pytorch#144455), which no duty cycle bounds.
    """

    def __init__(self) -> None:
        self._before_ns: deque[int] = deque(maxlen=RISE_STEPS)
        self._after_ns: list[int] = []
        self._skipped = 0
        self._is_sampled = self._is_judged = False

    def begin_sample(self) -> None:
        """The next steps are those after the first sample."""
        if not self._is_sampled:
            self._is_sampled, self._skipped = True, 0

    def add(self, took_ns: int) -> None:
        """Adds an unprofiled step."""
        if self._skipped < _SETTLING_STEPS:
            self._skipped += 1
        elif not self._is_sampled:
            self._before_ns.append(took_ns)
        elif len(self._after_ns) < RISE_STEPS:
            self._after_ns.append(took_ns)

    def describe(self) -> str:
        """One sentence of a rise; "" without one, and as long as too few steps are known. Once."""
        after_ns = self._after_ns[: len(self._before_ns)]
        is_early = len(after_ns) < max(len(self._before_ns), LEAST_RISE_STEPS)
        if self._is_judged or is_early:
            return ""
        self._is_judged = True
        before_ns = find_lasting_rise(list(self._before_ns), after_ns)
        if before_ns is None:
            return ""
        return (
            f"steps take {median(after_ns) / 1e6:.3g} ms since the first sample, "
            f"{before_ns / 1e6:.3g} ms before; the profiler may have stayed attached, which "
            "TEARDOWN_CUPTI=1 prevents for CUDA 12.6 and later, without CUDA graphs"
        )


def find_lasting_rise(before_ns: Sequence[int], after_ns: Sequence[int]) -> float | None:
    """The median before a rise that lasts; None if there is none.

    The median of each quarter of the n steps after is above that before by more than 5 % and more
    than four MAD of the medians of five steps, both times sqrt(200 / n).
    """
    usual = median(before_ns)
    medians = [median(before_ns[i : i + 5]) for i in range(0, len(before_ns) - 4, 5)]
    usual_of_five = median(medians)
    mad = median(abs(each - usual_of_five) for each in medians)
    widening = math.sqrt(RISE_STEPS / len(after_ns))
    limit = usual + max(LEAST_RISE * usual, LEAST_RISE_MADS * mad) * widening
    quarter = len(after_ns) // 4
    quarters = [after_ns[i * quarter : (i + 1) * quarter] for i in range(4)]
    return usual if all(median(each) > limit for each in quarters) else None


class BudgetController:
    """Decides on rank 0 when the next sample is due, and whether there is one.

    A sample is followed by at least its cost divided by the budget, so that the sum of all costs
    stays within the budget.
    """

    def __init__(self, plan: WatchPlan) -> None:
        self._plan = plan
        self._begin_ns = time.monotonic_ns()
        self._faults = 0
        self._cost_ns = self._last_cost_ns = 0
        self.samples = 0

    def add(self, own: SampleReport, others: Sequence[SampleReport]) -> str:
        """Adds a sample by the reports of its ranks. Returns why it was the last one, or ""."""
        reports = [own, *others]
        self.samples += 1
        self._last_cost_ns = max(each.cost_ns for each in reports)
        self._cost_ns += self._last_cost_ns
        faults = [each for each in reports if each.is_fault]
        self._faults = self._faults + 1 if faults else 0
        if self._faults >= MAX_FAULTS:
            return f"{MAX_FAULTS} samples in a row failed: {faults[0].no_data}"
        return ""

    def compute_interval(self, step_ns: float) -> int:
        """The steps from the last sample to the next, given the time of an unprofiled step."""
        plan = self._plan
        wanted = plan.every_steps or math.ceil((plan.every_s or 0.0) * 1e9 / max(step_ns, 1))
        within_budget = math.ceil(self._last_cost_ns / plan.budget / max(step_ns, 1))
        # The steps before a sample and after the one before it must not be the same ones.
        least = plan.warmup + plan.steps + 1 + 2 * WINDOW_STEPS
        return max(wanted, within_budget, least)

    def measure_overhead(self) -> float | None:
        """The part of the time since the start that samples have cost; None before the first."""
        elapsed_ns = time.monotonic_ns() - self._begin_ns
        return self._cost_ns / max(elapsed_ns, 1) if self.samples else None
