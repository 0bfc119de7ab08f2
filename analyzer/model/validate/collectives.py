"""Predicted times of collectives against measured sweeps."""

from __future__ import annotations

from collections.abc import Iterable

from stepsplit.analyzer.model.comm.sweep import Sweep
from stepsplit.analyzer.model.comm.time import time_of
from stepsplit.analyzer.model.spec.hardware import Hardware
from stepsplit.analyzer.model.spec.presets import hardware
from stepsplit.analyzer.model.spec.span import Span
from stepsplit.analyzer.model.validate.fitted import fitted_collectives
from stepsplit.analyzer.model.validate.records import Published, Record
from stepsplit.analyzer.model.validate.tables import Check, Row, check, marked

ALPS, SWEEPS = "nccl_allreduce_alps_gh200", "nccl_allreduce_sweeps"
CLUSTERS = {
    "A100": ("a100-sxm-80gb", "ib-hdr-200"),
    "H100": ("h100-sxm", "efa-p5"),
    "H200": ("h200-sxm", "efa-p5"),
    "B200": ("b200-sxm", "efa-p6-b200"),
    "GH200": ("gh200", "slingshot-11"),
}
"""A word of the system's name -> its GPU and its network (ml-engineering's are AWS instances)."""
LARGE_BYTES = 64 * 2**20


def collective_checks(published: Published) -> tuple[Check, ...]:
    rows = [row for row in (*published.records(SWEEPS), *published.records(ALPS)) if _valid(row)]
    large = [row for row in rows if row.count("size_bytes") >= LARGE_BYTES]
    inside = [row for row in large if row.count("nodes") == 1]
    between = [row for row in large if row.count("nodes") > 1]
    left_out = [each for sweep in _sweeps(rows) for each in _left_out(sweep)]
    return (
        check("all_reduce in a node, from 64 MiB", _closed(inside), "mean", (0.05,)),
        check("all_reduce over nodes, from 64 MiB", _closed(between), "median", (0.10,)),
        check("all_reduce in a node, interpolated", left_out, "mean", (0.08,)),
    )


def _valid(row: Record) -> bool:
    """Rows whose results were wrong, or of systems that no preset describes, say nothing."""
    wrong = row.known("wrong_oop") and row.number("wrong_oop") != 0
    return not wrong and row.text("collective") == "all_reduce" and bool(_word(row))


def _word(row: Record) -> str:
    words = [word for word in CLUSTERS if word in row.text("system")]
    return max(words, key=len, default="")


def _closed(rows: Iterable[Record]) -> tuple[Row, ...]:
    """The closed form; a sweep's odd powers of two were fitted on."""
    return marked([_row(row) for row in rows], fitted_collectives())


def _row(row: Record) -> Row:
    found = time_of("all_reduce", row.count("size_bytes"), _span(row), _cluster(row)).ns
    return Row(row.table, row.id, "time", _time_ns(row), found, "ns")


def _cluster(row: Record) -> Hardware:
    name, link = CLUSTERS[_word(row)]
    return hardware(name, link, _span(row).ranks_per_node)


def _span(row: Record) -> Span:
    return Span(row.count("ranks"), row.count("ranks") // row.count("nodes"))


def _time_ns(row: Record) -> float:
    return row.number("time_us_oop" if row.table == ALPS else "time_us") * 1e3


def _sweeps(rows: Iterable[Record]) -> list[list[Record]]:
    """The rows of each sweep inside a node, by size."""
    found: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        if row.count("nodes") == 1:
            found.setdefault((row.text("system"), row.text("tool")), []).append(row)
    return [sorted(each, key=lambda row: row.count("size_bytes")) for each in found.values()]


def _left_out(rows: list[Record]) -> list[Row]:
    """Each inner point from the others of its sweep: interpolation fits nothing."""
    points = [(row.count("size_bytes"), _time_ns(row)) for row in rows]
    found = []
    for i, row in enumerate(rows[1:-1], start=1):
        sizes, times = zip(*points[:i], *points[i + 1 :], strict=True)
        span = _span(row)
        sweep = Sweep("all_reduce", span.ranks, span.ranks_per_node, sizes, times)
        predicted = sweep.time_of(points[i][0])
        found.append(Row(row.table, row.id, "time", points[i][1], predicted, "ns"))
    return found
