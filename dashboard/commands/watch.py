"""stepsplit watch: samples a training for as long as it runs."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.commands.common import parse_mesh, require_package, token_option

if TYPE_CHECKING:
    from stepsplit.analyzer.watch.reducer import WatchFolder


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[OPTIONS] --",
)
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
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
    type=click.FloatRange(min=0.01, max=100),
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
    type=click.FloatRange(min=0.01),
    metavar="GIB",
    default=4.0,
    show_default=True,
    help="Disk space for samples on each host; the oldest are dropped.",
)
@click.option("--to", "url", metavar="URL", help="Address of a dashboard to send numbers to.")
@token_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def watch_command(
    context: click.Context,
    out: Path | None,
    name: str | None,
    every: str,
    budget: float,
    steps: int,
    mesh: str | None,
    disk: float,
    url: str | None,
    token: str | None,
    command: tuple[str, ...],
) -> None:
    """Sample a training command for as long as it runs.

    It notes the step times of all ranks, and records a few steps now and then.
    """
    from stepsplit.analyzer.watch.reducer import WatchFolder
    from stepsplit.collectors.guard import CollectError
    from stepsplit.collectors.launcher import is_rank, read_identity
    from stepsplit.collectors.record import choose_out, run_watched
    from stepsplit.collectors.watch_plan import WatchPlan
    from stepsplit.dashboard.upload import Connection
    from stepsplit.dashboard.watch_process import ReducerOptions, ReducerProcess

    require_package("torch", "collect")
    parse_mesh(mesh)
    if url is not None:
        Connection(url, token)
    folder = (out or choose_out(os.environ, "watch")).absolute()
    every_steps, every_s = _parse_every(every)
    plan = WatchPlan(
        out=str(folder),
        name=name or folder.name,
        every_steps=every_steps,
        every_s=every_s,
        steps=steps,
        budget=budget / 100,
        mesh=mesh or "",
    )
    options = ReducerOptions(
        folder=plan.out,
        run=plan.name,
        host=socket.gethostname(),
        mesh=plan.mesh,
        disk_bytes=round(disk * 2**30),
        url=url or "",
        token=token,
    )
    # Of the ranks that srun starts, one a host has the reducer.
    is_first_here = not is_rank(os.environ) or read_identity().local_rank == 0
    with ReducerProcess(options) if is_first_here else nullcontext():
        try:
            status = run_watched(command, plan)
        except CollectError as error:
            raise UsageError(str(error)) from None
    if is_first_here:
        _report_watch(WatchFolder(folder, plan.name, options.host))
    context.exit(128 - status if status < 0 else status)


def _parse_every(text: str) -> tuple[int | None, float | None]:
    from stepsplit.collectors.watch_plan import parse_every

    try:
        return parse_every(text)
    except ValueError as error:
        raise UsageError(f"--every: {error}") from None


def _report_watch(folder: WatchFolder) -> None:
    """Says what was watched, on standard error like record."""
    from stepsplit.analyzer.units import format_percent
    from stepsplit.analyzer.watch.reducer import read_state

    state = read_state(folder)
    steps = max((known.step for known in state.ranks.values()), default=0)
    text = f"watched {steps} steps, {state.samples} samples"
    if state.without_data:
        text += f" ({state.without_data} without data)"
    if state.overhead is not None:
        text += f", which cost {format_percent(state.overhead)} of the time"
    if state.newest and (folder.path / state.newest).exists():
        text += f"; the newest: stepsplit analyze {folder.path / state.newest}"
    click.echo(text, err=True)
