"""The names of modules in one step of a recording, by hooks that leave nothing behind."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from stepsplit.analyzer import examine  # noqa: E402
from stepsplit.collectors import profile_run  # noqa: E402
from stepsplit.collectors.record.module_names import MODULE_MARK, name_modules  # noqa: E402


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attn(x))


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("once")


def list_marks(run: object) -> list[str]:
    assert callable(run)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with name_modules():
            run()
        Model()(torch.ones(1, 8))
    names = [event.name for event in profiler.events() if event.name.startswith(MODULE_MARK)]
    return [name.removeprefix(MODULE_MARK) for name in names]


def test_modules_have_their_paths_and_later_calls_none() -> None:
    marks = list_marks(lambda: Model()(torch.ones(1, 8)))
    paths = [f"layers.{layer}{inner}" for layer in (0, 1) for inner in ("", ".attn", ".mlp")]
    assert marks == [".", *paths]


def test_a_module_that_raises_leaves_no_open_range() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="once"):
            nn.Sequential(Failing())(torch.ones(1, 8))
        nn.Linear(8, 8)(torch.ones(1, 8))

    assert list_marks(run) == [".", "0", "."]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_recording_with_modules_places_all_of_its_steps(tmp_path: Path, recompute: bool) -> None:
    model = Model(recompute)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with profile_run(tmp_path / "run", active=3, modules=True) as run:
            for _ in range(6):
                model(torch.ones(4, 8, requires_grad=True)).sum().backward()
                run.step()
    parts = examine([tmp_path / "run"]).tables.parts
    phases = {0, 1, 2} if recompute else {0, 1}
    for step in set(parts.step.tolist()):
        own = parts.step == step
        assert {*parts.layer[own].tolist()} >= {0, 1}
        for layer in (0, 1):
            assert {*parts.phase[own & (parts.layer == layer)].tolist()} == phases
