"""When everything in a job happens, by cause and effect alone.

A host launches in order; a stream works in order; a collective moves data once all have arrived
and its links are free. Every time is a maximum of earlier ones plus a duration, unless computing
slows down while data moves.
"""

from __future__ import annotations

from collections import deque

from simulator.agenda import Agenda
from simulator.noise import EXACT, Noise, Place, Places
from simulator.program import (
    Begin,
    Collective,
    Compute,
    Copy,
    End,
    Graph,
    Host,
    Instruction,
    Job,
    Messages,
    Record,
    StepBegin,
    StepEnd,
    Synchronize,
    WaitFor,
)
from simulator.ran import DeviceWork, HostCall, HostWork, Mark, Ran, RankRun, Run
from simulator.streams import Event, Recorded, Stream, Waited
from simulator.transfers import Kernel


class Deadlock(Exception):
    """No rank can go on; the text names each that is stuck and what it waits for."""


def simulate(job: Job, noise: Noise = EXACT, slow: float = 0.0) -> Run:
    """The job as it runs; computing takes (1 + slow) times as long while data moves on its rank.

    Raises Deadlock, and ValueError for a program that makes no sense.
    """
    agenda = Agenda(job, noise, slow)
    ranks = [_Rank(number, job, agenda, noise) for number in range(len(job.programs))]
    woken = set(range(len(ranks)))
    while woken:
        for number in sorted(woken):
            ranks[number].advance()
        woken = agenda.settle()
    if stuck := [text for rank in ranks if (text := rank.stuck())]:
        raise Deadlock("; ".join(stuck))
    return Run(job, tuple(rank.ran() for rank in ranks))


class _Rank:
    """One rank: its host, which runs its program, and its streams."""

    def __init__(self, number: int, job: Job, agenda: Agenda, noise: Noise) -> None:
        self._number, self._job, self._agenda, self._noise = number, job, agenda, noise
        self._places = Places()
        self._todo = deque(job.programs[number])
        self._now_ns = 0
        self._streams: dict[str, Stream] = {}
        self._events: dict[str, Event] = {}
        self._kernels: list[Kernel] = []
        self._host: list[HostCall] = []
        self._marks: list[Mark] = []
        self._open: list[tuple[str, int | None, int, int]] = []

    def advance(self) -> None:
        """Goes on as far as it can."""
        self._work_off()
        while self._todo and self._do(self._todo[0]):
            self._todo.popleft()
            self._work_off()

    def stuck(self) -> str:
        """What the rank waits for, "" where it is done."""
        for name, stream in self._streams.items():
            head = stream.queue[0] if stream.queue else None
            if isinstance(head, Kernel):
                call = f"{type(head.work).__name__} {head.calls} on stream {name!r}"
                lacking = self._agenda.rendezvous.lacking(head)
                return f"rank {self._number}: {call} lacks ranks {lacking}"
        if self._open:
            return f"rank {self._number}: {self._open[-1][0]} does not end"
        return ""

    def ran(self) -> RankRun:
        """What happened, once it is over."""
        device = sorted(map(_ran, self._kernels), key=lambda ran: (ran.start_ns, ran.end_ns))
        return RankRun(tuple(self._host), tuple(device), tuple(self._marks))

    def _work_off(self) -> None:
        """Lets the streams work, which wait for events of each other, until none can go on."""
        busy = [stream for stream in self._streams.values() if stream.queue]
        left = -1
        while left != (left := sum(len(stream.queue) for stream in busy)):
            for stream in busy:
                stream.advance(self._agenda)

    def _do(self, instruction: Instruction) -> bool:
        """Does it if it can be done now; says whether it was."""
        match instruction:
            case Compute() | Copy() | Collective() | Messages() | Graph():
                return self._launch(instruction)
            case Record() | WaitFor():
                self._order(instruction)
            case Host(dur_ns=dur_ns):
                self._call(instruction, self._now_ns + dur_ns)
            case Synchronize():
                return self._synchronize(instruction)
            case StepBegin() | StepEnd() | Begin() | End():
                self._mark(instruction)
        return True

    def _launch(self, launched: DeviceWork | Graph) -> bool:
        body = launched.body if isinstance(launched, Graph) else (launched,)
        used = {work.stream for work in body if not isinstance(work, Record | WaitFor)}
        free_ns = [self._stream(name).place_ns(self._job.queue_depth) for name in used]
        if -1 in free_ns:
            return False
        place = self._places.next(launched)
        cost_ns = self._job.launch_ns + self._noise.launch_of(self._number, place)
        self._call(launched, max([self._now_ns, *free_ns]) + max(0, cost_ns))
        for part, work in enumerate(body):
            if isinstance(work, Record | WaitFor):
                self._order(work)
            else:
                self._queue(work, place, part)
        return True

    def _queue(self, work: DeviceWork, place: Place, part: int) -> None:
        start_ns = self._now_ns + self._noise.start_of(self._number, place, part)
        gap_ns = self._noise.gap_of(self._number, place, part)
        kernel = Kernel(self._number, work, len(self._host) - 1, place, start_ns, gap_ns)
        self._agenda.rendezvous.number(kernel)
        self._stream(work.stream).push(kernel)
        self._kernels.append(kernel)

    def _order(self, instruction: Record | WaitFor) -> None:
        queue = self._stream(instruction.stream).queue
        if isinstance(instruction, Record):
            event = self._events[instruction.event] = Event()
            queue.append(Recorded(event))
        elif instruction.event in self._events:
            queue.append(Waited(self._events[instruction.event]))
        else:
            raise ValueError(f"rank {self._number} waits for {instruction.event!r}: not recorded")

    def _synchronize(self, instruction: Synchronize) -> bool:
        whole = instruction.stream is None
        streams = [s for name, s in self._streams.items() if whole or name == instruction.stream]
        if any(stream.queue for stream in streams):
            return False
        self._call(instruction, max([self._now_ns, *(stream.free_ns for stream in streams)]))
        return True

    def _call(self, work: HostWork, end_ns: int) -> None:
        self._host.append(HostCall(work, self._now_ns, end_ns))
        self._now_ns = end_ns

    def _mark(self, instruction: StepBegin | StepEnd | Begin | End) -> None:
        if isinstance(instruction, Begin):
            self._begin(instruction.name, None)
        elif isinstance(instruction, StepBegin):
            if self._open:
                self._close(of_step=True)
            self._begin(f"ProfilerStep#{instruction.step}", instruction.step)
        else:
            self._close(of_step=isinstance(instruction, StepEnd))

    def _begin(self, name: str, step: int | None) -> None:
        self._open.append((name, step, self._now_ns, len(self._host)))

    def _close(self, of_step: bool) -> None:
        if not self._open or (self._open[-1][1] is not None) != of_step:
            raise ValueError(f"rank {self._number}: steps and annotations do not nest")
        name, step, start_ns, first_call = self._open.pop()
        self._marks.append(Mark(name, step, start_ns, self._now_ns, first_call, len(self._host)))

    def _stream(self, name: str) -> Stream:
        return self._streams.setdefault(name, Stream())


def _ran(kernel: Kernel) -> Ran:
    seq = kernel.calls[0] if isinstance(kernel.work, Collective) else -1
    moves = tuple(moved for moved in kernel.moves if moved is not None)
    return Ran(kernel.work, kernel.launch, kernel.start_ns, kernel.end_ns, seq, moves)
