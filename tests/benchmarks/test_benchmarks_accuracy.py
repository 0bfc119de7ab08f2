"""The table that holds HTA, TraceLens and stepsplit against the truth."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from support.ground_truth import SEED
from support.required import absent

from benchmarks.accuracy import rows_of


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # HTA's own, for pandas 3
@pytest.mark.seeded
def test_a_slow_rank_is_found_by_stepsplit_and_called_communication_by_hta() -> None:
    if find_spec("hta") is None:
        absent("hta", "HolisticTraceAnalysis is not installed")
    truth, hta, _, ours = rows_of("tp_slow_rank", SEED)
    assert ours[-1] == truth[-1]
    assert float(ours[-2].split()[0]) < 0.5 < float(hta[-2].split()[0])
    assert hta[4:6] == ("", "")
