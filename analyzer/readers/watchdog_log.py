"""Lines of the NCCL watchdog in the log of a job: which ranks waited too long, in which call.

Wordings of torch 1.12 to 2.13. The rank in brackets before a line is that of the job; "[Rank 3]"
within it is that of the group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.ops import parse_op
from stepsplit.analyzer.readers.compression import open_unpacked
from stepsplit.analyzer.readers.sources import Source

IS_WATCHDOG = re.compile(rb"[Ww]atchdog caught collective operation timeout: WorkNCCL\(")


class TimedOut(Struct, frozen=True):
    """A call that a rank gave up on.

    Attributes:
        rank: rank of the job, or of the group if is_group_rank.
        is_group_rank: whether the line has no rank of the job, as before torch 2.2.
        seq: torch's sequence number in the group.
        op: operation, such as "all_reduce".
        elements: elements of its input; None before torch 2.1.
        waited_ms: how long it ran.
    """

    rank: int
    is_group_rank: bool
    seq: int
    op: str
    elements: int | None
    waited_ms: int


class WatchdogStatus(Struct, frozen=True):
    """How far a rank came in a group, as its watchdog says.

    Attributes:
        rank: as in TimedOut.
        is_group_rank: as in TimedOut.
        group: name of the group in the job.
        description: its description; "" if it has none.
        seq: the call at which the watchdog gave up.
        last_enqueued: the last call that the rank made.
        last_completed: the last one that ended.
    """

    rank: int
    is_group_rank: bool
    group: str
    description: str
    seq: int
    last_enqueued: int
    last_completed: int


class WatchdogLog(Struct, frozen=True):
    """What watchdogs wrote, each thing once, in the order of the log."""

    timeouts: tuple[TimedOut, ...]
    statuses: tuple[WatchdogStatus, ...]


_JOB_RANK = re.compile(r"\[rank(\d{1,7})\]:")

# Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE,
# NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran for 600012 milliseconds
_TIMEOUT = re.compile(
    r"\[Rank (\d{1,7})\]\s+Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(\d{1,18}), OpType=(\w{1,60})(?:, NumelIn=(\d{1,18}))?(?:, NumelOut=\d+)?"
    r"[^)]{0,80}\)=\d+\) ran for (\d{1,18}) milliseconds"
)

_STATUS = re.compile(
    r"\[PG (?:ID )?(?P<id>\w{1,60})(?: PG GUID (?P<guid>[^\s()]{1,60}))?"
    r"(?: ?\((?P<name>[^)]{0,80})\))? Rank (?P<rank>\d{1,7})\] .{0,120}?"
    r"(?:at work(?: sequence id)?|at NCCL work): (?P<seq>\d{1,18})\b.{0,40}?"
    r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,18}),"
    r" last completed (?:NCCL )?work: (?P<completed>-?\d{1,18})"
)

# Longer lines are output of the training, and the patterns look far ahead.
_MAX_LINE = 4096

_MAX_BYTES = 256 << 20
"""Of a log, which is in memory as a whole; what follows is not read. Chosen, not measured."""


def read_watchdog_log(source: Source) -> WatchdogLog:
    """Reads the lines of the watchdogs, from a log of all ranks or of one. Raises DataError."""
    with open_unpacked(source) as content:
        body = content.read(_MAX_BYTES)
    log = parse_watchdog_lines(body.decode(errors="replace").splitlines())
    if not log.timeouts:
        raise DataError(source.where, "no line of the NCCL watchdog", "name the output of a job")
    return log


def parse_watchdog_lines(lines: Iterable[str]) -> WatchdogLog:
    """What these lines say; a line may hold what several threads wrote at once."""
    timeouts: dict[TimedOut, None] = {}
    statuses: dict[WatchdogStatus, None] = {}
    for line in lines:
        # In most lines of a job's output nothing else is looked for.
        if "Rank" not in line:
            continue
        text = line[:_MAX_LINE]
        job_ranks = list(_JOB_RANK.finditer(text))
        for match in _TIMEOUT.finditer(text):
            rank, is_group_rank = _find_rank(job_ranks, match.start(), int(match[1]))
            name = match[3].lower().strip("_")
            timeouts[
                TimedOut(
                    rank,
                    is_group_rank,
                    int(match[2]),
                    name if parse_op(name) == "unknown" else parse_op(name),
                    int(match[4]) if match[4] else None,
                    int(match[5]),
                )
            ] = None
        for match in _STATUS.finditer(text):
            rank, is_group_rank = _find_rank(job_ranks, match.start(), int(match["rank"]))
            # Before torch 2.5 the name of a group is all there is; later it is its GUID.
            group = match["guid"] or match["id"]
            statuses[
                WatchdogStatus(
                    rank,
                    is_group_rank,
                    group,
                    match["name"] or "",
                    int(match["seq"]),
                    int(match["enqueued"]),
                    int(match["completed"]),
                )
            ] = None
    return WatchdogLog(tuple(timeouts), tuple(statuses))


def _find_rank(job_ranks: list[re.Match[str]], at: int, group_rank: int) -> tuple[int, bool]:
    """(the rank of the job that is written last before this place, False), else that of the
    group."""
    before = [int(match[1]) for match in job_ranks if match.start() < at]
    return (before[-1], False) if before else (group_rank, True)
