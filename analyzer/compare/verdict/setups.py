"""Whether runs may be held against each other."""

from __future__ import annotations

from collections.abc import Sequence

from stepsplit.analyzer.compare.verdict.run_facts import RunFacts
from stepsplit.analyzer.errors import UsageError

MUST = ("device", "world_size", "mesh", "backend", "ranks")
"""Of another of these a run is no candidate for this baseline, unless told so."""
MAY = ("torch", "nccl", "driver", "hosts", "schedule", "microbatches")
"""Another of these may well be the reason of what moved: it is told."""
_WORDS = {"world_size": "world size", "ranks": "ranks recorded", "nccl": "NCCL"}


def check_setups(
    baseline: Sequence[RunFacts], candidate: Sequence[RunFacts], across_setups: bool
) -> tuple[str, ...]:
    """What differs between the runs and may be, in words. Raises UsageError for what may not."""
    for side in (baseline, candidate):
        _check_apart(side)
    runs = [*baseline, *candidate]
    refused = [told for name in MUST if (told := _differs(name, runs))]
    if refused and not across_setups:
        raise UsageError(
            f"these runs are not of one kind: {'; '.join(refused)}; name runs that are, or compare "
            "them all the same with --across-setups"
        )
    return (*refused, *(told for name in MAY if (told := _differs(name, runs))))


def _check_apart(side: Sequence[RunFacts]) -> None:
    """Runs to the same nanosecond are one run named twice, which would tell a noise of zero."""
    seen: dict[object, str] = {}
    for run in side:
        if run.values in seen:
            told = f"{seen[run.values]} and {run.name}"
            raise UsageError(f"{told} are one recording; name each run of a side once")
        seen[run.values] = run.name


def _differs(name: str, runs: Sequence[RunFacts]) -> str | None:
    """The setting's values with a run of each, None where all that know it agree."""
    seen: dict[object, str] = {}
    for run in runs:
        value = getattr(run.setup, name)
        if value is not None:
            seen.setdefault(value, run.name)
    if len(seen) < 2:
        return None
    told = (f"{_short(value)} in {run}" for value, run in seen.items())
    return f"{_WORDS.get(name, name)} is {', '.join(told)}"


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} of them ({', '.join(map(str, value[:4]))}, ...)"
    return str(value)
