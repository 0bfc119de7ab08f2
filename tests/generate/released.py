"""Writes tests/released/VERSION: a report, tables, a baseline, a store, schemas of this version.

cd tests && python -m generate.released, once for each release; the next versions open them
(tests/dashboard/test_released.py). A folder of an earlier version is never written again.
"""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from importlib import metadata
from pathlib import Path

from support.builders import GpuTrace

from generate.docs_schemas import write_schemas
from stepsplit.analyzer.analysis import examine
from stepsplit.dashboard import cli
from stepsplit.dashboard.store.store import Store

RELEASED = Path(__file__).parents[1] / "released"
NAME = "released"


def write_released(folder: Path) -> None:
    """Writes the files of this version into an empty folder."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        recording = Path(temporary) / NAME
        recording.mkdir()
        trace = GpuTrace()
        for step in (1, 2, 3):
            begin = step * 100
            trace.step(step, begin, begin + 50)
            trace.kernel("gemm", begin, begin + 30).kernel("gemm", begin + 35, begin + 45)
        analysis = examine([str(trace.write(recording))])
        database = Path(temporary) / "store.db"
        store = Store.open(f"sqlite:///{database}", folder / "artifacts")
        run_id = store.import_report(NAME, analysis.report, analysis.tables)
        store.close()
        with closing(sqlite3.connect(database)) as connection:
            (folder / "store.sql").write_text("\n".join(connection.iterdump()) + "\n")
    report = folder / "artifacts" / run_id
    write_schemas(folder / "schemas")
    assert cli.run(["baseline", str(report), "--out", str(folder / "baseline.json")]) == 0


if __name__ == "__main__":
    write_released(RELEASED / metadata.version("stepsplit"))
