"""Folders and files in places that other users of the host write to: what they put there first."""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepsplit.collectors.attach import left_states, messages, sockets
from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.record import scratch_disk
from stepsplit.collectors.record.pack import take_turn
from stepsplit.collectors.safe_io import private_folder
from stepsplit.collectors.safe_io.private_folder import (
    list_meeting_folders,
    make_meeting_folder,
    make_private_folder,
    make_scratch_folder,
    open_private,
)

OTHER = 65534
"""Another user."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes files of another user")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with a /tmp of all users, and a home folder; no user has logged in."""
    monkeypatch.delenv("STEPSPLIT_SOCKETS", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(private_folder, "RUNTIME", tmp_path / "run")
    monkeypatch.setattr(private_folder, "TEMPORARY", tmp_path / "tmp")
    (tmp_path / "home").mkdir(mode=0o755)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    return tmp_path


def home_place(host: Path) -> Path:
    return host / "home/.cache/stepsplit" / f"sockets-{socket.gethostname()}"


def make_folder_of_all(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)
    (place / "pack0.lock").symlink_to("planted")
    os.mkfifo(place / "pack1.lock")


def make_folder_of_another(place: Path) -> None:
    make_folder_of_all(place)
    os.chown(place, OTHER, OTHER)


def make_link(place: Path) -> None:
    (place.parent / "target").mkdir(mode=0o700)
    place.symlink_to("target")


SQUATS: list[Callable[[Path], object]] = [
    make_folder_of_all,
    make_link,
    lambda place: place.symlink_to("missing"),
    lambda place: place.symlink_to(place.name),
    Path.touch,
    os.mkfifo,
]
if os.geteuid() == 0:
    SQUATS += [make_folder_of_another, lambda place: os.mknod(place, 0o20666, os.makedev(1, 7))]


def list_tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("squat", SQUATS)
def test_a_taken_name_is_left_alone_and_both_sides_meet_elsewhere(
    host: Path, squat: Callable[[Path], object]
) -> None:
    squat(host / "tmp" / f"stepsplit-{os.geteuid()}")
    before = list_tree(host / "tmp")

    assert make_meeting_folder() == home_place(host)
    assert list_meeting_folders() == [home_place(host)]
    # Without a place for the locks packing does not wait: these would never be free.
    with take_turn(), take_turn(), take_turn():
        assert list_tree(host / "tmp") == before


def test_two_processes_with_other_variables_meet(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_tmp, login = host / "tmp" / f"stepsplit-{os.geteuid()}", host / f"run/{os.geteuid()}"
    assert make_meeting_folder() == in_tmp

    login.mkdir(mode=0o700, parents=True)
    assert make_meeting_folder() == login / "stepsplit"
    assert list_meeting_folders() == [login / "stepsplit", in_tmp]

    login.chmod(0o755)
    assert list_meeting_folders() == [in_tmp]
    in_tmp.chmod(0o755)
    (session := host / "session").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert make_meeting_folder() == session / "stepsplit"


def test_without_any_place_the_error_says_why_and_how(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (taken := host / "tmp" / f"stepsplit-{os.geteuid()}").touch()
    (host / "home/.cache").touch()

    with pytest.raises(CollectError) as error:
        sockets.make_socket_folder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(host / "nonexistent"))
        with pytest.raises(CollectError):
            sockets.make_socket_folder()

    assert list_meeting_folders() == [] and not (host / "nonexistent").exists()
    assert str(error.value) == (
        f"{taken}: it is not a folder; {home_place(host)}: Not a directory; set STEPSPLIT_SOCKETS"
        " to a private folder, in the job too"
    )
    monkeypatch.setenv("STEPSPLIT_SOCKETS", str(host / "named"))
    assert sockets.make_socket_folder() == host / "named"


def test_a_folder_that_others_may_replace_is_not_private(tmp_path: Path) -> None:
    (shared := tmp_path / "shared").mkdir()
    for mode, private, named in ((0o1777, True, True), (0o777, False, True), (0o755, True, True)):
        shared.chmod(mode)
        for wanted, is_named in ((private, False), (named, True)):
            for make in (
                lambda: make_private_folder(shared / "own", named=is_named),  # noqa: B023
                lambda: make_scratch_folder(shared, "own-", named=is_named),  # noqa: B023
            ):
                if wanted:
                    assert make().stat().st_mode & 0o777 == 0o700
                else:
                    with pytest.raises(PermissionError, match="other users may rename"):
                        make()


@as_root
def test_a_folder_in_one_of_another_user_is_not_private(tmp_path: Path) -> None:
    (theirs := tmp_path / "theirs").mkdir(mode=0o777)
    os.chown(theirs, OTHER, OTHER)
    (tmp_path / "link").symlink_to(theirs)

    for parent in (theirs, tmp_path / "link", theirs / "below"):
        with pytest.raises(PermissionError, match="another user owns"):
            make_private_folder(parent / "own", named=True)
    assert list_tree(theirs) == []


def test_a_missing_folder_is_made_private_with_those_above_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = make_private_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)

    assert [path.stat().st_mode & 0o777 for path in (made, *made.parents[:2])] == [0o700] * 3


# Files.


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_hard_link(path: Path) -> None:
    os.link(path.parent / "mine", path)


@pytest.mark.parametrize(
    "plant",
    [
        lambda path: path.symlink_to("mine"),
        lambda path: path.symlink_to("missing"),
        make_hard_link,
        os.mkfifo,
        Path.mkdir,
        make_socket,
        *([lambda path: (path.touch(), os.chown(path, OTHER, OTHER))] * (os.geteuid() == 0)),
    ],
)
def test_only_a_regular_file_of_this_user_is_opened(
    plant: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("content")
    plant(tmp_path / "name")
    before = list_tree(tmp_path)

    for mode in ("rb", "ab", "wb", "xb", "r+b"):
        with pytest.raises(OSError):
            open(tmp_path / "name", mode, opener=open_private).close()

    assert list_tree(tmp_path) == before
    assert (tmp_path / "mine").read_text() == "content"


def test_a_private_file_is_replaced_or_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for text in ("longer text", "short"):
            with open(tmp_path / "name", "w", opener=open_private) as file:
                file.write(text)
    finally:
        os.umask(before)

    assert (tmp_path / "name").read_text() == "short"
    assert (tmp_path / "name").stat().st_mode & 0o777 == 0o600


def test_raw_traces_go_to_no_scratch_folder_that_others_may_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    (mounts := tmp_path / "mountinfo").write_text(
        f"22 1 0:1 / / rw - tmpfs none rw\n23 22 0:2 / {tmp_path}/nfs rw - nfs4 host:/ rw\n"
    )
    monkeypatch.setattr(scratch_disk, "MOUNTS", mounts)
    monkeypatch.setattr(scratch_disk, "_has_space", lambda folder: True)
    for name in scratch_disk.SCRATCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(scratch))
    out = tmp_path / "nfs" / "run"

    scratch.chmod(0o777)
    assert scratch_disk.choose_raw_folder(out) == out
    # A volume of a pod is like this, and named.
    monkeypatch.setenv("STEPSPLIT_SCRATCH", f"{scratch}/")
    assert scratch_disk.choose_raw_folder(out).parent == scratch
    monkeypatch.delenv("STEPSPLIT_SCRATCH")
    scratch.chmod(0o1777)
    chosen = {scratch_disk.choose_raw_folder(out) for _ in range(2)}
    assert {path.parent for path in chosen} == {scratch} and len(chosen) == 2


# Sockets of agents.


def test_a_socket_below_a_long_path_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSPLIT_SOCKETS", str(tmp_path / ("long" * 25)))
    with sockets.listen(sockets.build_socket_path(41)) as server:

        def answer_one() -> None:
            connection, _ = server.accept()
            with connection:
                messages.read_line(connection)
                connection.sendall(messages.format_answer(messages.AgentAnswer(True, 7)))

        thread = threading.Thread(target=answer_one)
        thread.start()
        assert sockets.list_agents() == [41]
        assert messages.ask_watch(41, None) == messages.AgentAnswer(True, 7)
        thread.join()


def test_the_socket_of_a_process_of_another_container_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSPLIT_SOCKETS", str(tmp_path / "sockets"))
    path = sockets.build_socket_path(1 << 22)
    with sockets.listen(path):
        os.utime(path, (0, 0))
        with pytest.raises(CollectError, match="of another container with the same number"):
            sockets.listen(path)
        left_states.remove_old_states()
        assert path.exists()
    sockets.listen(path).close()
    os.utime(path, (0, 0))
    left_states.remove_old_states()
    assert not path.exists()


def test_a_peer_that_sends_slowly_does_not_keep_the_agent() -> None:
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.05):
            theirs.send(b" ")

    with ours, theirs:
        thread = threading.Thread(target=drip)
        thread.start()
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            messages.read_line(ours, timeout_s=0.3)
        assert time.monotonic() - begin < 2
        stop.set()
        thread.join()


CONNECT = "import socket, sys; s = socket.socket(1); s.connect(chr(0) + sys.argv[1]); s.recv(9)"


@as_root
def test_a_peer_of_another_user_is_not_of_this_one(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        # Abstract: the folders of this test are closed to the other user.
        name = f"stepsplit-test-{os.getpid()}"
        server.bind(f"\0{name}")
        server.listen()
        for user, is_ours in ((0, True), (OTHER, False)):
            with subprocess.Popen(
                ["/usr/bin/python3", "-c", CONNECT, name],
                user=user, cwd="/", stdout=subprocess.DEVNULL,
            ):  # fmt: skip
                connection, _ = server.accept()
                with connection:
                    assert sockets.is_of_this_user(connection) == is_ours
