"""stepsplit analyze: a recording -> the screen, report.json, tables/."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from stepsplit.analyzer import Analysis, UsageError, examine
from stepsplit.analyzer.report.tables import write_tables
from stepsplit.analyzer.report.wire import REPORT_NAME, to_json
from stepsplit.collectors.run_spec import write_whole
from stepsplit.dashboard.reporters.terminal import screen


@click.command()
@click.argument(
    "paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path)
)
@click.option(
    "--json", "json_file", metavar="FILE", help="Write report.json here; - for standard output."
)
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path),
              help="Write report.json and tables/ into this folder.")  # fmt: skip
def command(paths: tuple[Path, ...], json_file: str | None, out: Path | None) -> None:
    """Split every step of a recording: files or folders of torch.profiler traces."""
    analysis = examine(paths)
    if out is not None:
        save(analysis, out)
    if json_file == "-":
        click.echo(to_json(analysis.report), nl=False)
        return
    if json_file is not None:
        _write(Path(json_file), to_json(analysis.report))
    Console(highlight=False).print(screen(analysis.report))


def save(analysis: Analysis, folder: Path) -> None:
    """Writes report.json and tables/ into the folder."""
    _write(folder / REPORT_NAME, to_json(analysis.report))
    write_tables(folder / "tables", analysis.tables)


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; choose a place that can be written") from None
