"""The recorder as a callback of transformers' Trainer.

    trainer.add_callback(StepsplitCallback("runs/exp1"))

A step is an optimizer step (state.global_step), with all its microbatches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from stepsplit.collectors.formats.run_spec import Training
from stepsplit.collectors.guard import warn_on_failure
from stepsplit.collectors.integrations.accelerate import (
    count_replicas,
    infer_framework,
    read_mesh,
    read_sharding,
)
from stepsplit.collectors.integrations.common import (
    FrameworkSpec,
    LazyRecording,
    Options,
    import_library,
    normalize_dtype,
    normalize_optimizer,
    read_model_spec,
)
from stepsplit.collectors.job.process_groups import read_job

_Callback: Any = import_library("transformers", "transformers accelerate").TrainerCallback


class StepsplitCallback(_Callback):  # type: ignore[misc]
    """Records a Trainer's run to the folder `out`; the options are those of profile_run."""

    def __init__(self, out: str | Path, **options: Unpack[Options]) -> None:
        self._run = LazyRecording(out, **options)
        self._tokens: int | None = None
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins the recording; process groups exist and the model is on its device."""
        model: Any = kwargs.get("model")
        self._run.begin(lambda: _read_trainer_spec(args, state, model))
        # A training that failed has had no end.
        self._remove_hook()
        # Trainer's own counter is the sum of all ranks. Compiled code would be compiled again for
        # each count of the hook.
        if not args.torch_compile and getattr(model, "main_input_name", "") == "input_ids":
            with warn_on_failure(read_job()[0], "the tokens of its steps"):
                self._hook = model.register_forward_pre_hook(self._count_tokens, with_kwargs=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends a step with all its microbatches; Trainer calls this once per global_step."""
        tokens, self._tokens = self._tokens, None
        self._run.step(tokens, "transformers")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the recording."""
        self._remove_hook()
        self._run.end()

    def _remove_hook(self) -> None:
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def _count_tokens(self, model: Any, args: Any, kwargs: Any) -> None:
        """Adds the tokens of a microbatch, with padding; an evaluation is no part of the work."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        if model.training and hasattr(ids, "numel"):
            self._tokens = (self._tokens or 0) + ids.numel()


def _read_trainer_spec(args: Any, progress: Any, model: Any) -> FrameworkSpec:
    # A Trainer makes accelerate's state when it is built, so that it is there when a run begins.
    state = import_library("accelerate.state", "accelerate").AcceleratorState()
    micro_batch = args.per_device_train_batch_size
    microbatches = args.gradient_accumulation_steps
    zero, offload = read_sharding(state)
    training = Training(
        micro_batch=micro_batch,
        global_batch=micro_batch * microbatches * count_replicas(state),
        microbatches=microbatches,
        dtype=_read_dtype(args, model),
        optimizer=normalize_optimizer(args.optim),
        framework=infer_framework(state, "huggingface"),
        zero=zero,
        offload=offload,
    )
    return FrameworkSpec(read_mesh(state), read_model_spec(model), training, progress.global_step)


def _read_dtype(args: Any, model: Any) -> str:
    # Without mixed precision the compute has the dtype in which the weights were loaded.
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    return normalize_dtype(next(model.parameters()).dtype)
