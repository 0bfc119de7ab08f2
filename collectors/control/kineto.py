"""Attaches to jobs started with KINETO_USE_DAEMON=1: speaks what their profiler asks a daemon.

Kineto in every process of such a job sends datagrams to the socket of a daemon (dynolog's) and asks
for a configuration every few seconds. This is that daemon, for one capture. What comes is a trace a
process, without the names of its groups.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stepsplit.collectors.control.identity import is_rank
from stepsplit.collectors.control.proc import environment, family
from stepsplit.collectors.errors import CollectError
from stepsplit.collectors.plan import Plan

ABSTRACT = "\0dynolog\0"
"""Where Kineto looks for the daemon, unless KINETO_IPC_SOCKET_DIR names a folder."""
ROUND_UP = 10
"""All ranks begin at the next multiple of so many steps, for they ask at different times."""
_HEAD = struct.Struct("=Q32s")
_CONTEXT = struct.Struct("=iiq")
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


def capture(target: int, plan: Plan, timeout_s: float) -> tuple[Captured, ...]:
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


def _configuration(folder: Path, plan: Plan) -> str:
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
