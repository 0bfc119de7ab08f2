"""What a job.toml leaves out: how far it moves the step, the band and the confidence."""

from __future__ import annotations

import json

import pytest

from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.config_file import parse_job
from stepsplit.analyzer.model.features import KeyFeature
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.prediction import (
    Prediction,
    UnstatedKey,
    prediction_from_json,
    prediction_to_json,
)
from stepsplit.analyzer.model.unstated import describe_unstated, join_spread, list_unstated

EXPERTS = """
[model]
preset = "qwen3-30b-a3b"
[parallel]
dp = 16
ep = 16
zero = 1
overlap = ["dp"]
{parallel}
[training]
framework = "megatron"
seq_len = 4096
micro_batch = 1
global_batch = 256
{training}
[hardware]
preset = "h100-sxm"
{hardware}
"""


def experts(parallel: str = "", training: str = "", hardware: str = "") -> JobConfig:
    return parse_job(EXPERTS.format(parallel=parallel, training=training, hardware=hardware))


def find_key(prediction: Prediction, name: str) -> UnstatedKey:
    (found,) = [one for one in prediction.unstated if one.key == name]
    return found


def test_a_key_moves_the_step_as_far_as_the_job_that_states_it() -> None:
    found = predict(experts())
    dispatcher = find_key(found, "parallel.dispatcher")
    stated = [
        predict(experts(f'dispatcher = "{name}"')).split.step_ns for name in ("deepep", "hybridep")
    ]
    assert dispatcher.low == min(stated) / found.split.step_ns
    assert (dispatcher.value, dispatcher.high) == ("all-to-all", 1.0)
    moves = [one.moves for one in found.unstated]
    assert moves == sorted(moves, reverse=True)


def test_a_stated_key_is_in_the_band_no_more() -> None:
    found, stated = predict(experts()), predict(experts('dispatcher = "all-to-all"'))
    assert stated.split.step_ns == found.split.step_ns
    assert "parallel.dispatcher" not in {one.key for one in stated.unstated}
    assert stated.low_ns > found.low_ns


def test_what_code_builds_states_all() -> None:
    job = experts()
    built = JobConfig(job.model, job.parallel, job.training, job.hardware)
    assert predict(built).unstated == ()


def test_a_value_that_does_not_fit_in_memory_is_not_plausible_for_a_job_that_does() -> None:
    small = experts(hardware="memory_bytes = 2_000_000_000")

    def time_job(job: JobConfig, feature: KeyFeature) -> int:
        return 50 if job.parallel.dispatcher == "deepep" else 100

    assert list_unstated(small, 100, True, time_job) == ()
    (found,) = list_unstated(small, 100, False, time_job)
    assert (found.key, found.low, found.high) == ("parallel.dispatcher", 0.5, 1.0)


def test_the_caveat_names_the_keys_that_move_the_step_by_more_than_5_percent() -> None:
    (text,) = [note for note in predict(experts()).notes if "not stated" in note]
    assert text.startswith("the step depends on keys that are not stated: parallel.dispatcher, ")
    dense = parse_job(
        """
[model]
preset = "llama-2-7b"
[parallel]
dp = 8
zero = 1
overlap = ["dp"]
[training]
framework = "megatron"
seq_len = 2048
micro_batch = 2
global_batch = 64
[hardware]
preset = "a100-sxm-80gb"
"""
    )
    assert [note for note in predict(dense).notes if "not stated" in note] == []


def test_spreads_add_up_as_squares_of_logarithms() -> None:
    keys = [UnstatedKey("a", "", 0.8, 1.0), UnstatedKey("b", "", 0.8, 1.25)]
    low, high = join_spread(keys)
    assert (low, high) == pytest.approx((0.8**2**0.5, 1.25))
    assert join_spread([]) == (1.0, 1.0)


def test_three_keys_are_named_with_what_they_change() -> None:
    keys = (
        UnstatedKey("parallel.dispatcher", "all-to-all", 0.78, 1.04),
        UnstatedKey("training.cuda_graph", "none", 0.82, 1.0),
        UnstatedKey("training.fused_loss", "true", 1.0, 1.02),
        UnstatedKey("training.compile", "false", 0.985, 1.0),
    )
    words = "dispatcher (-22 to +4 %), cuda_graph (-18 %), fused_loss (+2 %)"
    assert describe_unstated(keys) == f"not stated: {words}"
    assert describe_unstated([UnstatedKey("a.b", "", 0.995, 1.0)]) == ""


def test_json_has_all_keys_and_an_older_file_none() -> None:
    found = predict(experts())
    text = prediction_to_json(found)
    assert prediction_from_json(text).unstated == found.unstated
    older = json.loads(text)
    del older["unstated"]
    assert prediction_from_json(json.dumps(older)).unstated == ()


def test_scales_per_row_are_open_only_where_a_library_has_them() -> None:
    """torchao has them; Transformer Engine, which Megatron calls, has them per tensor or block."""
    dense = EXPERTS.replace("qwen3-30b-a3b", "llama-3-8b").replace("ep = 16\n", "")
    for framework, is_open in (("megatron", False), ("fsdp2", True)):
        text = dense.replace("megatron", framework).replace("zero = 1\n", "")
        found = predict(parse_job(text.format(parallel="", training='dtype = "fp8"', hardware="")))
        keys = {one.key for one in found.unstated}
        assert ("training.fp8_scaling" in keys) == is_open, framework
