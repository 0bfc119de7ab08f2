"""The terminal screen of a hang: who blocks the job, the state of each group, the last stacks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table

from stepsplit.analyzer import units
from stepsplit.dashboard.reporters.console import DIM, Text
from stepsplit.dashboard.reporters.tables import MAX_RANKS, format_ranks, name_ranks

if TYPE_CHECKING:
    from stepsplit.analyzer.diagnose.hang.result import Hang, LastCall, RankNow, StackFrame, Stuck

# A job of thousands of ranks has as many open calls, which wait for the same few.
MOST_BLOCKED, MOST_UNFINISHED = 8, 3

MAX_FRAMES = 6

MAX_ERROR = 160

# What the other columns leave of 80.
MAX_LETTERS = 28

_COLUMNS = ("group", "description", "call", "size", "waiting", "missing", "completed")

_WHOLE = ("group", "call", "size")

_STYLE = {"missing": "red"}


def build_hang_screen(hang: Hang) -> RenderableType:
    """The whole screen for one hang, to be printed by a rich console of any width."""
    from stepsplit.analyzer.diagnose.hang.sentences import format_verdict

    lines = (hang.note, *format_verdict([one.message for one in hang.culprits]))
    noun = _name_source(hang)
    known = [_format_count(len(hang.ranks), noun, f"{noun}s")] if hang.ranks else []
    if hang.states:
        known.insert(0, f"looked at {_format_count(len(hang.states), 'rank', 'ranks')}")
    if hang.no_dump and hang.ranks:
        known.append(f"no {noun} from {name_ranks(hang.no_dump)}")
    if hang.stuck:
        known.append(_format_count(len(hang.stuck), "unfinished call", "unfinished calls"))
        first = min(int(call.called_unix_ns) for call in hang.stuck)
        if first > 0:
            at = datetime.fromtimestamp(first / 1e9, UTC)
            known.append(f"oldest since {at:%Y-%m-%d %H:%M:%S} UTC")
    parts: list[RenderableType] = [
        Group(*(Text(line, style="bold") for line in lines if line)),
        Text("   ".join(known)),
    ]
    for one in hang.warnings:
        of_rank = "" if one.rank is None else f" (rank {one.rank})"
        parts.append(Text(f"warning: {one.message}{of_rank}", style="yellow"))
    if hang.stuck:
        parts += [Text(), _build_calls_table(hang)]
        if more := len(hang.stuck) - len(_select_calls(hang.stuck)):
            parts.append(Text(f"{more} more calls: see --json FILE", style=DIM))
    if hang.states:
        parts += _list_states(hang)
    elif hang.stuck:
        parts += [Text(), *_list_stacks(hang)]
    if hang.ras:
        parts += [Text(), Text("NCCL RAS", style="bold")]
        parts += [Text(sentence) for sentence in hang.ras[:MAX_RANKS]]
    return Group(*parts)


def _name_source(hang: Hang) -> str:
    """What the result is of each rank: a dump, or what its watchdog reports in a log."""
    return "report" if any(one.code == "watchdog_log" for one in hang.warnings) else "dump"


def _list_states(hang: Hang) -> list[Text]:
    """What each rank does and its stack; ranks at the same place are one entry."""
    same: dict[tuple[object, ...], list[RankNow]] = {}
    for one in hang.states:
        same.setdefault((one.condition, one.error, one.stack), []).append(one)
    # The ranks that the others wait for come first.
    to_blame = {rank for one in hang.culprits for rank in one.ranks}
    ordered = sorted(same.values(), key=lambda ones: not to_blame & {one.rank for one in ones})
    lines = [Text(), Text("PYTHON STACKS, INNERMOST FIRST", style="bold")]
    for ones in ordered[:MAX_RANKS]:
        lines.append(Text(f"{name_ranks([one.rank for one in ones])}  {_describe_state(ones)}"))
        lines += [Text(f"    {frame}", style=DIM) for frame in _list_frames(ones[0].stack)]
    return lines


def _describe_state(ones: Sequence[RankNow]) -> str:
    """The condition that ranks share, their steps, and the shortest time since the last one."""
    steps = sorted({one.steps for one in ones if one.steps is not None})
    since_ns = min((o.since_step_ns for o in ones if o.since_step_ns is not None), default=None)
    parts = [ones[0].condition]
    if steps:
        parts.append(f"{'-'.join(map(str, dict.fromkeys((steps[0], steps[-1]))))} steps ended")
    if since_ns is not None:
        parts.append(f"the last {since_ns / 1e9:.1f} s ago")
    if error := ones[0].error:
        parts.append(error if len(error) <= MAX_ERROR else f"{error[: MAX_ERROR - 3]}...")
    return ", ".join(parts)


def _list_frames(stack: Sequence[StackFrame]) -> tuple[str, ...]:
    shown = tuple(f"{frame.file}:{frame.line} {frame.function}" for frame in stack)
    # The innermost frames say where it hangs; the outermost are those of the launcher.
    more = len(shown) - MAX_FRAMES
    return (*shown[:MAX_FRAMES], f"and {more} more frames") if more > 0 else shown


def _format_count(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _build_calls_table(hang: Hang) -> Table:
    shown = _select_calls(hang.stuck)
    rows = []
    for call in shown:
        size_bytes = call.message_bytes
        away = format_ranks([one.rank for one in call.missing])
        lost = f"{format_ranks(call.no_dump)} (no {_name_source(hang)})" if call.no_dump else ""
        rows.append(
            (
                call.group.name,
                _shorten(call.group.description),
                f"{call.op} {call.seq}",
                units.UNKNOWN if size_bytes is None else units.format_size(size_bytes),
                format_ranks(call.waiting),
                ", ".join(part for part in (away, lost) if part),
                format_ranks(call.completed),
            )
        )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    # A column without an entry takes no room.
    columns = [i for i in range(len(_COLUMNS)) if any(row[i] for row in rows)]
    for name in (_COLUMNS[i] for i in columns):
        side: JustifyMethod = "right" if name == "size" else "left"
        table.add_column(name, justify=side, no_wrap=name in _WHOLE, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[i], style=_STYLE.get(_COLUMNS[i], "")) for i in columns))
    return table


def _select_calls(stuck: Sequence[Stuck]) -> list[Stuck]:
    """The first calls that wait for a rank, and the first that all ranks entered."""
    # A call that waits for a rank explains more than one that all have entered.
    blocked = [call for call in stuck if call.waits_for]
    unfinished = [call for call in stuck if not call.waits_for]
    return [*blocked[:MOST_BLOCKED], *unfinished[:MOST_UNFINISHED]]


def _shorten(description: str) -> str:
    """A long description without its middle: groups differ at the ends."""
    if len(description) <= MAX_LETTERS:
        return description
    end = (MAX_LETTERS - 3) // 2
    return f"{description[: MAX_LETTERS - 3 - end]}...{description[-end:]}"


def _list_stacks(hang: Hang) -> list[Text]:
    """The last call and stack of each culprit; a stack that several share is shown once."""
    ranks = [rank for one in hang.culprits for rank in one.ranks if rank in hang.ranks]
    last = {one.rank: one for one in hang.last_calls}
    lines = [Text("LAST CALLS OF THESE RANKS", style="bold")] if ranks else []
    shown: dict[tuple[str, ...], int] = {}
    for rank in ranks[:MAX_RANKS]:
        lines.append(_describe_last_call(rank, last.get(rank), hang))
        frames = last[rank].stack if rank in last else ()
        # Without torch's own frames if there are others.
        stack = _list_frames([one for one in frames if "/torch/" not in one.file] or frames)
        # All ranks of a group mostly hang at the same place.
        if stack and stack in shown:
            lines.append(Text(f"    same stack as rank {shown[stack]}", style=DIM))
            continue
        shown[stack] = rank
        lines += [Text(f"    {frame}", style=DIM) for frame in stack]
    if len(ranks) > MAX_RANKS:
        lines.append(Text(f"and {len(ranks) - MAX_RANKS} more ranks"))
    return lines


def _describe_last_call(rank: int, last: LastCall | None, hang: Hang) -> Text:
    if last is not None:
        call = f"{last.op} {last.seq} of {last.group.in_words}"
        return Text(f"rank {rank}  last called {call}: {last.state}")
    missing = ((call.group, one) for call in hang.stuck for one in call.missing)
    call_of_rank = next(((group, one) for group, one in missing if one.rank == rank), None)
    progress = ""
    if call_of_rank is not None and call_of_rank[1].last_enqueued is not None:
        # Its last call on a group that waits for it.
        group, one = call_of_rank
        state = "completed" if one.last_completed == one.last_enqueued else "not completed"
        progress = f"; its last on {group.in_words} is {one.last_enqueued}, {state}"
    return Text(f"rank {rank}  no call in its dump{progress}")
