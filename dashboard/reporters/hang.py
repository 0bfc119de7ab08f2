"""The terminal's answer to a hang: who holds the job up, where each group stands, last stacks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.hang import whole
from stepsplit.analyzer.diagnose.hang_progress import Hang, LastCall, Missing, Stuck, StuckGroup

MOST_WAITS, MOST_STANDS = 8, 3
MOST_RANKS_AT = 8
MOST_FRAMES = 6
MOST_LETTERS = 28
_COLUMNS = ("group", "description", "call", "size", "waiting", "missing", "completed")
_WHOLE = ("group", "call", "size")
_STYLE = {"missing": "red"}


def hang_screen(hang: Hang) -> RenderableType:
    """The whole screen for one hang, to be printed by a rich console of any width."""
    parts: list[RenderableType] = [_verdict(hang), _hang_heading(hang)]
    parts += [_warning(one.message, one.rank) for one in hang.warnings]
    if hang.stuck:
        parts += [Text(), _calls(hang), *_left_out(hang)]
        parts += [Text(), *_whereabouts(hang)]
    return Group(*parts)


def _verdict(hang: Hang) -> Group:
    lines = whole([one.message for one in hang.culprits])
    return Group(*(Text(line, style="bold") for line in lines))


def _hang_heading(hang: Hang) -> Text:
    known = [_count(len(hang.ranks), "dump", "dumps")]
    if hang.no_dump:
        known.append(f"no dump of {_ranks(hang.no_dump)}")
    if hang.stuck:
        first = min(int(call.called_unix_ns) for call in hang.stuck)
        at = datetime.fromtimestamp(first / 1e9, UTC)
        known += [
            _count(len(hang.stuck), "call does not end", "calls do not end"),
            f"the oldest since {at:%Y-%m-%d %H:%M:%S} UTC" if first > 0 else "",
        ]
    return Text("   ".join(part for part in known if part))


def _count(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _warning(message: str, rank: int | None) -> Text:
    of_rank = "" if rank is None else f" (rank {rank})"
    return Text(f"warning: {message}{of_rank}", style="yellow")


def _calls(hang: Hang) -> Table:
    shown = _shown(hang.stuck)
    rows = [_row(call) for call in shown]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    # A column in which nobody has anything takes no room.
    kept = [i for i in range(len(_COLUMNS)) if any(row[i] for row in rows)]
    for name in (_COLUMNS[i] for i in kept):
        side: JustifyMethod = "right" if name == "size" else "left"
        table.add_column(name, justify=side, no_wrap=name in _WHOLE, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[i], style=_STYLE.get(_COLUMNS[i], "")) for i in kept))
    return table


def _left_out(hang: Hang) -> list[Text]:
    more = len(hang.stuck) - len(_shown(hang.stuck))
    text = f"and {more} calls more, which --json FILE tells"
    return [Text(text, style="bright_black")] if more else []


def _shown(stuck: Sequence[Stuck]) -> list[Stuck]:
    """The first calls that wait for somebody, and the first that wait for nobody."""
    waits = [call for call in stuck if call.waits_for]
    stands = [call for call in stuck if not call.waits_for]
    return [*waits[:MOST_WAITS], *stands[:MOST_STANDS]]


def _row(call: Stuck) -> tuple[str, ...]:
    size = units.UNKNOWN if call.message_bytes is None else units.size(call.message_bytes)
    lost = f"{_listed(call.no_dump)} (no dump)" if call.no_dump else ""
    away = _listed([one.rank for one in call.missing])
    return (
        call.group.name,
        _short(call.group.description),
        f"{call.op} {call.seq}",
        size,
        _listed(call.waiting),
        ", ".join(part for part in (away, lost) if part),
        _listed(call.completed),
    )


def _short(description: str) -> str:
    """A description without its middle where it is long: its ends tell groups apart."""
    if len(description) <= MOST_LETTERS:
        return description
    end = (MOST_LETTERS - 3) // 2
    return f"{description[: MOST_LETTERS - 3 - end]}...{description[-end:]}"


def _listed(ranks: Sequence[int]) -> str:
    """Ranks as people list them: runs of three and more joined."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [
        part
        for run in runs
        for part in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(one) for one in run])
    ]
    more = f" +{len(parts) - MOST_RANKS_AT}" if len(parts) > MOST_RANKS_AT else ""
    return ",".join(parts[:MOST_RANKS_AT]) + more


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}"


def _whereabouts(hang: Hang) -> list[Text]:
    """Where the culprits are; a stack that several share is shown once."""
    ranks = [rank for one in hang.culprits for rank in one.ranks if rank in hang.ranks]
    last = {one.rank: one for one in hang.last_calls}
    lines = [Text("WHERE THEY ARE", style="bold")] if ranks else []
    seen: dict[tuple[str, ...], int] = {}
    for rank in ranks[:MOST_RANKS_AT]:
        lines.append(_place(rank, last.get(rank), hang))
        stack = _stack(last.get(rank))
        if stack and stack in seen:
            lines.append(Text(f"    the same stack as rank {seen[stack]}", style="bright_black"))
            continue
        seen[stack] = rank
        lines += [Text(f"    {frame}", style="bright_black") for frame in stack]
    if len(ranks) > MOST_RANKS_AT:
        lines.append(Text(f"and {len(ranks) - MOST_RANKS_AT} ranks more"))
    return lines


def _place(rank: int, last: LastCall | None, hang: Hang) -> Text:
    if last is not None:
        call = f"{last.op} {last.seq} of {last.group.in_words}"
        return Text(f"rank {rank}  last called {call}: {last.state}")
    missing = ((call.group, one) for call in hang.stuck for one in call.missing)
    told = next((_came(group, one) for group, one in missing if one.rank == rank), "")
    return Text(f"rank {rank}  its dump holds no call{told}")


def _came(group: StuckGroup, missing: Missing) -> str:
    """How far it came on a group that waits for it."""
    if missing.last_enqueued is None:
        return ""
    done = missing.last_completed == missing.last_enqueued
    state = "completed" if done else "not completed"
    return f"; its last on {group.in_words} is {missing.last_enqueued}, {state}"


def _stack(last: LastCall | None) -> tuple[str, ...]:
    """The innermost lines of the stack, torch's own left out where others are there."""
    frames = () if last is None else last.stack
    own = [one for one in frames if "/torch/" not in one.file] or list(frames)
    shown = tuple(f"{one.file}:{one.line} {one.function}" for one in own[:MOST_FRAMES])
    return (*shown, f"and {len(own) - MOST_FRAMES} lines more") if len(own) > MOST_FRAMES else shown
