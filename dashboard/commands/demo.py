"""stepsplit demo: a small GPT trained for real under the collectors, then the answer to look at."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from stepsplit.analyzer import Analysis, StepsplitError, UsageError, units
from stepsplit.analyzer.analysis import examine_as_told
from stepsplit.analyzer.report.io import save
from stepsplit.collectors.launch import (
    LaunchError,
    Recipe,
    affordable,
    check,
    launch_workload,
    parallel_text,
    parse_parallel,
)
from stepsplit.collectors.rank_record import fresh
from stepsplit.collectors.run_spec import Mesh
from stepsplit.dashboard.commands.extras import need
from stepsplit.dashboard.reporters.terminal import screen

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
def command(parallel: str, out: Path | None, no_serve: bool, port: int) -> None:
    """Train a small GPT on this machine, record it, split its steps, and show where they went."""
    need("torch", "collect")
    if not no_serve:
        need("dash", "dashboard")
    folder = out or fresh(Path("runs/demo"))
    _train(_mesh(parallel), folder)
    analysis = examine_as_told([folder])
    save(folder, analysis.report, analysis.tables)
    click.echo(f"recorded in {folder}\n")
    Console(highlight=False).print(screen(analysis.report))
    if not no_serve:
        _serve(analysis, port)


def _mesh(parallel: str) -> Mesh:
    """The layout asked for, or what of it this machine's memory holds."""
    try:
        wanted = parse_parallel(parallel)
        check(Recipe(), wanted)
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
    from stepsplit.dashboard.commands.store_options import open_store
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
