"""A prediction as JSON: the keys that scripts rely on, and a lossless round trip."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.prediction_builders import GIB, MS, prediction
from support.work_builders import job

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.comm_ops import CommOp
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.prediction import (
    Band,
    Communication,
    prediction_from_json,
    prediction_to_json,
)


def test_the_top_level_holds_the_keys_of_the_contract_then_the_rest() -> None:
    assert list(json.loads(prediction_to_json(prediction()))) == [
        "schema", "parameters", "parameters_per_stage", "memory", "model_flops", "hardware_flops",
        "communication", "pipeline", "splits", "split", "mfu", "hfu", "tokens_per_s_per_gpu",
        "fits", "fit_chance", "formulas", "confidence", "low_ns", "high_ns", "convention", "notes",
        "unstated", "read_as", "bound", "compute_parts",
    ]  # fmt: skip


def test_rows_are_flat_and_carry_their_sums() -> None:
    body = json.loads(prediction_to_json(prediction()))
    assert body["memory"][1] == {
        "stage": 1, "weights_bytes": GIB, "gradients_bytes": 2 * GIB, "optimizer_bytes": 4 * GIB,
        "activations_bytes": 3 * GIB, "transient_bytes": GIB // 2, "other_bytes": GIB,
        "total_bytes": 11 * GIB + GIB // 2, "total_bytes_low": None, "total_bytes_high": None,
        "missing_gradients_bytes": 0, "frozen_bytes": 0,
    }  # fmt: skip
    assert body["splits"][0] == {
        "stage": 0, "compute_ns": 360 * MS, "collective_ns": 30 * MS, "p2p_ns": 2 * MS,
        "skew_ns": 0, "bubble_ns": 60 * MS, "copy_ns": 0, "idle_ns": 8 * MS, "step_ns": 460 * MS,
        "overlapped_ns": 5 * MS, "bubble_covered_ns": 0, "fused_ns": 0,
    }  # fmt: skip
    assert body["split"] == {key: body["splits"][1][key] for key in body["split"]}
    assert body["communication"][2] == {
        "strategy": "ddp", "op": "all_reduce", "axis": "dp", "stage": 1, "phase": "grad_sync",
        "count": 30, "message_bytes": 41_943_040, "input_bytes": 41_943_040,
        "wire_bytes": 41_943_040, "time_ns": 12 * MS, "time_ns_low": 11 * MS,
        "time_ns_high": 14 * MS, "exposed_ns": 9 * MS,
    }  # fmt: skip
    assert body["pipeline"] == {"bubble_fraction": 1 / 9, "bubble_overhead": 1 / 8}


def test_a_written_prediction_reads_back_equal() -> None:
    assert prediction_from_json(prediction_to_json(prediction())) == prediction()


def test_memory_has_its_band_and_earlier_predictions_have_none() -> None:
    made = predict(job(framework="fsdp2"))
    [row] = json.loads(prediction_to_json(made))["memory"]
    assert row["total_bytes_low"] < row["total_bytes"] < row["total_bytes_high"]
    assert prediction_from_json(prediction_to_json(made)).memory == made.memory
    body = json.loads(prediction_to_json(made))
    del body["memory"][0]["total_bytes_low"], body["memory"][0]["total_bytes_high"]
    del body["memory"][0]["missing_gradients_bytes"]
    assert prediction_from_json(json.dumps(body)).memory[0].total_bytes_low is None


def test_an_unknown_peak_reads_back_as_null_mfu() -> None:
    unknown = replace(prediction(), mfu=None, hfu=None)
    assert prediction_from_json(prediction_to_json(unknown)) == unknown


def test_times_are_whole_nanoseconds() -> None:
    message = CommOp("tp", "all_reduce", "tp", 0, "forward", 3, 8, 8, 8)
    one = Communication(message, Band(10.6, 9.2, 12.5), 10)
    row = json.loads(prediction_to_json(replace(prediction(), communication=(one,))))[
        "communication"
    ][0]
    assert (row["time_ns"], row["time_ns_low"], row["time_ns_high"]) == (11, 9, 12)


def test_unknown_keys_are_ignored() -> None:
    body = json.loads(prediction_to_json(prediction())) | {"weather": "fine"}
    assert prediction_from_json(json.dumps(body)) == prediction()


@pytest.mark.parametrize(
    ("found", "instead", "problem"),
    [
        ('"stepsplit.prediction/1"', '"stepsplit.prediction/9"',
         "schema is stepsplit.prediction/9, expected stepsplit.prediction/1"),
        ('"parameters": 1311000000', '"parameters": 1.5',
         "not a stepsplit prediction (1.5 is not an integer)"),
        ('"mfu": 0.0808', '"mfu": "high"', "not a stepsplit prediction ('high' is not a number)"),
        ('"confidence": "high"', '"confidence": "sure"',
         "not a stepsplit prediction "
         "(confidence is 'sure', expected one of ('calibrated', 'high', 'medium', 'low'))"),
        ('"notes"', '"remarks"', "not a stepsplit prediction (missing 'notes')"),
        ('"compute_ns": 360000000', '"compute_ns": 360000001',
         "not a stepsplit prediction "
         "(step_ns is 460000000, but its parts add up to 460000001)"),
        ('"total_bytes": 15569256448', '"total_bytes": 1',
         "not a stepsplit prediction "
         "(total_bytes is 1, but its parts add up to 15569256448)"),
    ],
)  # fmt: skip
def test_an_invalid_prediction_is_rejected(found: str, instead: str, problem: str) -> None:
    text = prediction_to_json(prediction())
    assert text.count(found) == 1
    with pytest.raises(DataError) as error:
        prediction_from_json(text.replace(found, instead), "p.json")
    assert str(error.value) == f"p.json: {problem}; predict the run again"


@pytest.mark.parametrize("text", ["", "[1]", "null", "{}"])
def test_json_of_another_kind_is_rejected(text: str) -> None:
    with pytest.raises(DataError, match="not a stepsplit prediction"):
        prediction_from_json(text)


def test_nan_is_never_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        prediction_to_json(replace(prediction(), bubble_fraction=float("nan")))
