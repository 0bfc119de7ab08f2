"""Timers of RL frameworks as ranges of the trace, while it is recorded and never else."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepsplit.collectors import profile_run  # noqa: E402
from stepsplit.collectors.formats.rl_marks import FRAMEWORKS  # noqa: E402

Timer = Callable[[str], AbstractContextManager[Any]]


def make_verl(module: ModuleType) -> Timer:
    """A generator that all of its context managers use."""

    def _timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
        yield
        timing_raw[name] = 1.0

    @contextmanager
    def marked_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
        yield from module._timer(name, timing_raw)

    module._timer = _timer  # type: ignore[attr-defined]
    return lambda name: marked_timer(name, {})


def make_slime(module: ModuleType) -> Timer:
    """A method that makes a context manager."""

    class Clock:
        @contextmanager
        def context(self, name: str) -> Iterator[str]:
            yield name

    module.Timer = Clock  # type: ignore[attr-defined]
    return lambda name: Clock().context(name)


def make_object(owner: str, attribute: str) -> Callable[[ModuleType], Timer]:
    """A context manager of a class that has the name as an attribute."""

    def make(module: ModuleType) -> Timer:
        class Block:
            def __init__(self, name: str) -> None:
                setattr(self, attribute, name)

            def __enter__(self) -> Block:
                return self

            def __exit__(self, *error: object) -> None:
                pass

        setattr(module, owner, Block)
        return Block

    return make


MAKERS = {
    "verl": make_verl,
    "slime": make_slime,
    "TRL": make_object("ProfilingContext", "name"),
    "torchtitan": make_object("log_trace_span", "base_name"),
}


def install(name: str, undo: pytest.MonkeyPatch) -> tuple[ModuleType, Timer]:
    """An imitation of a framework's module, as if the script had imported it, and its timer."""
    (framework,) = (one for one in FRAMEWORKS if one.name == name)
    module = ModuleType(framework.sources[0].module)
    timer = MAKERS[name](module)
    undo.setitem(sys.modules, module.__name__, module)
    return module, timer


def record(folder: Path, timer: Timer, *, enter_early: bool = False) -> list[str]:
    """The names of the ranges of the one recorded step, of a mark in each of three steps."""
    early = timer("early")
    with profile_run(folder, wait=0, warmup=1, active=1) as run:
        if enter_early:
            early.__enter__()
        for step in range(3):
            if enter_early and step == 1:
                early.__exit__(None, None, None)
            with timer(f"outer {step}"), timer("update_weights"):
                torch.ones(8) + 1
            run.step()
    text = gzip.decompress((folder / "rank0_trace.json.gz").read_bytes())
    return [
        event["name"]
        for event in json.loads(text)["traceEvents"]
        if event.get("cat") == "user_annotation" and "Profiler" not in event["name"]
    ]


@pytest.mark.parametrize("name", MAKERS)
def test_a_timer_is_a_range_of_the_recorded_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, timer = install(name, monkeypatch)
    before = {key: dict(vars(value)) for key, value in vars(module).items() if type(value) is type}
    assert record(tmp_path, timer) == ["outer 1", "update_weights"]
    # Nothing of the framework stays replaced.
    after = {key: dict(vars(value)) for key, value in vars(module).items() if type(value) is type}
    assert after == before


def test_a_timer_may_be_a_decorator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, timer = install("slime", monkeypatch)
    with profile_run(tmp_path, wait=0, warmup=0, active=1) as run:

        @timer("log_probs")
        def add(number: int) -> int:
            return number + int(torch.ones(1))

        assert [add(number) for number in (1, 2, 3)] == [2, 3, 4]
        run.step()
    assert add(4) == 5
    text = gzip.decompress((tmp_path / "rank0_trace.json.gz").read_bytes())
    names = [event.get("name") for event in json.loads(text)["traceEvents"]]
    assert names.count("log_probs") == 3


def test_what_a_timer_makes_keeps_all_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Block:
        seconds = 0.5
        entered = 0

        def __enter__(self) -> int:
            self.entered += 1
            return self.entered

        def __exit__(self, *error: object) -> bool:
            return error[0] is KeyError

        def __call__(self, function: object) -> str:
            return "its own"

    class Clock:
        def context(self, name: str) -> Any:
            return Block() if name else None

    module, _ = install("slime", monkeypatch)
    module.Timer = Clock  # type: ignore[attr-defined]
    with profile_run(tmp_path, wait=0, warmup=0, active=1) as run:
        assert Clock().context("") is None
        block = Clock().context("log_probs")
        assert (block.seconds, block(len)) == (0.5, "its own")
        with block as first, block as second:
            raise KeyError("that it suppresses")
        assert (first, second, block.entered) == (1, 2, 2)
        run.step()


@pytest.mark.parametrize("name", ["TRL", "torchtitan"])
def test_a_block_that_was_entered_before_the_recording_is_left_as_ever(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, timer = install(name, monkeypatch)
    assert record(tmp_path, timer, enter_early=True) == ["outer 1", "update_weights"]


def test_an_error_in_a_block_is_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in MAKERS:
        _, timer = install(name, monkeypatch)
        with (
            profile_run(tmp_path / name, wait=0, warmup=0, active=1) as run,
            pytest.raises(KeyError, match="mine"),
            timer("update_weights"),
        ):
            raise KeyError("mine")
        with profile_run(tmp_path / f"{name}2", wait=0, warmup=0, active=1) as run:
            run.step()


def test_torchtitans_own_spans_are_ranges(tmp_path: Path) -> None:
    logger = pytest.importorskip("torchtitan.observability.structured_logger")
    names = record(tmp_path, logger.log_trace_span)
    assert names == ["outer 1", "update_weights"]
