"""Which job of this host a command is for, by a process of it."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Sequence

from stepsplit.collectors.attach import left_states, messages, processes, sockets
from stepsplit.collectors.formats.run_spec import RunSpec
from stepsplit.collectors.guard import CollectError

_OR_DAEMON = ", or with KINETO_USE_DAEMON=1"


def find_job_ranks(target: int | None, or_else: str = _OR_DAEMON) -> tuple[messages.Status, ...]:
    """The ranks of the job. or_else: what the error says beside a start on standby."""
    jobs: defaultdict[str, list[messages.Status]] = defaultdict(list)
    for pid in sockets.list_agents():
        status = messages.ask_status(pid)
        if status is not None:
            jobs[status.job].append(status)
    if target is not None:
        matching = [
            job
            for job in jobs.values()
            if any(target in (one.pid, *processes.list_ancestors(one.pid)) for one in job)
        ]
    else:
        matching = list(jobs.values())
    if len(matching) > 1:
        raise CollectError(_list_choices([job[0].pid for job in matching], "are on standby"))
    if not matching:
        what = "no job" if target is None else f"no rank of process {target}"
        raise CollectError(
            f"{what} on this host is on standby, or no step has ended yet; start the job with"
            f" stepsplit record --standby -- ...{or_else}"
        )
    return tuple(sorted(matching[0], key=lambda rank: rank.rank))


def _list_choices(pids: Sequence[int], what: str) -> str:
    """That there are several jobs, with a process of each."""
    named = ", ".join(f"{pid} ({processes.read_command_line(pid)})" for pid in pids)
    return f"{len(pids)} jobs {what} on this host; choose a process of one: {named}"


def find_processes(target: int | None) -> list[int]:
    """The processes of the job's ranks on this host. Raises CollectError if it is not one job."""
    if target is not None and not processes.is_process_alive(target):
        raise CollectError(f"no process {target} on this host; name a rank or the launcher")
    jobs: dict[str, list[int]] = {}
    # By what the ranks have left, since those of a job that hangs may not answer.
    left = {one.pid: one.job for one in reversed(left_states.read_left_states())}
    for pid in filter(processes.is_process_alive, sockets.list_agents()):
        name = left.get(pid)
        if name is None:
            # It has left nothing: a job of one rank does not.
            answer = messages.ask_look(pid)
            name = f"process {pid}" if answer is None else answer.state.job
        jobs.setdefault(name, []).append(pid)
    if target is not None:
        jobs = {
            name: pids
            for name, pids in jobs.items()
            if any(target in (pid, *processes.list_ancestors(pid)) for pid in pids)
        }
    if len(jobs) > 1:
        raise CollectError(_list_choices([pids[0] for pids in jobs.values()], "have an agent"))
    if not jobs:
        what = "no job on this host" if target is None else f"no rank of process {target}"
        raise CollectError(
            f"{what} has an agent; start the job with stepsplit record [--standby] -- ..., or name"
            " a folder with the Flight Recorder dumps of the ranks"
        )
    return next(iter(jobs.values()))


def find_running_rank(spec: RunSpec) -> int | None:
    """The process of a recorded rank that still runs on this host; None if none does."""
    host, agents = socket.gethostname(), set(sockets.list_agents())
    for rank in spec.ranks:
        if rank.host == host and rank.pid in agents and processes.is_process_alive(rank.pid):
            answer = messages.ask_look(rank.pid)
            # Numbers of processes are used again: only the rank itself knows that it is the one.
            if answer is not None and answer.state.rank == rank.rank:
                return rank.pid
    return None
