"""Brings the folders of several hosts together: one recording, with a run.json of all ranks."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepsplit.collectors.errors import CollectError
from stepsplit.collectors.rank_record import RankRecord, read_record, spec_of
from stepsplit.collectors.run_spec import RunSpec, from_json, replace_whole, write_run_json


@dataclass(frozen=True, slots=True)
class Gathered:
    """What lies together now; missing are ranks of the job that left no record."""

    out: Path
    ranks: tuple[int, ...]
    missing: tuple[int, ...]


def gather(folders: Sequence[Path], out: Path) -> Gathered:
    """Copies the files of all folders into `out`, and writes run.json from the ranks' records.

    Raises CollectError where a folder is missing, none has a record, or two hold different files of
    one name: those are of different runs.
    """
    for folder in folders:
        if not folder.is_dir():
            raise CollectError(f"{folder}: no such folder: name those that the ranks wrote")
    for folder in folders:
        if folder.resolve() != out.resolve():
            _copy(folder, out)
    records = _records(out)
    if not records:
        raise CollectError(f"{out}: no rank*_record.json: name the folders that the ranks wrote")
    write_run_json(out, spec_of(records, _spec_in(out)))
    ranks = tuple(record.rank.rank for record in records)
    return Gathered(out, ranks, tuple(sorted(set(range(records[0].world_size)) - set(ranks))))


def _records(folder: Path) -> tuple[RankRecord, ...]:
    """The records of the folder's ranks, by rank. Raises CollectError for one that is none."""
    found = []
    for path in folder.glob("rank*_record.json"):
        try:
            found.append(read_record(path.read_bytes()))
        except ValueError as error:
            raise CollectError(f"{path}: {error}: leave it out") from None
    return tuple(sorted(found, key=lambda record: record.rank.rank))


def _copy(folder: Path, out: Path) -> None:
    for path in _files(folder):
        there = out / path.relative_to(folder)
        if there.name == "run.json" and there.exists():
            continue
        if there.exists() and not filecmp.cmp(path, there, shallow=False):
            raise CollectError(f"{there} is there, and {path} differs: are they of one run?")
        if not there.exists():
            with replace_whole(there) as draft:
                shutil.copy2(path, draft)


def _files(folder: Path) -> Iterable[Path]:
    every = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return (path for path in every if not path.name.startswith("."))


def _spec_in(folder: Path) -> RunSpec | None:
    try:
        return from_json((folder / "run.json").read_bytes())
    except (OSError, ValueError):
        return None
