"""Prediction of one step in the same terms as a measured one, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, partial
from typing import Any, Literal, cast, get_args

from stepsplit.analyzer.buckets import BUCKETS, MEMOS, Split
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.comm_ops import CommOp
from stepsplit.analyzer.model.formulas import Formula

# The parts of a prediction.

SCHEMA = "stepsplit.prediction/1"

Confidence = Literal["calibrated", "high", "medium", "low"]

GRADIENT_AXIS = "dp_cp"
"""The axis of gradient reduction when it also spans the ranks of context parallelism."""


def group_axis(axis: str) -> str:
    """Name of a predicted message's axis in rank_layout.place_group."""
    return "dp" if axis == GRADIENT_AXIS else axis


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Peak allocated memory on one rank of a pipeline stage, in bytes by category.

    Args:
        stage: pipeline coordinate, from 0.
        weights_bytes: weights.
        gradients_bytes: gradients that exist at the peak.
        optimizer_bytes: optimizer states, with the fp32 copy of 16-bit weights.
        activations_bytes: saved activations at the peak.
        transient_bytes: gathered weights, logits and working memory at the peak.
        other_bytes: workspaces and the constant of a calibration.
        total_bytes_low: lower end of the error band of total_bytes, default None; None when it was
            not estimated, as in a prediction that an earlier version wrote.
        total_bytes_high: upper end of the band, likewise.
        missing_gradients_bytes: gradients that the backward computes after the peak, default 0.
        frozen_bytes: weights that are not trained (LoRA), part of weights_bytes, default 0.
        formulas: the formulas used, default (); empty when the prediction was read from a file,
            which keeps them in Prediction.formulas.

    Examples:
        >>> StageMemory(0, 4, 4, 12, 8, 2, 1).total_bytes
        31
    """

    stage: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    transient_bytes: int
    other_bytes: int
    total_bytes_low: int | None = None
    total_bytes_high: int | None = None
    missing_gradients_bytes: int = 0
    frozen_bytes: int = 0
    formulas: tuple[Formula, ...] = field(default=(), compare=False, repr=False)

    @property
    def total_bytes(self) -> int:
        """Sum of all categories, in bytes."""
        return (
            self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
            + self.activations_bytes + self.transient_bytes + self.other_bytes
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Band:
    """A time in ns with its error band: low_ns <= ns <= high_ns.

    Args:
        ns: the expected time.
        low_ns: lower end of the error band.
        high_ns: upper end of the error band.
        formulas: the formula of the time first, then the alternatives it was chosen from; default
            (), as for a zero time and in a prediction read from a file.

    Examples:
        >>> (Band(100.0, 80.0, 125.0) * 2).high_ns
        250.0
    """

    ns: float
    low_ns: float
    high_ns: float
    formulas: tuple[Formula, ...] = field(default=(), compare=False, repr=False)

    def __mul__(self, times: float) -> Band:
        return Band(self.ns * times, self.low_ns * times, self.high_ns * times, self.formulas)


@dataclass(frozen=True, slots=True)
class Communication:
    """One kind of message of a stage: its time in a step and the exposed part of it.

    Args:
        message: op, axis, phase, bytes and number of calls in a step (CommOp).
        time: time of all calls in a step, with its error band.
        exposed_ns: the part of the time that compute does not overlap.

    Examples:
        >>> from stepsplit.analyzer import predict, read_job
        >>> messages = predict(read_job("job.toml")).communication
        >>> largest = max(messages, key=lambda each: each.exposed_ns)
        >>> largest.message.op, largest.message.axis
        ('all_gather', 'tp')
    """

    message: CommOp
    time: Band
    exposed_ns: int


@dataclass(frozen=True, slots=True)
class UnstatedKey:
    """A key that a job leaves out, and how far its step moves with the other plausible values.

    Args:
        key: the key of job.toml that states it: "parallel.dispatcher".
        value: what is taken for it.
        low: the shortest step with another value over the predicted one, up to 1.
        high: the longest, from 1 on.

    Examples:
        >>> f"{UnstatedKey('training.cuda_graph', 'none', 0.8, 1.0).moves:.2f}"
        '0.25'
    """

    key: str
    value: str
    low: float
    high: float

    @property
    def moves(self) -> float:
        """The larger of both changes, as a ratio."""
        return max(self.high, 1 / self.low) - 1


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time of a step by physics alone: no fitted constant is in it.

    Args:
        ns: the time that the busiest resource needs at the peak of its data sheet.
        resource: that resource: "compute", "memory", "links in a node" or "links between nodes".
        resources: all four with their times in ns.

    Examples:
        >>> Bound(5, "compute", (("compute", 5), ("memory", 2))).resource
        'compute'
    """

    ns: int
    resource: str
    resources: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ComputePart:
    """The predicted time of one kind of kernels of a rank of the slowest stage in a step.

    Args:
        name: "GEMM", "attention", "memory-bound", "optimizer", or "host": waits for launches.
        ns: its time.
        rate: the rate that is taken for it, in unit.
        peak: the rate of the data sheet; None if there is none.
        unit: "flops_per_s", "bytes_per_s" or "ns_per_layer" (the host's launches of a forward).

    Examples:
        >>> ComputePart("GEMM", 10**9, 660e12, 989e12, "flops_per_s").unit
        'flops_per_s'
    """

    name: str
    ns: int
    rate: float
    peak: float | None
    unit: str


@dataclass(frozen=True)
class Prediction:
    """The predicted step of a job. Bytes and splits are per rank, FLOPs of the whole job.

    Args:
        parameters: parameters of the model.
        parameters_per_stage: parameters on one rank of each pipeline stage.
        memory: peak memory of one rank of each stage.
        model_flops: FLOPs of a step without recomputation.
        hardware_flops: FLOPs of a step with recomputation.
        communication: every message of every stage.
        bubble_fraction: pipeline bubble / window, 0..1.
        bubble_overhead: pipeline bubble / useful time.
        splits: one Split per stage, in ns.
        split: the Split of the slowest stage.
        low_ns: lower end of the step time's error band, not below the bound.
        high_ns: upper end of the step time's error band.
        convention: how model FLOPs are counted ("C1").
        mfu: model FLOPs utilization, 0..1; None when the peak at the dtype is unknown.
        hfu: hardware FLOPs utilization, likewise.
        tokens_per_s_per_gpu: throughput of one GPU.
        fits: whether every stage fits in the device memory.
        fit_chance: how sure that is: the share of jobs with this band of the peak that fit, 0..1;
            default None, as in a prediction that an earlier version wrote.
        confidence: "calibrated", "high", "medium" or "low".
        notes: the reasons for a medium or low confidence.
        formulas: the formulas used, with citations.
        unstated: keys that the job leaves out and that move the step, the one that moves it most
            first; default (), as in a prediction that an earlier version wrote.
        read_as: what of the job's files was read as which key, such as "training: mbs = 1 as
            micro_batch = 1"; default ().
        bound: the least time of the step by physics alone; default None: unknown.
        find_parts: makes compute_parts; default: none.

    Examples:
        >>> from stepsplit.analyzer import predict, read_job
        >>> prediction = predict(read_job("job.toml"))
        >>> prediction.split.step_ns == sum(prediction.split.buckets_ns), prediction.confidence
        (True, 'medium')
    """

    parameters: int
    parameters_per_stage: tuple[int, ...]
    memory: tuple[StageMemory, ...]
    model_flops: int
    hardware_flops: int
    communication: tuple[Communication, ...]
    bubble_fraction: float
    bubble_overhead: float
    splits: tuple[Split, ...]
    split: Split
    low_ns: int
    high_ns: int
    convention: str
    mfu: float | None
    hfu: float | None
    tokens_per_s_per_gpu: float
    fits: bool
    confidence: Confidence
    notes: tuple[str, ...]
    formulas: tuple[Formula, ...]
    unstated: tuple[UnstatedKey, ...] = ()
    read_as: tuple[str, ...] = ()
    bound: Bound | None = None
    fit_chance: float | None = None
    find_parts: Callable[[], tuple[ComputePart, ...]] = field(
        default=tuple, compare=False, repr=False
    )

    @cached_property
    def compute_parts(self) -> tuple[ComputePart, ...]:
        """Compute and host waits of the slowest stage by kinds of kernels: found when first asked
        for, since it takes a fifth of the prediction."""
        return self.find_parts()


# Prediction <-> JSON. Scripts rely on these keys.

PREDICTION_NAME = "prediction.json"

_HINT = "predict the run again"

_INT_KEYS = ("parameters", "model_flops", "hardware_flops", "low_ns", "high_ns")

_TEXT_KEYS = ("strategy", "op", "axis", "phase")

_BUCKET_KEYS = tuple(f"{bucket}_ns" for bucket in BUCKETS)

_MEMO_KEYS = tuple(name for name in MEMOS if name != "ambiguous_ns")
"""The memos of a predicted step: only a recording is ambiguous."""

_FORMULAS = "formulas"
"""The field that rows leave out: the JSON lists the formulas once, at the top level."""

_MEMORY_BAND_KEYS = ("total_bytes_low", "total_bytes_high")

_LATER_MEMORY_KEYS = ("missing_gradients_bytes", "frozen_bytes")
"""Fields that predictions of earlier versions lack."""

_MEMORY_KEYS = tuple(
    each.name
    for each in fields(StageMemory)
    if each.name not in (_FORMULAS, *_LATER_MEMORY_KEYS, *_MEMORY_BAND_KEYS)
)

_MESSAGE_KEYS = tuple(each.name for each in fields(CommOp) if each.name != _FORMULAS)


def prediction_to_json(prediction: Prediction) -> str:
    """Write the prediction as JSON (schema stepsplit.prediction/1, times in whole ns).

    Each top-level key has its own line, for readable diffs.
    """
    parts = (
        f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}"
        for key, value in _build_body(prediction).items()
    )
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def prediction_from_json(text: str, source: object = PREDICTION_NAME) -> Prediction:
    """Read a prediction from JSON. Raises DataError if the text is not of this schema."""
    try:
        body = json.loads(text)
        schema = body["schema"]
        if schema == SCHEMA:
            # Parse a body. Raises KeyError, TypeError or ValueError.
            return Prediction(
                **{name: _read_int(body, name) for name in _INT_KEYS},
                parameters_per_stage=tuple(map(_check_int, body["parameters_per_stage"])),
                memory=tuple(_parse_memory(row) for row in body["memory"]),
                communication=tuple(_parse_communication(row) for row in body["communication"]),
                bubble_fraction=_read_number(body["pipeline"], "bubble_fraction"),
                bubble_overhead=_read_number(body["pipeline"], "bubble_overhead"),
                splits=tuple(_parse_split(row) for row in body["splits"]),
                split=_parse_split(body["split"]),
                convention=str(body["convention"]),
                mfu=None if body["mfu"] is None else _read_number(body, "mfu"),
                hfu=None if body["hfu"] is None else _read_number(body, "hfu"),
                tokens_per_s_per_gpu=_read_number(body, "tokens_per_s_per_gpu"),
                fits=bool(body["fits"]),
                confidence=_parse_confidence(body["confidence"]),
                notes=tuple(map(str, body["notes"])),
                formulas=tuple(
                    Formula(row["id"], row["text"], row["citation"]) for row in body["formulas"]
                ),
                unstated=tuple(_parse_unstated(row) for row in body.get("unstated", ())),
                read_as=tuple(map(str, body.get("read_as", ()))),
                bound=_parse_bound(body.get("bound")),
                find_parts=partial(
                    tuple, [_parse_part(row) for row in body.get("compute_parts", ())]
                ),
                fit_chance=None
                if body.get("fit_chance") is None
                else _read_number(body, "fit_chance"),
            )
    except (KeyError, TypeError, ValueError) as error:
        text = f"missing {error}" if isinstance(error, KeyError) else str(error)
        problem = f"not a stepsplit prediction ({text})"
        raise DataError(source, problem, _HINT) from None
    raise DataError(source, f"schema is {schema}, expected {SCHEMA}", _HINT)


def _build_body(prediction: Prediction) -> dict[str, Any]:
    one = prediction
    return {
        "schema": SCHEMA,
        "parameters": one.parameters,
        "parameters_per_stage": one.parameters_per_stage,
        "memory": [_build_memory_row(row) for row in one.memory],
        "model_flops": one.model_flops,
        "hardware_flops": one.hardware_flops,
        "communication": [_build_communication_row(row) for row in one.communication],
        "pipeline": {
            "bubble_fraction": one.bubble_fraction, "bubble_overhead": one.bubble_overhead,
        },
        "splits": [{"stage": i, **_build_split_row(split)} for i, split in enumerate(one.splits)],
        "split": _build_split_row(one.split),
        "mfu": one.mfu,
        "hfu": one.hfu,
        "tokens_per_s_per_gpu": one.tokens_per_s_per_gpu,
        "fits": one.fits,
        "fit_chance": one.fit_chance,
        "formulas": [{"id": f.id, "citation": f.citation, "text": f.text} for f in one.formulas],
        "confidence": one.confidence,
        "low_ns": one.low_ns,
        "high_ns": one.high_ns,
        "convention": one.convention,
        "notes": one.notes,
        "unstated": [
            {"key": u.key, "value": u.value, "low": u.low, "high": u.high} for u in one.unstated
        ],
        "read_as": one.read_as,
        "bound": None if one.bound is None else {
            "ns": one.bound.ns, "resource": one.bound.resource,
            "resources": dict(one.bound.resources),
        },
        "compute_parts": [asdict(part) for part in one.compute_parts],
    }  # fmt: skip


def _build_split_row(split: Split) -> dict[str, int]:
    """The buckets, their sum, then the memos."""
    buckets = dict(zip(_BUCKET_KEYS, split.buckets_ns, strict=True))
    memos = {name: getattr(split, name) for name in _MEMO_KEYS}
    return buckets | {"step_ns": split.step_ns} | memos


def _build_memory_row(row: StageMemory) -> dict[str, int | None]:
    parts = {name: getattr(row, name) for name in _MEMORY_KEYS}
    band = {name: getattr(row, name) for name in _MEMORY_BAND_KEYS}
    sums = {"total_bytes": row.total_bytes, **band}
    return parts | sums | {name: getattr(row, name) for name in _LATER_MEMORY_KEYS}


def _build_communication_row(row: Communication) -> dict[str, Any]:
    return {name: getattr(row.message, name) for name in _MESSAGE_KEYS} | {
        "time_ns": round(row.time.ns), "time_ns_low": round(row.time.low_ns),
        "time_ns_high": round(row.time.high_ns), "exposed_ns": row.exposed_ns,
    }  # fmt: skip


def _parse_split(row: Mapping[str, Any]) -> Split:
    split = Split(**{name: _read_int(row, name) for name in (*_BUCKET_KEYS, *_MEMO_KEYS)})
    _check_sum(row, "step_ns", split.step_ns)
    return split


def _parse_memory(row: Mapping[str, Any]) -> StageMemory:
    values: dict[str, Any] = {name: _read_int(row, name) for name in _MEMORY_KEYS}
    for name in _MEMORY_BAND_KEYS:
        values[name] = None if row.get(name) is None else _read_int(row, name)
    for name in _LATER_MEMORY_KEYS:
        values[name] = _read_int(row, name) if name in row else 0
    memory = StageMemory(**values)
    _check_sum(row, "total_bytes", memory.total_bytes)
    return memory


def _parse_communication(row: Mapping[str, Any]) -> Communication:
    values: dict[str, Any] = {
        name: str(row[name]) if name in _TEXT_KEYS else _read_int(row, name)
        for name in _MESSAGE_KEYS
    }
    names = ("time_ns", "time_ns_low", "time_ns_high")
    ns, low_ns, high_ns = (float(_read_int(row, name)) for name in names)
    return Communication(CommOp(**values), Band(ns, low_ns, high_ns), _read_int(row, "exposed_ns"))


def _parse_unstated(row: Mapping[str, Any]) -> UnstatedKey:
    low, high = _read_number(row, "low"), _read_number(row, "high")
    if not 0 < low <= 1 <= high:
        raise ValueError(f"unstated low is {low} and high {high}, not around 1")
    return UnstatedKey(str(row["key"]), str(row["value"]), low, high)


def _parse_bound(row: Mapping[str, Any] | None) -> Bound | None:
    if row is None:
        return None
    resources = tuple((str(k), _check_int(v)) for k, v in dict(row["resources"]).items())
    return Bound(_read_int(row, "ns"), str(row["resource"]), resources)


def _parse_part(row: Mapping[str, Any]) -> ComputePart:
    peak = None if row["peak"] is None else _read_number(row, "peak")
    rate = _read_number(row, "rate")
    return ComputePart(str(row["name"]), _read_int(row, "ns"), rate, peak, str(row["unit"]))


def _parse_confidence(value: object) -> Confidence:
    for known in get_args(Confidence):
        if value == known:
            return cast(Confidence, known)
    raise ValueError(f"confidence is {value!r}, expected one of {get_args(Confidence)}")


def _read_int(row: Mapping[str, Any], name: str) -> int:
    return _check_int(row[name])


def _check_int(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not an integer")
    return value


def _read_number(row: Mapping[str, Any], name: str) -> float:
    value = row[name]
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _check_sum(row: Mapping[str, Any], name: str, total: int) -> None:
    if row[name] != total:
        raise ValueError(f"{name} is {row[name]}, but its parts add up to {total}")
