"""Traces whose launches do not fit their kernels: other clocks, or several ranks in one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.builders import Event, GpuTrace
from support.reading import list_messages

from stepsplit.analyzer import analyze


def train(early: float = 0) -> GpuTrace:
    trace = GpuTrace()
    for step in range(3):
        at = 1000 * (step + 1)
        trace.step(step, at, at + 1000)
        for i in range(5):
            begin = at + 100 * i + 50
            trace.kernel("gemm", begin, begin + 80, launched=begin - 10 + early)
    return trace


def test_kernels_before_their_launch_are_said(tmp_path: Path) -> None:
    report = analyze(train(early=60).write(tmp_path))
    assert list_messages(report, "kernels_before_launch") == [
        "15 of 15 kernels and copies start before their launch, by up to 0.05 ms: the clocks of "
        "host and device differ, so that steps and causes of idle time are uncertain"
    ]


def test_rounded_times_are_no_other_clock(tmp_path: Path) -> None:
    report = analyze(train(early=12).write(tmp_path))
    assert list_messages(report, "kernels_before_launch") == []


@pytest.mark.parametrize("added", [0, 1000])
def test_two_ranks_merged_into_one_file_are_said(tmp_path: Path, added: int) -> None:
    body = train().body()
    other: list[Event] = json.loads(json.dumps(body["traceEvents"]))
    for event in other:
        event["pid"] = 2
        if "correlation" in event["args"]:
            event["args"]["correlation"] += added
    merged = body | {"traceEvents": body["traceEvents"] + other}
    (tmp_path / "rank0_trace.json").write_text(json.dumps(merged))
    assert list_messages(analyze(tmp_path), "several_processes") == [
        "2 processes made the runtime calls of the file (1, 2), which is split as one rank: "
        "merged ranks need a file each"
    ]
