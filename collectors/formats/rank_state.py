"""The state of one rank of a running job: steps, calls and stack (rank{rank}_state.json)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from stepsplit.collectors.formats.json_decode import decode_value, parse_object
from stepsplit.collectors.formats.rank_record import CodeFrame
from stepsplit.collectors.formats.run_spec import GroupInfo
from stepsplit.collectors.safe_io.atomic_file import write_whole

STATE_SCHEMA = "stepsplit.state/1"

STATE_SUFFIX = "_state.json"

RAS_NAME = "nccl_ras.txt"
"""What NCCL's RAS said of the job when its ranks were looked at."""

RUNNING, RAISED, STOPPED, SILENT, ENDED = "running", "raised", "stopped", "silent", "ended"


USUAL_STEPS = 3.0
"""A step that has lasted less than this many times the longest recent one may be only slow."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a rank.

    steps: ended steps. since_step_ns: time since the last one ended, or since the rank joined the
    job. calls: collectives called so far in all groups. stack: of the main thread, innermost frame
    first. busy_ns: time in which the main thread has run or has waited for a CPU. io_bytes:
    read and written by the process.
    """

    at_unix_ns: int
    steps: int
    since_step_ns: int
    calls: int
    stack: tuple[CodeFrame, ...]
    busy_ns: int = 0
    io_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank.

    condition: "running"; "raised" if its main thread has ended with an exception; "stopped" if the
    process is (SIGSTOP, a debugger); "silent" if its agent does not answer; "ended" if the process
    has. step_ns: the longest of its recent steps, 0 if unknown. looks: one or more, oldest first.
    error: the exception, with its innermost frame first in error_stack.
    """

    rank: int
    world_size: int
    host: str = ""
    pid: int = 0
    job: str = ""
    condition: str = RUNNING
    step_ns: int = 0
    looks: tuple[Look, ...] = ()
    groups: tuple[GroupInfo, ...] = ()
    error: str = ""
    error_stack: tuple[CodeFrame, ...] = ()


def format_state(state: RankState) -> str:
    """The state as JSON on one line, as read by read_state."""
    return json.dumps({"schema": STATE_SCHEMA} | asdict(state)) + "\n"


def read_state(text: str | bytes) -> RankState:
    """Decodes a state. Raises ValueError if it is invalid."""
    state: RankState = decode_value(parse_object(text, STATE_SCHEMA), RankState, "state")
    return state


def write_state(folder: Path, state: RankState) -> Path:
    """Writes the state into the folder atomically."""
    path = folder / f"rank{state.rank}{STATE_SUFFIX}"
    return write_whole(path, format_state(state).encode())
