"""Counting training steps by optimizer steps."""

import gzip
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.stderr_lines import warns

torch = pytest.importorskip("torch")

from stepsplit.collectors import profile_run  # noqa: E402
from stepsplit.collectors.attach.agent import Agent  # noqa: E402
from stepsplit.collectors.attach.messages import AgentAnswer, ask_record  # noqa: E402
from stepsplit.collectors.attach.relay import claim_recording  # noqa: E402
from stepsplit.collectors.attach.step_counter import LEADER_CHANGE_STEPS, StepCounter  # noqa: E402
from stepsplit.collectors.formats.rank_record import RankRecord, read_record  # noqa: E402
from stepsplit.collectors.job import job_store  # noqa: E402
from stepsplit.collectors.probes import optimizers  # noqa: E402
from stepsplit.collectors.record.plan import RecordPlan  # noqa: E402


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """The ended steps as reported by a counter in this process."""
    seen: list[int] = []
    StepCounter(seen.append).install()
    yield seen
    for listener in optimizers._listeners:
        optimizers.remove_listener(listener)


def adam() -> Any:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.Adam([weight])


def resumed_adam(steps: int) -> Any:
    """An optimizer that has done these steps in an earlier process."""
    earlier, optimizer = adam(), adam()
    for _ in range(steps):
        earlier.step()
    optimizer.load_state_dict(earlier.state_dict())
    return optimizer


def test_each_step_of_the_only_optimizer_is_a_step(ended: list[int]) -> None:
    optimizer = adam()

    for _ in range(3):
        optimizer.step()

    assert ended == [0, 1, 2]


def test_a_step_of_several_optimizers_ends_once(ended: list[int]) -> None:
    first, second, third = adam(), adam(), adam()

    for _ in range(3):
        first.step()
        second.step()
        third.step()

    assert ended == [0, 1, 2]


class Wrapper(torch.optim.Optimizer):  # type: ignore[misc]
    """Like ZeroRedundancyOptimizer: its step calls another optimizer's step, then communicates."""

    def __init__(self, inner: Any) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(1))], {})
        self.inner = inner

    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.inner.step()
        self.inner.step()


def test_a_step_ends_with_the_outermost_optimizer(ended: list[int]) -> None:
    outer = Wrapper(adam())

    for _ in range(3):
        outer.step()

    assert ended == [0, 1, 2]


def test_another_optimizer_becomes_the_leader_if_the_first_stops(ended: list[int]) -> None:
    old, new = adam(), adam()
    old.step()

    for _ in range(LEADER_CHANGE_STEPS + 3):
        new.step()

    assert ended == [0, 1, 2, 3, 4]


def test_several_critic_steps_and_one_generator_step_are_one_step(ended: list[int]) -> None:
    generator, critic = adam(), adam()

    for _ in range(3):
        generator.step()
        for _ in range(5):
            critic.step()

    assert ended == [0, 1, 2]


class Fails(torch.optim.SGD):  # type: ignore[misc]
    """An optimizer whose second step raises."""

    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("an overflow")


def test_a_step_that_raises_does_not_count_or_affect_later_ones(ended: list[int]) -> None:
    optimizer = Fails([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.step()

    with pytest.raises(ValueError, match="an overflow"):
        optimizer.step()
    optimizer.step()

    assert ended == [0, 1]


def test_an_optimizer_replaced_after_an_exception_does_not_block_counting(ended: list[int]) -> None:
    failing, new = Fails([torch.nn.Parameter(torch.ones(1))], lr=0.1), adam()
    failing.step()
    with pytest.raises(ValueError, match="an overflow"):
        failing.step()

    for _ in range(2):
        new.step()

    assert ended == [0, 1, 2]


def test_a_listener_that_raises_is_removed_and_the_training_continues(ended: list[int]) -> None:
    def broken(optimizer: Any) -> None:
        raise RuntimeError("ours")

    optimizers.add_listener(optimizers.Listener(broken, broken))
    optimizer = adam()

    with warns("ours"):
        optimizer.step()
    optimizer.step()

    assert ended == [0, 1]


@pytest.fixture
def run_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Trains 45 steps under an agent; returns the record."""
    monkeypatch.setenv("STEPSPLIT_SOCKETS", str(tmp_path / "sockets"))

    def train(first: int, attached_after: int | None = None, resumed: int = 0) -> RankRecord:
        optimizer = resumed_adam(resumed)
        plan = RecordPlan(str(tmp_path / "run"), "run", first, steps=2)
        agent = Agent(plan if attached_after is None else replace(plan, first=None))
        agent.install()
        for step in range(45):
            if step == attached_after:
                assert ask_record(os.getpid(), plan) == AgentAnswer(True, step)
            optimizer.step()
        for thread in threading.enumerate():
            if thread.name == "stepsplit-close":
                thread.join()
        return read_record((tmp_path / "run" / "rank0_record.json").read_bytes())

    yield train
    for listener in optimizers._listeners:
        optimizers.remove_listener(listener)


def test_six_steps_are_timed_before_the_warmup(run_agent: Callable[..., RankRecord]) -> None:
    times = run_agent(first=10).steps

    # Steps 3 to 8; 9 is the warmup.
    assert (len(times.before_ns), len(times.profiled_ns)) == (6, 2)
    assert len(times.after_ns) == 20


def test_an_attach_knows_the_steps_before_it(run_agent: Callable[..., RankRecord]) -> None:
    times = run_agent(first=16, attached_after=12).steps

    # Steps 3 to 14, although the request came after step 11.
    assert (len(times.before_ns), len(times.profiled_ns)) == (12, 2)


def list_marks(folder: Path) -> list[str]:
    """The steps that the trace of rank 0 names."""
    raw = folder / "rank0_trace.json"
    deadline = time.monotonic() + 20
    while raw.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with gzip.open(folder / "rank0_trace.json.gz") as file:
        names = {each.get("name", "") for each in json.load(file)["traceEvents"]}
    return sorted(name for name in names if name.startswith("ProfilerStep#"))


def test_the_steps_of_a_resumed_job_count_on(
    run_agent: Callable[..., RankRecord], tmp_path: Path
) -> None:
    record = run_agent(first=10, resumed=300)

    assert (record.first_step, record.steps_before, record.end_step) == (310, 300, 312)
    assert list_marks(tmp_path / "run") == ["ProfilerStep#310", "ProfilerStep#311"]


def test_a_step_that_only_creates_the_state_before_it_is_loaded_is_not_counted_twice(
    tmp_path: Path,
) -> None:
    optimizer = adam()
    with profile_run(tmp_path, wait=2, warmup=0, active=1) as run:
        # torch.distributed.checkpoint creates the state by a step with a learning rate of 0.
        optimizer.step()
        run.step()
        optimizer.load_state_dict(resumed_adam(300).state_dict())
        for _ in range(2):
            optimizer.step()
            run.step()

    assert list_marks(tmp_path) == ["ProfilerStep#301"]


@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [
        ("adam", 0),
        ("sgd", 0),
        ("engine", 697),
    ],
)
def test_the_steps_before_are_those_of_the_optimizer_beyond_the_ended_ones(
    optimizer: str, steps: int
) -> None:
    class Engine:
        """Like DeepSpeed's, which steps as an optimizer does."""

        global_steps = 700

    resumed = optimizers.ResumedSteps()
    if optimizer == "engine":
        stepping: Any = Engine()
    else:
        stepping = adam() if optimizer == "adam" else torch.optim.SGD(adam().param_groups, lr=0.1)
    resumed._note(stepping)

    assert resumed.read(3) == steps


def test_a_framework_that_knows_the_steps_before_is_believed(tmp_path: Path) -> None:
    optimizer = adam()
    run = profile_run(tmp_path, wait=1, warmup=0, active=1).start(steps_before=40)
    for _ in range(2):
        optimizer.step()
        run.step()
    run.stop()

    assert list_marks(tmp_path) == ["ProfilerStep#41"]


def test_of_attaches_on_two_hosts_at_the_same_moment_one_wins_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = torch.distributed.HashStore()
    monkeypatch.setattr(job_store, "open_own_store", lambda: store)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    here = RecordPlan("runs/a", "a", first=20, steps=3)
    there = RecordPlan("runs/b", "b", first=22, steps=3)

    refused = "an attach on another host records steps 20 to 22"
    # Both ranks of this host, then one of the other, which has ended a step more.
    asked = ((here, 10), (here, 10), (there, 11))
    assert [claim_recording(plan, done) for plan, done in asked] == ["", "", refused]
    assert claim_recording(there, 22) == refused
    assert claim_recording(replace(there, first=40), 23) == ""
    assert claim_recording(replace(here, first=41), 24) == (
        "an attach on another host records steps 40 to 42"
    )


def test_a_job_of_one_host_asks_no_store_before_it_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_store, "open_own_store", lambda: pytest.fail("asked"))
    assert claim_recording(RecordPlan("runs/a", "a", first=20), 10) == ""
