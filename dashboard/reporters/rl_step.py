"""The RL step on a screen: its time by phase, and the long tail of its generation."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from stepsplit.analyzer import units
from stepsplit.analyzer.report.headline import round_shares
from stepsplit.analyzer.report.rl_step import LongTail, PhaseRow, RlStep, TailRow, name_phase
from stepsplit.analyzer.split.rl_phases import OTHER_MARKS
from stepsplit.dashboard.reporters.console import Text

_MOST_MARKS = 5
"""Marks of no framework that have a line of their own."""

_LEAST = 0.0005
"""Of the time of a phase: a column with less in all lines is not shown."""

_COLUMNS = {
    "compute": "compute_ns",
    "transfer": "transfer_ns",
    "copy": "copy_ns",
    "waits": "wait_ns",
    "idle": "idle_ns",
    "not recorded": "unrecorded_ns",
}

_BLOCKS = "▁▂▃▄▅▆▇█"


def build_rl_section(step: RlStep) -> list[RenderableType]:
    """The lines of an RL step in the report of one program."""
    heading = f"PHASES OF THE RL STEP ({units.format_milliseconds(step.step_ns)}, the mean of"
    parts: list[RenderableType] = [
        Text(),
        Text(f"{heading} {step.steps} step{'s' * (step.steps > 1)} and all ranks)", style="bold"),
    ]
    parts += [Text(f"not known: {lack}", style="yellow") for lack in step.lacks]
    parts.append(build_phases_table(step.phases))
    return parts + build_tail_lines(step.tails, (), step.step_ns)


def build_phases_table(phases: Sequence[PhaseRow]) -> Table:
    """A line for each phase of each role, in shares of the RL step; as printed they add up."""
    roles = list(dict.fromkeys(row.role for row in phases))
    columns = [
        name
        for name, field in _COLUMNS.items()
        if any(getattr(row.time, field) >= _LEAST * row.time.window_ns > 0 for row in phases)
    ]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column("")
    for name in ("share", *columns):
        table.add_column(name, justify="right", no_wrap=True)
    for role in roles:
        rows = [row for row in phases if row.role == role]
        marks = [row for row in rows if not row.is_known and row.phase]
        few = marks[_MOST_MARKS:] if len(marks) > _MOST_MARKS + 1 else []
        lines = [(name_phase(row.phase), [row]) for row in rows if row not in few]
        if few:
            at = next((i for i, (_, own) in enumerate(lines) if not own[0].phase), len(lines))
            # How many are in a row of the others is not known.
            is_known = all(row.phase != OTHER_MARKS for row in few)
            lines.insert(at, (f"{len(few)} {OTHER_MARKS}" if is_known else OTHER_MARKS, few))
        cells = [
            sum(getattr(row.time, _COLUMNS[one]) for row in own)
            for _, own in lines
            for one in columns
        ]
        shares = round_shares(cells)
        if role:
            table.add_row(Text(role, style="bold"))
        for at, (name, _) in enumerate(lines):
            own_shares = shares[at * len(columns) : (at + 1) * len(columns)]
            table.add_row(
                Text(f"  {name}" if role else name),
                units.format_percent(sum(own_shares)),
                *(units.format_percent(share) if share else "" for share in own_shares),
            )
    return table


def build_tail_lines(
    tails: Sequence[LongTail], rows: Sequence[TailRow], step_ns: int
) -> list[RenderableType]:
    """What the long tail of each generation costs; nothing if no role says how many it decodes."""
    parts: list[RenderableType] = []
    if tails:
        parts += [Text(), Text("LONG TAIL OF GENERATION, per RL step", style="bold")]
    for tail in tails:
        name = f"{tail.role}/" if tail.role else "rank "
        last = f"its last {tail.last}" if tail.last > 1 else "its last one"
        line = (
            f"{tail.role or 'ranks'}: {units.format_milliseconds(tail.tail_ns)} of"
            f" {units.format_milliseconds(tail.decode_ns)} of decoding, in the mean; longest on"
            f" {name}{tail.longest_rank}: {units.format_milliseconds(tail.longest_ns)} for"
            f" {last} of {tail.sequences} sequences."
            f" {units.format_percent(tail.empty)} of the places in the batch are empty"
        )
        parts.append(Text(line))
        if tail.saved_ns:
            saved = units.format_milliseconds(tail.saved_ns)
            share = units.format_percent(tail.saved_ns / step_ns)
            parts.append(Text(f"  without the tail the RL step is about {saved} ({share}) shorter"))
        longest = [one for one in rows if (one.role, one.rank) == (tail.role, tail.longest_rank)]
        if longest:
            worst = max(longest, key=lambda one: one.tail_ns)
            where, top = f"{name}{worst.rank} in step {worst.step}", len(_BLOCKS) - 1
            batch = "".join(
                _BLOCKS[min(top, round(running / worst.sequences * top))] for running in worst.batch
            )
            text = f"  sequences over time, {where}: {batch} (at most {worst.sequences})"
            parts.append(Text(text))
    return parts
