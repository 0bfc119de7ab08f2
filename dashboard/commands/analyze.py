"""stepsplit analyze: a recording -> the screen, report.json, tables/."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from stepsplit.analyzer import Analysis, examine
from stepsplit.analyzer.diagnose.hang import only_dumps, read_calls
from stepsplit.analyzer.diagnose.hang_progress import HANG_NAME
from stepsplit.analyzer.diagnose.hang_progress import to_json as hang_to_json
from stepsplit.analyzer.errors import DataError, write
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, read_rules
from stepsplit.analyzer.report.io import save, to_json
from stepsplit.dashboard.commands.cores import cores
from stepsplit.dashboard.commands.extras import need
from stepsplit.dashboard.commands.json_out import put_json
from stepsplit.dashboard.reporters.hang import screen as hang_screen
from stepsplit.dashboard.reporters.progress import reading_bar
from stepsplit.dashboard.reporters.terminal import screen


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "--json", "json_file", metavar="FILE", help="Write report.json here; - for standard output."
)
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path),
              help="Write report.json and tables/ into this folder.")  # fmt: skip
@click.option("--html", "html_file", metavar="FILE", type=click.Path(path_type=Path),
              help="Write the report as one page that needs no server.")  # fmt: skip
@click.option("--workers", metavar="N", type=click.IntRange(min=1), default=None,
              help="Read with up to N processes; one a core by default.")  # fmt: skip
@click.option("--run", metavar="FILE",
              help="Hold it against the model of this RUN.toml, which may state only what the "
                   "recording does not tell; auto for none.")  # fmt: skip
@click.option("--rules", "rules_file", metavar="FILE", type=click.Path(path_type=Path),
              help="Take kernels for what the rules in this TOML file say.")  # fmt: skip
def command(
    places: tuple[str, ...],
    json_file: str | None,
    out: Path | None,
    html_file: Path | None,
    workers: int | None,
    run: str | None,
    rules_file: Path | None,
) -> None:
    """Split every step of a recording.

    PATH is a file, a folder, a zip or tar archive, or a URL, of traces of torch.profiler or of
    Nsight Systems exported to SQLite; several together are one recording. Of Flight Recorder
    dumps alone it says where their job hangs.
    """
    if html_file is not None:
        need("dash", "dashboard")
    rules = BUILT_IN if rules_file is None else read_rules(rules_file)
    try:
        with reading_bar() as progress:
            analysis = examine(places, workers or cores(), progress, rules, run)
    except DataError:
        if not only_dumps(places):
            raise
        _tell_hang(places, json_file, out)
        return
    if out is not None:
        save(out, analysis.report, analysis.tables)
    if html_file is not None:
        _write_page(html_file, analysis)
    if not put_json(analysis.report, to_json, json_file):
        Console(highlight=False).print(screen(analysis.report))


def _write_page(file: Path, analysis: Analysis) -> None:
    from stepsplit.dashboard.pages.view import View
    from stepsplit.dashboard.web.still import still_page

    view = View(analysis.report.run.name, analysis.report, analysis.tables)
    write(file, still_page(view).encode())


def _tell_hang(places: tuple[str, ...], json_file: str | None, out: Path | None) -> None:
    """The same for a place of Flight Recorder dumps alone: where their job hangs."""
    hang = read_calls(places)
    if out is not None:
        write(out / HANG_NAME, hang_to_json(hang))
    if not put_json(hang, hang_to_json, json_file):
        Console(highlight=False).print(hang_screen(hang))
