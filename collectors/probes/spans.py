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
from contextlib import contextmanager
from dataclasses import dataclass
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
"""What a span can be; load is of torch.load and DCP, before the first step. The times of TorchFT
and torchelastic (quorum, heal, commit) are known where the script marks them."""


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
        self._evaluated: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._depth = 0
        self.is_on = False
        self.steps = 0

    def begin(self, mark: str) -> int:
        """Begins a span. Returns its begin; 0 within a span of the same mark, or in another thread,
        which holds up no step."""
        if not self.is_on or threading.current_thread() is not threading.main_thread():
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

    def note_mode(self, module: Any, mode: bool) -> None:
        """Notes that a module is to train or to be evaluated: an evaluation is the time between
        these, if no step ended in it. A teacher that is never to train is none."""
        if not self.is_on or threading.current_thread() is not threading.main_thread():
            return
        known = self._evaluated
        if known and next(iter(known.values()))[2] != self.steps:
            known.clear()
        if not mode:
            if len(known) < _MOST_EVALUATED and id(module) not in known:
                known[id(module)] = weakref.ref(module), time.perf_counter_ns(), self.steps
        elif (found := known.pop(id(module), None)) is not None and found[0]() is module:
            self.add("evaluation", time.perf_counter_ns() - found[1])

    def close(self) -> None:
        """Ends an evaluation after which the script does not train again."""
        last = [begin for _, begin, steps in self._evaluated.values() if steps == self.steps]
        self._evaluated.clear()
        if last and self.steps:
            self.add("evaluation", time.perf_counter_ns() - min(last))

    def take(self) -> list[Span]:
        """The spans since the last call. May be called from another thread."""
        found = []
        while self._spans:
            found.append(self._spans.popleft())
        return found


_MOST_EVALUATED = 100

SPANS = SpanLog()
"""Those of this process."""


@contextmanager
def mark(name: str) -> Iterator[None]:
    """Marks what the training thread does in the block, for the ledger of a watched job.

    Without a watch it does nothing. What the watch finds by itself (torch.save and DCP, compilation
    of torch.compile, model.eval() to model.train(), init_process_group) needs no mark.

    Args:
        name: "evaluation", "checkpoint", "quorum", "heal", "commit" or another one of MARKS;
            anything else counts as "other".

    Examples:
        with mark("evaluation"):
            evaluate(model)
    """
    known = name if name in MARKS else "other"
    begin_ns = SPANS.begin(known)
    try:
        yield
    finally:
        SPANS.end(known, begin_ns)


# The functions whose calls are spans.


@dataclass(frozen=True, slots=True)
class SpanFunction:
    """A function, or a method of owner, whose calls are spans.

    places: other modules that have the function by the same name. is_early: whether only calls
    before the first step count, as those of torch.load: a data loader calls it later.
    """

    mark: str
    module: str
    name: str
    owner: str = ""
    places: tuple[str, ...] = ()
    is_early: bool = False


SPAN_FUNCTIONS = (
    SpanFunction("checkpoint", "torch.serialization", "save", places=("torch",)),
    SpanFunction("load", "torch.serialization", "load", places=("torch",), is_early=True),
    SpanFunction("checkpoint", "torch.distributed.checkpoint.state_dict_saver", "save"),
    SpanFunction("checkpoint", "torch.distributed.checkpoint.state_dict_saver", "async_save"),
    SpanFunction("load", "torch.distributed.checkpoint.state_dict_loader", "load", is_early=True),
    SpanFunction("checkpoint", "safetensors.torch", "save_file"),
    SpanFunction("load", "safetensors.torch", "load_file", is_early=True),
    SpanFunction(
        "checkpoint", "deepspeed.runtime.engine", "save_checkpoint", owner="DeepSpeedEngine"
    ),
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
    for entry in SPAN_FUNCTIONS:
        when_imported(entry.module, functools.partial(_guard, functools.partial(_wrap, entry)))
    when_imported("torch.nn.modules.module", functools.partial(_guard, _wrap_modes))
    when_imported("torch._dynamo.callback", functools.partial(_guard, _follow_compilation))


def _guard(install: Callable[[], None]) -> None:
    try:
        install()
    except Exception as error:  # noqa: BLE001 - an import of the script must not fail by it
        warn_lost(0, f"some spans of its ledger: {error!r}")


def _wrap(entry: SpanFunction) -> None:
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
    for place in map(sys.modules.get, entry.places):
        if getattr(place, entry.name, None) is original:
            setattr(place, entry.name, timed)


def _wrap_modes() -> None:
    """Follows model.train() and model.eval(), which calls train(False)."""
    module_type = sys.modules["torch.nn.modules.module"].Module
    original = module_type.train
    depth = 0

    @functools.wraps(original)
    def train(module: Any, mode: bool = True) -> Any:
        nonlocal depth
        # A module passes it on to those in it: of eval() the outermost one counts, of train() each,
        # since a wrapper may train what the script evaluates within it.
        if mode or not depth:
            SPANS.note_mode(module, mode)
        depth += 1
        try:
            return original(module, mode)
        finally:
            depth -= 1

    # Keeps torch.compile out of it.
    train._torchdynamo_disable = True  # type: ignore[attr-defined]
    module_type.train = train


def _follow_compilation() -> None:
    """Notes when torch.compile compiles, on whichever thread: a step waits for it."""
    handler = sys.modules["torch._dynamo.callback"].callback_handler
    begin_ns = 0

    def note_begin(*_: Any) -> None:
        nonlocal begin_ns
        begin_ns = time.perf_counter_ns()

    def note_end(*_: Any) -> None:
        SPANS.add("compile", time.perf_counter_ns() - begin_ns)

    handler.register_start_callback(note_begin)
    handler.register_end_callback(note_end)
