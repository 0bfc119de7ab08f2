"""What NCCL is asked to write, by its version; what the user has set stays."""

from pathlib import Path

import pytest

from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.nccl import inspector_environment, log_environment
from stepsplit.collectors.record import PLAN_VARIABLE, SITE, NcclLogs, RecordPlan, environment

OUT = Path("/runs/a")
ASKED = RecordPlan(out=str(OUT), name="a", first=10)


def test_only_an_nccl_that_knows_timestamps_is_asked_for_them() -> None:
    old, new = log_environment(OUT, (2, 21, 5)), log_environment(OUT, (2, 26, 2))

    assert old == {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET,GRAPH",
        "NCCL_DEBUG_FILE": "/runs/a/nccl/%h.%p.log",
    }
    assert set(new) - set(old) == {"NCCL_DEBUG_TIMESTAMP_LEVELS", "NCCL_DEBUG_TIMESTAMP_FORMAT"}
    assert log_environment(OUT, None) == new


def test_a_line_a_call_is_asked_for_only_on_demand() -> None:
    assert log_environment(OUT, None, calls=True)["NCCL_DEBUG_SUBSYS"].endswith("COLL,TUNING")


def test_the_inspector_writes_while_the_job_runs_and_small_calls_too() -> None:
    old = inspector_environment(OUT, (2, 28, 9), Path("/lib/x.so"))
    new = inspector_environment(OUT, (2, 30, 3), Path("/lib/x.so"))

    assert old["NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS"] == "10000000"
    assert "NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES" not in old
    assert new["NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES"] == "0"


def test_an_nccl_without_an_inspector_is_named() -> None:
    with pytest.raises(ValueError, match=r"NCCL 2\.27\.7 has no Inspector"):
        inspector_environment(OUT, (2, 27, 7), Path("/lib/x.so"))


def test_an_inspector_that_is_not_there_is_named() -> None:
    with pytest.raises(CollectError, match="not on LD_LIBRARY_PATH"):
        environment({}, ASKED, NcclLogs(inspector=True))


def test_the_job_gets_the_plan_and_the_agent_before_the_users_own_path() -> None:
    added = environment({"PYTHONPATH": "/mine"}, ASKED, NcclLogs())

    assert added["PYTHONPATH"] == f"{SITE}:/mine"
    assert added[PLAN_VARIABLE] == ASKED.text()
    assert added["TORCH_FR_BUFFER_SIZE"] == "20000"


def test_what_the_user_has_set_stays() -> None:
    given = {"NCCL_DEBUG": "WARN", "TORCH_FR_BUFFER_SIZE": "100"}

    assert set(environment(given, ASKED, NcclLogs())) == {PLAN_VARIABLE, "PYTHONPATH"}
