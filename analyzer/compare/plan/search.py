"""plan: a job and a number of GPUs in, its Plan out."""

from __future__ import annotations

from collections.abc import Iterable

from stepsplit.analyzer import units
from stepsplit.analyzer.compare.plan.candidates import candidate_of, choice_of
from stepsplit.analyzer.compare.plan.floor import Floor
from stepsplit.analyzer.compare.plan.plan import Candidate, Plan, Searched
from stepsplit.analyzer.compare.plan.practice import places_of, tree_of
from stepsplit.analyzer.compare.plan.reasons import runner_up
from stepsplit.analyzer.compare.plan.sift import Sifted, sift
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.comm.measured import Rates
from stepsplit.analyzer.model.spec.job import Job

TOP = 8
"""Splits of the GPUs that are shown unless more are asked for."""
Raced = tuple[Candidate, Job]
"""A layout that was timed, and the job with it."""


def plan(
    job: Job,
    gpus: int,
    keep: frozenset[str] = frozenset(),
    top: int = TOP,
    rates: Rates | None = None,
) -> Plan:
    """The fastest layouts of the job that fit so many GPUs.

    The job gives model, sequence, batch, precision, framework and hardware; its layout, microbatch
    and recomputation count only where keep names them (space.KEYS). The top splits of the GPUs are
    exact: no layout that could be among them is left untimed. Raises UsageError where none fits.
    """
    if gpus < 1:
        raise UsageError(f"{gpus} GPUs hold no model; give --gpus 1 or more")
    sifted = sift(job, gpus, keep)
    if not sifted.fitting:
        raise UsageError(_nothing(job, gpus, sifted))
    raced, timed = _race(sifted.fitting, top, rates or Rates())
    (first, best_job), *others = raced
    return Plan(
        gpus=gpus,
        best=first,
        runners_up=tuple(runner_up(first, other) for other, _ in others),
        tree=tree_of(job, gpus),
        places=places_of(best_job),
        searched=_searched(sifted, timed),
    )


def _race(fitting: list[Job], top: int, rates: Rates) -> tuple[list[Raced], int]:
    """The best of each split of the GPUs, in order, and how many layouts were timed.

    The most promising first, until what is left can't reach the top: its floor is above it.
    """
    floor = Floor(rates)
    ahead = sorted((floor.step_ns(job), n) for n, job in enumerate(fitting))
    found: dict[tuple[int, ...], Raced] = {}
    shown: list[Raced] = []
    for timed, (floor_ns, n) in enumerate(ahead):
        if len(shown) == top and floor_ns > shown[-1][0].step_ns:
            return shown, timed
        one = candidate_of(fitting[n], rates)
        known = found.get(one.choice.axes)
        if known is None or _order(one) < _order(known[0]):
            found[one.choice.axes] = one, fitting[n]
            shown = _apart(found.values())[:top]
    return shown, len(ahead)


def _apart(found: Iterable[Raced]) -> list[Raced]:
    """In order, without those that a split shown before them makes needless: the same tp, pp and ep
    with less context parallelism, at least as fast and as small."""
    kept: list[Raced] = []
    for one, job in sorted(found, key=lambda raced: _order(raced[0])):
        if not any(_spares(before, one) for before, _ in kept):
            kept.append((one, job))
    return kept


def _spares(before: Candidate, one: Candidate) -> bool:
    a, b = before.choice, one.choice
    same = (a.tp, a.pp, a.ep) == (b.tp, b.pp, b.ep)
    return same and a.cp < b.cp and before.peak_bytes <= one.peak_bytes


def _order(one: Candidate) -> tuple[int, ...]:
    """The fastest; of equals the one with the fewest axes, then the smallest in memory, then that
    with the plainest settings."""
    choice = one.choice
    axes = choice.cp * choice.ep * choice.pp * choice.tp
    settings = choice.zero + choice.chunks + choice.sequence_parallel + (choice.recompute != "none")
    return one.step_ns, axes, one.peak_bytes, settings


def _searched(sifted: Sifted, timed: int) -> Searched:
    refused = tuple(sifted.refused.most_common())
    return Searched(sifted.considered, sifted.too_big, len(sifted.fitting), timed, refused)


def _nothing(job: Job, gpus: int, sifted: Sifted) -> str:
    """Why no layout is left: what comes nearest, and the mend."""
    where = f"no layout on {gpus} x {job.hardware.name}"
    if sifted.nearest is None:
        why = ", ".join(kind for kind, _ in sifted.refused.most_common(2)) or "global_batch"
        return f"{where} can be ({why}); give another number of GPUs, or another global_batch"
    near = choice_of(sifted.nearest)
    axes = f"tp {near.tp} pp {near.pp} cp {near.cp} dp {near.dp_replicate * near.dp_shard}"
    lacks = (
        f"{units.gibibytes(sifted.nearest_bytes)} of {units.gibibytes(job.hardware.memory_bytes)}"
    )
    return f"{where} fits; the nearest is {axes} with {lacks}; give more GPUs or a shorter seq_len"
