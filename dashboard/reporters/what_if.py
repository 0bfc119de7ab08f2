"""The terminal's answer to: how long were a step, if?"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.what_if import Change, WhatIf, WhatIfs
from stepsplit.dashboard.reporters.bare_table import bare_table

_WORDS = {
    "even": "all ranks and stages compute alike, no call is slower than its kind",
    "even-ranks": "the ranks of each stage compute alike",
    "even-stages": "all ranks and stages compute alike",
    "no-slow-ranks": "no rank is slower than its peers at the same kernels",
    "no-idle": "no rank ever runs nothing",
    "overlap": "gradients are summed during the backward",
}


def screen(found: WhatIfs) -> RenderableType:
    """The step as it was, and each change with what it makes of it."""
    heading = f"step {units.milliseconds(found.step_ns)} on average; with one change each"
    table = bare_table("change", "step", "difference")
    table.add_column("", overflow="fold")
    for row in found.changes:
        table.add_row(*_cells(row, found.step_ns))
    slowdown = f"stragglers of any kind make a step {found.slowdown:.3f} times as long"
    return Group(Text(heading, style="bold"), table, Text(slowdown))


def _cells(row: WhatIf, step_ns: int) -> tuple[str, ...]:
    return (
        str(row.change),
        units.milliseconds(row.step_ns),
        units.signed_percent(-row.gain_ns / step_ns if step_ns else 0.0),
        _meaning(row.change),
    )


def _meaning(change: Change) -> str:
    match change.kind:
        case "link":
            of = "every link" if change.axis == "all" else f"the links of {change.axis}"
            return f"data moves {change.times:g} times as fast on {of}"
        case "microbatches":
            return f"the same work in {change.count} microbatches a step, of the same size"
        case "schedule":
            return f"the pipeline runs {change.name}"
        case "replicas":
            return f"{change.count} times the data-parallel ranks, on links as fast"
    return _WORDS[change.kind]
