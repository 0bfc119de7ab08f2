"""Counting training steps by optimizer steps."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepsplit.collectors import optimizers  # noqa: E402
from stepsplit.collectors.attach.agent import LEADER_CHANGE_STEPS, StepCounter  # noqa: E402


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

    with pytest.warns(RuntimeWarning, match="ours"):
        optimizer.step()
    optimizer.step()

    assert ended == [0, 1]
