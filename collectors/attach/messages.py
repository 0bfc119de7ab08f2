"""Messages between attach and the agents: one JSON object per line, over a Unix socket."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from stepsplit.collectors.attach.sockets import connect, find_files
from stepsplit.collectors.formats.json_decode import select_known_fields
from stepsplit.collectors.formats.rank_state import RankState, format_state, read_state
from stepsplit.collectors.record.plan import RecordPlan, decode_plan
from stepsplit.collectors.watch.plan import WatchPlan

MARGIN_STEPS = 3
"""An attach starts at least this many steps ahead, so that every rank gets the request in time."""

POLL_S = 2.0
"""Interval at which one rank of each host polls for a plan."""


# A question or an answer is a line of some hundred bytes, and its writer may be another user.
_MAX_BYTES = 1 << 16

# A look may carry the rank's whole Flight Recorder: 20,000 calls with their stacks.
_MAX_LOOK_BYTES = 256 << 20

# An agent answers from a thread, which waits for the interpreter's lock with the main thread.
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
    # One deadline for the line: a timeout of each part alone would let a byte a second hold the
    # agent's thread forever.
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
    # Also of an agent whose user's folder has moved since: the first that answers counts.
    for path in find_files(pid):
        with suppress(OSError, ValueError, RecursionError), connect(path, timeout_s) as connection:
            connection.sendall(json.dumps(question).encode() + b"\n")
            body = json.loads(read_line(connection, max_bytes, timeout_s))
            if isinstance(body, dict):
                return body
    return None
