"""One analysis: from uploaded files to a report."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from msgspec import structs
from sqlalchemy.exc import SQLAlchemyError

from stepsplit.analyzer.analysis import Analysis, RoleAnalysis, examine_with_inferred_job
from stepsplit.analyzer.diagnose.hang.result import HANG_NAME, Hang, to_json as hang_to_json
from stepsplit.analyzer.errors import DataError, StepsplitError
from stepsplit.analyzer.readers.workers import Progress
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.roles import ROLES_NAME, RoleJob, roles_to_json
from stepsplit.collectors.formats.run_spec import MESH_FILE, Mesh
from stepsplit.collectors.safe_io.regular_file import read_regular
from stepsplit.dashboard.store.analysis_queue import AnalysisJob
from stepsplit.dashboard.store.artifacts import INPUT_NAME
from stepsplit.dashboard.store.job_files import (
    JOB_BYTES,
    JOB_FILE,
    check_named_files,
    complete_job,
    find_job_file,
    list_unused_files,
)
from stepsplit.dashboard.store.store import Store

AnalyzeFunction = Callable[[Path, Progress], Analysis | Hang | RoleAnalysis]

_LOG = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 1.0

_READING_SHARE = 0.9
"""Share of the progress for reading; the rest cannot be subdivided."""


def analyze_upload(folder: Path, progress: Progress) -> Analysis | Hang | RoleAnalysis:
    """Analyzes the uploaded folder, with a model comparison if the config is known from a job.toml
    in it or from the recording, and with the mesh that a mesh.txt in it states. Of Flight Recorder
    dumps without traces it is the state of their calls, and of several roles what each does, for
    which job.toml and mesh.txt are not used. Raises StepsplitError."""
    job_file, mesh = find_job_file(folder), read_mesh_file(folder)
    if job_file is not None:
        check_named_files(job_file, folder)
    made = examine_with_inferred_job([folder], 1, progress, mesh, job_file)
    if isinstance(made, Hang):
        return made
    if isinstance(made, RoleAnalysis):
        given = {MESH_FILE: mesh, JOB_FILE: job_file}
        lacks = [
            f"what {name} says: it is of one program; upload the folder of a role with it"
            for name, content in given.items()
            if content is not None
        ]
        return structs.replace(made, job=structs.replace(made.job, lacks=(*made.job.lacks, *lacks)))
    warnings = (*made.report.warnings, *list_unused_files(folder, job_file))
    draft = made.job_draft
    if draft is not None and job_file is not None:
        text = complete_job(job_file.read_bytes(), draft.text.encode())
        draft = replace(draft, text=text.decode())
    return structs.replace(
        made, report=structs.replace(made.report, warnings=warnings), job_draft=draft
    )


def process_job(store: Store, job: AnalysisJob, analyze: AnalyzeFunction) -> str:
    """Runs the job. Returns "done", "failed", or "lost" if the run was deleted or another worker
    has taken the job. Raises SQLAlchemyError if the database is unavailable."""
    try:
        uploads = store.artifacts.fetch_uploads(job.run_id)

        def notify(share: float, note: str) -> None:
            with suppress(SQLAlchemyError):
                store.jobs.record_progress(job, share, note)

        analysis = analyze(uploads, throttle_progress(notify))
        result: Report | Hang | RoleJob
        if isinstance(analysis, Hang):
            result = analysis
            # Its texts name no file by its path.
            store.artifacts.save_file(job.run_id, HANG_NAME, hang_to_json(analysis))
        elif isinstance(analysis, RoleAnalysis):
            result = _save_roles(store, job, analysis)
        else:
            result = _save_analysis(store, job, job.run_id, analysis)
        is_owner = store.jobs.complete(job, result)
        outcome = "done"
    except StepsplitError as error:
        # The job.toml of a run that cannot be analyzed, so that its form can correct it.
        with suppress(StepsplitError, OSError):
            job_file = find_job_file(store.artifacts.fetch_uploads(job.run_id))
            if job_file is not None and job_file.stat().st_size <= JOB_BYTES:
                store.artifacts.save_file(job.run_id, JOB_FILE, job_file.read_bytes())
        is_owner = store.jobs.fail(job, _strip_folder(store, job, str(error)))
        outcome = "failed"
    except SQLAlchemyError:
        raise
    except Exception as error:  # noqa: BLE001 - shown to the uploader; details are in the log
        # A bug in stepsplit: without this the page would show "running" forever.
        _LOG.exception("the analysis of run %s crashed", job.run_id)
        message = f"internal error: {type(error).__name__}; see the worker's log"
        is_owner = store.jobs.fail(job, message)
        outcome = "failed"
    clean_up(store, job, is_owner)
    return outcome if is_owner else "lost"


def _save_roles(store: Store, job: AnalysisJob, analysis: RoleAnalysis) -> RoleJob:
    """Saves what all roles do, and the report of each by its number; names files as they were
    uploaded."""
    roles = []
    for number, role in enumerate(analysis.job.roles):
        _save_analysis(store, job, f"{job.run_id}.{number}", analysis.analyses[role.name])
        place, archive = (_strip_folder(store, job, one) for one in (role.place, role.archive))
        roles.append(structs.replace(role, place=place, archive=archive))
    lacks = tuple(_strip_folder(store, job, lack) for lack in analysis.job.lacks)
    whole = structs.replace(analysis.job, roles=tuple(roles), lacks=lacks)
    # The last file: where it is, all reports that it leads to are complete.
    store.artifacts.save_file(job.run_id, ROLES_NAME, roles_to_json(whole))
    return whole


def _save_analysis(store: Store, job: AnalysisJob, run_id: str, analysis: Analysis) -> Report:
    """Saves the report of the job's run or of one of its roles, with warnings and caveats that name
    files as they were uploaded, and returns it."""
    warnings = tuple(
        structs.replace(one, message=_strip_folder(store, job, one.message))
        for one in analysis.report.warnings
    )
    gap = analysis.report.gap
    if gap is not None:
        gap = structs.replace(gap, notes=tuple(_strip_folder(store, job, n) for n in gap.notes))
    report = structs.replace(analysis.report, warnings=warnings, gap=gap)
    store.artifacts.save(run_id, report, analysis.tables)
    if analysis.job_draft is not None:
        store.artifacts.save_file(run_id, JOB_FILE, analysis.job_draft.text.encode())
    return report


def throttle_progress(
    notify: Callable[[float, str], object], now: Callable[[], float] = time.monotonic
) -> Progress:
    """A progress callback (bytes done, total bytes) that forwards at most once per second."""
    last = -_PROGRESS_INTERVAL_S

    def report_progress(done_bytes: int, all_bytes: int) -> None:
        nonlocal last
        at = now()
        finished = done_bytes >= all_bytes
        if finished or at - last >= _PROGRESS_INTERVAL_S:
            last = at
            note = "splitting steps" if finished else "reading"
            notify(_READING_SHARE * done_bytes / max(all_bytes, 1), note)

    return report_progress


def _strip_folder(store: Store, job: AnalysisJob, message: str) -> str:
    # The uploader knows the files by their upload names, without the server's folder.
    folder = str(store.artifacts.find_folder(job.run_id) / INPUT_NAME)
    return message.replace(f"{folder}/", "").replace(folder, "the upload")


def clean_up(store: Store, job: AnalysisJob, is_owner: bool) -> None:
    """Drops what an analysis leaves; all files of a run that was deleted meanwhile."""
    store.artifacts.drop_uploads(job.run_id)
    if not is_owner and store.find_run(job.run_id) is None:
        store.artifacts.remove(job.run_id)


def read_mesh_file(folder: Path) -> Mesh | None:
    """The mesh in the folder's mesh.txt, such as pp=2,dp=2,tp=2; None without it. Raises
    DataError."""
    path = folder / MESH_FILE
    try:
        return Mesh.parse(read_regular(path).decode().strip())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(path, str(error), "upload it again, or without the mesh") from None
