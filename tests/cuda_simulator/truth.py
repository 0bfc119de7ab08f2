"""What a simulated job spent in exposed transfers and waits, from when its kernels truly ran.

By the definitions alone: a member has arrived when its kernel starts, data moves from the last
arrival on, and compute covers both. Nothing here knows how the analyzer finds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .machine import KernelRun
from .program import Kernel
from .simulate import Simulation

Span = tuple[int, int]

_LATE_NS = 10_000
"""Communication may end so much after the compute that waited for it was launched."""


@dataclass(frozen=True)
class Exposed:
    """Time of one rank over all recorded steps."""

    transfer_ns: int
    wait_ns: int


def measure_exposed(simulation: Simulation) -> list[Exposed]:
    """The exposed transfers and waits of each rank."""
    first = simulation.job.warmup
    last_start: dict[tuple[str, str, str, int], int] = {}
    numbered: list[list[tuple[KernelRun, tuple[str, str, str, int]]]] = []
    for timeline in simulation.timelines:
        counts: dict[tuple[str, str, str], int] = {}
        own = []
        for run in timeline.kernels:
            call = run.kernel.call
            if call is None or call.messages:
                continue
            role = {"meet": "", "flag": "post"}.get(call.role, call.role)
            count = counts.get((call.group.name, call.phase, role), 0)
            counts[call.group.name, call.phase, role] = count + 1
            # A receive waits for what was posted.
            key = (call.group.name, call.phase, "" if call.role == "meet" else "post", count)
            own.append((run, key))
            if call.role != "receive":
                last_start[key] = max(last_start.get(key, 0), run.start_ns)
        numbered.append(own)
    result = []
    for timeline, own in zip(simulation.timelines, numbered, strict=True):
        recorded = [run for run in timeline.kernels if run.step >= first]
        # The first recorded step begins with its mark, or with the end of what was launched before.
        earlier = [run.end_ns for run in timeline.kernels if run.step < first]
        begin_ns = max([timeline.steps[first][1], *earlier])
        compute = _merge((r.start_ns, r.end_ns) for r in recorded if _computes(r.kernel))
        compute.insert(0, (begin_ns, begin_ns))
        pieces = [(r.start_ns, r.start_ns, r.end_ns) for r in recorded if _copies(r.kernel)]
        # Between the copies of one gather its data moves, too: they are one call.
        in_call = [run for run, _ in own if run.kernel.call.phase.startswith("copies")]
        for before, after in pairwise(in_call):
            phases = before.kernel.call.phase, after.kernel.call.phase
            if phases == ("copies ready", "copies done") and before.step >= first:
                pieces.append((before.end_ns, before.end_ns, after.start_ns))
        for run, key in own:
            if run.step >= first:
                # Once all have come data moves to the end of the call.
                moves = run.kernel.call.role == "post" or run.kernel.call.phase.endswith("done")
                waits_for = run.start_ns if moves else last_start[key]
                moved_from = min(max(waits_for, run.start_ns), run.end_ns)
                pieces.append((run.start_ns, moved_from, run.end_ns))
        pieces.sort()
        transfer_ns = wait_ns = 0
        for start, end in _list_gaps(compute):
            # What is still open when compute resumes held nothing up.
            here = [one for one in pieces if one[0] < end and start < one[2] <= end + _LATE_NS]
            moving = _merge(_clip(one[1:], start, end) for one in here)
            every = _merge(_clip((one[0], one[2]), start, end) for one in here)
            transfer_ns += _length(moving)
            wait_ns += _length(every) - _length(moving)
        result.append(Exposed(transfer_ns, wait_ns))
    return result


def _computes(kernel: Kernel) -> bool:
    return kernel.call is None and not kernel.name.startswith("Memcpy")


def _copies(kernel: Kernel) -> bool:
    return kernel.call is None and kernel.name.startswith(("Memcpy PtoP", "Memcpy DtoD"))


def _list_gaps(compute: Sequence[Span]) -> list[Span]:
    return [(before[1], after[0]) for before, after in pairwise(compute)]


def _clip(span: Span, start: int, end: int) -> Span:
    return max(span[0], start), max(min(span[1], end), max(span[0], start))


def _merge(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(spans: Sequence[Span]) -> int:
    return sum(end - start for start, end in spans)
