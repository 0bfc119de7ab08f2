"""The result of the hang analysis, also the fields of its JSON (schema "stepsplit.hang/1").

Sequence numbers are those of torch, per group. None means unknown. Times are strings, because they
exceed the exact integer range of JSON numbers.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from stepsplit.analyzer.report.io import Document
from stepsplit.collectors.formats.run_spec import is_described

SCHEMA = "stepsplit.hang/1"

HANG_NAME = "hang.json"

STUCK, LATE, MOVING, CLEAR = "stuck", "late", "moving", "clear"
"""What is known of the job: stuck; late, which may end by itself; moving; or no call is open."""


class StuckGroup(Struct, frozen=True):
    """A process group.

    Attributes:
        name: name of the group in the job.
        description: description of the group, such as "default_pg" or "TP"; "" if unknown.
        ranks: global ranks in group order.
    """

    name: str
    description: str
    ranks: tuple[int, ...]

    @property
    def in_words(self) -> str:
        """Description and name of the group, such as "TP (group 1)"."""
        name = f"group {self.name}"
        return f"{self.description} ({name})" if is_described(self.description) else name


class Missing(Struct, frozen=True):
    """A rank that has not made a call, and its progress in the group.

    Attributes:
        rank: global rank.
        last_enqueued: last sequence number that it enqueued in the group; None if unknown.
        last_completed: last sequence number that it completed; None if unknown.
    """

    rank: int
    last_enqueued: int | None
    last_completed: int | None


class Stuck(Struct, frozen=True, kw_only=True):
    """A collective, or a message between two ranks, that does not end.

    Every member is in exactly one of enqueued, started, completed, missing and no_dump.

    Attributes:
        group: its process group.
        op: operation, such as "all_reduce".
        seq: torch's sequence number in the group.
        dtype: data type; None if unknown.
        message_bytes: size in bytes; None if unknown or different between members.
        called_unix_ns: time of the first member's call, as text.
        enqueued: ranks that called it without a recorded start.
        started: ranks on which it has started.
        completed: ranks on which it has completed.
        missing: ranks that have not called it.
        no_dump: members without a dump.
        waits_for: ranks that block it; empty if all have called it and some have completed it.
        queued: number of calls queued after it in the group.
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
        """The ranks that have called it and have not completed it."""
        return tuple(sorted(self.enqueued + self.started))


class MismatchSide(Struct, frozen=True):
    """The value that some members have for a property on which all members must agree.

    Attributes:
        value: the value, as text.
        ranks: the ranks with this value.
    """

    value: str
    ranks: tuple[int, ...]


class Mismatch(Struct, frozen=True):
    """The first call of a group with different arguments on its members.

    Attributes:
        group: its process group.
        seq: torch's sequence number in the group.
        what: the property that differs: "op", "dtype" or "size" (bytes).
        sides: the values with their ranks, largest side first.
        usual: the only one of the values that earlier calls of the group had; None if not one.
        is_message: whether it is a message; torch numbers these on their own.
    """

    group: StuckGroup
    seq: int
    what: str
    sides: tuple[MismatchSide, ...]
    usual: str | None = None
    is_message: bool = False

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks that differ from the majority, else from earlier calls, else all ranks."""
        first, second = self.sides[:2]
        agreed = next((side.ranks for side in self.sides if side.value == self.usual), ())
        majority = first.ranks if len(first.ranks) > len(second.ranks) else agreed
        every = {rank for side in self.sides for rank in side.ranks}
        return tuple(sorted(every - set(majority)))


class StackFrame(Struct, frozen=True):
    """A frame of a recorded stack.

    Attributes:
        function: function name.
        file: source file.
        line: line number.
    """

    function: str
    file: str
    line: int


class LastCall(Struct, frozen=True, kw_only=True):
    """The last call in the dump of a rank.

    Attributes:
        rank: global rank.
        group: process group of the call.
        op: operation, such as "all_reduce".
        seq: torch's sequence number in the group.
        state: "enqueued", "started" or "completed".
        called_unix_ns: time of the call, as text.
        stack: frames, innermost first; empty if not recorded.
    """

    rank: int
    group: StuckGroup
    op: str
    seq: int
    state: str
    called_unix_ns: str
    stack: tuple[StackFrame, ...]


class Culprit(Struct, frozen=True):
    """Ranks at the end of a chain of waits.

    Attributes:
        ranks: the ranks to blame.
        cause: "not_called", "unfinished" (stuck in an older call), "no_dump", "mismatch",
            "deadlock" (they wait for each other), "order" (they left the usual order of calls),
            "members_unknown" (another member of the group may be missing) or "not_ending" (all
            members have called it). With the states of the ranks also "ended",
            "raised", "stopped", "silent" and "late" (it computes, and may not be stuck).
        held: the ranks that wait for them, directly or through others.
        message: the finding in one sentence.
    """

    ranks: tuple[int, ...]
    cause: str
    held: tuple[int, ...]
    message: str


class RankNow(Struct, frozen=True, kw_only=True):
    """The state of a rank when a running job was looked at.

    Attributes:
        rank: global rank.
        condition: "running", "raised" (its main thread ended with an exception), "stopped" (the
            process), "silent" (no answer) or "ended".
        steps: steps that it has ended; None if it did not answer.
        since_step_ns: time since the last of them ended; None if it did not answer.
        busy_fraction: share of the time between two looks in which its main thread ran or was ready
            to; None if unknown.
        error: its exception; "" if it has none.
        stack: stack of its main thread, or of the exception, innermost frame first.
    """

    rank: int
    condition: str
    steps: int | None = None
    since_step_ns: int | None = None
    busy_fraction: float | None = None
    error: str = ""
    stack: tuple[StackFrame, ...] = ()


class HangWarning(Struct, frozen=True):
    """A limitation of the analysis.

    Attributes:
        code: identifier of the warning.
        message: text.
        rank: rank of the dump; None if the warning concerns all dumps.
    """

    code: str
    message: str
    rank: int | None = None


class Hang(Struct, frozen=True, kw_only=True):
    """The state of the calls of a job when its Flight Recorder dumps were written.

    Attributes:
        schema: version of the JSON, "stepsplit.hang/1".
        verdict: the findings as one text.
        ranks: ranks with a dump.
        no_dump: ranks of the job without a dump.
        culprits: ranks to blame with their cause.
        stuck: calls that do not end, those that explain most first; empty if all have completed.
        mismatches: calls on whose op, dtype or size the members disagree.
        last_calls: last calls of the culprits and of missing ranks.
        warnings: limitations of the analysis.
        condition: "stuck", "late" (a rank computes longer than usual), "moving" (steps or calls go
            on) or "clear" (no call is open).
        note: why the condition is not "stuck"; "" if it is.
        states: the ranks of a running job when it was looked at; empty for dumps alone.
        ras: what NCCL's RAS says, one sentence each: ranks that have launched fewer collectives of
            a communicator than others, or do not answer. Its ranks are those of the communicator.
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
    condition: str = "stuck"
    note: str = ""
    states: tuple[RankNow, ...] = ()
    ras: tuple[str, ...] = ()


def to_json(hang: Hang) -> bytes:
    """The hang as JSON text."""
    return msgspec.json.format(msgspec.json.encode(hang), indent=1) + b"\n"


def from_json(text: bytes, source: object = HANG_NAME) -> Hang:
    """Decode a hang. Raises DataError if the text does not have this schema."""
    document = Document(Hang, SCHEMA, "a stepsplit hang", "analyze the dumps again")
    return document.decode(text, source)
