"""The recorder around a loop of accelerate.

    with profile_accelerator(accelerator, "runs/exp1"):
        for batch in loader:
            with accelerator.accumulate(model): ...

A step is an optimizer step, at which accelerate synchronizes gradients, with all its microbatches.
Accelerate's own profiler (ProfileKwargs) is torch's too, and there is one a process: where it
starts within the recorded steps, ours ends with what it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Unpack

from stepsplit.collectors.integrations.accelerate_state import mesh_of_state, replicas
from stepsplit.collectors.integrations.calls import after_each
from stepsplit.collectors.integrations.deepspeed import engine_facts
from stepsplit.collectors.integrations.late_run import Facts, LateRun
from stepsplit.collectors.integrations.library import library
from stepsplit.collectors.integrations.options import Options
from stepsplit.collectors.integrations.shapes import model_spec
from stepsplit.collectors.integrations.words import dtype_word, optimizer_word
from stepsplit.collectors.run_spec import Training


@contextmanager
def profile_accelerator(
    accelerator: Any, out: str | Path, **options: Unpack[Options]
) -> Iterator[None]:
    """Records what trains within it into the folder `out`; the options are those of profile_run.

    Begin after accelerator.prepare(...), so that run.json can tell of the model.
    """
    run = LateRun(out, **options)
    with ExitStack() as undo:
        ended = _Steps(run)
        for kind in _optimizer_types():
            undo.enter_context(after_each(kind, "step", ended))
        undo.enter_context(run.around(lambda: _facts(accelerator)))
        yield


def _optimizer_types() -> list[type]:
    """The classes whose step() a loop calls; DeepSpeed's does nothing, for backward has stepped."""
    library("accelerate.utils", "accelerate")
    base = library("accelerate.optimizer", "accelerate").AcceleratedOptimizer
    return [base, *(each for each in base.__subclasses__() if "step" in vars(each))]


class _Steps:
    """Tells the recorder of the steps of the first optimizer that steps."""

    def __init__(self, run: LateRun) -> None:
        self._run = run
        self._leader: Any = None

    def __call__(self, optimizer: Any) -> None:
        if not optimizer.gradient_state.sync_gradients:
            return
        if self._leader is None:
            self._leader = optimizer
        if optimizer is self._leader:
            self._run.step()


def _facts(accelerator: Any) -> Facts:
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if wrapped is not None:
        return engine_facts(wrapped.engine)
    state, ranks = accelerator.state, replicas(accelerator.state)
    loader = next(iter(accelerator._dataloaders), None)
    sequences = getattr(loader, "total_batch_size", None)
    optimizer = next(iter(accelerator._optimizers), None)
    training = Training(
        micro_batch=sequences and sequences // ranks,
        global_batch=sequences and sequences * accelerator.gradient_accumulation_steps,
        microbatches=accelerator.gradient_accumulation_steps,
        dtype=dtype_word(accelerator.mixed_precision),
        optimizer=optimizer and optimizer_word(type(optimizer.optimizer).__name__),
        framework="fsdp2" if state.distributed_type.name == "FSDP" else "ddp",
    )
    model = next(iter(accelerator._models), None)
    return Facts(mesh_of_state(state), model_spec(model), training)
