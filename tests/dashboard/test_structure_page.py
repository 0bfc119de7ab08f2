"""The page Structure: layers by parts, shares that add up, the ranks of a part, and the model."""

from __future__ import annotations

import re
from collections import Counter
from decimal import Decimal
from io import StringIO

import msgspec
import pytest
from dash import dcc
from rich.console import Console
from support.page_text import find, read_tables, read_text
from support.samples import SAMPLES

from stepsplit.analyzer import examine
from stepsplit.analyzer.analysis import Analysis
from stepsplit.analyzer.parts.part import PartKind
from stepsplit.analyzer.report.part_rows import PartEvidence
from stepsplit.dashboard.pages.address import AddressQuery
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.pages.structure import build_structure_page
from stepsplit.dashboard.reporters.parts import KernelsTable, build_parts_section

RUN = "abcdef012345"


@pytest.fixture(scope="module")
def fsdp() -> Analysis:
    return examine([SAMPLES / "fsdp4"], job="auto")


def build(analysis: Analysis, run_id: str = RUN, **chosen: str) -> list[object]:
    view = View("a run", analysis.report, analysis.tables, run_id)
    return list(build_structure_page(view, AddressQuery(chosen)))


def test_the_cells_add_up_to_the_step_and_lead_to_their_ranks(fsdp: Analysis) -> None:
    (graph,) = find(build(fsdp), dcc.Graph)
    (grid,) = graph.figure.data
    step_ms = sum(row.total_ns for row in fsdp.report.parts) / 1e6
    assert sum(ms for row in grid.z for ms in row if ms == ms) == pytest.approx(step_ms, rel=1e-6)
    assert list(grid.y) == ["outside", "0", "1"]
    column = list(grid.x).index("MLP")
    assert grid.customdata[1][column] == "layer=0&part=mlp"
    assert graph.figure.layout.meta["link"] == f"/run/{RUN}/structure?{{custom}}"


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("time", ["compute", "exposed", "idle"])
def test_a_pass_and_a_bucket_are_chosen(fsdp: Analysis, phase: str, time: str) -> None:
    (graph,) = find(build(fsdp, phase=phase, time=time), dcc.Graph)
    (grid,) = graph.figure.data
    expected = sum(getattr(row, f"{time}_ns") for row in fsdp.report.parts if row.phase == phase)
    assert sum(ms for row in grid.z for ms in row if ms == ms) == pytest.approx(expected / 1e6)
    assert f"phase={phase}&time={time}&{{custom}}" in graph.figure.layout.meta["link"]


def test_shares_of_parts_add_up_and_name_the_evidence(fsdp: Analysis) -> None:
    page = build(fsdp)
    assert "by the sequence of ops" in read_text(page[0])
    parts = next(table for table in map(read_tables, page) if table and "share" in table[0][0])[0]
    shares = [round(10 * float(row["share"].removesuffix(" %"))) for row in parts]
    assert sum(shares) == 1000
    assert {row["part"] for row in parts} >= {"attention", "MLP", "gradient reduction"}
    assert "recompute" not in parts[0]


def test_a_chosen_part_is_shown_on_each_rank(fsdp: Analysis) -> None:
    section = build(fsdp, layer="1", part="mlp")[1]
    (table,) = read_tables(section)
    own, full = fsdp.tables.parts, {
        (row.rank, row.step) for row in fsdp.report.steps if row.kind == "full"
    }  # fmt: skip
    steps, sums = Counter(rank for rank, _ in full), Counter[int]()
    for at in range(len(own.rank)):
        is_mlp = own.layer[at] == 1 and own.part[at] == PartKind.MLP
        if is_mlp and (int(own.rank[at]), int(own.step[at])) in full:
            sums[int(own.rank[at])] += int(own.ns[at])
    assert "Layer 1, MLP" in read_text(section)
    assert [row["rank"] for row in table] == [
        f"rank {rank}" for rank in sorted(sums, key=lambda rank: -sums[rank] / steps[rank])
    ]
    for row in table:
        rank = int(row["rank"].removeprefix("rank "))
        shown = float(row["per step"].removesuffix(" ms"))
        assert shown == pytest.approx(sums[rank] / steps[rank] / 1e6, rel=0.01)


def test_measured_parts_are_beside_those_of_the_model(fsdp: Analysis) -> None:
    gap = fsdp.report.gap
    assert gap is not None and gap.parts
    table = read_tables(build(fsdp)[-1])[0]
    assert [row["part"].lower() for row in table] == [row.part for row in gap.parts]
    # The compute of the stage is divided, and that of the measured step.
    assert sum(row.predicted_ns for row in gap.parts) == gap.shown.predicted.compute_ns
    assert sum(row.measured_ns for row in gap.parts) == sum(
        row.compute_ns for row in fsdp.report.parts
    )


def test_odd_choices_show_the_whole_step(fsdp: Analysis) -> None:
    page = build(fsdp, phase="x", time="<b>", layer="99999999", part="mlp<b>")
    assert "100.0 % of the step" in read_text(page[0])
    assert len(page) == len(build(fsdp))
    assert read_tables(build(fsdp, layer="77", part="mlp")[1]) == [[]]


def test_an_exported_file_has_no_menus_and_links(fsdp: Analysis) -> None:
    page = build(fsdp, run_id="")
    assert list(find(page, dcc.Link)) == []
    assert "pass" not in read_text(page[0]).split()


def test_without_evidence_the_page_says_how_to_record_it(fsdp: Analysis) -> None:
    nothing = msgspec.structs.replace(fsdp.report, part_evidence=PartEvidence("none", 0, 1.0, 4))
    for report in (nothing, msgspec.structs.replace(fsdp.report, part_evidence=None)):
        (card,) = build_structure_page(View("a run", report, None, RUN), AddressQuery({}))
        assert "--modules" in read_text(card)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_number_of_a_kernel_is_cut_in_a_narrow_terminal(fsdp: Analysis, width: int) -> None:
    rates = {"limit": "compute", "flops_per_s": 690e12, "peak_share": 0.697, "saves_ns": 12_000}
    rows = [msgspec.structs.replace(row, **rates) for row in fsdp.report.kernel_table]
    console = Console(width=width, record=True, file=StringIO())
    console.print(KernelsTable(rows))
    head, *lines = console.export_text().splitlines()
    assert {"step", "share", "part"} <= set(head.split()) and "of peak" in head
    assert ("TFLOP/s" in lines[0]) is (width > 80)
    assert all(re.search(r" ms +\d+\.\d % .*69\.7 %", line) for line in lines)
    assert not any("…" in line or len(line) > width for line in lines)


def test_passes_and_parts_add_up_as_printed(fsdp: Analysis) -> None:
    console = Console(width=200, record=True, file=StringIO())
    for built in build_parts_section(fsdp.report):
        console.print(built)
    rows = [
        [cell.strip() for cell in re.split(r"\s{2,}", line) if cell.strip()]
        for line in console.export_text().splitlines()
        if re.match(r"attention|MLP|norm", line)
    ]
    assert rows
    for _, measured, _, forward, backward, *_ in rows:
        times = [Decimal(cell.split()[0]) for cell in (measured, forward, backward)]
        assert times[0] == times[1] + times[2]
