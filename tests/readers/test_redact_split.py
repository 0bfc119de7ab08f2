"""A redacted copy has the split of its recording, whatever is odd in it and in its file names."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fuzz.mutants import mutate
from simulator.engine import simulate
from simulator.kineto import write_recording
from simulator.noise import Noise
from simulator.scenarios import SCENARIOS
from simulator.style import Style
from support.builders import GpuTrace
from support.ground_truth import SEED
from test_redact_plants import LOG

from stepsplit.analyzer import Report, analyze, read_files
from stepsplit.analyzer.errors import DataError, StepsplitError
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, parse_stated_class
from stepsplit.analyzer.readers.nccl.records import NcclLog
from stepsplit.analyzer.redact import redact_recording
from stepsplit.analyzer.redact.names import Names
from stepsplit.analyzer.redact.pseudonyms import Pseudonyms

QUICK, MANY = range(100_000, 100_003), range(100_003, 100_050)
SLOW_IN_TURN = (pytest.mark.slow, pytest.mark.in_turn("analyzer/redact"))


def select_split(report: Report) -> Mapping[str, Any]:
    """The parts of a report that a redaction must not change."""
    return {
        "steps": report.steps,
        "exposed": report.exposed,
        "collectives": report.collectives,
        "kernels": report.kernels,
        "findings": [finding.code for finding in report.findings],
        "groups": [(group.axis, group.ranks) for group in report.groups],
    }


def compare_copy(recording: Path, copy: Path) -> None:
    """Redacts the recording and compares what is analyzed."""
    before = select_split(analyze(recording))
    redact_recording([recording], copy)
    assert select_split(analyze(copy)) == before


@pytest.mark.parametrize(
    "seeds", [QUICK, pytest.param(MANY, marks=SLOW_IN_TURN)], ids=["quick", "many"]
)
def test_a_mutant_that_can_be_analyzed_can_be_redacted(seeds: range, tmp_path: Path) -> None:
    compared = 0
    for seed in seeds:
        recording = mutate(Random(seed)).recorded.write(tmp_path / f"{seed}")
        try:
            analyze(recording)
        except StepsplitError:
            continue
        compare_copy(recording, tmp_path / f"copy{seed}")
        compared += 1
    assert compared > len(seeds) // 2


QUICK_SCENARIOS = sorted(SCENARIOS)[:1]


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK_SCENARIOS else pytest.param(name, marks=SLOW_IN_TURN)
        for name in sorted(SCENARIOS)
    ],
)
def test_a_simulated_job_has_the_same_split_and_findings(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name](SEED)
    run = simulate(scenario.job, Noise.of(scenario.seed))
    (tmp_path / "run").mkdir()
    write_recording(scenario, run, tmp_path / "run", Style(), None)
    compare_copy(tmp_path / "run", tmp_path / "copy")


def write_ranks(folder: Path, names: Mapping[int, str], *, stated: bool) -> Path:
    """Two ranks with files of these names, with and without the rank in them."""
    for rank, name in names.items():
        trace = GpuTrace(rank, 2, groups=[("0", "default_pg", [0, 1])])
        trace.step(1, 0, 1000).step(2, 1000, 2000).step(3, 2000, 2100)
        for start in (0, 1000):
            trace.kernel("gemm", start, start + 300 + 40 * rank)
            trace.all_reduce(start + 340, start + 500)
        path = trace.write(folder)
        body = path.read_bytes()
        if not stated:
            content = json.loads(gzip.decompress(body))
            content["distributedInfo"] |= {"rank": -1}
            body = gzip.compress(json.dumps(content).encode())
        path.unlink()
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ("acme-0.pt.trace.json.gz", "acme-1.pt.trace.json.gz"),
        ("acme-4.json.gz", "acme-6.json.gz"),
        ("login7_900.1721000000001.pt.trace.json.gz", "login8_800.1721000000002.pt.trace.json.gz"),
        ("b.json.gz", "a.json.gz"),
        ("rank0/acme.json.gz", "rank1/acme.json.gz"),
        ("host-a/rank1.json.gz", "host-b/rank0.json.gz"),
        ("acme_rank_1.json.gz", "acme_rank_0.json.gz"),
    ],
)
def test_the_rank_in_a_file_name_is_kept(tmp_path: Path, names: tuple[str, ...]) -> None:
    for stated in (True, False):
        source = tmp_path / f"run{stated}"
        source.mkdir()
        write_ranks(source, dict(enumerate(names)), stated=stated)
        compare_copy(source, tmp_path / f"copy{stated}")


@pytest.mark.parametrize(
    "pattern",
    ["acme_rank{rank}_step{n}00.json.gz", "capture{n}/acme_rank{rank}.json.gz",
     "acme{rank}_17.172100000000{n}.pt.trace.json.gz"],
)  # fmt: skip
def test_of_several_captures_the_latest_is_analyzed(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "run").mkdir()
    for n in (1, 2):
        write_ranks(
            tmp_path / "run",
            {rank: pattern.format(rank=rank, n=n) for rank in (0, 1)},
            stated="{rank}_17" not in pattern,
        )
    compare_copy(tmp_path / "run", tmp_path / "copy")


def test_a_log_keeps_all_that_is_parsed_but_texts(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lines = LOG.format(at="node0:10:20 [0] NCCL INFO ")
    (tmp_path / "run" / "a.log").write_text(lines)

    redact_recording([tmp_path / "run"], tmp_path / "copy")

    logs = [read_files(tmp_path / name)[0].content for name in ("run", "copy")]
    before, after = (log for log in logs if isinstance(log, NcclLog))
    for name in (
        "versions", "rings", "neighbors", "trees", "links", "patterns", "systems", "networks",
        "costs", "choices", "torn",
    ):  # fmt: skip
        same = str(getattr(after, name)).replace("host1", "node0")
        assert same == str(getattr(before, name)), name
    assert [
        (one.nranks, one.nodes, one.parent, [(m.rank, m.pid, m.init_ns) for m in one.members])
        for one in after.communicators
    ] == [
        (one.nranks, one.nodes, one.parent, [(m.rank, m.pid, m.init_ns) for m in one.members])
        for one in before.communicators
    ]
    assert [str(one.calls) for one in after.calls] == [str(one.calls) for one in before.calls]
    assert [(one.text, one.count) for one in after.warnings] == [("warning1", 1)]


def test_a_private_name_states_the_class_that_the_rules_give_it() -> None:
    names = Names(Pseudonyms(), BUILT_IN, ())
    for rule in random.Random(SEED).sample(BUILT_IN.families, 10):
        word = "zq" + rule.match.strip("^").split("|")[0].strip("\\b(?<![a-z])")
        stated = parse_stated_class(names.redact_kernel(word))
        assert stated is not None, word
        assert (stated.kind, stated.op, stated.family) == (
            BUILT_IN.classify_kernel(word), BUILT_IN.find_op(word), BUILT_IN.find_family(word),
        )  # fmt: skip


def test_a_damaged_recording_is_refused_as_before(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank0_trace.json").write_text("{")
    with pytest.raises(DataError, match="no file of a recording"):
        redact_recording([tmp_path / "run"], tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
