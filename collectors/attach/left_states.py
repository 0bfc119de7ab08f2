"""What a rank leaves for those that ask why the others wait, in case that it cannot answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from stepsplit.collectors.attach.processes import is_process_alive
from stepsplit.collectors.attach.sockets import build_socket_path, is_listening
from stepsplit.collectors.attach.stacks import STACK_SUFFIX
from stepsplit.collectors.formats.rank_state import RankState, format_state, read_state
from stepsplit.collectors.safe_io.private_folder import list_meeting_folders, open_private

_LEFT_SUFFIX = ".rank"

# Long enough for whoever looks at a job of the night in the morning.
_KEEP_LEFT_S = 24 * 3600.0


def leave_state(state: RankState) -> None:
    """Leaves the state of this process; it replaces what it or an earlier job's rank has left."""
    # A job of one rank has no other that could wait for it.
    if state.world_size > 1:
        for path, left in _list_left():
            if (left.job, left.rank) == (state.job, state.rank) and left.pid != state.pid:
                path.unlink(missing_ok=True)
        own = build_socket_path(state.pid).with_suffix(_LEFT_SUFFIX)
        with open(own, "w", encoding="utf-8", opener=open_private) as file:
            file.write(format_state(state))


def read_left_states() -> tuple[RankState, ...]:
    """What the ranks of all jobs on this host have left."""
    return tuple(state for _, state in _list_left())


def remove_old_states() -> None:
    """Removes what processes that have ended left a day ago or earlier, also those killed: their
    state, their socket and the file of their stacks."""
    for path in (path for folder in list_meeting_folders() for path in folder.iterdir()):
        with suppress(OSError):
            is_ours = path.stem.isdecimal() and path.suffix in _SUFFIXES
            if not is_ours or time.time() - path.lstat().st_mtime < _KEEP_LEFT_S:
                continue
            # A process of another container is not seen here, but answers.
            has_ended = not is_process_alive(int(path.stem))
            if has_ended and not is_listening(path.with_suffix(".sock")):
                path.unlink()


def _list_left() -> Iterator[tuple[Path, RankState]]:
    for folder in list_meeting_folders():
        for path in folder.glob(f"*{_LEFT_SUFFIX}"):
            with suppress(OSError, ValueError), open(path, "rb", opener=open_private) as file:
                yield path, read_state(file.read())


_SUFFIXES = (".sock", _LEFT_SUFFIX, STACK_SUFFIX)
