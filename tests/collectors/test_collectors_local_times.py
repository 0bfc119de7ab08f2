"""The local time of a step: what a rank needs until its last gradient, without waiting."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepsplit.collectors.probes.local_times import LocalTimes  # noqa: E402


@pytest.fixture
def local() -> Iterator[LocalTimes]:
    times = LocalTimes()
    yield times
    times.close()


def build_training() -> tuple[Any, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: Any, optimizer: Any, forward_s: float, wait_s: float) -> None:
    """A step whose own work takes forward_s, and which then waits for other ranks."""
    time.sleep(forward_s)
    model(torch.ones(2, 4)).sum().backward()
    time.sleep(wait_s)
    optimizer.step()
    optimizer.zero_grad()


def test_the_time_is_that_to_the_last_gradient_without_the_wait_after_it(local: LocalTimes) -> None:
    model, optimizer = build_training()
    found = []
    for forward_s in (0.0, 0.02, 0.06):
        train(model, optimizer, forward_s, wait_s=0.03)
        found.append(local.begin_step() / 1e9)

    # The first step finds the optimizer.
    assert found[0] == 0
    assert 0.02 <= found[1] < 0.05
    assert 0.06 <= found[2] < 0.09


def test_of_accumulated_gradients_the_last_one_counts(local: LocalTimes) -> None:
    model, optimizer = build_training()
    train(model, optimizer, 0, 0)
    local.begin_step()
    for _ in range(3):
        time.sleep(0.01)
        model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

    assert local.begin_step() >= 30_000_000


def test_a_step_without_gradients_has_no_local_time(local: LocalTimes) -> None:
    model, optimizer = build_training()
    for _ in range(2):
        train(model, optimizer, 0, 0)
        local.begin_step()
    optimizer.step()

    assert local.begin_step() == 0


def test_a_copy_of_the_model_is_not_hooked_and_closing_removes_the_hook(local: LocalTimes) -> None:
    model, optimizer = build_training()
    train(model, optimizer, 0, 0)
    weight = model[0].weight
    assert len(weight._post_accumulate_grad_hooks) == 1
    assert not copy.deepcopy(model)[0].weight._post_accumulate_grad_hooks

    local.close()

    assert not weight._post_accumulate_grad_hooks


def test_sharded_parameters_are_not_hooked(local: LocalTimes) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(2):
            weight.sum().backward()
            optimizer.step()
            assert local.begin_step() == 0
        assert not weight._post_accumulate_grad_hooks
    finally:
        torch.distributed.destroy_process_group()
