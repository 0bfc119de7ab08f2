"""The terminal screen of a job of several roles: what each did in the RL steps, on one clock."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from stepsplit.analyzer import units
from stepsplit.analyzer.report.headline import round_shares
from stepsplit.analyzer.report.rl_step import RoleTime, name_phase
from stepsplit.analyzer.report.roles import RoleJob
from stepsplit.dashboard.reporters.console import Text
from stepsplit.dashboard.reporters.rl_step import build_phases_table, build_tail_lines

_MOST_RANKS = 16
"""Ranks with a line of their own; of a larger job only the roles have one."""

_MOST_WAITS = 5


def build_roles_screen(job: RoleJob) -> RenderableType:
    """The whole screen, for a console of 80 columns or more."""
    counted = [one for one in job.steps if one.is_counted]
    n_ranks = sum(len(role.ranks) for role in job.roles)
    known = (
        f"run {job.run}",
        f"{len(job.roles)} roles",
        f"{n_ranks} rank{'s' * (n_ranks > 1)}",
        f"{len(counted)} RL step{'s' * (len(counted) > 1)} (of {job.step_role})",
    )
    parts: list[RenderableType] = [Text("   ".join(known), style="bold")]
    parts += [Text(f"not known: {lack}", style="bold yellow") for lack in job.lacks]
    parts += [
        Text(f"RL step {units.format_milliseconds(job.step_ns)} (mean)", style="bold"),
        Text(),
        _build_times(job, n_ranks <= _MOST_RANKS),
    ]
    if job.held:
        parts += [Text(), Text("WHO HOLDS UP ALL OTHERS, per RL step (they wait in communication)")]
        parts += [Text(job.describe_held(held)) for held in job.held[:_MOST_WAITS]]
    if job.waits:
        parts += [Text(), Text("WAITS BETWEEN ROLES, per RL step (in communication)")]
        parts += [
            Text(
                f"{row.role} waits for {row.owner}: {units.format_milliseconds(row.wait_ns)}"
                f" ({units.format_percent(row.wait_ns / job.step_ns)} of the step)"
            )
            for row in job.waits[:_MOST_WAITS]
        ]
    if job.path:
        title = "CRITICAL PATH ACROSS ROLES, per RL step (a step is as long as all of it)"
        parts += [Text(), Text(title), _build_path(job)]
    if job.phases:
        parts += [Text(), Text("PHASES OF THE RL STEP"), build_phases_table(job.phases)]
    parts += build_tail_lines(job.tails, job.tail_rows, job.step_ns)
    parts += [Text(), Text("EACH ROLE")]
    for role in job.roles:
        parts.append(Text(f"{role.name}: {role.finding or 'no bottleneck found'}"))
        parts.append(Text(f"  {role.command}"))
    return Group(*parts)


def _build_times(job: RoleJob, has_ranks: bool) -> Table:
    """A line for each role, and below it for each of its ranks, in shares of the RL step."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column("")
    for name in ("compute", "transfer", "copy", "waits", "idle", "not recorded"):
        table.add_column(name, justify="right", no_wrap=True)
    for role in job.roles:
        table.add_row(Text(role.name, style="bold"), *_format_shares(role.time))
        for rank, time in zip(role.ranks, role.rank_times, strict=True) if has_ranks else ():
            table.add_row(Text(f"  {role.name}/{rank}"), *_format_shares(time))
    return table


_LEAST = 0.001
"""Of the RL step: shorter parts of the path are one line."""


def _build_path(job: RoleJob) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column("")
    for name in ("time", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("mostly on")
    long = [row for row in job.path if row.time.window_ns >= _LEAST * job.step_ns]
    shares = round_shares([row.time.window_ns for row in job.path])
    for row, share in zip(long, shares, strict=False):
        table.add_row(
            Text(f"{row.role}, {name_phase(row.phase)}"),
            units.format_milliseconds(row.time.window_ns),
            units.format_percent(share),
            Text(f"{row.role}/{row.rank}"),
        )
    if rest := job.path[len(long) :]:
        rest_ns = sum(row.time.window_ns for row in rest)
        rest_share = sum(shares[len(long) :])
        table.add_row(
            f"{len(rest)} shorter", units.format_milliseconds(rest_ns),
            units.format_percent(rest_share),
        )  # fmt: skip
    return table


def _format_shares(time: RoleTime) -> list[str]:
    """The shares of the window as on all screens: rounded, they add up to 100 %."""
    parts = (time.compute_ns, time.transfer_ns, time.copy_ns, time.wait_ns, time.idle_ns,
             time.unrecorded_ns)  # fmt: skip
    return [units.format_percent(share) for share in round_shares(parts)]
