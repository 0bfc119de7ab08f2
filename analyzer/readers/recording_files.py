"""The files of a recording by kind: those in the places that the user named."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers import file_kinds
from stepsplit.analyzer.readers.compression import is_url, list_files, open_unpacked
from stepsplit.analyzer.readers.file_kinds import FileKind, FileRole, Unreadable, find_kinds
from stepsplit.analyzer.readers.rank_traces import parse_rank
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import Note

SKIPPED = "file_skipped"

_NAME_A_TRACE = "name a torch.profiler trace"


class RecordingFiles(Struct, frozen=True):
    """The files of a recording by kind.

    places are those that were searched. others are files that are no part of a recording. refused
    are the errors of named files, notes those of other files: skipped, in the same order.
    """

    places: tuple[str, ...]
    by_kind: Mapping[FileKind[Any], Sequence[Source]]
    others: tuple[Source, ...]
    refused: tuple[DataError, ...]
    notes: tuple[Note, ...]
    skipped: tuple[Source, ...] = ()

    def list_files(self, role: FileRole) -> list[tuple[FileKind[Any], Source]]:
        """The files of this role, by kind and in order."""
        return [(kind, source) for kind in self.list_kinds(role) for source in self.by_kind[kind]]

    def list_kinds(self, role: FileRole) -> list[FileKind[Any]]:
        """The kinds of this role of which there are files."""
        return [kind for kind in file_kinds.KINDS if kind.role is role and kind in self.by_kind]

    def read_files(self, role: FileRole) -> tuple[list[Any], list[Note]]:
        """The contents of all files of this role, and notes on those that cannot be read.

        Raises DataError for a file that must be readable.
        """
        contents, notes = [], []
        for kind, source in self.list_files(role):
            try:
                contents.append(kind.read(source))
            except DataError as error:
                notes.append(self.note_unreadable(kind, source, error))
        return contents, notes

    def note_unreadable(self, kind: FileKind[Any], source: Source, error: DataError) -> Note:
        """The note on a file that cannot be read. Raises the error if the file must be readable."""
        is_named = source.where in self.places
        if kind.unreadable is Unreadable.ERROR or (
            kind.unreadable is Unreadable.ERROR_IF_NAMED and is_named
        ):
            raise error
        return _note_skipped(source, error)

    def explain_no_trace(self, notes: Sequence[Note]) -> DataError:
        """The error for places without traces: what they contain instead, or the first problem, or
        what their first file is."""
        kinds = [*_list_other_kinds(self.others)]
        roles = (FileRole.FLIGHT, FileRole.MEMORY)
        kinds += [kind.name for role in roles for kind in self.list_kinds(role)]
        present = f"; found only: {', '.join(kinds)}" if kinds else ""
        reason = f"; {notes[0].message}" if notes else ""
        hint = f"{_NAME_A_TRACE}, or a folder of them"
        others = [file for file in self.others if file.inner.suffix != ".toml"]
        if others and not kinds and not notes:
            # What another profiler has written tells more than a log or a table beside it; and if
            # a path leads to a single unknown file, what it is helps more than that it is no trace.
            foreign = [file for file in others if _find_foreign_format(file) is not None]
            file, rest = (foreign or others)[0], len(others) - 1
            problem, foreign_hint = _explain_unknown_kind(file)
            hint = foreign_hint if foreign else hint
            reason = f"; {file.inner.name}: {problem}" + f", and {rest} more" * bool(rest)
        return DataError(self.places[0], f"no trace found{present}{reason}", hint)


@contextmanager
def open_recording(places: Sequence[str | Path]) -> Iterator[RecordingFiles]:
    """The files in the places by kind, available on disk while the context is open.

    With a named file come the metadata files in its folder. Raises DataError if a place is missing
    or an archive is damaged.
    """
    if not places:
        raise DataError("no path", "nothing to read", "name a trace or the folder of a recording")
    named = tuple(str(place) for place in places)
    patterns = [kind.beside for kind in file_kinds.KINDS if kind.beside is not None]
    neighbors: list[str] = []
    for file in (Path(place) for place in named if not is_url(place)):
        if file.is_file():
            with suppress(OSError):  # a folder that only lets its files be opened
                paths = sorted(file.parent.iterdir())
                neighbors += [
                    str(path) for path in paths if any(one.search(path.name) for one in patterns)
                ]
    with list_files([*named, *neighbors]) as sources:
        yield _sort_by_kind(sources, named)


def _sort_by_kind(sources: Sequence[Source], places: tuple[str, ...]) -> RecordingFiles:
    """Sorts the files by kind. Unknown files are ignored, or are errors if they were named."""
    by_kind: dict[FileKind[Any], list[Source]] = defaultdict(list)
    others: list[Source] = []
    refused, notes, skipped = [], [], []
    present = {source.where for source in sources}
    for source in sources:
        is_named = source.where in places
        if f"{source.where}.gz" in present and not is_named:
            # The recorder removes a raw file only after its packed file is complete.
            continue
        try:
            kinds = find_kinds(source, file_kinds.list_recorded_kinds())
            if not kinds:
                # It should be of a recording if it was named, or is named as a trace, and is of no
                # other known format.
                name = source.inner.name
                has_trace_name = parse_rank(source.inner) is not None or "trace" in name
                is_expected = is_named or (has_trace_name and ".json" in name)
                if is_expected and not _list_other_kinds([source]):
                    raise DataError(source.where, *_explain_unknown_kind(source))
                others.append(source)
        except DataError as error:
            if is_named:
                refused.append(error)
            else:
                notes.append(_note_skipped(source, error))
                skipped.append(source)
            continue
        for kind in kinds:
            by_kind[kind].append(source)
    return RecordingFiles(
        places, dict(by_kind), tuple(others), tuple(refused), tuple(notes), tuple(skipped)
    )


def _note_skipped(source: Source, error: DataError) -> Note:
    return Note(SKIPPED, f"{source.inner.name}: {error.problem}", parse_rank(source.inner))


def _list_other_kinds(sources: Iterable[Source]) -> list[str]:
    """The names of the kinds of files that are no part of a recording, each once."""
    formats = file_kinds.list_formats()
    kinds = (kind for source in sources for kind in find_kinds(source, formats))
    return list(dict.fromkeys(kind.name for kind in kinds))


_JSON = re.compile(
    rb"(?:\{\s*(?:[\"}]|\Z)|\[\s*(?:[\[{\"\]]|-?\d[\d.eE+-]*\s*(?:,|\]?\s*\Z)|true|false|null|\Z))"
)
"""Unlike [rank0]: or [2026-11-29 10:00:01], with which lines of a log begin."""

_LOG = re.compile(
    rb"\[|\d{4}[-/]\d\d[-/]\d\d|\d\d:\d\d:\d\d"
    rb"|(?:TRACE|DEBUG|INFO|WARN|WARNING|ERROR|[IWEF]\d{4} )\b"
)

_WATCHDOG = re.compile(rb"ProcessGroupNCCL\.cpp:\d+\].{0,200}[Ww]atchdog")

_UNREAD_LOG = "a log that is not read: {}"

_DUMP = (
    "stepsplit hang says what it shows; with TORCH_NCCL_DUMP_ON_TIMEOUT=1 pass the dumps of the"
    " Flight Recorder to it"
)


_EXPORT = "export it with nsys export --type sqlite"

_RECORD_WITH_TORCH = (
    "no command converts it; record the job with stepsplit record or torch.profiler, which see"
    " HIP's kernels and RCCL's calls too"
)


class _ForeignFormat(Struct, frozen=True):
    """What another profiler writes and is not read: recognized by the end of the file's name, else
    by its begin."""

    problem: str
    hint: str
    endings: tuple[str, ...] = ()
    begin: re.Pattern[bytes] | None = None


_FOREIGN_FORMATS = (
    _ForeignFormat(
        "an Nsight Systems report, readable only by Nsight Systems",
        _EXPORT,
        endings=(".nsys-rep", ".qdrep"),
    ),
    _ForeignFormat(
        "Arrow tables of Nsight Systems, which are not read",
        "export the report with nsys export --type sqlite",
        endings=("StringIds.arrow",),
    ),
    # Neither names an op, a step or a process group of torch, by which work is split.
    _ForeignFormat(
        "rocprofv3's JSON, without ops, steps and process groups of torch",
        _RECORD_WITH_TORCH,
        begin=re.compile(rb'\{\s*"rocprofiler-sdk-tool"'),
    ),
    _ForeignFormat(
        "rocprofv3's database (rocpd), without ops, steps and process groups of torch",
        _RECORD_WITH_TORCH,
        begin=re.compile(rb"SQLite format 3\0.{0,4000}?\brocpd_", re.S),
    ),
    _ForeignFormat(
        "a Perfetto trace in binary form, which is not read",
        "analyze the torch.profiler trace or the recording that it was made of; what rocprofv3 has"
        " written as .pftrace has no ops of torch: record the job with stepsplit record",
        endings=(".pftrace", ".pftrace.gz", ".perfetto-trace"),
    ),
    _ForeignFormat(
        "an XPlane profile of JAX, TensorFlow or PyTorch/XLA, which is not read",
        "no command converts it: XLA's ops have no process groups and steps of torch; on GPUs"
        " record the program with nsys profile -t cuda,nvtx and analyze its export",
        endings=(".xplane.pb",),
    ),
)


def _find_foreign_format(source: Source) -> _ForeignFormat | None:
    name = source.inner.name
    for format in _FOREIGN_FORMATS:
        if name.endswith(format.endings):
            return format
    with open_unpacked(source) as content:
        head = content.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip()
    begun = (one for one in _FOREIGN_FORMATS if one.begin and one.begin.match(head))
    return next(begun, None)


def _explain_unknown_kind(source: Source) -> tuple[str, str]:
    """Why the file is of no known kind, and the hint."""
    if (foreign := _find_foreign_format(source)) is not None:
        return foreign.problem, foreign.hint
    with open_unpacked(source) as content:
        head = content.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip()
    if content.torn and not head:
        return f"the file is damaged ({content.torn})", RECORD_AGAIN
    if not head:
        return "the file is empty", RECORD_AGAIN
    if _JSON.match(head):
        return "JSON, but not a trace, or cut off before its first event", _NAME_A_TRACE
    if _WATCHDOG.search(head):
        return _UNREAD_LOG.format("lines of the NCCL watchdog"), _DUMP
    if _LOG.match(head):
        return _UNREAD_LOG.format("no training step and no NCCL INFO line"), _NAME_A_TRACE
    # What a clone without git-lfs has in place of each large file.
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself", "fetch it with git lfs pull"
    return "neither JSON nor another supported format", _NAME_A_TRACE
