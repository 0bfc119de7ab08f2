"""Terminal screens of compare and what-if."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.what_if import WhatIf, WhatIfChange, WhatIfs
from stepsplit.analyzer.regression.compare import (
    BucketChange,
    CallsChange,
    CallStats,
    RunComparison,
    Side,
)
from stepsplit.dashboard.reporters.tables import AXIS_SHORT, BUCKET_STYLE, bare_table

# The screen of compare.

LEAST = 0.005
"""Share of the baseline's step; the headline omits buckets that changed less."""

_MOST_NAMED = 3

_NOTES = (
    (
        "mesh",
        "different layout: each rank does other work, which changes its buckets",
    ),
    ("microbatches", "different microbatch count: a step may do more or less work"),
)

_UNSURE = " (noise unknown: a single step)"


def comparison_screen(found: RunComparison) -> RenderableType:
    """Builds the screen of a comparison for a rich console of any width."""
    parts: list[RenderableType] = [headline(found), Text(), _runs(found)]
    if found.same:
        return Group(*parts)
    if found.settings:
        parts += [Text(), _settings(found), *_notes(found)]
    parts += [Text(), bucket_table(found)]
    parts += [*exposed_section(found), *calls_section(found), *kernels_section(found)]
    return Group(*parts)


def headline(found: RunComparison) -> Text:
    """The change of the median step, and the buckets that changed most."""
    if found.same:
        return Text("no differences: same settings, steps, buckets, calls and kernels", "bold")
    named = ", ".join(_bucket(row) for row in _named(found))
    text = Text(f"candidate is {_how_much(found)}", style="bold").append(_noise(found), "yellow")
    return text.append(f": {named or 'no large change in any bucket'}", "not bold")


def _how_much(found: RunComparison) -> str:
    ns, ratio = found.difference_ns, found.ratio
    if not ns:
        return "equally fast"
    share = "" if ratio is None else f" ({units.percent(abs(ratio - 1))})"
    return f"{units.milliseconds(abs(ns))}{share} {'slower' if ns > 0 else 'faster'}"


def _noise(found: RunComparison) -> str:
    if found.within_noise is None:
        return _UNSURE
    return ", within noise" if found.within_noise else ""


def _named(found: RunComparison) -> tuple[BucketChange, ...]:
    least = LEAST * found.baseline.mean.step_ns
    return tuple(row for row in found.buckets if row.changed_ns > least)[:_MOST_NAMED]


def _bucket(row: BucketChange) -> str:
    return f"{row.bucket} {units.signed_milliseconds(row.difference_ns)}"


def _runs(found: RunComparison) -> Table:
    """The two runs side by side; rows that are unknown for both are omitted."""
    table = _beside("")
    one, other = found.baseline, found.candidate
    rows = zip(_about(one), _about(other), strict=True)
    for (name, of_one), (_, of_other) in rows:
        if of_one or of_other:
            table.add_row(name, of_one or units.UNKNOWN, of_other or units.UNKNOWN)
    return table


def _about(side: Side) -> tuple[tuple[str, str], ...]:
    """(name, value) rows about a run; "" is unknown."""
    fraction, peak, mfu = side.bubble_fraction, side.peak_allocated_bytes, side.mfu
    return (
        ("run", side.name),
        ("median step", units.milliseconds(side.median_ns)),
        ("fastest, slowest", units.milliseconds_between(side.low_ns, side.high_ns)),
        ("full steps", f"{side.steps:,}"),
        ("bubble fraction", "" if fraction is None else units.percent(fraction)),
        ("peak memory", "" if peak is None else units.gibibytes(peak)),
        ("MFU", "" if mfu is None else units.percent(mfu)),
    )


def _settings(found: RunComparison) -> Table:
    table = _beside("configuration differences")
    for row in found.settings:
        table.add_row(row.name, _told(row.baseline), _told(row.candidate), style="yellow")
    return table


def _told(setting: str | None) -> str:
    return units.UNKNOWN if setting is None else setting


def _notes(found: RunComparison) -> list[Text]:
    """Caveats for settings that are known on both sides and differ."""
    known = {row.name for row in found.settings if None not in (row.baseline, row.candidate)}
    return [Text(note, style="yellow") for name, note in _NOTES if name in known]


def _beside(first: str) -> Table:
    """A table with a text column per side; long text wraps."""
    table = bare_table(first)
    for side in ("baseline", "candidate"):
        table.add_column(side, overflow="fold")
    return table


# The tables of compare: buckets, axes, and the calls and kernels that changed most.

MOST = 4
"""Maximum number of rows of a table; the rest is counted."""

_DIM = "bright_black"

_MEAN = "mean step of a rank"


def bucket_table(found: RunComparison) -> Table:
    """The seven buckets; their differences add up to the difference of the mean step."""
    table = bare_table(_MEAN, "baseline", "candidate", "difference", "of step")
    whole_ns = found.baseline.mean.step_ns
    for row in found.buckets:
        numbers = _numbers(row.baseline_ns, row.candidate_ns)
        table.add_row(
            Text(row.bucket, style=BUCKET_STYLE[row.bucket]), *numbers,
            _share(row.difference_ns, whole_ns),
        )  # fmt: skip
    after_ns = found.candidate.mean.step_ns
    share = _share(after_ns - whole_ns, whole_ns)
    table.add_row("step", *_numbers(whole_ns, after_ns), share, style="bold")
    return table


def exposed_section(found: RunComparison) -> list[RenderableType]:
    """The communication buckets by axis; empty if there is only one axis."""
    if len({row.axis for row in found.exposed}) < 2:
        return []
    table = bare_table("by axis", "baseline", "candidate", "difference")
    for row in found.exposed[:MOST]:
        name = Text(f"{_axis(row.axis or 'other')} ").append(row.bucket, BUCKET_STYLE[row.bucket])
        table.add_row(name, *_numbers(row.baseline_ns, row.candidate_ns))
    return [Text(), table, *_more(len(found.exposed), "axis and bucket", "axes and buckets")]


def calls_section(found: RunComparison) -> list[RenderableType]:
    """The kinds of calls that changed most, one line per side."""
    rows = [row for row in found.collectives if row.baseline != row.candidate]
    if not rows:
        return []
    table = bare_table("calls per rank", "run", "per step", "transfer", "wait", "busbw")
    for row in rows[:MOST]:
        table.add_row(f"{_axis(row.axis)} {row.op}", "baseline", *_calls_cells(row.baseline))
        table.add_row(_size(row), "candidate", *_calls_cells(row.candidate))
    note = Text("counts: mean over ranks; transfer and wait: median call", _DIM)
    return [Text(), table, *_more(len(rows), "kind of call", "kinds of calls"), note]


def kernels_section(found: RunComparison) -> list[RenderableType]:
    """The kernel families whose time changed most."""
    rows = [row for row in found.kernels if row.baseline_ns != row.candidate_ns]
    if not rows:
        return []
    table = bare_table("kernels per rank", "baseline", "candidate", "difference", "per step")
    for row in rows[:MOST]:
        number = f"{_count(row.baseline_count)} -> {_count(row.candidate_count)}"
        table.add_row(row.family, *_numbers(row.baseline_ns, row.candidate_ns), number)
    return [Text(), table, *_more(len(rows), "family", "families")]


def _numbers(baseline_ns: int, candidate_ns: int) -> tuple[str, str, str]:
    change_ns = candidate_ns - baseline_ns
    return (
        units.milliseconds(baseline_ns),
        units.milliseconds(candidate_ns),
        units.signed_milliseconds(change_ns) if change_ns else "",
    )


def _share(part_ns: int, whole_ns: int) -> str:
    return units.signed_percent(part_ns / whole_ns) if part_ns and whole_ns else ""


def _axis(name: str) -> str:
    return AXIS_SHORT.get(name, name)


def _size(row: CallsChange) -> str:
    size = "size unknown" if row.message_bytes is None else units.size(row.message_bytes)
    return f"  {size} {row.dtype or ''}".rstrip()


def _calls_cells(calls: CallStats | None) -> tuple[str, ...]:
    if calls is None:
        return ("none",)
    rate = calls.busbw_bytes_per_s
    return (
        _count(calls.count),
        units.milliseconds(calls.transfer_ns),
        units.milliseconds(calls.wait_ns),
        units.UNKNOWN if rate is None else units.gigabytes_per_second(rate),
    )


def _count(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"


def _more(rows: int, one: str, several: str) -> list[Text]:
    left = rows - MOST
    return [Text(f"and {left} more {one if left == 1 else several}", _DIM)] if left > 0 else []


# The screen of what-if.

_WORDS = {
    "even": "equal compute on all ranks, no slow calls",
    "even-ranks": "equal compute on all ranks of a stage",
    "even-stages": "equal compute on all ranks and stages",
    "no-slow-ranks": "no rank is slower than its peers in the same kernels",
    "no-idle": "no GPU idle time",
    "overlap": "gradient reduction overlaps the backward pass",
}


def what_if_screen(found: WhatIfs) -> RenderableType:
    """Builds the screen of what-if: the measured step, and its estimate with each change."""
    heading = f"mean step {units.milliseconds(found.step_ns)}; estimates with one change each:"
    table = bare_table("change", "step", "difference")
    table.add_column("", overflow="fold")
    for row in found.changes:
        table.add_row(*_change_cells(row, found.step_ns))
    slowdown = f"slowdown by stragglers and load imbalance: {found.slowdown:.3f}x"
    return Group(Text(heading, style="bold"), table, Text(slowdown))


def _change_cells(row: WhatIf, step_ns: int) -> tuple[str, ...]:
    return (
        str(row.change),
        units.milliseconds(row.step_ns),
        units.signed_percent(-row.gain_ns / step_ns if step_ns else 0.0),
        _meaning(row.change),
    )


def _meaning(change: WhatIfChange) -> str:
    match change.kind:
        case "link":
            links = "all links" if change.axis == "all" else f"{change.axis} links"
            return f"{links} are {change.times:g}x as fast"
        case "microbatches":
            return f"{change.count} microbatches of the same size, scaled to the same work"
        case "schedule":
            return f"pipeline schedule {change.name}"
        case "replicas":
            return f"{change.count}x the data-parallel ranks, on equally fast links"
    return _WORDS[change.kind]
