"""A store with the runs of several jobs, for the pages that group and compare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import structs
from sqlalchemy import create_engine, text

from stepsplit.analyzer.report.io import read_report
from stepsplit.analyzer.report.report import Report
from stepsplit.dashboard.store.metrics import compute_job_fingerprint
from stepsplit.dashboard.store.run_row import Tag
from stepsplit.dashboard.store.store import Store
from support.report_builders import analysis, paced

SAMPLES = Path(__file__).parents[2] / "sample_traces"
DAY_NS = 86_400 * 10**9
FIRST_NS = 1_790_000_000 * 10**9
JOBS: Mapping[str, Report] = {
    "gpt": analysis().report,
    "tiny": read_report(SAMPLES / "tp2_pp2"),
    "m2": read_report(SAMPLES / "pp2_m2"),
    "m8": read_report(SAMPLES / "pp2_m8"),
}
"""A report of each of four jobs; two of them have one label."""


def key_of(job: str) -> str:
    """The key of one of JOBS."""
    return compute_job_fingerprint(JOBS[job]).key


def store_runs(store: Store, paces: Mapping[str, Sequence[float]]) -> dict[str, list[str]]:
    """Runs of each job, one a day from the oldest to the newest: their ids by job."""
    made = analysis()
    ids: dict[str, list[str]] = {job: [] for job in paces}
    for day in range(max(map(len, paces.values()))):
        for job, own in paces.items():
            if day < len(own):
                name, tags = f"{job}-{day:02}", [Tag("branch", "main" if day % 3 else "fix")]
                report = paced(JOBS[job], own[day])
                renamed = structs.replace(report, run=structs.replace(report.run, name=name))
                ids[job].append(store.import_report(name, renamed, made.tables, tags))
                _set_day(store.url, ids[job][-1], day)
    return ids


def _set_day(url: str, run_id: str, day: int) -> None:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        values = {"at": FIRST_NS + day * DAY_NS, "id": run_id}
        connection.execute(text("UPDATE runs SET created_unix_ns = :at WHERE id = :id"), values)
    engine.dispose()
