"""The screen's tables of the model's parts and of its kernels."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table

from stepsplit.analyzer import units
from stepsplit.analyzer.parts.kernel_table import KernelRow
from stepsplit.analyzer.report.headline import round_parts, round_shares
from stepsplit.analyzer.report.part_rows import LEAST_EXCESS, PartRow, describe_evidence, name_part
from stepsplit.analyzer.report.report import Report
from stepsplit.dashboard.reporters.console import Text
from stepsplit.dashboard.reporters.tables import build_table

MAX_PARTS = 6
MAX_KERNELS = 20

_PASSES = ("forward", "backward", "recompute")

# Wide enough to measure what a table needs if nothing is cut.
_ANY_WIDTH = 1000


def build_parts_section(report: Report) -> list[RenderableType]:
    """The largest kinds of parts with their shares and phases; nothing if no part is known."""
    evidence = report.part_evidence
    if evidence is None or evidence.evidence == "none" or not report.parts:
        return []
    by_kind: dict[str, list[PartRow]] = defaultdict(list)
    for row in report.parts:
        by_kind[row.part].append(row)
    kinds = sorted(by_kind, key=lambda kind: -sum(row.total_ns for row in by_kind[kind]))
    # Shares are rounded together, so that the lines add up to the step as printed.
    first, rest = kinds[:MAX_PARTS], kinds[MAX_PARTS:]
    groups = [(name_part(kind), by_kind[kind]) for kind in first]
    # One more row takes no more room than the row that would stand for it.
    if len(rest) == 1:
        groups.append((name_part(rest[0]), by_kind[rest[0]]))
    elif rest:
        names = f"{len(rest)} smaller ones"
        groups.append((names, [row for kind in rest for row in by_kind[kind]]))
    heading = Text(f"PARTS OF THE MODEL ({describe_evidence(evidence)})", "bold")
    return [Text(), heading, PartsTable(groups)]


_Groups = Sequence[tuple[str, Sequence[PartRow]]]


class PartsTable:
    """Groups of parts: their time and share of the step, the passes, what of it is exposed
    communication or idle, and the rank that computes the longest one.

    All in one unit, so that groups and passes add up as printed. Columns without a value are left
    out, and in a narrow terminal the last ones.
    """

    def __init__(self, groups: _Groups) -> None:
        self._names = [name for name, _ in groups]
        totals = [sum(row.total_ns for row in rows) for _, rows in groups]
        unit_ns = units.choose_part_unit_ns(sum(totals))
        # Rounded together: a row's time outside of the passes is in its measured time alone.
        cells_ns = [
            sum(row.total_ns for row in rows if row.phase == phase)
            for _, rows in groups
            for phase in (*_PASSES, "other")
        ]
        counts = iter(round_parts(cells_ns, unit_ns))
        by_group = list(zip(*[counts] * (1 + len(_PASSES)), strict=True))
        self._measured = [units.format_parts(sum(own), unit_ns) for own in by_group]
        self._shares = [units.format_percent(share) for share in round_shares(totals)]
        shown = {
            phase: [
                units.format_parts(own[place], unit_ns) if own[place] else "" for own in by_group
            ]
            for place, phase in enumerate(_PASSES)
        }
        for name in ("exposed", "idle"):
            times = [sum(getattr(row, f"{name}_ns") for row in rows) for _, rows in groups]
            shown[name] = [_format_time(ns, unit_ns) for ns in times]
        least_ns = LEAST_EXCESS * sum(totals)
        shown["slowest rank"] = [_describe_slowest(rows, least_ns, unit_ns) for _, rows in groups]
        self._columns = {name: cells for name, cells in shown.items() if any(cells)}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = list(self._columns)
        # The last columns matter least.
        while names and self._measure(console, options, names) > options.max_width:
            names.pop()
        yield self._build(names)

    def _measure(self, console: Console, options: ConsoleOptions, names: Sequence[str]) -> int:
        wide = options.update(max_width=_ANY_WIDTH)
        return Measurement.get(console, wide, self._build(names)).maximum

    def _build(self, names: Sequence[str]) -> Table:
        table = build_table("", "measured", "share", *names)
        for place, name in enumerate(self._names):
            cells = (self._columns[column][place] for column in names)
            table.add_row(name, self._measured[place], self._shares[place], *cells)
        return table


def _format_time(ns: int, unit_ns: int) -> str:
    (count,) = round_parts([ns], unit_ns)
    return units.format_parts(count, unit_ns) if count else ""


def _describe_slowest(rows: Sequence[PartRow], least_ns: float, unit_ns: int) -> str:
    """The rank that computes longest above the median of the others, in which layer, and by how
    much: as time, for a share of a part that is hardly there says nothing."""
    # With one rank there is none to be slower than.
    several = [row for row in rows if row.ranks > 1]
    if not several:
        return ""
    worst = max(several, key=lambda row: row.slowest_compute_ns - row.median_compute_ns)
    above_ns = worst.slowest_compute_ns - worst.median_compute_ns
    if above_ns < least_ns:
        return ""
    where = "" if worst.layer is None else f" layer {worst.layer}"
    return f"r{worst.slowest_rank}{where} +{_format_time(above_ns, unit_ns)}"


def build_all_parts(report: Report) -> list[RenderableType]:
    """All parts by layer, and the kernels with the most time."""
    if not report.parts:
        return []
    groups: dict[tuple[int, str], list[PartRow]] = defaultdict(list)
    for row in report.parts:
        layer = -1 if row.layer is None else row.layer
        groups[layer, row.part].append(row)
    named = [
        (f"{'' if layer < 0 else f'layer {layer} '}{name_part(part)}", rows)
        for (layer, part), rows in groups.items()
    ]
    parts: list[RenderableType] = [Text(), Text("ALL PARTS", "bold"), PartsTable(named)]
    if report.kernel_table:
        parts += [Text(), Text("KERNELS", "bold"), KernelsTable(report.kernel_table)]
    return parts


class KernelsTable:
    """The kernels with the most time of a step: their rate against the peak of what limits them,
    and their names with shapes as far as the terminal is wide."""

    def __init__(self, rows: Sequence[KernelRow]) -> None:
        rows = rows[:MAX_KERNELS]
        # Without the templates and namespaces that all names have.
        names = [_WRAPPERS.sub("", row.name).split("(")[0] for row in rows]
        self._names = [
            f"{name} {row.shapes or ''}".rstrip() for name, row in zip(names, rows, strict=True)
        ]
        self._columns = {
            "step": [units.format_milliseconds(row.step_ns) for row in rows],
            "share": [units.format_percent(row.share) for row in rows],
            "calls": [f"{row.calls:,}" for row in rows],
            "rate": [_format_rate(row) for row in rows],
            "of peak": [
                "" if row.peak_share is None else units.format_percent(row.peak_share)
                for row in rows
            ],
            "saves": [
                "" if row.saves_ns is None else units.format_milliseconds(row.saves_ns)
                for row in rows
            ],
            "part": [name_part(row.parts[0]) if row.parts else "" for row in rows],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = {name: cells for name, cells in self._columns.items() if any(cells)}
        widths = {name: _GAP + max(map(len, (name, *cells))) for name, cells in columns.items()}
        # No number is cut: the name gets what they leave, and these go first where that is little.
        for name in ("calls", "rate", "saves"):
            if options.max_width - sum(widths.values()) < _LEAST_NAME:
                widths.pop(name, None)
        room = max(_LEAST_NAME, options.max_width - sum(widths.values()))
        table = build_table("", *widths)
        for name, *cells in zip(self._names, *(columns[one] for one in widths), strict=True):
            table.add_row(name if len(name) <= room else f"{name[: room - 3]}...", *cells)
        yield table


_LEAST_NAME, _GAP = 24, 2


def _format_rate(row: KernelRow) -> str:
    """What it reaches, in the unit of what limits it; "" if unknown."""
    if row.limit == "compute" and row.flops_per_s is not None:
        return f"{units.format_flops(row.flops_per_s)}/s"
    if row.limit == "memory" and row.bytes_per_s is not None:
        return units.format_gigabytes_per_second(row.bytes_per_s)
    return ""


_WRAPPERS = re.compile(
    r"^void |at::native::|\(anonymous namespace\)::|cutlass::Kernel2?<|^triton_\w{3}_fused_+"
)
