"""The names of modules in one step of a recording, by hooks that leave nothing behind."""

from __future__ import annotations

import gzip
import json
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn.modules.module import register_module_forward_hook  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from stepsplit.analyzer import examine  # noqa: E402
from stepsplit.collectors import profile_run  # noqa: E402
from stepsplit.collectors.formats.rank_record import (  # noqa: E402
    WHY_UNNAMED,
    ModuleNames,
    RankRecord,
    read_record,
)
from stepsplit.collectors.formats.run_spec import RankInfo  # noqa: E402
from stepsplit.collectors.record.command import describe_module_names  # noqa: E402
from stepsplit.collectors.record.module_choice import has_compiled_code  # noqa: E402
from stepsplit.collectors.record.module_names import MODULE_MARK, name_modules  # noqa: E402


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    """Other tests of this process have compiled, too."""

    def forget() -> None:
        if "torch._dynamo.utils" in sys.modules:
            torch._dynamo.reset()
            sys.modules["torch._dynamo.utils"].counters.clear()

    forget()
    yield
    forget()


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


class Interrupted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


def test_an_interrupt_leaves_no_range_open_behind_those_around_it() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.after = nn.Sequential(Interrupted()), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(KeyboardInterrupt):
                self.inner(x)
            return self.after(x)  # type: ignore[no-any-return]

    def run() -> None:
        nn.Sequential(Careful())(torch.ones(1))
        nn.Identity()(torch.ones(1))

    assert list_marks(run) == [".", "0", "0.inner", "0.inner.0", "0.after", "."]


class SeenOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


def test_names_add_no_op_to_what_the_script_looks_at() -> None:
    """A mode that counts ops, and a traced graph, are those of the model."""
    seen, graphs = [], []
    for named in (False, True):
        with name_modules() if named else nullcontext():
            with SeenOps() as ops:
                Model()(torch.ones(1, 8))
            graphs.append([node.name for node in make_fx(Model())(torch.ones(1, 8)).graph.nodes])
            seen.append(ops.names)
    assert seen[0] == seen[1]
    assert graphs[0] == graphs[1]


def record_steps(
    folder: Path, model: nn.Module, step_s: float = 0.0, **options: Any
) -> tuple[list[str], ModuleNames | None]:
    """The steps that have names of modules in the trace, and what the record says of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with profile_run(folder, active=3, **options) as run:
            for _ in range(6):
                model(torch.ones(4, 8))
                time.sleep(step_s)
                run.step()
    events = json.loads(gzip.decompress((folder / "rank0_trace.json.gz").read_bytes()))
    named = [one for one in events["traceEvents"] if one.get("name", "").startswith(MODULE_MARK)]
    steps = [
        (one["name"], one["ts"], one["ts"] + one["dur"])
        for one in events["traceEvents"]
        if one.get("name", "").startswith("ProfilerStep#") and one["cat"] == "user_annotation"
    ]
    where = {name for name, start, end in steps for mark in named if start <= mark["ts"] < end}
    record = read_record((folder / "rank0_record.json").read_bytes())
    # A step with names is none of those that say what the profiler costs.
    assert len(record.steps.profiled_ns) == 3 - len(where)
    return sorted(where), record.module_names


CHEAP_S = 0.1
"""A step so long that seven names take far less than 2 % of it, also on a busy machine."""


def test_without_being_asked_the_last_step_has_names_where_they_are_cheap(tmp_path: Path) -> None:
    steps, said = record_steps(tmp_path / "run", Model(), CHEAP_S)
    assert steps == ["ProfilerStep#4"]
    assert said is not None and said.step == 4 and said.why is None
    assert said.cost_ns is not None and said.step_ns is not None
    assert 0 < said.cost_ns <= 0.02 * said.step_ns and said.step_ns >= CHEAP_S * 1e9


def test_names_that_are_asked_for_are_in_the_first_step(tmp_path: Path) -> None:
    steps, said = record_steps(tmp_path / "run", Model(), modules=True)
    assert (steps, said) == (["ProfilerStep#2"], ModuleNames(2))


def test_names_that_are_not_wanted_are_in_no_step(tmp_path: Path) -> None:
    assert record_steps(tmp_path / "run", Model(), CHEAP_S, modules=False) == ([], None)


@pytest.mark.parametrize("modules", [None, True])
def test_compiled_code_is_compiled_once(modules: bool | None, tmp_path: Path) -> None:
    compiled = []

    def note(graph: Any, _inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    model = torch.compile(Model(), backend=note)
    steps, said = record_steps(tmp_path / "run", model, CHEAP_S, modules=modules)
    assert (steps, said) == ([], ModuleNames(why="compiled"))
    assert len(compiled) == 1


def test_code_counts_as_compiled_before_its_first_call() -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.sum().backward()
    torch.optim.SGD([weight]).step()  # its function is one that torch.compile leaves alone
    assert not has_compiled_code()
    torch.compile(Model(), backend="eager")
    assert has_compiled_code()


def test_a_job_with_hooks_for_all_modules_has_its_own_alone(tmp_path: Path) -> None:
    called: list[int] = []
    hook = register_module_forward_hook(lambda *_: called.append(1))
    try:
        steps, said = record_steps(tmp_path / "run", Model(), CHEAP_S)
    finally:
        hook.remove()
    assert (steps, said) == ([], ModuleNames(why="own_hooks"))
    assert len(called) == 6 * 7


class Unlisted(Model):
    def named_modules(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        (nn.Sequential(*[nn.Identity() for _ in range(1000)]), {}, "cost"),
        (Model(), {"with_stack": True}, "stacks"),
        (Model(), {"wait": 2, "warmup": 0}, "no_warmup"),
        (Unlisted(), {}, "paths"),
    ],
)
def test_why_there_are_no_names(
    model: nn.Module, options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    steps, said = record_steps(tmp_path / "run", model, **options)
    assert steps == [] and said is not None and (said.step, said.why) == (None, why)
    assert why in WHY_UNNAMED


def test_what_a_recording_says_of_its_names() -> None:
    def describe(*found: ModuleNames | None) -> str:
        rank = RankInfo(0, 0, "host", 1, "cpu")
        return describe_module_names(
            [RankRecord("r", rank, 2, "gloo", module_names=each) for each in found]
        )

    cheap = ModuleNames(14, cost_ns=600, step_ns=100_000)
    cost = ModuleNames(why="cost", cost_ns=3_000, step_ns=100_000)
    assert describe(None) == ""
    assert describe(ModuleNames(10)) == "modules are named in step 10"
    assert describe(cheap, cheap) == "modules are named in step 14, which takes up to 0.6% of it"
    some = "modules are named in step 14 of 1 of 2 ranks, which takes up to 0.6% of it"
    assert describe(cheap, cost) == some
    assert describe(cost) == "modules are not named: that takes more than 2 % of a step"
