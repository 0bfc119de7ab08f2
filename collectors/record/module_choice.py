"""Whether modules are named if the user did not say: where it is cheap and changes nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from torch import nn
from torch.nn.modules import module as nn_module

from stepsplit.collectors.formats.rank_record import ModuleNames
from stepsplit.collectors.record.module_names import ModulePaths, name_modules
from stepsplit.collectors.record.plan import RecordPlan

MOST_OF_STEP = 0.02
"""The part of a step that naming its modules may take."""

_SLOWER = 8
"""A name costs more between the ops of a model, which take its caches, than in a loop: 2 times as
much in 750 plain layers, 4 to 8 times in GPT-2 (two busy cores)."""

_MOST_CALLS = 20_000
"""Counted calls: at 3 us each they take 60 ms once, and their names would need a step of 30 s."""

_TRIALS, _CALLS_PER_TRIAL = 7, 32


def has_compiled_code() -> bool:
    """Whether torch.compile was called: it compiles again when global hooks come and go."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    if counters and counters["frames"]["total"]:
        return True
    # Of code that is compiled at its first call. torch.compiler.disable, which torch's optimizers
    # use, has False here.
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return any(map(callable, (getattr(frames, "cached_backends", None) or {}).values()))


class ModuleChoice:
    """Whether the modules are named in the last recorded step, if the user did not say.

    The calls are counted in the last step before the recorded ones, which is neither recorded nor
    timed. The recorded steps before the named one say how long a step takes.
    """

    def __init__(self, plan: RecordPlan) -> None:
        self._why = ""
        if plan.stacks:
            self._why = "stacks"
        elif plan.steps < 2:
            self._why = "one_step"
        self._paths = ModulePaths()
        self._is_counted = False
        self._calls = self._call_ns = 0

    @contextmanager
    def count_calls(self) -> Iterator[None]:
        """Counts the calls of modules in the block, by a hook for all modules."""
        self._why = self._why or _find_obstacle()
        if self._why:
            yield
            return
        self._call_ns = _measure_call_ns()
        self._is_counted = True
        self._hook = nn_module.register_module_forward_pre_hook(self._count)
        try:
            yield
        finally:
            self._hook.remove()

    def decide(self, step: int, steps_ns: Sequence[int]) -> ModuleNames:
        """Whether to name the modules of step `step`, which is about to begin.

        steps_ns: the times of the recorded steps before it.
        """
        why = self._why or _find_obstacle()
        if why or not self._is_counted:
            return ModuleNames(why=why or "no_warmup")
        if not self._calls:
            return ModuleNames(why="no_calls")
        cost_ns = self._paths.search_ns + round(self._calls * self._call_ns * _SLOWER)
        # The shortest: another one may have waited for something that does not come again.
        step_ns = min(steps_ns)
        if cost_ns > MOST_OF_STEP * step_ns:
            return ModuleNames(why="cost", cost_ns=cost_ns, step_ns=step_ns)
        return ModuleNames(step, cost_ns=cost_ns, step_ns=step_ns)

    def _count(self, module: Any, _inputs: Any) -> None:
        self._calls += 1
        try:
            self._paths.find(module)
        except Exception:  # noqa: BLE001 - a script's own named_modules may fail
            self._why = "paths"
        if self._calls > _MOST_CALLS:
            self._why = "many_calls"
        if self._why:
            self._hook.remove()


def _find_obstacle() -> str:
    """What hooks for all modules might change in this job, as in WHY_UNNAMED, or ""."""
    if has_compiled_code():
        return "compiled"
    # Whoever uses them may count them, or rely on being the only one.
    return "own_hooks" if nn_module._has_any_global_hook() else ""


def _measure_call_ns() -> int:
    """How much longer a call of a module takes with its name, on this machine."""
    module = nn.Identity()

    def time_calls() -> int:
        begin = time.perf_counter_ns()
        for _ in range(_CALLS_PER_TRIAL):
            module(None)
        return time.perf_counter_ns() - begin

    plain_ns = min(time_calls() for _ in range(_TRIALS))
    with name_modules():
        named_ns = median(time_calls() for _ in range(_TRIALS))
    return max(0, round((named_ns - plain_ns) / _CALLS_PER_TRIAL))
