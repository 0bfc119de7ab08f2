"""stepsplit analyze, hang, export, reduce and redact."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import StepsplitError, UsageError, make_write_error
from stepsplit.dashboard.commands.common import (
    build_json_option,
    build_path_option,
    check_output,
    count_cores,
    load_rules,
    make_console,
    parse_mesh,
    places_argument,
    print_line,
    put_json,
    require_package,
    rules_option,
    workers_option,
    write_output,
)
from stepsplit.dashboard.sinks.log_to import build_log_option, log_report, open_sink, parse_log_to

if TYPE_CHECKING:
    from stepsplit.analyzer.analysis import RoleAnalysis
    from stepsplit.analyzer.diagnose.hang.result import Hang
    from stepsplit.analyzer.readers.workers import Workers
    from stepsplit.analyzer.report.report import WarningRow
    from stepsplit.analyzer.trace import Note


# stepsplit analyze: reads a recording; prints the report, writes report.json and tables/.


@click.command()
@places_argument
@build_json_option("Write report.json here; - for standard output.")
@build_path_option("--out", metavar="DIR", help="Write report.json and tables/ into this folder.")
@build_path_option(
    "--html", "html_file", metavar="FILE", help="Write the report as a self-contained HTML page."
)
@workers_option
@click.option("--scheduler", metavar="URL",
              help="Read on the workers of this Dask scheduler: tls://HOST:PORT, or "
                   "tcp://127.0.0.1:PORT. They read the same paths.")  # fmt: skip
@click.option("--job", metavar="FILE",
              help="Compare with the model of this job.toml, which only needs what cannot be "
                   "inferred from the recording; auto: infer everything.")  # fmt: skip
@build_path_option(
    "--write-job",
    "job_out",
    metavar="FILE",
    help="Write what can be inferred of the job.toml; what cannot is named.",
)
@click.option("--mesh", "mesh_text", metavar="AXES",
              help="The job's mesh, outermost axis first, such as pp=2,dp=2,tp=2; by default from "
                   "run.json, else inferred. A contradiction is a warning.")  # fmt: skip
@click.option("--parts", "all_parts", is_flag=True,
              help="Also print the parts of the model by layer, and the kernels.")  # fmt: skip
@build_log_option("Also log the median step to this tool; may be repeated.")
@rules_option
def analyze_command(
    places: tuple[str, ...],
    json_file: str | None,
    out: Path | None,
    html_file: Path | None,
    workers: int | None,
    scheduler: str | None,
    job: str | None,
    job_out: Path | None,
    mesh_text: str | None,
    all_parts: bool,
    log_to: tuple[str, ...],
    rules_file: Path | None,
) -> None:
    """Split each step into compute, communication, bubble and idle.

    PATH is a file, folder, zip or tar archive, or URL with traces of torch.profiler, or of Nsight
    Systems exported to SQLite. Several paths together are one recording. If there are only Flight
    Recorder dumps, prints the diagnosis of the hang instead; of the folder of a watch, where all of
    the job's wall clock went; of a job of several roles (record --role), what each did in a step.
    """
    from stepsplit.analyzer.allocator import reuse_freed_memory
    from stepsplit.analyzer.analysis import Analysis, RoleAnalysis, examine_roles_or_run
    from stepsplit.analyzer.report.io import save, to_json
    from stepsplit.analyzer.watch.span_folders import describe_ledger_beside, is_span_folder
    from stepsplit.collectors.formats.file_names import is_watch
    from stepsplit.dashboard.reporters.progress import show_reading_bar
    from stepsplit.dashboard.reporters.terminal import build_report_screen

    reuse_freed_memory()
    if any(is_watch(place) or is_span_folder(place) for place in places):
        if len(places) > 1:
            raise UsageError("name the folder of a watch alone")
        given = {
            "--html": html_file, "--workers": workers, "--scheduler": scheduler, "--job": job,
            "--write-job": job_out, "--mesh": mesh_text, "--parts": all_parts or None,
            "--log-to": log_to or None, "--rules": rules_file,
        }  # fmt: skip
        if useless := [name for name, value in given.items() if value is not None]:
            raise UsageError(
                f"{', '.join(useless)}: not for the folder of a watch; analyze one of its samples"
            )
        _show_ledger(places[0], json_file, out)
        return
    if html_file is not None:
        require_package("dash", "dashboard")
    rules, mesh = load_rules(rules_file), parse_mesh(mesh_text)
    sinks = [open_sink(name) for name in parse_log_to(log_to)]
    if workers is not None and scheduler is not None:
        raise UsageError("--workers is for this machine; leave it out with --scheduler")
    with _choose_workers(workers, scheduler) as chosen, show_reading_bar() as progress:
        analysis = examine_roles_or_run(
            places, chosen, progress, rules, job, mesh, job_out is not None
        )
    for hint in filter(None, map(describe_ledger_beside, places)):
        print_line(hint, err=True)
    if isinstance(analysis, RoleAnalysis):
        given = {
            "--job": job, "--write-job": job_out, "--mesh": mesh_text,
            "--parts": all_parts or None, "--log-to": log_to or None,
        }  # fmt: skip
        if useless := [name for name, value in given.items() if value is not None]:
            raise UsageError(
                f"{', '.join(useless)}: for one role, such as: {analysis.job.roles[0].command}"
            )
        if html_file is not None:
            from stepsplit.dashboard.web.html_export import export_roles_html

            text = export_roles_html(analysis.job.run, analysis.job)
            write_output(html_file, text.encode())
        _show_roles(analysis, json_file, out)
        return
    if not isinstance(analysis, Analysis):
        _show_hang(analysis, json_file, out)
        return
    if out is not None:
        save(out, analysis.report, analysis.tables)
    if html_file is not None:
        from stepsplit.dashboard.pages.components import View
        from stepsplit.dashboard.web.html_export import export_html

        view = View(analysis.report.run.name, analysis.report, analysis.tables)
        write_output(html_file, export_html(view).encode())
    if not put_json(analysis.report, to_json, json_file):
        make_console().print(build_report_screen(analysis.report, all_parts))
    draft = analysis.job_draft
    if job_out is not None and draft is not None:
        write_output(job_out, draft.text.encode())
        needed = f"fill in {' and '.join(draft.missing)}, then " if draft.missing else ""
        without_shapes = draft.missing and not draft.has_shapes
        hint = "; a recording with --shapes gives most of them" if without_shapes else ""
        print_line(f"{job_out}: {needed}pass it with --job{hint}", err=True)
    log_report(sinks, analysis.report)


def _show_roles(analysis: RoleAnalysis, json_file: str | None, out: Path | None) -> None:
    """Prints what each role of a job did in its RL steps; out has the report of each role too."""
    from stepsplit.analyzer.report.io import save
    from stepsplit.analyzer.report.roles import ROLES_NAME, roles_to_json
    from stepsplit.dashboard.reporters.roles import build_roles_screen

    if out is not None:
        for role, one in analysis.analyses.items():
            save(out / role, one.report, one.tables)
        write_output(out / ROLES_NAME, roles_to_json(analysis.job))
    if not put_json(analysis.job, roles_to_json, json_file):
        make_console().print(build_roles_screen(analysis.job))


def _show_ledger(place: str, json_file: str | None, out: Path | None) -> None:
    """Prints where the wall clock of a watched job went, or writes ledger.json."""
    from stepsplit.analyzer.report.ledger import LEDGER_NAME, ledger_to_json
    from stepsplit.analyzer.watch.ledger import read_ledger
    from stepsplit.collectors.formats.watch_notes import SAMPLES
    from stepsplit.dashboard.reporters.ledger import build_ledger_screen

    ledger = read_ledger(place)
    if out is not None:
        write_output(out / LEDGER_NAME, ledger_to_json(ledger))
    if put_json(ledger, ledger_to_json, json_file):
        return
    # The newest samples are ordinary recordings.
    folders = [one for one in (Path(place) / SAMPLES).glob("*") if any(one.glob("rank*_trace*"))]
    hint = ""
    if folders:
        newest = max(folders, key=lambda one: one.stat().st_mtime_ns)
        hint = f"{len(folders)} samples of steps; the newest: stepsplit analyze {newest}"
    make_console().print(build_ledger_screen(ledger, hint))


@contextmanager
def _choose_workers(workers: int | None, scheduler: str | None) -> Iterator[Workers]:
    """The processes on this machine, or the workers of a scheduler while the context is open."""
    if scheduler is None:
        yield workers or count_cores()
        return
    from stepsplit.analyzer.readers.dask_cluster import connect

    with connect(scheduler) as cluster:
        yield cluster


def _show_hang(
    hang: Hang, json_file: str | None, out: Path | None, soft_wrap: bool = False
) -> None:
    """Prints the diagnosis of a hang, or writes hang.json."""
    from stepsplit.analyzer.diagnose.hang.result import HANG_NAME, to_json
    from stepsplit.dashboard.reporters.hang import build_hang_screen

    if out is not None:
        write_output(out / HANG_NAME, to_json(hang))
    if not put_json(hang, to_json, json_file):
        make_console(soft_wrap).print(build_hang_screen(hang))


# stepsplit hang: where a running job, a recording or a folder of dumps hangs.

STUCK_STATUS = 1


@click.command()
@click.argument("target", required=False, metavar="[TARGET]")
@build_json_option("Write hang.json here; - for standard output.")
@build_path_option(
    "--out", metavar="DIR", help="Keep what the ranks answer, and hang.json, in this folder."
)
@click.pass_context
def hang_command(
    context: click.Context, target: str | None, json_file: str | None, out: Path | None
) -> None:
    """Say which rank a hanging job waits for, and what it does.

    TARGET is a process of a running job (a rank or its launcher), a recording, or a folder with
    Flight Recorder dumps. A running job answers through the agents of `stepsplit record`, with the
    Python stacks of its ranks; nothing in it is stopped or changed. If a recorded job still runs,
    its ranks are asked too. Without TARGET the only job with an agent on this host is asked. The
    exit status is 1 if the job is stuck.
    """
    from stepsplit.analyzer.diagnose.hang.find import read_calls, read_spec
    from stepsplit.analyzer.diagnose.hang.result import STUCK
    from stepsplit.collectors.attach.jobs import find_running_rank

    if target is None or (target.isdigit() and not Path(target).exists()):
        hang = examine_job(None if target is None else int(target), out)
    else:
        # A recorded job may still run on this host; then its ranks know more than its files.
        spec = read_spec([target])
        pid = None if spec is None else find_running_rank(spec)
        hang = read_calls([target]) if pid is None else examine_job(pid, out)
    _show_hang(hang, json_file, out, soft_wrap=True)
    context.exit(STUCK_STATUS if hang.condition == STUCK else 0)


def examine_job(pid: int | None, out: Path | None) -> Hang:
    """Asks the ranks of a running job and examines their answers. Raises StepsplitError."""
    from stepsplit.analyzer.diagnose.hang.find import read_calls
    from stepsplit.collectors.attach.observe import observe_job
    from stepsplit.collectors.guard import CollectError

    with tempfile.TemporaryDirectory(prefix="stepsplit-hang-") as temporary:
        folder = Path(temporary) if out is None else out
        try:
            observe_job(pid, folder)
        except CollectError as error:
            raise StepsplitError(str(error)) from None
        return read_calls([folder])


# stepsplit export: writes a recording, or a saved analysis of it, for another tool.


@click.command()
@places_argument
@click.option("--perfetto", "file", required=True, metavar="FILE",
              type=click.Path(path_type=Path, dir_okay=False),
              help="Write a trace for ui.perfetto.dev; gzipped if FILE ends in .gz.")  # fmt: skip
@workers_option
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
    from stepsplit.analyzer.analysis import Analysis, examine
    from stepsplit.analyzer.report.io import TABLES_NAME, is_analyzed, load_tables, read_report
    from stepsplit.collectors.safe_io.atomic_file import SHARED, whole_file
    from stepsplit.dashboard.reporters.perfetto import perfetto_trace
    from stepsplit.dashboard.reporters.progress import show_reading_bar

    folder, is_single = Path(places[0]), len(places) == 1 and rules_file is None
    tables = folder / TABLES_NAME
    if is_single and is_analyzed(folder) and tables.is_dir():
        analysis = Analysis(read_report(folder), load_tables(tables))
    else:
        rules = load_rules(rules_file)
        with show_reading_bar() as progress:
            analysis = examine(places, workers or count_cores(), progress, rules)
    check_output(file)
    chunks = perfetto_trace(analysis.report, analysis.tables)
    try:
        with whole_file(file, SHARED) as draft:
            if file.suffix == ".gz":
                # Without name and time: the same recording gives the same bytes.
                with gzip.GzipFile("", "wb", 6, draft, mtime=0) as packed:
                    packed.writelines(chunks)
            else:
                draft.writelines(chunks)
    except OSError as error:
        raise make_write_error(file, error) from None
    _warn_of_skipped(analysis.report.warnings)
    print_line(f"{file}: open it at https://ui.perfetto.dev")


def _warn_of_skipped(notes: Iterable[Note | WarningRow]) -> None:
    from stepsplit.analyzer.readers.recording_files import SKIPPED

    for note in notes:
        if note.code == SKIPPED:
            print_line(f"stepsplit: not read: {note.message}", err=True)


# stepsplit reduce: the table of each rank in place of its trace.


@click.command()
@places_argument
@click.option("--out", required=True, metavar="DIR", type=click.Path(path_type=Path),
              help="Folder of the tables; several hosts may share it.")  # fmt: skip
@workers_option
def reduce_command(places: tuple[str, ...], out: Path, workers: int | None) -> None:
    """Write the small tables of each rank that analyze takes for its trace.

    PATH is as for analyze. Run it on each host that has traces of its ranks: only the tables
    travel, and analyze makes of them the report that it makes of the traces.
    """
    from stepsplit.analyzer import units
    from stepsplit.analyzer.readers.reduction import reduce_recording
    from stepsplit.dashboard.reporters.progress import show_reading_bar

    with show_reading_bar() as progress:
        done = reduce_recording(places, out, workers or count_cores(), progress)
    _warn_of_skipped(done.skipped)
    raw, table = units.format_size(done.raw_bytes), units.format_size(done.table_bytes)
    print_line(f"{out}: tables of {len(done.ranks)} ranks, {table} ({raw} of traces)")


# stepsplit redact: a copy of a recording that can be passed on.


@click.command()
@places_argument
@click.option("--out", required=True, metavar="DIR", type=click.Path(path_type=Path),
              help="Folder of the copy; empty or missing.")  # fmt: skip
@click.option("--names", is_flag=True, hidden=True, expose_value=False)  # always so
@click.option("--word", "words", metavar="WORD", multiple=True,
              help="Also replace names that contain this word; may be repeated.")  # fmt: skip
@build_path_option(
    "--key", metavar="FILE", help="Write what was replaced here; only you can read it."
)
@rules_option
def redact_command(
    places: tuple[str, ...],
    out: Path,
    words: tuple[str, ...],
    key: Path | None,
    rules_file: Path | None,
) -> None:
    """Copy a recording without hosts, users, paths and names.

    PATH is as for analyze. Times, structure, counts, sizes and groups are kept, so that the copy
    gives the same split. Of texts only those on a list stay, such as the names of torch's ops; any
    other gets one pseudonym in all files (host1). Prints what was replaced, and what was left out.
    """
    from stepsplit.analyzer.redact import redact_recording

    rules = load_rules(rules_file)
    done = redact_recording(places, out, words=words, key=key, rules=rules)
    print_line(f"{out}: {len(done.files)} files")
    for row in done.replaced:
        print_line(f"replaced {row.field}: {row.distinct:,} in {row.places:,} places")
    for place, reason in done.left_out:
        print_line(f"left out {place}: {reason}")
