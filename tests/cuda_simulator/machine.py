"""Runs the programs of all ranks: hosts launch in order, streams run in order, NCCL meets.

The rules are CUDA's and NCCL's, and nothing else decides when a kernel runs:

- A host thread runs ahead of its device until it synchronizes or its launch queue is full: the
  launch of a kernel waits until the kernel `launch_queue` launches before it has started.
- A kernel starts once it is launched, the kernel before it on its stream has ended, and so have the
  events that its stream was made to wait for.
- With one queue to the device (CUDA_DEVICE_MAX_CONNECTIONS=1), a kernel does not start before the
  one that was launched before it, on whatever stream.
- A collective moves data from the start of its last member's kernel on and ends on all members
  together; a message from the start of the later of its two ends on.

No resource is shared in a way that depends on who comes first, so each time follows from earlier
ones, and a worklist finds them all without a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .program import BeginStep, HostWork, Instruction, Kernel, RecordEvent, Synchronize, WaitEvent


@dataclass(frozen=True, slots=True)
class Latencies:
    """Costs of the CUDA runtime, in ns."""

    launch_call_ns: int = 4_000
    launch_to_start_ns: int = 3_000
    same_stream_ns: int = 1_000
    event_ns: int = 2_000
    event_call_ns: int = 700
    synchronize_return_ns: int = 8_000
    launch_queue: int = 1024
    one_queue: bool = False


class Deadlock(Exception):
    """No rank can go on, and programs are left."""


class KernelRun:
    """A launched kernel; start_ns and end_ns are -1 until known."""

    __slots__ = (
        "call_ns", "earliest_ns", "end_ns", "end_waiters", "kernel", "launched_ns", "missing",
        "next_in_queue", "rank", "start_ns", "start_waiters", "step",
    )  # fmt: skip

    def __init__(self, rank: int, kernel: Kernel, step: int, call_ns: int, launched_ns: int):
        self.rank = rank
        self.kernel = kernel
        self.step = step
        self.call_ns = call_ns
        self.launched_ns = launched_ns
        self.start_ns = -1
        self.end_ns = -1
        self.earliest_ns = 0
        self.missing = 0
        self.start_waiters: list[_Host] = []
        self.next_in_queue: KernelRun | None = None
        self.end_waiters: list[tuple[KernelRun | _Host, int]] = []


@dataclass(slots=True)
class HostCall:
    """A call of the runtime other than a launch."""

    instruction: RecordEvent | WaitEvent | Synchronize
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class RankTimeline:
    """What a rank did, in program order."""

    kernels: list[KernelRun] = field(default_factory=list)
    calls: list[HostCall] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Number and host start of each step."""
    end_ns: int = 0


class _Stream:
    __slots__ = ("last", "waits")

    def __init__(self) -> None:
        self.last: KernelRun | None = None
        self.waits: list[KernelRun] = []

    def pending(self) -> list[KernelRun]:
        """What must end before anything new on the stream starts."""
        return [*self.waits, self.last] if self.last else list(self.waits)


class _Meeting:
    """The members of a collective, or the two ends of a message, that have started, with their
    transfers; posted is the number of members that began to send without waiting."""

    __slots__ = ("arrived", "last_ns", "posted")

    def __init__(self) -> None:
        self.arrived: list[tuple[KernelRun, int]] = []
        self.last_ns = 0
        self.posted = 0


class _Host:
    """The host threads of one rank, of which one runs at a time."""

    def __init__(self, rank: int, program: Sequence[Instruction], machine: _Machine):
        self.rank = rank
        self.program = program
        self.machine = machine
        self.timeline = RankTimeline()
        self.position = 0
        self.now_ns = 0
        self.step = -1
        self.missing = 0
        self.streams: dict[int, _Stream] = {}
        self.events: dict[int, list[KernelRun]] = {}

    def release(self, at_ns: int) -> None:
        """One of the runs that the host waits for is known."""
        self.now_ns = max(self.now_ns, at_ns)
        self.missing -= 1
        if not self.missing:
            self.machine.hosts.append(self)

    def advance(self) -> None:
        """Executes instructions until the host has to wait for something not yet known."""
        while self.position < len(self.program):
            instruction = self.program[self.position]
            if isinstance(instruction, Kernel):
                if not self._launch(instruction):
                    return
            elif isinstance(instruction, Synchronize):
                if not self._synchronize(instruction):
                    return
            else:
                self._pass(instruction)
            self.position += 1
        self.timeline.end_ns = self.now_ns

    def _stream(self, number: int) -> _Stream:
        return self.streams.setdefault(number, _Stream())

    def _launch(self, kernel: Kernel) -> bool:
        latencies = self.machine.latencies
        runs = self.timeline.kernels
        if len(runs) >= latencies.launch_queue:
            first = runs[-latencies.launch_queue]
            if first.start_ns < 0:
                self.missing = 1
                first.start_waiters.append(self)
                return False
            self.now_ns = max(self.now_ns, first.start_ns)
        call_ns = self.now_ns + max(0, kernel.host_ns - latencies.launch_call_ns)
        self.now_ns = call_ns + latencies.launch_call_ns
        run = KernelRun(self.rank, kernel, self.step, call_ns, self.now_ns)
        runs.append(run)
        stream = self._stream(kernel.stream)
        run.earliest_ns = call_ns + latencies.launch_to_start_ns
        dependencies = [(each, latencies.event_ns) for each in stream.waits]
        if stream.last:
            dependencies.append((stream.last, latencies.same_stream_ns))
        stream.waits, stream.last = [], run
        if latencies.one_queue and len(runs) > 1:
            self._queue_behind(runs[-2], run)
        for before, latency_ns in dependencies:
            if before.end_ns < 0:
                run.missing += 1
                before.end_waiters.append((run, latency_ns))
            else:
                run.earliest_ns = max(run.earliest_ns, before.end_ns + latency_ns)
        self.machine.enqueue(run)
        return True

    def _queue_behind(self, before: KernelRun, run: KernelRun) -> None:
        if before.start_ns < 0:
            run.missing += 1
            before.next_in_queue = run
        else:
            run.earliest_ns = max(run.earliest_ns, before.start_ns)

    def _synchronize(self, instruction: Synchronize) -> bool:
        chosen = (
            list(self.streams.values())
            if instruction.stream is None
            else [self._stream(instruction.stream)]
        )
        runs = [run for stream in chosen for run in stream.pending()]
        unknown = [run for run in runs if run.end_ns < 0]
        if unknown:
            self.missing = len(unknown)
            self.timeline.calls.append(HostCall(instruction, self.now_ns, -1))
            for run in unknown:
                run.end_waiters.append((self, 0))
            return False
        calls = self.timeline.calls
        if not calls or calls[-1].end_ns >= 0:
            calls.append(HostCall(instruction, self.now_ns, -1))
        self.now_ns = max([self.now_ns, *(run.end_ns for run in runs)])
        self.now_ns += self.machine.latencies.synchronize_return_ns
        calls[-1].end_ns = self.now_ns
        return True

    def _pass(self, instruction: RecordEvent | WaitEvent | HostWork | BeginStep) -> None:
        """What never makes the host wait."""
        if isinstance(instruction, HostWork):
            self.now_ns += instruction.duration_ns
        elif isinstance(instruction, BeginStep):
            self.step = instruction.number
            self.timeline.steps.append((instruction.number, self.now_ns))
        else:
            stream = self._stream(instruction.stream)
            if isinstance(instruction, RecordEvent):
                self.events[instruction.event] = stream.pending()
            else:
                stream.waits += self.events[instruction.event]
            start_ns, self.now_ns = self.now_ns, self.now_ns + self.machine.latencies.event_call_ns
            self.timeline.calls.append(HostCall(instruction, start_ns, self.now_ns))


class _Machine:
    def __init__(self, programs: Sequence[Sequence[Instruction]], latencies: Latencies):
        self.latencies = latencies
        self.all_hosts = [_Host(rank, program, self) for rank, program in enumerate(programs)]
        self.hosts = deque(self.all_hosts)
        self.ended: deque[KernelRun] = deque()
        self.freed: deque[tuple[KernelRun, int]] = deque()
        """Kernels at the head of their queue, since then."""
        self.meetings: dict[Hashable, _Meeting] = {}
        self.keys: dict[KernelRun, list[Hashable]] = {}
        self.counts: dict[Hashable, int] = {}

    def run(self) -> None:
        while self.hosts or self.ended or self.freed:
            if self.freed:
                self._release(*self.freed.popleft())
                continue
            if not self.ended:
                self.hosts.popleft().advance()
                continue
            run = self.ended.popleft()
            for waiter, latency_ns in run.end_waiters:
                if isinstance(waiter, _Host):
                    waiter.release(run.end_ns + latency_ns)
                    continue
                self._release(waiter, run.end_ns + latency_ns)
            run.end_waiters = []
        self._check_all_done()

    def _release(self, run: KernelRun, at_ns: int) -> None:
        """One of the things that the kernel waits for has come."""
        run.earliest_ns = max(run.earliest_ns, at_ns)
        run.missing -= 1
        if not run.missing:
            self._start(run)

    def enqueue(self, run: KernelRun) -> None:
        """Registers whom a launched kernel will meet; starts it if nothing is before it."""
        call = run.kernel.call
        if call and call.messages:
            self.keys[run] = [
                self._number((each.src, each.dst, each.channel), run.rank) for each in call.messages
            ]
        elif call:
            place = (call.group.name, call.phase)
            count = self._number((place, call.role), run.rank)[1]
            self.keys[run] = [(place, count)]
        if not run.missing:
            self._start(run)

    def _number(self, key: Hashable, rank: int) -> tuple[Hashable, int]:
        count = self.counts.get((key, rank), 0)
        self.counts[key, rank] = count + 1
        return key, count

    def _start(self, run: KernelRun) -> None:
        run.start_ns = run.earliest_ns
        for host in run.start_waiters:
            host.release(run.start_ns)
        run.start_waiters = []
        if run.next_in_queue is not None:
            self.freed.append((run.next_in_queue, run.start_ns))
        call = run.kernel.call
        if not call:
            self._end(run, run.start_ns + run.kernel.duration_ns)
            return
        size = 2 if call.messages else len(call.group.ranks)
        transfers = [each.transfer_ns for each in call.messages] or [call.transfer_ns]
        run.missing = len(transfers)
        for key, transfer_ns in zip(self.keys.pop(run), transfers, strict=True):
            meeting = self.meetings.setdefault(key, _Meeting())
            if call.role != "receive":
                # Flags are seen once they are written.
                came_ns = run.start_ns + (transfer_ns if call.role == "flag" else 0)
                meeting.last_ns = max(meeting.last_ns, came_ns)
            if call.role in ("post", "flag"):
                meeting.posted += 1
                run.missing = 0
                self._end(run, run.start_ns + transfer_ns)
            else:
                meeting.arrived.append((run, transfer_ns))
            if call.role == "meet" and len(meeting.arrived) == size:
                self._complete(self.meetings.pop(key))
            elif meeting.posted == size:
                # A receive waits for what is sent, not for the receives of others.
                self._complete(meeting)
                meeting.arrived = []

    def _complete(self, meeting: _Meeting) -> None:
        """All have arrived: a kernel ends with the last of what it holds."""
        for member, transfer_ns in meeting.arrived:
            began_ns = max(meeting.last_ns, member.start_ns)
            member.earliest_ns = max(member.earliest_ns, began_ns + transfer_ns)
            member.missing -= 1
            if not member.missing:
                self._end(member, member.earliest_ns + member.kernel.end_jitter_ns)

    def _end(self, run: KernelRun, end_ns: int) -> None:
        run.end_ns = end_ns
        self.ended.append(run)

    def _check_all_done(self) -> None:
        stuck = [
            f"rank {host.rank} at instruction {host.position} of {len(host.program)}"
            for host in self.all_hosts
            if host.position < len(host.program)
        ]
        unmet = [key for key, meeting in self.meetings.items() if meeting.arrived]
        if stuck or unmet:
            raise Deadlock(f"{'; '.join(stuck[:4])}; waiting: {unmet[:4]}")


def run_programs(
    programs: Sequence[Sequence[Instruction]], latencies: Latencies | None = None
) -> list[RankTimeline]:
    """When everything that the ranks' programs ask for runs, on one common clock in ns.

    Raises:
        Deadlock: kernels wait for each other, or for a call that is never made.
    """
    machine = _Machine(programs, latencies or Latencies())
    machine.run()
    return [host.timeline for host in machine.all_hosts]
