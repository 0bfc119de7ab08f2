"""Reduces on one host, beside the ranks, what they note and sample, to batches that stay small.

Everything is kept in the folder of the watch:
    hosts/HOST.jsonl        the batches, one a line, the newest 64 MiB
    hosts/HOST.state.json   how far the notes have been read and the batches sent
    samples/STEP/           traces and report of a sample, the newest within the disk budget
"""

from __future__ import annotations

import dataclasses
import gzip
import os
import secrets
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct, field

from stepsplit.analyzer.errors import UsageError, make_write_error, write
from stepsplit.analyzer.report.ledger import Ledger, ledger_to_json
from stepsplit.analyzer.watch.ledger import read_ledger
from stepsplit.analyzer.watch.levels import (
    HostLateness,
    OnlineChange,
    SampleSplit,
    StepLevel,
    describe_step_change,
    explain_change,
    explain_drift,
    summarize_sample,
)
from stepsplit.analyzer.watch.records import (
    EventKind,
    WatchBatch,
    WatchEvent,
    WatchSample,
    encode_batch,
)
from stepsplit.analyzer.watch.samples import reduce_sample
from stepsplit.collectors.formats.file_names import list_note_files
from stepsplit.collectors.formats.run_spec import Mesh
from stepsplit.collectors.formats.step_memory import HeldStepMemory
from stepsplit.collectors.formats.watch_notes import (
    LEFT,
    SAMPLES,
    Note,
    NoteCursor,
    RankDropped,
    RankEnded,
    RankSpan,
    RankStarted,
    RankWindow,
    SampleReport,
    read_beat,
    read_notes,
    request_capture,
    update_beat,
)
from stepsplit.collectors.safe_io.atomic_file import PRIVATE, create_private, make_owner_folder
from stepsplit.collectors.safe_io.regular_file import describe_special, open_regular, read_regular

HOSTS, STATE_SUFFIX = "hosts", ".state.json"

MOST_BATCH_BYTES = 64 << 20
"""Size at which the older half of the batches is dropped."""

MOST_WINDOWS = 2_000
"""Step times of one batch; what is more waits for the next one."""

LATE_S = 120.0
"""How long a sample waits for the notes of ranks that have not said anything of it."""

MOST_CAPTURES = 1_000
"""Requested samples whose traces are dropped after those of all others."""

MOST_SPLITS = 20
"""Samples with which a change is explained."""

LEDGER_S, LEDGER_SHARE = 60.0, 0.01
"""Time between two ledgers, and the most of a core that reading them may take."""

MOST_LEDGER_BYTES = 256 << 10
"""A ledger of hundreds of starts, or of many ranks, has its newest start only in a batch."""

PAUSE = 5.0
"""A step that takes so many times the median of its window is noted as a pause."""


class Unexplained(Struct, frozen=True):
    """A change of the step time (rank None) or a drift of a rank since a step, found by another
    one, until a sample explains it."""

    step: int
    found_step: int
    rank: int | None = None


class WatchedRank(Struct, frozen=True, kw_only=True):
    """What is known of a rank: where its notes have been read to, and its last start and end.

    level is kept for the lowest rank of the host alone: in a job that synchronizes, all ranks take
    as long for a step. first_step is that of its first window, None before that.
    """

    cursor: NoteCursor = NoteCursor()
    level: StepLevel = StepLevel()
    started: RankStarted | None = None
    ended: bool = False
    step: int = 0
    first_step: int | None = None

    def count_steps(self, attached: bool) -> int:
        """The steps watched: of a job that was attached to, those from the first window on."""
        return self.step - (self.first_step or 0) if attached else self.step


class Capture(Struct, frozen=True, kw_only=True):
    """A requested sample: its folder under samples/, its id, and its run on the dashboard; "" if
    its upload has not begun. is_settled: it is uploaded, or has been refused."""

    folder: str
    sample_id: str
    run_id: str = ""
    is_settled: bool = False


class ReducerState(Struct, frozen=True, kw_only=True):
    """What the reducer knows after its last batch; a new one goes on from it.

    Attributes:
        token: Random, so that batches of another folder of the same name differ.
        batches: The number of batches closed.
        batch_bytes: The size of their file.
        sent: The number of batches that need not be sent any more.
        unsent_lost: The number of these that were dropped before they could be sent, or refused,
            and of which no batch has counted yet.
        samples: The number of samples reduced.
        without_data: The number of these that do not count.
        newest: The folder of the newest one that counts, under that of the watch.
        ranks: What is known of each rank.
        waiting: Reports of samples that are not reduced yet.
        interval_steps: The steps between samples; None if there are no more.
        overhead: The part of the training time that samples have cost.
        splits: Those of the newest samples, with which changes are explained.
        lateness: The levels of the local times of the ranks.
        unexplained: The open changes and drifts that no sample has explained so far.
        captures: The requested samples, whose traces are dropped last.
    """

    token: str = field(default_factory=lambda: secrets.token_hex(6))
    batches: int = 0
    batch_bytes: int = 0
    sent: int = 0
    unsent_lost: int = 0
    samples: int = 0
    without_data: int = 0
    newest: str = ""
    ranks: dict[int, WatchedRank] = field(default_factory=dict)
    waiting: tuple[SampleReport, ...] = ()
    interval_steps: int | None = None
    overhead: float | None = None
    splits: tuple[SampleSplit, ...] = ()
    lateness: HostLateness = HostLateness()
    unexplained: tuple[Unexplained, ...] = ()
    captures: tuple[Capture, ...] = ()

    @property
    def unsent(self) -> int:
        """The number of batches that were not sent yet."""
        return self.batches - self.sent


@dataclass(frozen=True, slots=True)
class WatchFolder:
    """The folder of a watch, and what may be kept in it.

    mesh: the stated layout of the job; None: inferred from each sample. disk_bytes bounds the
    samples that are kept.
    """

    path: Path
    run: str
    host: str
    mesh: Mesh | None = None
    disk_bytes: int = 4 << 30

    @property
    def batches(self) -> Path:
        """The file of batches of this host."""
        return self.path / HOSTS / f"{self.host}.jsonl"

    @property
    def state(self) -> Path:
        """The file of the reducer's state."""
        return self.path / HOSTS / f"{self.host}{STATE_SUFFIX}"


def read_state(folder: WatchFolder) -> ReducerState:
    """The state of the reducer of this host. Raises UsageError if its file cannot be read."""
    try:
        return msgspec.json.decode(read_regular(folder.state), type=ReducerState)
    except FileNotFoundError:
        return ReducerState()
    except (OSError, msgspec.MsgspecError) as error:
        hint = "delete it, and the notes are read from their begin"
        raise UsageError(f"{folder.state}: {error}; {hint}") from None


class Outbox:
    """The batches of a host on disk, and which of them the dashboard has."""

    def __init__(self, folder: WatchFolder) -> None:
        self._folder = folder
        self._state = read_state(folder)

    @property
    def unsent(self) -> int:
        """The number of batches that were not sent yet."""
        return self._state.unsent

    def list_running(self) -> list[int]:
        """The processes of the ranks of this host that have not ended, by their own word."""
        started = [each.started for each in self._state.ranks.values() if not each.ended]
        return [one.pid for one in started if one is not None and one.host == self._folder.host]

    def list_unsent(self) -> Iterator[bytes]:
        """The batches that were not sent yet, oldest first, as JSON."""
        if self.unsent <= 0:
            return
        lines = read_regular(self._folder.batches).splitlines(keepends=True)
        yield from lines[max(0, len(lines) - self.unsent) :]

    def note_sent(self, is_refused: bool = False) -> None:
        """Notes that the oldest unsent batch has been sent, or refused, which the next one counts.

        Raises UsageError.
        """
        state = self._state
        lost = state.unsent_lost + is_refused
        self._save(msgspec.structs.replace(state, sent=state.sent + 1, unsent_lost=lost))

    def _save(self, state: ReducerState) -> None:
        write(self._folder.state, msgspec.json.encode(state), PRIVATE)
        self._state = state


class Reducer(Outbox):
    """Makes batches of what the ranks of this host have noted.

    Killed at any time, the next one goes on after the last batch that is on disk: nothing is
    lost, and nothing is counted twice. One at a time for a folder and host.
    """

    def __init__(self, folder: WatchFolder) -> None:
        super().__init__(folder)
        self._held: dict[int, tuple[RankStarted, HeldStepMemory]] = {}
        self._ledger: Ledger | None = None
        self._ledger_due_s = time.monotonic() + LEDGER_S
        # A batch that was written, perhaps in part, before a kill within _close, is cut off: its
        # notes are read again.
        if problem := describe_special(folder.batches):
            raise UsageError(f"{folder.batches}: {problem}; remove it")
        if folder.batches.exists():
            with folder.batches.open("r+b") as file:
                file.truncate(min(self._state.batch_bytes, file.seek(0, 2)))

    def collect(self, is_last: bool = False) -> WatchBatch | None:
        """Reads what is new, reduces the samples that are complete, and closes a batch.

        is_last: the job has ended; samples wait no longer.

        Returns:
            The batch, which is on disk; None if nothing is new.

        Raises:
            UsageError: The folder cannot be written.
        """
        draft = _Draft(self._folder, self._state)
        draft.count("batch", self._state.unsent_lost)
        self._write_last_beats()
        for path in list_note_files(self._folder.path):
            draft.add_notes(int(path.stem[4:]), path)
        draft.follow_lateness()
        self._hold_step_memories(draft.ranks)
        if is_last:
            draft.note_lost_ranks()
        for reports in draft.take_complete_samples(is_last):
            name = reports[0].folder
            folder = self._folder.path / SAMPLES / name
            sample_id = f"{self._state.token}-{name}-{self._folder.host}"
            sample = reduce_sample(folder, reports, sample_id, self._folder.mesh)
            _compress_traces(folder)
            kept = f"{SAMPLES}/{name}" if folder.exists() else ""
            draft.add_sample(msgspec.structs.replace(sample, traces=kept), reports[0])
        draft.count("sample", self._keep_within_budget(draft))
        if draft.has_lowest_rank and (is_last or time.monotonic() >= self._ledger_due_s):
            draft.ledger = self._read_ledger()
        return None if draft.is_empty else self._close(draft)

    def _hold_step_memories(self, ranks: Mapping[int, WatchedRank]) -> None:
        """Holds the step memory of each rank of this host while it runs."""
        for start in (one.started for one in ranks.values() if not one.ended):
            if start is None or start.host != self._folder.host or start.pid in self._held:
                continue
            # A container may hide it; then the ledger knows the beats of the rank.
            with suppress(OSError):
                self._held[start.pid] = (
                    start,
                    HeldStepMemory(start.pid, start.step_descriptor, start.rank, start.incarnation),
                )

    def _write_last_beats(self) -> None:
        """Makes the newest step of a rank that was killed its last beat: its own is up to a poll
        older."""
        for pid in [pid for pid, (_, memory) in self._held.items() if memory.is_left()]:
            start, memory = self._held.pop(pid)
            with suppress(OSError):
                if newest := memory.read():
                    update_beat(self._folder.path, start.rank, start.incarnation, *newest)
            memory.close()

    def _read_ledger(self) -> Ledger | None:
        """The ledger of the folder if it is another one than before."""
        begin_s = time.monotonic()
        ledger: Ledger | None = None
        # Whatever is wrong with the folder, `stepsplit analyze` says it, and batches go on.
        with suppress(Exception):
            ledger = read_ledger(self._folder.path)
        took_s = time.monotonic() - begin_s
        self._ledger_due_s = begin_s + max(LEDGER_S, took_s / LEDGER_SHARE)
        if ledger is not None and len(ledger_to_json(ledger)) > MOST_LEDGER_BYTES:
            newest = ledger.incarnations[-1:]
            ledger = msgspec.structs.replace(ledger, incarnations=newest)
        if ledger == self._ledger:
            return None
        self._ledger = ledger
        return ledger

    def list_captures(self) -> list[Capture]:
        """The requested samples that are neither uploaded nor refused nor dropped."""
        samples = self._folder.path / SAMPLES
        return [
            one
            for one in self._state.captures
            if not one.is_settled and (samples / one.folder).exists()
        ]

    def note_capture(self, capture: Capture) -> None:
        """Notes how far the upload of a requested sample is. Raises UsageError."""
        captures = [
            capture if one.folder == capture.folder else one for one in self._state.captures
        ]
        self._save(msgspec.structs.replace(self._state, captures=tuple(captures)))

    def _keep_within_budget(self, draft: _Draft) -> int:
        """Removes the oldest samples beyond the disk budget, requested ones last; returns how
        many."""
        unreduced = {report.folder for report in draft.waiting}
        captures = {capture.folder for capture in draft.captures}
        sizes = {}
        for folder in (self._folder.path / SAMPLES).glob("*"):
            files = [file.stat() for file in folder.iterdir() if file.is_file()]
            sizes[folder] = (
                folder.name in captures,
                max((f.st_mtime_ns for f in files), default=0),
                sum(f.st_size for f in files),
            )
        total, dropped = sum(size for _, _, size in sizes.values()), 0
        for folder, (_, _, size) in sorted(sizes.items(), key=lambda item: item[1]):
            if total <= self._folder.disk_bytes:
                break
            if folder.name not in unreduced:
                shutil.rmtree(folder, ignore_errors=True)
                total, dropped = total - size, dropped + 1
        return dropped

    def _close(self, draft: _Draft) -> WatchBatch:
        state = self._state
        batch = draft.build(self._folder.run, f"{state.token}-{self._folder.host}-{state.batches}")
        line = encode_batch(batch) + b"\n"
        try:
            make_owner_folder(self._folder.batches.parent)
            with open(self._folder.batches, "ab", opener=create_private) as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
        except OSError as error:
            raise make_write_error(self._folder.batches, error) from None
        self._save(
            msgspec.structs.replace(
                state,
                batches=state.batches + 1,
                batch_bytes=size,
                unsent_lost=0,
                samples=state.samples + len(batch.samples),
                without_data=state.without_data + sum(bool(s.no_data) for s in batch.samples),
                newest=next(
                    (s.traces for s in reversed(batch.samples) if not s.no_data), state.newest
                ),
                ranks=draft.ranks,
                waiting=tuple(draft.waiting),
                interval_steps=draft.interval_steps,
                overhead=draft.overhead,
                splits=draft.splits,
                lateness=draft.lateness,
                unexplained=draft.unexplained,
                captures=draft.captures,
            )
        )
        if size > MOST_BATCH_BYTES:
            self._drop_older_half()
        if draft.must_capture:
            request_capture(self._folder.path)
        return batch

    def _drop_older_half(self) -> None:
        data = read_regular(self._folder.batches)
        kept = data[data.index(b"\n", len(data) // 2) + 1 :]
        write(self._folder.batches, kept, PRIVATE)
        state = self._state
        lost = max(0, state.batches - state.sent - kept.count(b"\n"))
        self._save(
            msgspec.structs.replace(
                state,
                batch_bytes=len(kept),
                sent=state.sent + lost,
                unsent_lost=state.unsent_lost + lost,
            )
        )


class _Draft:
    """The batch in progress."""

    def __init__(self, folder: WatchFolder, state: ReducerState) -> None:
        self._folder, self._host = folder.path, folder.host
        self.ranks = dict(state.ranks)
        self.waiting = list(state.waiting)
        self.interval_steps, self.overhead = state.interval_steps, state.overhead
        self.splits, self.lateness = state.splits, state.lateness
        self.unexplained, self.captures = state.unexplained, state.captures
        self._windows: list[RankWindow] = []
        self._since_start: dict[int, list[RankWindow]] = defaultdict(list)
        self._samples: list[WatchSample] = []
        self._events: list[WatchEvent] = []
        self._dropped: Counter[str] = Counter()
        self.ledger: Ledger | None = None
        self.must_capture = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        new = self._windows or self._samples or self._events or self._dropped.total()
        return not new and self.ledger is None

    @property
    def has_lowest_rank(self) -> bool:
        """Whether the lowest rank of the folder, whose host sends the ledger, is of this host."""
        return bool(self.ranks) and self._is_own(min(self.ranks))

    def count(self, reason: str, number: int) -> None:
        """Counts what was given up."""
        if number:
            self._dropped[reason] += number

    def add_notes(self, rank: int, path: Path) -> None:
        """Adds what a rank has noted since the last batch."""
        known = self.ranks.get(rank, WatchedRank())
        if len(self._windows) >= MOST_WINDOWS:
            return
        new = read_notes(path, known.cursor)
        self.ranks[rank] = msgspec.structs.replace(known, cursor=new.cursor)
        self.count("line", new.lost_lines)
        for note in new.notes:
            self._add_note(rank, note)

    def add_sample(self, sample: WatchSample, report: SampleReport) -> None:
        """Adds a reduced sample with the report of one of its ranks, and what it says of an open
        change."""
        self._samples.append(sample)
        if report.is_capture:
            capture = Capture(folder=report.folder, sample_id=sample.id)
            self.captures = (*self.captures, capture)[-MOST_CAPTURES:]
            text = f"all ranks are recorded in {sample.traces}" if sample.traces else sample.no_data
            self._add_event("capture", sample.step, sample.unix_ns, text)
        if sample.no_data:
            return
        summary = summarize_sample(sample, self._list_own())
        self.splits = (*self.splits, summary)[-MOST_SPLITS:]
        self.unexplained = tuple(
            each for each in self.unexplained if not self._explain(each, sample)
        )

    def _explain(self, change: Unexplained, sample: WatchSample) -> bool:
        """Whether the newest sample explains the change or drift, in an event.

        A later one may if this one was of other ranks, or the only one since its first step and
        before it was found: that step is known to within a few points.
        """
        before = [each for each in self.splits if each.step < change.step]
        since = [each for each in self.splits if each.step >= change.step]
        rank = change.rank
        if not since or rank not in (None, *(each.rank for each in since[-1].ranks)):
            return False
        if len(since) < 2 and sample.step < change.found_step:
            return False
        at = sample.step, sample.unix_ns
        if rank is None:
            found = explain_change(before, since)
            text = f"{found.text}{self._describe_host(found.rank)}"
            self._add_event("change", *at, text, found.rank)
        elif before:
            self._add_event("drift", *at, explain_drift(before, since, rank), rank)
        return True

    def _describe_host(self, rank: int | None) -> str:
        """The host of the rank, of a job of several hosts as far as they share the folder."""
        hosts = {r: each.started.host for r, each in self.ranks.items() if each.started is not None}
        if rank is None or rank not in hosts or len(set(hosts.values())) == 1:
            return ""
        return f"; it runs on {hosts[rank]}"

    def follow_lateness(self) -> None:
        """Adds the new windows to the levels of the ranks' local times, and an event of each rank
        that has begun to be late."""
        running = [rank for rank in self._list_own() if not self.ranks[rank].ended]
        new = [window for own in self._since_start.values() for window in own]
        self.lateness, drifts = self.lateness.add(new, running, self.interval_steps or 0)
        for drift in drifts:
            self._add_change("drift", drift.change, drift.describe(), drift.rank)
            if drift.rank is not None:
                self._await_explanation(drift.change, drift.rank)

    def _await_explanation(self, change: OnlineChange, rank: int | None = None) -> None:
        """Has the next sample explain the change, instead of an earlier one of the same number."""
        others = tuple(each for each in self.unexplained if each.rank != rank)
        found = max(each.step for each in self.ranks.values())
        new = () if change.is_over else (Unexplained(change.step, found, rank),)
        self.unexplained = (*others, *new)

    def note_lost_ranks(self) -> None:
        """Notes the ranks that have ended without a word."""
        for rank, known in self.ranks.items():
            if known.started is not None and not known.ended and self._is_own(rank):
                self._note_lost(rank, known)

    def take_complete_samples(self, is_last: bool) -> list[list[SampleReport]]:
        """The reports of each sample that every rank seen here has reported, or that is late.

        If hosts share the folder, the one of the lowest rank reduces it.
        """
        of_sample: dict[str, dict[int, SampleReport]] = defaultdict(dict)
        for report in self.waiting:
            of_sample[report.folder][report.rank] = report
        complete = []
        for folder, reports in of_sample.items():
            expected = {rank for rank, known in self.ranks.items() if _is_running(known, reports)}
            is_late = min(each.unix_ns for each in reports.values()) < time.time_ns() - LATE_S * 1e9
            if not (is_last or is_late or expected <= set(reports)):
                continue
            self.waiting = [each for each in self.waiting if each.folder != folder]
            sampled = sorted(rank for rank, each in reports.items() if each.is_sampled)
            if not (sampled and self._is_own(sampled[0])):
                continue
            sample, one = [reports[rank] for rank in sampled], next(iter(reports.values()))
            if one.pivot is None:
                # Of a sample of all ranks, those that have said nothing of it have no data.
                reason = "it has said nothing of this sample"
                sample += [
                    dataclasses.replace(one, rank=rank, no_data=reason, cost_ns=0)
                    for rank, known in self.ranks.items()
                    if known.started is not None
                    and known.started.incarnation == one.incarnation
                    and rank not in reports
                ]
            complete.append(sample)
        return complete

    def build(self, run: str, batch_id: str) -> WatchBatch:
        """The batch."""
        started = [each.started for each in self.ranks.values() if each.started is not None]
        newest = max(started, key=lambda each: (each.incarnation, each.unix_ns), default=None)
        return WatchBatch(
            id=batch_id,
            run=run,
            incarnation=newest.incarnation if newest else 0,
            host=self._host,
            world_size=newest.world_size if newest else 1,
            unix_ns=time.time_ns(),
            interval_steps=self.interval_steps,
            budget=newest.budget if newest else 0.0,
            overhead=self.overhead,
            windows=tuple(self._windows),
            samples=tuple(self._samples),
            events=tuple(self._events),
            dropped=dict(self._dropped),
            ledger=self.ledger,
        )

    def _list_own(self) -> list[int]:
        return list(filter(self._is_own, self.ranks))

    def _is_own(self, rank: int) -> bool:
        started = self.ranks[rank].started
        return started is not None and started.host == self._host

    def _is_first_here(self, rank: int) -> bool:
        """Whether it is the lowest rank of this host, which speaks for the job."""
        return self._is_own(rank) and rank == min(self._list_own())

    def _add_note(self, rank: int, note: Note) -> None:
        if isinstance(note, RankStarted):
            self._add_start(rank, note)
        elif not self._is_own(rank) and not isinstance(note, SampleReport):
            return
        elif isinstance(note, RankWindow):
            self._add_window(rank, note)
        elif isinstance(note, SampleReport):
            self.waiting.append(note)
            self.interval_steps = note.interval_steps or self.interval_steps
            self.overhead = self.overhead if note.overhead is None else note.overhead
        elif isinstance(note, RankDropped):
            self.count("trace", note.traces)
        elif isinstance(note, RankSpan):
            # The ledger reads them from the notes.
            pass
        else:
            self._add_end(rank, note)

    def _add_start(self, rank: int, note: RankStarted) -> None:
        known = self.ranks[rank]
        if known.started == note:
            # It begins a new file of the rank.
            return
        if known.started is not None and not known.ended and self._is_own(rank):
            self._note_lost(rank, known)
        self.ranks[rank] = msgspec.structs.replace(known, started=note, ended=False)
        self._since_start[rank].clear()
        self.lateness = HostLateness()
        if self._is_first_here(rank):
            self.overhead = self.interval_steps = None
            self.splits, self.unexplained = (), ()
            self._set(rank, level=known.level.restart() if note.incarnation else StepLevel())
            kind: EventKind = "restarted" if note.incarnation else "started"
            text = f"{note.world_size} ranks, start {note.incarnation + 1}"
            self._add_event(kind, known.step, note.unix_ns, text)

    def _add_window(self, rank: int, note: RankWindow) -> None:
        self._windows.append(note)
        self._since_start[rank].append(note)
        first = self.ranks[rank].first_step
        self._set(rank, step=note.last_step, first_step=note.first_step if first is None else first)
        if not self._is_first_here(rank):
            return
        level, change = self.ranks[rank].level.add(note, self.interval_steps or 0)
        self._set(rank, level=level)
        # In a job that synchronizes, rank 0 speaks for all hosts.
        if rank == 0 and (text := level.describe_restart()):
            self._add_event("restarted", note.last_step, note.end_unix_ns, text)
        if change is not None:
            self._add_change("change", change, describe_step_change(change))
            self._await_explanation(change)
            self.must_capture = self.must_capture or not change.is_over
        if note.max_step_ns > PAUSE * note.median_step_ns:
            text = f"a step of {note.max_step_ns / 1e9:.3g} s, {note.median_step_ns / 1e9:.3g} s"
            self._add_event("pause", note.last_step, note.end_unix_ns, f"{text} in the median")

    def _add_end(self, rank: int, note: RankEnded) -> None:
        if note.text == LEFT:
            # The end of the watch follows.
            return
        if note.text:
            self.interval_steps = None
            self._add_event("sampling_ended", note.step, note.unix_ns, note.text, rank)
            return
        self._set(rank, ended=True, step=note.step)
        if self._is_first_here(rank):
            self._add_event("ended", note.step, note.unix_ns, f"after {note.step} steps")

    def _note_lost(self, rank: int, known: WatchedRank) -> None:
        number = 0 if known.started is None else known.started.incarnation
        beat = read_beat(self._folder, rank, number)
        # Its windows end up to a minute before.
        step = known.step if beat is None else max(known.step, beat.step)
        self._set(rank, ended=True, step=step)
        text = "ended without a word: killed, or its host is down"
        self._add_event("lost_rank", step, time.time_ns(), text, rank)

    def _add_event(
        self, kind: EventKind, step: int, unix_ns: int, text: str, rank: int | None = None
    ) -> None:
        self._events.append(WatchEvent(kind=kind, step=step, unix_ns=unix_ns, text=text, rank=rank))

    def _add_change(
        self, kind: EventKind, change: OnlineChange, text: str, rank: int | None = None
    ) -> None:
        self._events.append(
            WatchEvent(
                kind=kind, step=change.step, unix_ns=change.unix_ns, text=text, rank=rank,
                before_ns=change.before_ns, after_ns=change.after_ns, is_over=change.is_over,
            )
        )  # fmt: skip

    def _set(self, rank: int, **values: object) -> None:
        self.ranks[rank] = msgspec.structs.replace(self.ranks[rank], **values)


def _is_running(known: WatchedRank, reports: Mapping[int, SampleReport]) -> bool:
    """Whether a word on the sample is to be expected from the rank."""
    incarnation = next(iter(reports.values())).incarnation
    started = known.started
    return started is not None and not known.ended and started.incarnation == incarnation


def _compress_traces(folder: Path) -> None:
    """Replaces raw traces by packed ones, a tenth of their size."""
    for raw in folder.glob("rank*_trace.json"):
        packed = raw.with_name(f"{raw.name}.gz")
        draft = packed.with_name(f".{packed.name}")
        with (
            open_regular(raw) as source,
            open(draft, "wb", opener=create_private) as plain,
            gzip.GzipFile("", "wb", 4, plain) as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
        draft.replace(packed)
        raw.unlink()
