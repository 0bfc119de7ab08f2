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
    CapturedTrace,
    Status,
    ask_record,
    ask_status,
    capture,
    find_daemon_ranks,
    list_agents,
    list_ancestors,
    list_process_tree,
    read_command_line,
    read_environment,
)
from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.rank_files import Packer, PackTask
from stepsplit.collectors.rank_record import build_record_path, build_trace_path
from stepsplit.collectors.record import PLAN_VARIABLE, SITE, RecordPlan
from stepsplit.collectors.run_spec import RankInfo, RunSpec, write_run_json

# Attaches through the job's agents, Kineto's protocol, or PEP 768, whichever works.


def attach_and_wait(
    target: int | None, out: Path | None, build_plan: Callable[[Path], RecordPlan], timeout_s: float
) -> str:
    """Records a running job, waits for the recording, and returns a message for the user.

    plan_in: builds the plan for an output folder. Raises CollectError.
    """
    folder = out or choose_out(target)
    plan = build_plan(folder)
    if target is not None and not _has_agent(target):
        if find_daemon_ranks(target):
            return _record_by_kineto(target, plan, timeout_s)
        for pid in list_process_tree(target):
            if read_environment(pid).get("RANK") is not None or pid == target:
                inject(pid, plan)
    return _record_by_agents(target, plan, timeout_s)


def _has_agent(target: int) -> bool:
    return any(
        pid in list_agents() and ask_status(pid) is not None for pid in list_process_tree(target)
    )


def _record_by_agents(target: int | None, plan: RecordPlan, timeout_s: float) -> str:
    agreed = attach(target, plan)
    last = agreed.first + plan.steps - 1
    here, all_ranks = len(agreed.ranks), agreed.ranks[0].world_size
    elsewhere = f"; {all_ranks - here} ranks on other hosts notified" if all_ranks > here else ""
    _say(f"ranks {_format_ranks(agreed)} record steps {agreed.first} to {last}{elsewhere}")
    for refusal in agreed.refused:
        _say(f"refused: {refusal}")
    if not wait_for_steps(agreed, timeout_s, _say):
        raise CollectError(f"step {last} was not reached in {timeout_s:.0f} s; raise --timeout")
    if not wait_until_written(agreed, timeout_s):
        raise CollectError(f"{plan.out}: some files are missing; was a rank lost?")
    return f"recorded; analyze with: stepsplit analyze {plan.out}"


def _record_by_kineto(target: int, plan: RecordPlan, timeout_s: float) -> str:
    _say("no agent found; requesting a trace through Kineto's daemon protocol")
    captured = capture(target, plan, timeout_s)
    packer, folder = Packer(), Path(plan.out)
    packer.pack([PackTask(each.trace, build_trace_path(folder, each.rank)) for each in captured])
    write_run_json(folder, _build_spec(plan, captured))
    if not packer.wait(timeout_s):
        raise CollectError(f"{folder}: files are still being packed; wait before analyzing it")
    return f"recorded {len(captured)} ranks; analyze with: stepsplit analyze {plan.out}"


def _build_spec(plan: RecordPlan, captured: tuple[CapturedTrace, ...]) -> RunSpec:
    """The RunSpec from the environments of the processes: their traces have no rank."""
    environments = {each.pid: read_environment(each.pid) for each in captured}
    sizes = [int(env.get("WORLD_SIZE", "0")) for env in environments.values()]
    host = Path("/proc/sys/kernel/hostname").read_text().strip()
    return RunSpec(
        name=plan.name,
        world_size=max(*sizes, len(captured), max(each.rank for each in captured) + 1),
        backend="",
        ranks=tuple(
            RankInfo(e.rank, int(environments[e.pid].get("LOCAL_RANK", "0")), host, e.pid, "")
            for e in captured
        ),
    )


def _format_ranks(agreed: AttachedJob) -> str:
    return ", ".join(str(rank.rank) for rank in agreed.ranks)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


# Requests that all ranks of a running job record the same steps.

_REACT_S = 0.5

_POLL_S, _TELL_S, _SECOND_STEP_S = 0.2, 5.0, 300.0


@dataclass(frozen=True, slots=True)
class AttachedJob:
    """The agreed plan, the ranks that were asked, and a message per rank that refused."""

    plan: RecordPlan
    ranks: tuple[Status, ...]
    refused: tuple[str, ...]

    @property
    def first(self) -> int:
        """The first recorded step."""
        return self.plan.first or 0


def attach(target: int | None, plan: RecordPlan) -> AttachedJob:
    """Asks the ranks of the job to record, beginning at the next step that all can reach.

    target: a rank of the job or a process that started it; None if there is only one job. Ranks on
    other hosts are notified through the job's store. Raises CollectError if no rank accepts.
    """
    ranks = _wait_for_two_steps(target)
    steps_done = max(rank.steps for rank in ranks)
    wait_s = _REACT_S + (2 * POLL_S if ranks[0].local_world_size < ranks[0].world_size else 0)
    # Use the fastest step of all ranks: recent steps may have been slow.
    ahead = int(wait_s * 1e9 / min(rank.step_ns for rank in ranks))
    first = steps_done + plan.warmup + ahead + 2 * MARGIN_STEPS
    agreed = replace(plan, first=first)
    answers = [(rank, ask_record(rank.pid, agreed)) for rank in ranks]
    refused = tuple(
        _format_refusal(rank, answer) for rank, answer in answers if not _is_accepted(answer)
    )
    if len(refused) == len(ranks):
        raise CollectError(f"no rank accepted the request: {refused[0]}")
    return AttachedJob(agreed, ranks, refused)


def wait_for_steps(attached: AttachedJob, timeout_s: float, report: Callable[[str], None]) -> bool:
    """Waits for the last recorded step of all ranks; False on timeout. `said` gets progress."""
    start_s, last = time.monotonic(), attached.first + attached.plan.steps
    waiting, report_at = {rank.pid for rank in attached.ranks}, start_s + _TELL_S
    while waiting and (now := time.monotonic()) < start_s + timeout_s:
        statuses = [ask_status(pid) for pid in sorted(waiting)]
        waiting = {one.pid for one in statuses if one is not None and one.steps < last}
        if waiting and now >= report_at:
            steps_done = min(one.steps for one in statuses if one is not None)
            report(f"{steps_done} of {last} steps have ended")
            report_at = now + _TELL_S
        time.sleep(_POLL_S)
    return not waiting


def wait_until_written(attached: AttachedJob, timeout_s: float) -> bool:
    """Waits until the files of all asked ranks are complete; False on timeout."""
    folder, deadline = Path(attached.plan.out), time.monotonic() + timeout_s
    records = [build_record_path(folder, rank.rank) for rank in attached.ranks]

    def whole() -> bool:
        return all(path.exists() for path in records) and not any(folder.glob(".rank*"))

    while not whole() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return whole()


def _wait_for_two_steps(target: int | None) -> tuple[Status, ...]:
    """The ranks, once each has ended two steps, so that its step time is known."""
    deadline, ranks = time.monotonic() + _SECOND_STEP_S, _find_job_ranks(target)
    while not all(rank.step_ns for rank in ranks):
        if time.monotonic() > deadline:
            raise CollectError(f"no second step in {_SECOND_STEP_S:.0f} s; is the job running?")
        time.sleep(_POLL_S)
        ranks = _find_job_ranks(target)
    return ranks


def _find_job_ranks(target: int | None) -> tuple[Status, ...]:
    jobs: defaultdict[str, list[Status]] = defaultdict(list)
    for pid in list_agents():
        status = ask_status(pid)
        if status is not None:
            jobs[status.job].append(status)
    if target is not None:
        matching = [
            job for job in jobs.values() if any(_is_of_process(rank, target) for rank in job)
        ]
    else:
        matching = list(jobs.values())
    if len(matching) != 1:
        raise CollectError(_explain_job_choice(matching, target))
    return tuple(sorted(matching[0], key=lambda rank: rank.rank))


def _is_of_process(rank: Status, target: int) -> bool:
    return target in (rank.pid, *list_ancestors(rank.pid))


def _explain_job_choice(jobs: Sequence[Sequence[Status]], target: int | None) -> str:
    if jobs:
        pids = ", ".join(f"{job[0].pid} ({read_command_line(job[0].pid)})" for job in jobs)
        return f"{len(jobs)} jobs are on standby on this host; choose a process of one: {pids}"
    what = "no job" if target is None else f"no rank of process {target}"
    return (
        f"{what} on this host is on standby, or no step has ended yet; start the job with"
        " stepsplit record --standby -- ..., or with KINETO_USE_DAEMON=1"
    )


def _is_accepted(answer: AgentAnswer | None) -> bool:
    return answer is not None and answer.accepted


def _format_refusal(rank: Status, answer: AgentAnswer | None) -> str:
    return f"rank {rank.rank}: {'it does not answer' if answer is None else answer.why}"


def choose_out(target: int | None) -> Path:
    """An output folder that does not exist yet."""
    number = 1
    while (folder := Path(f"runs/attach-{target or 'job'}-{number}")).exists():
        number += 1
    return folder.absolute()


# Starts the agent in an unprepared process; needs Python 3.14 or later on both sides.

_AGENT_TIMEOUT_S = 30.0

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
        name=PLAN_VARIABLE, plan=plan.format_json(), site=str(SITE / "sitecustomize.py")
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
    deadline = time.monotonic() + _AGENT_TIMEOUT_S
    while ask_status(pid) is None:
        if time.monotonic() > deadline:
            raise CollectError(f"process {pid} did not end a step in {_AGENT_TIMEOUT_S:.0f} s")
        time.sleep(0.2)
