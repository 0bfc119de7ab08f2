"""A store of any version is migrated by the process that opens it first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, text
from sqlalchemy.engine import Engine, make_url
from support.store_builders import claimed, known_analysis, state

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store import database
from stepsplit.dashboard.store.database import VERSION
from stepsplit.dashboard.store.ingest import process_job
from stepsplit.dashboard.store.schema import METADATA
from stepsplit.dashboard.store.store import Store

_ADD = """
import sys
from stepsplit.dashboard.store.store import Store
store = Store.open(sys.argv[1], sys.argv[2])
print(store.add("run"))
store.close()
"""
_OF_0001 = """
CREATE TABLE runs (
  id VARCHAR(32) NOT NULL PRIMARY KEY, name VARCHAR(200) NOT NULL,
  created_unix_ns BIGINT NOT NULL, state VARCHAR(16) NOT NULL, error TEXT, world_size INTEGER,
  mesh VARCHAR(200), backend VARCHAR(100), step_ns BIGINT, compute_ns BIGINT,
  collective_ns BIGINT, p2p_ns BIGINT, skew_ns BIGINT, bubble_ns BIGINT, copy_ns BIGINT,
  idle_ns BIGINT, compute_share FLOAT, collective_share FLOAT, p2p_share FLOAT, skew_share FLOAT,
  bubble_share FLOAT, copy_share FLOAT, idle_share FLOAT, steps INTEGER, warnings INTEGER
)"""


def test_the_migrations_make_exactly_todays_tables(database_url: str, tmp_path: Path) -> None:
    Store.open(database_url, tmp_path / "artifacts").close()

    assert _differences(database_url) == []


def test_the_newest_migration_is_the_one_that_is_opened() -> None:
    scripts = ScriptDirectory(str(Path(database.__file__).parent / "migrations"))

    assert scripts.get_heads() == [VERSION]


def test_a_store_from_before_migrations_keeps_its_runs(database_url: str, tmp_path: Path) -> None:
    """As create_all made it, with a run in every state."""
    states = ("done", "failed", "queued", "running", "uploading")
    _make_old(database_url, tmp_path, states)

    store = Store.open(database_url, tmp_path / "artifacts")

    assert _differences(database_url) == []
    torn = "the server stopped during the upload; upload it again"
    assert {run.name: (run.state, run.error) for run in store.list_runs()} == {
        "done": ("done", None),
        "failed": ("failed", None),
        "queued": ("queued", None),
        "running": ("queued", None),
        "uploading": ("failed", torn),
    }
    job = claimed(store)
    assert process_job(store, job, known_analysis) == "done"
    assert state(store, job.run_id) == ("done", None)
    store.close()


def test_a_store_of_a_newer_stepsplit_is_left_alone(database_url: str, tmp_path: Path) -> None:
    Store.open(database_url, tmp_path / "artifacts").close()
    engine = _engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0999'"))
    engine.dispose()

    with pytest.raises(UsageError, match=r"newer stepsplit \(schema 0999\); upgrade stepsplit"):
        Store.open(database_url, tmp_path / "artifacts")


def test_processes_that_open_one_store_at_once_agree(database_url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _ADD, database_url, str(tmp_path / "artifacts")]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    made = [other.communicate(timeout=60)[0].strip() for other in others]

    store = Store.open(database_url, tmp_path / "artifacts")
    assert sorted(run.id for run in store.list_runs()) == sorted(made)
    store.close()


def _make_old(url: str, folder: Path, states: tuple[str, ...]) -> None:
    if url.startswith("sqlite"):
        Path(str(make_url(url).database)).parent.mkdir()
    engine = _engine(url)
    with engine.begin() as connection:
        connection.execute(text(_OF_0001))
        connection.execute(text("CREATE INDEX ix_runs_created_unix_ns ON runs (created_unix_ns)"))
        for number, name in enumerate(states):
            run_id = f"{number:012x}"
            (folder / "artifacts" / run_id / "input").mkdir(parents=True)
            values = f"'{run_id}', '{name}', {number}, '{name}', 4, 1, 0"
            columns = "id, name, created_unix_ns, state, world_size, steps, warnings"
            connection.execute(text(f"INSERT INTO runs ({columns}) VALUES ({values})"))
    engine.dispose()


def _differences(url: str) -> list[object]:
    engine = _engine(url)
    with engine.connect() as connection:
        found = compare_metadata(MigrationContext.configure(connection), METADATA)
    engine.dispose()
    return list(found)


def _engine(url: str) -> Engine:
    return create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
