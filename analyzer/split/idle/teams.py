"""What the threads of the host that work in turns do at an instant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import distinct
from stepsplit.analyzer.split.idle.threads import STEP, Doing, Thread, first, named, thread_at
from stepsplit.analyzer.trace import Bool, Category, Events, Int64, UInt8

_BACKWARD = re.compile(r"^(?:torch::)?autograd::|Backward\d*$")
_RUNS_BACKWARD = re.compile(r"^(?!.*\.py\().*backward", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Team:
    """A thread that launches, and those that it takes turns with: backward has its own threads.

    backward are the members that run gradients, others the rest.
    """

    events: Events
    threads: tuple[Thread, ...]
    backward: tuple[Thread, ...]
    others: tuple[Thread, ...]

    def doing_at(self, when_ns: Int64) -> tuple[UInt8, Int64]:
        """What the launching thread does at each instant, or while it does nothing the next.

        With the row that names it, -1 for none.
        """
        doing, row = self.threads[0].doing_at(when_ns)
        for other in self.threads[1:]:
            free = np.flatnonzero(doing == Doing.NO_OP)
            doing[free], row[free] = other.doing_at(when_ns[free])
        free = np.flatnonzero(doing == Doing.NO_OP)
        frame = first(*(thread.frame_at(when_ns[free]) for thread in self.threads))
        doing[free], row[free] = self._without_op(when_ns[free], frame), frame
        return doing, row

    def _without_op(self, when_ns: Int64, frame: Int64) -> UInt8:
        """Python, where its ops would have been recorded and nothing speaks against it.

        Between its ops the engine of backward works, on threads that the trace may lack; a range
        of gloo is a message that waits.
        """
        name = self.events.name_id[frame]
        pattern = np.array([_RUNS_BACKWARD.search(n) is not None for n in self.events.names])
        message = np.array([n.startswith("gloo:") for n in self.events.names])
        blind = not any(len(thread.ops) for thread in self.threads)
        hidden = (frame >= 0) & pattern[name] & (not self.backward)
        works = self._in_backward(when_ns) | ((frame >= 0) & message[name]) | blind
        cases = [~self._recorded(when_ns) | hidden, works]
        found = np.select(cases, (Doing.UNTOLD, Doing.WORKING), Doing.NO_OP)
        return found.astype(np.uint8)

    def _in_backward(self, when_ns: Int64) -> Bool:
        """Whether backward's threads were the last to begin something, and will be the next.

        Python that they run between is told by its own frames.
        """
        before_ours, after_ours = _neighbors(self.backward, when_ns)
        before, after = _neighbors(self.others, when_ns)
        python = [thread.python.innermost_at(when_ns) for thread in self.backward]
        runs_python = first(*python) >= 0 if python else np.zeros(len(when_ns), dtype=np.bool_)
        return np.asarray((before_ours > before) & (after_ours < after) & ~runs_python)

    def _recorded(self, when_ns: Int64) -> Bool:
        """Whether the instant lies within what was recorded of the threads."""
        begins_ns = np.concatenate([thread.begins_ns for thread in self.threads])
        begun = begins_ns.min(initial=np.iinfo(np.int64).max)
        last = max(thread.last_ns for thread in self.threads)
        return np.asarray((begun <= when_ns) & (when_ns < last))

    @property
    def edges_ns(self) -> Int64:
        """When anything that is told begins or ends, ascending."""
        return np.sort(np.concatenate([thread.edges_ns for thread in self.threads]), kind="stable")


@dataclass(frozen=True, slots=True)
class Threads:
    """The threads of a host: the thread of each lane, the one that steps, those of backward."""

    of_lane: Int64
    main: int
    backward: tuple[int, ...]

    def team(self, thread: int) -> tuple[int, ...]:
        """The numbers of the thread and of those that it takes turns with."""
        return (thread, *self.backward) if thread == self.main else (thread, self.main)


def threads_of(events: Events) -> Threads:
    """The threads of the host; a thread's calls may lie on lanes of their own."""
    number: dict[tuple[str, str], int] = {}
    of_lane = np.array(
        [number.setdefault((lane.pid, lane.tid), len(number)) for lane in events.lanes],
        dtype=np.int64,
    )
    lanes = distinct(events.lane[events.of(Category.OP) & named(events, _BACKWARD)])
    gradients = np.isin(of_lane, of_lane[lanes])
    main = _main(events, of_lane, gradients)
    return Threads(of_lane, main, tuple(sorted({*of_lane[gradients].tolist()} - {main})))


def team_of(events: Events, threads: Threads, thread: int) -> Team:
    """The team of one thread, itself first."""
    numbers = threads.team(thread)
    found = [thread_at(events, np.flatnonzero(threads.of_lane == one)) for one in numbers]
    backward = tuple(t for n, t in zip(numbers, found, strict=True) if n in threads.backward)
    others = tuple(t for n, t in zip(numbers, found, strict=True) if n not in threads.backward)
    return Team(events, tuple(found), backward, others)


def _main(events: Events, of_lane: Int64, gradients: Bool) -> int:
    """The thread that steps the profiler, else the one that is longest in ops or calls.

    One that runs gradients (its lanes are told) only if there is no other.
    """
    ops = events.of(Category.OP)
    for mask in (
        events.named(STEP) & (ops | events.of(Category.ANNOTATION)),
        ops & ~gradients[events.lane],
        ops,
        events.of(Category.RUNTIME),
    ):
        if mask.any():
            weights = events.dur_ns[mask] + 1
            return int(np.bincount(of_lane[events.lane[mask]], weights).argmax())
    return -1


def _neighbors(threads: Sequence[Thread], when_ns: Int64) -> tuple[Int64, Int64]:
    """When the threads last began something before each instant, and when they next do."""
    least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    begins = np.sort(np.concatenate([[least], *(t.begins_ns for t in threads), [most]]))
    after = np.searchsorted(begins, when_ns, side="right")
    return begins[after - 1], begins[after]
