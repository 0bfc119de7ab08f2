"""The environment variables of NCCL by version; variables set by the user do not change."""

from pathlib import Path

import pytest

from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.nccl import build_inspector_environment, build_log_environment
from stepsplit.collectors.record import PLAN_VARIABLE, SITE, NcclLogs, RecordPlan, build_environment

OUT = Path("/runs/a")
ASKED = RecordPlan(out=str(OUT), name="a", first=10)


def test_timestamps_are_requested_only_from_versions_with_support() -> None:
    old, new = build_log_environment(OUT, (2, 21, 5)), build_log_environment(OUT, (2, 26, 2))

    assert old == {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET,GRAPH",
        "NCCL_DEBUG_FILE": "/runs/a/nccl/%h.%p.log",
    }
    assert set(new) - set(old) == {"NCCL_DEBUG_TIMESTAMP_LEVELS", "NCCL_DEBUG_TIMESTAMP_FORMAT"}
    assert build_log_environment(OUT, None) == new


def test_call_logging_is_off_by_default() -> None:
    assert build_log_environment(OUT, None, calls=True)["NCCL_DEBUG_SUBSYS"].endswith("COLL,TUNING")


def test_the_inspector_dumps_periodically_and_includes_small_calls() -> None:
    old = build_inspector_environment(OUT, (2, 28, 9), Path("/lib/x.so"))
    new = build_inspector_environment(OUT, (2, 30, 3), Path("/lib/x.so"))

    assert old["NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS"] == "10000000"
    assert "NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES" not in old
    assert new["NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES"] == "0"


def test_an_nccl_without_inspector_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"NCCL 2\.27\.7 has no Inspector"):
        build_inspector_environment(OUT, (2, 27, 7), Path("/lib/x.so"))


def test_a_missing_inspector_plugin_is_an_error() -> None:
    with pytest.raises(CollectError, match="add its folder to LD_LIBRARY_PATH"):
        build_environment({}, ASKED, NcclLogs(inspector=True))


def test_the_job_gets_the_plan_and_the_agent_before_the_users_own_path() -> None:
    added = build_environment({"PYTHONPATH": "/mine"}, ASKED, NcclLogs())

    assert added["PYTHONPATH"] == f"{SITE}:/mine"
    assert added[PLAN_VARIABLE] == ASKED.format_json()
    assert added["TORCH_FR_BUFFER_SIZE"] == "20000"


def test_variables_set_by_the_user_are_not_changed() -> None:
    given = {"NCCL_DEBUG": "WARN", "TORCH_FR_BUFFER_SIZE": "100"}

    assert set(build_environment(given, ASKED, NcclLogs())) == {PLAN_VARIABLE, "PYTHONPATH"}
