"""Which layouts can be and fit, how many do not, and what comes nearest."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from stepsplit.analyzer.compare.plan.space import families
from stepsplit.analyzer.model.memory.memory import fits, memory_of
from stepsplit.analyzer.model.spec.checks import first_fault
from stepsplit.analyzer.model.spec.job import Job

_NUMBERS = re.compile(r"(?<=\w) \d[\d.e+]*\b|\s=.*")


@dataclass(slots=True)
class Sifted:
    """All layouts of the search by what became of them. nearest is the one that lacks least."""

    fitting: list[Job] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    too_big: int = 0
    nearest: Job | None = None
    nearest_bytes: int = 0

    @property
    def considered(self) -> int:
        return len(self.fitting) + self.refused.total() + self.too_big


def sift(job: Job, gpus: int, keep: frozenset[str]) -> Sifted:
    """Every layout of the space, checked and weighed."""
    found = Sifted()
    for family in families(job, gpus, keep):
        _weigh(found, family)
    return found


def _weigh(found: Sifted, family: tuple[Job, ...]) -> None:
    """A family's jobs, the smallest microbatch first: where one does not fit no larger does.

    But a whole batch at once may: it adds no gradients up, so FSDP needs no fp32 sums.
    """
    for at, job in enumerate(family):
        if _take(found, job):
            continue
        left = family[at + 1 :]
        if left and left[-1].microbatches == 1:
            _take(found, left[-1])
            left = left[:-1]
        found.too_big += len(left)
        return


def _take(found: Sifted, job: Job) -> bool:
    """Counts one job; whether larger ones are worth weighing."""
    fault = first_fault(job)
    if fault is not None:
        found.refused[_kind(fault.problem)] += 1
        return True
    memory = memory_of(job)
    if fits(job, memory):
        found.fitting.append(job)
        return True
    found.too_big += 1
    _miss(found, job, max(stage.total_bytes for stage in memory))
    return False


def _miss(found: Sifted, job: Job, peak_bytes: int) -> None:
    if found.nearest is None or peak_bytes < found.nearest_bytes:
        found.nearest, found.nearest_bytes = job, peak_bytes


def _kind(problem: str) -> str:
    """A problem without its numbers: "heads 96 / tp 7 = 13.7" -> "heads / tp"."""
    return _NUMBERS.sub("", problem)
