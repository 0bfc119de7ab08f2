"""All real files: read as the right kind, or refused with a reason."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch

import pytest
from support.required import shared_trace

from stepsplit.analyzer import FileRead, NcclLog, TrainLog, read_files
from stepsplit.analyzer.readers.any_file import UNKNOWN

REFUSED = {
    "*SOURCE.txt",
    "README.md",
    "flight_recorder_nvrx/*/fault_injection.log",
    "flight_recorder_nvrx/*/reference.txt",
    "golden_megatron_ci/*/model_config.yaml",
    "nccl_inspector/*_README.md",
    "nccl_tests/bigscience_bandwidth_README.md",
    "nccl_tests/mleng_network_benchmarks_README.md",
    "straggler_bytedance/README_upstream.md",
    "straggler_bytedance/meta-ST.yaml",
    "straggler_bytedance/ms-ST.json",
    "straggler_bytedance/mw-ST.json",
    "straggler_bytedance/result-ST.json",
    "straggler_bytedance/trace-ST.parquet",
    "trainlog_bigscience_v100/*.md",
    "trainlog_bigscience_v100/*.slurm",
}
"""Notes of people, settings, results and scripts: no traces, logs or dumps."""
pytestmark = [pytest.mark.slow, pytest.mark.in_turn("analyzer/readers")]
_ROW = re.compile(r"^\| S \| (kineto_\S+) \| [\d.]+ \| (\d+) \|", re.M)


@pytest.fixture(scope="module")
def everything() -> dict[str, list[FileRead]]:
    """What was read, by the path below the folder."""
    root = shared_trace("README.md").parent
    found: dict[str, list[FileRead]] = {}
    for one in read_files(root):
        found.setdefault(one.where.removeprefix(f"{root}/"), []).append(one)
    return found


def test_only_files_that_are_not_of_a_run_are_refused(
    everything: dict[str, list[FileRead]], capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        sys.stdout.writelines(f"{line}\n" for line in ("", *_table(everything)))
    refused = {path for path, reads in everything.items() if any(one.refused for one in reads)}
    assert {path for path in everything if _is_of_people(path)} == refused
    assert {one.refused for path in refused for one in everything[path]} == {UNKNOWN}


def _is_of_people(path: str) -> bool:
    return any(fnmatch(path, pattern) for pattern in REFUSED)


def _table(everything: dict[str, list[FileRead]]) -> Iterator[str]:
    """A line for each file and kind; the hundreds of files of one archive as one."""
    archived = 0
    for path, reads in everything.items():
        if ".tar" in path:
            archived += 1
            continue
        for one in reads:
            codes = ", ".join(note.code for note in one.notes)
            shown = path if len(path) <= 60 else f"{path[:57]}..."
            yield f"{shown:60} {one.kind or one.refused:28} {one.events:8,} {codes}".rstrip()
    yield f"and {archived} files of golden_megatron_ci/golden_a100.tar.xz"


def test_every_entry_of_every_trace_is_read(everything: dict[str, list[FileRead]]) -> None:
    listed = _ROW.findall(shared_trace("README.md").read_text())
    for name, events in listed:
        begin = name.removesuffix("...")
        found = [reads for path, reads in everything.items() if path.startswith(begin)]
        assert [[one.events for one in reads] for reads in found] == [[int(events)]], name
    traces = [path for path in everything if path.startswith("kineto_") and ".pt." in path]
    assert len(listed) >= len(traces)


def test_a_job_log_is_read_as_every_kind_it_contains(everything: dict[str, list[FileRead]]) -> None:
    both = everything["nccl_logs/full_bigscience_2.7.8_64xV100_megatron_tp4_pp16.log"]
    assert [one.kind for one in both] == ["NCCL log", "training log"]
    nccl, training = (one.content for one in both)
    assert isinstance(nccl, NcclLog)
    assert isinstance(training, TrainLog)
    assert max(one.nranks for one in nccl.communicators) == 64
    assert len(training.steps) == 4


def test_golden_values_of_megatron_ci_have_steps(everything: dict[str, list[FileRead]]) -> None:
    golden = [reads[0] for path, reads in everything.items() if "/golden_values" in path]
    assert len(golden) == 474
    assert all(isinstance(one.content, TrainLog) and one.events for one in golden)
