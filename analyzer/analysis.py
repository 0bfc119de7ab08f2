"""Files in, Report out: the whole pipeline on one page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from stepsplit.analyzer.compare.causes.find import find_causes
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.schedule_time import ideal_bubble_fraction
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.recording import Recording, read_recording
from stepsplit.analyzer.readers.workers import Progress, no_progress
from stepsplit.analyzer.report.build import build_report, origin_ns
from stepsplit.analyzer.report.report import NO_MODEL, Report, WarningRow
from stepsplit.analyzer.report.tables import Tables, build_tables
from stepsplit.analyzer.split.run import RunSplit, split_run

_Held = Callable[[Report, Recording, RunSplit], Report]


@dataclass(frozen=True, slots=True)
class Analysis:
    """A report, and the detail that goes beside it."""

    report: Report
    tables: Tables


def analyze(*places: str | Path, run: str | Path | None = None) -> Report:
    """The report of the recording in the files, folders, archives and URLs; run, and what is
    raised, as in examine."""
    return examine(places, run=run).report


def examine(
    places: Sequence[str | Path],
    workers: int = 1,
    progress: Progress = no_progress,
    rules: Rules = BUILT_IN,
    run: str | Path | None = None,
) -> Analysis:
    """The report of the recording with its tables, read by up to that many processes.

    rules tell which kernels communicate and which compute. With run, a RUN.toml (whole, or what the
    recording does not tell) or "auto", the report is held against the model. Raises
    errors.DataError, and UsageError where the model needs to know more.
    """
    return _examined(places, workers, progress, rules, _against(run))


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

    return _examined(places, workers, progress, BUILT_IN, tried)


def _examined(
    places: Sequence[str | Path], workers: int, progress: Progress, rules: Rules, held: _Held
) -> Analysis:
    recording = read_recording(places, workers, progress, rules)
    found = split_run(recording.traces, recording.spec, ideal_bubble_fraction, rules)
    causes = find_causes(found, origin_ns(found), recording.records)
    report = build_report(recording, found, causes.findings, causes.notes)
    return Analysis(held(report, recording, found), build_tables(found, rules))


def _against(run: str | Path | None) -> _Held:
    """Holds a report against the model; leaves it as it is where no run is stated."""
    if run is None:
        return lambda report, *_: report
    # The model takes a moment to load, and few ask for it.
    from stepsplit.analyzer.compare.gap.hold import held_against, read_run

    stated = read_run(run)
    return lambda report, recording, found: held_against(report, recording, found, stated)
