"""Attaches to jobs started with KINETO_USE_DAEMON=1, by acting as their profiler daemon.

Kineto in every process of such a job sends datagrams to the socket of a daemon (dynolog) and asks
for a configuration every few seconds. This is that daemon, for one capture. The result is one
trace per process, without the names of process groups.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stepsplit.collectors.attach.processes import list_process_tree, read_environment
from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.job.launcher import is_rank, read_identity
from stepsplit.collectors.record.plan import RecordPlan
from stepsplit.collectors.safe_io.atomic_file import PRIVATE, make_owner_folder

ABSTRACT = "\0dynolog\0"
"""Abstract socket of the daemon, unless KINETO_IPC_SOCKET_DIR is set."""

ROUND_UP = 10
"""All ranks begin at the next multiple of this many steps, because they ask at different times."""

_HEAD = struct.Struct("=Q32s")

_CREDENTIALS = struct.Struct("=iII")
"""pid, uid and gid of a sender, as the kernel knows them."""

# Kineto asks its daemon every few seconds.
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
    return {pid: read_identity(env).rank for pid, env in asking.items() if is_rank(env)}


def capture(target: int, plan: RecordPlan, timeout_s: float) -> tuple[CapturedTrace, ...]:
    """Makes every rank in the target's process tree write a trace of the plan to `plan.out`.

    Raises CollectError if another daemon uses the socket, or a rank does not ask for a
    configuration or write its trace in time.
    """
    ranks = find_daemon_ranks(target)
    folder = Path(plan.out).absolute()
    make_owner_folder(folder)
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
    with _open_daemon_socket(next(iter(ranks))) as server:
        _configure(server, ranks, "".join(f"{name}={value}\n" for name, value in lines.items()))
    expected = [
        CapturedTrace(pid, rank, folder / f"kineto_{pid}.json") for pid, rank in ranks.items()
    ]
    # Kineto does not say when it has written a trace: its file then ends as JSON does.
    deadline = time.monotonic() + timeout_s
    while missing := next((one.trace for one in expected if not _is_complete(one.trace)), None):
        if time.monotonic() > deadline:
            raise CollectError(f"{missing}: not written in time; is the job still running steps?")
        time.sleep(_POLL_S)
    for each in expected:
        # Kineto writes them under the umask of the job, which may be of another user.
        with suppress(PermissionError):
            each.trace.chmod(PRIVATE)
    return tuple(sorted(expected, key=lambda each: each.rank))


@contextmanager
def _open_daemon_socket(pid: int) -> Iterator[socket.socket]:
    """The daemon's socket as the process expects it."""
    folder = read_environment(pid).get("KINETO_IPC_SOCKET_DIR")
    # Kineto aborts its process if an answer comes from an unexpected path.
    address = str((Path(folder) / "dynolog").absolute()) if folder else ABSTRACT
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        # Any user of the host may send to an abstract socket.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            server.bind(address)
        except OSError as error:
            name = address.replace("\0", "@")
            holder = f"; {_describe_holder(name)}" if error.errno == errno.EADDRINUSE else ""
            raise CollectError(f"dynolog's socket {name}: {error.strerror}{holder}") from None
        server.settimeout(_POLL_S)
        try:
            yield server
        finally:
            if folder:
                Path(address).unlink(missing_ok=True)


def _describe_holder(name: str) -> str:
    """Who has the socket of this name, which is written as in /proc/net/unix."""
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    inodes = {line.split()[6] for line in lines if line.endswith(f" {name}")}
    if not inodes:
        return "remove it, or use the daemon that it belongs to"
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if link.readlink().name.removeprefix("socket:[").rstrip("]") in inodes:
                pid = int(link.parts[2])
                if (uid := _read_owner(pid)) == os.geteuid():
                    return f"another daemon uses it, process {pid}: use that one instead"
                return f"process {pid} of user {uid} uses it; {_AVOID}"
    return f"a process of another user or container uses it; {_AVOID}"


_AVOID = (
    "if that is not your site's daemon, start the job with KINETO_IPC_SOCKET_DIR set to a private"
    " folder"
)


def _configure(server: socket.socket, ranks: Collection[int], text: str) -> None:
    """Answers requests until each of the processes has received the configuration once.

    Other processes get no answer: the configuration is not theirs, and they could ask in the name
    of a rank.
    """
    deadline = time.monotonic() + _REQUEST_TIMEOUT_S
    waiting, strangers = set(ranks), set[str]()
    while waiting and time.monotonic() < deadline:
        try:
            message, credentials, _, sender = server.recvmsg(65536, _CREDENTIALS_BYTES)
        except TimeoutError:
            continue
        # The kernel says who has sent it; without that, (0, -1) is no rank.
        pid, uid = 0, -1
        for level, what, data in credentials:
            if (level, what) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid, uid, _ = _CREDENTIALS.unpack(data)
        if pid not in ranks or uid != _read_owner(pid):
            if len(strangers) < _MAX_NAMED:
                strangers.add(f"process {pid} of user {uid}")
            continue
        # Of the body nothing is needed: it says the pid of its process, which the kernel says too.
        kind = ""
        if len(message) >= _HEAD.size:
            _, name = _HEAD.unpack_from(message)
            kind = name.rstrip(b"\0").decode(errors="replace")
        if kind == "ctxt":
            _send_reply(server, sender, kind, struct.pack("=i", 1))
        elif kind == "req":
            # Once: a second configuration would have the process trace again.
            _send_reply(server, sender, kind, text.encode() if pid in waiting else b"")
            waiting.discard(pid)
    if waiting:
        pids = ", ".join(map(str, sorted(waiting)))
        others = f"; ignored {', '.join(sorted(strangers))}" if strangers else ""
        asked = f"did not ask for a configuration in {_REQUEST_TIMEOUT_S:.0f} s"
        raise CollectError(f"processes {pids} {asked}{others}")


_CREDENTIALS_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size)
"""Room for nothing else: descriptors that a message carries are closed by the kernel."""

# Anyone on the host may write to the socket: named are enough to find who does.
_MAX_NAMED = 3


def _read_owner(pid: int) -> int | None:
    with suppress(OSError):
        return Path(f"/proc/{pid}").stat().st_uid
    return None


def _send_reply(server: socket.socket, sender: str | bytes, kind: str, body: bytes) -> None:
    # The process may have ended meanwhile; it is then reported as not configured.
    with suppress(OSError, TypeError):
        server.sendto(_HEAD.pack(len(body), kind.encode()) + body, sender)


def _is_complete(trace: Path) -> bool:
    try:
        with trace.open("rb") as file:
            file.seek(max(0, trace.stat().st_size - 64))
            return file.read().rstrip().endswith(b"}")
    except OSError:
        return False
