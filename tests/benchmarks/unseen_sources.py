"""Runs of publishers that no constant and no band knows, as the model predicts them.

python tests/benchmarks/unseen_sources.py FOLDER     (with unseen_*.csv, one publisher each)

The columns are keys of job.toml, and step_s or tokens_per_s_per_gpu what was measured. Printed by
publisher and by confidence: runs, errors of the step time, and how many are in the printed band.
Of rows that have since been taken into training_reports.csv the bands know; `validate` leaves their
publisher out.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    """A run with its printed band, and the confidence in it."""

    publisher: str
    confidence: Confidence
    row: ValidationRow


def predict_rows(folder: Path) -> Iterator[PredictedRow]:
    """Predicts the rows with a measured speed; says which ones cannot be predicted."""
    for path in sorted(folder.glob("unseen_*.csv")):
        publisher = path.stem.removeprefix("unseen_")
        with path.open(newline="", encoding="utf-8") as file:
            rows = [
                {key: value or "" for key, value in row.items()} for row in csv.DictReader(file)
            ]
        for values in rows:
            if not values["step_s"] and not values["tokens_per_s_per_gpu"]:
                continue
            record = PublishedRow(
                path.stem, f"{publisher}/{values['case']}", {**values, "publisher": publisher}
            )
            try:
                (case,) = build_training_report(record)
                found = predict(case.job)
            except StepsplitError as error:
                sys.stderr.write(f"{record.id}: {error}\n")
                continue
            compared = record.compare("step", case.step_ns, found.split.step_ns, "ns")
            row = ValidationRow(
                compared.table, compared.case, compared.what, compared.published,
                compared.predicted, compared.unit, low=found.low_ns, high=found.high_ns,
            )  # fmt: skip
            yield PredictedRow(publisher, found.confidence, row)


def build_lines(name: str, rows: Sequence[PredictedRow]) -> Iterator[tuple[str, ...]]:
    """One line for all rows of a publisher, or of all, and one for each confidence."""
    for confidence in ("all", *CONFIDENCES):
        some = [each.row for each in rows if confidence in ("all", each.confidence)]
        if some:
            mean, p90 = compute_measure("mean/p90", some)
            inside = sum(row.is_inside for row in some)
            yield (
                name, confidence, str(len(some)), f"{mean:.1%}", f"{p90:.1%}",
                f"{inside} of {len(some)}, {inside / len(some):.0%}",
            )  # fmt: skip


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
        lines += build_lines(publisher, [each for each in rows if each.publisher == publisher])
    lines += build_lines("all", rows)
    sys.stdout.write(in_markdown(lines) + "\n")
    if given.rows:
        for each in rows:
            row = each.row
            sys.stdout.write(
                f"{row.case} {each.confidence}: measured {row.published / 1e6:,.0f} ms, predicted"
                f" {row.predicted / 1e6:,.0f} ({row.low / 1e6:,.0f}-{row.high / 1e6:,.0f}),"
                f" {row.error:+.1%}\n"
            )


if __name__ == "__main__":
    main()
