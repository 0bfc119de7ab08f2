"""What a planted cause truly costs: the job against the same job without it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from simulator.engine import simulate
from simulator.noise import EXACT, Noise
from simulator.program import Job, Scenario
from simulator.truth import TrueSplit, truth_of


@dataclass(frozen=True, slots=True)
class Loss:
    """How much longer all steps of one rank take, and how much more it waits, through the cause.

    Negative where the rank gains: a rank that is late itself waits less for others.
    """

    rank: int
    step_ns: int
    wait_ns: int


def losses_of(scenario: Scenario, noise: Noise = EXACT) -> tuple[Loss, ...]:
    """The loss of each rank, with the same noise in both jobs; none where nothing was planted."""
    if scenario.without is None:
        return ()
    slow, fast = _totals(scenario.job, noise), _totals(scenario.without, noise)
    return tuple(
        Loss(rank, slow[rank][0] - fast[rank][0], slow[rank][1] - fast[rank][1])
        for rank in sorted(slow)
    )


def _totals(job: Job, noise: Noise) -> dict[int, tuple[int, int]]:
    """Of each rank the time of its steps, and of its waits in them."""
    of_rank: dict[int, list[TrueSplit]] = defaultdict(list)
    for split in truth_of(simulate(job, noise)).splits:
        of_rank[split.rank].append(split)
    return {
        rank: (
            sum(split.end_ns - split.start_ns for split in splits),
            sum(split.skew_ns + split.bubble_ns for split in splits),
        )
        for rank, splits in of_rank.items()
    }
