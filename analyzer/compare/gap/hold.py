"""A report with its run's prediction, and what lies between the two."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from stepsplit.analyzer.compare.gap.doubts import disagreements
from stepsplit.analyzer.compare.gap.findings import gap_findings
from stepsplit.analyzer.compare.gap.gap import gap_of
from stepsplit.analyzer.compare.gap.price import price_of
from stepsplit.analyzer.compare.gap.wires import wires_of
from stepsplit.analyzer.compare.job.run_job import run_table
from stepsplit.analyzer.model.config_file import job_in, layout_in
from stepsplit.analyzer.model.config_table import Table, read_table
from stepsplit.analyzer.model.predict import predict, rates_of
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.readers.recording import Recording
from stepsplit.analyzer.report.io import body_of, job_body
from stepsplit.analyzer.report.report import Gap, Report, step_median_ns
from stepsplit.analyzer.split.run import RunSplit

GUESSED = "cpu"
"""A family of which the model only guesses, unless it is calibrated: no MFU and no finding rests on
that."""
AUTO = "auto"
"""In place of a RUN.toml: the recording tells all."""


def read_run(run: str | Path) -> Table:
    """What a RUN.toml states, whole or a part; nothing by AUTO. Raises DataError."""
    return Table("run.json", "", {}) if str(run) == AUTO else read_table(run)


def held_against(report: Report, recording: Recording, found: RunSplit, run: Table) -> Report:
    """The report with prediction, gap, MFU and what only the model tells.

    Raises UsageError, which lists what neither run nor recording tells, or says that they are of
    different ranks; DataError for a run that is odd.
    """
    table = run_table(recording.spec, found, run if run.values else None)
    notes = disagreements(layout_in(table), recording.spec, found, table.where)
    job = job_in(table)
    rates = rates_of(table, job.hardware)
    prediction = predict(job, rates)
    gap = gap_of(found, prediction, price_of(job, rates), report, notes, wires_of(job))
    held = _with(report, table, prediction, gap)
    if job.hardware.family == GUESSED and prediction.confidence != "calibrated":
        return replace(held, mfu=None, hfu=None, findings=report.findings)
    return held


def _with(report: Report, table: Table, prediction: Prediction, gap: Gap) -> Report:
    step_ns = step_median_ns(report.steps)
    times = prediction.split.step_ns / step_ns if step_ns else 0.0
    findings = (*report.findings, *gap_findings(gap, report.findings))
    return replace(
        report,
        prediction=body_of(prediction),
        job=job_body(table),
        gap=gap,
        findings=tuple(sorted(findings, key=lambda one: -one.gain_ns)),
        mfu=None if prediction.mfu is None else prediction.mfu * times,
        hfu=None if prediction.hfu is None else prediction.hfu * times,
    )
