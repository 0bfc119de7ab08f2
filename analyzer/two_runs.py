"""Two places in, what differs between their runs out."""

from __future__ import annotations

from pathlib import Path

from stepsplit.analyzer.analysis import examine
from stepsplit.analyzer.compare.runs.compare import compare_reports
from stepsplit.analyzer.compare.runs.comparison import RunComparison
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.workers import Progress, no_progress
from stepsplit.analyzer.report.io import REPORT_NAME, is_report, read_report
from stepsplit.analyzer.report.report import Report


def compare_runs(
    baseline: str | Path,
    candidate: str | Path,
    workers: int = 1,
    progress: Progress = no_progress,
    rules: Rules = BUILT_IN,
) -> RunComparison:
    """What differs between two runs, each a recording or its report as report_at takes them.

    Raises errors.DataError, and UsageError where a run has no step to compare.
    """
    one, other = (report_at(place, workers, progress, rules) for place in (baseline, candidate))
    return compare_reports(one, other)


def report_at(
    place: str | Path,
    workers: int = 1,
    progress: Progress = no_progress,
    rules: Rules = BUILT_IN,
) -> Report:
    """The report at the place: a report.json, a folder that holds one, or else a recording (file,
    folder, archive or URL), which is analyzed.

    Under rules of one's own a folder's recording is analyzed anew. Raises errors.DataError, and
    UsageError for such rules with a report alone.
    """
    path = Path(place)
    if is_report(path):
        if rules != BUILT_IN:
            raise UsageError(f"{path}: a report is made already; with rules name its recording")
        return read_report(path)
    if rules == BUILT_IN and (path / REPORT_NAME).is_file():
        return read_report(path)
    return examine([place], workers, progress, rules).report
