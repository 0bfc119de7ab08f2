"""Runs of publishers that no constant and no band knows, as the model predicts them.

python tests/benchmarks/unseen_sources.py FOLDER     (with unseen_*.csv, one publisher each)

The columns are keys of job.toml, and step_s, tokens_per_s_per_gpu or peak_memory_GiB what was
measured. Printed by publisher and by confidence: runs, errors of the step time, and how many are in
the printed band; by framework the same of the peak memory.
Of rows that have since been taken into training_reports.csv the bands know; `validate` leaves their
publisher out.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.table import in_markdown
from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.prediction import Confidence
from stepsplit.analyzer.validation.published_runs import build_training_report
from stepsplit.analyzer.validation.tables import PublishedRow, ValidationRow, compute_measure

CONFIDENCES: tuple[Confidence, ...] = ("high", "medium", "low")


@dataclass(frozen=True)
class PredictedRow:
    """A run with its printed bands: of its step, of its peak memory, or of both."""

    publisher: str
    framework: str
    confidence: Confidence
    step: ValidationRow | None
    peak: ValidationRow | None


def predict_rows(folder: Path) -> Iterator[PredictedRow]:
    """Predicts the rows with a measurement; says which ones cannot be predicted."""
    for path in sorted(folder.glob("unseen_*.csv")):
        publisher = path.stem.removeprefix("unseen_")
        with path.open(newline="", encoding="utf-8") as file:
            rows = [
                {key: value or "" for key, value in row.items()} for row in csv.DictReader(file)
            ]
        for values in rows:
            is_timed = bool(values["step_s"] or values["tokens_per_s_per_gpu"])
            if not is_timed and not values["peak_memory_GiB"]:
                continue
            # A job needs a speed to be a case; of one that was not timed it is not looked at.
            timed = values if is_timed else {**values, "step_s": "1"}
            record = PublishedRow(
                path.stem, f"{publisher}/{values['case']}", {**timed, "publisher": publisher}
            )
            try:
                (case,) = build_training_report(record)
                found = predict(case.job)
            except StepsplitError as error:
                sys.stderr.write(f"{record.id}: {error}\n")
                continue
            step = peak = None
            if is_timed:
                step = replace(
                    record.compare("step", case.step_ns, found.split.step_ns, "ns"),
                    low=found.low_ns, high=found.high_ns,
                )  # fmt: skip
            if values["peak_memory_GiB"]:
                # The most that any stage takes, and the ends of its band.
                most, low, high = (
                    max(ends) / 2**30
                    for ends in zip(
                        *(
                            (one.total_bytes, one.total_bytes_low, one.total_bytes_high)
                            for one in found.memory
                        ),
                        strict=True,
                    )
                )
                measured = record.read_number("peak_memory_GiB")
                peak = replace(record.compare("peak", measured, most, "GiB"), low=low, high=high)
            framework = case.job.training.framework
            yield PredictedRow(publisher, framework, found.confidence, step, peak)


def build_line(name: str, kind: str, rows: Sequence[ValidationRow]) -> tuple[str, ...]:
    mean, p90 = compute_measure("mean/p90", rows)
    inside = sum(row.is_inside for row in rows)
    return (
        name, kind, str(len(rows)), f"{mean:.1%}", f"{p90:.1%}",
        f"{inside} of {len(rows)}, {inside / len(rows):.0%}",
    )  # fmt: skip


def build_step_lines(name: str, rows: Sequence[PredictedRow]) -> Iterator[tuple[str, ...]]:
    """One line for all rows of a publisher, or of all, and one for each confidence."""
    for confidence in ("all", *CONFIDENCES):
        steps = [
            each.step
            for each in rows
            if each.step is not None and confidence in ("all", each.confidence)
        ]
        if steps:
            yield build_line(name, confidence, steps)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--rows", action="store_true", help="print every run too")
    given = options.parse_args()
    rows = list(predict_rows(given.folder))
    lines: list[tuple[str, ...]] = [
        ("publisher", "confidence", "runs", "mean", "p90", "inside the band")
    ]
    for publisher in dict.fromkeys(each.publisher for each in rows):
        lines += build_step_lines(publisher, [each for each in rows if each.publisher == publisher])
    lines += build_step_lines("all", rows)
    for framework in sorted({each.framework for each in rows}):
        peaks = [each.peak for each in rows if each.framework == framework and each.peak]
        if peaks:
            lines.append(build_line(framework, "peak memory", peaks))
    sys.stdout.write(in_markdown(lines) + "\n")
    if given.rows:
        for row in (each.step for each in rows if each.step is not None):
            sys.stdout.write(
                f"{row.case}: measured {row.published / 1e6:,.0f} ms, predicted"
                f" {row.predicted / 1e6:,.0f} ({row.low / 1e6:,.0f}-{row.high / 1e6:,.0f}),"
                f" {row.error:+.1%}\n"
            )


if __name__ == "__main__":
    main()
