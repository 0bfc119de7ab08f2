"""The ledger of a watched job: what all of its wall clock went to, from its first start to its end.

For each start of the job (incarnation) and rank the time is cut into pieces that touch, in order:
gap since the last start, launcher, imports, start-up, windows of steps, what lies between them,
shutdown. Marked spans (checkpoints, evaluations, compilation) are taken out of the piece in which
they lie. So the rows of a rank add up to the wall clock whatever its notes say; what no note
accounts for is `unknown`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import msgspec

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.report.ledger import (
    ROW_KINDS,
    IncarnationLedger,
    Ledger,
    LedgerRow,
    sum_rows,
)
from stepsplit.analyzer.watch.span_logs import build_logged_job, list_marks, read_span_logs
from stepsplit.collectors.formats.file_names import list_note_files
from stepsplit.collectors.formats.watch_notes import (
    LEFT,
    LONG_STEP,
    WINDOW_STEPS,
    Beat,
    Launch,
    Note,
    RankEnded,
    RankSpan,
    RankStarted,
    RankWindow,
    read_all_notes,
    read_beat,
    read_launches,
)

_MARKED = (
    "compile", "checkpoint", "load", "evaluation", "process_group", "quorum", "heal", "commit",
    "imports", "other",
)  # fmt: skip
"""Marks; where they overlap the first one counts."""

LEAST_STALL_NS = 100_000_000
"""What is left of a long step without its spans is a stall from so long on."""

_MOST_SKIPPED = 64
"""Steps between two windows, such as those of a sample; if more are missing, notes are lost."""


# From the folder of a watch.


def read_ledger(place: str | Path) -> Ledger:
    """Reads the ledger of the folder of a watch, also while the job runs.

    Raises:
        DataError: No rank has noted its start, or a file cannot be read.
    """
    folder = Path(place)
    notes: dict[int, Sequence[Note]] = {}
    lost = 0
    try:
        for path in list_note_files(folder):
            rank = int(path.stem[4:])
            new = read_all_notes(path)
            notes[rank] = [one for one in new.notes if _is_valid(one)]
            lost += new.lost_lines + len(new.notes) - len(notes[rank])
        starts = {
            (rank, one.incarnation)
            for rank, own in notes.items()
            for one in own
            if isinstance(one, RankStarted)
        }
        logs = read_span_logs(folder, is_watch=bool(starts))
        found = {key: beat for key in starts if (beat := read_beat(folder, *key)) is not None}
        launches, lost_launches = read_launches(folder)
        lost += lost_launches
    except OSError as error:
        place = error.filename or folder
        raise DataError(place, f"cannot be read: {error.strerror}", "check the folder") from None
    lacks: list[str] = []
    is_step_lost = False
    if starts:
        spans = [one for own in logs.spans.values() for one in own]
        lacks += _add_marks(notes, list_marks(spans), found, launches)
    elif any(logs.spans.values()):
        # A job that was not watched, but has logged its steps.
        job = build_logged_job(logs)
        # That of a watch goes to a dashboard, whose goodput is the share of the row train.
        is_step_lost = not notes and (logs.has_lost or bool(job.without_steps))
        notes, found = {**job.notes}, job.beats
        if job.without_steps:
            lacks.append(
                f"no numbered step of {_list_ranks(job.without_steps)} is logged, so that goodput"
                " is not known (Megatron logs steps with the span group `step`)"
            )
        if is_step_lost:
            lacks.append("steps may be in all time that is not marked, which goodput counts here")
        lacks.append(
            "what was before the first line of the span logs, and after the last one, is not logged"
        )
    elif logs.spans:
        why = "; ".join(logs.lacks[:3]) or "none is of a trainer"
        problem = f"no span of its span logs can be used ({why})"
        raise DataError(folder, problem, "log the steps of the training, or name another folder")
    else:
        hint = "name the folder of a `stepsplit watch` whose job has done some steps"
        raise DataError(folder, "a watch in which no rank has noted its start", hint)
    if lost:
        lacks.append(f"{lost} lines of notes are torn, lost or of another version")
    ledger = build_ledger(folder.resolve().name, notes, found, launches, [*lacks, *logs.lacks])
    if not is_step_lost or not ledger.wall_ns:
        return ledger
    # Steps may be in all time that is not marked: only with it goodput is the most that it can be.
    most_ns = sum(row.ns for row in ledger.rows if row.kind in _UNMARKED)
    return msgspec.structs.replace(ledger, goodput=most_ns / ledger.wall_ns)


_UNMARKED = ("train", "startup", "stall", "restart_gap", "shutdown", "unknown")


def _add_marks(
    notes: dict[int, Sequence[Note]],
    marks: Sequence[RankSpan],
    beats: Mapping[tuple[int, int], Beat],
    launches: Sequence[Launch],
) -> Iterator[str]:
    """Adds what span logs have marked to the notes of each rank, after the start that it is of;
    says which marks are of none, such as those of a later job that logs to the same folder."""
    by_rank: dict[int, list[RankSpan]] = defaultdict(list)
    for mark in marks:
        by_rank[mark.rank].append(mark)
    left: list[RankSpan] = []
    for rank, own in by_rank.items():
        known = list(notes.get(rank, ()))
        places = [place for place, note in enumerate(known) if isinstance(note, RankStarted)]
        ordered: list[Note] = known[: places[0]] if places else known
        for place, following in zip(places, [*places[1:], len(known)], strict=True):
            (life,) = _split_lives(known[place:following])
            life.beat = beats.get((rank, life.started.incarnation))
            until = _MOST_NS
            if following < len(known):
                later = known[following]
                assert isinstance(later, RankStarted)
                until = later.process_unix_ns or later.unix_ns
            if life.ended is not None:
                until = min(until, life.ended.unix_ns)
            else:
                exits = [one.end_unix_ns for one in launches if one.host == life.started.host
                         and one.unix_ns <= life.started.unix_ns]  # fmt: skip
                last = max([life.last_unix_ns, *(one for one in exits if one is not None)])
                # Its last mark may have begun after its last word.
                until = min(until, last + _ODD_NS)
            # By their begin, in which order they are.
            extent = (life.begin_unix_ns, until)
            first, end = (bisect_left(own, at, key=_get_begin) for at in extent)
            # Notes of a start follow it, whatever their order among themselves.
            ordered += [known[place], *own[first:end], *known[place + 1 : following]]
            # Of one start, also where a clock was set back.
            del own[first:end]
        notes[rank] = ordered
        left += own
    if left:
        earliest = min(left, key=_get_begin)
        yield (
            f"{len(left):,} marks of span logs are left out, the first one a {earliest.mark} of"
            f" rank {earliest.rank}: when they began, no process of the watch was there"
        )


def _get_begin(span: RankSpan) -> int:
    return span.begin_unix_ns


def _is_valid(note: Note) -> bool:
    """Whether the values of the note have its types, and are times and numbers of this world."""
    try:
        values = asdict(note)
        msgspec.convert(values, type(note))
    except msgspec.ValidationError:
        return False
    flat = [
        one for each in values.values() for one in (each if isinstance(each, tuple) else [each])
    ]
    numbers = [n for one in flat for n in (one if isinstance(one, tuple) else [one])]
    return all(abs(n) < _MOST_NS for n in numbers if isinstance(n, int | float))


_MOST_NS = 1 << 62


def build_ledger(
    run: str,
    notes: Mapping[int, Sequence[Note]],
    beats: Mapping[tuple[int, int], Beat] = {},
    launches: Sequence[Launch] = (),
    lacks: Sequence[str] = (),
) -> Ledger:
    """Builds the ledger from what the ranks have noted, oldest first.

    Args:
        run: The name of the run.
        notes: Those of each rank; at least one has a start.
        beats: The newest step by (rank, incarnation).
        launches: The commands, by their begin.
        lacks: What is not known already.
    """
    by_start: dict[int, dict[int, list[_Life]]] = defaultdict(dict)
    for rank, noted in sorted(notes.items()):
        for life in _split_lives(noted):
            by_start[life.started.incarnation].setdefault(rank, []).append(life)
    for (rank, number), beat in beats.items():
        if own := by_start.get(number, {}).get(rank):
            own[-1].beat = beat
    missing, numbers = list(lacks), sorted(by_start)
    incarnations: list[IncarnationLedger] = []
    cursor: int | None = None
    reached: int | None = None
    for index, number in enumerate(numbers):
        lives = by_start[number]
        following = numbers[index + 1] if index + 1 < len(numbers) else None
        begin, end, is_ended = _find_extent(number, following, lives, launches)
        if cursor is None:
            # A first command whose ranks have noted nothing is of the wall clock too.
            earlier = (one.unix_ns for one in launches if one.incarnation <= number)
            cursor = min([begin, *earlier])
        gap_begin = cursor
        # A clock that was set back, or a second job in the folder, must not count time twice.
        begin = max(begin, gap_begin)
        end = max(end, begin)
        spans = {rank: [s for life in own for s in life.spans] for rank, own in lives.items()}
        # While one rank writes a checkpoint, the others wait for it in a step.
        of_any = separate_spans([span for own in spans.values() for span in own], begin, end)
        # When no rank lived any more, of a start that was killed: a beat is at most a poll old.
        newest = [own[-1] for own in lives.values()]
        dead_unix_ns = max(life.last_unix_ns for life in newest)
        is_known = all(life.beat is not None and not life.is_left for life in newest)
        if not is_known or end - dead_unix_ns > _MOST_EXIT_NS:
            dead_unix_ns = end
        amounts: dict[int, Counter[str]] = {}
        counts: dict[int, Counter[str]] = {}
        for rank, own in sorted(lives.items()):
            time = _RankTime(begin, end, spans[rank], of_any, reached)
            for place, life in enumerate(own):
                time.take_life(life, place == 0, is_ended and place + 1 == len(own))
                if life.started.steps_before is not None and life.last_step is not None:
                    time.reached = max(life.last_step, -1 if time.reached is None else time.reached)
            # What ends then is the launcher.
            time.take(dead_unix_ns, "unknown")
            time.take(end, "shutdown")
            amounts[rank], counts[rank] = time.amounts, time.counts
            amounts[rank]["restart_gap"] += begin - gap_begin
            assert sum(amounts[rank].values()) == end - gap_begin, "a rank's time adds up"
            assert min(amounts[rank].values()) >= 0, "no row is negative"
        lowest = counts[min(lives)]
        if begin > gap_begin:
            lowest["restart_gap"] += 1
        first = min(own[0].first_step for own in lives.values())
        last = max((life.last_step for own in lives.values() for life in own
                    if life.last_step is not None), default=None)  # fmt: skip
        is_known = all(life.started.steps_before is not None for own in lives.values()
                       for life in own)  # fmt: skip
        if (index or any(len(own) > 1 for own in lives.values())) and not is_known:
            missing.append(
                f"start {number + 1}: which of its steps were done before is not known (the"
                " optimizer keeps no count), so that all count"
            )
        incarnations.append(
            IncarnationLedger(
                incarnation=number,
                begin_unix_ns=str(gap_begin),
                wall_ns=end - gap_begin,
                ranks=tuple(sorted(lives)),
                world_size=max(life.started.world_size for own in lives.values() for life in own),
                first_step=first,
                last_step=last,
                ending="ended" if is_ended else "lost",
                rows=_build_rows(list(amounts.values()), lowest, end - gap_begin),
            )
        )
        cursor = end
        if is_known and last is not None:
            reached = last if reached is None else max(reached, last)
    missing += _describe_lacks(by_start, incarnations, launches)
    rows = sum_rows([row for one in incarnations for row in one.rows])
    wall_ns = sum(one.wall_ns for one in incarnations)
    assert sum(row.ns for row in rows) == wall_ns, "the rows add up to the wall clock"
    train_ns = sum(row.ns for row in rows if row.kind == "train")
    return Ledger(
        run=run,
        wall_ns=wall_ns,
        goodput=train_ns / wall_ns if wall_ns else 0.0,
        is_goodput_bound=bool(missing),
        hosts=len({life.started.host for life in _list_lives(by_start)}),
        rows=rows,
        incarnations=tuple(incarnations),
        lacks=tuple(missing),
    )


@dataclass(slots=True)
class _Life:
    """What a rank has noted since one of its starts."""

    started: RankStarted
    windows: list[RankWindow] = field(default_factory=list)
    spans: list[RankSpan] = field(default_factory=list)
    ended: RankEnded | None = None
    is_left: bool = False
    beat: Beat | None = None

    @property
    def begin_unix_ns(self) -> int:
        return self.started.process_unix_ns or self.started.unix_ns

    @property
    def last_unix_ns(self) -> int:
        """The last word of the rank."""
        words = [self.started.unix_ns]
        words += [window.end_unix_ns for window in self.windows[-1:]]
        words += [span.end_unix_ns for span in self.spans]
        words += [self.ended.unix_ns] if self.ended else []
        words += [self.beat.unix_ns] if self.beat else []
        return max(words)

    @property
    def lacks_notes(self) -> bool:
        """Whether its newest step is so far ahead of its last window that some are lost."""
        if self.beat is None or not self.windows:
            return False
        window = self.windows[-1]
        is_late = self.beat.step_unix_ns - window.end_unix_ns > _MOST_LATE_NS
        return is_late and self.beat.step - window.last_step > _MOST_SKIPPED + WINDOW_STEPS

    @property
    def first_step(self) -> int:
        if self.started.first_step_unix_ns:
            return self.started.steps_before or 0
        known = [one.first_step for one in self.windows[:1]]
        return min([*known, *([self.beat.step] if self.beat else [])], default=0)

    @property
    def last_step(self) -> int | None:
        known = [one.last_step for one in self.windows[-1:]]
        known += [self.beat.step] if self.beat else []
        known += [self.ended.step - 1] if self.ended and self.ended.step else []
        return max(known, default=None)


_MOST_LATE_NS = 5_000_000_000
"""Windows are written just before the newest step, so that it cannot be far ahead of them."""

_MOST_EXIT_NS = 60_000_000_000
"""torchrun sends SIGTERM to the other ranks of one that was killed, and SIGKILL after 30 s. After
more than this all ranks may have hung with their threads: half of it would leave out a slow exit,
twice as much would take in a hang of two minutes."""

_ODD_NS = 60_000_000_000
"""Clocks of a host's processes agree to far less."""


def _has_odd_clock(life: _Life, launches: Sequence[Launch]) -> bool:
    """Whether a rank's notes are from before its start, or from after the end of its command."""
    start = life.started.unix_ns
    own = [one for one in launches if one.host == life.started.host]
    known = [(one.unix_ns, one.end_unix_ns) for one in own if one.end_unix_ns is not None]
    ends = [end for begin, end in known if begin <= start <= end]
    first = min((one.end_unix_ns for one in life.windows), default=start)
    return first < start - _ODD_NS or life.last_unix_ns > max(ends, default=_MOST_NS) + _ODD_NS


def _list_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _split_lives(notes: Iterable[Note]) -> Iterator[_Life]:
    """The lives of a rank; what it noted before its first known start is lost with that."""
    life: _Life | None = None
    for note in notes:
        if isinstance(note, RankStarted):
            # The same start again begins a new file.
            if life is not None and life.started != note:
                yield life
            life = life if life is not None and life.started == note else _Life(note)
        elif life is None:
            continue
        elif isinstance(note, RankWindow):
            life.windows.append(note)
        elif isinstance(note, RankSpan):
            life.spans.append(note)
        elif isinstance(note, RankEnded) and note.text == LEFT:
            life.is_left = True
        elif isinstance(note, RankEnded) and not note.text:
            life.ended = note
    if life is not None:
        yield life


def _find_extent(
    number: int,
    following: int | None,
    lives: Mapping[int, Sequence[_Life]],
    launches: Sequence[Launch],
) -> tuple[int, int, bool]:
    """When a start of the job began and ended, and whether its ranks said that they end.

    A command is the launcher of all starts from its own to the next command's. Its end says nothing
    of ranks that began later, as of a job that was attached to.
    """
    begins = [own[0].begin_unix_ns for own in lives.values()]
    begin, latest = min(begins), max(begins)
    end = max(own[-1].last_unix_ns for own in lives.values())
    is_ended = all(own[-1].ended is not None and not own[-1].is_left for own in lives.values())
    # Of each host the newest command that was there when the processes began: an earlier one, whose
    # ranks have noted nothing, has the same number.
    by_host = {one.host: one for one in launches
               if one.incarnation <= number and one.unix_ns <= latest}  # fmt: skip
    newest = max((one.incarnation for one in by_host.values()), default=None)
    commands = [
        one
        for one in by_host.values()
        if one.incarnation == newest and (one.end_unix_ns is None or one.end_unix_ns >= begin)
    ]
    begin = min([begin, *(one.unix_ns for one in commands if one.incarnation == number)])
    exits = [one.end_unix_ns for one in commands]
    is_last_of_it = following is None or any(number < one.incarnation <= following
                                             for one in launches)  # fmt: skip
    if is_last_of_it and exits and None not in exits:
        end = max(end, *(one for one in exits if one is not None))
        is_ended = is_ended or all(one.status == 0 for one in commands)
    return begin, end, is_ended


# One rank in one start.

_Interval = tuple[int, int, str]


class _RankTime:
    """The time of a rank from begin to end, each instant of which is given to one kind of row.

    of_any: marked intervals of all ranks, for which this one may wait. reached: the newest step
    that earlier starts, or lives in this one, have ended; None without one.
    """

    def __init__(
        self,
        begin: int,
        end: int,
        spans: Sequence[RankSpan],
        of_any: Sequence[_Interval],
        reached: int | None,
    ) -> None:
        self._at, self._end, self.reached = begin, end, reached
        self._of_any = of_any
        self.amounts: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._marked = separate_spans(spans, begin, end, self.counts)

    def take(self, until: int, kind: str) -> int:
        """Gives the time until then to the kind, but what is marked in it to its mark. Returns what
        the kind got."""
        until = min(max(until, self._at), self._end)
        free = until - self._at
        for begin, end, mark in _list_within(self._marked, self._at, until):
            self.amounts[mark] += end - begin
            free -= end - begin
        if kind == "shutdown" and self._at < until:
            # The last checkpoint has no step after it.
            _, waited = self._measure_free(self._at, until)
            self.amounts += waited
            free -= waited.total()
        self.amounts[kind] += free
        self._at = until
        return free

    def take_steps(
        self,
        until: int,
        first: int,
        last: int,
        usual_ns: int,
        long_steps: Sequence[tuple[int, int, int]] | None = None,
    ) -> None:
        """Gives the time until then to the steps from first to last, of usual_ns each (0: unknown).

        What long steps have beyond a usual one is a stall, unless it is marked. long_steps: those
        of a window, with their ends and times; None where only the time of all is known.
        """
        steps = last - first + 1
        if steps <= 0:
            self.take(until, "unknown")
            return
        begin, until = self._at, min(max(until, self._at), self._end)
        limit_ns = max(LONG_STEP * usual_ns, LEAST_STALL_NS)
        stalls, waits = [], Counter[str]()
        for _, end_unix_ns, took_ns in long_steps or ():
            left, right = max(begin, end_unix_ns - took_ns), min(until, end_unix_ns)
            if left < right:
                free, waited = self._measure_free(left, right)
                if free > limit_ns:
                    waits += waited
                    free -= waited.total()
                if free > limit_ns:
                    stalls.append(free - usual_ns)
                begin = right
        free = self.take(until, "train")
        if long_steps is None and usual_ns and free > max(limit_ns, LONG_STEP * steps * usual_ns):
            stalls.append(free - steps * usual_ns)
        free -= waits.total()
        self.counts["stall"] += len(stalls)
        self.amounts += waits
        repeated = 0
        if self.reached is not None:
            repeated = min(max(min(last, self.reached) - first + 1, 0), steps)
        self.counts["train"] += steps - repeated
        self.counts["redone"] += repeated
        # In a window in which the steps done again end, by their number.
        redone_ns = (free - sum(stalls)) * repeated // steps
        self.amounts["stall"] += sum(stalls)
        self.amounts["redone"] += redone_ns
        self.amounts["train"] -= sum(stalls) + redone_ns + waits.total()

    def take_life(self, life: _Life, is_first: bool, is_ended: bool) -> None:
        """Gives the time until the last word of a life; is_ended: until the end, if it is known
        that it has ended by itself."""
        started = life.started
        if not started.process_unix_ns:
            self.take(started.unix_ns, "unknown")
        else:
            self.take(started.process_unix_ns, "launcher" if is_first else "unknown")
            if started.torch_unix_ns:
                self.take(started.torch_unix_ns, "imports")
            until = started.first_step_unix_ns or started.unix_ns
            self.counts["startup"] += until > started.process_unix_ns
            self.take(until, "startup")
        number = life.first_step + 1 if started.first_step_unix_ns else None
        usual_ns = max(0, life.windows[0].median_step_ns) if life.windows else 0
        for window in life.windows:
            # Steps of a sample, and the first ones of a process, have no window.
            skipped = None if number is None else window.first_step - number
            if number is not None and skipped and 0 < skipped <= _MOST_SKIPPED:
                self.take_steps(window.start_unix_ns, number, window.first_step - 1, usual_ns)
            else:
                self.take(window.start_unix_ns, "unknown")
            usual_ns, longest = max(0, window.median_step_ns), window.long_steps
            if longest is None and window.max_step_ns > LONG_STEP * usual_ns:
                longest = ((window.last_step, window.end_unix_ns, window.max_step_ns),)
            self.take_steps(
                window.end_unix_ns, window.first_step, window.last_step, usual_ns, longest or ()
            )
            number = window.last_step + 1
        beat, ended, last = life.beat, life.ended, life.last_step
        if beat is not None and last is not None and number is not None and last >= number:
            self.take_steps(beat.step_unix_ns, number, last, usual_ns)
        if life.is_left:
            # The training goes on, or went on until the command ended.
            self.take(self._end if is_ended else life.last_unix_ns, "unknown")
            return
        if ended is not None or is_ended:
            # Without a beat, steps after the last window cannot be separated from the end.
            is_known = beat is not None or last is None or number is None or last < number
            # Of a process that has logged no step, it is not known when its end began.
            is_known = is_known and (ended is None or ended.step > 0)
            kind: str = "shutdown" if is_known else "unknown"
            self.take(self._end if is_ended else life.last_unix_ns, kind)
            return
        if beat is not None:
            limit_ns = max(LONG_STEP * usual_ns, LEAST_STALL_NS)
            is_stall = beat.unix_ns - max(self._at, beat.step_unix_ns) > limit_ns
            free = self.take(beat.unix_ns, "stall" if is_stall else "unknown")
            self.counts["stall"] += is_stall and free > 0
        self.take(life.last_unix_ns, "unknown")

    def _measure_free(self, begin: int, end: int) -> tuple[int, Counter[str]]:
        """The time in it that is not marked, and how much of that other ranks have marked."""
        free, at = 0, begin
        waited: Counter[str] = Counter()
        for left, right, _ in (*_list_within(self._marked, begin, end), (end, end, "")):
            free += left - at
            for begun, ended, mark in _list_within(self._of_any, at, left):
                waited[mark] += ended - begun
            at = right
        return free, waited


def separate_spans(
    spans: Iterable[RankSpan], begin: int, end: int, counts: Counter[str] | None = None
) -> list[_Interval]:
    """The spans from begin to end as intervals that do not overlap; counts those of each mark."""
    edges: list[tuple[int, int, str]] = []
    ends: dict[str, int] = {}
    for span in sorted(spans, key=lambda one: one.begin_unix_ns):
        known = span.mark if span.mark in _MARKED else "other"
        left, right = max(span.begin_unix_ns, begin), min(span.end_unix_ns, end)
        if left >= right:
            continue
        edges += [(left, 1, known), (right, -1, known)]
        if counts is not None:
            # A span within another one of its kind, as of a part of a model, is the same.
            counts[known] += left >= ends.get(known, left)
        ends[known] = max(ends.get(known, right), right)
    active: Counter[str] = Counter()
    found: list[_Interval] = []
    at = begin
    for moment, change, kind in sorted(edges):
        top = next((one for one in _MARKED if active[one] > 0), None)
        if top is not None and moment > at:
            found.append((at, moment, top))
        at = moment
        active[kind] += change
    return found


def _list_within(marked: Sequence[_Interval], begin: int, end: int) -> Iterator[_Interval]:
    """The parts of intervals that do not overlap from begin to end."""
    index = max(0, bisect_right(marked, begin, key=lambda one: one[0]) - 1)
    while index < len(marked) and marked[index][0] < end:
        left, right, kind = marked[index]
        if (left := max(left, begin)) < (right := min(right, end)):
            yield left, right, kind
        index += 1


# Rows of all ranks.


def _build_rows(
    amounts: Sequence[Mapping[str, int]], counts: Mapping[str, int], wall_ns: int
) -> tuple[LedgerRow, ...]:
    """The rows in the mean of the ranks, which add up to the wall clock."""
    ranks = len(amounts)
    sums = {kind: sum(each.get(kind, 0) for each in amounts) for kind in ROW_KINDS}
    means = {kind: total // ranks for kind, total in sums.items()}
    # What the divisions leave goes to the rows with the largest remainders.
    left = wall_ns - sum(means.values())
    for kind in sorted(sums, key=lambda one: -(sums[one] % ranks))[:left]:
        means[kind] += 1
    return tuple(
        LedgerRow(kind, means[kind], counts.get(kind, 0), sums[kind] / _NS_PER_HOUR)
        for kind in ROW_KINDS
        if sums[kind] or counts.get(kind, 0)
    )


_NS_PER_HOUR = 3_600_000_000_000


def _list_lives(by_start: Mapping[int, Mapping[int, Sequence[_Life]]]) -> list[_Life]:
    return [life for own in by_start.values() for each in own.values() for life in each]


def _describe_lacks(
    by_start: Mapping[int, Mapping[int, Sequence[_Life]]],
    incarnations: Sequence[IncarnationLedger],
    launches: Sequence[Launch],
) -> Iterator[str]:
    """What is not known of the job, for the line under the first of the screen."""
    lives = _list_lives(by_start)
    last = incarnations[-1]
    if not any(life.started.process_unix_ns for life in lives):
        yield "what was before the watch of a rank is not noted, so that the wall clock lacks it"
    if any(window.long_steps is None for life in lives for window in life.windows):
        yield (
            "notes of an older version: of the long steps of a window only the longest is known,"
            " and checkpoints and evaluations are not"
        )
    absent = list(islice((n for n in range(last.incarnation) if n not in by_start), 9))
    if absent:
        numbers = ", ".join(str(each + 1) for each in absent[:8]) + ", ..." * (len(absent) > 8)
        yield (
            f"starts without a note ({numbers}), in a restart gap: ended within their first steps,"
            " or their notes are older than those that are kept"
        )
    for one in incarnations:
        if len(one.ranks) < one.world_size:
            yield (
                f"start {one.incarnation + 1}: notes of {len(one.ranks)} of {one.world_size} ranks;"
                " GPU hours are theirs"
            )
        own = by_start[one.incarnation]
        lost = [rank for rank, each in sorted(own.items())
                if any(life.lacks_notes for life in each)]  # fmt: skip
        if lost:
            yield (
                f"start {one.incarnation + 1}: the last notes of {_list_ranks(lost)} are lost, so"
                " that checkpoints and evaluations after them count as steps"
            )
        odd = [rank for rank, each in sorted(own.items())
               if any(_has_odd_clock(life, launches) for life in each)]  # fmt: skip
        if odd:
            yield (
                f"start {one.incarnation + 1}: {_list_ranks(odd)} noted times before its start or"
                " after the end of its command: a clock was set, and rows may be wrong"
            )
    left = [one for one in incarnations if any(own[-1].is_left
            for own in by_start[one.incarnation].values())]  # fmt: skip
    for one in left:
        yield f"start {one.incarnation + 1}: its watch was ended while it went on"
    if last.ending == "lost" and last not in left:
        yield "the last start has not said that it ends: it still runs, or was killed"
