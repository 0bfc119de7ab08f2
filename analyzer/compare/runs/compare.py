"""Two reports -> what differs between their runs."""

from __future__ import annotations

from stepsplit.analyzer.compare.runs.calls import calls_changes
from stepsplit.analyzer.compare.runs.comparison import RunComparison
from stepsplit.analyzer.compare.runs.exposed import exposed_changes
from stepsplit.analyzer.compare.runs.families import family_changes
from stepsplit.analyzer.compare.runs.settings import settings_that_differ
from stepsplit.analyzer.compare.runs.side import side_of
from stepsplit.analyzer.report.report import Report


def compare_reports(baseline: Report, candidate: Report) -> RunComparison:
    """What differs between the runs. Raises UsageError where one of them has no step.

    Runs of another layout are compared all the same: their settings say so.
    """
    return RunComparison(
        baseline=side_of(baseline),
        candidate=side_of(candidate),
        settings=settings_that_differ(baseline, candidate),
        exposed=exposed_changes(baseline, candidate),
        collectives=calls_changes(baseline, candidate),
        kernels=family_changes(baseline, candidate),
    )
