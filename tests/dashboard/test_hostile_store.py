"""A store that others have made or changed opens, deletes and overwrites nothing of the user's."""

from __future__ import annotations

import os
import shutil
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from support.report_builders import analysis
from support.store_builders import queued, uploaded

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard import cli
from stepsplit.dashboard.store import watch_slots
from stepsplit.dashboard.store.store import Store

DATABASE = Path(".stepsplit", "store.db")
OTHER_UID = 65534


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, and a thesis beside it that must stay."""
    folder = tmp_path / "here"
    folder.mkdir()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("three years")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The database of a new store."""
    folder = tmp_path_factory.mktemp("empty")
    Store.open(f"sqlite:///{folder}/store.db", folder / "artifacts").close()
    return (folder / "store.db").read_bytes()


Make = Callable[..., None]


@pytest.fixture
def make(empty: bytes) -> Make:
    """Makes the store of a stranger in a folder, with what some statements add."""

    def make_store(folder: Path, *statements: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "store.db").write_bytes(empty)
        with closing(sqlite3.connect(folder / "store.db")) as connection:
            connection.execute("PRAGMA journal_mode=DELETE")
            for statement in statements:
                connection.execute(statement)
            connection.commit()

    return make_store


def _refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert cli.run(list(words)) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


# The store in the current folder.


def test_a_store_that_came_with_the_folder_is_opened_only_by_name(
    make: Make, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unpacked by the user, so that its owner and mode say nothing."""
    thesis = tmp_path / "thesis"
    make(here / ".stepsplit", f"INSERT INTO deleted VALUES ('{thesis}')")

    for words in (["dashboard", "--port", "0"], ["runs"], ["token", "create", "x"], ["audit"]):
        assert "not made by you on this host" in _refusal(capsys, *words)
    assert (thesis / "thesis.txt").exists()
    assert sorted(path.name for path in DATABASE.parent.iterdir()) == ["store.db"]

    named = _refusal(capsys, "dashboard", "--port", "0", "--store", f"sqlite:///{DATABASE}")
    assert f"an id that stepsplit does not write ('{thesis}')" in named
    assert (thesis / "thesis.txt").exists()
    assert cli.run(["runs", "--store", f"sqlite:///{DATABASE}"]) == 0


def test_the_users_own_store_is_opened_until_another_takes_its_place(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert cli.run(["token", "create", "mine"]) == 0
    copy = tmp_path / "copy"
    shutil.copytree(here, copy)
    with closing(sqlite3.connect(copy / DATABASE)) as connection:
        connection.execute("UPDATE tokens SET role = 'admin'")
        connection.commit()

    shutil.copy(copy / DATABASE, here / "new")
    (here / "new").replace(DATABASE)

    assert "not made by you" in _refusal(capsys, "token", "list")
    os.chdir(copy)
    assert "not made by you" in _refusal(capsys, "token", "list")


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def _give_away(path: Path) -> None:
    cli.run(["token", "create", "mine"])
    os.chown(path, OTHER_UID, OTHER_UID)


def _open_to_all(path: Path) -> None:
    cli.run(["token", "create", "mine"])
    path.chmod(0o777)


def _plant_journal(path: Path) -> None:
    cli.run(["token", "create", "mine"])
    path.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(504))


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (lambda other: _link(Path(".stepsplit"), other), "is a symbolic link"),
        (lambda other: _link(DATABASE, other / "store.db"), "is a symbolic link"),
        (lambda other: _link(DATABASE, other / "new.db"), "is a symbolic link"),
        (lambda other: _link(Path(".stepsplit/artifacts"), other), "is a symbolic link"),
        (lambda _: (DATABASE.parent.mkdir(), os.mkfifo(DATABASE)), "not made by you"),
        (lambda _: DATABASE.mkdir(parents=True), "not made by you"),
        (lambda _: _give_away(DATABASE), "belongs to another user (65534)"),
        (lambda _: _give_away(DATABASE.parent), "belongs to another user (65534)"),
        (lambda _: _open_to_all(DATABASE), "can be written by other users"),
        (lambda _: _open_to_all(DATABASE.parent), "can be written by other users"),
        (lambda _: _plant_journal(Path(f"{DATABASE}-journal")), "not of this store; remove it"),
    ],
)
def test_a_planted_default_store_is_refused_in_one_line(
    make: Make,
    here: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    plant: Callable[[Path], object],
    reason: str,
) -> None:
    other = tmp_path / "other"
    make(other)
    plant(other)

    assert reason in _refusal(capsys, "delete", "0" * 12)
    assert sorted(path.name for path in other.iterdir()) == ["store.db"]


def test_a_store_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    with pytest.raises(UsageError, match="not a file"):
        Store.open(f"sqlite:///{tmp_path}/fifo", tmp_path / "artifacts")


# What a database may have: tables of the migrations, and values that stepsplit writes.


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER INSERT ON runs BEGIN DELETE FROM tags; END",
        "CREATE VIEW v AS SELECT load_extension('x.so')",
        "CREATE VIRTUAL TABLE v USING fts5(a)",
        "CREATE TABLE others (a TEXT)",
        "CREATE TABLE watch_notes (a TEXT, b TEXT GENERATED ALWAYS AS (hex(a)))",
        "CREATE TABLE watch_notes (a TEXT DEFAULT (1 + hex(2)))",
        "CREATE INDEX i ON runs (hex(name))",
        "CREATE INDEX i ON runs (name) WHERE name > ''",
    ],
)
def test_a_database_with_what_no_migration_makes_is_refused(
    make: Make, tmp_path: Path, statement: str
) -> None:
    make(tmp_path / "other", statement)

    with pytest.raises(UsageError, match=r"stepsplit does not make the \w+ '\w+' of this store"):
        Store.open(f"sqlite:///{tmp_path}/other/store.db", tmp_path / "artifacts")


RUN = "INSERT INTO runs (id, name, created_unix_ns, state) VALUES ('{0}', 'x', 1, 'done')"
JOB = "INSERT INTO jobs (run_id, state, queued_unix_ns, attempts) VALUES ('{0}', 'queued', 1, 0)"
FILE = "INSERT INTO files VALUES ('0123456789ab', '{0}', 1, 1)"
WATCH = (
    "INSERT INTO watches (name, created_unix_ns, received_unix_ns, newest_unix_ns,"
    " rolled_unix_ns, trimmed_unix_ns, last_step, batches) VALUES ('{0}', 1, 1, 1, 1, 1, 1, 1)"
)
TOKEN = "INSERT INTO tokens (id, name, sha256, created_unix_ns) VALUES ('{0}', 'x', 'y', 1)"


@pytest.mark.parametrize(
    "value", ["../../thesis", "/etc", "0123/../..", "", "ABCDEF012345", "\uff10" * 12]
)
@pytest.mark.parametrize(
    ("insert", "read"),
    [
        ("INSERT INTO deleted VALUES ('{0}')", lambda store: store.sweep()),
        (RUN, lambda store: store.list_runs()),
        (RUN, lambda store: store.complete_next_run()),
        (JOB, lambda store: store.jobs.claim("w1")),
        (TOKEN, lambda store: store.tokens.list_tokens()),
    ],
)
def test_an_id_of_another_form_is_refused_where_it_is_read(
    make: Make, tmp_path: Path, insert: str, read: Callable[[Store], object], value: str
) -> None:
    make(tmp_path / "other", insert.format(value))
    store = Store.open(f"sqlite:///{tmp_path}/other/store.db", tmp_path / "artifacts")

    with pytest.raises(UsageError, match="an id that stepsplit does not write"):
        read(store)


@pytest.mark.parametrize("value", ["../x", "/etc/passwd", "a//b", "a/./b", "a\\b", "a\nb", ""])
def test_a_path_or_name_of_another_form_is_refused_where_it_is_read(
    make: Make, tmp_path: Path, value: str
) -> None:
    make(tmp_path / "other", FILE.format(value), WATCH.format(value))
    store = Store.open(f"sqlite:///{tmp_path}/other/store.db", tmp_path / "artifacts")

    with pytest.raises(UsageError, match="a path that stepsplit does not write"):
        store.files.list_files("0123456789ab")
    with pytest.raises(UsageError, match="a name that stepsplit does not write"):
        store.watches.list_watches()


def test_an_array_that_unpacks_to_gigabytes_is_refused() -> None:
    packer = zlib.compressobj(1)
    bomb = b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(300)), packer.flush()])

    with pytest.raises(UsageError, match="an array that stepsplit does not write"):
        watch_slots.unpack_columns(bomb, 3)


# The files of runs: below their root, and no symbolic link on the way.


@pytest.fixture(params=["folder", "remote"])
def linked(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Store, Path]:
    """A store and the local root of its artifacts."""
    place = tmp_path / "artifacts"
    url = str(place) if request.param == "folder" else f"local://{tmp_path}/bucket"
    local = tmp_path / "cache"
    store = Store.open(f"sqlite:///{tmp_path}/runs.db", url, local)
    return store, place if request.param == "folder" else local


ID = "0123456789ab"

PLACES = ("", "/input", "/input/deep", "/input/rank0", "/tables", "/report.json", "/job.toml")


@pytest.mark.parametrize("name", PLACES)
def test_a_link_among_the_files_of_runs_is_not_followed(
    linked: tuple[Store, Path], tmp_path: Path, name: str
) -> None:
    store, root = linked
    outside = tmp_path / "thesis"
    outside.mkdir()
    (outside / "thesis.txt").write_text("three years")
    link = root / f"{ID}{name}"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    received = tmp_path / "received"
    made, artifacts = analysis(), store.artifacts

    refused = 0
    for use in (
        lambda: artifacts.keep_upload(ID, "deep/rank1", received),
        lambda: artifacts.keep_upload(ID, "rank0", received),
        lambda: artifacts.fetch_uploads(ID),
        lambda: artifacts.save(ID, made.report, made.tables),
        lambda: artifacts.fetch_results(ID),
        lambda: artifacts.save_file(ID, "job.toml", b"[model]\n"),
        lambda: artifacts.read_file(ID, "input/deep/thesis.txt"),
        lambda: artifacts.read_file(ID, "job.toml"),
        lambda: artifacts.drop_uploads(ID),
        lambda: artifacts.remove(ID),
    ):
        received.write_bytes(b"new")
        try:
            use()
        except UsageError as error:
            assert "a symbolic link" in str(error)
            refused += 1

    assert refused >= 1
    assert [path.name for path in outside.iterdir()] == ["thesis.txt"]
    assert (outside / "thesis.txt").read_text() == "three years"


@pytest.mark.parametrize("run_id", ["..", ".", "", "/etc", "../thesis", "0" * 33, f"{ID}/input"])
def test_only_a_run_has_files(linked: tuple[Store, Path], tmp_path: Path, run_id: str) -> None:
    store, root = linked
    (tmp_path / "thesis").mkdir()
    received = tmp_path / "received"
    received.write_bytes(b"new")

    for use in (
        lambda: store.artifacts.remove(run_id),
        lambda: store.artifacts.keep_upload(run_id, "rank0", received),
        lambda: store.artifacts.fetch_uploads(run_id),
        lambda: store.artifacts.fetch_results(run_id),
        lambda: store.artifacts.save_file(run_id, "job.toml", b"x"),
        lambda: store.artifacts.read_file(run_id, "job.toml"),
        lambda: store.find_folder(run_id),
    ):
        with pytest.raises(UsageError, match="invalid run id"):
            use()
    for path in ("../../thesis", "/etc/passwd", "a/../../../b"):
        with pytest.raises(UsageError, match="not a path among the files of runs"):
            store.artifacts.keep_upload(ID, path, received)

    assert (tmp_path / "thesis").exists() and root.exists()


def test_a_run_goes_with_its_own_files_only(store: Store, tmp_path: Path) -> None:
    """A link in an upload is removed with it, not what it leads to."""
    run_id, kept = queued(store), uploaded(store, "kept")
    outside = tmp_path / "thesis"
    outside.mkdir()
    (store.find_folder(run_id) / "input" / "link").symlink_to(outside)

    assert store.delete(run_id)

    assert not store.find_folder(run_id).exists()
    assert outside.exists() and store.find_folder(kept).exists()
