"""stepsplit record, attach, gather and demo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import StepsplitError, UsageError
from stepsplit.dashboard.commands.common import need

if TYPE_CHECKING:
    from stepsplit.analyzer.analysis import Analysis
    from stepsplit.collectors.run_spec import Mesh


def collectors_command(verb: str, summary: str) -> click.Command:
    """The verb as `python -m stepsplit.collectors` has it, with its own help and errors."""
    from stepsplit.collectors.__main__ import main

    @click.command(
        verb,
        help=summary,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    @click.pass_context
    def command(context: click.Context, arguments: tuple[str, ...]) -> None:
        context.exit(main([verb, *arguments]))

    return command


# stepsplit gather, by the collectors.

gather_command = collectors_command("gather", "Bring together what the hosts of a run wrote.")


# stepsplit attach, by the collectors.

attach_command = collectors_command("attach", "Record some steps of a job that runs.")


# stepsplit record, by the collectors.

record_command = collectors_command(
    "record", "Run a training as it is and record some of its steps."
)


# stepsplit demo: a small GPT trained for real under the collectors, then the answer to look at.

DEFAULT_PARALLEL = "tp=2,pp=2,dp=2"

_MEMINFO = Path("/proc/meminfo")


@click.command()
@click.option(
    "--parallel",
    default=DEFAULT_PARALLEL,
    show_default=True,
    metavar="LAYOUT",
    help="Ranks along each axis, such as tp=2,pp=2,dp=1 or fsdp=4.",
)
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where the recording goes; runs/demo by default, then runs/demo-2 and so on.",
)
@click.option("--no-serve", is_flag=True, help="Stop after the terminal's answer.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    default=0,
    show_default="a free one",
    help="Port of the dashboard.",
)
def demo_command(parallel: str, out: Path | None, no_serve: bool, port: int) -> None:
    """Train a small GPT on this machine, record it, split its steps, and show where they went."""
    from rich.console import Console

    from stepsplit.analyzer.analysis import examine_as_told
    from stepsplit.analyzer.report.io import save
    from stepsplit.collectors.rank_record import fresh
    from stepsplit.dashboard.reporters.terminal import report_screen

    need("torch", "collect")
    if not no_serve:
        need("dash", "dashboard")
    folder = out or fresh(Path("runs/demo"))
    _train(_mesh(parallel), folder)
    analysis = examine_as_told([folder])
    save(folder, analysis.report, analysis.tables)
    click.echo(f"recorded in {folder}\n")
    Console(highlight=False).print(report_screen(analysis.report))
    if not no_serve:
        _serve(analysis, port)


def _mesh(parallel: str) -> Mesh:
    """The layout asked for, or what of it this machine's memory holds."""
    from stepsplit.analyzer import units
    from stepsplit.collectors.record import (
        DemoArgs,
        affordable,
        check,
        parallel_text,
        parse_parallel,
    )

    try:
        wanted = parse_parallel(parallel)
        check(DemoArgs(), wanted)
    except ValueError as error:
        raise UsageError(f"--parallel: {error}") from None
    available = _available_bytes()
    mesh = wanted if available is None else affordable(wanted, available)
    if mesh != wanted:
        free = units.gibibytes(available or 0)
        click.echo(
            f"{free} of memory are free: {parallel_text(mesh)} instead of {parallel_text(wanted)}"
        )
    return mesh


def _train(mesh: Mesh, folder: Path) -> None:
    from stepsplit.collectors.record import LaunchError, launch_workload, parallel_text

    ranks = mesh.world_size
    click.echo(
        f"training a small GPT on {parallel_text(mesh)}: {ranks} processes, about half a minute"
    )
    try:
        result = launch_workload(mesh, folder)
    except LaunchError as error:
        raise StepsplitError(f"the demo's training failed: {error}") from None
    click.echo(result.output.strip())


def _serve(analysis: Analysis, port: int) -> None:
    from stepsplit.dashboard.commands.common import open_store
    from stepsplit.dashboard.web.serve import free_port, serve

    store = open_store()
    run_id = store.import_report(analysis.report.run.name, analysis.report, analysis.tables)
    at = f"/run/{run_id}   (Ctrl-C ends it)"
    serve(store, port=port or free_port(), ready=lambda url: click.echo(f"\ndashboard: {url}{at}"))


def _available_bytes() -> int | None:
    """Memory that new processes can take, None where the system does not say."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kib is None else int(kib) * 1024
