"""The outputs of check, each validated by the rules of its consumer."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from support.gate_builders import CALLS, MS, TIMES, run, runs
from support.required import absent

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.regression.checks import (
    CheckedMetric,
    CheckResult,
    from_json,
    parse_budget,
    to_json,
)
from stepsplit.analyzer.regression.judge import check_candidate
from stepsplit.analyzer.regression.metrics import BucketTime, CallMetrics, CausedWait
from stepsplit.dashboard.reporters.check_files import (
    format_bencher,
    format_benchmark_action,
    format_code_quality,
    format_junit,
    format_open_metrics,
)
from stepsplit.dashboard.reporters.check_markdown import (
    COMMENT_BYTES,
    SUMMARY_BYTES,
    format_annotations,
    format_markdown,
    format_summary,
)

XSD = Path(sys.prefix) / "junit-10.xsd"
"""Of Jenkins' xunit plugin; .ci/run takes it out of pytest's source release."""
ODD = "tp_<&\"'|`*_[x](y)\x00\x1b@everyone #1\n::error::"
RULES = ("exposed_comm:5%", "step:5%", "busbw.tp.all_reduce:5%", "calls:exact", "skew:<=10%")


def values(exposed: float, step: float) -> dict[str, float]:
    return {
        "exposed_comm": exposed, "step": step, "busbw.tp.all_reduce": 80e9 * step / 1e8,
        "skew": exposed / 10,
    }  # fmt: skip


def verdict(name: str = "own") -> CheckResult:
    """Regressed in exposed_comm and calls, inconclusive in step, fine in the others."""
    steps = (1.0e8, 1.4e8, 0.9e8)
    base = [run(f"base{i}", values(0.10 + i / 1e3, s)) for i, s in enumerate(steps)]
    calls = (*CALLS, CallMetrics(name, "all_gather", "float32", 8, 4, False, 30_000, 0))
    times = (*TIMES, BucketTime("skew", None, 34 * MS), BucketTime("skew", "tp", 33 * MS))
    blame = (CausedWait(3, "compute", "tp", 62 * MS),)
    own = [
        run(f"{name}{i}", values(0.20 + i / 1e3, s + 7), calls=calls, times=times, blame=blame)
        for i, s in enumerate(steps)
    ]
    return check_candidate(own, base, [parse_budget(rule) for rule in RULES])


def crowd() -> CheckResult:
    """Far more metrics and causes than any page has room for."""
    one = verdict()
    many = [replace(one.gated[0], metric="exposed_comm." + f"axis{i}" * 40) for i in range(3_000)]
    return replace(one, gated=tuple(many), causes=one.causes * 50)


def test_the_example_has_all_three_results() -> None:
    found = {one.metric: one.answer for one in verdict().gated}
    assert found == {
        "exposed_comm": "regressed", "step": "inconclusive",
        "busbw.tp.all_reduce": "inconclusive", "calls": "regressed", "skew": "pass",
    }  # fmt: skip


def test_json_round_trips() -> None:
    assert from_json(to_json(verdict())) == verdict()
    with pytest.raises(DataError, match="not a result of stepsplit check"):
        from_json(b'{"schema": "stepsplit.verdict/1"}')
    other = to_json(replace(verdict(), schema="stepsplit.verdict/9"))
    with pytest.raises(DataError, match=r"schema stepsplit\.verdict/9"):
        from_json(other)


@pytest.mark.parametrize("name", ["own", ODD], ids=["plain", "odd"])
def test_junit_is_valid_by_jenkins_schema(name: str) -> None:
    etree = pytest.importorskip("lxml.etree")
    if not XSD.exists():
        absent("junit", f"no {XSD.name} in {sys.prefix}: .ci/run fetches it")
    document = etree.fromstring(format_junit(verdict(name)))
    schema = etree.XMLSchema(etree.parse(str(XSD)))
    schema.assertValid(document)
    (suite,) = document
    counts = {key: suite.get(key) for key in ("tests", "failures", "skipped", "errors")}
    assert counts == {"tests": "5", "failures": "2", "skipped": "2", "errors": "0"}
    body = suite.find("testcase/failure").text
    assert "exposed_comm regressed: 10.1 % -> 20.1 % (+10.0 pt), budget 5%" in body
    assert "rank 3 (compute) delays its group (2, 3) by" in body


def test_open_metrics_are_read_by_the_reference_parser() -> None:
    families = {f.name: f for f in text_string_to_metric_families(format_open_metrics(verdict()))}
    assert set(families) == {
        "stepsplit_exposed_comm_ratio", "stepsplit_step_seconds",
        "stepsplit_busbw_tp_all_reduce_bytes_per_second", "stepsplit_calls_count",
        "stepsplit_skew_ratio",
    }  # fmt: skip
    family = families["stepsplit_step_seconds"]
    assert (family.type, family.unit) == ("gauge", "seconds")
    values = {sample.labels["side"]: sample.value for sample in family.samples}
    assert values["baseline"] == pytest.approx(0.11) and values["candidate"] == pytest.approx(0.11)


def test_gitlab_code_quality_has_every_field_and_a_fingerprint_that_stays() -> None:
    issues = json.loads(format_code_quality(verdict(), "ci/budgets.toml"))
    again = json.loads(format_code_quality(verdict("other"), "ci/budgets.toml"))
    assert [issue["check_name"] for issue in issues] == [
        "stepsplit.exposed_comm", "stepsplit.step", "stepsplit.busbw.tp.all_reduce",
        "stepsplit.calls",
    ]  # fmt: skip
    for issue in issues:
        assert set(issue) == {
            "description", "check_name", "fingerprint", "severity", "location",
        }  # fmt: skip
        assert issue["severity"] in ("info", "minor", "major", "critical", "blocker")
        assert issue["location"] == {"path": "ci/budgets.toml", "lines": {"begin": 1}}
    prints = [issue["fingerprint"] for issue in issues]
    assert len({*prints}) == 4 and prints == [issue["fingerprint"] for issue in again]


def test_annotations_keep_to_githubs_limits_and_escapes() -> None:
    lines = format_annotations(verdict(ODD))
    assert all("\n" not in line and "\r" not in line for line in lines)
    start = "::error title=stepsplit%3A regressed::exposed_comm regressed: 10.1 %25"
    assert lines[0].startswith(start)
    assert any(r"\n::error::" in line for line in lines)
    many = format_annotations(crowd())
    kinds = [line.split(" ")[0] for line in many]
    assert kinds.count("::error") == 10 and kinds.count("::warning") <= 10


def test_a_summary_is_truncated_to_the_remaining_size() -> None:
    whole = format_summary(crowd(), existing_bytes=SUMMARY_BYTES - 5_000)
    assert len(whole.encode()) <= 5_000
    assert whole.endswith("(truncated: the complete result is in the JSON file)\n")
    assert len(format_summary(crowd()).encode()) <= SUMMARY_BYTES
    assert format_summary(crowd(), existing_bytes=SUMMARY_BYTES) == ""


def test_a_comment_fits_and_contains_no_markup_of_a_recording() -> None:
    assert len(format_markdown(crowd()).encode()) <= COMMENT_BYTES
    text = format_markdown(verdict(ODD))
    prose = re.sub("`[^`\n]*`", "", text)
    assert not {"@", "<"} & {*prose} and text.replace("\n", "").isprintable()
    assert "&#60;&\"'\\|\\`" in prose and "&#64;everyone \\#1" in prose
    assert "| `exposed_comm` | `5%` | 10.1 % | 20.1 % | +10.0 pt |" in text
    assert re.search(r"^1\. .*all\\_gather: \+4 calls per step", text, re.MULTILINE)


def test_benchmark_services() -> None:
    measures = json.loads(format_bencher(verdict()))
    (name,) = measures
    assert name == "stepsplit 4 x NVIDIA H100 dp_replicate 2 tp 2"
    assert measures[name]["calls"] == {"value": 84.0}
    rows = json.loads(format_benchmark_action(verdict()))
    assert [row["name"].rpartition(": ")[2] for row in rows] == [
        "exposed_comm", "step", "calls", "skew",
    ]  # fmt: skip
    assert {type(row["value"]) for row in rows} == {float}
    assert all(set(row) == {"name", "unit", "value", "extra"} for row in rows)


def test_no_output_needs_a_baseline() -> None:
    alone = check_candidate(
        runs("own", "exposed_comm", (0.1, 0.2)), [], [parse_budget("exposed_comm:<=9%")]
    )
    assert isinstance(alone.gated[0], CheckedMetric) and alone.baseline is None
    for made in (
        format_junit,
        format_bencher,
        format_benchmark_action,
        format_open_metrics,
        format_markdown,
        format_annotations,
    ):
        assert made(alone)
