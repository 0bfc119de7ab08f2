"""The report's rows as pandas frames, for notebooks: the only place with pandas."""

from __future__ import annotations

import msgspec
import pandas as pd

from stepsplit.analyzer import units
from stepsplit.analyzer.report.medians import bucket_medians
from stepsplit.analyzer.report.report import Report


def steps(report: Report) -> pd.DataFrame:
    """One row a rank and step, columns as in report.json."""
    return pd.DataFrame([msgspec.structs.asdict(row) for row in report.steps])


def exposed(report: Report) -> pd.DataFrame:
    """Time lost to communication, one row a rank, step, axis and phase."""
    return pd.DataFrame([msgspec.structs.asdict(row) for row in report.exposed])


def medians(report: Report) -> pd.DataFrame:
    """The split of the run for people: one row a bucket, units written."""
    rows = [
        (m.bucket, units.milliseconds(m.median_ns), units.percent(m.share),
         f"{m.worst_rank} ({units.milliseconds(m.worst_ns)})")
        for m in bucket_medians(report.steps)
    ]  # fmt: skip
    columns = ["bucket", "median of full steps", "share", "worst rank"]
    return pd.DataFrame(rows, columns=columns).set_index("bucket")
