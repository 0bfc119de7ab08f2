"""Asks the ranks of a running job to record: all of them the same steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stepsplit.collectors.control.agent import MARGIN_STEPS
from stepsplit.collectors.control.proc import ancestors, command_line
from stepsplit.collectors.control.relay import POLL_S
from stepsplit.collectors.control.wire import Answer, Status, agents, ask_record, ask_status
from stepsplit.collectors.errors import CollectError
from stepsplit.collectors.paths import record_path
from stepsplit.collectors.plan import Plan

_REACT_S = 0.5
_POLL_S, _TELL_S, _SECOND_STEP_S = 0.2, 5.0, 300.0


@dataclass(frozen=True, slots=True)
class Attached:
    """What was agreed: the first step and the ranks that were asked; refused says why not all."""

    plan: Plan
    ranks: tuple[Status, ...]
    refused: tuple[str, ...]

    @property
    def first(self) -> int:
        return self.plan.first or 0


def attach(target: int | None, plan: Plan) -> Attached:
    """Asks the ranks of the job to record the plan's steps, from the next step that all can reach.

    target: a process of the job, a rank or what has started it; None where there is one job only.
    Ranks on other hosts are told through the job. Raises CollectError where no rank answers.
    """
    ranks = _stepping(target)
    begun = max(rank.steps for rank in ranks)
    wait_s = _REACT_S + (2 * POLL_S if ranks[0].local_world_size < ranks[0].world_size else 0)
    # By the quickest step of all: a job may have been slow just now.
    ahead = int(wait_s * 1e9 / min(rank.step_ns for rank in ranks))
    first = begun + plan.warmup + ahead + 2 * MARGIN_STEPS
    agreed = replace(plan, first=first)
    answers = [(rank, ask_record(rank.pid, agreed)) for rank in ranks]
    refused = tuple(_refusal(rank, answer) for rank, answer in answers if not _took(answer))
    if len(refused) == len(ranks):
        raise CollectError(f"no rank records: {refused[0]}")
    return Attached(agreed, ranks, refused)


def wait_for(attached: Attached, timeout_s: float, said: Callable[[str], None]) -> bool:
    """Whether all ranks have ended their last step to record in time; says how far they are."""
    begun, last = time.monotonic(), attached.first + attached.plan.steps
    waiting, tell_at = {rank.pid for rank in attached.ranks}, begun + _TELL_S
    while waiting and (now := time.monotonic()) < begun + timeout_s:
        seen = [ask_status(pid) for pid in sorted(waiting)]
        waiting = {one.pid for one in seen if one is not None and one.steps < last}
        if waiting and now >= tell_at:
            ended = min(one.steps for one in seen if one is not None)
            said(f"{ended} of {last} steps have ended")
            tell_at = now + _TELL_S
        time.sleep(_POLL_S)
    return not waiting


def written(attached: Attached, timeout_s: float) -> bool:
    """Whether the files of the ranks that were asked are whole, after waiting so long at most."""
    folder, deadline = Path(attached.plan.out), time.monotonic() + timeout_s
    records = [record_path(folder, rank.rank) for rank in attached.ranks]

    def whole() -> bool:
        return all(path.exists() for path in records) and not any(folder.glob(".rank*"))

    while not whole() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return whole()


def _stepping(target: int | None) -> tuple[Status, ...]:
    """The ranks, when each has ended two steps: before, nobody knows how long one takes."""
    deadline, ranks = time.monotonic() + _SECOND_STEP_S, _job(target)
    while not all(rank.step_ns for rank in ranks):
        if time.monotonic() > deadline:
            raise CollectError(f"no second step in {_SECOND_STEP_S:.0f} s: does the job still run?")
        time.sleep(_POLL_S)
        ranks = _job(target)
    return ranks


def _job(target: int | None) -> tuple[Status, ...]:
    jobs: defaultdict[str, list[Status]] = defaultdict(list)
    for pid in agents():
        status = ask_status(pid)
        if status is not None:
            jobs[status.job].append(status)
    if target is not None:
        found = [job for job in jobs.values() if any(_belongs(rank, target) for rank in job)]
    else:
        found = list(jobs.values())
    if len(found) != 1:
        raise CollectError(_which(found, target))
    return tuple(sorted(found[0], key=lambda rank: rank.rank))


def _belongs(rank: Status, target: int) -> bool:
    return target in (rank.pid, *ancestors(rank.pid))


def _which(found: Sequence[Sequence[Status]], target: int | None) -> str:
    if found:
        pids = ", ".join(f"{job[0].pid} ({command_line(job[0].pid)})" for job in found)
        return f"{len(found)} jobs stand by here: name a process of one: {pids}"
    what = "no job" if target is None else f"no rank of process {target}"
    return (
        f"{what} on this host stands by, or none has ended a step yet: start it with"
        " stepsplit record --standby -- ..., or with KINETO_USE_DAEMON=1"
    )


def _took(answer: Answer | None) -> bool:
    return answer is not None and answer.accepted


def _refusal(rank: Status, answer: Answer | None) -> str:
    return f"rank {rank.rank}: {'it does not answer' if answer is None else answer.why}"


def default_out(target: int | None) -> Path:
    """A folder that is not there yet."""
    number = 1
    while (folder := Path(f"runs/attach-{target or 'job'}-{number}")).exists():
        number += 1
    return folder.absolute()
