"""The whole pipeline on one page: files in, Report, comparison or check result out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepsplit.analyzer.diagnose.causes import find_causes
from stepsplit.analyzer.diagnose.hang import read_calls
from stepsplit.analyzer.diagnose.hang_progress import Hang
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.schedule_time import ideal_bubble_fraction
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.recording import (
    Recording,
    open_recording,
    read_recording,
    read_recording_files,
)
from stepsplit.analyzer.readers.workers import Progress, no_progress
from stepsplit.analyzer.report.build import build_report, origin_ns
from stepsplit.analyzer.report.io import REPORT_NAME, is_report, read_report
from stepsplit.analyzer.report.report import NO_MODEL, Report, WarningRow
from stepsplit.analyzer.report.tables import Tables, build_tables
from stepsplit.analyzer.split.run import RunSplit, split_run

if TYPE_CHECKING:
    from stepsplit.analyzer.regression.checks import Verdict
    from stepsplit.analyzer.regression.compare import RunComparison
    from stepsplit.analyzer.regression.metrics import RunFacts

# Files in, Report out: the whole pipeline on one page.

_Held = Callable[[Report, Recording, RunSplit], Report]


@dataclass(frozen=True, slots=True)
class Analysis:
    """A report, and the detail that goes beside it."""

    report: Report
    tables: Tables


def analyze(*places: str | Path, job: str | Path | None = None, rules: Rules = BUILT_IN) -> Report:
    """The report of the recording in the files, folders, archives and URLs; run, rules, and what is
    raised, as in examine."""
    return examine(places, rules=rules, job=job).report


def examine(
    places: Sequence[str | Path],
    workers: int = 1,
    progress: Progress = no_progress,
    rules: Rules = BUILT_IN,
    job: str | Path | None = None,
) -> Analysis:
    """The report of the recording with its tables, read by up to that many processes.

    rules tell which kernels communicate and which compute. With run, a job.toml (whole, or what the
    recording does not tell) or "auto", the report is held against the model. Raises
    errors.DataError, and UsageError where the model needs to know more.
    """
    held = _against(job)
    return _examined(read_recording(places, workers, progress, rules), held)


def examine_or_find_hang(
    places: Sequence[str | Path],
    workers: int = 1,
    progress: Progress = no_progress,
    rules: Rules = BUILT_IN,
    job: str | Path | None = None,
) -> Analysis | Hang:
    """As examine; where the places hold Flight Recorder dumps and no traces, how the calls stand by
    these dumps."""
    held = _against(job)
    with open_recording(places) as files:
        if files.only_dumps:
            return read_calls(places)
        recording = read_recording_files(files, workers, progress, rules)
    return _examined(recording, held)


def examine_as_told(
    places: Sequence[str | Path], workers: int = 1, progress: Progress = no_progress
) -> Analysis:
    """As examine with run "auto"; where the model needs to know more, a warning says what. Raises
    errors.DataError."""
    held = _against("auto")

    def tried(report: Report, recording: Recording, found: RunSplit) -> Report:
        try:
            return held(report, recording, found)
        except UsageError as error:
            told = WarningRow(NO_MODEL, str(error))
            return replace(report, warnings=(*report.warnings, told))

    return _examined(read_recording(places, workers, progress), tried)


def _examined(recording: Recording, held: _Held) -> Analysis:
    found = split_run(recording.traces, recording.spec, ideal_bubble_fraction)
    causes = find_causes(found, origin_ns(found), recording.records)
    report = build_report(recording, found, causes.findings, causes.notes)
    return Analysis(held(report, recording, found), build_tables(found))


def _against(job: str | Path | None) -> _Held:
    """Holds a report against the model; leaves it as it is where no run is stated."""
    if job is None:
        return lambda report, *_: report
    # The model takes a moment to load, and few ask for it.
    from stepsplit.analyzer.gap.gap import held_against, read_job_table

    stated = read_job_table(job)
    return lambda report, recording, found: held_against(report, recording, found, stated)


# Two places in, what differs between their runs out.


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
    from stepsplit.analyzer.regression.compare import compare_reports

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


# Places of runs in, the verdict out: what stepsplit check does, in Python.

Place = str | Path

DEFAULT_BUDGETS = ("calls:exact", "bytes:exact", "exposed_comm:10%,1pt", "bubble:10%,1pt")
"""What a check limits unless other budgets are given."""


def check_runs(
    candidate: Sequence[Place],
    baseline: Sequence[Place],
    budgets: Sequence[str] = DEFAULT_BUDGETS,
    across_setups: bool = False,
    rules: Rules = BUILT_IN,
) -> Verdict:
    """Whether the candidate's runs stay within the budgets, held against those of the baseline.

    Places and rules are as in facts_at; budgets are such as "exposed_comm:5%", or TOML files.
    Runs of another device, mesh or world size are refused, unless across_setups. Raises
    errors.DataError and UsageError.
    """
    from stepsplit.analyzer.regression.checks import budgets_of
    from stepsplit.analyzer.regression.judge import judge

    own, others = (
        [fact for place in side for fact in facts_at(place, rules=rules)]
        for side in (candidate, baseline)
    )
    return judge(own, others, budgets_of(budgets), across_setups)


def facts_at(
    place: Place,
    workers: int = 1,
    progress: Progress = no_progress,
    job: Place | None = None,
    rules: Rules = BUILT_IN,
) -> tuple[RunFacts, ...]:
    """What the gate keeps of the runs at the place: a recording as analyze takes it, a report.json
    or its folder, or a baseline file, which may hold several.

    With run, a job.toml or "auto", a recording is held against the model too. rules are as in
    report_at; a baseline file keeps those that its runs were analyzed under. Raises
    errors.DataError, and UsageError where the model needs to know more.
    """
    from stepsplit.analyzer.regression.metrics import facts_of, is_baseline, read_baseline

    path = Path(place)
    if is_baseline(path):
        return read_baseline(path)
    if job is not None:
        return (facts_of(examine([place], workers, progress, rules, job).report, place),)
    return (facts_of(report_at(place, workers, progress, rules), place),)
