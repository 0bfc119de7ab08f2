"""The terminal's tables of a prediction: the buckets, the stages, the communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from rich.bar import Bar
from rich.console import Group
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.model.prediction import Communication, Prediction, StageMemory
from stepsplit.dashboard.reporters.bare_table import AXIS_SHORT, BUCKET_STYLE, bare_table

MOST_STAGES, MOST_KINDS = 6, 10
_CATEGORIES = ("weights", "gradients", "optimizer", "activations", "transient", "other")


def split_table(prediction: Prediction) -> Table:
    """The seven buckets of the slowest stage: time and share."""
    table = bare_table("", "predicted", "share", "")
    split = prediction.split
    for bucket, ns in zip(BUCKETS, split.buckets_ns, strict=True):
        share = ns / split.step_ns if split.step_ns else 0.0
        style = BUCKET_STYLE[bucket]
        bar = Bar(1.0, 0.0, share, color=style)
        table.add_row(Text(bucket, style=style), units.milliseconds(ns), units.percent(share), bar)
    return table


def stages_table(prediction: Prediction) -> Group | Table:
    """Each stage's parameters, compute and bubble, and its memory by what it is for."""
    shown = _shown_stages(prediction)
    table = bare_table("stage", *(str(i) for i in shown))
    splits = [prediction.splits[i] for i in shown]
    memory = [prediction.memory[i] for i in shown]
    table.add_row("parameters", *(units.count(prediction.parameters_per_stage[i]) for i in shown))
    table.add_row("compute", *(units.milliseconds(split.compute_ns) for split in splits))
    table.add_row("bubble", *(units.milliseconds(split.bubble_ns) for split in splits))
    for category in _CATEGORIES:
        _add_memory(table, category, memory, attrgetter(f"{category}_bytes"))
    _add_memory(table, "peak memory", memory, attrgetter("total_bytes"))
    more = len(prediction.splits) - len(shown)
    stages = f"{more} stage{'s' if more > 1 else ''}"
    left_out = Text(f"and {stages} more, which --json has", style="bright_black")
    return Group(table, left_out) if more else table


def _add_memory(
    table: Table,
    name: str,
    memory: Sequence[StageMemory],
    bytes_of: Callable[[StageMemory], int],
) -> None:
    """A line of the table; one in which no stage has anything takes no room."""
    if any(bytes_of(row) for row in memory):
        table.add_row(name, *(units.gibibytes(bytes_of(row)) for row in memory))


def _shown_stages(prediction: Prediction) -> list[int]:
    """The ends, the slowest and the fullest stage, then the others from the first on."""
    count = len(prediction.splits)
    fullest = max(range(count), key=lambda i: prediction.memory[i].total_bytes)
    first = dict.fromkeys((0, count - 1, _slowest(prediction), fullest, *range(count)))
    return sorted(list(first)[:MOST_STAGES])


def _slowest(prediction: Prediction) -> int:
    return prediction.splits.index(prediction.split)


def communication_table(prediction: Prediction) -> Group:
    """What a rank of the slowest stage sends in a step, the most exposed first."""
    stage = _slowest(prediction)
    rows = _merged([row for row in prediction.communication if row.message.stage == stage])
    rows.sort(key=lambda kind: (-kind.exposed_ns, -kind.high_ns))
    table = bare_table("axis", "op phase", "calls", "size", "sent", "time", "exposed")
    words = table.columns[1]
    words.justify, words.no_wrap, words.overflow = "left", False, "fold"
    for row in rows[:MOST_KINDS]:
        table.add_row(*_cells(row))
    more = len(rows) - MOST_KINDS
    kinds = f"{more} kind{'s' if more > 1 else ''}"
    left_out = [Text(f"and {kinds} more, which --json has", style="bright_black")]
    of_stage = f" of stage {stage}" if len(prediction.splits) > 1 else ""
    heading = Text(f"communication of a rank{of_stage} in a step")
    return Group(heading, table, *(left_out if more > 0 else ()))


@dataclass(frozen=True, slots=True)
class _Kind:
    """Calls that look alike: on one axis, of one op, in one phase, of one size."""

    axis: str
    op: str
    phase: str
    message_bytes: int
    count: int
    sent_bytes: int
    low_ns: float
    high_ns: float
    exposed_ns: int


def _merged(rows: Sequence[Communication]) -> list[_Kind]:
    same: dict[tuple[str, str, str, int], list[Communication]] = {}
    for row in rows:
        one = row.message
        same.setdefault((one.axis, one.op, one.phase, one.message_bytes), []).append(row)
    return [
        _Kind(
            *alike,
            count=sum(row.message.count for row in group),
            sent_bytes=sum(row.message.count * row.message.wire_bytes for row in group),
            low_ns=sum(row.time.low_ns for row in group),
            high_ns=sum(row.time.high_ns for row in group),
            exposed_ns=sum(row.exposed_ns for row in group),
        )
        for alike, group in same.items()
    ]


def _cells(kind: _Kind) -> tuple[str, ...]:
    return (
        AXIS_SHORT.get(kind.axis, kind.axis), f"{kind.op} {kind.phase}", f"{kind.count:,}",
        units.size(kind.message_bytes), units.size(kind.sent_bytes),
        units.milliseconds_between(kind.low_ns, kind.high_ns), units.milliseconds(kind.exposed_ns),
    )  # fmt: skip
