"""stepsplit plan: a RUN.toml and a number of GPUs -> the layout to take, and why not another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.commands.json_out import put_json

if TYPE_CHECKING:
    from stepsplit.analyzer.model.config import Job
    from stepsplit.analyzer.model.plan_space import Plan


@click.command()
@click.argument("run_file", metavar="RUN.toml", type=click.Path(path_type=Path))
@click.option("--gpus", metavar="N", type=int, required=True, help="How many GPUs there are.")
@click.option(
    "--top", metavar="K", type=click.IntRange(min=1), default=8, show_default=True,
    help="How many ways to split the GPUs are shown.",
)  # fmt: skip
@click.option(
    "--keep", metavar="KEY", multiple=True,
    help="Keep this as RUN.toml has it: tp, pp, cp, zero, recompute, ...; may be repeated.",
)  # fmt: skip
@click.option(
    "--json", "json_file", metavar="FILE",
    help="Write the plan here; - for standard output, and nothing else there.",
)  # fmt: skip
def command(
    run_file: Path, gpus: int, top: int, keep: tuple[str, ...], json_file: str | None
) -> None:
    """Find the fastest layout that fits, and say why the others lose.

    RUN.toml gives model, sequence length, batch, precision, framework and hardware. How the GPUs
    are split, ZeRO, schedule, microbatch and recomputation are searched. Nothing is run.
    """
    # What the search needs is loaded here, so that the list of commands stays quick.
    from stepsplit.analyzer.model.config_file import read_job
    from stepsplit.analyzer.model.plan import plan, to_json
    from stepsplit.analyzer.model.predict import read_rates

    job = read_job(run_file)
    found = plan(job, gpus, _kept(keep), top, read_rates(run_file, job.hardware))
    if not put_json(found, to_json, json_file):
        _show(job, found)


def _kept(words: tuple[str, ...]) -> frozenset[str]:
    """The keys to keep; each word may list several with commas. Raises UsageError."""
    from stepsplit.analyzer.model.plan_space import KEYS

    keys = frozenset(key.strip() for word in words for key in word.split(","))
    for key in sorted(keys - set(KEYS)):
        raise UsageError(f"--keep {key!r} is nothing that a plan chooses; write {', '.join(KEYS)}")
    return keys


def _show(job: Job, found: Plan) -> None:
    from rich.console import Console

    from stepsplit.dashboard.reporters.plan import screen

    Console(highlight=False).print(screen(job, found), soft_wrap=False)
