"""What a hang is: who waits where for whom, and who waits for nobody; the fields of its JSON.

The fields are those of schema "stepsplit.hang/1". Sequence numbers are torch's, per group. None is
unknown. Times are text, for they are beyond what a JSON number holds exactly.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

SCHEMA = "stepsplit.hang/1"
HANG_NAME = "hang.json"


class StuckGroup(Struct, frozen=True):
    """A process group by its name in the job; its ranks in group order."""

    name: str
    description: str
    ranks: tuple[int, ...]

    @property
    def in_words(self) -> str:
        """The group by its description and its name in the job."""
        name = f"group {self.name}"
        return f"{self.description} ({name})" if self.description else name


class Missing(Struct, frozen=True):
    """A rank that has not made a call, and how far it came on that group."""

    rank: int
    last_enqueued: int | None
    last_completed: int | None


class Stuck(Struct, frozen=True, kw_only=True):
    """A collective, or a message between two ranks, that does not end.

    Every member is in one of enqueued (called, not seen to start), started, completed, missing
    (not called) and no_dump. waits_for are those that hold it up: none where all have called it
    and some have completed it, for then those that have not wait for nobody else. queued counts
    the calls that wait behind it on its group. called_unix_ns is when the first member called.
    """

    group: StuckGroup
    op: str
    seq: int
    dtype: str | None
    message_bytes: int | None
    called_unix_ns: str
    enqueued: tuple[int, ...] = ()
    started: tuple[int, ...] = ()
    completed: tuple[int, ...] = ()
    missing: tuple[Missing, ...] = ()
    no_dump: tuple[int, ...] = ()
    waits_for: tuple[int, ...] = ()
    queued: int = 0

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that have called it and are not done with it."""
        return tuple(sorted(self.enqueued + self.started))


class Side(Struct, frozen=True):
    """What some members say of a call on which they all should agree."""

    value: str
    ranks: tuple[int, ...]


class Mismatch(Struct, frozen=True):
    """The first call of a group on whose op, dtype or size (bytes) its members disagree."""

    group: StuckGroup
    seq: int
    what: str
    sides: tuple[Side, ...]

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks that differ from the majority; all of them where there is none."""
        first, second = self.sides[:2]
        majority = first.ranks if len(first.ranks) > len(second.ranks) else ()
        every = {rank for side in self.sides for rank in side.ranks}
        return tuple(sorted(every - set(majority)))


class StackFrame(Struct, frozen=True):
    """A line of code that a stack goes through."""

    function: str
    file: str
    line: int


class LastCall(Struct, frozen=True, kw_only=True):
    """The newest call in a rank's dump; stack is innermost first, empty where it was not kept."""

    rank: int
    group: StuckGroup
    op: str
    seq: int
    state: str
    called_unix_ns: str
    stack: tuple[StackFrame, ...]


class Culprit(Struct, frozen=True):
    """Ranks that others wait for, at the end of a chain of waits.

    cause is not_called, unfinished (they have called all that others have, and do not end it),
    no_dump, mismatch, deadlock (they wait for each other) or not_ending (all are there). held are
    the ranks that wait for them, through others or not.
    """

    ranks: tuple[int, ...]
    cause: str
    held: tuple[int, ...]
    message: str


class HangWarning(Struct, frozen=True):
    """Something that the dumps cannot tell, in words."""

    code: str
    message: str
    rank: int | None = None


class Hang(Struct, frozen=True, kw_only=True):
    """How the calls of a job stood when its dumps were written; stuck is empty where all is done.

    stuck is ordered by what it explains, the causes first. ranks left a dump; no_dump are known to
    be of the job and left none. last_calls are those of the culprits and of missing ranks.
    """

    schema: str = SCHEMA
    verdict: str
    ranks: tuple[int, ...]
    no_dump: tuple[int, ...] = ()
    culprits: tuple[Culprit, ...] = ()
    stuck: tuple[Stuck, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    last_calls: tuple[LastCall, ...] = ()
    warnings: tuple[HangWarning, ...] = ()


def to_json(hang: Hang) -> bytes:
    """The hang as JSON text, as report.json is written."""
    return msgspec.json.format(msgspec.json.encode(hang), indent=1) + b"\n"
