"""Records, watches or observes a running job by its agents, Kineto's protocol or PEP 768."""

from __future__ import annotations

import hashlib
import math
import re
import socket
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from stepsplit.collectors import rank_record
from stepsplit.collectors.attach import kineto_daemon, processes, protocol
from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.launcher import read_identity, read_job_name
from stepsplit.collectors.nccl import ask_ras
from stepsplit.collectors.pack import name_raw, try_lock
from stepsplit.collectors.private_folder import open_private
from stepsplit.collectors.rank_files import Packer, PackTask
from stepsplit.collectors.record import (
    PLAN_VARIABLE,
    SITE,
    RecordPlan,
    describe_recorded,
    make_folder,
    parse_ranks,
)
from stepsplit.collectors.run_spec import (
    Mesh,
    RankInfo,
    RunSpec,
    make_owner_folder,
    write_run_json,
    write_whole,
)
from stepsplit.collectors.safe_text import escape_controls
from stepsplit.collectors.watch_notes import count_incarnations
from stepsplit.collectors.watch_plan import WatchPlan

# Attaches through the job's agents, Kineto's protocol, or PEP 768, whichever works.


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
    return _record_by_agents(target, plan, timeout_s, watch)


def _has_agent(target: int) -> bool:
    return any(
        pid in protocol.list_agents() and protocol.ask_status(pid) is not None
        for pid in processes.list_process_tree(target)
    )


def _record_by_agents(
    target: int | None, plan: RecordPlan, timeout_s: float, watch: StopWatch
) -> str:
    deadline = time.monotonic() + timeout_s
    with _take_turn(_wait_for_two_steps(target, watch)[0], deadline):
        _wait_until_free(target, deadline, watch)
        return _record_next_steps(target, plan, timeout_s, watch)


def _record_next_steps(
    target: int | None, plan: RecordPlan, timeout_s: float, watch: StopWatch
) -> str:
    agreed = attach(target, plan, watch)
    last = agreed.first + plan.steps - 1
    here, all_ranks = len(agreed.ranks), agreed.ranks[0].world_size
    elsewhere = f"; {all_ranks - here} ranks on other hosts notified" if all_ranks > here else ""
    before = max(rank.steps_before for rank in agreed.ranks)
    _say(
        f"ranks {', '.join(map(str, agreed.recorded))} record steps {before + agreed.first} to"
        f" {before + last}{elsewhere}"
    )
    for refusal in agreed.refused:
        _say(f"refused: {refusal}")
    if not wait_for_steps(agreed, timeout_s, _say, watch):
        raise CollectError(f"step {last} was not reached in {timeout_s:.0f} s; raise --timeout")
    if not wait_until_written(agreed, timeout_s):
        if not any(map(_is_running, agreed.ranks)):
            raise CollectError(f"the job ended before step {before + last}, and was not recorded")
        raise CollectError(f"{plan.out}: some files are missing; was a rank lost?")
    return describe_recorded(len(agreed.recorded), Path(plan.out))


def _record_by_kineto(target: int, plan: RecordPlan, timeout_s: float) -> str:
    _say("no agent found; requesting a trace through Kineto's daemon protocol")
    captured = kineto_daemon.capture(target, plan, timeout_s)
    packer, folder = Packer(), Path(plan.out)
    packer.pack(
        [PackTask(each.trace, rank_record.build_trace_path(folder, each.rank)) for each in captured]
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
    return RunSpec(
        name=plan.name,
        world_size=world_size,
        backend="",
        mesh=_check_mesh(plan.mesh, world_size),
        ranks=tuple(RankInfo(e.rank, places[e.pid].local_rank, host, e.pid, "") for e in captured),
    )


def _check_mesh(text: str, world_size: int) -> Mesh | None:
    """The mesh that the user states; None, with a message, if it does not match the job."""
    mesh = Mesh.parse(text) if text else None
    if mesh is None or mesh.world_size == world_size:
        return mesh
    _say(f"--mesh has {mesh.world_size} ranks but the job has {world_size}: it is ignored")
    return None


def _say(text: str) -> None:
    sys.stderr.write(f"{escape_controls(text)}\n")


# One recording of a job at a time.


@contextmanager
def _take_turn(rank: protocol.Status, deadline: float) -> Iterator[None]:
    """Waits for other attaches of this host to the rank's job: each must win all ranks, or none."""
    name = f"attach-{hashlib.sha256(rank.job.encode()).hexdigest()[:16]}.lock"
    # Other attaches find the folder of the agent too, and may have another one of their own.
    folder = next((path.parent for path in protocol.find_files(rank.pid)), None)
    path = (folder or protocol.make_socket_folder()) / name
    with open(path, "ab", opener=open_private) as lock:
        said = False
        while not try_lock(lock):
            if not said:
                _say("another attach records this job: waiting for its end")
            said = True
            if time.monotonic() > deadline:
                raise CollectError("another attach still records this job; raise --timeout")
            time.sleep(_POLL_S)
        yield


def _wait_until_free(target: int | None, deadline: float, watch: StopWatch) -> None:
    """Waits for the end of a recording in progress, such as that of `record` itself."""
    said, ranks = False, _find_job_ranks(target)
    while any(rank.busy for rank in ranks):
        watch.check(ranks)
        if not said:
            _say("the job is already being recorded: waiting for the end of that recording")
        said = True
        if time.monotonic() > deadline:
            raise CollectError("the job is still being recorded; raise --timeout")
        time.sleep(_POLL_S)
        ranks = _find_job_ranks(target)


# Requests that all ranks of a running job record the same steps.

_REACT_S = 0.5

_POLL_S, _TELL_S, _SECOND_STEP_S = 0.2, 5.0, 300.0


@dataclass(frozen=True, slots=True)
class AttachedJob:
    """The agreed plan, the ranks that were asked, and a message per rank that refused."""

    plan: RecordPlan
    ranks: tuple[protocol.Status, ...]
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


ExplainStop: TypeAlias = Callable[[int], str | None]

STOPPED_S = 5.0
"""Steps that have stopped for less are not looked into."""

UNKNOWN_STEP_S = 60.0
"""As long as that a first step may take, which compiles and allocates."""

_LOOK_AGAIN_S = 20.0


class StopWatch:
    """Notices that the steps of a job have stopped.

    explain: says why, given the process of a rank; None if the job is not stuck after all, such as
    in an evaluation. Without it, the user is pointed to `stepsplit hang` once.
    """

    def __init__(self, explain: ExplainStop | None = None) -> None:
        self._explain, self._look_at_s = explain, 0.0

    def check(self, ranks: Sequence[protocol.Status]) -> None:
        """Raises CollectError with the reason if the steps of the ranks have stopped for good."""
        stopped_s = min((rank.since_step_ns for rank in ranks), default=0) / 1e9
        usual_s = max((rank.longest_step_ns for rank in ranks), default=0) / 1e9
        limit_s = max(STOPPED_S, rank_record.USUAL_STEPS * usual_s) if usual_s else UNKNOWN_STEP_S
        if stopped_s < limit_s or time.monotonic() < self._look_at_s:
            return
        self._look_at_s = time.monotonic() + _LOOK_AGAIN_S
        what, pid = f"no step has ended for {stopped_s:.0f} s", ranks[0].pid
        if self._explain is None:
            self._look_at_s = math.inf
            _say(f"{what}; where the job hangs: stepsplit hang {pid}")
        elif (why := self._explain(pid)) is not None:
            raise CollectError(f"{what}: {why}; see stepsplit hang {pid}")


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
    wait_s = _REACT_S + (
        2 * protocol.POLL_S if ranks[0].local_world_size < ranks[0].world_size else 0
    )
    # Use the fastest step of all ranks: recent steps may have been slow.
    ahead = int(wait_s * 1e9 / min(rank.step_ns for rank in ranks))
    first = steps_done + plan.warmup + ahead + 2 * protocol.MARGIN_STEPS
    agreed = replace(plan, first=first)
    answers = [(rank, protocol.ask_record(rank.pid, agreed)) for rank in ranks]
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
        statuses = [protocol.ask_status(pid) for pid in sorted(waiting)]
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


def _is_running(rank: protocol.Status) -> bool:
    return processes.is_process_alive(rank.pid)


def _is_packed(folder: Path, rank: int, or_raw: bool = False) -> bool:
    """Whether the rank's record is there and its trace, if it has one, is packed (or kept raw)."""
    try:
        record = rank_record.read_record(rank_record.build_record_path(folder, rank).read_bytes())
    except (OSError, ValueError):
        return False
    trace = rank_record.build_trace_path(folder, rank)
    kept = or_raw and name_raw(trace).exists()
    return record.detail == "none" or trace.exists() or kept


_OR_DAEMON = ", or with KINETO_USE_DAEMON=1"


def _wait_for_two_steps(target: int | None, watch: StopWatch) -> tuple[protocol.Status, ...]:
    """The ranks, once each has ended two steps, so that its step time is known."""
    deadline, ranks = time.monotonic() + _SECOND_STEP_S, _find_job_ranks(target)
    while not all(rank.step_ns for rank in ranks):
        if time.monotonic() > deadline:
            raise CollectError(f"no second step in {_SECOND_STEP_S:.0f} s; is the job running?")
        watch.check(ranks)
        time.sleep(_POLL_S)
        ranks = _find_job_ranks(target)
    return ranks


def _find_job_ranks(target: int | None, or_else: str = _OR_DAEMON) -> tuple[protocol.Status, ...]:
    """The ranks of the job. or_else: what the error says beside a start on standby."""
    jobs: defaultdict[str, list[protocol.Status]] = defaultdict(list)
    for pid in protocol.list_agents():
        status = protocol.ask_status(pid)
        if status is not None:
            jobs[status.job].append(status)
    if target is not None:
        matching = [
            job for job in jobs.values() if any(_is_of_process(rank, target) for rank in job)
        ]
    else:
        matching = list(jobs.values())
    if len(matching) != 1:
        raise CollectError(_explain_job_choice(matching, target, or_else))
    return tuple(sorted(matching[0], key=lambda rank: rank.rank))


def _is_of_process(rank: protocol.Status, target: int) -> bool:
    return target in (rank.pid, *processes.list_ancestors(rank.pid))


def _list_choices(pids: Sequence[int], what: str) -> str:
    """That there are several jobs, with a process of each."""
    named = ", ".join(f"{pid} ({processes.read_command_line(pid)})" for pid in pids)
    return f"{len(pids)} jobs {what} on this host; choose a process of one: {named}"


def _explain_job_choice(
    jobs: Sequence[Sequence[protocol.Status]], target: int | None, or_else: str
) -> str:
    if jobs:
        return _list_choices([job[0].pid for job in jobs], "are on standby")
    what = "no job" if target is None else f"no rank of process {target}"
    return (
        f"{what} on this host is on standby, or no step has ended yet; start the job with"
        f" stepsplit record --standby -- ...{or_else}"
    )


def _is_accepted(answer: protocol.AgentAnswer | None) -> bool:
    return answer is not None and answer.accepted


def _format_refusal(rank: protocol.Status, answer: protocol.AgentAnswer | None) -> str:
    return f"rank {rank.rank}: {'it does not answer' if answer is None else answer.why}"


def choose_out(target: int | None) -> Path:
    """An output folder that does not exist yet."""
    number = 1
    while (folder := Path(f"runs/attach-{target or 'job'}-{number}")).exists():
        number += 1
    return folder.absolute()


# Watches a running job for as long as it runs.


def start_watch(target: int | None, plan: WatchPlan) -> tuple[protocol.Status, ...]:
    """Has the ranks of a running job on this host watched, beginning with their next steps.

    target: as in attach. Returns the ranks that are watched. Raises CollectError if none is.
    """
    if target is not None and not _has_agent(target):
        inject_into_ranks(target, RecordPlan(plan.out, plan.name, first=None))
    make_folder(Path(plan.out))
    numbered = replace(plan, incarnation=count_incarnations(Path(plan.out)))
    ranks = _find_job_ranks(target, or_else="")
    answers = [(rank, protocol.ask_watch(rank.pid, numbered)) for rank in ranks]
    refused = [_format_refusal(*each) for each in answers if not _is_accepted(each[1])]
    watched = tuple(rank for rank, answer in answers if _is_accepted(answer))
    if not watched:
        raise CollectError(f"no rank accepted the request: {refused[0]}")
    for refusal in refused:
        _say(f"refused: {refusal}")
    return watched


def wait_until_over(ranks: Sequence[protocol.Status]) -> None:
    """Waits until the processes of the ranks have ended; Ctrl-C ends their watch instead."""
    try:
        while any(processes.is_process_alive(rank.pid) for rank in ranks):
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        for rank in ranks:
            protocol.ask_watch(rank.pid, None)
        _say("the job goes on without its watch")


# Starts the agent in an unprepared process; needs Python 3.14 or later on both sides.

_AGENT_TIMEOUT_S = 30.0

_SCRIPT = """\
import os, runpy
os.environ[{name!r}] = {plan!r}
runpy.run_path({site!r})
"""


def inject_into_ranks(target: int, plan: RecordPlan) -> None:
    """Starts the agent in the process and in the ranks that it started. Raises CollectError."""
    for pid in processes.list_process_tree(target):
        if processes.read_environment(pid).get("RANK") is not None or pid == target:
            inject(pid, plan)


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
    # The process runs whatever is at this path by then.
    folder = protocol.make_socket_folder()
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False, dir=folder) as file:
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
    while protocol.ask_status(pid) is None:
        if time.monotonic() > deadline:
            raise CollectError(f"process {pid} did not end a step in {_AGENT_TIMEOUT_S:.0f} s")
        time.sleep(0.2)


# Observes a running job whose steps may have stopped: looks at every rank of this host.

LOOK_INTERVAL_S = 1.5

MAX_LOOKS = 5


def observe_job(target: int | None, out: Path) -> tuple[rank_record.RankState, ...]:
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
    pids = _find_ranks(target)
    looks = [_look_at_all(pids)]
    while len(looks) < 2 or (len(looks) < MAX_LOOKS and not _is_decided(looks)):
        time.sleep(LOOK_INTERVAL_S)
        looks.append(_look_at_all(pids))
    stopped = not _has_progress(*looks[-2:])
    answers = _look_at_all(pids, flight=True) if stopped else looks[-1]
    states = [_join_looks(pid, answer, looks[-2]) for pid, answer in answers.items()]
    states = _add_ended(states)
    try:
        make_owner_folder(out)
        for state in states:
            rank_record.write_state(out, state)
        _write_dumps(out, answers)
        if stopped:
            _write_ras(out, pids)
    except OSError as error:
        raise CollectError(f"{out}: {error.strerror}; choose another --out") from None
    return tuple(states)


_Answers = Mapping[int, protocol.LookAnswer | None]


def _look_at_all(
    pids: Sequence[int], flight: bool = False
) -> dict[int, protocol.LookAnswer | None]:
    def look(pid: int) -> protocol.LookAnswer | None:
        return None if processes.is_process_stopped(pid) else protocol.ask_look(pid, flight)

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
        return len(looks) > 2
    states = [answer.state for answer in looks[-1].values() if answer is not None]
    usual_ns = max((state.step_ns for state in states), default=0)
    age_ns = min((state.looks[-1].since_step_ns for state in states), default=0)
    return age_ns > rank_record.USUAL_STEPS * usual_ns


def _read_progress(state: rank_record.RankState) -> tuple[int, int]:
    return state.looks[-1].steps, state.looks[-1].calls


def _join_looks(
    pid: int, answer: protocol.LookAnswer | None, earlier: _Answers
) -> rank_record.RankState:
    """The state of a rank with its looks in order, or what its process says without an agent."""
    if answer is None:
        return _describe_silent(pid)
    before = earlier[pid]
    if before is None:
        return answer.state
    return replace(answer.state, looks=(*before.state.looks, *answer.state.looks))


def _describe_silent(pid: int) -> rank_record.RankState:
    """The state of a rank that does not answer, by what it has left or else its environment."""
    condition = rank_record.SILENT if processes.is_process_alive(pid) else rank_record.ENDED
    condition = rank_record.STOPPED if processes.is_process_stopped(pid) else condition
    look = protocol.read_stack(pid) if condition == rank_record.SILENT else None
    looks = () if look is None else (look,)
    left = next((one for one in protocol.read_left_states() if one.pid == pid), None)
    if left is not None:
        return replace(left, condition=condition, looks=looks or left.looks)
    environment = processes.read_environment(pid)
    place, job = read_identity(environment), read_job_name(environment)
    return rank_record.RankState(
        place.rank, place.world_size, pid=pid, job=job, condition=condition, looks=looks
    )


def _add_ended(states: Sequence[rank_record.RankState]) -> list[rank_record.RankState]:
    """The states, and those of the ranks of this host whose processes have ended."""
    known = {state.rank: state for state in states}
    first = min(
        states, key=lambda state: state.condition in (rank_record.SILENT, rank_record.STOPPED)
    )
    for left in protocol.read_left_states():
        if left.job == first.job and left.rank < first.world_size:
            known.setdefault(left.rank, left)
    return [known[rank] for rank in sorted(known)]


def _write_dumps(out: Path, answers: _Answers) -> None:
    for answer in answers.values():
        if answer is not None and answer.flight:
            write_whole(out / f"rank{answer.state.rank}_flight.json", answer.flight.encode())


def _write_ras(out: Path, pids: Sequence[int]) -> None:
    """Writes what NCCL's RAS says of this job, if it answers; it may be that of another job."""
    said = ask_ras(processes.read_environment(pids[0]))
    named = {int(number) for number in _RAS_PROCESS.findall(said)}
    if named & set(pids):
        write_whole(out / rank_record.RAS_NAME, said.encode())


_RAS_PROCESS = re.compile(r'(?:"pid": *|\b[Pp]rocess )(\d+)')


def _find_ranks(target: int | None) -> list[int]:
    """The processes of the job's ranks on this host. Raises CollectError if it is not one job."""
    if target is not None and not processes.is_process_alive(target):
        raise CollectError(f"no process {target} on this host; name a rank or the launcher")
    jobs: dict[str, list[int]] = {}
    for pid in filter(processes.is_process_alive, protocol.list_agents()):
        jobs.setdefault(_name_job(pid), []).append(pid)
    if target is not None:
        jobs = {
            name: pids
            for name, pids in jobs.items()
            if any(target in (pid, *processes.list_ancestors(pid)) for pid in pids)
        }
    if len(jobs) != 1:
        raise CollectError(_explain_choice(list(jobs.values()), target))
    return next(iter(jobs.values()))


def _name_job(pid: int) -> str:
    """The name of the process's job, by what it has left or else by its agent."""
    left = next((one for one in protocol.read_left_states() if one.pid == pid), None)
    if left is not None:
        return left.job
    answer = protocol.ask_look(pid)
    return f"process {pid}" if answer is None else answer.state.job


def _explain_choice(jobs: Sequence[Sequence[int]], target: int | None) -> str:
    if jobs:
        return _list_choices([job[0] for job in jobs], "have an agent")
    what = "no job on this host" if target is None else f"no rank of process {target}"
    return (
        f"{what} has an agent; start the job with stepsplit record [--standby] -- ..., or name"
        " a folder with the Flight Recorder dumps of the ranks"
    )


def find_running_rank(spec: RunSpec) -> int | None:
    """The process of a recorded rank that still runs on this host; None if none does."""
    host, agents = socket.gethostname(), set(protocol.list_agents())
    for rank in spec.ranks:
        if rank.host == host and rank.pid in agents and processes.is_process_alive(rank.pid):
            answer = protocol.ask_look(rank.pid)
            if answer is not None and answer.state.rank == rank.rank:
                return rank.pid
    return None
