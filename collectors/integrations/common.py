"""What the integrations share: options, calls of library methods, model facts."""

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

# What every integration lets its user choose: the options of profile_run, all of them optional.


class Options(TypedDict, total=False):
    """As profile_run's. What model and training leave open is filled in by the framework."""

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


# A recording that begins within a framework's loop, where the job is known and not before.

_Spec = TypeVar("_Spec", ModelSpec, Training)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a framework knows of its own run; None is unknown."""

    mesh: MeshLike = None
    model: ModelSpec | None = None
    training: Training | None = None


class LateRun:
    """One recording: begin() in the running job, step() after each step, end().

    Raises ValueError at once for options that make no recording; after that it raises nothing. It
    records once: what trains again in the same process is left alone.
    """

    def __init__(self, out: str | Path, **options: Unpack[Options]) -> None:
        # Where the job changes its folder meanwhile, the files still go where the user meant.
        self._out, self._options = Path(out).absolute(), options
        self._run: ProfiledRun | None = profile_run(self._out, **options)
        self._began = False

    def begin(self, facts: Callable[[], Facts]) -> None:
        """Begins before the first step, with what the framework knows now."""
        if self._began:
            return
        self._began = True
        known = Facts()
        with guarded(job()[0], "what its framework knows of the run"):
            known = facts()
        with guarded(job()[0], "the recording"):
            self._run = profile_run(self._out, **_filled(self._options, known))
            self._run.start()
            atexit.register(self.end, failed=True)

    def step(self) -> None:
        """Ends a training step."""
        if self._began and self._run is not None:
            self._run.step()

    @contextmanager
    def around(self, facts: Callable[[], Facts]) -> Iterator[None]:
        """begin() and end() around what trains within."""
        self.begin(facts)
        try:
            yield
        except BaseException:
            self.end(failed=True)
            raise
        self.end()

    def end(self, failed: bool = False) -> None:
        """Ends the recording; failed: the training did, and no rank waits for another."""
        run, self._run = self._run, None
        atexit.unregister(self.end)
        if self._began and run is not None:
            run.stop(failed)


def _filled(options: Options, facts: Facts) -> Options:
    """The options, with what they leave open as the framework knows it."""
    filled = options.copy()
    if filled.get("mesh") is None:
        filled["mesh"] = facts.mesh
    filled["model"] = _merged(options.get("model"), facts.model)
    filled["training"] = _merged(options.get("training"), facts.training)
    return filled


def _merged(stated: _Spec | None, known: _Spec | None) -> _Spec | None:
    """The fields that the user stated, and for the others those that are known."""
    if stated is None or known is None:
        return stated or known
    return replace(known, **{k: v for k, v in asdict(stated).items() if v is not None})


# The library that an integration is for: imported when used, and named where it is absent.


def library(module: str, install: str) -> Any:
    """The module of that name. Raises ImportError on one line, with the command that fixes it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # A library that is there but lacks something itself says so best.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        hint = f"pip install {install}"
        raise ImportError(f"{module} is not installed, and this records it: {hint}") from None


# The shape of a model, as far as its configuration and its parameters tell.

_FFN = ("intermediate_size", "ffn_dim", "n_inner")
"""What the configurations of transformers call the width of the MLP."""


def model_spec(model: Any) -> ModelSpec | None:
    """The shape of a torch module, whoever wraps it; None of none. Only what is beyond doubt."""
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
    """How many the whole model has; None where a rank holds a part of them and can't tell."""
    held = list(model.parameters())
    if any(type(each).__name__ == "FlatParameter" for each in held):
        return None
    # ZeRO-3 leaves the whole's count on the empty shell; a DTensor's own count is the whole's.
    return sum(int(getattr(each, "ds_numel", each.numel())) for each in held)


def _unwrapped(model: Any) -> Any:
    """The module below DistributedDataParallel, an engine or a compiler."""
    while True:
        below = getattr(model, "_orig_mod", getattr(model, "module", None))
        if below is None or not hasattr(below, "parameters"):
            return model
        model = below


def _gated(model: Any) -> bool | None:
    """Whether its MLPs have a gate beside their first matrix; None where no name tells."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if names & {"gate_proj", "gate_up_proj"}:
        return True
    return False if names & {"c_fc", "fc1", "dense_h_to_4h"} else None


def _number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


# The words of run.json for what frameworks call otherwise.

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float": "fp32", "no": "fp32"}

_OPTIMIZERS = ("adam", "sgd", "lion", "muon", "adafactor")


def dtype_word(name: object) -> str:
    """fp32, bf16, fp16 or fp8 for torch.bfloat16, "bf16-mixed", "no", ...; else the name itself."""
    plain = str(name).removeprefix("torch.").partition("-")[0]
    return _DTYPES.get(plain, {"16": "fp16", "32": "fp32"}.get(plain, plain))


def optimizer_word(name: object) -> str:
    """adam for adamw_torch_fused, AdamW, FusedAdam, ...; else the name in lower case."""
    plain = str(getattr(name, "value", name)).lower()
    if "adam" in plain and "8bit" in plain:
        return "adam-8bit"
    return next((word for word in _OPTIMIZERS if word in plain), plain)


def data_axis(zero_stage: int) -> str:
    """The axis of the ranks that read different data: under ZeRO-3 they shard the model."""
    return "dp_shard" if zero_stage == 3 else "dp_replicate"
