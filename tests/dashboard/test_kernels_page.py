"""The table of kernels: what each takes, where it is slow, and its longest call."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from dash import dcc
from support.page_text import find, read_tables, read_text
from support.samples import SAMPLES

from stepsplit.analyzer import examine
from stepsplit.analyzer.analysis import Analysis
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.pages.kernels import build_kernels

RUN = "abcdef012345"


@pytest.fixture(scope="module")
def slow_rank() -> Analysis:
    return examine([SAMPLES / "built_tp_pp_dp_slow_rank"])


def test_the_rows_are_those_of_the_kernel_table_and_add_up(slow_rank: Analysis) -> None:
    (section,) = build_kernels(View("a run", slow_rank.report, slow_rank.tables, RUN))
    (table,) = read_tables(section)
    assert len(table) == len(slow_rank.tables.kernels)
    assert sum(float(row["share"].removesuffix(" %")) for row in table) == pytest.approx(100, abs=1)
    first, kernel = table[0], slow_rank.tables.kernels[0]
    assert first["kernel"] == kernel.name
    calls = int(first["calls"].replace(",", ""))
    total = float(first["total"].removesuffix(" ms").replace(",", ""))
    mean = float(first["mean"].removesuffix(" µs").replace(",", ""))
    assert calls == kernel.calls and total * 1e3 / calls == pytest.approx(mean, rel=0.01)
    # No work is known of kernels without shapes: no rates, and no columns for them.
    assert "rate" not in first


def test_a_kernel_is_slow_on_the_ranks_that_the_diagnosis_names(slow_rank: Analysis) -> None:
    (section,) = build_kernels(View("a run", slow_rank.report, slow_rank.tables, RUN))
    (table,) = read_tables(section)
    slow = {row["kernel"]: row["slow on"] for row in table if row["slow on"]}
    assert set(slow) == {one.kernel for one in slow_rank.report.slow_kernels}
    assert all(text.startswith("rank 3 1.4") for text in slow.values()), slow


def test_a_name_leads_to_the_longest_call(slow_rank: Analysis) -> None:
    (section,) = build_kernels(View("a run", slow_rank.report, slow_rank.tables, RUN))
    kernel = next(one for one in slow_rank.tables.kernels if one.name == "gemm_fc2_bwd")
    (url,) = {one.href for one in find(section, dcc.Link) if read_text(one) == kernel.name}
    asked = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
    assert kernel.slowest_rank == 3 and asked["rank"] == "3"
    own = slow_rank.tables.slices[3]
    full = [one for one in slow_rank.report.steps if one.rank == 3 and one.kind == "full"]
    begin, end = full[0].start_ns, full[-1].start_ns + full[-1].step_ns
    spans = [
        (dur, start)
        for name, start, dur in zip(own.name, own.start_ns, own.dur_ns, strict=True)
        if own.names[name] == kernel.name and begin <= start < end
    ]
    dur, start = max(spans)
    assert (int(asked["from"]), int(asked["to"])) == (start - dur, start + 2 * dur)


def test_an_exported_file_has_names_without_links(slow_rank: Analysis) -> None:
    (section,) = build_kernels(View("a run", slow_rank.report, slow_rank.tables))
    assert list(find(section, dcc.Link)) == []


def test_without_tables_the_rows_of_the_report_are_shown(slow_rank: Analysis) -> None:
    (section,) = build_kernels(View("a run", slow_rank.report, None, RUN))
    (table,) = read_tables(section)
    assert len(table) == len(slow_rank.report.kernel_table)
    links = [one.href for one in find(section, dcc.Link)]
    assert all("q=" in href for href in links)
    older = msgspec.structs.replace(slow_rank.report, kernel_table=())
    assert build_kernels(View("a run", older, None, RUN)) == []


@pytest.mark.parametrize(
    ("shapes", "dtype", "shown"),
    [("[4096,4096],[4096,4096]", "fp32", "[4096,4096],[4096,4096] fp32"),
     ("[4096,4096],[4096,4096] bf16", "bf16", "[4096,4096],[4096,4096] bf16")],
)  # fmt: skip
def test_rates_are_shown_where_the_work_is_known(
    slow_rank: Analysis, shapes: str, dtype: str, shown: str
) -> None:
    rows = tuple(
        msgspec.structs.replace(
            row, shapes=shapes, dtype=dtype, limit="compute", flops=10**9,
            flops_per_s=4e14, peak_share=0.405, saves_ns=1_500_000,
        )
        for row in slow_rank.report.kernel_table[:1]
    )  # fmt: skip
    report = msgspec.structs.replace(slow_rank.report, kernel_table=rows)
    (section,) = build_kernels(View("a run", report, None, RUN))
    ((row,),) = read_tables(section)
    assert row["kernel"].endswith(shown) and not row["kernel"].endswith("bf16 bf16")
    assert (row["rate"], row["of peak"], row["would save"]) == ("400 TFLOP/s", "40.5 %", "1.50 ms")
