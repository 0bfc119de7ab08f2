"""stepsplit watch: samples a training for as long as it runs."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.commands.common import (
    FiniteRange,
    build_path_option,
    parse_mesh,
    print_line,
    require_package,
    token_option,
)
from stepsplit.dashboard.sinks.log_to import build_log_option, check_log_to

if TYPE_CHECKING:
    from stepsplit.collectors.watch.plan import WatchPlan
    from stepsplit.dashboard.watch_process import ReducerOptions

ONLY_JOB = 0
"""--attach without a process."""


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[OPTIONS] --",
)
@build_path_option(
    "--out",
    metavar="DIR",
    help="Folder of the watch, an earlier one to go on with it; by default the next runs/watch.",
)
@click.option("--name", metavar="NAME", help="Name of the run; by default that of the folder.")
@click.option(
    "--every",
    metavar="INTERVAL",
    default="10min",
    show_default=True,
    help="Shortest interval between samples, such as 500steps, 30s, 10min or 1h.",
)
@click.option(
    "--budget",
    type=FiniteRange(min=0.01, max=100),
    metavar="PERCENT",
    default=0.5,
    show_default=True,
    help="Part of the training time that samples may cost, else they get rarer.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Steps of a sample.",
)
@click.option(
    "--mesh",
    metavar="LAYOUT",
    help="Layout of the job, such as pp=2,dp=2,tp=2; then a sample is of one rank and its groups.",
)
@click.option(
    "--disk",
    type=FiniteRange(0.01, 1_000_000),
    metavar="GIB",
    default=4.0,
    show_default=True,
    help="Disk space for samples on each host; the oldest are dropped.",
)
@click.option("--to", "url", metavar="URL", help="Address of a dashboard to send numbers to.")
@build_log_option("Also log numbers to this tool, from the host of rank 0; may be repeated.")
@token_option
@click.option(
    "--upload-captures", is_flag=True,
    help="Upload the traces of samples after a change or on request to the dashboard.",
)  # fmt: skip
@click.option(
    "--attach", "target", type=int, is_flag=False, flag_value=ONLY_JOB, metavar="[PID]",
    help="Watch a running job instead of a command, by a process of it; else the only one here.",
)  # fmt: skip
@build_path_option(
    "--send",
    "ended",
    metavar="DIR",
    help="Send what a watch that has ended could not, from its folder, and nothing else.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def watch_command(
    context: click.Context, /, command: tuple[str, ...], ended: Path | None, **options: Any
) -> None:
    """Sample a training command or a running job for as long as it runs.

    It notes the step times of all ranks, and records a few steps now and then. A running job must
    have been started with `stepsplit record --standby` or `stepsplit watch`.
    """
    from stepsplit.collectors.attach.client import start_watch, wait_until_over
    from stepsplit.collectors.guard import CollectError
    from stepsplit.collectors.job.launcher import is_rank, read_identity
    from stepsplit.collectors.watch.command import run_watched
    from stepsplit.dashboard.watch_process import ReducerProcess
    from stepsplit.dashboard.watch_sender import send_rest

    request = WatchRequest(**options)
    if ended is not None:
        if command or request.target is not None:
            hint = "give no command or --attach"
            raise UsageError(f"--send sends what is left of an ended watch: {hint}")
        if request.url is None:
            raise UsageError("--send needs the address of a dashboard: --to URL")
        sent = send_rest(ended, request.url, request.token)
        print_line(f"{sent} batch{'' if sent == 1 else 'es'} sent to {request.url}", err=True)
        return
    if (request.target is None) == (not command):
        raise UsageError("give the command of a training after --, or --attach for a running job")
    plan = request.build_plan()
    reducer = request.build_reducer_options(plan)
    # Of the ranks that srun starts, one a host has the reducer.
    is_first_here = not is_rank(os.environ) or read_identity().local_rank == 0
    with ExitStack() as stack:
        beside = ReducerProcess(reducer)
        # A running job is joined first: the reducer begins when its ranks have agreed.
        if is_first_here and command:
            stack.enter_context(beside)
        try:
            if command:
                status = run_watched(command, plan)
            else:
                # A running job, until it has ended or until Ctrl-C.
                target = None if request.target == ONLY_JOB else request.target
                ranks = start_watch(target, plan)
                here = ", ".join(str(rank.rank) for rank in ranks[:8])
                here += ", ..." * (len(ranks) > 8)
                print_line(f"watching ranks {here} in {plan.out}; Ctrl-C ends it", err=True)
                with beside:
                    wait_until_over(ranks)
                status = 0
        except CollectError as error:
            raise UsageError(str(error)) from None
    if is_first_here:
        _report_watch(plan, reducer, attached=request.target is not None)
    context.exit(128 - status if status < 0 else status)


@dataclass(frozen=True, kw_only=True)
class WatchRequest:
    """The options of the command, as given."""

    out: Path | None
    name: str | None
    every: str
    budget: float
    steps: int
    mesh: str | None
    disk: float
    url: str | None
    log_to: tuple[str, ...]
    token: str | None
    upload_captures: bool
    target: int | None

    def build_plan(self) -> WatchPlan:
        """The plan for the ranks. Raises UsageError."""
        from stepsplit.collectors.record.command import choose_out
        from stepsplit.collectors.watch.plan import WatchPlan, parse_every

        require_package("torch", "collect")
        parse_mesh(self.mesh)
        folder = (self.out or choose_out(os.environ, "watch")).absolute()
        try:
            every_steps, every_s = parse_every(self.every)
        except ValueError as error:
            raise UsageError(f"--every: {error}") from None
        return WatchPlan(
            out=str(folder),
            name=self.name or folder.name,
            every_steps=every_steps,
            every_s=every_s,
            steps=self.steps,
            budget=self.budget / 100,
            mesh=self.mesh or "",
        )

    def build_reducer_options(self, plan: WatchPlan) -> ReducerOptions:
        """The options of the process beside the job. Raises UsageError."""
        from stepsplit.dashboard.connection import Connection
        from stepsplit.dashboard.watch_process import ReducerOptions

        # A wrong address or token is said now, and not after hours of training.
        if self.url is not None:
            Connection(self.url, self.token)
        elif self.upload_captures:
            raise UsageError("--upload-captures needs the address of a dashboard: --to URL")
        return ReducerOptions(
            folder=plan.out,
            run=plan.name,
            host=socket.gethostname(),
            mesh=plan.mesh,
            disk_bytes=round(self.disk * 2**30),
            url=self.url or "",
            token=self.token,
            has_uploads=self.upload_captures,
            log_to=check_log_to(self.log_to),
        )


def _report_watch(plan: WatchPlan, options: ReducerOptions, attached: bool) -> None:
    """Says what was watched, on standard error like record."""
    from stepsplit.analyzer.units import format_percent
    from stepsplit.analyzer.watch.reducer import WatchFolder, read_state

    folder = WatchFolder(Path(plan.out), plan.name, options.host)
    # What the reducer has written, not what this process knows: srun starts one process per rank.
    state = read_state(folder)
    steps = max((one.count_steps(attached) for one in state.ranks.values()), default=0)
    text = f"watched {steps} steps, {state.samples} samples"
    if state.without_data:
        text += f" ({state.without_data} without data)"
    if state.overhead is not None:
        text += f", which cost {format_percent(state.overhead)} of the time"
    if state.newest and (folder.path / state.newest).exists():
        text += f"; the newest: stepsplit analyze {folder.path / state.newest}"
    print_line(text, err=True)
    if options.url and state.unsent:
        command = f"stepsplit watch --send {folder.path} --to {options.url}"
        print_line(f"{state.unsent} batches were not sent; later: {command}", err=True)
