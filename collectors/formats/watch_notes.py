"""What the ranks of a watched training note in its folder, and how it is read beside them.

ranks/rank0.jsonl   what the rank notes: its start, windows of step times, its samples, its end
ranks/rank0-1.beat  the newest step of the rank in start 1 (from 0), a line that is overwritten
launches/HOST.jsonl when `stepsplit watch` began and ended its command on the host
samples/STEP/       a sample, an ordinary recording of a few steps; STEP-N after N restarts
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepsplit.collectors.formats.file_names import RANKS, list_note_files
from stepsplit.collectors.formats.json_decode import select_known_fields
from stepsplit.collectors.safe_io.atomic_file import PRIVATE, create_private, make_owner_folder
from stepsplit.collectors.safe_io.regular_file import open_regular

SAMPLES, LAUNCHES = "samples", "launches"
"""Folders of the samples and of the commands."""

LONG_STEP = 5
"""A step that takes so many times the median of its window is long: something else is in it."""

WINDOW_STEPS = 20
"""A window is closed after so many steps, or a minute, whichever is first."""

CAPTURE = "capture"
"""A file that requests a sample of all ranks as soon as possible."""

MAX_NOTES_BYTES = 4 << 20
"""Size at which the file of notes becomes rank0.jsonl.old, and the .old one before it is lost."""


@dataclass(frozen=True, slots=True)
class RankStarted:
    """The begin of a watched rank, some steps after that of its process.

    process_unix_ns: when the process began, torch_unix_ns: when torch's optimizers had been
    imported, first_step_unix_ns: when its first step ended; 0 where unknown, as of a job that was
    attached to. steps_before: the steps that earlier processes had done; None if unknown.
    step_descriptor: that of its StepMemory in the process; -1 without one.
    """

    rank: int
    world_size: int
    host: str
    pid: int
    incarnation: int
    budget: float
    unix_ns: int
    process_unix_ns: int = 0
    torch_unix_ns: int = 0
    first_step_unix_ns: int = 0
    steps_before: int | None = None
    step_descriptor: int = -1


@dataclass(frozen=True, slots=True)
class RankWindow:
    """The times of a rank's unprofiled steps between two closings, in ns: 20 steps or a minute.

    Steps of a sample between first_step and last_step are not counted. start_unix_ns is when the
    first step began, end_unix_ns when the last one ended. local_ns: the median over steps of the
    time from the begin to the last gradient of this rank, before it waits for the gradients of
    others; 0 where it is unknown. long_steps: (step, when it ended, its time) of the steps that
    took over LONG_STEP times the median; None in notes of older versions.
    """

    rank: int
    first_step: int
    last_step: int
    start_unix_ns: int
    end_unix_ns: int
    steps: int
    min_step_ns: int
    median_step_ns: int
    max_step_ns: int
    local_ns: int = 0
    long_steps: tuple[tuple[int, int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class SampleReport:
    """What a rank says of a sample when the steps after it have been timed.

    step: the first recorded step, with the steps before a resumption. no_data: why there is no
    trace of this rank; is_fault: whether that was a failure of ours, not a profiler of the script.
    before_ns and after_ns: times of unprofiled steps. cost_ns: how much longer the steps of the
    sample took, with its stop and export. is_capture: whether it was requested.
    """

    number: int
    incarnation: int
    rank: int
    step: int
    steps: int
    unix_ns: int
    pivot: int | None
    folder: str
    is_sampled: bool
    no_data: str = ""
    is_fault: bool = False
    cost_ns: int = 0
    before_ns: tuple[int, ...] = ()
    after_ns: tuple[int, ...] = ()
    interval_steps: int = 0
    overhead: float | None = None
    is_capture: bool = False


def parse_report(text: str) -> SampleReport:
    """Parses a report of a rank. Raises TypeError or ValueError if it is invalid."""
    return _build_report(json.loads(text))


def _build_report(body: dict[str, Any]) -> SampleReport:
    known = select_known_fields(SampleReport, body)
    times = {name: tuple(known.get(name, ())) for name in ("before_ns", "after_ns")}
    return SampleReport(**(known | times))


@dataclass(frozen=True, slots=True)
class RankSpan:
    """Time of the training thread that is no step: a checkpoint, an evaluation, compilation."""

    rank: int
    mark: str
    begin_unix_ns: int
    end_unix_ns: int


@dataclass(frozen=True, slots=True)
class RankDropped:
    """Traces that a rank has deleted because they were not reduced in time."""

    rank: int
    traces: int
    unix_ns: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The end of a rank, or of its samples: why there are no more; "" if the rank has ended.

    One whose text is LEFT is followed by one without: the watch has ended, and not the rank.
    """

    rank: int
    step: int
    unix_ns: int
    text: str = ""


LEFT = "the watch has ended, the training goes on"

Note = RankStarted | RankWindow | RankSpan | SampleReport | RankDropped | RankEnded

_KINDS: dict[str, type[Any]] = {
    "started": RankStarted,
    "window": RankWindow,
    "span": RankSpan,
    "sample": SampleReport,
    "dropped": RankDropped,
    "ended": RankEnded,
}

_NAMES = {kind: name for name, kind in _KINDS.items()}


def build_notes_path(folder: Path, rank: int) -> Path:
    """The file of what a rank notes: one JSON object a line, whose kind is started, window, span,
    sample, dropped or ended."""
    return folder / RANKS / f"rank{rank}.jsonl"


class NoteFile:
    """Appends notes to a rank's file, from one background thread.

    A new file begins with the rank's start again, without which its notes are of an unknown one.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = build_notes_path(folder, rank)
        self._started: RankStarted | None = None
        self._is_moved = False
        make_owner_folder(self._path.parent)

    def write(self, notes: Sequence[Note]) -> None:
        """Appends the notes. Raises OSError."""
        if self._is_moved and self._started is not None:
            notes = [self._started, *notes]
        for note in notes:
            if isinstance(note, RankStarted):
                self._started = note
        lines = [json.dumps({"kind": _NAMES[type(one)]} | asdict(one)) + "\n" for one in notes]
        try:
            with open(self._path, "ab", opener=create_private) as file:
                file.write("".join(lines).encode())
                size = file.tell()
        except OSError as error:
            # A full disk is reported once for the folder of this file.
            error.filename = str(self._path)
            raise
        self._is_moved = size > MAX_NOTES_BYTES
        if self._is_moved:
            self._path.replace(_name_old(self._path))


def _name_old(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


@dataclass(frozen=True, slots=True)
class Beat:
    """The newest step of a rank that has ended, when that was, and when this was written."""

    step: int
    step_unix_ns: int
    unix_ns: int


# Three numbers of 64 bits in decimal, and blanks: written over in place, always whole.
_BEAT_BYTES = 64


class BeatFile:
    """The newest step of a rank, written in place: it is there also if the rank is killed."""

    def __init__(self, folder: Path, rank: int, incarnation: int) -> None:
        path = _build_beat_path(folder, rank, incarnation)
        make_owner_folder(path.parent)
        self._path = path
        self._file = create_private(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def write(self, beat: Beat) -> None:
        """Overwrites the last one. Raises OSError."""
        line = f"{beat.step} {beat.step_unix_ns} {beat.unix_ns}\n"
        try:
            os.pwrite(self._file, line.rjust(_BEAT_BYTES).encode(), 0)
        except OSError as error:
            # A full disk is reported once for the folder of this file.
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        """Closes the file, which stays: the end of a start is read from it."""
        os.close(self._file)


def _build_beat_path(folder: Path, rank: int, incarnation: int) -> Path:
    return folder / RANKS / f"rank{rank}-{incarnation}.beat"


def read_beat(folder: Path, rank: int, incarnation: int) -> Beat | None:
    """The newest step that the rank has ended in a start of the job; None if it is not known."""
    try:
        with open_regular(_build_beat_path(folder, rank, incarnation)) as file:
            step, step_unix_ns, unix_ns = map(int, file.read(_BEAT_BYTES).split())
    except (OSError, ValueError):
        return None
    return Beat(step, step_unix_ns, unix_ns)


def update_beat(folder: Path, rank: int, incarnation: int, step: int, step_unix_ns: int) -> None:
    """Writes the newest step of a rank that has ended, if its last beat was before it. Raises
    OSError."""
    known = read_beat(folder, rank, incarnation) or Beat(-1, 0, 0)
    if known.step < step:
        file = BeatFile(folder, rank, incarnation)
        file.write(Beat(step, step_unix_ns, max(step_unix_ns, known.unix_ns)))
        file.close()


# What the command beside the ranks notes.


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that `stepsplit watch` ran on a host.

    incarnation: the first start of the job in it; a launcher may start the ranks again. end_unix_ns
    and status: when and how it ended; None while it runs, or if the watch was killed with it.
    """

    host: str
    pid: int
    incarnation: int
    unix_ns: int
    end_unix_ns: int | None = None
    status: int | None = None


def note_launch(folder: Path, launch: Launch) -> None:
    """Appends a line to the host's file, at the begin of a command and at its end. Raises
    OSError."""
    name = launch.host.replace("/", "_")
    path = folder / LAUNCHES / f"{name}.jsonl"
    make_owner_folder(path.parent)
    with open(path, "ab", opener=create_private) as file:
        file.write(json.dumps(asdict(launch)).encode() + b"\n")


def read_launches(folder: Path) -> tuple[list[Launch], int]:
    """The commands of all hosts, each once, by their begin, and the number of lines that are torn
    or have other values than those of a command. Raises OSError."""
    found: dict[tuple[str, int, int], Launch] = {}
    lost = 0
    for path in sorted((folder / LAUNCHES).glob("*.jsonl")):
        with open_regular(path) as file:
            lines = file.read().splitlines()
        for line in lines:
            try:
                body = select_known_fields(Launch, json.loads(line))
                launch = Launch(**body)
            except (ValueError, TypeError, AttributeError, RecursionError):
                lost += 1
                continue
            numbers = [launch.pid, launch.incarnation, launch.unix_ns]
            numbers += [one for one in (launch.end_unix_ns, launch.status) if one is not None]
            is_valid = all(type(one) is int and abs(one) < 1 << 62 for one in numbers)
            if is_valid and isinstance(launch.host, str) and launch.incarnation >= 0:
                found[launch.host, launch.pid, launch.unix_ns] = launch
            else:
                lost += 1
    return sorted(found.values(), key=lambda one: one.unix_ns), lost


# A request beside the ranks.


def request_capture(folder: Path) -> None:
    """Has all ranks sampled as soon as possible, whatever the interval."""
    (folder / CAPTURE).touch(PRIVATE)


def take_capture_request(folder: Path) -> bool:
    """Whether a capture has been requested; it is taken once. Raises OSError."""
    try:
        (folder / CAPTURE).unlink()
    except FileNotFoundError:
        return False
    return True


# Reading beside the ranks.


@dataclass(frozen=True, slots=True)
class NoteCursor:
    """How far a file of notes has been read: its inode, and the bytes of it."""

    inode: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class NewNotes:
    """The notes after a cursor, the cursor after them, and the lines that cannot be read.

    Those are torn or unknown; notes whose file was replaced twice in the meantime count as one.
    """

    notes: tuple[Note, ...]
    cursor: NoteCursor
    lost_lines: int = 0


def read_notes(path: Path, cursor: NoteCursor = NoteCursor()) -> NewNotes:
    """The whole lines after the cursor, also if the file has become the .old one since.

    Raises OSError.
    """
    earlier, of_earlier = b"", cursor
    old = _name_old(path)
    found, end = _read_lines(path, cursor)
    if cursor.inode not in (0, end.inode) and old.exists():
        earlier, of_earlier = _read_lines(old, cursor)
    notes: list[Note] = []
    lost = int(cursor.inode not in (0, end.inode, of_earlier.inode))
    for line in (earlier + found).splitlines():
        note = _parse_note(line)
        lost += note is None
        notes += [] if note is None else [note]
    return NewNotes(tuple(notes), end, lost)


def read_all_notes(path: Path) -> NewNotes:
    """All notes that are kept, with those of the .old file, which is before it. Raises OSError."""
    old, found = _name_old(path), read_notes(path)
    if not old.exists():
        return found
    # A rank that closes its file in the meantime has the older notes twice, or none of them.
    earlier = read_notes(old)
    if earlier.cursor.inode == found.cursor.inode:
        return found
    lost = earlier.lost_lines + found.lost_lines
    return NewNotes(earlier.notes + found.notes, found.cursor, lost)


def _read_lines(path: Path, cursor: NoteCursor) -> tuple[bytes, NoteCursor]:
    with open_regular(path) as file:
        inode = os.fstat(file.fileno()).st_ino
        begin = cursor.bytes if inode == cursor.inode else 0
        file.seek(begin)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    return whole, NoteCursor(inode, begin + len(whole))


def _parse_note(line: bytes) -> Note | None:
    """The note; None if the line is torn, as on a full disk, or of a later version."""
    try:
        body = json.loads(line)
        kind = _KINDS[body.pop("kind")]
        if kind is SampleReport:
            return _build_report(body)
        if kind is RankWindow and body.get("long_steps") is not None:
            body["long_steps"] = tuple((int(a), int(b), int(c)) for a, b, c in body["long_steps"])
        note: Note = kind(**select_known_fields(kind, body))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return note


def count_incarnations(folder: Path) -> int:
    """How many starts of the job the folder of a watch knows of; 0 in a new folder.

    The notes of a start may be lost in favour of newer ones; its files of beats are not, and a
    later command has counted it. Raises OSError.
    """
    known = {
        note.incarnation
        for path in list_note_files(folder)
        for note in read_all_notes(path).notes
        if isinstance(note, RankStarted) and isinstance(note.incarnation, int)
    }
    for path in (folder / RANKS).glob("rank*-*.beat"):
        number = path.stem.rpartition("-")[2]
        known |= {int(number)} if number.isdecimal() and len(number) < 10 else set()
    launches, _ = read_launches(folder)
    return max([0, *(number + 1 for number in known), *(one.incarnation for one in launches)])
