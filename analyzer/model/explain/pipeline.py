"""Why the pipeline stands still for so long, and holds so many microbatches."""

from __future__ import annotations

from collections.abc import Iterator

from stepsplit.analyzer.model.explain.explained import Explained, RuleOfThumb, Symbol, differing
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.model.schedule.in_flight import IN_FLIGHT, in_flight
from stepsplit.analyzer.model.schedule.steady import FRACTION, OVERHEAD
from stepsplit.analyzer.model.spec.job import Job

_OTHER_WHOLE = "that is the overhead: of the useful time, not of all time"


def of_pipeline(job: Job, prediction: Prediction) -> Iterator[Explained]:
    """Bubble fraction and overhead, microbatches in flight; nothing without a pipeline."""
    if job.layout.pp > 1:
        yield _fraction(job, prediction.bubble_fraction)
        yield _overhead(job, prediction.bubble_overhead)
        yield _in_flight(job, max(prediction.memory, key=lambda stage: stage.total_bytes).stage)


def _fraction(job: Job, value: float) -> Explained:
    p, m = job.layout.pp, job.microbatches
    rules = (
        _simple_fraction(job),
        RuleOfThumb("(p-1)/m of the step", (p - 1) / m, _OTHER_WHOLE),
        RuleOfThumb(
            "a pipeline of p stages idles (p-1)/p of the time", (p - 1) / p,
            f"that holds for one microbatch; this step has {m}", ("naive-bubble", "pp-quarter"),
        ),
    )  # fmt: skip
    return Explained(
        FRACTION, "bubble, of all time", _symbols(job), value, "ratio", differing(value, rules),
        _simulated(job),
    )  # fmt: skip


def _overhead(job: Job, value: float) -> Explained:
    p, m = job.layout.pp, job.microbatches
    why = "that is the fraction: of all time, not of the useful time"
    rules = (RuleOfThumb("(p-1)/(m+p-1)", (p - 1) / (m + p - 1), why),)
    return Explained(
        OVERHEAD, "bubble, of useful time", _symbols(job), value, "ratio", differing(value, rules),
        _simulated(job),
    )  # fmt: skip


def _simulated(job: Job) -> str:
    return f"found by running the schedule ({job.layout.schedule}) with this job's own times"


def _in_flight(job: Job, rank: int) -> Explained:
    p, schedule, one = job.layout.pp, job.layout.schedule, job.layout.stages_per_rank
    value = in_flight(schedule, p, job.microbatches, job.layout.chunks, rank)
    why = f"a rank has 1/{p} of the layers, but holds several microbatches at once"
    rule = RuleOfThumb("p stages divide the activations by p", one, why, ("pp-memory",))
    symbols = (*_symbols(job), Symbol("r", "rank of the pipeline", rank))
    what = f"activations in flight on pipeline rank {rank} at its peak (microbatches x stages)"
    note = f"the schedule is {schedule}"
    return Explained(IN_FLIGHT, what, symbols, value, "", differing(value, [rule]), note)


def _simple_fraction(job: Job) -> RuleOfThumb:
    p, m, schedule = job.layout.pp, job.microbatches, job.layout.schedule
    why = "that holds for equal stages and messages that cost nothing"
    if schedule not in ("1f1b", "gpipe"):
        why = f"that is GPipe's and 1F1B's, this is {schedule}; and it holds for equal stages"
    return RuleOfThumb("(p-1)/(m+p-1)", (p - 1) / (m + p - 1), why)


def _symbols(job: Job) -> tuple[Symbol, ...]:
    return (
        Symbol("p", "ranks of the pipeline", job.layout.pp),
        Symbol("m", "microbatches of a step", job.microbatches),
        Symbol("v", "stages on a rank", job.layout.stages_per_rank),
    )
