"""Observes a running job whose steps may have stopped: looks at every rank of this host."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from stepsplit.collectors.attach import left_states, messages, processes, stacks
from stepsplit.collectors.attach.jobs import find_processes
from stepsplit.collectors.formats import rank_state
from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.job.launcher import read_identity, read_job_name
from stepsplit.collectors.probes.nccl_ras import ask_ras
from stepsplit.collectors.safe_io.atomic_file import make_owner_folder, write_whole

# Most steps end within it: a job that goes on shows progress at the second look.
LOOK_INTERVAL_S = 1.5

# So a hang is said after 6 s at most, also of a job whose usual step takes longer.
MAX_LOOKS = 5


def observe_job(target: int | None, out: Path) -> tuple[rank_state.RankState, ...]:
    """Looks at every rank of the job on this host, and writes their states and dumps to a folder.

    Each rank's agent answers from its own thread; nothing else in the ranks runs or changes. The
    looks go on for a few seconds until it is clear whether steps end or calls are made; Flight
    Recorders are read only if neither happens.

    Args:
        target: a rank of the job or a process that started it; None if there is only one job.
        out: folder for rank{rank}_state.json and rank{rank}_flight.json.

    Returns:
        The states of the ranks of this host, sorted by rank.

    Raises:
        CollectError: no job, or several, or the folder cannot be written.
    """
    pids = find_processes(target)
    looks = [_look_at_all(pids)]
    while len(looks) < 2 or (len(looks) < MAX_LOOKS and not _is_decided(looks)):
        time.sleep(LOOK_INTERVAL_S)
        looks.append(_look_at_all(pids))
    # A Flight Recorder is megabytes, and of use only if the ranks stand still.
    stopped = not _has_progress(*looks[-2:])
    answers = _look_at_all(pids, flight=True) if stopped else looks[-1]
    states = [
        _describe_silent(pid)
        if answer is None
        # Its looks in order: that before may have had no answer.
        else replace(
            answer.state, looks=(*(before.state.looks if before else ()), *answer.state.looks)
        )
        for pid, answer, before in ((pid, one, looks[-2][pid]) for pid, one in answers.items())
    ]
    states = _add_ended(states)
    try:
        make_owner_folder(out)
        for state in states:
            rank_state.write_state(out, state)
        for answer in answers.values():
            if answer is not None and answer.flight:
                name = f"rank{answer.state.rank}_flight.json"
                write_whole(out / name, answer.flight.encode())
        if stopped:
            # What NCCL's RAS says, if it answers; it may be that of another job.
            said = ask_ras(processes.read_environment(pids[0]))
            named = {int(number) for number in _RAS_PROCESS.findall(said)}
            if named & set(pids):
                write_whole(out / rank_state.RAS_NAME, said.encode())
    except OSError as error:
        raise CollectError(f"{out}: {error.strerror}; choose another --out") from None
    return tuple(states)


_Answers = Mapping[int, messages.LookAnswer | None]


def _look_at_all(
    pids: Sequence[int], flight: bool = False
) -> dict[int, messages.LookAnswer | None]:
    def look(pid: int) -> messages.LookAnswer | None:
        # The kernel accepts connections for a stopped process, which would only time out.
        return None if processes.is_process_stopped(pid) else messages.ask_look(pid, flight)

    # All at once: each may take the whole timeout, and looks of one moment can be compared.
    with ThreadPoolExecutor(len(pids)) as pool:
        return dict(zip(pids, pool.map(look, pids), strict=True))


def _has_progress(earlier: _Answers, later: _Answers) -> bool:
    return any(
        before is not None
        and after is not None
        and _read_progress(after.state) != _read_progress(before.state)
        for before, after in ((earlier[pid], later[pid]) for pid in later)
    )


def _is_decided(looks: Sequence[_Answers]) -> bool:
    """Whether the ranks have stood still for longer than a step takes, or go on after all."""
    if _has_progress(*looks[-2:]):
        # One more look after the first two: a step may end just between them, and then none any
        # more.
        return len(looks) > 2
    states = [answer.state for answer in looks[-1].values() if answer is not None]
    usual_ns = max((state.step_ns for state in states), default=0)
    age_ns = min((state.looks[-1].since_step_ns for state in states), default=0)
    return age_ns > rank_state.USUAL_STEPS * usual_ns


def _read_progress(state: rank_state.RankState) -> tuple[int, int]:
    return state.looks[-1].steps, state.looks[-1].calls


def _describe_silent(pid: int) -> rank_state.RankState:
    """The state of a rank that does not answer, by what it has left or else its environment."""
    condition = rank_state.SILENT if processes.is_process_alive(pid) else rank_state.ENDED
    condition = rank_state.STOPPED if processes.is_process_stopped(pid) else condition
    look = stacks.read_stack(pid) if condition == rank_state.SILENT else None
    looks = () if look is None else (look,)
    left = next((one for one in left_states.read_left_states() if one.pid == pid), None)
    if left is not None:
        return replace(left, condition=condition, looks=looks or left.looks)
    environment = processes.read_environment(pid)
    place, job = read_identity(environment), read_job_name(environment)
    return rank_state.RankState(
        place.rank, place.world_size, pid=pid, job=job, condition=condition, looks=looks
    )


def _add_ended(states: Sequence[rank_state.RankState]) -> list[rank_state.RankState]:
    """The states, and those of the ranks of this host whose processes have ended."""
    known = {state.rank: state for state in states}
    # A rank that answers knows the size of the job best; one described by its environment may not.
    first = min(
        states, key=lambda state: state.condition in (rank_state.SILENT, rank_state.STOPPED)
    )
    for left in left_states.read_left_states():
        if left.job == first.job and left.rank < first.world_size:
            known.setdefault(left.rank, left)
    return [known[rank] for rank in sorted(known)]


_RAS_PROCESS = re.compile(r'(?:"pid": *|\b[Pp]rocess )(\d+)')
