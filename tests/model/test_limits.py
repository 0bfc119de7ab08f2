"""No number in a job.toml makes a prediction take long: it is answered or refused in one line."""

from __future__ import annotations

import copy
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from stepsplit.analyzer.errors import DataError, StepsplitError
from stepsplit.analyzer.model import hardware_config, layout_table, model_table, training_table
from stepsplit.analyzer.model.config import HardwareConfig, ModelConfig
from stepsplit.analyzer.model.config_decode import TomlTable, collect_kinds
from stepsplit.analyzer.model.config_file import decode_job, parse_job
from stepsplit.analyzer.model.config_limits import KEY
from stepsplit.analyzer.model.explain import explain
from stepsplit.analyzer.model.plan import plan
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.prediction import prediction_to_json
from stepsplit.analyzer.model.schedule_names import SCHEDULES, TWO_STAGES, Schedule

NUMBERS = (10**3, 10**6, 10**9, 10**12)
MOST_SECONDS, MOST_BYTES = 20, 1 << 30
"""Of each answer, processor time: far more than it takes."""

SMALL: dict[str, dict[str, Any]] = {
    "model": {
        "layers": 8, "hidden": 1000, "heads": 10, "kv_heads": 10, "ffn": 4000, "vocab": 1000,
        "experts": {"count": 10, "top_k": 1, "ffn": 100},
    },
    "parallel": {"pp": 2},
    "training": {"seq_len": 1000, "micro_batch": 1, "global_batch": 1000},
    "hardware": {"preset": "h100-sxm"},
}  # fmt: skip
"""Its sizes are multiples of ten, as the numbers are."""


def list_keys() -> Iterator[tuple[str, ...]]:
    """Every key of a job.toml, those of nested tables too."""
    sections = {
        "model": model_table.MODEL_KEYS,
        "parallel": layout_table.PARALLEL_KEYS,
        "training": training_table.TRAINING_KEYS,
        "hardware": hardware_config.HARDWARE_KEYS,
    }
    for section, keys in sections.items():
        yield from ((section, key) for key in keys)
    for section, kind in (("model", ModelConfig), ("hardware", HardwareConfig)):
        hints = get_type_hints(kind)
        for field in fields(kind):
            for nested in (hints[field.name], *get_args(hints[field.name])):
                if is_dataclass(nested) and isinstance(nested, type):
                    name = field.metadata.get(KEY, field.name)
                    yield from ((section, name, key) for key in collect_kinds(nested))


def put(tables: dict[str, Any], keys: tuple[str, ...], value: object) -> dict[str, Any]:
    changed = copy.deepcopy(tables)
    table = changed
    for key in keys[:-1]:
        if not isinstance(table.get(key), dict):
            table[key] = {}
        table = table[key]
    table[keys[-1]] = value
    return changed


@contextmanager
def within_limits() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {MOST_SECONDS} s")

    before, kept = signal.signal(signal.SIGPROF, stop), resource.getrlimit(resource.RLIMIT_AS)
    now_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + MOST_BYTES, kept[1]))
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, kept)


def answer(tables: dict[str, Any]) -> str:
    """The prediction with its explanation as text, or the line of the error."""
    try:
        job = decode_job(TomlTable("job.toml", "", tables))
        prediction = predict(job)
        return f"{len(explain(job, prediction))} {prediction_to_json(prediction)}"
    except StepsplitError as error:
        assert "\n" not in str(error)
        return str(error)


def test_every_key_is_answered_or_refused_in_one_line() -> None:
    predicted = set()
    for keys in list_keys():
        for number in NUMBERS:
            with within_limits():
                predicted.add(answer(put(SMALL, keys, number)).startswith("job.toml: "))
    assert predicted == {True, False}


def build_pipeline(schedule: Schedule, pp: int, microbatches: int) -> dict[str, Any]:
    """As many layers as stages; interleaved has two of them on each rank."""
    stages = 2 if schedule in (*TWO_STAGES, "interleaved") else 1
    tables = put(SMALL, ("model", "layers"), stages * pp)
    layout = {"pp": pp, "schedule": schedule, "chunks": 2 if schedule == "interleaved" else 1}
    batch = {"seq_len": 1000, "micro_batch": 1, "microbatches": microbatches}
    return {**tables, "parallel": layout, "training": batch}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_trillion_microbatches_take_a_billion_times_as_long_as_a_thousand(
    schedule: Schedule,
) -> None:
    """The bubble of warm-up and cool-down and the optimizer's step are all that does not grow."""
    with within_limits():
        few, many = (
            predict(decode_job(TomlTable("job.toml", "", build_pipeline(schedule, 8, m))))
            for m in (8_000, 8_000 * 10**9)
        )
    assert many.split.step_ns / few.split.step_ns == pytest.approx(1e9, rel=0.05)
    if schedule not in ("gpipe", "naive"):
        assert many.memory == few.memory


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [10**3, 10**5, 10**6])
def test_a_pipeline_that_is_too_long_is_refused_with_the_limit(schedule: Schedule, pp: int) -> None:
    with within_limits():
        line = answer(build_pipeline(schedule, pp, 2 * pp))
    stages = pp * 2 if schedule in ("zb-v", "dualpipe-v", "interleaved") else pp
    assert line == (
        f"job.toml: pp ({pp}) x model stages ({stages}) exceeds 16384; a longer pipeline is not "
        "simulated; lower pp or chunks"
    )


def test_long_lists_and_numbers_are_refused_without_repeating_them() -> None:
    with within_limits():
        line = answer(put(SMALL, ("parallel", "layers_per_stage"), [1] * 100_000))
        assert line.startswith("job.toml: entries of layers_per_stage (100000) must match")
        with pytest.raises(DataError, match="a number has over 4,300 digits"):
            parse_job(f"[training]\nseq_len = {'9' * 5_000}\n")


@pytest.mark.parametrize(
    "text",
    [
        f"{'k' * 900_000} = 1\n",
        f"[model]\n{'k' * 900_000} = 1\n",
        f"[model]\nheads = '{'x' * 900_000}'\n",
        f"[model]\nheads = [{'1,' * 400_000}]\n",
        f"[hardware]\npreset = '{'x' * 900_000}'\n",
        "[model]\n" + "".join(f"layer{n} = 1\n" for n in range(60_000)),
        "".join(f"[t{n}]\n" for n in range(60_000)),
    ],
    ids=["key", "key of a table", "word", "list", "preset", "many keys", "many tables"],
)
def test_a_large_file_is_refused_in_a_short_line(text: str) -> None:
    with within_limits(), pytest.raises(StepsplitError) as refused:
        parse_job(text)
    assert len(str(refused.value)) < 10_000


@pytest.mark.slow
def test_a_plan_for_huge_sizes_ends() -> None:
    for keys in (("model", "layers"), ("model", "experts", "count"), ("training", "global_batch")):
        for number in NUMBERS:
            with within_limits():
                try:
                    assert plan(decode_job(TomlTable("job.toml", "", put(SMALL, keys, number))), 4)
                except StepsplitError as error:
                    assert "\n" not in str(error)
