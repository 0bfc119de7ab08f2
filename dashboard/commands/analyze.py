"""stepsplit analyze and stepsplit export."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import DataError, make_write_error, write
from stepsplit.dashboard.commands.common import (
    count_cores,
    load_rules,
    put_json,
    require_package,
    rules_option,
)

if TYPE_CHECKING:
    from stepsplit.analyzer.analysis import Analysis
    from stepsplit.analyzer.diagnose.hang_progress import Hang
    from stepsplit.analyzer.readers.kernel_rules import Rules


# stepsplit analyze: reads a recording; prints the report, writes report.json and tables/.


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    help="Write report.json here; - for standard output.",
)
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path),
              help="Write report.json and tables/ into this folder.")  # fmt: skip
@click.option("--html", "html_file", metavar="FILE", type=click.Path(path_type=Path),
              help="Write the report as a self-contained HTML page.")  # fmt: skip
@click.option("--workers", metavar="N", type=click.IntRange(min=1), default=None,
              help="Read with up to N processes; by default one per core.")  # fmt: skip
@click.option("--job", metavar="FILE",
              help="Compare with the model of this job.toml, which only needs what cannot be "
                   "inferred from the recording; auto: infer everything.")  # fmt: skip
@rules_option
def analyze_command(
    places: tuple[str, ...],
    json_file: str | None,
    out: Path | None,
    html_file: Path | None,
    workers: int | None,
    job: str | None,
    rules_file: Path | None,
) -> None:
    """Split each step into compute, communication, bubble and idle.

    PATH is a file, folder, zip or tar archive, or URL with traces of torch.profiler, or of Nsight
    Systems exported to SQLite. Several paths together are one recording. If there are only Flight
    Recorder dumps, prints the diagnosis of the hang instead.
    """
    from rich.console import Console

    from stepsplit.analyzer.analysis import Analysis, examine_or_find_hang
    from stepsplit.analyzer.report.io import save, to_json
    from stepsplit.dashboard.reporters.terminal import build_report_screen, show_reading_bar

    if html_file is not None:
        require_package("dash", "dashboard")
    rules = load_rules(rules_file)
    with show_reading_bar() as progress:
        analysis = examine_or_find_hang(places, workers or count_cores(), progress, rules, job)
    if not isinstance(analysis, Analysis):
        _show_hang(analysis, json_file, out)
        return
    if out is not None:
        save(out, analysis.report, analysis.tables)
    if html_file is not None:
        _write_page(html_file, analysis)
    if not put_json(analysis.report, to_json, json_file):
        Console(highlight=False).print(build_report_screen(analysis.report))


def _write_page(file: Path, analysis: Analysis) -> None:
    from stepsplit.dashboard.pages.components import View
    from stepsplit.dashboard.web.html_export import export_html

    view = View(analysis.report.run.name, analysis.report, analysis.tables)
    write(file, export_html(view).encode())


def _show_hang(hang: Hang, json_file: str | None, out: Path | None) -> None:
    """Prints the diagnosis of a hang, or writes hang.json."""
    from rich.console import Console

    from stepsplit.analyzer.diagnose.hang_progress import HANG_NAME
    from stepsplit.analyzer.diagnose.hang_progress import to_json as hang_to_json
    from stepsplit.dashboard.reporters.terminal import build_hang_screen

    if out is not None:
        write(out / HANG_NAME, hang_to_json(hang))
    if not put_json(hang, hang_to_json, json_file):
        Console(highlight=False).print(build_hang_screen(hang))


# stepsplit export: writes a recording, or a saved analysis of it, for another tool.


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="PATH...")
@click.option("--perfetto", "file", required=True, metavar="FILE",
              type=click.Path(path_type=Path, dir_okay=False),
              help="Write a trace for ui.perfetto.dev; gzipped if FILE ends in .gz.")  # fmt: skip
@click.option("--workers", metavar="N", type=click.IntRange(min=1), default=None,
              help="Read with up to N processes; by default one per core.")  # fmt: skip
@rules_option
def export_command(
    places: tuple[str, ...], file: Path, workers: int | None, rules_file: Path | None
) -> None:
    """Export all ranks of a recording as one Perfetto trace.

    PATH is as for analyze, or a folder written by analyze --out, which is not analyzed again.
    Each rank is a process with tracks for steps, buckets, waits and pipeline stages, on a common
    clock. Arrows lead from the last rank to arrive to the ranks that waited for it. Open the file
    at https://ui.perfetto.dev.
    """
    from stepsplit.dashboard.reporters.perfetto import perfetto_trace

    saved_analysis = _load_saved(places) if rules_file is None else None
    analysis = saved_analysis or _examine_recording(places, workers, load_rules(rules_file))
    _write_chunks(file, perfetto_trace(analysis.report, analysis.tables))
    click.echo(f"{file}: open it at https://ui.perfetto.dev")


def _load_saved(places: Sequence[str]) -> Analysis | None:
    """Reads the analysis that analyze --out wrote; None if the path is not such a folder."""
    from stepsplit.analyzer.analysis import Analysis
    from stepsplit.analyzer.report.io import REPORT_NAME, TABLES_NAME, read_report
    from stepsplit.analyzer.report.tables import read_tables

    folder = Path(places[0])
    tables = folder / TABLES_NAME
    if len(places) > 1 or not (folder / REPORT_NAME).is_file() or not tables.is_dir():
        return None
    report = read_report(folder)
    try:
        return Analysis(report, read_tables(tables))
    except (OSError, ValueError, KeyError) as error:
        problem = f"cannot read a table ({error})"
        raise DataError(tables, problem, "analyze the run again") from None


def _examine_recording(places: Sequence[str], workers: int | None, rules: Rules) -> Analysis:
    from stepsplit.analyzer.analysis import examine
    from stepsplit.dashboard.reporters.terminal import show_reading_bar

    with show_reading_bar() as progress:
        return examine(places, workers or count_cores(), progress, rules)


def _write_chunks(file: Path, chunks: Iterable[bytes]) -> None:
    """Writes the chunks to the file atomically. Raises UsageError if it cannot be written."""
    from stepsplit.collectors.run_spec import whole_file

    try:
        with whole_file(file) as draft:
            if file.suffix != ".gz":
                draft.writelines(chunks)
                return
            with gzip.GzipFile("", "wb", 6, draft, mtime=0) as packed:
                packed.writelines(chunks)
    except OSError as error:
        raise make_write_error(file, error) from None
