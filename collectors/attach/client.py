"""Records or watches a running job by its agents, Kineto's protocol or PEP 768."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from stepsplit.collectors.attach import kineto_daemon, messages, processes, sockets
from stepsplit.collectors.attach.inject import inject_into_ranks
from stepsplit.collectors.attach.jobs import find_job_ranks
from stepsplit.collectors.attach.stop_watch import ExplainStop, StopWatch, say
from stepsplit.collectors.formats import file_names, rank_record
from stepsplit.collectors.formats.run_spec import Mesh, RankInfo, RunSpec, write_run_json
from stepsplit.collectors.formats.watch_notes import count_incarnations
from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.job.launcher import read_identity
from stepsplit.collectors.record.command import describe_recorded, make_folder
from stepsplit.collectors.record.pack import name_raw, try_lock
from stepsplit.collectors.record.packer import Packer, PackTask
from stepsplit.collectors.record.plan import RecordPlan, parse_ranks
from stepsplit.collectors.safe_io.private_folder import open_private
from stepsplit.collectors.watch.plan import WatchPlan


def attach_and_wait(
    target: int | None,
    out: Path | None,
    build_plan: Callable[[Path], RecordPlan],
    timeout_s: float,
    explain_stop: ExplainStop | None = None,
) -> str:
    """Records a running job, waits for the recording, and returns a message for the user.

    build_plan: builds the plan for an output folder. explain_stop: says why the steps of a job
    have stopped, given one of its ranks; None if they have not. Raises CollectError.
    """
    watch = StopWatch(explain_stop)
    folder = out or choose_out(target)
    plan = build_plan(folder)
    if target is not None and not _has_agent(target):
        if kineto_daemon.find_daemon_ranks(target):
            return _record_by_kineto(target, plan, timeout_s)
        inject_into_ranks(target, plan)
    deadline = time.monotonic() + timeout_s
    # Two attaches at once would each win some of the ranks, and neither would have a whole job.
    with _take_turn(_wait_for_two_steps(target, watch)[0], deadline):
        _wait_until_free(target, deadline, watch)
        return _record_next_steps(target, plan, timeout_s, watch)


def _has_agent(target: int) -> bool:
    return any(
        pid in sockets.list_agents() and messages.ask_status(pid) is not None
        for pid in processes.list_process_tree(target)
    )


def _record_next_steps(
    target: int | None, plan: RecordPlan, timeout_s: float, watch: StopWatch
) -> str:
    agreed = attach(target, plan, watch)
    last = agreed.first + plan.steps - 1
    here, all_ranks = len(agreed.ranks), agreed.ranks[0].world_size
    elsewhere = f"; {all_ranks - here} ranks on other hosts notified" if all_ranks > here else ""
    # People count steps as the job's log does, over its restarts; the plan counts those of the
    # process.
    before = max(rank.steps_before for rank in agreed.ranks)
    say(
        f"ranks {', '.join(map(str, agreed.recorded))} record steps {before + agreed.first} to"
        f" {before + last}{elsewhere}"
    )
    for refusal in agreed.refused:
        say(f"refused: {refusal}")
    if not wait_for_steps(agreed, timeout_s, say, watch):
        raise CollectError(f"step {last} was not reached in {timeout_s:.0f} s; raise --timeout")
    if not wait_until_written(agreed, timeout_s):
        if not any(map(_is_running, agreed.ranks)):
            raise CollectError(f"the job ended before step {before + last}, and was not recorded")
        raise CollectError(f"{plan.out}: some files are missing; was a rank lost?")
    return describe_recorded(len(agreed.recorded), Path(plan.out))


def _record_by_kineto(target: int, plan: RecordPlan, timeout_s: float) -> str:
    say("no agent found; requesting a trace through Kineto's daemon protocol")
    captured = kineto_daemon.capture(target, plan, timeout_s)
    packer, folder = Packer(), Path(plan.out)
    packer.pack(
        [PackTask(each.trace, file_names.build_trace_path(folder, each.rank)) for each in captured]
    )
    write_run_json(folder, _build_spec(plan, captured))
    if not packer.wait(timeout_s):
        raise CollectError(f"{folder}: files are still being packed; wait before analyzing it")
    return describe_recorded(len(captured), folder)


def _build_spec(plan: RecordPlan, captured: tuple[kineto_daemon.CapturedTrace, ...]) -> RunSpec:
    """The RunSpec from the environments of the processes: their traces have no rank."""
    places = {one.pid: read_identity(processes.read_environment(one.pid)) for one in captured}
    sizes = [place.world_size for place in places.values()]
    host = Path("/proc/sys/kernel/hostname").read_text().strip()
    world_size = max(*sizes, len(captured), max(each.rank for each in captured) + 1)
    # The trace is there by now: a mesh that does not fit is said, not a reason to lose it.
    mesh = Mesh.parse(plan.mesh) if plan.mesh else None
    if mesh is not None and mesh.world_size != world_size:
        say(f"--mesh has {mesh.world_size} ranks but the job has {world_size}: it is ignored")
        mesh = None
    return RunSpec(
        name=plan.name,
        world_size=world_size,
        backend="",
        mesh=mesh,
        ranks=tuple(RankInfo(e.rank, places[e.pid].local_rank, host, e.pid, "") for e in captured),
    )


# One recording of a job at a time.


@contextmanager
def _take_turn(rank: messages.Status, deadline: float) -> Iterator[None]:
    """Waits for other attaches of this host to the rank's job: each must win all ranks, or none."""
    name = f"attach-{hashlib.sha256(rank.job.encode()).hexdigest()[:16]}.lock"
    # Other attaches find the folder of the agent too, and may have another one of their own.
    folder = next((path.parent for path in sockets.find_files(rank.pid)), None)
    path = (folder or sockets.make_socket_folder()) / name
    with open(path, "ab", opener=open_private) as lock:
        said = False
        while not try_lock(lock):
            if not said:
                say("another attach records this job: waiting for its end")
            said = True
            if time.monotonic() > deadline:
                raise CollectError("another attach still records this job; raise --timeout")
            time.sleep(_POLL_S)
        yield


def _wait_until_free(target: int | None, deadline: float, watch: StopWatch) -> None:
    """Waits for the end of a recording in progress, such as that of `record` itself."""
    said, ranks = False, find_job_ranks(target)
    while any(rank.busy for rank in ranks):
        watch.check(ranks)
        if not said:
            say("the job is already being recorded: waiting for the end of that recording")
        said = True
        if time.monotonic() > deadline:
            raise CollectError("the job is still being recorded; raise --timeout")
        time.sleep(_POLL_S)
        ranks = find_job_ranks(target)


# Requests that all ranks of a running job record the same steps.

# What a rank may take to answer: the steps that pass meanwhile are added to the plan's first one.
_REACT_S = 0.5

# Looked at often enough to seem at once, reported seldom enough to fit a log; the first step of a
# large job loads and compiles, which takes minutes.
_POLL_S, _TELL_S, _SECOND_STEP_S = 0.2, 5.0, 300.0


@dataclass(frozen=True, slots=True)
class AttachedJob:
    """The agreed plan, the ranks that were asked, and a message per rank that refused."""

    plan: RecordPlan
    ranks: tuple[messages.Status, ...]
    refused: tuple[str, ...]

    @property
    def recorded(self) -> tuple[int, ...]:
        """The ranks that are recorded: those that the plan lists, or all."""
        ranks = tuple(rank.rank for rank in self.ranks)
        if self.plan.ranks in ("all", "auto"):
            return ranks
        listed = parse_ranks(self.plan.ranks)
        return tuple(rank for rank in ranks if rank in listed)

    @property
    def first(self) -> int:
        """The first recorded step."""
        return self.plan.first or 0


def attach(target: int | None, plan: RecordPlan, watch: StopWatch | None = None) -> AttachedJob:
    """Asks the ranks of the job to record, beginning at the next step that all can reach.

    target: a rank of the job or a process that started it; None if there is only one job. Ranks on
    other hosts are notified through the job's store. Raises CollectError if no rank accepts, or if
    `watch` finds that the steps have stopped.
    """
    watch = watch or StopWatch()
    ranks = _wait_for_two_steps(target, watch)
    watch.check(ranks)
    steps_done = max(rank.steps for rank in ranks)
    # Ranks of other hosts hear of the plan when one of them polls the store.
    wait_s = _REACT_S + (
        2 * messages.POLL_S if ranks[0].local_world_size < ranks[0].world_size else 0
    )
    # Use the fastest step of all ranks: recent steps may have been slow.
    ahead = int(wait_s * 1e9 / min(rank.step_ns for rank in ranks))
    first = steps_done + plan.warmup + ahead + 2 * messages.MARGIN_STEPS
    agreed = replace(plan, first=first)
    answers = [(rank, messages.ask_record(rank.pid, agreed)) for rank in ranks]
    refused = tuple(
        _format_refusal(rank, answer) for rank, answer in answers if not _is_accepted(answer)
    )
    if len(refused) == len(ranks):
        raise CollectError(f"no rank accepted the request: {refused[0]}")
    return AttachedJob(agreed, ranks, refused)


def wait_for_steps(
    attached: AttachedJob,
    timeout_s: float,
    report: Callable[[str], None],
    watch: StopWatch | None = None,
) -> bool:
    """Waits for the last recorded step of all ranks; False on timeout. `report` gets progress."""
    watch = watch or StopWatch()
    start_s, last = time.monotonic(), attached.first + attached.plan.steps
    waiting, report_at = {rank.pid for rank in attached.ranks}, start_s + _TELL_S
    while waiting and (now := time.monotonic()) < start_s + timeout_s:
        # A rank that does not answer has ended: its files say what it has recorded.
        statuses = [messages.ask_status(pid) for pid in sorted(waiting)]
        waiting = {one.pid for one in statuses if one is not None and one.steps < last}
        watch.check([one for one in statuses if one is not None and one.steps < last])
        if waiting and now >= report_at:
            steps_done = min(one.steps for one in statuses if one is not None)
            before = max(one.steps_before for one in attached.ranks)
            report(f"{before + steps_done} of {before + last} steps have ended")
            report_at = now + _TELL_S
        time.sleep(_POLL_S)
    return not waiting


def wait_until_written(attached: AttachedJob, timeout_s: float) -> bool:
    """Waits until the files of all asked ranks are packed; False if one is missing: on timeout, or
    where all ranks have ended without files to pack.

    A raw file that could not be packed in time has its own name, and is not missing.
    """
    folder, deadline = Path(attached.plan.out), time.monotonic() + timeout_s
    ranks = [rank.rank for rank in attached.ranks]
    while time.monotonic() < deadline:
        ended = not any(map(_is_running, attached.ranks))
        flights = folder.glob("rank*_flight.json")
        if all(_is_packed(folder, rank) for rank in ranks) and not any(flights):
            return True
        if ended and not any(folder.glob("rank*")):
            return False
        time.sleep(_POLL_S)
    return all(_is_packed(folder, rank, or_raw=True) for rank in ranks)


def _is_running(rank: messages.Status) -> bool:
    return processes.is_process_alive(rank.pid)


def _is_packed(folder: Path, rank: int, or_raw: bool = False) -> bool:
    """Whether the rank's record is there and its trace, if it has one, is packed (or kept raw)."""
    try:
        record = rank_record.read_record(file_names.build_record_path(folder, rank).read_bytes())
    except (OSError, ValueError):
        return False
    trace = file_names.build_trace_path(folder, rank)
    kept = or_raw and name_raw(trace).exists()
    return record.detail == "none" or trace.exists() or kept


def _wait_for_two_steps(target: int | None, watch: StopWatch) -> tuple[messages.Status, ...]:
    """The ranks, once each has ended two steps, so that its step time is known."""
    deadline, ranks = time.monotonic() + _SECOND_STEP_S, find_job_ranks(target)
    while not all(rank.step_ns for rank in ranks):
        if time.monotonic() > deadline:
            raise CollectError(f"no second step in {_SECOND_STEP_S:.0f} s; is the job running?")
        watch.check(ranks)
        time.sleep(_POLL_S)
        ranks = find_job_ranks(target)
    return ranks


def _is_accepted(answer: messages.AgentAnswer | None) -> bool:
    return answer is not None and answer.accepted


def _format_refusal(rank: messages.Status, answer: messages.AgentAnswer | None) -> str:
    return f"rank {rank.rank}: {'it does not answer' if answer is None else answer.why}"


def choose_out(target: int | None) -> Path:
    """An output folder that does not exist yet."""
    number = 1
    while (folder := Path(f"runs/attach-{target or 'job'}-{number}")).exists():
        number += 1
    return folder.absolute()


# Watches a running job for as long as it runs.


def start_watch(target: int | None, plan: WatchPlan) -> tuple[messages.Status, ...]:
    """Has the ranks of a running job on this host watched, beginning with their next steps.

    target: as in attach. Returns the ranks that are watched. Raises CollectError if none is.
    """
    if target is not None and not _has_agent(target):
        inject_into_ranks(target, RecordPlan(plan.out, plan.name, first=None))
    make_folder(Path(plan.out))
    # By the notes in the folder, which an earlier watch of the job may have left.
    numbered = replace(plan, incarnation=count_incarnations(Path(plan.out)))
    ranks = find_job_ranks(target, or_else="")
    answers = [(rank, messages.ask_watch(rank.pid, numbered)) for rank in ranks]
    refused = [_format_refusal(*each) for each in answers if not _is_accepted(each[1])]
    watched = tuple(rank for rank, answer in answers if _is_accepted(answer))
    if not watched:
        raise CollectError(f"no rank accepted the request: {refused[0]}")
    for refusal in refused:
        say(f"refused: {refusal}")
    return watched


def wait_until_over(ranks: Sequence[messages.Status]) -> None:
    """Waits until the processes of the ranks have ended; Ctrl-C ends their watch instead."""
    try:
        while any(processes.is_process_alive(rank.pid) for rank in ranks):
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        for rank in ranks:
            messages.ask_watch(rank.pid, None)
        say("the job goes on without its watch")
