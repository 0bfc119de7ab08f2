"""A store of any release is migrated by the process that opens it first."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from generate.released import RELEASED
from sqlalchemy import create_engine, text
from sqlalchemy.engine import Engine, make_url

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store import database
from stepsplit.dashboard.store.database import VERSION
from stepsplit.dashboard.store.schema import METADATA
from stepsplit.dashboard.store.store import Store

_ADD = """
import sys
from stepsplit.dashboard.store.store import Store
store = Store.open(sys.argv[1], sys.argv[2])
print(store.add("run"))
store.close()
"""


def test_a_new_store_has_exactly_todays_tables(bare_database_url: str, tmp_path: Path) -> None:
    Store.open(bare_database_url, tmp_path / "artifacts").close()

    assert _differences(bare_database_url) == []


@pytest.mark.parametrize("version", sorted(path.name for path in RELEASED.iterdir()))
def test_a_store_of_a_release_has_exactly_todays_tables(version: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
        connection.executescript((RELEASED / version / "store.sql").read_text())
    url = f"sqlite:///{tmp_path}/store.db"

    Store.open(url, tmp_path / "artifacts").close()

    assert _differences(url) == []


def test_a_store_of_no_release_is_left_alone(bare_database_url: str, tmp_path: Path) -> None:
    Store.open(bare_database_url, tmp_path / "artifacts").close()
    engine = _engine(bare_database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0009'"))
    engine.dispose()

    with pytest.raises(UsageError, match=r"of no release of stepsplit \(schema 0009\); choose"):
        Store.open(bare_database_url, tmp_path / "artifacts")


def test_the_newest_migration_is_the_one_that_is_opened() -> None:
    scripts = ScriptDirectory(str(Path(database.__file__).parent / "migrations"))

    assert scripts.get_heads() == [VERSION]


@pytest.mark.parametrize("version", [None, "0002", "0003"])
def test_a_store_from_before_the_first_release_is_left_alone(
    version: str | None, bare_database_url: str, tmp_path: Path
) -> None:
    if bare_database_url.startswith("sqlite"):
        Path(str(make_url(bare_database_url).database)).parent.mkdir()
    engine = _engine(bare_database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE runs (id VARCHAR(32) NOT NULL PRIMARY KEY)"))
        if version is not None:
            connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
            connection.execute(text(f"INSERT INTO alembic_version VALUES ('{version}')"))
    engine.dispose()

    with pytest.raises(UsageError) as raised:
        Store.open(bare_database_url, tmp_path / "artifacts")

    place = engine.url.render_as_string(hide_password=True)
    assert str(raised.value) == (
        f"{place}: a store from before stepsplit 0.1.0 (schema {version or '0001'}); open it once"
        " with stepsplit 0.1.0, or choose another --store"
    )


def test_a_store_of_a_newer_stepsplit_is_left_alone(bare_database_url: str, tmp_path: Path) -> None:
    Store.open(bare_database_url, tmp_path / "artifacts").close()
    engine = _engine(bare_database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0999'"))
    engine.dispose()

    with pytest.raises(UsageError, match=r"newer stepsplit \(schema 0999\); upgrade stepsplit"):
        Store.open(bare_database_url, tmp_path / "artifacts")


def test_processes_that_open_one_store_at_once_agree(
    bare_database_url: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", _ADD, bare_database_url, str(tmp_path / "artifacts")]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    made = [other.communicate(timeout=60)[0].strip() for other in others]

    store = Store.open(bare_database_url, tmp_path / "artifacts")
    assert sorted(run.id for run in store.list_runs()) == sorted(made)
    store.close()


def _differences(url: str) -> list[object]:
    engine = _engine(url)
    with engine.connect() as connection:
        found = compare_metadata(MigrationContext.configure(connection), METADATA)
    engine.dispose()
    return list(found)


def _engine(url: str) -> Engine:
    return create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
