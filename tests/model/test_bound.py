"""What physics alone allows, and the predicted compute by kinds of kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepsplit.analyzer.model.bound import compute_bound, time_at_link_rate
from stepsplit.analyzer.model.comm_measured import Rates
from stepsplit.analyzer.model.comm_ops import CommOp
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.config_file import parse_job, read_job
from stepsplit.analyzer.model.explain import explain
from stepsplit.analyzer.model.formulas import find_misleading_rules
from stepsplit.analyzer.model.predict import predict, time_step
from stepsplit.analyzer.model.prediction import Bound, prediction_from_json, prediction_to_json
from stepsplit.analyzer.model.preset_names import list_model_names
from stepsplit.analyzer.validation.published_runs import list_published_cases

JOBS = Path(__file__).parents[1] / "golden" / "jobs"


def job(
    parallel: str = "", training: str = "", hardware: str = "h100-sxm", **batch: int
) -> JobConfig:
    sizes = {"seq_len": 4096, "micro_batch": 1, "global_batch": 8, **batch}
    return parse_job(
        "[model]\nlayers = 8\nhidden = 4096\nheads = 32\nffn = 16384\nvocab = 32000\n"
        f"[parallel]\n{parallel}\n[training]\n{training}\n"
        + "".join(f"{key} = {value}\n" for key, value in sizes.items())
        + f'[hardware]\npreset = "{hardware}"\n'
    )


def bound_of(one: JobConfig) -> Bound:
    found = predict(one).bound
    assert found is not None
    return found


def test_one_gpu_needs_its_flops_at_the_peak() -> None:
    """8 microbatches of 4,096 tokens; 12 h^2 weights a layer and the head, 6 FLOPs each and token;
    half of the scores, one product forward and two backward for each of two."""
    tokens, hidden, vocab = 8 * 4096, 4096, 32000
    linear = 6 * tokens * (8 * 12 * hidden**2 + hidden * vocab)
    attention = 3 * 8 * 2 * tokens * 4096 * hidden
    found = bound_of(job())
    assert found.resource == "compute"
    assert found.ns == pytest.approx((linear + attention) / 989.4e12 * 1e9, rel=2e-3)


def test_a_pipeline_adds_its_ideal_bubble() -> None:
    """(p-1)/m of the slowest stage's time, by the last of equal ones and its head."""
    whole, halves = bound_of(job()), bound_of(job("pp = 2"))
    assert whole.ns / 2 < halves.ns < whole.ns * 0.75
    assert halves.ns > whole.ns / 2 * (1 + 1 / 8)


def test_a_small_batch_is_bound_by_memory_and_a_slow_network_by_its_links() -> None:
    assert bound_of(job(global_batch=1, seq_len=8)).resource == "memory"
    far = bound_of(job("dp_shard = 64\nzero = 3", global_batch=64, seq_len=128))
    assert far.resource == "links between nodes"


@pytest.mark.parametrize(
    ("op", "inside_bytes", "between_bytes"),
    [
        # 16 ranks on two nodes of 8: from each of 7 others here, and half of the rest over a NIC.
        ("all_gather", 7 / 8, 1 / 2 / 8),
        ("reduce_scatter", 7 / 8, 1 / 2 / 8),
        ("all_reduce", 1, 1 / 8),
        ("all_to_all", 7 / 16, 8 / 16),
        ("recv", 0, 0),
    ],
)
def test_links_carry_what_a_rank_receives(
    op: str, inside_bytes: float, between_bytes: float
) -> None:
    size = 1_600_000_000
    one = job("dp_shard = 16\nzero = 3", global_batch=16)
    message = CommOp("fsdp", op, "dp_shard", 0, "forward", 2, size, size, size)
    inside_ns, between_ns = time_at_link_rate(one, message)
    assert inside_ns == pytest.approx(2 * size * inside_bytes / 450e9 * 1e9)
    assert between_ns == pytest.approx(2 * size * between_bytes / 50e9 * 1e9)


def test_no_fitted_constant_is_in_it() -> None:
    one = job("pp = 2\ndp = 4")
    slow = replace(one.hardware.efficiency, gemm=0.1, memory=0.1, launch_ns=1e6, jitter=0.5)
    changed = replace(one, hardware=replace(one.hardware, efficiency=slow, clock=0.5))
    assert bound_of(changed) == bound_of(one)


def test_a_processor_has_no_bound() -> None:
    assert predict(job(hardware="cpu", training='dtype = "fp32"')).bound is None


def test_the_parts_of_compute_add_up_and_reach_no_more_than_their_peaks() -> None:
    for one in (
        job(), job("tp = 8\nsequence_parallel = true", 'dtype = "fp8"'), job("pp = 4"),
        job(training='recompute = "full"\nflash_attention = false'),
        job("dp_shard = 8\nzero = 3", 'framework = "fsdp2"\nrecompute = "selective"'),
    ):  # fmt: skip
        prediction = predict(one)
        parts = {part.name: part for part in prediction.compute_parts}
        host = parts.pop("host", None)
        assert sum(part.ns for part in parts.values()) == prediction.split.compute_ns
        assert (0 if host is None else host.ns) == prediction.split.idle_ns
        for part in parts.values():
            assert part.peak is not None and 0 < part.rate <= part.peak and part.ns >= 0


def assert_band_is_possible(one: JobConfig) -> None:
    found = predict(one)
    least_ns = 0 if found.bound is None else found.bound.ns
    assert least_ns <= found.low_ns <= found.split.step_ns <= found.high_ns


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/model")
def test_no_band_reaches_below_its_bound(subtests: pytest.Subtests) -> None:
    jobs = {file.name: read_job(file) for file in sorted(JOBS.glob("*.toml"))}
    for name in list_model_names():
        batch = "[training]\nseq_len = 1024\nmicro_batch = 1\nglobal_batch = 16\n"
        for device in ("h100-sxm", "a100-sxm-80gb"):
            jobs[f"{name} {device}"] = parse_job(
                f'[model]\npreset = "{name}"\n[parallel]\ndp = 16\nzero = 1\n{batch}'
                f'[hardware]\npreset = "{device}"\n'
            )
    for name, one in jobs.items():
        with subtests.test(name):
            assert_band_is_possible(one)


def test_a_wide_band_begins_at_the_bound() -> None:
    """Experts of a report, whose band of 0.4 to 2.7 times the step reached below it."""
    text = """
    model.preset = "mixtral-8x7b"
    parallel = { ep = 8, dp = 16, zero = 1 }
    training = { seq_len = 4096, micro_batch = 1, global_batch = 256 }
    hardware.preset = "h100-sxm"
    """
    found = predict(parse_job(text))
    assert found.bound is not None and found.low_ns == found.bound.ns < found.split.step_ns


def test_the_bound_and_the_parts_are_in_the_json() -> None:
    prediction = predict(job())
    read = prediction_from_json(prediction_to_json(prediction))
    assert (read.bound, read.compute_parts) == (prediction.bound, prediction.compute_parts)


def _list_violations(every: int) -> list[Any]:
    found, cases = [], list_published_cases().cases[::every]
    for case in cases:
        step = time_step(case.job, Rates())
        bound = compute_bound(case.job, step.parameters, step.stages, step.timed)
        if bound is not None and bound.ns > min(case.step_ns, step.split.step_ns):
            found.append((case.id, bound.resource, bound.ns / case.step_ns))
    assert len(cases) > 1300 / every
    return found


def test_no_published_run_is_faster_than_its_bound() -> None:
    assert _list_violations(every=16) == []


@pytest.mark.slow
def test_none_of_all_published_runs_is_faster_than_its_bound() -> None:
    assert _list_violations(every=1) == []


def test_rules_of_thumb_are_those_of_the_jobs_settings() -> None:
    """No rule of other ZeRO stages, GPUs, networks or models of 100B."""
    one = job("dp = 16\nzero = 1\npp = 2", global_batch=32)
    prediction = predict(one)
    rules = find_misleading_rules(explain(one, prediction), one, prediction.parameters)
    found = {rule.id for rule in rules}
    assert {"zero1", "1f1b-bubble", "nvlink-h100"} <= found
    assert not found & {"zero2", "shard-grad-op", "hdr-400", "nvlink-a100", "tp-eighth", "dp-time"}
    assert len(found) < 10, found
