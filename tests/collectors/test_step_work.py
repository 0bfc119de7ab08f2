"""What run.step(tokens=...) leaves in the record of a rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from stepsplit.collectors import profile_run
from stepsplit.collectors.formats.rank_record import StepWork, read_record
from stepsplit.collectors.record.step_work import WorkCounter


def record(folder: Path, *counts: dict[str, Any]) -> Any:
    """The work in the record of a job of these steps, of which all but the first are recorded."""
    with profile_run(folder, wait=0, warmup=1, active=len(counts) - 1) as run:
        for one in counts:
            torch.ones(4).add(1)
            run.step(**one)
    return read_record((folder / "rank0_record.json").read_bytes()).work


def test_the_work_of_the_recorded_steps_is_in_the_record(tmp_path: Path) -> None:
    """A tensor is read as it was in its step, though the job counts on in it; FLOPs may be a
    float."""
    count = torch.tensor(5)
    with profile_run(tmp_path, wait=1, warmup=1, active=2) as run:
        for _ in range(5):
            count += 1
            run.step(tokens=count, samples=2, flops=1.5e12)
    work = read_record((tmp_path / "rank0_record.json").read_bytes()).work
    assert work is not None and work.origin == "run.step"
    assert work.steps == (
        StepWork(2, tokens=8, samples=2, flops=1_500_000_000_000),
        StepWork(3, tokens=9, samples=2, flops=1_500_000_000_000),
    )


def test_a_job_that_counts_nothing_has_the_record_of_before(tmp_path: Path) -> None:
    assert record(tmp_path, {}, {}) is None
    assert '"work"' not in (tmp_path / "rank0_record.json").read_text()


@pytest.mark.parametrize(
    "count", [-1, float("nan"), float("inf"), "12", True, 1 << 70, [3], object()]
)
def test_what_is_no_count_is_left_out_with_a_warning(
    count: object, capsys: pytest.CaptureFixture[str]
) -> None:
    counter = WorkCounter(3)
    counter.add(0, "run.step", {"tokens": count, "samples": 4})
    counter.add(1, "run.step", {"tokens": count, "samples": None})
    work = counter.collect(0, 9, 100)
    assert work is not None and work.steps == (StepWork(100, samples=4),)
    assert "rank 3: tokens of step 100 is not a number from 0 on" in capsys.readouterr().err


def test_no_tokens_in_a_step_is_a_count(tmp_path: Path) -> None:
    work = record(tmp_path, {"tokens": 3}, {"tokens": 0}, {"tokens": torch.tensor([7])})
    assert [one.tokens for one in work.steps] == [0, 7]


def test_a_record_with_less_than_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="less than nothing in step 3"):
        StepWork(3, tokens=-1)


class _Run:
    """Stands for a recording in progress."""

    def __init__(self) -> None:
        self.seen: list[tuple[int | None, str]] = []

    def step(self, tokens: int | None = None, origin: str = "") -> None:
        self.seen.append((tokens, origin))


def test_torchtitans_counter_gives_the_tokens_of_each_step() -> None:
    pytest.importorskip("torchtitan.tools.profiler")
    from stepsplit.collectors.integrations.torchtitan import _find_trainer, _Handle

    class Trainer:
        """Counts as torchtitan's does."""

        ntokens_seen = 100

        def find(self) -> Any:
            return _find_trainer()

    trainer, run = Trainer(), _Run()
    assert trainer.find() is trainer
    handle = _Handle(run, trainer)  # type: ignore[arg-type]
    for tokens in (30, 40):
        trainer.ntokens_seen += tokens
        handle.step()
    assert run.seen == [(30, "torchtitan"), (40, "torchtitan")]
    without = _Run()
    _Handle(without, None).step()  # type: ignore[arg-type]
    assert without.seen == [(None, "torchtitan")]


def test_trainers_callback_counts_the_tokens_of_the_training_alone() -> None:
    pytest.importorskip("transformers")
    from stepsplit.collectors.integrations.transformers import StepsplitCallback

    callback = StepsplitCallback("unused")
    run = _Run()
    callback._run = run  # type: ignore[assignment]
    model = SimpleNamespace(training=True)
    ids = torch.ones(2, 16, dtype=torch.int64)
    callback._count_tokens(model, (), {"input_ids": ids})
    callback._count_tokens(model, (ids[:1],), {})
    model.training = False
    callback._count_tokens(model, (), {"input_ids": ids})
    callback.on_step_end(None, None, None)
    callback.on_step_end(None, None, None)
    assert run.seen == [(48, "transformers"), (None, "transformers")]
