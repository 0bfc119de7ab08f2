"""Shared code of the integrations: options, lazy recording, library imports, model shape."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from stepsplit.collectors.guard import guarded
from stepsplit.collectors.job_info import job
from stepsplit.collectors.profiler import MeshLike, ProfiledRun, profile_run
from stepsplit.collectors.run_spec import ModelSpec, Training

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


# A recording that begins within a framework's training loop.

_Spec = TypeVar("_Spec", ModelSpec, Training)


@dataclass(frozen=True, slots=True)
class Facts:
    """Mesh, model and training setup as reported by the framework; None means unknown."""

    mesh: MeshLike = None
    model: ModelSpec | None = None
    training: Training | None = None


class LateRun:
    """A recording that begins in the running job: begin(), step() after each step, end().

    The constructor raises ValueError for invalid options; the methods never raise. It records once:
    a second training in the same process is not recorded.
    """

    def __init__(self, out: str | Path, **options: Unpack[Options]) -> None:
        # Resolve the folder now: the job may change its working directory later.
        self._out, self._options = Path(out).absolute(), options
        self._run: ProfiledRun | None = profile_run(self._out, **options)
        self._began = False

    def begin(self, facts: Callable[[], Facts]) -> None:
        """Begins before the first step; `facts` reads the run's metadata from the framework."""
        if self._began:
            return
        self._began = True
        known = Facts()
        with guarded(job()[0], "the framework's description of the run"):
            known = facts()
        with guarded(job()[0], "the recording"):
            self._run = profile_run(self._out, **_filled(self._options, known))
            self._run.start()
            atexit.register(self.end, failed=True)

    def step(self) -> None:
        """Marks the end of a training step."""
        if self._began and self._run is not None:
            self._run.step()

    @contextmanager
    def around(self, facts: Callable[[], Facts]) -> Iterator[None]:
        """Records the training within the block: begin() before it, end() after it."""
        self.begin(facts)
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


def _filled(options: Options, facts: Facts) -> Options:
    """The options, with missing fields filled in from the framework."""
    filled = options.copy()
    if filled.get("mesh") is None:
        filled["mesh"] = facts.mesh
    filled["model"] = _merged(options.get("model"), facts.model)
    filled["training"] = _merged(options.get("training"), facts.training)
    return filled


def _merged(stated: _Spec | None, known: _Spec | None) -> _Spec | None:
    """The fields given by the user; the others as known to the framework."""
    if stated is None or known is None:
        return stated or known
    return replace(known, **{k: v for k, v in asdict(stated).items() if v is not None})


# Imports of the framework libraries.


def library(module: str, install: str) -> Any:
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


def model_spec(model: Any) -> ModelSpec | None:
    """The shape of a torch module, also if it is wrapped; uncertain fields are None."""
    if model is None:
        return None
    inner = _unwrapped(model)
    config = getattr(getattr(inner, "config", None), "get_text_config", lambda: None)()
    return ModelSpec(
        layers=_number(config, "num_hidden_layers"),
        hidden=_number(config, "hidden_size"),
        heads=_number(config, "num_attention_heads"),
        kv_heads=_number(config, "num_key_value_heads") or _number(config, "num_attention_heads"),
        ffn=next((ffn for name in _FFN if (ffn := _number(config, name))), None),
        gated=_gated(inner) if config is not None else None,
        vocab=_number(config, "vocab_size"),
        tied=getattr(config, "tie_word_embeddings", None),
        parameters=parameters(inner),
    )


def parameters(model: Any) -> int | None:
    """The parameter count of the whole model; None if a rank knows only its shard (FSDP1)."""
    held = list(model.parameters())
    if any(type(each).__name__ == "FlatParameter" for each in held):
        return None
    # ZeRO-3 keeps the full count on the empty parameter; a DTensor's numel is the full count.
    return sum(int(getattr(each, "ds_numel", each.numel())) for each in held)


def _unwrapped(model: Any) -> Any:
    """The module inside DistributedDataParallel, an engine or torch.compile."""
    while True:
        below = getattr(model, "_orig_mod", getattr(model, "module", None))
        if below is None or not hasattr(below, "parameters"):
            return model
        model = below


def _gated(model: Any) -> bool | None:
    """Whether the MLPs have a gate projection, by module names; None if unknown."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if names & {"gate_proj", "gate_up_proj"}:
        return True
    return False if names & {"c_fc", "fc1", "dense_h_to_4h"} else None


def _number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


# Framework names converted to the names of run.json.

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float": "fp32", "no": "fp32"}

_OPTIMIZERS = ("adam", "sgd", "lion", "muon", "adafactor")


def dtype_word(name: object) -> str:
    """Converts torch.bfloat16, "bf16-mixed", "no", ... to bf16, fp32, ...; else the name itself."""
    plain = str(name).removeprefix("torch.").partition("-")[0]
    return _DTYPES.get(plain, {"16": "fp16", "32": "fp32"}.get(plain, plain))


def optimizer_word(name: object) -> str:
    """Converts adamw_torch_fused, AdamW, FusedAdam, ... to adam; else the name in lower case."""
    plain = str(getattr(name, "value", name)).lower()
    if "adam" in plain and "8bit" in plain:
        return "adam-8bit"
    return next((word for word in _OPTIMIZERS if word in plain), plain)


def data_axis(zero_stage: int) -> str:
    """The mesh axis of the data-parallel ranks: dp_shard with ZeRO-3, else dp_replicate."""
    return "dp_shard" if zero_stage == 3 else "dp_replicate"
