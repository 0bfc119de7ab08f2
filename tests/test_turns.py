"""What counts as changed for the slow tests that take turns."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import turns
from support.turns import Change, read_change


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository of two commits: the second changes one file and moves another."""
    monkeypatch.setattr(turns, "ROOT", tmp_path)
    monkeypatch.delenv("STEPSPLIT_CHANGED_SINCE", raising=False)
    run_git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "changed.py").write_text("before\n")
    (tmp_path / "moved.py").write_text("the same\n")
    commit(tmp_path)
    (tmp_path / "changed.py").write_text("after\n")
    (tmp_path / "moved.py").rename(tmp_path / "elsewhere.py")
    commit(tmp_path)
    read_change.cache_clear()
    yield tmp_path
    read_change.cache_clear()


def commit(folder: Path) -> None:
    run_git(folder, "add", "-A")
    who = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    run_git(folder, *who, "commit", "-q", "--no-gpg-sign", "-m", "a change")


def run_git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


def test_the_last_commit_counts_but_not_what_it_only_moved(clone: Path) -> None:
    assert read_change().paths == {"changed.py"}


def test_what_is_not_committed_counts(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSPLIT_CHANGED_SINCE", "HEAD")
    (clone / "new.py").touch()
    (clone / "elsewhere.py").write_text("other\n")
    assert read_change().paths == {"new.py", "elsewhere.py"}


def test_a_branch_counts_from_where_it_left_origin(clone: Path) -> None:
    run_git(clone, "update-ref", "refs/remotes/origin/main", "HEAD")
    (clone / "first.py").touch()
    commit(clone)
    (clone / "second.py").touch()
    commit(clone)
    assert read_change().paths == {"first.py", "second.py"}


def test_a_commit_that_is_not_there_is_an_error(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSPLIT_CHANGED_SINCE", "nowhere")
    with pytest.raises(pytest.UsageError, match="no commit nowhere here"):
        read_change()


@pytest.mark.parametrize("changed", [{"collectors/profiler.py"}, {"constraints-lowest.txt"}])
def test_the_parts_are_all_files_and_fewer_if_the_versions_changed(
    changed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSPLIT_PART", "4")
    monkeypatch.delenv("STEPSPLIT_EVERY", raising=False)
    monkeypatch.setattr(turns, "read_change", lambda: Change("abc", frozenset(changed)))
    files = [Path(f"test_{name}.py") for name in "abcd"]
    monkeypatch.setattr(turns, "_list_files", lambda: files)
    parts = []
    for turn in range(4):
        monkeypatch.setattr(turns, "_find_turn", lambda count, turn=turn: turn % count)
        parts.append("".join(one.stem[-1] for one in files if turns.is_in_part(one)))
    if changed == {"constraints-lowest.txt"}:
        assert parts == ["ac", "bd", "ac", "bd"]
    else:
        assert parts == ["a", "b", "c", "d"]


def test_a_path_concerns_what_lies_below_it() -> None:
    change = Change("abc", frozenset({"collectors/profiler.py"}))
    assert change.touches(["collectors"]) and change.touches(["collectors/profiler.py"])
    assert not change.touches(["collector", "collectors/profiler"])
