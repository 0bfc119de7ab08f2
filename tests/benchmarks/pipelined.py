"""When each rank of a job over tp 2, dp 2 and pp 2 launched and ran what, by one schedule, 1F1B."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import chain

WORLD, STAGES, STEPS = 8, 2, 5
AXES = {"dp": 2, "pp": 4, "tp": 1, "world": 0}
"""How far apart the two ranks of a group along the axis are; the world's are all ranks."""
_LAYERS, _CALLS_A_MICROBATCH = 17, 78
_PENDING = 1000  # launches that the host may be ahead of the device
_US = 1000


@dataclass(frozen=True, slots=True)
class Job:
    """Microbatches a step, layers a stage, all_reduces of gradients a step."""

    microbatches: int
    layers: int
    buckets: int

    @property
    def calls(self) -> int:
        """Collectives and messages of all ranks and steps; a message counts at both its ends."""
        of_step = self.microbatches * (4 * self.layers + 2) + self.buckets + 1
        return WORLD * STEPS * of_step


def job_of(calls: int) -> Job:
    """A job with so many calls, 400 at least: more microbatches of the same layers, as jobs grow.

    One call in ten sums gradients. Each rank has as many as the other, so that the count is of a
    multiple of 40.
    """
    of_step = calls // (WORLD * STEPS)
    microbatches = max(1, of_step // _CALLS_A_MICROBATCH)
    layers = min(_LAYERS, (of_step - 2 * microbatches - 2) // (4 * microbatches))
    return Job(microbatches, layers, of_step - 1 - microbatches * (4 * layers + 2))


@dataclass(frozen=True, slots=True)
class Ran:
    """A kernel: op is "" where it computes, nth then says which kernel it is of its step.

    Else nth is the number of the call in its group, and peer the other end of a message.
    """

    op: str
    axis: str
    nth: int
    peer: int
    backward: bool
    launch_ns: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Mark:
    """What the host annotates; it launched meanwhile what ran from first on and before after."""

    name: str
    start_ns: int
    end_ns: int
    first: int
    after: int


@dataclass(slots=True)
class RankRun:
    """What one rank ran, in the order of launch but for sends, and what its host annotated."""

    ran: list[Ran] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


def members(rank: int, axis: str) -> tuple[int, ...]:
    """The ranks of the rank's group along the axis."""
    apart = AXES[axis]
    first = rank & ~apart
    return (first, first + apart) if apart else tuple(range(WORLD))


def play(job: Job) -> tuple[RankRun, ...]:
    """Every rank's run; the same for the same job."""
    rng = random.Random(0)
    ranks = [_Rank(rank, job, rng) for rank in range(WORLD)]
    programs = [rank.program() for rank in ranks]
    going: deque[tuple[int, int | None]] = deque((rank, None) for rank in range(WORLD))
    met: dict[tuple[object, ...], list[_Meeting]] = {}
    while going:
        rank, answer = going.popleft()
        try:
            meeting = programs[rank].send(answer)  # type: ignore[arg-type]
        except StopIteration:
            continue
        there = met.setdefault(meeting.key, [])
        there.append(meeting)
        if meeting.op == "send":
            going.append((rank, 0))
        if len(there) == meeting.size:
            going += _moved(ranks, met.pop(meeting.key), rng.randint(50 * _US, 200 * _US))
    return tuple(rank.run for rank in ranks)


@dataclass(frozen=True, slots=True)
class _Meeting:
    """A rank has come to a call at start_ns; equal keys are of one call, of so many ends."""

    key: tuple[object, ...]
    size: int
    rank: int
    op: str
    nth: int
    launch_ns: int
    start_ns: int


def _moved(ranks: Sequence[_Rank], all_: Sequence[_Meeting], dur_ns: int) -> list[tuple[int, int]]:
    """Who goes on, and when the call ends there: after the last has come and data has moved."""
    sends = [one for one in all_ if one.op == "send"]
    starts = [max(one.start_ns, ranks[one.rank].sent_ns) for one in sends]
    end_ns = max(*starts, *(one.start_ns for one in all_)) + dur_ns
    for one, start_ns in zip(sends, starts, strict=True):
        ranks[one.rank].sent(one, start_ns, end_ns)
    return [(one.rank, end_ns + one.rank * 100) for one in all_ if one.op != "send"]


class _Rank:
    """One rank at work. A send has its own stream and holds nothing up; all else is in order."""

    def __init__(self, rank: int, job: Job, rng: random.Random) -> None:
        self.run, self.sent_ns = RankRun(), 0
        self._rank, self._job, self._rng = rank, job, rng
        self._stage = rank // (WORLD // STAGES)
        self._host_ns = self._free_ns = self._due_ns = 0
        self._pending: deque[int] = deque(maxlen=_PENDING)
        self._called: dict[str, int] = {}
        self._computed = 0

    def program(self) -> Generator[_Meeting, int, None]:
        for step in range(STEPS):
            begin, self._computed = self._here(), 0
            for kind, number in self._schedule():
                yield from self._box(kind, number)
            for _ in range(self._job.buckets):
                self._compute(backward=True)
                yield from self._collective("dp", beside=True)
            yield from self._collective("world")
            optimizer = self._here()
            self._compute()
            self._mark("Optimizer.step#AdamW.step", optimizer)
            self._host_ns = max(self._free_ns, self._due_ns, self.sent_ns) + 10 * _US
            self._mark(f"ProfilerStep#{step + 3}", begin)

    def sent(self, meeting: _Meeting, start_ns: int, end_ns: int) -> None:
        """A send has ended."""
        self.sent_ns = end_ns
        self._add("send", "pp", meeting.nth, meeting.launch_ns, start_ns, end_ns)

    def _schedule(self) -> list[tuple[str, int]]:
        numbers = range(self._job.microbatches)
        ahead = STAGES - 1 - self._stage
        forwards = [("Forward", n) for n in numbers]
        backwards = [("Backward", n) for n in numbers]
        pairs = chain(*zip(forwards[ahead:], backwards, strict=False))
        return [*forwards[:ahead], *pairs, *backwards[len(backwards) - ahead :]]

    def _box(self, kind: str, number: int) -> Generator[_Meeting, int, None]:
        backward = kind == "Backward"
        if self._stage != backward * (STAGES - 1):
            yield from self._receive()
        begin = self._here()
        for _ in range(2 * self._job.layers):
            self._compute(backward)
            yield from self._collective("tp", beside=backward)
        self._mark(f"{kind} {number}", begin)
        if self._stage == backward * (STAGES - 1):
            yield self._meeting("send", "pp")

    def _compute(self, backward: bool = False) -> None:
        """Two kernels; the second waits for the collective that ran beside the first."""
        base_ns = 200_000 + 300_000 * (self._computed * 37 % 101) // 101
        for share in (0.6, 0.4):
            launch, start = self._launched(8)
            dur = round(base_ns * share * self._rng.gauss(1, 0.02))
            self._add("", "", self._computed, launch, start, start + dur, backward)
            self._free_ns = max(start + dur, self._due_ns)
            self._computed += 1

    def _collective(self, axis: str, beside: bool = False) -> Generator[_Meeting, int, None]:
        meeting = self._meeting("all_reduce", axis)
        end = yield meeting
        self._add("all_reduce", axis, meeting.nth, meeting.launch_ns, meeting.start_ns, end)
        self._due_ns = end
        self._free_ns = self._free_ns if beside else end

    def _receive(self) -> Generator[_Meeting, int, None]:
        meeting = self._meeting("recv", "pp")
        self._free_ns = yield meeting
        launch, start = meeting.launch_ns, meeting.start_ns
        self._add("recv", "pp", meeting.nth, launch, start, self._free_ns)

    def _meeting(self, op: str, axis: str) -> _Meeting:
        which = axis if op == "all_reduce" else op
        nth = self._called[which] = self._called.get(which, -1) + 1
        ranks = members(self._rank, axis)
        side = {"send": self._stage, "recv": 1 - self._stage}.get(op, "all")
        launch, start = self._launched(20)
        start = max(start, self._due_ns)
        return _Meeting((ranks, side, nth), len(ranks), self._rank, op, nth, launch, start)

    def _launched(self, host_us: int) -> tuple[int, int]:
        """When the host launches the next kernel, and when it can start at the earliest."""
        if len(self._pending) == _PENDING:
            self._host_ns = max(self._host_ns, self._pending[0])
        launch = self._host_ns
        start = max(launch + host_us * _US, self._free_ns)
        self._host_ns += host_us * _US
        self._pending.append(start)
        return launch, start

    def _here(self) -> tuple[int, int]:
        """The host's time, and how much has been launched."""
        return self._host_ns, len(self.run.ran)

    def _mark(self, name: str, begin: tuple[int, int]) -> None:
        (start, first), (end, after) = begin, self._here()
        self.run.marks.append(Mark(name, start, end, first, after))

    def _add(
        self, op: str, axis: str, nth: int, launch: int, start: int, end: int, back: bool = False
    ) -> None:
        peer = next((r for r in members(self._rank, "pp") if r != self._rank), -1)
        peer_rank = peer if op in ("send", "recv") else -1
        self.run.ran.append(Ran(op, axis, nth, peer_rank, back, launch, start, end))
