"""What the analyzer makes of an upload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stepsplit.analyzer.analysis import Analysis, examine, examine_as_told
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.config_table import read_table
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN
from stepsplit.analyzer.readers.workers import Progress

RUN_FILE = "run.toml"
AnalysisOf = Callable[[Path, Progress], Analysis]


def analysis_of(folder: Path, progress: Progress) -> Analysis:
    """The analysis of the uploaded folder, held against the model where what ran is known: by a
    run.toml in it, or by the recording itself. Raises StepsplitError."""
    stated = _run_file(folder)
    if stated is None:
        return examine_as_told([folder], 1, progress)
    _check_places(stated, folder)
    return examine([folder], 1, progress, BUILT_IN, stated)


def _run_file(folder: Path) -> Path | None:
    """The run.toml nearest to the top, None without one."""
    found = sorted(folder.rglob(RUN_FILE), key=lambda path: (len(path.parts), path))
    return found[0] if found else None


def _check_places(run_file: Path, folder: Path) -> None:
    """An upload names files of its own, never the server's. Raises DataError."""
    hardware = read_table(run_file).table("hardware", None)
    if hardware is None:
        return
    file, root = hardware.text("file", None), folder.resolve()
    for name in (*hardware.texts("measured", ()), *(() if file is None else (file,))):
        if not (run_file.parent / name).resolve().is_relative_to(root):
            problem = f"names {name}, which is not in the upload"
            raise DataError(run_file, problem, "upload that file too, and name it from here")
