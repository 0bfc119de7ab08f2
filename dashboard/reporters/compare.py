"""The terminal's answer to: what differs between these two runs?"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.regression.compare import BucketChange, RunComparison, Side
from stepsplit.dashboard.reporters.bare_table import bare_table
from stepsplit.dashboard.reporters.compare_tables import (
    bucket_table,
    calls_section,
    exposed_section,
    kernels_section,
)

LEAST = 0.005
"""Of the baseline's step: a bucket that changed less is not named in the headline."""
_MOST_NAMED = 3
_NOTES = (
    ("mesh", "another layout: a rank does another part of the work, which moves its buckets too"),
    ("microbatches", "other microbatches: a step may hold more or less work"),
)
_UNSURE = " (of one step alone, which does not tell its noise)"


def screen(found: RunComparison) -> RenderableType:
    """The whole screen of one comparison, to be printed by a rich console of any width."""
    parts: list[RenderableType] = [headline(found), Text(), _runs(found)]
    if found.same:
        return Group(*parts)
    if found.settings:
        parts += [Text(), _settings(found), *_notes(found)]
    parts += [Text(), bucket_table(found)]
    parts += [*exposed_section(found), *calls_section(found), *kernels_section(found)]
    return Group(*parts)


def headline(found: RunComparison) -> Text:
    """By how much the candidate's median step is longer, and what changed."""
    if found.same:
        return Text("nothing differs: same settings, steps, buckets, calls and kernels", "bold")
    named = ", ".join(_bucket(row) for row in _named(found))
    text = Text(f"candidate is {_how_much(found)}", style="bold").append(_noise(found), "yellow")
    return text.append(f": {named or 'no bucket changed by much'}", "not bold")


def _how_much(found: RunComparison) -> str:
    ns, ratio = found.difference_ns, found.ratio
    if not ns:
        return "as fast"
    share = "" if ratio is None else f" ({units.percent(abs(ratio - 1))})"
    return f"{units.milliseconds(abs(ns))}{share} {'slower' if ns > 0 else 'faster'}"


def _noise(found: RunComparison) -> str:
    if found.within_noise is None:
        return _UNSURE
    return ", within the noise of both" if found.within_noise else ""


def _named(found: RunComparison) -> tuple[BucketChange, ...]:
    least = LEAST * found.baseline.mean.step_ns
    return tuple(row for row in found.buckets if row.changed_ns > least)[:_MOST_NAMED]


def _bucket(row: BucketChange) -> str:
    return f"{row.bucket} {units.signed_milliseconds(row.difference_ns)}"


def _runs(found: RunComparison) -> Table:
    """The two runs beside each other; what neither knows is left out."""
    table = _beside("")
    one, other = found.baseline, found.candidate
    rows = zip(_about(one), _about(other), strict=True)
    for (name, of_one), (_, of_other) in rows:
        if of_one or of_other:
            table.add_row(name, of_one or units.UNKNOWN, of_other or units.UNKNOWN)
    return table


def _about(side: Side) -> tuple[tuple[str, str], ...]:
    """What is known of a run, by name; "" is unknown."""
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
    table = _beside("set differently")
    for row in found.settings:
        table.add_row(row.name, _told(row.baseline), _told(row.candidate), style="yellow")
    return table


def _told(setting: str | None) -> str:
    return units.UNKNOWN if setting is None else setting


def _notes(found: RunComparison) -> list[Text]:
    """What to keep in mind where both sides know a setting and it differs."""
    known = {row.name for row in found.settings if None not in (row.baseline, row.candidate)}
    return [Text(note, style="yellow") for name, note in _NOTES if name in known]


def _beside(first: str) -> Table:
    """Words of both sides, which may fold."""
    table = bare_table(first)
    for side in ("baseline", "candidate"):
        table.add_column(side, overflow="fold")
    return table
