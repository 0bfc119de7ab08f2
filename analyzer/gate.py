"""Places of runs in, the verdict out: what stepsplit check does, in Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepsplit.analyzer.analysis import examine
from stepsplit.analyzer.compare.verdict.baseline_file import is_baseline, read_baseline
from stepsplit.analyzer.compare.verdict.budget import DEFAULT
from stepsplit.analyzer.compare.verdict.budget_file import budgets_of
from stepsplit.analyzer.compare.verdict.facts_of import facts_of
from stepsplit.analyzer.compare.verdict.judge import judge
from stepsplit.analyzer.compare.verdict.run_facts import RunFacts
from stepsplit.analyzer.compare.verdict.verdict import Verdict
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN
from stepsplit.analyzer.readers.workers import Progress, no_progress
from stepsplit.analyzer.two_runs import report_at

Place = str | Path


def check_runs(
    candidate: Sequence[Place],
    baseline: Sequence[Place],
    budgets: Sequence[str] = DEFAULT,
    across_setups: bool = False,
) -> Verdict:
    """Whether the candidate's runs stay within the budgets, held against those of the baseline.

    Places are as in facts_at; budgets are rules such as "exposed_comm:5%", or TOML files of them.
    Runs of another device, mesh or world size are refused, unless across_setups. Raises
    errors.DataError and UsageError.
    """
    sides = [[fact for place in side for fact in facts_at(place)] for side in (candidate, baseline)]
    return judge(sides[0], sides[1], budgets_of(budgets), across_setups)


def facts_at(
    place: Place,
    workers: int = 1,
    progress: Progress = no_progress,
    run: Place | None = None,
) -> tuple[RunFacts, ...]:
    """What the gate keeps of the runs at the place: a recording as analyze takes it, a report.json
    or its folder, or a baseline file, which may hold several.

    With run, a RUN.toml or "auto", a recording is held against the model too. Raises
    errors.DataError, and UsageError where the model needs to know more.
    """
    path = Path(place)
    if is_baseline(path):
        return read_baseline(path)
    if run is not None:
        return (facts_of(examine([place], workers, progress, BUILT_IN, run).report, place),)
    return (facts_of(report_at(place, workers, progress), place),)
