"""stepsplit model, plan, calibrate, validate and what-if."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import UsageError, write
from stepsplit.dashboard.commands.common import load_rules, put_json, rules_option

if TYPE_CHECKING:
    from stepsplit.analyzer.gap.calibrate import Calibration
    from stepsplit.analyzer.model.config import JobConfig
    from stepsplit.analyzer.model.plan_space import Plan
    from stepsplit.analyzer.model.prediction import Prediction
    from stepsplit.analyzer.validation.tables import Check


# stepsplit model: a job.toml -> how long a step should take, where it goes, and what fits.


@click.command()
@click.argument("job_file", metavar="job.toml", type=click.Path(path_type=Path))
@click.option(
    "--json", "json_file", metavar="FILE",
    help="Write the prediction here; - for standard output, and nothing else there.",
)  # fmt: skip
@click.option(
    "--explain", is_flag=True,
    help="Show each formula with this run's numbers, and the rules of thumb that differ.",
)  # fmt: skip
def model_command(job_file: Path, json_file: str | None, explain: bool) -> None:
    """Predict one training step: time, split, memory and messages.

    job.toml names the model, how ranks share it, the batch and the hardware, by preset or by
    numbers. Nothing is run.
    """
    # What the model needs is loaded here, so that the list of commands stays quick.
    from stepsplit.analyzer.model.config_file import read_job
    from stepsplit.analyzer.model.predict import predict, read_rates
    from stepsplit.analyzer.model.prediction import prediction_to_json

    job = read_job(job_file)
    prediction = predict(job, read_rates(job_file, job.hardware))
    if not put_json(prediction, prediction_to_json, json_file):
        _show_model(job, prediction, explain)


def _show_model(job: JobConfig, prediction: Prediction, explain: bool) -> None:
    from rich.console import Console

    from stepsplit.dashboard.reporters.prediction import prediction_screen

    console = Console(highlight=False)
    console.print(prediction_screen(job, prediction))
    if explain:
        from stepsplit.analyzer.model.explain import explain as explained
        from stepsplit.analyzer.model.formulas import heard
        from stepsplit.dashboard.reporters.prediction import listing

        formulas = explained(job, prediction)
        console.print(listing(formulas, heard(formulas)))


# stepsplit plan: a job.toml and a number of GPUs -> the layout to take, and why not another.


@click.command()
@click.argument("job_file", metavar="job.toml", type=click.Path(path_type=Path))
@click.option("--gpus", metavar="N", type=int, required=True, help="How many GPUs there are.")
@click.option(
    "--top", metavar="K", type=click.IntRange(min=1), default=8, show_default=True,
    help="How many ways to split the GPUs are shown.",
)  # fmt: skip
@click.option(
    "--keep", metavar="KEY", multiple=True,
    help="Keep this as job.toml has it: tp, pp, cp, zero, recompute, ...; may be repeated.",
)  # fmt: skip
@click.option(
    "--json", "json_file", metavar="FILE",
    help="Write the plan here; - for standard output, and nothing else there.",
)  # fmt: skip
def plan_command(
    job_file: Path, gpus: int, top: int, keep: tuple[str, ...], json_file: str | None
) -> None:
    """Find the fastest layout that fits, and say why the others lose.

    job.toml gives model, sequence length, batch, precision, framework and hardware. How the GPUs
    are split, ZeRO, schedule, microbatch and recomputation are searched. Nothing is run.
    """
    # What the search needs is loaded here, so that the list of commands stays quick.
    from stepsplit.analyzer.model.config_file import read_job
    from stepsplit.analyzer.model.plan import plan, to_json
    from stepsplit.analyzer.model.predict import read_rates

    job = read_job(job_file)
    found = plan(job, gpus, _kept(keep), top, read_rates(job_file, job.hardware))
    if not put_json(found, to_json, json_file):
        _show_plan(job, found)


def _kept(words: tuple[str, ...]) -> frozenset[str]:
    """The keys to keep; each word may list several with commas. Raises UsageError."""
    from stepsplit.analyzer.model.plan_space import KEYS

    keys = frozenset(key.strip() for word in words for key in word.split(","))
    for key in sorted(keys - set(KEYS)):
        raise UsageError(f"--keep {key!r} is nothing that a plan chooses; write {', '.join(KEYS)}")
    return keys


def _show_plan(job: JobConfig, found: Plan) -> None:
    from rich.console import Console

    from stepsplit.dashboard.reporters.plan import plan_screen

    Console(highlight=False).print(plan_screen(job, found), soft_wrap=False)


# stepsplit calibrate: recorded runs -> the constants of the machine they ran on.


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--out", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help='Write the constants here; a job.toml names the file as [hardware] file = "FILE".',
)  # fmt: skip
@click.option(
    "--job", "job_file", metavar="FILE", type=click.Path(path_type=Path),
    help="A job.toml, whole or a part, for what the recordings do not tell of their job.",
)  # fmt: skip
@click.option(
    "--json", "json_file", metavar="FILE",
    help="Write all that was found here; - for standard output, and nothing else there.",
)  # fmt: skip
@rules_option
def calibrate_command(
    places: tuple[str, ...],
    out: Path | None,
    job_file: Path | None,
    json_file: str | None,
    rules_file: Path | None,
) -> None:
    """Fit the model's constants to recorded runs of your own.

    RUN is the folder of a recording; several may differ in layout, not in hardware. Predictions
    with these constants hold for other layouts of the same machine.
    """
    # What the fit needs is loaded here, so that the list of commands stays quick.
    from stepsplit.analyzer.gap.calibrate import calibrate, hardware_text, to_json

    found = calibrate(*places, job=job_file, rules=load_rules(rules_file))
    if out is not None:
        write(out, hardware_text(found).encode())
    if not put_json(found, to_json, json_file):
        _show_calibrate(found, out)


def _show_calibrate(found: Calibration, out: Path | None) -> None:
    from rich.console import Console

    from stepsplit.dashboard.reporters.plan import calibration_screen

    Console(highlight=False).print(calibration_screen(found, out), soft_wrap=False)


# stepsplit validate: the analytical model against published figures.

MISSED = 1


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--json", "json_file", metavar="FILE",
    help="Write all checks with all rows here; - for standard output, and nothing else there.",
)  # fmt: skip
@click.option("--rows", is_flag=True, help="Print every row, not only those that are farthest off.")
@click.pass_context
def validate_command(
    context: click.Context, folder: Path | None, json_file: str | None, rows: bool
) -> None:
    """Hold the analytical model against published figures, and say how far off it is.

    FOLDER has more rows of the same tables: CSV files with the names and columns of those in
    stepsplit/analyzer/model/published, any of which may be absent. Ends with status 1 where a
    check is missed. Rows that a constant of the model was fitted on are left out.
    """
    # What the model needs is loaded here, so that the list of commands stays quick.
    from stepsplit.analyzer.validation import to_json, validate

    checks = validate(folder)
    if json_file == "-":
        click.echo(to_json(checks))
    else:
        if json_file is not None:
            write(Path(json_file), to_json(checks).encode())
        _show_validate(checks, rows)
    if not all(check.met for check in checks):
        context.exit(MISSED)


def _show_validate(checks: tuple[Check, ...], rows: bool) -> None:
    from rich.console import Console

    from stepsplit.dashboard.reporters.plan import validation_screen

    Console(highlight=False).print(validation_screen(checks, rows))


# stepsplit what-if: a recording -> its step with something changed, by replay.


class _ChangeCommand(click.Command):
    """A command whose help ends with examples of --change."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from stepsplit.analyzer.diagnose.what_if import EXAMPLES

        self.epilog = f"Changes are written so: {', '.join(EXAMPLES)}."
        super().format_epilog(ctx, formatter)


@click.command(cls=_ChangeCommand)
@click.argument("places", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "--change", "changes", metavar="CHANGE", multiple=True,
    help="Replay with this changed; may be repeated. All usual changes where left out.",
)  # fmt: skip
@click.option(
    "--json", "json_file", metavar="FILE",
    help="Write the result here; - for standard output, and nothing else there.",
)  # fmt: skip
@rules_option
def what_if_command(
    places: tuple[str, ...],
    changes: tuple[str, ...],
    json_file: str | None,
    rules_file: Path | None,
) -> None:
    """Replay a recording with something changed: how long were a step?

    PATH is as for analyze. A replay runs through what each instant of the measured steps waited
    for; other microbatches and schedules are timed by the schedule's own order.
    """
    from rich.console import Console

    from stepsplit.analyzer.diagnose.what_if import to_json, what_if
    from stepsplit.dashboard.reporters.compare import what_if_screen

    found = what_if(*places, changes=changes, rules=load_rules(rules_file))
    if not put_json(found, to_json, json_file):
        Console(highlight=False).print(what_if_screen(found))
