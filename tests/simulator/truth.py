"""The right answer for a simulated job: each step in its buckets, and who waited for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.instants import Instant, instants_of, total_ns
from simulator.ran import Run
from simulator.windows import Window, windows_of


@dataclass(frozen=True, slots=True)
class TrueSplit:
    """One step of one rank in ns of true time. The seven buckets add up to the window.

    overlapped_ns is the compute under which data moved.
    """

    rank: int
    step: int
    partial: bool
    start_ns: int
    end_ns: int
    compute_ns: int = 0
    collective_ns: int = 0
    p2p_ns: int = 0
    skew_ns: int = 0
    bubble_ns: int = 0
    copy_ns: int = 0
    idle_ns: int = 0
    overlapped_ns: int = 0


@dataclass(frozen=True, slots=True)
class TrueWait:
    """Exposed waiting: rank waits for owner in a call of the group; bucket is skew or bubble."""

    rank: int
    step: int
    bucket: str
    owner: int
    group: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Truth:
    """All steps and all exposed waits, by rank and time; the waits add up to skew and bubble."""

    splits: tuple[TrueSplit, ...]
    waits: tuple[TrueWait, ...]


def truth_of(run: Run) -> Truth:
    """The truth about a run, by the rules of the definitions and on the true clock."""
    splits: list[TrueSplit] = []
    waits: list[TrueWait] = []
    for number, rank in enumerate(run.ranks):
        windows = windows_of(rank)
        instants = instants_of(number, rank, run.job.stage_of, windows)
        splits += [_split(number, window, instants) for window in windows]
        waits += _waits(number, instants)
    return Truth(tuple(splits), tuple(waits))


def _split(number: int, window: Window, instants: Sequence[Instant]) -> TrueSplit:
    here = [instant for instant in instants if instant.step == window.step]
    total = total_ns(here)
    overlapped_ns = total_ns(instant for instant in here if instant.overlapped).total()
    assert total.total() == window.end_ns - window.start_ns, f"time is lost in {window}"
    return TrueSplit(
        number,
        window.step,
        window.partial,
        window.start_ns,
        window.end_ns,
        compute_ns=total["compute"],
        collective_ns=total["collective"],
        p2p_ns=total["p2p"],
        skew_ns=total["skew"],
        bubble_ns=total["bubble"],
        copy_ns=total["copy"],
        idle_ns=total["idle"],
        overlapped_ns=overlapped_ns,
    )


def _waits(number: int, instants: Sequence[Instant]) -> list[TrueWait]:
    """The waits; instants of one piece that touch are one wait."""
    found: list[TrueWait] = []
    before: Instant | None = None
    for now in instants:
        if now.wait is not None:
            start_ns = now.start_ns
            if before is not None and (before.wait, before.step) == (now.wait, now.step):
                start_ns = found.pop().start_ns
            wait = now.wait
            found.append(
                TrueWait(number, now.step, now.bucket, wait.owner, wait.group, start_ns, now.end_ns)
            )
        before = now
    return found
