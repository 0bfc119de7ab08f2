"""A redacted copy of the files of a recording, in a folder that appears whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stepsplit.analyzer.errors import DataError, UsageError, make_write_error
from stepsplit.analyzer.readers.compression import list_files
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.reduction import check_outside
from stepsplit.analyzer.redact.copies import COPIES
from stepsplit.analyzer.redact.file_names import plan_copies
from stepsplit.analyzer.redact.forms import Texts
from stepsplit.analyzer.redact.names import Names
from stepsplit.analyzer.redact.pseudonyms import Pseudonyms, Replacement
from stepsplit.collectors.formats.run_spec import RUN_FILE

KEY_SCHEMA = "stepsplit.key/1"


@dataclass(frozen=True, slots=True)
class Redaction:
    """The result of `redact_recording`.

    files are the written paths below the output folder. left_out are the files that were not
    copied, or not whole, with the reason. replaced counts what was replaced, by field.
    """

    files: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    replaced: tuple[Replacement, ...]


def redact_recording(
    places: Sequence[str | Path],
    out: Path,
    *,
    words: Sequence[str] = (),
    key: Path | None = None,
    rules: Rules = BUILT_IN,
) -> Redaction:
    """Writes a redacted copy of the recording in the files, folders, archives and URLs.

    Kept: times, structure, counts, sizes, correlations and groups, so that the copy has the same
    split. Files of other kinds than traces, run.json, rank records, Flight Recorder dumps, NCCL
    logs and job.toml are left out.

    Args:
        places: As for `analyze`.
        out: Folder of the copy; must be empty or missing.
        words: Texts that make a name private even if it is made of public words. Default: ().
        key: File for the replaced texts, readable by its owner only. Default: None, not written.
        rules: Rules that classify the replaced kernels. Default: the built-in rules.

    Returns:
        What was written, left out and replaced.

    Raises:
        DataError: A place is missing, a file is damaged, or there is nothing to redact.
        UsageError: `out` has files, the key exists or is in `out`, or either cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: not an empty folder; choose another one")
    if key is not None:
        # Links resolved: the key would travel with the copy.
        if Path(os.path.realpath(out)) in Path(os.path.realpath(key)).parents:
            raise UsageError(f"{key}: the key would be in the redacted copy; choose another folder")
        if key.exists():
            raise UsageError(f"{key}: exists already; choose another file")
    check_outside(out, places)
    pseudonyms = Pseudonyms()
    texts = Texts(pseudonyms, Names(pseudonyms, rules, tuple(words)))
    with list_files([str(place) for place in places]) as sources, whole_folder(out) as draft:
        planned, left_out = plan_copies(sources, [Path(place) for place in places])
        for one in planned:
            dropped = COPIES[one.kind.redact_as].write(one.source, draft / one.name, texts)
            if dropped:
                left_out.append((one.source.where, f"{dropped:,} lines that are no known message"))
        if not planned:
            hint = "name a folder with traces of torch.profiler"
            raise DataError(str(places[0]), "no file of a recording", hint)
    if key is not None:
        _write_key(key, pseudonyms)
    files = tuple(one.name for one in planned)
    return Redaction(files, tuple(left_out), pseudonyms.summarize())


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A draft of the folder, which takes its place at the end and is removed if an error or Ctrl-C
    comes before; in a folder that exists already its files do. Raises UsageError if it cannot be
    made."""
    place = Path(os.path.realpath(out))
    if place.is_symlink():  # it leads to itself
        raise make_write_error(out, OSError(errno.ELOOP, os.strerror(errno.ELOOP)))
    exists = place.is_dir()
    draft = (place if exists else place.parent) / f".{place.name}.{os.getpid()}"
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise make_write_error(out, error) from None
    try:
        yield draft
        if exists:
            for path in sorted(draft.iterdir(), key=lambda path: path.name == RUN_FILE):
                path.replace(place / path.name)
        else:
            draft.replace(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_key(key: Path, pseudonyms: Pseudonyms) -> None:
    """Writes pseudonym -> text, by field, to a new file that only its owner can read."""
    body = {"schema": KEY_SCHEMA, "texts": pseudonyms.invert()}
    try:
        descriptor = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            # In ASCII, because a text of a damaged file may be none of UTF-8.
            json.dump(body, file, indent=1)
            file.write("\n")
    except OSError as error:
        raise make_write_error(key, error) from None
