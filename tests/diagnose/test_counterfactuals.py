"""Gains against simulated jobs of others: each also ran without its cause, which is the truth."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from support.required import SHARED_TRACES, absent

from stepsplit.analyzer import analyze

CAUSES = SHARED_TRACES.parent / "repro" / "causes"
JOBS = {
    "dp16_slow_rank": ("slow_rank", (5,)),
    "tp2_pp2_dp4_slow_rank": ("slow_rank", (5,)),
    "tp4_pp2_dp2_slow_link": ("slow_link", (4, 5, 6, 7)),
    "fsdp8_slow_rank": ("slow_rank", (5,)),
}
NEAR = 0.05
SLOW_IN_TURN = (
    pytest.mark.slow,
    pytest.mark.in_turn("analyzer/diagnose", "analyzer/readers/kineto"),
)


def folder_of(job: str) -> Path:
    if not CAUSES.exists():
        absent("traces", f"{CAUSES.name} is not next to the project")
    return CAUSES / job


def gain_ns_of(job: str) -> float:
    return 1e6 * float(json.loads((folder_of(job) / "truth.json").read_text())["gain_ms"])


@pytest.mark.parametrize("job", JOBS)
def test_the_first_finding_is_the_cause_and_its_gain_is_true(job: str) -> None:
    first = analyze(folder_of(job) / "with").findings[0]
    assert (first.code, first.ranks) == JOBS[job]
    assert first.gain_ns == pytest.approx(gain_ns_of(job), rel=NEAR)


@pytest.mark.parametrize(
    "job",
    [pytest.param(job, marks=() if job == "fsdp8_slow_rank" else SLOW_IN_TURN) for job in JOBS],
)
def test_timestamps_in_whole_microseconds_do_not_change_the_finding(
    job: str, tmp_path: Path
) -> None:
    for file in (folder_of(job) / "with").glob("*.json.gz"):
        body = json.loads(gzip.decompress(file.read_bytes()))
        for event in body["traceEvents"]:
            if "dur" in event:
                begin, end = round(event["ts"]), round(event["ts"] + event["dur"])
                event |= {"ts": begin, "dur": end - begin}
        (tmp_path / file.stem).write_text(json.dumps(body))
    first = analyze(tmp_path).findings[0]
    assert (first.code, first.ranks) == JOBS[job]
    assert first.gain_ns == pytest.approx(gain_ns_of(job), rel=NEAR)


@pytest.mark.parametrize("job", [job for job in JOBS if job != "dp16_slow_rank"])
def test_the_same_job_without_the_cause_has_no_finding(job: str) -> None:
    assert analyze(folder_of(job) / "without").findings == ()
