"""Where the steps of a simulated rank begin and end, by the rule of the definitions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from simulator.program import Compute, Copy
from simulator.ran import Mark, Ran, RankRun


@dataclass(frozen=True, slots=True)
class Window:
    """One step of a rank on the true clock; partial where earlier work runs into it."""

    step: int
    partial: bool
    start_ns: int
    end_ns: int


def windows_of(rank: RankRun) -> tuple[Window, ...]:
    """The rank's steps, which touch; one without kernels of its own is empty and left out.

    A step ends with the last kernel that it launched on the stream that computes most, or with its
    mark on the host if that ends later. The first begins where the last device event launched
    before it ends, else at its start on the host.
    """
    marks = sorted((m for m in rank.marks if m.step is not None), key=lambda m: m.start_ns)
    if not marks:
        return ()
    main = _main_stream(rank)
    kernels = [r for r in rank.device if r.work.stream == main and not isinstance(r.work, Copy)]
    earlier = [ran.end_ns for ran in rank.device if ran.launch < marks[0].first_call]
    start_ns = max(earlier, default=marks[0].start_ns)
    windows = []
    for mark in marks:
        end_ns = max([start_ns, *(ran.end_ns for ran in kernels if _within(ran, mark))])
        # The host's work after the last kernel belongs to the step that does it.
        end_ns = max(end_ns, mark.end_ns) if end_ns > start_ns else end_ns
        partial = mark is marks[0] and start_ns > mark.start_ns
        assert mark.step is not None
        windows.append(Window(mark.step, partial, start_ns, end_ns))
        start_ns = end_ns
    return tuple(window for window in windows if window.end_ns > window.start_ns)


def _main_stream(rank: RankRun) -> str:
    busy: Counter[str] = Counter()
    for ran in rank.device:
        if isinstance(ran.work, Compute):
            busy[ran.work.stream] += ran.end_ns - ran.start_ns
    return busy.most_common(1)[0][0] if busy else ""


def _within(ran: Ran, mark: Mark) -> bool:
    return mark.first_call <= ran.launch < mark.after_call
