"""Spans of the training thread that are no steps: checkpoints, evaluations, compilation, start-up.

They are found by the functions that do such work, and by marks of the script. A span costs two
clock reads; nothing is written here.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from stepsplit.collectors.guard import warn_lost
from stepsplit.collectors.probes.imports import when_imported

LEAST_SPAN_NS = 1_000_000
"""Shorter spans stay in the step that they are part of."""

MOST_SPANS = 10_000
"""Spans that are kept until they are written; the oldest go first."""

MARKS = (
    "evaluation", "checkpoint", "compile", "process_group", "load", "quorum", "heal", "commit",
    "other",
)  # fmt: skip
"""What a span can be; load is of torch.load and DCP, before the first step; quorum, heal and commit
are of TorchFT. Those of other libraries are known where the script marks them."""


@dataclass(frozen=True, slots=True)
class Span:
    """Some time of the training thread, in ns since 1970; mark is one of MARKS."""

    mark: str
    begin_unix_ns: int
    end_unix_ns: int


class SpanLog:
    """The spans of this process that are not written yet."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._open: dict[str, int] = {}
        # Since the last step: the modules to be evaluated, and those to train.
        self.evaluated: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._trained: dict[int, int] = {}
        self._steps_at_mode = 0
        self._thread = threading.main_thread().ident
        self.is_on = False
        self.steps = 0

    def end_step(self) -> None:
        """Counts a step. The thread that ends it is the one whose spans count."""
        self.steps += 1
        self._thread = threading.get_ident()

    def begin(self, mark: str) -> int:
        """Begins a span. Returns its begin; 0 within a span of the same mark, or in another thread,
        which holds up no step."""
        if not self.is_on or threading.get_ident() != self._thread:
            return 0
        self._open[mark] = depth = self._open.get(mark, 0) + 1
        return time.perf_counter_ns() if depth == 1 else -1

    def end(self, mark: str, begin_ns: int) -> None:
        """Ends a span, given what begin() returned."""
        if not begin_ns:
            return
        self._open[mark] -= 1
        if begin_ns > 0:
            self.add(mark, time.perf_counter_ns() - begin_ns)

    def add(self, mark: str, took_ns: int) -> None:
        """Adds a span that ends now."""
        if self.is_on and took_ns >= LEAST_SPAN_NS:
            # The length is that of a clock which is never set.
            end = time.time_ns()
            self._spans.append(Span(mark, end - took_ns, end))

    def note_mode(self, module: Any, mode: bool, outermost: Any) -> None:
        """Notes that a module is to train or to be evaluated: an evaluation is the time between
        these, if no step ended in it. A teacher that is never to train is none.

        outermost: the module whose train() or eval() the script has called.
        """
        if not self.is_on or threading.get_ident() != self._thread:
            return
        # close() runs on another thread: the dicts are replaced, and never iterated.
        if self._steps_at_mode != self.steps:
            self._steps_at_mode, self.evaluated, self._trained = self.steps, {}, {}
        evaluated, trained, now = self.evaluated, self._trained, time.perf_counter_ns()
        if not mode:
            if len(evaluated) < _MOST_MODULES and id(module) not in evaluated:
                evaluated[id(module)] = weakref.ref(module), now
            return
        if module is outermost and len(trained) < _MOST_MODULES:
            trained.setdefault(id(module), now)
        found, begin = evaluated.pop(id(module), (None, 0))
        if found is None or found() is not module or not self.steps:
            return
        # A part that is set to eval() each time after the whole is set to train() is frozen.
        is_after = trained.get(id(outermost), now) < begin
        if module is outermost or not is_after or _is_wrapper(outermost, module):
            self.add("evaluation", now - begin)

    def close(self) -> None:
        """Ends an evaluation after which the script does not train again. May be called from
        another thread."""
        evaluated, self.evaluated = self.evaluated, {}
        begins = [begin for _, begin in list(evaluated.values())]
        if begins and self.steps and self._steps_at_mode == self.steps:
            self.add("evaluation", time.perf_counter_ns() - min(begins))

    def take(self) -> list[Span]:
        """The spans since the last call. May be called from another thread."""
        found = []
        while self._spans:
            found.append(self._spans.popleft())
        return found


# A job that makes modules as it runs may not make this table grow for ever.
_MOST_MODULES = 100
# DistributedDataParallel around torch.compile around a wrapper of a framework are three.
_MOST_WRAPPERS = 10


def _is_wrapper(outer: Any, module: Any) -> bool:
    """Whether outer has nothing but the module in it, like DistributedDataParallel."""
    for _ in range(_MOST_WRAPPERS):
        if len(parts := outer._modules) != 1:
            break
        (outer,) = parts.values()
        if outer is module:
            return True
    return False


SPANS = SpanLog()
"""Those of this process."""


_is_compiling: Callable[[], bool] = bool
"""torch.compiler.is_compiling once imported, until then False. Compiled code has no clocks."""


@contextmanager
def mark(name: str) -> Iterator[None]:
    """Marks what the training thread does in the block, for the ledger of a watched job.

    Without a watch, and in code that torch.compile compiles, it does nothing. What the watch finds
    by itself (torch.save and DCP, compilation of torch.compile, model.eval() to model.train(),
    init_process_group) needs no mark.

    Args:
        name: "evaluation", "checkpoint", "quorum", "heal", "commit" or another one of MARKS;
            anything else counts as "other".

    Examples:
        with mark("evaluation"):
            evaluate(model)
    """
    if _is_compiling():
        yield
        return
    known = name if isinstance(name, str) and name in MARKS else "other"
    begin_ns = SPANS.begin(known)
    try:
        yield
    finally:
        SPANS.end(known, begin_ns)


# The functions whose calls are spans.


@dataclass(frozen=True, slots=True)
class SpanFunction:
    """A function, or a method of owner, whose calls are spans.

    is_early: whether only calls before the first step count, as those of torch.load: a data loader
    calls it later.
    """

    mark: str
    module: str
    name: str
    owner: str = ""
    is_early: bool = False


SPAN_FUNCTIONS = (
    SpanFunction("checkpoint", "torch.serialization", "save"),
    SpanFunction("load", "torch.serialization", "load", is_early=True),
    SpanFunction("checkpoint", "torch.distributed.checkpoint.state_dict_saver", "save"),
    SpanFunction("checkpoint", "torch.distributed.checkpoint.state_dict_saver", "async_save"),
    SpanFunction("load", "torch.distributed.checkpoint.state_dict_loader", "load", is_early=True),
    SpanFunction("checkpoint", "safetensors.torch", "save_file"),
    SpanFunction("load", "safetensors.torch", "load_file", is_early=True),
    SpanFunction(
        "checkpoint", "deepspeed.runtime.engine", "save_checkpoint", owner="DeepSpeedEngine"
    ),
    # pytorch/torchft 73dafea4: the training thread waits in these. A synchronous start_quorum()
    # waits in wait_quorum(); should_commit() heals, and that part is of heal.
    SpanFunction("quorum", "torchft.manager", "wait_quorum", owner="Manager"),
    SpanFunction("heal", "torchft.manager", "_apply_pending_state_dict", owner="Manager"),
    SpanFunction("commit", "torchft.manager", "should_commit", owner="Manager"),
    # Lightning sets `training` of its modules without train().
    SpanFunction(
        "evaluation", "lightning.pytorch.loops.evaluation_loop", "run", owner="_EvaluationLoop"
    ),
    SpanFunction(
        "evaluation", "pytorch_lightning.loops.evaluation_loop", "run", owner="_EvaluationLoop"
    ),
)
"""The table: a library is an entry. Of Megatron-LM's own checkpoints no function is wrapped: they
end in torch.save or DCP."""


def watch_spans() -> None:
    """Begins to note the spans of this process; once, while torch is being imported."""
    if SPANS.is_on:
        return
    SPANS.is_on = True
    timed: dict[int, Any] = {}
    for entry in SPAN_FUNCTIONS:
        wrap = functools.partial(_wrap, entry, timed)
        when_imported(entry.module, functools.partial(_guard, wrap))
    if timed:
        _guard(functools.partial(_replace_names, timed))
    when_imported("torch.compiler", functools.partial(_guard, _follow_tracing))
    when_imported("torch.nn.modules.module", functools.partial(_guard, _wrap_modes))
    when_imported("torch._dynamo.callback", functools.partial(_guard, _follow_compilation))


def _guard(install: Callable[[], None]) -> None:
    try:
        install()
    except Exception as error:  # noqa: BLE001 - an import of the script must not fail by it
        warn_lost(0, f"some spans of its ledger: {error!r}")


def _wrap(entry: SpanFunction, wrapped: dict[int, Any]) -> None:
    """Wraps the function, and notes in `wrapped` by what its id is to be replaced."""
    module = sys.modules[entry.module]
    owner: Any = getattr(module, entry.owner, None) if entry.owner else module
    original = getattr(owner, "__dict__", {}).get(entry.name)
    if not callable(original):
        return

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if entry.is_early and SPANS.steps:
            return original(*args, **kwargs)
        begin_ns = SPANS.begin(entry.mark)
        try:
            return original(*args, **kwargs)
        finally:
            SPANS.end(entry.mark, begin_ns)

    setattr(owner, entry.name, timed)
    if not entry.owner:
        wrapped[id(original)] = timed


def _replace_names(wrapped: dict[int, Any]) -> None:
    """Replaces the functions in modules that have imported them before, by whatever name."""
    for place in list(sys.modules.values()):
        if isinstance(place, ModuleType):
            # vars() would load a lazy module.
            names = object.__getattribute__(place, "__dict__")
            for name, value in list(names.items()):
                if id(value) in wrapped:
                    names[name] = wrapped[id(value)]


def _follow_tracing() -> None:
    global _is_compiling
    _is_compiling = sys.modules["torch.compiler"].is_compiling


def _wrap_modes() -> None:
    """Follows model.train() and model.eval(), which calls train(False)."""
    module_type = sys.modules["torch.nn.modules.module"].Module
    original = module_type.train
    outermost: Any = None

    @functools.wraps(original)
    def train(self: Any, mode: bool = True) -> Any:
        nonlocal outermost
        # First, so that torch.compile and torch.export see nothing of the rest.
        if _is_compiling():
            return original(self, mode)
        # A module passes it on to those in it: of eval() the outermost one counts, of train() each,
        # since a wrapper may train what the script evaluates within it.
        if outermost is not None:
            if mode and SPANS.evaluated:
                with suppress(Exception):
                    SPANS.note_mode(self, mode, outermost)
            return original(self, mode)
        outermost = self
        try:
            with suppress(Exception):
                SPANS.note_mode(self, mode, self)
            return original(self, mode)
        finally:
            outermost = None

    module_type.train = train


def _follow_compilation() -> None:
    """Notes when torch.compile compiles, on whichever thread: a step waits for it."""
    handler = sys.modules["torch._dynamo.callback"].callback_handler
    begin_ns = 0

    def note_begin(*_: Any) -> None:
        nonlocal begin_ns
        begin_ns = time.perf_counter_ns()

    def note_end(*_: Any) -> None:
        nonlocal begin_ns
        took_ns, begin_ns = time.perf_counter_ns() - begin_ns if begin_ns else 0, 0
        SPANS.add("compile", took_ns)

    def follow() -> None:
        handler.register_start_callback(note_begin)
        handler.register_end_callback(note_end)

    def clear() -> None:
        # torch._dynamo.reset() calls it.
        try:
            forget()
        finally:
            follow()

    follow()
    forget, handler.clear = handler.clear, clear
