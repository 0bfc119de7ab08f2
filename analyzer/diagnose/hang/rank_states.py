"""The states of the ranks of a running job, and what they add to its dumps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.hang.result import LATE, Culprit, RankNow, StackFrame
from stepsplit.analyzer.diagnose.hang.sentences import choose_verb, format_ranks
from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.compression import list_files, open_unpacked
from stepsplit.analyzer.readers.sources import Source, is_special
from stepsplit.collectors.formats.rank_record import CodeFrame
from stepsplit.collectors.formats.rank_state import (
    ENDED,
    RAISED,
    RUNNING,
    SILENT,
    STATE_SUFFIX,
    STOPPED,
    USUAL_STEPS,
    RankState,
    read_state,
)

BUSY_FRACTION = 0.3
"""A main thread that runs or is ready to for more of the time between two looks computes."""


BUSY_IO = 1 << 20
"""A process that reads and writes more than this between two looks makes progress."""


MAX_STATE_BYTES = 16 << 20


_PEER_ERRORS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe",
                "Timed out waiting", "remote process exited")  # fmt: skip
"""Errors of a rank whose peer has ended: a consequence, not the cause."""


def read_states(places: Sequence[str | Path]) -> tuple[RankState, ...]:
    """The states of the ranks in the places, sorted by rank. Raises DataError for an invalid one.

    A state is a file rank{rank}_state.json, as `stepsplit hang` writes it for a running job.
    """
    states: dict[int, RankState] = {}
    with list_files([str(place) for place in places]) as sources:
        for source in sources:
            if not source.inner.name.endswith(STATE_SUFFIX) or is_special(source):
                continue
            with open_unpacked(source) as content:
                text = content.read(MAX_STATE_BYTES)
            try:
                state = read_state(text)
            except ValueError as error:
                raise DataError(source.where, f"invalid state: {error}", RECORD_AGAIN) from None
            states[state.rank] = state
    return tuple(states[rank] for rank in sorted(states))


def read_heads(places: Sequence[str | Path], size: int) -> Iterator[tuple[Source, bytes]]:
    """The files of the places, each with its first bytes. One that cannot be read is left out: it
    is a warning of the dumps, and no reason to say nothing of a job that hangs."""
    with list_files([str(place) for place in places]) as sources:
        for source in sources:
            if is_special(source):
                continue
            try:
                with open_unpacked(source) as content:
                    head = content.read(size)
            except DataError:
                continue
            yield source, head


def is_peer_error(state: RankState) -> bool:
    return any(text in state.error for text in _PEER_ERRORS)


def summarize_state(state: RankState) -> RankNow:
    """The state of a rank as it is reported."""
    last = state.looks[-1] if state.looks else None
    stack = state.error_stack or (last.stack if last is not None else ())
    return RankNow(
        rank=state.rank,
        condition=state.condition,
        steps=None if last is None else last.steps,
        since_step_ns=None if last is None else last.since_step_ns,
        busy_fraction=_measure_busy_fraction(state),
        error=state.error,
        stack=tuple(StackFrame(one.function, one.file, one.line) for one in stack),
    )


def _measure_busy_fraction(state: RankState) -> float | None:
    if len(state.looks) < 2:
        return None
    first, last = state.looks[0], state.looks[-1]
    elapsed_ns = last.at_unix_ns - first.at_unix_ns
    return round((last.busy_ns - first.busy_ns) / elapsed_ns, 3) if elapsed_ns > 0 else None


def describe_progress(states: Sequence[RankState]) -> str | None:
    """What has gone on between the looks, in words; None if no step or call has."""
    seen = [state for state in states if len(state.looks) > 1]
    best = max(seen, key=_count_progress, default=None)
    if best is None or _count_progress(best) == (0, 0):
        return None
    steps, calls = _count_progress(best)
    seconds = (best.looks[-1].at_unix_ns - best.looks[0].at_unix_ns) / 1e9
    done = f"ended {steps} steps" if steps else f"made {calls} collective calls"
    return f"rank {best.rank} {done} in {seconds:.1f} s"


def _count_progress(state: RankState) -> tuple[int, int]:
    first, last = state.looks[0], state.looks[-1]
    return last.steps - first.steps, last.calls - first.calls


def describe_short_wait(states: Sequence[RankState]) -> str | None:
    """That the current step is not much longer than recent ones, in words; None if it is."""
    running = [one for one in states if one.condition == RUNNING and one.looks and one.step_ns]
    if len(running) < len(states):
        return None
    age_ns = min((one.looks[-1].since_step_ns for one in running), default=0)
    usual_ns = max((one.step_ns for one in running), default=0)
    if not running or age_ns > USUAL_STEPS * usual_ns:
        return None
    return (
        f"the current step has lasted {age_ns / 1e9:.1f} s, and recent ones took up to"
        f" {usual_ns / 1e9:.1f} s"
    )


def explain_culprit(culprit: Culprit, states: Mapping[int, RankState]) -> Culprit:
    """The culprit with the condition of its processes as cause, and what they do in words."""
    known = [states[rank] for rank in culprit.ranks if rank in states]
    if not known:
        return culprit
    cause = next(
        (
            found
            for found in map(_find_cause, known)
            if found and culprit.cause in ("not_called", "no_dump")
        ),
        None,
    )
    doing = dict.fromkeys(describe_rank(one, culprit.ranks) for one in known[:_MAX_DESCRIBED])
    message = "; ".join([_NO_DUMP.sub(":", culprit.message), *doing])
    return msgspec.structs.replace(culprit, cause=cause or culprit.cause, message=message)


_NO_DUMP = re.compile(r" \(inferred\): no dump of \w+, and")
"""A rank whose state is known needs no inference from its missing dump."""


_MAX_ERROR = 160


_MAX_DESCRIBED = 4


def _find_cause(state: RankState) -> str | None:
    if state.condition in (ENDED, RAISED, STOPPED, SILENT):
        return state.condition
    return LATE if is_busy(state) else None


def is_busy(state: RankState) -> bool:
    """Whether the rank computed, or read or wrote files, between the looks."""
    return state.condition == RUNNING and (_is_computing(state) or _count_io_bytes(state) > BUSY_IO)


def _is_computing(state: RankState) -> bool:
    return (_measure_busy_fraction(state) or 0.0) > BUSY_FRACTION


def _count_io_bytes(state: RankState) -> int:
    return state.looks[-1].io_bytes - state.looks[0].io_bytes if state.looks else 0


def describe_rank(state: RankState, among: Sequence[int] = ()) -> str:
    """What a rank does, in words. among: the ranks of which the sentence speaks already."""
    whom = "it" if len(among) == 1 else f"rank {state.rank}"
    subject = "its" if len(among) == 1 else f"rank {state.rank}'s"
    place = f" in {name_place(state.error_stack)}" if state.error_stack else ""
    error = state.error
    if len(error) > _MAX_ERROR:
        error = f"{error[: _MAX_ERROR - 3]}..."
    match state.condition:
        case "ended":
            # A rank that ends by itself leaves its last step; one that is killed leaves nothing.
            why = (
                f" with {error}{place}"
                if error
                else (" without an error" if state.looks else " (killed, or crashed)")
            )
            return f"{subject} process has ended{why}"
        case "raised":
            return f"{whom} has raised {error}{place}, and its process has not ended"
        case "stopped":
            return f"{subject} process {state.pid} is stopped (SIGSTOP or a debugger)"
        case "silent":
            held = f"{subject} process {state.pid} does not answer: it holds Python's lock"
            return f"{held} in {name_place(state.looks[-1].stack)}" if state.looks else held
    stack = state.looks[-1].stack if state.looks else ()
    how, busy = "waits", _measure_busy_fraction(state) or 0.0
    if busy > BUSY_FRACTION:
        how = f"computes (busy {units.format_percent(busy)} of the time)"
    elif is_busy(state):
        how = f"reads or writes ({_count_io_bytes(state) / 1e6:.0f} MB)"
    return f"{whom} {how} in {name_place(stack)}" if stack else f"{whom} {how}"


def name_place(stack: Sequence[CodeFrame]) -> str:
    """The innermost frame of the user's code, and below it the innermost of all."""
    inner = stack[0]
    users = (one for one in stack if not any(part in one.file for part in _LIBRARIES))
    own = next(users, inner)
    place = f"{_shorten(own.file)}:{own.line} {own.function}"
    return place if own is inner else f"{place} > {inner.function} ({_shorten(inner.file)})"


_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<", "/stepsplit/",
              "/collectors/attach/", "/torch/")  # fmt: skip


def _shorten(file: str) -> str:
    return "/".join(file.split("/")[-1:])


def find_culprits_by_state(states: Sequence[RankState]) -> tuple[Culprit, ...]:
    """The ranks to blame for steps that have stopped while no collective is open.

    They are those whose process has ended or raised, else those that are not in a call of
    torch.distributed while others are.
    """
    gone = [one for one in states if one.condition != RUNNING and not is_peer_error(one)]
    away = []
    for one in states:
        stack = one.looks[-1].stack if one.looks else ()
        if not any("/torch/distributed/" in frame.file for frame in stack):
            away.append(one)
    to_blame = gone or (away if len(away) < len(states) else [])
    if not to_blame:
        return ()
    ranks = tuple(one.rank for one in to_blame)
    held = tuple(one.rank for one in states if one.rank not in ranks)
    cause = _find_cause(to_blame[0]) or "not_called"
    blocks = f"{format_ranks(ranks)} {choose_verb(ranks, 'blocks', 'block')} all other ranks"
    plain = Culprit(ranks, cause, held, f"{blocks}: no collective is open")
    return (explain_culprit(plain, {one.rank: one for one in to_blame}),)
