"""Memory: what each rank held at its peak, by category, beside the model and the limit."""

from __future__ import annotations

from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.model.prediction import Prediction, StageMemory
from stepsplit.analyzer.report.io import job_of_report, prediction_of
from stepsplit.analyzer.report.report import MemoryRow, Report
from stepsplit.analyzer.units import memory_size
from stepsplit.dashboard.figures.memory import CATEGORIES, Held, memory
from stepsplit.dashboard.pages.parts import Cell, graph, left_out, nothing, section, table
from stepsplit.dashboard.pages.view import View

RANKS = 64


def memory_page(view: View) -> list[Component]:
    """Measured and modelled bars; a sentence where there is neither."""
    report = view.report
    predicted, limit = _modelled(report)
    bars = [*_by_rank(report), *predicted]
    if not bars:
        told = (
            "Record with profile_run or stepsplit record, which note what each rank's memory held, "
            "or hold the run against the model with a run.toml."
        )
        return [nothing("No memory was recorded", told)]
    note = "of each rank at its peak" + (
        ", then what the model says of each stage" if predicted else ""
    )
    note += "" if limit is None else f"; the device holds {memory_size(limit)}"
    figure = graph("memory", memory(bars, limit))
    note += left_out(report.memory or (), RANKS)
    return [section("Memory", note, figure), *_stages(report), *_reserved(report)]


def _modelled(report: Report) -> tuple[list[Held], int | None]:
    """The predicted bars by stage and the device's limit in bytes, none without a prediction."""
    try:
        found, job = prediction_of(report), job_of_report(report)
    except StepsplitError:
        return [], None
    limit = None if job is None else job.hardware.memory_bytes
    return ([] if found is None else predicted_bars(found)), limit


def predicted_bars(found: Prediction, words: str = "model") -> list[Held]:
    """A bar a stage, by category."""
    return [Held(f"{words}, stage {one.stage}", _parts(one)) for one in found.memory]


def _by_rank(report: Report) -> list[Held]:
    rows = [row for row in report.memory or () if row.peak_allocated_bytes]
    return [_measured(row) for row in rows[:RANKS]]


def _measured(row: MemoryRow) -> Held:
    parts = _parts(row)
    rest = (row.peak_allocated_bytes or 0) - sum(held for _, held in parts)
    return Held(f"rank {row.rank}", parts, max(rest, 0))


def _parts(row: MemoryRow | StageMemory) -> tuple[tuple[str, int], ...]:
    held = ((category, getattr(row, f"{category}_bytes")) for category in CATEGORIES)
    return tuple((category, count) for category, count in held if count)


def _stages(report: Report) -> list[html.Section]:
    """The fullest rank of each stage beside the model, by category."""
    if report.gap is None or not report.gap.memory:
        return []
    rows = [
        [
            Cell(f"stage {one.stage}"), Cell(f"rank {one.rank}"), Cell(one.category),
            Cell(memory_size(one.measured_bytes), number=True),
            Cell(memory_size(one.predicted_bytes), number=True),
            Cell(_ratio(one.measured_bytes, one.predicted_bytes), number=True),
        ]
        for one in report.gap.memory
    ]  # fmt: skip
    heads = ("stage", "fullest rank", "of", "measured", "predicted", "measured / predicted")
    return [section("Measured against the model", "", table(heads, rows))]


def _ratio(measured: int, predicted: int) -> str:
    return f"{measured / predicted:.2f} x" if predicted else "unknown"


def _reserved(report: Report) -> list[html.Section]:
    """What the allocator took from the device beyond what tensors held."""
    own = [
        (row.rank, row.peak_allocated_bytes, row.peak_reserved_bytes)
        for row in report.memory or ()
        if row.peak_reserved_bytes and row.peak_allocated_bytes
    ]
    if not own:
        return []
    rows = [
        [
            Cell(f"rank {rank}"),
            *(Cell(memory_size(n), number=True) for n in (held, had, had - held)),
        ]
        for rank, held, had in own[:RANKS]
    ]
    heads = ("rank", "allocated at the peak", "reserved at the peak", "reserved beyond it")
    note = "what it holds without use may be fragmented"
    return [section("The allocator", note, table(heads, rows))]
