"""The protocol between attach and agents, and how processes of a job are found."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.record import _RANK, RecordPlan, is_rank, plan_of
from stepsplit.collectors.run_spec import named

MARGIN_STEPS = 3
"""An attach names a step at least so far ahead, so that every rank hears of it in time."""

POLL_S = 2.0
"""How often one rank of each host asks whether there is a plan."""

# What attach and the agents say to each other: one JSON object a line, over a Unix socket.

_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Status:
    """How one rank is doing: steps it has ended, the quickest of the last, if it is recorded."""

    pid: int
    rank: int
    world_size: int
    local_world_size: int
    host: str
    job: str
    steps: int
    step_ns: int
    busy: bool


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """Whether a rank takes a plan, how many steps it has ended, and why not."""

    accepted: bool
    steps: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """A plan to record by; None: only for the status."""

    plan: RecordPlan | None
    relayed: bool = False


def socket_folder() -> Path:
    """Where the sockets of this user's agents are, for nobody else to reach.

    The same for a job and for a shell whose temporary folders differ; STEPSPLIT_SOCKETS names
    another. Raises CollectError where the folder is somebody else's.
    """
    named = os.environ.get("STEPSPLIT_SOCKETS")
    folder = Path(named or f"/tmp/stepsplit-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    seen = folder.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        raise CollectError(f"{folder} is not this user's alone: name another in STEPSPLIT_SOCKETS")
    return folder


def socket_path(pid: int) -> Path:
    """The socket of the agent in the process."""
    return socket_folder() / f"{pid}.sock"


def agents() -> list[int]:
    """The processes of this user on this host that may have an agent."""
    names = (path.stem for path in socket_folder().glob("*.sock"))
    return sorted(int(name) for name in names if name.isdigit())


def ask_status(pid: int) -> Status | None:
    """How the rank in the process is doing; None where no agent answers there."""
    body = _ask(pid, {"do": "status"}, 2.0)
    return None if body is None else Status(**named(Status, body))


def ask_record(pid: int, plan: RecordPlan, relayed: bool = False) -> AgentAnswer | None:
    """Asks the rank in the process to record; None where no agent answers there.

    relayed: the other hosts of the job have heard of it.
    """
    body = _ask(pid, {"do": "record", "plan": asdict(plan), "relayed": relayed}, 2.0)
    return None if body is None else AgentAnswer(**named(AgentAnswer, body))


def answer_line(status: Status | AgentAnswer) -> bytes:
    """The line that ask_status or ask_record reads back."""
    return json.dumps(asdict(status)).encode() + b"\n"


def asked(line: bytes) -> Asked:
    """What the line asks. Raises ValueError for a line that is no question."""
    body = json.loads(line)
    if not isinstance(body, dict) or body.get("do") not in ("status", "record"):
        raise ValueError("neither status nor record")
    if body["do"] == "status":
        return Asked(None)
    try:
        return Asked(plan_of(body["plan"]), bool(body.get("relayed")))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no plan: {error}") from None


def read_line(connection: socket.socket) -> bytes:
    """A line, or what came before the other side fell silent."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _MOST_BYTES:
        part = connection.recv(4096)
        if not part:
            break
        line += part
    return line


def _ask(pid: int, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(socket_path(pid)))
            connection.sendall(json.dumps(question).encode() + b"\n")
            body = json.loads(read_line(connection))
        except (OSError, ValueError):
            return None
    return body if isinstance(body, dict) else None


# Attaches to jobs started with KINETO_USE_DAEMON=1: speaks what their profiler asks a daemon.
#
# Kineto in every process of such a job sends datagrams to the socket of a daemon (dynolog's) and
# asks for a configuration every few seconds. This is that daemon, for one capture. What comes is
# a trace a process, without the names of its groups.

ABSTRACT = "\0dynolog\0"
"""Where Kineto looks for the daemon, unless KINETO_IPC_SOCKET_DIR names a folder."""

ROUND_UP = 10
"""All ranks begin at the next multiple of so many steps, for they ask at different times."""

_HEAD = struct.Struct("=Q32s")

_REQUEST = struct.Struct("=iiq")

_ASK_S = 30.0

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Captured:
    """A process that was asked, its rank and the trace that it wrote."""

    pid: int
    rank: int
    trace: Path


def ranks_with_daemon(target: int) -> dict[int, int]:
    """The rank of each process of the target's family that asks a daemon."""
    told = {pid: environment(pid) for pid in family(target)}
    asks = {pid: env for pid, env in told.items() if env.get("KINETO_USE_DAEMON")}
    return {pid: int(env.get("RANK", "0")) for pid, env in asks.items() if is_rank(env)}


def capture(target: int, plan: RecordPlan, timeout_s: float) -> tuple[Captured, ...]:
    """Has every rank of the target's family write a trace of the plan's steps beside `plan.out`.

    Raises CollectError where another daemon has the socket, or a rank asks or writes nothing in
    time.
    """
    ranks = ranks_with_daemon(target)
    folder = Path(plan.out).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with _daemon(next(iter(ranks))) as server:
        _configure(server, set(ranks), _configuration(folder, plan))
    wanted = [Captured(pid, rank, folder / f"kineto_{pid}.json") for pid, rank in ranks.items()]
    _await([each.trace for each in wanted], time.monotonic() + timeout_s)
    return tuple(sorted(wanted, key=lambda each: each.rank))


def _configuration(folder: Path, plan: RecordPlan) -> str:
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
def _daemon(pid: int) -> Iterator[socket.socket]:
    """The daemon's socket as the process expects it."""
    folder = environment(pid).get("KINETO_IPC_SOCKET_DIR")
    # Kineto ends its process where an answer comes from a path that it did not expect.
    address = str((Path(folder) / "dynolog").absolute()) if folder else ABSTRACT
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        try:
            server.bind(address)
        except OSError as error:
            raise CollectError(
                f"dynolog's socket: {error.strerror}: another daemon has it, ask that one"
            ) from None
        server.settimeout(_POLL_S)
        try:
            yield server
        finally:
            if folder:
                Path(address).unlink(missing_ok=True)


def _configure(server: socket.socket, waiting: set[int], text: str) -> None:
    """Answers until each of the processes has the configuration, once."""
    deadline = time.monotonic() + _ASK_S
    while waiting and time.monotonic() < deadline:
        try:
            message, sender = server.recvfrom(65536)
        except TimeoutError:
            continue
        kind, body = _opened(message)
        if kind == "ctxt":
            _reply(server, sender, kind, struct.pack("=i", 1))
        elif kind == "req":
            pid = _asking(body)
            _reply(server, sender, kind, text.encode() if pid in waiting else b"")
            waiting.discard(pid)
    if waiting:
        pids = ", ".join(map(str, sorted(waiting)))
        raise CollectError(f"processes {pids} did not ask for a configuration in {_ASK_S:.0f} s")


def _opened(message: bytes) -> tuple[str, bytes]:
    if len(message) < _HEAD.size:
        return "", b""
    _, kind = _HEAD.unpack_from(message)
    return kind.rstrip(b"\0").decode(errors="replace"), message[_HEAD.size :]


def _asking(body: bytes) -> int:
    """The process that asks: the first of the list, before its ancestors."""
    _, count, _ = _REQUEST.unpack_from(body)
    return int(struct.unpack_from("=i", body, _REQUEST.size)[0]) if count else 0


def _reply(server: socket.socket, sender: str | bytes, kind: str, body: bytes) -> None:
    try:
        server.sendto(_HEAD.pack(len(body), kind.encode()) + body, sender)
    except OSError:
        # It has gone meanwhile; then it will not be among those that have the configuration.
        return


def _await(traces: Sequence[Path], deadline: float) -> None:
    """Returns when all the files are whole."""
    while not all(_whole(trace) for trace in traces):
        if time.monotonic() > deadline:
            missing = next(trace for trace in traces if not _whole(trace))
            raise CollectError(f"{missing}: not written in time: does the job still step?")
        time.sleep(_POLL_S)


def _whole(trace: Path) -> bool:
    try:
        with trace.open("rb") as file:
            file.seek(max(0, trace.stat().st_size - 64))
            return file.read().rstrip().endswith(b"}")
    except OSError:
        return False


_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")

_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")

_JOB = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Identity:
    """One rank of a job, and its place on its host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def identity(environment: Mapping[str, str] = os.environ) -> Identity:
    """As torchrun, Slurm or MPI tell, in this order; the only rank where none does."""
    world_size = max(1, _number(environment, _SIZE, 1))
    return Identity(
        rank=_number(environment, _RANK, 0),
        world_size=world_size,
        local_rank=_number(environment, _LOCAL_RANK, 0),
        local_world_size=max(1, _number(environment, _LOCAL_SIZE, world_size)),
    )


def job_name(environment: Mapping[str, str] = os.environ) -> str:
    """What the ranks of a job have in common, and those of another do not."""
    told = [environment[name] for name in _JOB if environment.get(name)]
    return ":".join(told) or f"pid {os.getpid()}"


def _number(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    told = (environment.get(name, "") for name in names)
    return next((int(each) for each in told if each.isdigit()), default)


# What /proc tells of other processes of this user.


def environment(pid: int) -> dict[str, str]:
    """The environment that the process was started with; empty where it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    entries = text.decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def command_line(pid: int) -> str:
    """The words of its command; empty where it cannot be read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def ancestors(pid: int) -> list[int]:
    """The processes that have started it, its parent first."""
    found: list[int] = []
    while (pid := _parent(pid)) > 1:
        found.append(pid)
    return found


def family(pid: int) -> list[int]:
    """The process and all that it has started, directly or through others, in order."""
    every = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return sorted(each for each in every if each == pid or pid in ancestors(each))


def _parent(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The name in parentheses may hold spaces and parentheses itself.
    return int(text.rpartition(")")[2].split()[1])
