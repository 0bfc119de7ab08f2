"""stepsplit model: a RUN.toml -> how long a step should take, where it goes, and what fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.dashboard.commands.json_out import put_json

if TYPE_CHECKING:
    from stepsplit.analyzer.model.config import Job
    from stepsplit.analyzer.model.prediction import Prediction


@click.command()
@click.argument("run_file", metavar="RUN.toml", type=click.Path(path_type=Path))
@click.option(
    "--json", "json_file", metavar="FILE",
    help="Write the prediction here; - for standard output, and nothing else there.",
)  # fmt: skip
@click.option(
    "--explain", is_flag=True,
    help="Show each formula with this run's numbers, and the rules of thumb that differ.",
)  # fmt: skip
def command(run_file: Path, json_file: str | None, explain: bool) -> None:
    """Predict one training step: time, split, memory and messages.

    RUN.toml names the model, how ranks share it, the batch and the hardware, by preset or by
    numbers. Nothing is run.
    """
    # What the model needs is loaded here, so that the list of commands stays quick.
    from stepsplit.analyzer.model.config_file import read_job
    from stepsplit.analyzer.model.predict import predict, read_rates
    from stepsplit.analyzer.model.prediction import prediction_to_json

    job = read_job(run_file)
    prediction = predict(job, read_rates(run_file, job.hardware))
    if not put_json(prediction, prediction_to_json, json_file):
        _show(job, prediction, explain)


def _show(job: Job, prediction: Prediction, explain: bool) -> None:
    from rich.console import Console

    from stepsplit.dashboard.reporters.prediction import screen

    console = Console(highlight=False)
    console.print(screen(job, prediction))
    if explain:
        from stepsplit.analyzer.model.explain import explain as explained
        from stepsplit.analyzer.model.formulas import heard
        from stepsplit.dashboard.reporters.explained import listing

        formulas = explained(job, prediction)
        console.print(listing(formulas, heard(formulas)))
