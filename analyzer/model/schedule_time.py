"""Time and bubbles of a pipeline schedule: closed forms, or those of its steady state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.schedule_graph import (
    Costs,
    build_graph,
    check,
    list_costs,
    sum_busy_ns,
)
from stepsplit.analyzer.model.schedule_names import Schedule
from stepsplit.analyzer.model.schedule_period import compute_makespan_ns, reduce_microbatches

# Time and bubbles of a pipeline, by the fastest method.

FRACTION = Formula(
    "pipeline.bubble_fraction",
    "bubble / (bubble + useful time); equal stages: (p-1)/(m+p-1), interleaved (p-1)/(v m + p-1)",
    "Narayanan et al., SC'21, arXiv:2104.04473, sections 2.2.1 and 2.2.2",
)

OVERHEAD = Formula(
    "pipeline.bubble_overhead",
    "bubble / useful time; equal stages: (p-1)/m, interleaved (p-1)/(v m)",
    "Narayanan et al., SC'21, arXiv:2104.04473, sections 2.2.1 and 2.2.2",
)


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """makespan_ns is the time from the first forward to the last backward of all ranks, bubbles_ns
    the bubble of each rank within it."""

    makespan_ns: float
    bubbles_ns: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        """Bubble / window, over all ranks (FRACTION)."""
        return sum(self.bubbles_ns) / (self.makespan_ns * len(self.bubbles_ns))

    @property
    def bubble_overhead(self) -> float:
        """Bubble / useful time, over all ranks (OVERHEAD)."""
        bubble_ns = sum(self.bubbles_ns)
        return bubble_ns / (self.makespan_ns * len(self.bubbles_ns) - bubble_ns)


@lru_cache(maxsize=4096)
def compute_pipeline_time(
    schedule: Schedule,
    stages: int,
    microbatches: int,
    chunks: int,
    costs: Costs,
    transfer_ns: float = 0.0,
    blocking: bool = False,
) -> PipelineTime:
    """Time a schedule on a number of ranks (stages), with costs for each model stage.

    Gives the result of a simulation of all microbatches up to rounding, from a closed form if the
    longest path is known, else from as many microbatches as reach the steady state. Raises
    UsageError for an invalid schedule or number of costs, and for one without a steady state.
    """
    makespan_ns = None
    if not blocking:
        makespan_ns = _compute_closed_form(schedule, costs, stages, microbatches, transfer_ns)
    few_microbatches = (
        reduce_microbatches(schedule, stages, microbatches)
        if makespan_ns is None
        else min(1, microbatches)
    )
    few_graph = build_graph(schedule, stages, few_microbatches, chunks)
    check(few_graph, costs)
    if makespan_ns is None:
        makespan_ns = compute_makespan_ns(
            schedule, stages, microbatches, chunks, costs, transfer_ns, blocking
        )
    busy = (
        each * (microbatches / few_microbatches)
        for each in sum_busy_ns(few_graph, list_costs(few_graph, costs))
    )
    return PipelineTime(makespan_ns, tuple(max(0.0, makespan_ns - each) for each in busy))


def _compute_closed_form(
    schedule: Schedule, costs: Costs, p: int, m: int, transfer_ns: float
) -> float | None:
    """The longest path in closed form, without blocking sends; None if there is no closed form.

    One rank and naive: m times the whole path. GPipe: m equal jobs through p machines in a row,
    forward and then backward.
    """
    forwards = [forward for forward, _, _ in costs]
    backwards = [inputs + weights for _, inputs, weights in costs]
    single_ns = sum(forwards) + sum(backwards) + 2 * (p - 1) * transfer_ns
    if p == 1 or schedule == "naive":
        return m * single_ns
    if schedule == "gpipe":
        return single_ns + (m - 1) * (max(forwards) + max(backwards))
    return None


# Bubbles of pipelines of equal stages in closed form, with the time of messages.


def compute_bubble_ns(
    schedule: str,
    stages: int,
    microbatches: int,
    times_ns: Times,
    chunks: int = 1,
    transfer_ns: float = 0.0,
) -> float | None:
    """Largest bubble of any rank between its own first forward and its own last pass.

    times_ns are forward, input gradient and weight gradient (TF, TB, TW) of one microbatch in all
    chunks of a rank. transfer_ns (Tc) is the time of one message, which delays only the receiver
    and is short compared with a pass. Weight gradients are assumed not to be longer than forwards
    and input gradients. None if there is no closed form: V shapes, DualPipe, unequal groups of
    interleaved.

    It equals the bubble in the window of all ranks except in zb-h2, where the last rank ends
    (p-1) (TF + Tc) after the first. In interleaved the paper counts p fewer Tc than a simulation of
    Megatron-LM's order, whose longest path has 2 (p v - 1) messages.
    """
    p, m, v = stages, microbatches, chunks
    forward, inputs, weights = times_ns
    total_ns = sum(times_ns)
    match schedule:
        # Narayanan et al., SC'21, section 2.2; Tc: Qi et al., arXiv:2401.10241, tables 5 and 9.
        case "naive":
            return m * (p - 1) * (total_ns + 2 * transfer_ns)
        case "gpipe":
            # Tc: the first microbatch there, the last one back.
            return (p - 1) * (total_ns + 2 * transfer_ns)
        case "1f1b":
            # Messages on the longest path: forward and backward, and p-1 more in each direction for
            # each further p microbatches; 2 (p-1) (m+p) / p - 2 if p divides m.
            rounds, rest = divmod(m - 1, p)
            messages = 2 * (p - 1) + 2 * (rounds * (p - 1) + max(0, rest - 1))
            return (p - 1) * total_ns + messages * transfer_ns
        case "interleaved" if m % p == 0:
            return (p - 1) * total_ns / v + (2 * p * v - p - 2) * transfer_ns
        # Qi et al., table 2 and appendix H.
        case "zb-h1":
            messages = 2 * (p - 1) + 2 * max(0, min(m - 2, p - 1))
            filled = min(m - 1, p - 1) * weights
            return (p - 1) * (forward + inputs) - filled + messages * transfer_ns
        case "zb-h2":
            filled = min(m - 1, 2 * (p - 1)) * weights
            return (p - 1) * (forward + inputs + 2 * transfer_ns) - filled
    return None


def compute_bubble_rate(
    schedule: str,
    stages: int,
    microbatches: int,
    times_ns: Times,
    chunks: int = 1,
    transfer_ns: float = 0.0,
) -> float | None:
    """bubble / (bubble + m T), as in Qi et al. (arXiv:2401.10241); None without a closed form."""
    idle_ns = compute_bubble_ns(schedule, stages, microbatches, times_ns, chunks, transfer_ns)
    if idle_ns is None:
        return None
    return idle_ns / (idle_ns + microbatches * sum(times_ns))


Times = tuple[float, float, float]
"""One microbatch on one stage: its forward, input gradient and weight gradient, in one unit."""
