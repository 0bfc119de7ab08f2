"""stepsplit export: a recording, or what analyze kept of it -> a file for another tool."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from stepsplit.analyzer import Analysis, DataError, examine
from stepsplit.analyzer.errors import unwritable
from stepsplit.analyzer.report.io import REPORT_NAME, TABLES_NAME, read_report
from stepsplit.analyzer.report.tables import read_tables
from stepsplit.collectors.run_spec import whole_file
from stepsplit.dashboard.commands.cores import cores
from stepsplit.dashboard.reporters.perfetto import perfetto_trace
from stepsplit.dashboard.reporters.progress import reading_bar


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="PATH...")
@click.option("--perfetto", "file", required=True, metavar="FILE",
              type=click.Path(path_type=Path, dir_okay=False),
              help="Write a trace for ui.perfetto.dev; gzipped if this ends in .gz.")  # fmt: skip
@click.option("--workers", metavar="N", type=click.IntRange(min=1), default=None,
              help="Read with up to N processes; one a core by default.")  # fmt: skip
def command(places: tuple[str, ...], file: Path, workers: int | None) -> None:
    """Write all ranks of a recording, on one clock, for the page ui.perfetto.dev.

    PATH is what analyze takes, or a folder that analyze --out wrote: then nothing is read again.
    A process is a rank, with its steps, buckets, waits and pipeline stages; arrows lead from the
    rank that came last to those that waited for it.
    """
    analysis = _saved(places) or _examined(places, workers)
    _write(file, perfetto_trace(analysis.report, analysis.tables))
    click.echo(f"{file}: open it at https://ui.perfetto.dev")


def _saved(places: Sequence[str]) -> Analysis | None:
    """What analyze --out left in the folder, None where the places are no such folder."""
    folder = Path(places[0])
    tables = folder / TABLES_NAME
    if len(places) > 1 or not (folder / REPORT_NAME).is_file() or not tables.is_dir():
        return None
    report = read_report(folder)
    try:
        return Analysis(report, read_tables(tables))
    except (OSError, ValueError, KeyError) as error:
        problem = f"a table cannot be read ({error})"
        raise DataError(tables, problem, "analyze the run again") from None


def _examined(places: Sequence[str], workers: int | None) -> Analysis:
    with reading_bar() as progress:
        return examine(places, workers or cores(), progress)


def _write(file: Path, chunks: Iterable[bytes]) -> None:
    """Writes the chunks, whole or not at all. Raises UsageError where that cannot be done."""
    try:
        with whole_file(file) as draft:
            if file.suffix != ".gz":
                draft.writelines(chunks)
                return
            with gzip.GzipFile("", "wb", 6, draft, mtime=0) as packed:
                packed.writelines(chunks)
    except OSError as error:
        raise unwritable(file, error) from None
