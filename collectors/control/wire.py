"""What attach and the agents say to each other: one JSON object a line, over a Unix socket."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepsplit.collectors.errors import CollectError
from stepsplit.collectors.plan import Plan, plan_of
from stepsplit.collectors.run_spec import named

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
class Answer:
    """Whether a rank takes a plan, how many steps it has ended, and why not."""

    accepted: bool
    steps: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """A plan to record by; None: only for the status."""

    plan: Plan | None
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


def ask_record(pid: int, plan: Plan, relayed: bool = False) -> Answer | None:
    """Asks the rank in the process to record; None where no agent answers there.

    relayed: the other hosts of the job have heard of it.
    """
    body = _ask(pid, {"do": "record", "plan": asdict(plan), "relayed": relayed}, 2.0)
    return None if body is None else Answer(**named(Answer, body))


def answer_line(status: Status | Answer) -> bytes:
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
