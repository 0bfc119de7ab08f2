"""The protocol between attach and the agents, and the search for a job's processes."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.launcher import is_rank, read_identity
from stepsplit.collectors.rank_record import CodeFrame, Look, RankState, format_state, read_state
from stepsplit.collectors.record import PLAN_VARIABLE, RecordPlan, decode_plan
from stepsplit.collectors.run_spec import PRIVATE, make_private_folder, select_known_fields
from stepsplit.collectors.watch_plan import WatchPlan

MARGIN_STEPS = 3
"""An attach starts at least this many steps ahead, so that every rank gets the request in time."""

POLL_S = 2.0
"""Interval at which one rank of each host polls for a plan."""

# Messages between attach and the agents: one JSON object per line, over a Unix socket.

_MAX_BYTES = 1 << 16

_MAX_LOOK_BYTES = 256 << 20

_LOOK_TIMEOUT_S = 3.0


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


def make_socket_folder() -> Path:
    """The folder of this user's agent sockets, created if missing; no other user has access.

    It does not depend on TMPDIR, which may differ between a job and a shell; STEPSPLIT_SOCKETS
    overrides it. Raises CollectError if other users have access to the folder.
    """
    override = os.environ.get("STEPSPLIT_SOCKETS")
    folder = Path(override or f"/tmp/stepsplit-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    folder_stat = folder.lstat()
    if (
        not stat.S_ISDIR(folder_stat.st_mode)
        or folder_stat.st_uid != os.getuid()
        or folder_stat.st_mode & 0o077
    ):
        raise CollectError(
            f"{folder} is accessible to other users; set STEPSPLIT_SOCKETS to a private folder"
        )
    return folder


def build_socket_path(pid: int) -> Path:
    """The socket of the agent in the process."""
    return make_socket_folder() / f"{pid}.sock"


def list_agents() -> list[int]:
    """The process ids of this user on this host that may have an agent."""
    names = (path.stem for path in make_socket_folder().glob("*.sock"))
    return sorted(int(name) for name in names if name.isdigit())


def ask_status(pid: int) -> Status | None:
    """Asks the agent of the process for its status; None if no agent answers."""
    body = _ask(pid, {"do": "status"}, 2.0)
    return None if body is None else Status(**select_known_fields(Status, body))


def ask_record(pid: int, plan: RecordPlan, relayed: bool = False) -> AgentAnswer | None:
    """Asks the agent of the process to record; None if no agent answers.

    relayed: the request was already published to the other hosts of the job.
    """
    body = _ask(pid, {"do": "record", "plan": asdict(plan), "relayed": relayed}, 2.0)
    return None if body is None else AgentAnswer(**select_known_fields(AgentAnswer, body))


def ask_watch(pid: int, plan: WatchPlan | None) -> AgentAnswer | None:
    """Asks the agent of the process to watch its rank by the plan, or with None to end that; None
    if no agent answers."""
    body = _ask(pid, {"do": "watch", "plan": None if plan is None else asdict(plan)}, 2.0)
    return None if body is None else AgentAnswer(**select_known_fields(AgentAnswer, body))


def ask_look(pid: int, flight: bool = False) -> LookAnswer | None:
    """Asks the agent of the process how its rank is; None if no agent answers in time."""
    body = _ask(pid, {"do": "look", "flight": flight}, _LOOK_TIMEOUT_S, _MAX_LOOK_BYTES)
    try:
        return LookAnswer(read_state(body["state"]), str(body["flight"])) if body else None
    except (KeyError, ValueError):
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


def read_line(connection: socket.socket, max_bytes: int = _MAX_BYTES) -> bytes:
    """Reads a line, or the data received before the connection ended."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < max_bytes:
        part = connection.recv(_MAX_BYTES)
        if not part:
            break
        line += part
    return bytes(line)


def _ask(
    pid: int, question: Mapping[str, Any], timeout_s: float, max_bytes: int = _MAX_BYTES
) -> dict[str, Any] | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(build_socket_path(pid)))
            connection.sendall(json.dumps(question).encode() + b"\n")
            body = json.loads(read_line(connection, max_bytes))
        except (OSError, ValueError):
            return None
    return body if isinstance(body, dict) else None


# What a rank leaves for those that ask why the others wait, in case that it cannot answer.

_LEFT_SUFFIX = ".rank"

_KEEP_LEFT_S = 24 * 3600.0


def leave_state(state: RankState) -> None:
    """Leaves the state of this process; it replaces what it or an earlier job's rank has left."""
    if state.world_size > 1:
        for path, left in _list_left():
            if (left.job, left.rank) == (state.job, state.rank) and left.pid != state.pid:
                path.unlink(missing_ok=True)
        build_socket_path(state.pid).with_suffix(_LEFT_SUFFIX).write_text(format_state(state))


def read_left_states() -> tuple[RankState, ...]:
    """What the ranks of all jobs on this host have left."""
    return tuple(state for _, state in _list_left())


def remove_old_states() -> None:
    """Removes what processes that have ended left a day ago or earlier, also those killed: their
    state, their socket and the file of their stacks."""
    for path in make_socket_folder().iterdir():
        with suppress(OSError):
            old = time.time() - path.stat().st_mtime > _KEEP_LEFT_S
            if old and path.stem.isdigit() and not is_process_alive(int(path.stem)):
                path.unlink()


def _list_left() -> Iterator[tuple[Path, RankState]]:
    for path in make_socket_folder().glob(f"*{_LEFT_SUFFIX}"):
        with suppress(OSError, ValueError):
            yield path, read_state(path.read_bytes())


# The stack of a process that does not answer because a thread holds Python's lock. Its agent writes
# a line about itself to a file from time to time, and faulthandler's thread, which needs no lock,
# adds the stacks of all threads if the agent cannot do so again.

_STACK_SUFFIX = ".stack"


@dataclass(frozen=True, slots=True)
class WatchLine:
    """The line of an agent: its main thread, and its steps at that time."""

    main_thread: int
    at_unix_ns: int
    steps: int
    since_step_ns: int


def build_stack_path(pid: int) -> Path:
    """The file with the stacks of the process."""
    return build_socket_path(pid).with_suffix(_STACK_SUFFIX)


def read_stack(pid: int) -> Look | None:
    """The state of the process when its stacks were written; None if they were not."""
    try:
        first, _, dump = build_stack_path(pid).read_text(errors="replace").partition("\n")
        line = WatchLine(**json.loads(first))
    except (OSError, ValueError, TypeError):
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


# Attaches to jobs started with KINETO_USE_DAEMON=1, by acting as their profiler daemon.
#
# Kineto in every process of such a job sends datagrams to the socket of a daemon (dynolog) and asks
# for a configuration every few seconds. This is that daemon, for one capture. The result is one
# trace per process, without the names of process groups.

ABSTRACT = "\0dynolog\0"
"""Abstract socket of the daemon, unless KINETO_IPC_SOCKET_DIR is set."""

ROUND_UP = 10
"""All ranks begin at the next multiple of this many steps, because they ask at different times."""

_HEAD = struct.Struct("=Q32s")

_REQUEST = struct.Struct("=iiq")

_REQUEST_TIMEOUT_S = 30.0

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class CapturedTrace:
    """A captured process, its rank and its trace."""

    pid: int
    rank: int
    trace: Path


def find_daemon_ranks(target: int) -> dict[int, int]:
    """{pid: rank} of the processes in the target's process tree that use a profiler daemon."""
    environments = {pid: read_environment(pid) for pid in list_process_tree(target)}
    asking = {pid: env for pid, env in environments.items() if env.get("KINETO_USE_DAEMON")}
    return {pid: int(env.get("RANK", "0")) for pid, env in asking.items() if is_rank(env)}


def capture(target: int, plan: RecordPlan, timeout_s: float) -> tuple[CapturedTrace, ...]:
    """Makes every rank in the target's process tree write a trace of the plan to `plan.out`.

    Raises CollectError if another daemon uses the socket, or a rank does not ask for a
    configuration or write its trace in time.
    """
    ranks = find_daemon_ranks(target)
    folder = Path(plan.out).absolute()
    make_private_folder(folder)
    with _open_daemon_socket(next(iter(ranks))) as server:
        _configure(server, set(ranks), _format_configuration(folder, plan))
    expected = [
        CapturedTrace(pid, rank, folder / f"kineto_{pid}.json") for pid, rank in ranks.items()
    ]
    _wait_for_traces([each.trace for each in expected], time.monotonic() + timeout_s)
    for each in expected:
        # Kineto writes them under the umask of the job, which may be of another user.
        with suppress(PermissionError):
            each.trace.chmod(PRIVATE)
    return tuple(sorted(expected, key=lambda each: each.rank))


def _format_configuration(folder: Path, plan: RecordPlan) -> str:
    lines = {
        "ACTIVITIES_LOG_FILE": folder / "kineto.json",
        "ACTIVITIES_ITERATIONS": plan.steps,
        "PROFILE_START_ITERATION": 0,
        "PROFILE_START_ITERATION_ROUNDUP": ROUND_UP,
        "ACTIVITIES_WARMUP_ITERATIONS": plan.warmup,
        "PROFILE_REPORT_INPUT_SHAPES": str(plan.shapes).lower(),
        "PROFILE_PROFILE_MEMORY": str(plan.memory).lower(),
        "PROFILE_WITH_STACK": str(plan.stacks).lower(),
    }
    return "".join(f"{name}={value}\n" for name, value in lines.items())


@contextmanager
def _open_daemon_socket(pid: int) -> Iterator[socket.socket]:
    """The daemon's socket as the process expects it."""
    folder = read_environment(pid).get("KINETO_IPC_SOCKET_DIR")
    # Kineto aborts its process if an answer comes from an unexpected path.
    address = str((Path(folder) / "dynolog").absolute()) if folder else ABSTRACT
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        try:
            server.bind(address)
        except OSError as error:
            raise CollectError(
                f"dynolog's socket: {error.strerror}; another daemon uses it, use that one instead"
            ) from None
        server.settimeout(_POLL_S)
        try:
            yield server
        finally:
            if folder:
                Path(address).unlink(missing_ok=True)


def _configure(server: socket.socket, waiting: set[int], text: str) -> None:
    """Answers requests until each of the processes has received the configuration once."""
    deadline = time.monotonic() + _REQUEST_TIMEOUT_S
    while waiting and time.monotonic() < deadline:
        try:
            message, sender = server.recvfrom(65536)
        except TimeoutError:
            continue
        kind, body = _unpack_message(message)
        if kind == "ctxt":
            _send_reply(server, sender, kind, struct.pack("=i", 1))
        elif kind == "req":
            pid = _parse_requesting_pid(body)
            _send_reply(server, sender, kind, text.encode() if pid in waiting else b"")
            waiting.discard(pid)
    if waiting:
        pids = ", ".join(map(str, sorted(waiting)))
        raise CollectError(
            f"processes {pids} did not ask for a configuration in {_REQUEST_TIMEOUT_S:.0f} s"
        )


def _unpack_message(message: bytes) -> tuple[str, bytes]:
    if len(message) < _HEAD.size:
        return "", b""
    _, kind = _HEAD.unpack_from(message)
    return kind.rstrip(b"\0").decode(errors="replace"), message[_HEAD.size :]


def _parse_requesting_pid(body: bytes) -> int:
    """The pid of the requesting process, which is listed before its ancestors."""
    _, count, _ = _REQUEST.unpack_from(body)
    return int(struct.unpack_from("=i", body, _REQUEST.size)[0]) if count else 0


def _send_reply(server: socket.socket, sender: str | bytes, kind: str, body: bytes) -> None:
    try:
        server.sendto(_HEAD.pack(len(body), kind.encode()) + body, sender)
    except OSError:
        # The process has ended meanwhile; it is then reported as not configured.
        return


def _wait_for_traces(traces: Sequence[Path], deadline: float) -> None:
    """Returns when all the files are complete."""
    while not all(_is_complete(trace) for trace in traces):
        if time.monotonic() > deadline:
            missing = next(trace for trace in traces if not _is_complete(trace))
            raise CollectError(f"{missing}: not written in time; is the job still running steps?")
        time.sleep(_POLL_S)


def _is_complete(trace: Path) -> bool:
    try:
        with trace.open("rb") as file:
            file.seek(max(0, trace.stat().st_size - 64))
            return file.read().rstrip().endswith(b"}")
    except OSError:
        return False


# Other processes of this user, from /proc.


def read_environment(pid: int) -> dict[str, str]:
    """The initial environment of the process; empty if it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    entries = text.decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def find_ranks_of_plan(plan: RecordPlan) -> dict[int, int]:
    """{rank: pid} of the processes that were started with the plan and are still running."""
    pids = sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    environments = {pid: read_environment(pid) for pid in pids if pid != os.getpid()}
    found: dict[int, int] = {}
    for pid, environment in environments.items():
        if environment.get(PLAN_VARIABLE) == plan.format_json() and is_rank(environment):
            # Data loaders and compilers of a rank have its environment, and are started later.
            found.setdefault(read_identity(environment).rank, pid)
    return found


def read_command_line(pid: int) -> str:
    """The command line of the process; empty if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def is_process_stopped(pid: int) -> bool:
    """Whether the process is stopped, by SIGSTOP or a debugger."""
    return _read_stat(pid)[:1] in (["T"], ["t"])


def is_process_alive(pid: int) -> bool:
    """Whether the process exists and has not ended (a zombie has)."""
    return _read_stat(pid)[:1] not in ([], ["Z"], ["X"])


def list_ancestors(pid: int) -> list[int]:
    """The ancestors of the process, its parent first."""
    parents: list[int] = []
    while (pid := _read_parent(pid)) > 1:
        parents.append(pid)
    return parents


def list_process_tree(pid: int) -> list[int]:
    """The process and all of its descendants, in order."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return sorted(each for each in pids if each == pid or pid in list_ancestors(each))


def _read_parent(pid: int) -> int:
    fields = _read_stat(pid)
    return int(fields[1]) if fields else 0


def _read_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The name in parentheses may itself contain spaces and parentheses.
    return text.rpartition(")")[2].split()
