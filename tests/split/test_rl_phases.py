"""The phases of the RL step, by the marks of frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders import GpuTrace

from stepsplit.analyzer.arrays import Intervals
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.split.rl_phases import MOST_MARKS, OTHER_MARKS, find_phases, has_rl_phases
from stepsplit.analyzer.trace import RankTrace
from stepsplit.collectors.formats.rl_marks import (
    FRAMEWORKS,
    PHASES,
    find_phase_of_mark,
    is_whole_mark,
    read_decode_step,
)
from stepsplit.collectors.formats.run_spec import RunSpec, write_run_json


def read(trace: GpuTrace, folder: Path) -> RankTrace:
    trace.write(folder)
    (found,) = read_recording([folder]).traces
    return found


def list_spans(found: Intervals) -> list[tuple[int, int]]:
    return [
        (begin // 1000, end // 1000)
        for begin, end in zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True)
    ]


# One line of marks and phases for each framework: what a job of it really names so.
EXAMPLES = {
    "own": {"generate": "generation", "reward": "reward", "train": "training"},
    "verl": {
        "generate_sequences": "generation",
        "gen": "generation",
        "compute_rm_score": "reward",
        "compute_ref_log_prob": "reference",
        "old_log_prob": "reference",
        "update_actor": "training",
        "update_weights": "weight_sync",
        "save_checkpoint": "other",
        "step": None,
    },
    "TRL": {
        "GRPOTrainer.vLLM.generate": "generation",
        "MyTrainer.transformers.generate": "generation",
        "GRPOTrainer._calculate_rewards": "reward",
        "GRPOTrainer._get_per_token_logps_and_entropies": "reference",
        "GRPOTrainer.compute_loss": "training",
        "GRPOTrainer.sync_weights": "weight_sync",
        "GRPOTrainer._prepare_inputs": None,
        "compute_loss": None,
    },
    "slime": {
        "ref_log_probs": "reference",
        "actor_train": "training",
        "update_weights": "weight_sync",
        "train_wait": None,
    },
    "torchtitan": {
        "vllm_engine_step": "generation",
        "score_group": "reward",
        "forward_backward": "training",
        "generator_pull_model_state_dict": "weight_sync",
        "train_step": None,
    },
}


@pytest.mark.parametrize(
    ("mark", "phase"), [pair for marks in EXAMPLES.values() for pair in marks.items()]
)
def test_marks_of_frameworks_have_their_phases(mark: str, phase: str | None) -> None:
    assert find_phase_of_mark(mark) == phase


def test_frameworks_agree_on_the_names_that_they_share() -> None:
    named: dict[str, str] = {}
    for framework in FRAMEWORKS:
        assert framework.name in EXAMPLES or framework.decode is not None
        assert framework.whole <= framework.phases.keys()
        for mark, phase in framework.phases.items():
            assert phase in PHASES
            assert named.setdefault(mark, phase) == phase, mark


@pytest.mark.parametrize(
    ("name", "sequences"),
    [
        ("decode sequences=7", 7),
        ("execute_context_0(0)_generation_64(64)", 64),
        ("execute_context_2(14721)_generation_0(0)", 0),
        ("execute_64_context_0(sq0sk0sqsq0sqsk0)_generation_64(sq64sk131072sqsq64sqsk131072)", 64),
        ("step[decode bs=63]", 63),
        ("step[DECODE bs=64 g_sqsq=64 g_sqsk=100032 g_sk=100032]", 64),
        ("step[mixed bs=9 ext=1024 dec=8]", 8),
        ("step[MIXED bs=66 c=2 g=64 c_sq=2048 c_sk=2048]", 64),
        ("step[EXTEND bs=17 toks=8192]", None),
        ("step[idle]", None),
        ("decode sequences=", None),
        ("my decode sequences=7", None),
    ],
)
def test_the_sequences_of_a_decode_step_are_in_its_name(name: str, sequences: int | None) -> None:
    assert read_decode_step(name) == sequences


def test_the_innermost_known_mark_counts_and_no_time_twice(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 100).kernel("gemm", 0, 100)
    trace.annotation("step", 0, 98)
    trace.annotation("gen", 2, 40).annotation("my sampler", 5, 10)
    trace.annotation("execute_context_0(0)_generation_4(4)", 10, 20)
    trace.annotation("load 3", 42, 48).annotation("load 4", 48, 50)
    trace.annotation("values", 50, 60).annotation("update_weights", 55, 58)
    trace.annotation("Optimizer.step#Adam.step", 70, 80)
    (found,) = find_phases([read(trace, tmp_path)])
    assert {phase: list_spans(spans) for phase, spans in found.items()} == {
        "generation": [(2, 40)],
        "step": [(0, 2), (40, 42), (60, 70), (80, 98)],
        "load #": [(42, 50)],
        "reference": [(50, 55), (58, 60)],
        "weight_sync": [(55, 58)],
        "training": [(70, 80)],
    }


def test_all_that_is_in_a_whole_mark_is_its_phase(tmp_path: Path) -> None:
    assert is_whole_mark("GRPOTrainer.compute_loss")
    trace = GpuTrace().step(1, 0, 100).kernel("gemm", 0, 100)
    logps = "GRPOTrainer._get_per_token_logps_and_entropies"
    trace.annotation(logps, 10, 20)
    trace.annotation("GRPOTrainer.compute_loss", 30, 60).annotation(logps, 35, 50)
    (found,) = find_phases([read(trace, tmp_path)])
    assert {phase: list_spans(spans) for phase, spans in found.items()} == {
        "reference": [(10, 20)],
        "training": [(30, 60)],
    }


def test_only_what_rl_alone_does_makes_it_rl(tmp_path: Path) -> None:
    plain = GpuTrace().step(1, 0, 100).kernel("gemm", 0, 100)
    plain.annotation("train", 0, 50).annotation("Optimizer.step#Adam.step", 50, 60)
    plain.annotation("save_checkpoint", 60, 70)
    assert not has_rl_phases(read(plain, tmp_path))
    # On the device alone, a range is a copy of one of the host.
    plain.gpu_annotation("generate_sequences", 0, 10)
    assert not has_rl_phases(read(plain, tmp_path))
    plain.annotation("generate_sequences", 0, 10)
    assert has_rl_phases(read(plain, tmp_path))


@pytest.mark.parametrize(
    ("marks", "is_rl"),
    [
        (["gen", "disc"], False),
        (["values"], False),
        (["ref", "values"], False),
        (["rm"], False),
        (["generate", "train", "save_checkpoint"], False),
        # A GAN has an optimizer.
        (["gen", "update_weights"], False),
        (["update_critic", "update_weights"], False),
        (["gen", "reward"], True),
        (["reference", "weight_sync"], True),
        # An engine that only serves decodes, too.
        (["decode sequences=5", "decode sequences=4"], False),
        (["decode sequences=5", "reward"], True),
        (["compute_rm_score"], True),
        (["MyTrainer._calculate_rewards"], True),
        (["_calculate_rewards"], False),
        (["log_probs", "actor_train"], True),
    ],
)
def test_an_ordinary_word_alone_is_no_evidence_of_rl(
    marks: list[str], is_rl: bool, tmp_path: Path
) -> None:
    trace = GpuTrace().step(1, 0, 200).kernel("gemm", 0, 200)
    for at, mark in enumerate(marks):
        trace.annotation(mark, 10 * at, 10 * at + 5)
    assert has_rl_phases(read(trace, tmp_path)) == is_rl


def test_a_role_makes_an_ordinary_word_a_phase(tmp_path: Path) -> None:
    write_run_json(tmp_path, RunSpec("exp1", 1, "nccl", role="rollout"))
    trace = GpuTrace().step(1, 0, 100).kernel("gemm", 0, 100)
    assert not has_rl_phases(read(trace.annotation("request", 0, 10), tmp_path))
    assert has_rl_phases(read(trace.annotation("decode sequences=5", 0, 10), tmp_path))


def test_telling_marks_are_in_the_table() -> None:
    for framework in FRAMEWORKS:
        assert framework.telling <= framework.phases.keys()


def test_of_many_marks_those_with_most_time_on_all_ranks_have_a_row(tmp_path: Path) -> None:
    names = [f"request {first}{second}" for first in "abcdef" for second in "abcdef"]
    traces = []
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        trace = GpuTrace(rank, 2).step(1, 0, 1000).kernel("gemm", 0, 1000)
        trace.annotation("generate", 0, 4)
        # The 30th is long on one rank alone.
        for at, name in enumerate(names):
            took = 20 if (at, rank) == (30, 1) else 10 if at < MOST_MARKS - 1 else 3
            trace.annotation(name, 20 * at + 10, 20 * at + 10 + took)
        traces.append(read(trace, tmp_path / str(rank)))
    for found in find_phases(traces):
        kept = [*names[: MOST_MARKS - 1], names[30]]
        assert {*found} == {"generation", *kept, OTHER_MARKS}
        spent = sum(end - begin for begin, end in list_spans(found[OTHER_MARKS]))
        assert spent == 3 * (len(names) - MOST_MARKS)
