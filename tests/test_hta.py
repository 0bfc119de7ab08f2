"""Compute as HolisticTraceAnalysis counts it: another reader and union of the same kernels."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from required import absent, shared_trace

from stepsplit.analyzer import analyze
from stepsplit.analyzer.hta import open_in_hta


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # HTA's own, for pandas 3
def test_hta_counts_the_same_compute_and_calls_the_waiting_communication() -> None:
    if find_spec("hta") is None:
        absent("hta", "HolisticTraceAnalysis is not installed")
    folder = shared_trace("kineto_megatron_tp2_v100")
    theirs = open_in_hta(folder).get_temporal_breakdown(visualize=False).set_index("rank")
    for row in analyze(folder).steps:
        compute_us = theirs.loc[row.rank, "compute_time(us)"]
        assert compute_us * 1000 == pytest.approx(row.compute_ns, abs=1_000)
    not_compute_us = theirs.loc[1, "non_compute_time(us)"]
    moved_us = analyze(folder).steps[1].collective_ns / 1000
    assert not_compute_us > 100 * moved_us
