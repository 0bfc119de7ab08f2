"""Merges the folders of several hosts into one recording, with a run.json of all ranks."""

from __future__ import annotations

import contextlib
import filecmp
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepsplit.collectors.formats.rank_record import build_spec, read_record
from stepsplit.collectors.formats.run_spec import RUN_FILE, RunSpec, from_json, write_run_json
from stepsplit.collectors.guard import CollectError, warn
from stepsplit.collectors.safe_io.atomic_file import replace_whole
from stepsplit.collectors.safe_io.regular_file import leads_outside, read_regular


@dataclass(frozen=True, slots=True)
class GatherResult:
    """The merged recording; missing: ranks of the job without a record."""

    out: Path
    ranks: tuple[int, ...]
    missing: tuple[int, ...]


def gather(folders: Sequence[Path], out: Path) -> GatherResult:
    """Copies the files of all folders to `out` and writes run.json from the ranks' records.

    Raises CollectError if a folder is missing, no folder has a record, two folders have different
    files of the same name, which means that they belong to different runs, or `out` cannot be
    written; then what was copied is removed.
    """
    for folder in folders:
        if not folder.is_dir():
            raise CollectError(f"{folder}: no such folder; give the folders that the ranks wrote")
    copies = _plan_copies([one for one in folders if one.resolve() != out.resolve()], out)
    new = [
        source
        for target, source in copies.items()
        if target.parent == out and target.match(_RECORDS)
    ]
    records = []
    for path in (*out.glob(_RECORDS), *new):
        try:
            records.append(read_record(read_regular(path)))
        except ValueError as error:
            raise CollectError(f"{path}: {error}; remove it") from None
    records.sort(key=lambda record: record.rank.rank)
    if not records:
        raise CollectError(f"{out}: no {_RECORDS}; give the folders that the ranks wrote")
    try:
        for target, source in copies.items():
            with replace_whole(target) as draft:
                shutil.copy2(source, draft)
        write_run_json(out, build_spec(records, _read_spec(out)))
    except OSError as error:
        _remove_copies(copies, out)
        raise CollectError(f"{out}: {error.strerror}; nothing is left there") from None
    ranks = tuple(record.rank.rank for record in records)
    return GatherResult(out, ranks, tuple(sorted(set(range(records[0].world_size)) - set(ranks))))


def list_files(folder: Path) -> Iterable[Path]:
    """The files of a recording that are copied with it: no hidden drafts, no links that lead out of
    the folder, which are named in a warning."""
    for path in sorted(folder.rglob("*")):
        if leads_outside(path, folder):
            warn(f"{path} is not copied: it is a link out of the folder")
        elif path.is_file() and not path.name.startswith("."):
            yield path


def _remove_copies(targets: Iterable[Path], out: Path) -> None:
    """Removes these files, and the folders that are empty without them."""
    folders = {out}
    for target in targets:
        target.unlink(missing_ok=True)
        folders |= {each for each in target.parents if each.is_relative_to(out)}
    for folder in sorted(folders, key=lambda each: -len(each.parts)):
        with contextlib.suppress(OSError):
            folder.rmdir()


_RECORDS = "rank*_record.json"


def _plan_copies(folders: Iterable[Path], out: Path) -> dict[Path, Path]:
    """The file in `out` -> its source. Raises CollectError before anything is copied if two files
    of the same name differ."""
    copies: dict[Path, Path] = {}
    for folder in folders:
        for path in list_files(folder):
            target = out / path.relative_to(folder)
            known = copies.get(target, target)
            if not known.exists():
                copies[target] = path
            # Each host has a run.json of what it knew; that of all is made from the records.
            elif target.name != RUN_FILE and not filecmp.cmp(path, known, shallow=False):
                raise CollectError(
                    f"{known} exists and {path} differs from it; are they from the same run?"
                )
    return copies


def _read_spec(folder: Path) -> RunSpec | None:
    try:
        return from_json(read_regular(folder / RUN_FILE))
    except (OSError, ValueError):
        return None
