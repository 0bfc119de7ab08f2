"""stepsplit record, attach, gather and demo."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import StepsplitError, UsageError
from stepsplit.dashboard.commands import COMMANDS
from stepsplit.dashboard.commands.common import (
    build_path_option,
    make_console,
    open_store,
    print_line,
    require_package,
    write_output,
)

if TYPE_CHECKING:
    from stepsplit.analyzer.analysis import Analysis
    from stepsplit.collectors.formats.run_spec import Mesh


def build_collectors_command(verb: str) -> click.Command:
    """Wraps a command of `python -m stepsplit.collectors`, with its own help and errors."""
    from stepsplit.collectors.__main__ import main

    @click.command(
        verb,
        help=COMMANDS[verb].summary,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    @click.pass_context
    def command(context: click.Context, arguments: tuple[str, ...]) -> None:
        context.exit(main([verb, *arguments], _explain_stop))

    return command


# Given to the collectors, which import nothing of the analyzer that knows the answer.
def _explain_stop(pid: int) -> str | None:
    """Why the job of the rank hangs; None if it does not."""
    from stepsplit.analyzer.diagnose.hang.result import STUCK
    from stepsplit.dashboard.commands.analyze import examine_job

    hang = examine_job(pid, None)
    return hang.verdict if hang.condition == STUCK else None


# stepsplit gather, attach and record, which the collectors implement.

gather_command = build_collectors_command("gather")

attach_command = build_collectors_command("attach")

record_command = build_collectors_command("record")


# stepsplit demo: trains and records a small GPT, then shows its report.

DEFAULT_PARALLEL = "tp=2,pp=2,dp=2"

_MEMINFO = Path("/proc/meminfo")


@click.command()
@click.option(
    "--parallel",
    default=DEFAULT_PARALLEL,
    show_default=True,
    metavar="LAYOUT",
    help="Ranks per axis, such as tp=2,pp=2,dp=1 or fsdp=4.",
)
@build_path_option(
    "--out",
    metavar="DIR",
    help="Folder of the recording; by default runs/demo, then runs/demo-2 and so on.",
)
@click.option("--no-serve", is_flag=True, help="Do not start the dashboard.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    default=0,
    show_default="a free port",
    help="Port of the dashboard.",
)
def demo_command(parallel: str, out: Path | None, no_serve: bool, port: int) -> None:
    """Train and record a small GPT here, then show its report."""
    from stepsplit.analyzer.analysis import Analysis, examine_with_inferred_job
    from stepsplit.analyzer.report.io import save
    from stepsplit.collectors.demo.launch import LaunchError, launch_workload
    from stepsplit.collectors.formats.file_names import find_free_folder
    from stepsplit.dashboard.reporters.terminal import build_report_screen

    require_package("torch", "collect")
    if not no_serve:
        require_package("dash", "dashboard")
    folder = out or find_free_folder(Path("runs/demo"))
    mesh = _choose_mesh(parallel)
    ranks = mesh.world_size
    print_line(
        f"training a small GPT on {mesh.format()}: {ranks} processes, half a minute, or minutes on"
        " busy cores"
    )
    with tempfile.TemporaryDirectory(prefix="stepsplit-") as calibration:
        try:
            result = launch_workload(mesh, folder, calibration=Path(calibration))
        except LaunchError as error:
            reason, *printed = str(error).splitlines()
            last = f"; a rank printed last: {' | '.join(printed)}" if printed else ""
            raise StepsplitError(f"the demo's training failed: {reason}{last}") from None
        for line in result.output.strip().splitlines():
            print_line(line)
        job = _write_calibrated_job(Path(calibration), mesh, folder)
    analysis = examine_with_inferred_job([folder], job=job)
    assert isinstance(analysis, Analysis), "the demo records traces"
    # Next to the recording, so that every other command opens it without analyzing it again.
    save(folder, analysis.report, analysis.tables)
    print_line(f"recorded in {folder}")
    print_line()
    make_console().print(build_report_screen(analysis.report))
    if not no_serve:
        _serve(analysis, port)


def _choose_mesh(parallel: str) -> Mesh:
    """The requested layout, reduced if this machine has too little memory for it."""
    from stepsplit.analyzer import units
    from stepsplit.collectors.demo.arguments import DemoArgs, check_mesh, parse_parallel
    from stepsplit.collectors.demo.launch import fit_to_memory

    try:
        requested = parse_parallel(parallel)
        check_mesh(DemoArgs(), requested)
    except ValueError as error:
        raise UsageError(f"--parallel: {error}") from None
    # Memory available to new processes; unknown if the system does not report it.
    available = None
    with suppress(OSError):
        lines = _MEMINFO.read_text().splitlines()
        kib = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
        available = int(kib[0]) * 1024 if kib else None
    mesh = requested if available is None else fit_to_memory(requested, available)
    if mesh != requested:
        free = units.format_gibibytes(available or 0)
        print_line(
            f"only {free} of memory available: using {mesh.format()} instead of "
            f"{requested.format()}"
        )
    return mesh


def _write_calibrated_job(calibration: Path, mesh: Mesh, folder: Path) -> Path | None:
    """Writes the hardware that was calibrated around the demo, and a job.toml that names it.

    Returns the job.toml; None if the hardware is not known to the model.
    """
    from stepsplit.analyzer.gap.calibrate import calibrate, format_hardware
    from stepsplit.collectors.demo.arguments import choose_calibration_mesh

    try:
        hardware = calibrate(*sorted(calibration.iterdir()))
    except StepsplitError as error:
        print_line(f"not calibrated: {error}")
        return None
    write_output(folder / "hardware.toml", format_hardware(hardware).encode())
    job = folder / "job.toml"
    write_output(job, b'[hardware]\nfile = "hardware.toml"\n')
    layout = choose_calibration_mesh(mesh).format()
    print_line(f"calibrated on short trainings of {layout} before and after: {job}")
    return job


def _serve(analysis: Analysis, port: int) -> None:
    from stepsplit.dashboard.web.auth import find_first_place
    from stepsplit.dashboard.web.options import ServeOptions, choose_access
    from stepsplit.dashboard.web.serve import serve

    store, access = open_store(), choose_access("127.0.0.1", one_time_login=None)
    run_id = store.import_report(analysis.report.run.name, analysis.report, analysis.tables)
    place = find_first_place(store, access, f"/run/{run_id}")
    print_line()
    serve(
        store,
        port=port,
        ready=lambda url: print_line(f"dashboard: {url}{place}   (Ctrl-C ends it)"),
        options=ServeOptions(access),
    )
