"""stepsplit model, plan, calibrate, validate and what-if."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import StepsplitError, UsageError
from stepsplit.dashboard.commands.common import (
    build_json_option,
    build_path_option,
    count_cores,
    load_rules,
    make_console,
    places_argument,
    print_line,
    put_json,
    require_package,
    rules_option,
    write_output,
)

_files_argument = click.argument(
    "job_files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)

_kind_option = click.option(
    "--from", "kind", metavar="KIND", default="",
    help="What FILE is: job, hugging-face, megatron, torchtitan, deepspeed or megatron-bridge. "
         "Default: recognized.",
)  # fmt: skip

_set_option = click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True,
    help="A key of job.toml that wins over the files, such as gpu=h100; may be repeated.",
)  # fmt: skip

if TYPE_CHECKING:
    from stepsplit.dashboard.reporters.console import SafeConsole

# stepsplit model: predicts step time, split and memory of a job.toml.


@click.command()
@_files_argument
@_kind_option
@_set_option
@build_json_option("Write the prediction as JSON; - for standard output, without the screen.")
@click.option(
    "--explain", is_flag=True,
    help="Show each formula with the numbers of this job, and rules of thumb that differ.",
)  # fmt: skip
def model_command(
    job_files: tuple[Path, ...],
    kind: str,
    settings: tuple[str, ...],
    json_file: str | None,
    explain: bool,
) -> None:
    """Predict time, split, memory and communication of a step.

    FILE is a job.toml, which describes the model, the parallel layout, the batch and the hardware,
    by preset or by numbers; or a config that you have: Hugging Face config.json, Megatron-LM's
    arguments (a script, flags or YAML), torchtitan's TOML, DeepSpeed's JSON, overrides of a
    Megatron-Bridge recipe. Several are read as one job, the later over the earlier. Does not run
    the job.
    """
    from stepsplit.analyzer.model.config_file import decode_tables, read_tables
    from stepsplit.analyzer.model.predict import predict, read_hardware_rates
    from stepsplit.analyzer.model.prediction import prediction_to_json

    tables = read_tables(job_files, kind, settings)
    job = decode_tables(tables)
    prediction = predict(job, read_hardware_rates(tables.table, job.hardware))
    if put_json(prediction, prediction_to_json, json_file):
        return
    # The screen needs rich, which takes longer to import than a prediction.
    from stepsplit.dashboard.reporters.prediction import (
        build_formula_listing,
        build_prediction_screen,
    )

    console = make_console()
    console.print(build_prediction_screen(job, prediction))
    print_notes(console, job.notes)
    if explain:
        from stepsplit.analyzer.model.explain import explain as explained
        from stepsplit.analyzer.model.formulas import find_misleading_rules

        formulas = explained(job, prediction)
        rules = find_misleading_rules(formulas, job, prediction.parameters)
        console.print(build_formula_listing(formulas, rules))


def print_notes(console: SafeConsole, notes: Sequence[str]) -> None:
    """Print what of the files was read as what."""
    for note in notes:
        console.print(f"read {note}")


# stepsplit plan: searches the fastest layout for a job.toml and a number of GPUs.


@click.command()
@_files_argument
@_kind_option
@_set_option
@click.option("--gpus", metavar="N", type=int, required=True, help="Number of GPUs.")
@click.option(
    "--top", metavar="K", type=click.IntRange(min=1), default=8, show_default=True,
    help="Number of layouts to show.",
)  # fmt: skip
@click.option(
    "--keep", metavar="KEY", multiple=True,
    help="Keep this setting of job.toml: tp, pp, cp, zero, recompute, ...; may be repeated.",
)  # fmt: skip
@click.option(
    "--pareto", is_flag=True,
    help="List layouts that no other beats in time, memory and GPUs; also on fewer GPUs.",
)  # fmt: skip
@click.option(
    "--price-per-gpu-hour", "price", metavar="X", type=float,
    help="Price of a GPU per hour, for the cost of a million tokens.",
)  # fmt: skip
@click.option(
    "--workers", metavar="N", type=click.IntRange(min=1), default=None,
    help="Search with up to N processes; by default one per core.",
)  # fmt: skip
@build_json_option("Write the plan as JSON; - for standard output, without the screen.")
def plan_command(
    job_files: tuple[Path, ...],
    kind: str,
    settings: tuple[str, ...],
    gpus: int,
    top: int,
    keep: tuple[str, ...],
    pareto: bool,
    price: float | None,
    workers: int | None,
    json_file: str | None,
) -> None:
    """Find the fastest layout that fits, and why others are slower.

    FILE is a job.toml, or a config of another program as for model: it gives model, sequence
    length, batch, precision, framework and hardware. The search
    covers parallel sizes, ZeRO stage, pipeline schedule, microbatch size and recomputation. Does
    not run the job.
    """
    from stepsplit.analyzer.model.config_file import decode_job_to_plan, read_tables
    from stepsplit.analyzer.model.plan import plan, to_json
    from stepsplit.analyzer.model.plan_space import KEYS
    from stepsplit.analyzer.model.predict import read_hardware_rates

    kept = frozenset(key.strip() for word in keep for key in word.split(","))
    # A misspelled key would be searched over as if it had not been given.
    for key in sorted(kept - set(KEYS)):
        raise UsageError(
            f"--keep {key!r} is not a setting of the search; choose from {', '.join(KEYS)}"
        )
    tables = read_tables(job_files, kind, settings, is_planned=True)
    job = decode_job_to_plan(tables, kept)
    rates = read_hardware_rates(tables.table, job.hardware)
    result = plan(job, gpus, kept, top, rates, price, pareto, workers or count_cores())
    if not put_json(result, to_json, json_file):
        from stepsplit.dashboard.reporters.plan import build_plan_screen

        console = make_console()
        console.print(build_plan_screen(job, result), soft_wrap=False)
        print_notes(console, job.notes)


# stepsplit calibrate: fits the hardware constants of a machine to recorded runs.


@click.command()
@click.argument("places", nargs=-1, metavar="[RUN...]")
@click.option(
    "--quick", is_flag=True,
    help="Without recordings: train the demo's GPT here for some seconds, and calibrate from that.",
)  # fmt: skip
@click.option(
    "--ranks", metavar="N", type=click.IntRange(min=1),
    help="Processes of --quick; as many as the job to predict has on one machine. "
         "Default: one per GPU or core.",
)  # fmt: skip
@click.option(
    "--out", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help='Write the constants to this file; use it in job.toml as [hardware] file = "FILE".',
)  # fmt: skip
@build_path_option(
    "--job",
    "job_file",
    metavar="FILE",
    help="A job.toml, complete or partial, for what cannot be inferred from the recordings.",
)
@build_json_option("Write the calibration as JSON; - for standard output, without the screen.")
@rules_option
def calibrate_command(
    places: tuple[str, ...],
    quick: bool,
    ranks: int | None,
    out: Path | None,
    job_file: Path | None,
    json_file: str | None,
    rules_file: Path | None,
) -> None:
    """Fit the model's hardware constants to your own recordings.

    RUN is the folder of a recording. Several runs may differ in layout but not in hardware. The
    constants also apply to other layouts on the same machine. With --quick none is needed.
    """
    from stepsplit.analyzer.gap.calibrate import calibrate, format_hardware, to_json

    if quick and places:
        raise UsageError("--quick takes no recordings; leave out one of them")
    if ranks is not None and not quick:
        raise UsageError("--ranks is for --quick; recordings have their own ranks")
    rules = load_rules(rules_file)
    # Nothing of the quick training is of use after its constants are fitted.
    with tempfile.TemporaryDirectory(prefix="stepsplit-") as folder:
        runs = (_record_quick(Path(folder), ranks),) if quick else places
        calibration = calibrate(*runs, job=job_file, rules=rules)
    if out is not None:
        write_output(out, format_hardware(calibration).encode())
    if not put_json(calibration, to_json, json_file):
        from stepsplit.dashboard.reporters.calibration import build_calibration_screen

        make_console().print(build_calibration_screen(calibration, out), soft_wrap=False)


MOST_RANKS_PER_CORE = 8
"""Ranks of a job on CPU; more only wait for each other's turn."""


def _record_quick(folder: Path, ranks: int | None) -> Path:
    """Records a short training on this machine; returns its folder. Raises StepsplitError."""
    require_package("torch", "collect")
    import torch

    from stepsplit.collectors.demo.arguments import CALIBRATION, choose_calibration_mesh
    from stepsplit.collectors.demo.launch import LaunchError, launch_workload
    from stepsplit.collectors.formats.run_spec import Mesh

    gpus, cores = torch.cuda.device_count(), count_cores()
    # A GPU has room for one rank of this training; CPU ranks only take turns.
    most = gpus or MOST_RANKS_PER_CORE * cores
    if ranks is not None and ranks > most:
        device = f"{gpus} GPUs" if gpus else f"{cores} cores"
        raise UsageError(f"--ranks {ranks}: too many for {device}; use up to {most}")
    count = ranks or gpus or cores
    mesh = choose_calibration_mesh(Mesh.of({"pp": count}))
    print_line(f"training a small GPT on {mesh.format()} for some seconds", err=True)
    try:
        return launch_workload(mesh, folder / "quick", CALIBRATION).out
    except LaunchError as error:
        raise StepsplitError(f"the training failed: {error}") from None


# stepsplit validate: the analytical model against published measurements.

EXIT_MISSED = 1


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path, file_okay=False))
@build_json_option("Write all checks and rows as JSON; - for standard output, without the screen.")
@click.option("--rows", is_flag=True, help="Print every row, not only the largest errors.")
@click.pass_context
def validate_command(
    context: click.Context, folder: Path | None, json_file: str | None, rows: bool
) -> None:
    """Compare the analytical model with published measurements.

    FOLDER has additional rows: CSV files with the names and columns of those in
    stepsplit/analyzer/validation/published; each file is optional. Exits with status 1 if a check
    fails. Step times are predicted by constants fitted without their publisher's runs.
    """
    from stepsplit.analyzer.validation import to_json, validate

    checks = validate(folder)
    if folder is not None and not any(check.rows for check in checks):
        reasons = [reason for check in checks for reason in check.left_out]
        raise UsageError(f"{folder}: no row can be checked: {'; '.join(reasons[:1])}")
    if not put_json(checks, to_json, json_file):
        from stepsplit.dashboard.reporters.validation import build_validation_screen

        make_console().print(build_validation_screen(checks, rows))
    if not all(check.met for check in checks):
        context.exit(EXIT_MISSED)


# stepsplit what-if: replays a recording with something changed.


class _ChangeCommand(click.Command):
    """A command whose help ends with examples of --change."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from stepsplit.analyzer.diagnose.what_if import EXAMPLES

        self.epilog = f"Examples of CHANGE: {', '.join(EXAMPLES)}."
        super().format_epilog(ctx, formatter)


@click.command(cls=_ChangeCommand)
@places_argument
@click.option(
    "--change", "changes", metavar="CHANGE", multiple=True,
    help="Change to replay; may be repeated. Default: all common changes.",
)  # fmt: skip
@click.option(
    "--hardware", metavar="PRESET",
    help="Carry the recording to this hardware: a preset, or a file of calibrate (.toml).",
)  # fmt: skip
@click.option(
    "--link", "links", metavar="AXIS=PRESET", multiple=True,
    help="Link of an axis there, such as tp=nvlink-5; may be repeated.",
)  # fmt: skip
@click.option(
    "--gpus-per-node", metavar="N", type=click.IntRange(min=1), help="GPUs per node there.",
)  # fmt: skip
@click.option(
    "--recorded-on", metavar="PRESET",
    help="Hardware of the recording, if its device name is unknown.",
)  # fmt: skip
@build_json_option("Write the result as JSON; - for standard output, without the screen.")
@rules_option
def what_if_command(
    places: tuple[str, ...],
    changes: tuple[str, ...],
    hardware: str | None,
    links: tuple[str, ...],
    gpus_per_node: int | None,
    recorded_on: str | None,
    json_file: str | None,
    rules_file: Path | None,
) -> None:
    """Estimate the step time of a recording with something changed.

    PATH is as for analyze. Replays the dependency graph of the measured steps; other microbatch
    counts and pipeline schedules are simulated in the order of the schedule. On other hardware,
    kernels and transfers take the time that the model's rates give; the host keeps its own.
    """
    from stepsplit.analyzer.diagnose.what_if import to_json, what_if
    from stepsplit.dashboard.reporters.what_if import build_what_if_screen

    result = what_if(
        *places, changes=changes, rules=load_rules(rules_file), hardware=hardware, links=links,
        gpus_per_node=gpus_per_node, recorded_on=recorded_on,
    )  # fmt: skip
    if not put_json(result, to_json, json_file):
        make_console().print(build_what_if_screen(result))
