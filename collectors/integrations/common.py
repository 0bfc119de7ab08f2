"""Shared code of the integrations: options, lazy recording, library imports, model shape."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from stepsplit.collectors.formats.run_spec import ModelSpec, Training
from stepsplit.collectors.guard import warn_on_failure
from stepsplit.collectors.job.process_groups import read_job
from stepsplit.collectors.profiler import ProfiledRun, profile_run
from stepsplit.collectors.record.user_spec import MeshLike

# The options of every integration: those of profile_run, all optional.


class Options(TypedDict, total=False):
    """Options of profile_run; missing fields of model and training come from the framework."""

    name: str | None
    mesh: MeshLike
    model: ModelSpec | None
    training: Training | None
    wait: int
    warmup: int
    active: int
    ranks: str
    record_shapes: bool
    profile_memory: bool
    with_stack: bool
    every: int | None
    budget: float
    log_to: str | Sequence[str] | None
    modules: bool | None
    role: str


# A recording that begins within a framework's training loop.

_Spec = TypeVar("_Spec", ModelSpec, Training)


@dataclass(frozen=True, slots=True)
class FrameworkSpec:
    """Mesh, model and training setup as reported by the framework; None means unknown.

    steps_before: the steps of a resumed training that have ended before.
    """

    mesh: MeshLike = None
    model: ModelSpec | None = None
    training: Training | None = None
    steps_before: int | None = None


class LazyRecording:
    """A recording that begins in the running job: begin(), step() after each step, end().

    The constructor raises ValueError for invalid options; the methods never raise. It records once:
    a second training in the same process is not recorded.
    """

    def __init__(self, out: str | Path, **options: Unpack[Options]) -> None:
        # Resolve the folder now: the job may change its working directory later.
        self._out, self._options = Path(out).absolute(), options
        self._run: ProfiledRun | None = profile_run(self._out, **options)
        self._began = False

    def begin(self, read_spec: Callable[[], FrameworkSpec]) -> None:
        """Begins before the first step; `facts` reads the run's metadata from the framework."""
        if self._began:
            return
        self._began = True
        known = FrameworkSpec()
        with warn_on_failure(read_job()[0], "the framework's description of the run"):
            known = read_spec()
        with warn_on_failure(read_job()[0], "the recording"):
            options = self._options.copy()
            # What the user has stated goes before what the framework says.
            if options.get("mesh") is None:
                options["mesh"] = known.mesh
            options["model"] = _merge_specs(options.get("model"), known.model)
            options["training"] = _merge_specs(options.get("training"), known.training)
            self._run = profile_run(self._out, **options)
            self._run.start(known.steps_before)
            atexit.register(self.end, failed=True)

    def step(self, tokens: int | None = None, origin: str = "") -> None:
        """Marks the end of a training step, of so many tokens of this rank as origin counted."""
        if self._began and self._run is not None:
            self._run.step(tokens=tokens, origin=origin)

    @contextmanager
    def record_around(self, read_spec: Callable[[], FrameworkSpec]) -> Iterator[None]:
        """Records the training within the block: begin() before it, end() after it."""
        self.begin(read_spec)
        try:
            yield
        except BaseException:
            self.end(failed=True)
            raise
        self.end()

    def end(self, failed: bool = False) -> None:
        """Ends the recording; failed: the training failed, so do not wait for other ranks."""
        run, self._run = self._run, None
        atexit.unregister(self.end)
        if self._began and run is not None:
            run.stop(failed)


def _merge_specs(given: _Spec | None, known: _Spec | None) -> _Spec | None:
    """The fields given by the user; the others as known to the framework."""
    if given is None or known is None:
        return given or known
    return replace(known, **{k: v for k, v in asdict(given).items() if v is not None})


# Imports of the framework libraries.


def import_library(module: str, install: str) -> Any:
    """Imports the module. Raises ImportError with the pip command if it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # The library is installed but lacks a dependency: keep its own error.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        hint = f"pip install {install}"
        raise ImportError(f"{module} is not installed; run: {hint}") from None


# The shape of a model, from its config and its parameters.

_FFN = ("intermediate_size", "ffn_dim", "n_inner")
"""Names of the MLP width in transformers configs."""


def read_model_spec(model: Any) -> ModelSpec | None:
    """The shape of a torch module, also if it is wrapped; uncertain fields are None."""
    if model is None:
        return None
    inner = model
    # Out of DistributedDataParallel, an engine or torch.compile, each of which hides the config.
    while hasattr(
        wrapped := getattr(inner, "_orig_mod", getattr(inner, "module", None)), "parameters"
    ):
        inner = wrapped
    config = getattr(getattr(inner, "config", None), "get_text_config", lambda: None)()
    return ModelSpec(
        layers=_read_number(config, "num_hidden_layers"),
        hidden=_read_number(config, "hidden_size"),
        heads=_read_number(config, "num_attention_heads"),
        kv_heads=_read_number(config, "num_key_value_heads")
        or _read_number(config, "num_attention_heads"),
        ffn=next((ffn for name in _FFN if (ffn := _read_number(config, name))), None),
        gated=_is_gated(inner) if config is not None else None,
        vocab=_read_number(config, "vocab_size"),
        tied=getattr(config, "tie_word_embeddings", None),
        parameters=count_parameters(inner),
    )


def count_parameters(model: Any) -> int | None:
    """The parameter count of the whole model; None if a rank knows only its shard (FSDP1)."""
    tensors = list(model.parameters())
    if any(type(each).__name__ == "FlatParameter" for each in tensors):
        return None
    # ZeRO-3 keeps the full count on the empty parameter; a DTensor's numel is the full count.
    return sum(int(getattr(each, "ds_numel", each.numel())) for each in tensors)


def _is_gated(model: Any) -> bool | None:
    """Whether the MLPs have a gate projection, by module names; None if unknown."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if names & {"gate_proj", "gate_up_proj"}:
        return True
    return False if names & {"c_fc", "fc1", "dense_h_to_4h"} else None


def _read_number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


# Framework names converted to the names of run.json.

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float": "fp32", "no": "fp32"}

_OPTIMIZERS = ("adam", "sgd", "lion", "muon", "adafactor")


def normalize_dtype(name: object) -> str:
    """Converts torch.bfloat16, "bf16-mixed", "no", ... to bf16, fp32, ...; else the name itself."""
    plain = str(name).removeprefix("torch.").partition("-")[0]
    return _DTYPES.get(plain, {"16": "fp16", "32": "fp32"}.get(plain, plain))


def normalize_optimizer(name: object) -> str:
    """Converts adamw_torch_fused, AdamW, FusedAdam, ... to adam; else the name in lower case."""
    plain = str(getattr(name, "value", name)).lower()
    if "adam" in plain and "8bit" in plain:
        return "adam-8bit"
    return next((word for word in _OPTIMIZERS if word in plain), plain)


_ALL_STATES = "optimizer, parameters"


def read_zero_config(config: Mapping[str, Any]) -> tuple[int, str | None]:
    """The ZeRO stage and the states in host memory, from DeepSpeed's config; None for none."""
    zero = config.get("zero_optimization") or {}
    optimizer, parameters = (
        (zero.get(f"offload_{part}") or {}).get("device") for part in ("optimizer", "param")
    )
    return zero.get("stage", 0), describe_offload(optimizer, parameters)


def describe_offload(optimizer_device: Any, parameters_device: Any) -> str | None:
    """The states in host memory, given the devices that DeepSpeed moves them to."""
    devices = {"optimizer": optimizer_device, "parameters": parameters_device}
    return ", ".join(state for state, device in devices.items() if device == "cpu") or None


def describe_fsdp_offload(policy: Any) -> str | None:
    """The states in host memory under a policy of FSDP or fully_shard; None for none."""
    offloads = type(policy).__name__ == "CPUOffloadPolicy" or getattr(
        policy, "offload_params", False
    )
    return _ALL_STATES if offloads else None


def choose_data_axis(zero_stage: int) -> str:
    """The mesh axis of the data-parallel ranks: dp_shard with ZeRO-3, else dp_replicate."""
    return "dp_shard" if zero_stage == 3 else "dp_replicate"
