"""The recorder for training loops that use a DeepSpeed engine.

    with profile_engine(engine, "runs/exp1"):
        for batch in loader: ...

A step is a training step (engine.global_steps), with all its microbatches. The inner optimizers
cannot be used to count steps: with ZeRO-3 they step once per parameter group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from stepsplit.collectors.formats.run_spec import Training
from stepsplit.collectors.integrations.calls import call_after_each
from stepsplit.collectors.integrations.common import (
    FrameworkSpec,
    LazyRecording,
    Options,
    choose_data_axis,
    describe_offload,
    normalize_dtype,
    normalize_optimizer,
    read_model_spec,
)

_STEPS = ("train_batch", "step")
"""Methods that end a training step; a pipeline engine has train_batch instead of step."""
_AXES = {"pipe": "pp", "model": "tp"}


@contextmanager
def profile_engine(engine: Any, out: str | Path, **options: Unpack[Options]) -> Iterator[None]:
    """Records the training steps within the block to `out`; options as for profile_run."""
    run = LazyRecording(out, **options)
    steps_done = engine.global_steps

    def ended(called: Any) -> None:
        nonlocal steps_done
        # The engine's step() is called for each microbatch; the count grows with the last one.
        if called is engine and engine.global_steps != steps_done:
            steps_done = engine.global_steps
            run.step()

    # A class in between may override the method: the first that has it is the one that is called.
    kind, method = next(
        (base, name) for name in _STEPS for base in type(engine).__mro__ if name in vars(base)
    )
    with ExitStack() as undo:
        undo.enter_context(call_after_each(kind, method, ended))
        undo.enter_context(run.record_around(lambda: read_engine_spec(engine)))
        yield


def read_engine_spec(engine: Any) -> FrameworkSpec:
    """Reads mesh, model and training setup from the engine."""
    moved = (engine.zero_offload_optimizer(), engine.zero_offload_param())
    is_stage, model = hasattr(engine, "grid"), read_model_spec(engine)
    # A rank of a pipeline has the parameters of its stage alone.
    if model is not None and is_stage:
        model = replace(model, parameters=None)
    training = Training(
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        global_batch=engine.train_batch_size(),
        microbatches=engine.gradient_accumulation_steps(),
        dtype=normalize_dtype(engine.get_data_types()[0]),
        optimizer=normalize_optimizer(engine.optimizer_name()),
        schedule="1f1b" if is_stage else None,
        framework="deepspeed",
        zero=engine.zero_optimization_stage(),
        offload=describe_offload(*(getattr(each, "device", None) for each in moved)),
    )
    return FrameworkSpec(_read_mesh(engine), model, training, engine.global_steps)


def _read_mesh(engine: Any) -> dict[str, int] | None:
    """{axis: size}, outermost first; None if the user's own groups define the layout."""
    data = choose_data_axis(engine.zero_optimization_stage())
    topology = getattr(getattr(engine, "grid", None), "_topo", None)
    if topology is not None:
        sizes = zip(topology.axes, topology.dims, strict=True)
        return {_AXES.get(axis, data): size for axis, size in sizes if size > 1} or {data: 1}
    return {data: engine.dp_world_size} if engine.world_size == engine.dp_world_size else None
