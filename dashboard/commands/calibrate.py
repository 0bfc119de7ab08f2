"""stepsplit calibrate: recorded runs -> the constants of the machine they ran on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import write
from stepsplit.dashboard.commands.json_out import put_json

if TYPE_CHECKING:
    from stepsplit.analyzer.gap.calibrate import Calibration


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--out", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help='Write the constants here; a RUN.toml names the file as [hardware] file = "FILE".',
)  # fmt: skip
@click.option(
    "--run", "run_file", metavar="FILE", type=click.Path(path_type=Path),
    help="A RUN.toml, whole or a part, for what the recordings do not tell of their job.",
)  # fmt: skip
@click.option(
    "--json", "json_file", metavar="FILE",
    help="Write all that was found here; - for standard output, and nothing else there.",
)  # fmt: skip
def command(
    places: tuple[str, ...], out: Path | None, run_file: Path | None, json_file: str | None
) -> None:
    """Fit the model's constants to recorded runs of your own.

    RUN is the folder of a recording; several may differ in layout, not in hardware. Predictions
    with these constants hold for other layouts of the same machine.
    """
    # What the fit needs is loaded here, so that the list of commands stays quick.
    from stepsplit.analyzer.gap.calibrate import calibrate, hardware_text, to_json

    found = calibrate(*places, run=run_file)
    if out is not None:
        write(out, hardware_text(found).encode())
    if not put_json(found, to_json, json_file):
        _show(found, out)


def _show(found: Calibration, out: Path | None) -> None:
    from rich.console import Console

    from stepsplit.dashboard.reporters.calibration import screen

    Console(highlight=False).print(screen(found, out), soft_wrap=False)
