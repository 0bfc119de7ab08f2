"""Which folders have span logs, found before anything that reads them is imported."""

from __future__ import annotations

from pathlib import Path

from stepsplit.analyzer.readers.file_kinds import FileRole
from stepsplit.analyzer.readers.recording_files import open_recording
from stepsplit.analyzer.watch.span_log_files import list_span_logs


def find_span_logs(place: str | Path) -> list[Path]:
    """The span logs of the folder; none if the place is no folder."""
    folder = Path(place)
    if not folder.is_dir() or not (paths := list_span_logs(folder)):
        return []
    # Few folders come here, and what reads span logs takes a thirtieth of a small analysis to load.
    from stepsplit.analyzer.watch.span_logs import find_span_source

    return [path for path in paths if find_span_source(path)]


def is_span_folder(place: str | Path) -> bool:
    """Whether the folder has a span log, and nothing of a recording: no trace and no dump, be it
    damaged. Raises DataError if an archive in it is."""
    logs = find_span_logs(place)
    if not logs:
        return False
    with open_recording([place]) as files:
        known = {str(log) for log in logs}
        is_torn = any(source.where not in known for source in files.skipped)
        has_traces = any(map(files.list_kinds, (FileRole.TRACE, FileRole.FLIGHT)))
    return not is_torn and not has_traces


def describe_ledger_beside(place: str | Path) -> str:
    """Where the ledger of the span logs is had that lie beside the traces of a folder; "" if there
    are none."""
    logs = find_span_logs(place)
    if not logs:
        return ""
    where = next((log.parent for log in logs if log.parent != Path(place)), None)
    how = f"stepsplit analyze {where}" if where else "move them to a folder of their own"
    return f"{place} also has span logs; for the ledger of their job: {how}"
