"""attach: records a running job through its agents, Kineto's daemon protocol or PEP 768."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stepsplit.collectors.attach.protocol import (
    MARGIN_STEPS,
    POLL_S,
    AgentAnswer,
    Captured,
    Status,
    agents,
    ancestors,
    ask_record,
    ask_status,
    capture,
    command_line,
    environment,
    family,
    ranks_with_daemon,
)
from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.rank_files import Packed, Packer
from stepsplit.collectors.rank_record import record_path, trace_path
from stepsplit.collectors.record import PLAN_VARIABLE, SITE, RecordPlan
from stepsplit.collectors.run_spec import RankInfo, RunSpec, write_run_json

# Attaches through the job's agents, Kineto's protocol, or PEP 768, whichever works.


def attach_and_wait(
    target: int | None, out: Path | None, plan_in: Callable[[Path], RecordPlan], timeout_s: float
) -> str:
    """Records a running job, waits for the recording, and returns a message for the user.

    plan_in: builds the plan for an output folder. Raises CollectError.
    """
    folder = out or default_out(target)
    plan = plan_in(folder)
    if target is not None and not _has_agent(target):
        if ranks_with_daemon(target):
            return _by_kineto(target, plan, timeout_s)
        for pid in family(target):
            if environment(pid).get("RANK") is not None or pid == target:
                inject(pid, plan)
    return _by_agents(target, plan, timeout_s)


def _has_agent(target: int) -> bool:
    return any(pid in agents() and ask_status(pid) is not None for pid in family(target))


def _by_agents(target: int | None, plan: RecordPlan, timeout_s: float) -> str:
    agreed = attach(target, plan)
    last = agreed.first + plan.steps - 1
    here, all_ranks = len(agreed.ranks), agreed.ranks[0].world_size
    elsewhere = f"; {all_ranks - here} ranks on other hosts notified" if all_ranks > here else ""
    _say(f"ranks {_listed(agreed)} record steps {agreed.first} to {last}{elsewhere}")
    for refusal in agreed.refused:
        _say(f"refused: {refusal}")
    if not wait_for(agreed, timeout_s, _say):
        raise CollectError(f"step {last} was not reached in {timeout_s:.0f} s; raise --timeout")
    if not written(agreed, timeout_s):
        raise CollectError(f"{plan.out}: some files are missing; was a rank lost?")
    return f"recorded; analyze with: stepsplit analyze {plan.out}"


def _by_kineto(target: int, plan: RecordPlan, timeout_s: float) -> str:
    _say("no agent found; requesting a trace through Kineto's daemon protocol")
    captured = capture(target, plan, timeout_s)
    packer, folder = Packer(), Path(plan.out)
    packer.pack([Packed(each.trace, trace_path(folder, each.rank)) for each in captured])
    write_run_json(folder, _spec(plan, captured))
    if not packer.wait(timeout_s):
        raise CollectError(f"{folder}: files are still being packed; wait before analyzing it")
    return f"recorded {len(captured)} ranks; analyze with: stepsplit analyze {plan.out}"


def _spec(plan: RecordPlan, captured: tuple[Captured, ...]) -> RunSpec:
    """The RunSpec from the environments of the processes: their traces have no rank."""
    told = {each.pid: environment(each.pid) for each in captured}
    sizes = [int(env.get("WORLD_SIZE", "0")) for env in told.values()]
    host = Path("/proc/sys/kernel/hostname").read_text().strip()
    return RunSpec(
        name=plan.name,
        world_size=max(*sizes, len(captured), max(each.rank for each in captured) + 1),
        backend="",
        ranks=tuple(
            RankInfo(e.rank, int(told[e.pid].get("LOCAL_RANK", "0")), host, e.pid, "")
            for e in captured
        ),
    )


def _listed(agreed: Attached) -> str:
    return ", ".join(str(rank.rank) for rank in agreed.ranks)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


# Requests that all ranks of a running job record the same steps.

_REACT_S = 0.5

_POLL_S, _TELL_S, _SECOND_STEP_S = 0.2, 5.0, 300.0


@dataclass(frozen=True, slots=True)
class Attached:
    """The agreed plan, the ranks that were asked, and a message per rank that refused."""

    plan: RecordPlan
    ranks: tuple[Status, ...]
    refused: tuple[str, ...]

    @property
    def first(self) -> int:
        """The first recorded step."""
        return self.plan.first or 0


def attach(target: int | None, plan: RecordPlan) -> Attached:
    """Asks the ranks of the job to record, beginning at the next step that all can reach.

    target: a rank of the job or a process that started it; None if there is only one job. Ranks on
    other hosts are notified through the job's store. Raises CollectError if no rank accepts.
    """
    ranks = _stepping(target)
    begun = max(rank.steps for rank in ranks)
    wait_s = _REACT_S + (2 * POLL_S if ranks[0].local_world_size < ranks[0].world_size else 0)
    # Use the fastest step of all ranks: recent steps may have been slow.
    ahead = int(wait_s * 1e9 / min(rank.step_ns for rank in ranks))
    first = begun + plan.warmup + ahead + 2 * MARGIN_STEPS
    agreed = replace(plan, first=first)
    answers = [(rank, ask_record(rank.pid, agreed)) for rank in ranks]
    refused = tuple(_refusal(rank, answer) for rank, answer in answers if not _took(answer))
    if len(refused) == len(ranks):
        raise CollectError(f"no rank accepted the request: {refused[0]}")
    return Attached(agreed, ranks, refused)


def wait_for(attached: Attached, timeout_s: float, said: Callable[[str], None]) -> bool:
    """Waits for the last recorded step of all ranks; False on timeout. `said` gets progress."""
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
    """Waits until the files of all asked ranks are complete; False on timeout."""
    folder, deadline = Path(attached.plan.out), time.monotonic() + timeout_s
    records = [record_path(folder, rank.rank) for rank in attached.ranks]

    def whole() -> bool:
        return all(path.exists() for path in records) and not any(folder.glob(".rank*"))

    while not whole() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return whole()


def _stepping(target: int | None) -> tuple[Status, ...]:
    """The ranks, once each has ended two steps, so that its step time is known."""
    deadline, ranks = time.monotonic() + _SECOND_STEP_S, _job(target)
    while not all(rank.step_ns for rank in ranks):
        if time.monotonic() > deadline:
            raise CollectError(f"no second step in {_SECOND_STEP_S:.0f} s; is the job running?")
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
        return f"{len(found)} jobs are on standby on this host; choose a process of one: {pids}"
    what = "no job" if target is None else f"no rank of process {target}"
    return (
        f"{what} on this host is on standby, or no step has ended yet; start the job with"
        " stepsplit record --standby -- ..., or with KINETO_USE_DAEMON=1"
    )


def _took(answer: AgentAnswer | None) -> bool:
    return answer is not None and answer.accepted


def _refusal(rank: Status, answer: AgentAnswer | None) -> str:
    return f"rank {rank.rank}: {'it does not answer' if answer is None else answer.why}"


def default_out(target: int | None) -> Path:
    """An output folder that does not exist yet."""
    number = 1
    while (folder := Path(f"runs/attach-{target or 'job'}-{number}")).exists():
        number += 1
    return folder.absolute()


# Starts the agent in an unprepared process; needs Python 3.14 or later on both sides.

_PATIENCE_S = 30.0

_SCRIPT = """\
import os, runpy
os.environ[{name!r}] = {plan!r}
runpy.run_path({site!r})
"""


def inject(pid: int, plan: RecordPlan) -> None:
    """Starts the agent in the process (PEP 768) and waits until the process has ended a step.

    Raises CollectError if either Python does not support or permit it.
    """
    remote_exec = getattr(sys, "remote_exec", None)
    if remote_exec is None:
        version = ".".join(map(str, sys.version_info[:2]))
        raise CollectError(
            f"process {pid} has no agent, and Python {version} cannot start one (3.14 can); start"
            " the job with stepsplit record --standby -- ..."
        )
    script = _SCRIPT.format(
        name=PLAN_VARIABLE, plan=plan.text(), site=str(SITE / "sitecustomize.py")
    )
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(script)
    try:
        remote_exec(pid, file.name)
        _await_agent(pid)
    except (OSError, RuntimeError) as error:
        raise CollectError(f"cannot run code in process {pid}: {error}") from None
    finally:
        Path(file.name).unlink()


def _await_agent(pid: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while ask_status(pid) is None:
        if time.monotonic() > deadline:
            raise CollectError(f"process {pid} did not end a step in {_PATIENCE_S:.0f} s")
        time.sleep(0.2)
