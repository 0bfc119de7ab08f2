"""Predicted peaks of allocated memory against measured ones."""

from __future__ import annotations

from dataclasses import replace

from stepsplit.analyzer.model.memory.band import reserved_bytes
from stepsplit.analyzer.model.memory.memory import memory_of
from stepsplit.analyzer.model.validate.fitted import fitted_memory
from stepsplit.analyzer.model.validate.gather import Build, gathered
from stepsplit.analyzer.model.validate.jobs import torchtitan
from stepsplit.analyzer.model.validate.jobs.simumax import TABLE, simumax
from stepsplit.analyzer.model.validate.records import Published, Record
from stepsplit.analyzer.model.validate.tables import Check, Row

DENSE_BAR = (0.02, 0.035)
EXPERTS_BAR = (0.10, 0.10)
"""Mean and maximum of the absolute errors."""


def memory_checks(published: Published) -> tuple[Check, ...]:
    rows, fitted = published.records(TABLE), fitted_memory()
    dense = [row for row in rows if not row.known("experts")]
    mixtures = [row for row in rows if row.known("experts")]
    kinds: tuple[tuple[str, list[Record], Build, tuple[float, float]], ...] = (
        ("B200 dense, peak memory", dense, _fullest, DENSE_BAR),
        ("B200 dense, peak memory by stage", dense, _stages, DENSE_BAR),
        ("B200 experts, peak memory", mixtures, _fullest, EXPERTS_BAR),
    )
    checks = tuple(
        gathered(name, records, build, "mean/max", bar, fitted)
        for name, records, build, bar in kinds
    )
    return (*checks, _torchtitan(published))


def _torchtitan(published: Published) -> Check:
    rows = [row for row in published.records(torchtitan.TABLE) if row.known("peak_memory_GiB")]
    found = gathered("torchtitan, peak memory", rows, _reserved, "mean/max", (), frozenset())
    if found.skipped:
        return found
    return replace(found, note="what the allocator reserves; nothing is fitted")


def _reserved(row: Record) -> tuple[Row, ...]:
    job = torchtitan.torchtitan_job(row)
    most = max(stage.total_bytes for stage in memory_of(job))
    found = reserved_bytes(most).bytes / 2**30
    return (Row(row.table, row.id, "reserved", row.number("peak_memory_GiB"), found, "GiB"),)


def _fullest(row: Record) -> tuple[Row, ...]:
    """The fullest stage; the table states the maximum over all ranks."""
    found = max(stage.total_bytes for stage in memory_of(simumax(row).job))
    said = row.number("real_max_allocated_GiB")
    return (Row(row.table, row.id, "allocated", said, found / 2**30, "GiB"),)


def _stages(row: Record) -> tuple[Row, ...]:
    """The fullest rank of every stage; ranks are listed with the stage varying slowest."""
    if not row.known("rank_max_allocated_MiB"):
        return ()
    ranks = [float(each) for each in row.text("rank_max_allocated_MiB").split(";")]
    memory = memory_of(simumax(row).job)
    each = len(ranks) // len(memory)
    return tuple(
        Row(
            row.table, row.id, f"stage {stage.stage}",
            max(ranks[stage.stage * each : (stage.stage + 1) * each]) / 1024,
            stage.total_bytes / 2**30, "GiB",
        )
        for stage in memory
    )  # fmt: skip
