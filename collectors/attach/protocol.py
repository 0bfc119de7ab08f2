"""The protocol between attach and the agents, and what the agents leave in their folder."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from stepsplit.collectors.attach.processes import is_process_alive
from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.private_folder import (
    SOCKETS_VARIABLE,
    list_meeting_folders,
    make_meeting_folder,
    open_private,
)
from stepsplit.collectors.rank_record import CodeFrame, Look, RankState, format_state, read_state
from stepsplit.collectors.record import RecordPlan, decode_plan
from stepsplit.collectors.run_spec import select_known_fields
from stepsplit.collectors.watch_plan import WatchPlan

MARGIN_STEPS = 3
"""An attach starts at least this many steps ahead, so that every rank gets the request in time."""

POLL_S = 2.0
"""Interval at which one rank of each host polls for a plan."""

# Messages between attach and the agents: one JSON object per line, over a Unix socket.

_MAX_BYTES = 1 << 16

_MAX_LOOK_BYTES = 256 << 20

_LOOK_TIMEOUT_S = 3.0

TIMEOUT_S = 2.0
"""A request and each answer but a look take a rank less than 1 ms."""


@dataclass(frozen=True, slots=True)
class Status:
    """Status of one rank: its number of steps, its fastest recent step, if it is recording.

    since_step_ns: the time since its last step ended. longest_step_ns: its slowest recent step.
    steps_before: the steps that a resumed job had done before this process.
    """

    pid: int
    rank: int
    world_size: int
    local_world_size: int
    host: str
    job: str
    steps: int
    step_ns: int
    busy: bool
    since_step_ns: int = 0
    longest_step_ns: int = 0
    steps_before: int = 0


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """Whether a rank accepts a plan, its number of steps, and the reason for a refusal."""

    accepted: bool
    steps: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A request to an agent: a plan to record, a plan to watch, the end of the watch, a look at the
    rank, or else its status."""

    plan: RecordPlan | None
    relayed: bool = False
    look: bool = False
    flight: bool = False
    watch: WatchPlan | None = None
    ends_watch: bool = False


@dataclass(frozen=True, slots=True)
class LookAnswer:
    """The state of a rank, and its Flight Recorder dump if it was asked for; "" if it is empty."""

    state: RankState
    flight: str = ""


_Answer = TypeVar("_Answer", Status, AgentAnswer)


def make_socket_folder() -> Path:
    """The folder for this user's new agent sockets, created if missing; no other user has access.

    Raises CollectError if there is none.
    """
    try:
        return make_meeting_folder()
    except OSError as error:
        raise CollectError(
            f"{error.strerror}; set {SOCKETS_VARIABLE} to a private folder, in the job too"
        ) from None


def build_socket_path(pid: int) -> Path:
    """The socket of an agent that begins to listen in the process."""
    return make_socket_folder() / f"{pid}.sock"


def find_files(pid: int, suffix: str = ".sock") -> list[Path]:
    """What the agent in the process has in the folders of this user."""
    paths = (folder / f"{pid}{suffix}" for folder in list_meeting_folders())
    return [path for path in paths if os.path.lexists(path)]


def list_agents() -> list[int]:
    """The process ids of this user on this host that may have an agent."""
    names = {path.stem for folder in list_meeting_folders() for path in folder.glob("*.sock")}
    return sorted(int(name) for name in names if name.isdecimal())


def ask_status(pid: int) -> Status | None:
    """Asks the agent of the process for its status; None if no agent answers."""
    return _decode(Status, _ask(pid, {"do": "status"}, TIMEOUT_S))


def ask_record(pid: int, plan: RecordPlan, relayed: bool = False) -> AgentAnswer | None:
    """Asks the agent of the process to record; None if no agent answers.

    relayed: the request was already published to the other hosts of the job.
    """
    question = {"do": "record", "plan": asdict(plan), "relayed": relayed}
    return _decode(AgentAnswer, _ask(pid, question, TIMEOUT_S))


def ask_watch(pid: int, plan: WatchPlan | None) -> AgentAnswer | None:
    """Asks the agent of the process to watch its rank by the plan, or with None to end that; None
    if no agent answers."""
    question = {"do": "watch", "plan": None if plan is None else asdict(plan)}
    return _decode(AgentAnswer, _ask(pid, question, TIMEOUT_S))


def ask_look(pid: int, flight: bool = False) -> LookAnswer | None:
    """Asks the agent of the process how its rank is; None if no agent answers in time."""
    body = _ask(pid, {"do": "look", "flight": flight}, _LOOK_TIMEOUT_S, _MAX_LOOK_BYTES)
    try:
        return LookAnswer(read_state(body["state"]), str(body["flight"])) if body else None
    except (KeyError, TypeError, ValueError):
        return None


def _decode(kind: type[_Answer], body: dict[str, Any] | None) -> _Answer | None:
    """The answer, also of another version of the agent; None if it is not one."""
    if body is None:
        return None
    try:
        return kind(**select_known_fields(kind, body))
    except TypeError:
        return None


def format_answer(answer: Status | AgentAnswer | LookAnswer) -> bytes:
    """The answer as a line, as read by ask_status, ask_record or ask_look."""
    if isinstance(answer, LookAnswer):
        body = {"state": format_state(answer.state), "flight": answer.flight}
        return json.dumps(body).encode() + b"\n"
    return json.dumps(asdict(answer)).encode() + b"\n"


_REQUESTS = ("status", "record", "watch", "look")


def parse_request(line: bytes) -> AgentRequest:
    """Parses a request. Raises ValueError if it is invalid."""
    body = json.loads(line)
    if not isinstance(body, dict) or body.get("do") not in _REQUESTS:
        raise ValueError(f"the request is none of {', '.join(_REQUESTS)}")
    if body["do"] == "status":
        return AgentRequest(None)
    if body["do"] == "look":
        return AgentRequest(None, look=True, flight=bool(body.get("flight")))
    try:
        if body["do"] == "watch":
            plan = body["plan"]
            watch = None if plan is None else WatchPlan(**select_known_fields(WatchPlan, plan))
            return AgentRequest(None, watch=watch, ends_watch=watch is None)
        return AgentRequest(decode_plan(body["plan"]), bool(body.get("relayed")))
    except (KeyError, TypeError) as error:
        raise ValueError(f"invalid plan: {error}") from None


def read_line(
    connection: socket.socket, max_bytes: int = _MAX_BYTES, timeout_s: float = TIMEOUT_S
) -> bytes:
    """Reads a line, or the data received before the connection ended. Raises TimeoutError if that
    takes longer, however often a part arrives."""
    line, deadline = bytearray(), time.monotonic() + timeout_s
    while not line.endswith(b"\n") and len(line) < max_bytes:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(_MAX_BYTES)
        if not part:
            break
        if time.monotonic() > deadline:
            raise TimeoutError
        line += part
    return bytes(line)


def _ask(
    pid: int, question: Mapping[str, Any], timeout_s: float, max_bytes: int = _MAX_BYTES
) -> dict[str, Any] | None:
    for path in find_files(pid):
        with suppress(OSError, ValueError, RecursionError), _connect(path, timeout_s) as connection:
            connection.sendall(json.dumps(question).encode() + b"\n")
            body = json.loads(read_line(connection, max_bytes, timeout_s))
            if isinstance(body, dict):
                return body
    return None


def listen(path: Path) -> socket.socket:
    """Listens at the path, instead of an agent that has ended. Raises OSError and CollectError."""
    if _is_listening(path):
        raise CollectError(
            f"{path} is in use, by a process of another container with the same number; set"
            f" {SOCKETS_VARIABLE} to a folder of this one"
        )
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _shorten(path) as short:
            server.bind(short)
        server.listen(4)
    except OSError:
        server.close()
        raise
    return server


def is_of_this_user(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's, or root's."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    _, uid, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    )
    return uid in (os.geteuid(), 0)


_CREDENTIALS = struct.Struct("=iII")


def _connect(path: Path, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with _shorten(path) as short:
            connection.connect(short)
        if not is_of_this_user(connection):
            raise PermissionError(f"{path} is another user's")
    except OSError:
        connection.close()
        raise
    return connection


def _is_listening(path: Path) -> bool:
    with suppress(OSError), _connect(path, timeout_s=0.2):
        return True
    return False


_MAX_ADDRESS_BYTES = 107


@contextmanager
def _shorten(path: Path) -> Iterator[str]:
    """The path, or a shorter one for now: the address of a socket has a limit."""
    if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


# What a rank leaves for those that ask why the others wait, in case that it cannot answer.

_LEFT_SUFFIX = ".rank"

_KEEP_LEFT_S = 24 * 3600.0


def leave_state(state: RankState) -> None:
    """Leaves the state of this process; it replaces what it or an earlier job's rank has left."""
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
            if has_ended and not _is_listening(path.with_suffix(".sock")):
                path.unlink()


def _list_left() -> Iterator[tuple[Path, RankState]]:
    for folder in list_meeting_folders():
        for path in folder.glob(f"*{_LEFT_SUFFIX}"):
            with suppress(OSError, ValueError), open(path, "rb", opener=open_private) as file:
                yield path, read_state(file.read())


# The stack of a process that does not answer because a thread holds Python's lock. Its agent writes
# a line about itself to a file from time to time, and faulthandler's thread, which needs no lock,
# adds the stacks of all threads if the agent cannot do so again.

_STACK_SUFFIX = ".stack"

_SUFFIXES = (".sock", _LEFT_SUFFIX, _STACK_SUFFIX)


@dataclass(frozen=True, slots=True)
class WatchLine:
    """The line of an agent: its main thread, and its steps at that time."""

    main_thread: int
    at_unix_ns: int
    steps: int
    since_step_ns: int


def build_stack_path(pid: int) -> Path:
    """The file for the stacks of the process."""
    return build_socket_path(pid).with_suffix(_STACK_SUFFIX)


def read_stack(pid: int) -> Look | None:
    """The state of the process when its stacks were written; None if they were not."""
    try:
        path = find_files(pid, _STACK_SUFFIX)[0]
        with open(path, errors="replace", encoding="utf-8", opener=open_private) as file:
            first, _, dump = file.read().partition("\n")
        line = WatchLine(**json.loads(first))
    except (OSError, ValueError, TypeError, IndexError):
        return None
    stack = parse_stack(dump, line.main_thread)
    if not stack:
        return None
    now_ns = time.time_ns()
    since_ns = line.since_step_ns + now_ns - line.at_unix_ns
    return Look(now_ns, line.steps, since_ns, calls=0, stack=stack)


_THREAD = re.compile(
    r"^(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\(most recent call first\):\n"
    r"((?:  File [^\n]*\n?)*)",
    re.MULTILINE,
)

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def parse_stack(dump: str, thread: int) -> tuple[CodeFrame, ...]:
    """The stack of a thread in the text of faulthandler, innermost frame first."""
    stacks = {int(number, 16): lines for number, lines in _THREAD.findall(dump)}
    frames = _FRAME.findall(stacks.get(thread, ""))
    return tuple(CodeFrame(function, file, int(line)) for file, line, function in frames)
