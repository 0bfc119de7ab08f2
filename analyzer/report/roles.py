"""A job of several roles on one clock, also the fields of its JSON (schema "stepsplit.roles/1")."""

from __future__ import annotations

import shlex

import msgspec
from msgspec import Struct

from stepsplit.analyzer import units
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.report.headline import round_shares
from stepsplit.analyzer.report.io import Document
from stepsplit.analyzer.report.rl_step import (
    LongTail,
    PhaseRow,
    PhaseStepRow,
    RoleTime,
    TailRow,
    name_phase,
)
from stepsplit.collectors.formats.run_spec import is_role

SCHEMA = "stepsplit.roles/1"

ROLES_NAME = "roles.json"


class RoleStepRow(Struct, frozen=True):
    """Where the time of one rank went in one RL step.

    Attributes:
        role: Its role.
        rank: Its number in the process group of its program.
        step: The number of the RL step.
        time: The parts of the step.
    """

    role: str
    rank: int
    step: int
    time: RoleTime


class RoleWaitRow(Struct, frozen=True):
    """Time for which ranks of a role waited, in communication, for those of another one.

    Attributes:
        role: Who waits.
        owner: Whom it waits for: the role of the rank that came last.
        wait_ns: In the mean of its ranks and the RL steps.
    """

    role: str
    owner: str
    wait_ns: int


class HeldRow(Struct, frozen=True):
    """Time in which one rank holds up the job: all other ranks of its process group wait.

    Attributes:
        role: Its role.
        rank: Its number.
        held_ns: In the mean of the RL steps.
        mark: The range (record_function) in which it is for most of that; "" without one.
        tail_ns: Part of it in which it decodes for its last sequences.
    """

    role: str
    rank: int
    held_ns: int
    mark: str
    tail_ns: int = 0


class RoleRow(Struct, frozen=True):
    """One role.

    Attributes:
        name: Its name.
        ranks: Its recorded ranks.
        world_size: The ranks in the process group of its program.
        program: The number of its program, from 0; roles of one process group have the same.
        place: Its folder.
        archive: The archive that place is in; "" if it is in none.
        time: The mean of its ranks and the RL steps.
        rank_times: The mean of the RL steps for each of its ranks.
        finding: The first finding in its own report; "" without one.
    """

    name: str
    ranks: tuple[int, ...]
    world_size: int
    program: int
    place: str
    time: RoleTime
    rank_times: tuple[RoleTime, ...]
    finding: str = ""
    archive: str = ""

    @property
    def command(self) -> str:
        """What shows the role by itself: an archive is analyzed as a whole only."""
        if not self.archive:
            return f"stepsplit analyze {shlex.quote(self.place)}"
        inner = shlex.quote(self.place.removeprefix(f"{self.archive}/"))
        return f"unpack {shlex.quote(self.archive)}, then stepsplit analyze {inner}"


class RlStepRow(Struct, frozen=True):
    """One RL step.

    Attributes:
        step: Its number, that of the role which defines the steps.
        start_ns: Since the start of the first one.
        step_ns: Its duration.
        is_counted: Whether it is in the means: all ranks are recorded in nearly all of it.
    """

    step: int
    start_ns: int
    step_ns: int
    is_counted: bool


class PhaseSpan(Struct, frozen=True):
    """A phase or mark of a rank in one RL step, for a picture.

    Attributes:
        role: Its role.
        rank: Its number.
        step: The number of the RL step.
        phase: As in PhaseRow.
        start_ns: Since the start of the first RL step.
        end_ns: The same.
    """

    role: str
    rank: int
    step: int
    phase: str
    start_ns: int
    end_ns: int


class PathLink(Struct, frozen=True):
    """A link of the critical path of an RL step: one role in one phase.

    Attributes:
        step: The number of the RL step.
        role: The role.
        rank: The rank of it that most of the link is of.
        phase: As in PhaseRow.
        start_ns: Since the start of the first RL step; the link before it ends there.
        time: What its ranks do in it; the links of a step add up to it.
        meanwhile: Of a link in which the rank runs nothing: what a rank of another program does
            for most of it, such as "rollout/1: generation"; "" if none, or if it does something.
    """

    step: int
    role: str
    rank: int
    phase: str
    start_ns: int
    time: RoleTime
    meanwhile: str = ""


class PathRow(Struct, frozen=True):
    """The time of a role in one phase on the critical path, in the mean of the RL steps.

    Attributes:
        role: The role.
        rank: The rank of it that most of the time is of.
        phase: As in PhaseRow.
        time: The parts; all rows add up to the RL step.
    """

    role: str
    rank: int
    phase: str
    time: RoleTime


class RoleJob(Struct, frozen=True, kw_only=True):
    """A job of several roles: for each, where the time of the RL steps went.

    Attributes:
        schema: "stepsplit.roles/1".
        run: The name of the run.
        t0_unix_ns: The start of the first RL step, as text.
        step_role: The role whose steps are the RL steps.
        steps: The RL steps.
        roles: The roles, by name.
        rows: Each rank in each RL step.
        waits: Which role waited for which, the longest first.
        held: Which rank held up all others, the longest first.
        lacks: What is not known, one sentence each.
        phases: The time of each role by phase; empty if no rank marks one that only RL has.
        phase_rows: Each rank in each RL step by phase.
        tails: The long tail of generation of each role that says how many sequences it decodes.
        tail_rows: Each generation of these.
        path: The critical path in the mean of the RL steps, the longest first.
        path_links: The critical path of each RL step, in order of time.
        spans: The phases of each rank on the common clock, without the shortest.
    """

    schema: str = SCHEMA
    run: str
    t0_unix_ns: str
    step_role: str
    steps: tuple[RlStepRow, ...]
    roles: tuple[RoleRow, ...]
    rows: tuple[RoleStepRow, ...]
    waits: tuple[RoleWaitRow, ...]
    held: tuple[HeldRow, ...] = ()
    lacks: tuple[str, ...] = ()
    phases: tuple[PhaseRow, ...] = ()
    phase_rows: tuple[PhaseStepRow, ...] = ()
    tails: tuple[LongTail, ...] = ()
    tail_rows: tuple[TailRow, ...] = ()
    path: tuple[PathRow, ...] = ()
    path_links: tuple[PathLink, ...] = ()
    spans: tuple[PhaseSpan, ...] = ()

    @property
    def step_ns(self) -> int:
        """The mean of the counted RL steps."""
        counted = [one.step_ns for one in self.steps if one.is_counted]
        return sum(counted) // (len(counted) or 1)

    @property
    def first_line(self) -> str:
        """What to look at first, in one line."""
        if self.held:
            return f"all others wait for {self.describe_held(self.held[0])}"
        step = units.format_milliseconds(self.step_ns)
        if not self.path:
            return f"RL step {step} (mean)"
        most = self.path[0]
        share = units.format_percent(round_shares([row.time.window_ns for row in self.path])[0])
        where = f"{most.role}/{most.rank}, {name_phase(most.phase)}"
        return f"RL step {step} (mean); longest on its critical path: {where} ({share})"

    def describe_held(self, held: HeldRow) -> str:
        """Which rank holds up all others, for how long, and what it does meanwhile."""
        return f"{held.role}/{held.rank}: {self.describe_held_time(held)}"

    def describe_held_time(self, held: HeldRow) -> str:
        """For how long a rank holds up all others, and what it does meanwhile."""
        time = units.format_milliseconds(held.held_ns)
        share = units.format_percent(held.held_ns / self.step_ns)
        line = f"{time} ({share} of the step)"
        if held.mark:
            line += f", mostly in {held.mark}"
        if held.tail_ns:
            line += f"; {units.format_milliseconds(held.tail_ns)} of it for its last sequences"
        return line


def roles_from_json(text: bytes, source: object = ROLES_NAME) -> RoleJob:
    """Decode roles.json. Raises DataError if the text does not have this schema, or is of no job:
    without a role or a counted RL step, or with two roles of one name."""
    hint = "analyze it again"
    job = Document(RoleJob, SCHEMA, "a stepsplit job of several roles", hint).decode(text, source)
    names = [role.name for role in job.roles]
    wrong = ""
    if not names or any(not role.ranks for role in job.roles):
        wrong = "has no role, or one without ranks"
    elif len({*names}) < len(names) or not all(map(is_role, names)):
        wrong = "has a role twice, or one whose name is none of a role"
    elif any(len(role.rank_times) != len(role.ranks) for role in job.roles):
        wrong = "does not have a time for each rank"
    elif job.step_ns < 1:
        wrong = "has no counted RL step"
    if wrong:
        raise DataError(source, wrong, hint)
    return job


def roles_to_json(job: RoleJob) -> bytes:
    """The job as JSON text."""
    return msgspec.json.format(msgspec.json.encode(job), indent=1) + b"\n"
