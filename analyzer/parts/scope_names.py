"""What a range on the host says of the model, by its name: modules, annotations and ops.

Frameworks name modules alike: a table of words covers Megatron-LM, torchtitan, transformers,
Lightning, timm and nanoGPT. The most specific word comes first, as the attention norm of a layer is
a norm.
"""

from __future__ import annotations

import re
from functools import lru_cache

from msgspec import Struct

from stepsplit.analyzer.parts.part import NO_LAYER, PartKind, PartPhase
from stepsplit.analyzer.trace import MODULE_MARK, PYTHON_FUNCTION


class ScopeName(Struct, frozen=True):
    """What a name says; layer is a number that the name has.

    Attributes:
        kind: The kind of part; None if the name says none.
        layer: The layer, as the name numbers it; NO_LAYER without one.
        layer_class: The class of modules that may be layers ("Block"); "" for others.
        is_module: Whether it is a module of the model, or has a module's path.
        is_linear: Whether it is a module that multiplies by one matrix.
        is_op: Whether it is an op, which says less than what it runs in.
        is_alone: Whether the ranges around it say nothing of it: FSDP gathers weights of other
            modules than the one that runs.
        phase: The pass that an annotation says; None if it says none.
    """

    kind: PartKind | None = None
    layer: int = NO_LAYER
    layer_class: str = ""
    is_module: bool = False
    is_linear: bool = False
    is_op: bool = False
    is_alone: bool = False
    phase: PartPhase | None = None


_MODULE = re.compile(r"nn\.Module: (?P<name>\w+?)(?:_(?P<number>\d+))?$")
"""The profiler's events of modules with stacks: the class, and its number by first call."""

_LIGHTNING = re.compile(r"\[pl\]\[module\][\w.]+: (?P<path>\S+)")

_FSDP = re.compile(r"FSDP::(?P<what>\w+)(?: \((?P<path>[^)]*)\))?")
"""FSDP2's ranges, which name the module whose weights move."""

_NUMBERED = re.compile(
    r"(?:^|[.\[/])(?:\w*layers?|blocks?|h|resblocks|cells)[.\[/](?P<number>\d{1,5})(?=$|[.\]/])"
)
"""A layer in the path of a module: layers.3, transformer.h.0, blocks[2]."""

_KIND_OF_WORD = (
    (PartKind.ROUTER, r"router|gating|moe_?gate|top_?k_?(router|gate)"),
    (PartKind.NORM, r"norm(?!al)|(?<![a-z0-9])ln(_?[\dfq]|$|_)|rms(?=_|n|$)"),
    (PartKind.LOSS, r"loss|cross_?entropy|criterion"),
    (PartKind.EXPERTS, r"expert|(?<![a-z])moe|moe(?=_|$|block|layer|mlp)|megablocks"),
    (PartKind.ATTENTION, r"att(entio)?n|(?<![a-z])(mha|mla|sdpa|gqa)(?![a-z])|mixer|mamba"),
    (PartKind.EMBEDDING, r"embed|(?<![a-z])(wte|wpe|wtt|rope|rotary)"),
    (
        PartKind.MLP,
        r"mlp|feed_?forward|(?<![a-z])(ffn?|ffw)(?![a-z])|sw(i_?)?glu|geglu|intermediate|[a-z]_output$",
    ),
    (PartKind.HEAD, r"lm_?head|unembed|output_layer|final_proj|classifier|(?<![a-z])head$|^score$"),
)
_KINDS = tuple((kind, re.compile(pattern)) for kind, pattern in _KIND_OF_WORD)

_LAYER_CLASS = re.compile(r"(layer|block|bottleneck)(v?\d+)?$")
_NO_LAYER_CLASS = re.compile(r"conv|list|embedding|output|pool|dropout")

_WHOLE_MODEL = re.compile(r"model$|_for_")
"""Classes of whole models, whatever else their names say: GPT2LMHeadModel."""

_OPTIMIZER = re.compile(
    r"^Optimizer\.|optimizer|clip_grad|grad_?(norm|clip)|unscale_|GradScaler|lr_scheduler", re.I
)
_PHASES = (
    (PartPhase.RECOMPUTE, re.compile(r"(?<!no)(?<!no[ _-])recompute", re.I)),
    (
        PartPhase.BACKWARD,
        re.compile(r"\([BW]\)$|(?i:backward)|(?<![A-Za-z])(?i:bwd|[dw]grad)(?![a-z])|Bwd"),
    ),
)
"""The pass of an annotation: words, or the letters of zero-bubble schedules, of which W computes
gradients of weights."""

_FORWARD = re.compile(r"\(F\)$|forward|fwd", re.I)

_IN_PYTHON = re.compile(r"^(?:\w*loss\w*|cross_entropy|clip_grad_\w+|get_grad_norm\w*)$", re.I)
"""Python functions that count: losses and the clipping of gradients; others only name files."""

_OP_KINDS = (
    (PartKind.LOSS, r"aten::(cross_entropy_loss|nll_loss|_?log_softmax|kl_div|mse_loss)"),
    (PartKind.EMBEDDING, r"aten::embedding"),
    (
        PartKind.ATTENTION,
        r"aten::(_?scaled_dot_product|_flash_attention|_efficient_attention|_native_multi_head)"
        r"|flash_attn|flash_attention|flex_attention|memory_efficient_attention",
    ),
    (PartKind.NORM, r"aten::(native_)?(layer|group|batch|rms)_norm|aten::_fused_rms_norm"),
    (PartKind.EXPERTS, r"grouped_mm|grouped_gemm|permute_tokens|moe_"),
    (
        PartKind.OPTIMIZER,
        r"aten::(_foreach_(norm|addcdiv|lerp|addcmul|sqrt|clamp_max)|_fused_(adam|sgd|adagrad)"
        r"|linalg_vector_norm|_amp_)",
    ),
)
_OPS = tuple((kind, re.compile(pattern)) for kind, pattern in _OP_KINDS)

_NODE_KINDS = (
    (PartKind.LOSS, re.compile(r"NllLoss|LogSoftmax|CrossEntropy")),
    (PartKind.EMBEDDING, re.compile(r"EmbeddingBackward|EmbeddingDense")),
    (PartKind.ATTENTION, re.compile(r"Attention|DotProduct|FlashAttn")),
    (PartKind.NORM, re.compile(r"(Layer|Rms|RMS|Batch|Group)_?Norm")),
)


@lru_cache(1 << 16)
def parse_range_name(name: str) -> ScopeName | None:
    """What the name of a module's range, of an annotation or of a Python function says; None if
    nothing."""
    if (module := _MODULE.match(name)) is not None:
        return _parse_class(module["name"], int((module["number"] or "0")[-6:]))
    if name.startswith(MODULE_MARK):
        return _parse_path(name.removeprefix(MODULE_MARK))
    if (lightning := _LIGHTNING.match(name)) is not None:
        return _parse_path(lightning["path"])
    if (fsdp := _FSDP.match(name)) is not None:
        # One range may be of several modules: "norm, head".
        path = fsdp["path"] or ""
        scope = ScopeName() if "," in path else _parse_path(path)
        is_reduction = "reduce" in fsdp["what"]
        kind = PartKind.GRADIENT_REDUCTION if is_reduction else scope.kind
        return ScopeName(kind, scope.layer, is_alone=True)
    function = PYTHON_FUNCTION.match(name)
    if function is not None:
        if _IN_PYTHON.match(function["function"]) is None:
            return None
        is_loss = _OPTIMIZER.search(function["function"]) is None
        return ScopeName(PartKind.LOSS if is_loss else PartKind.OPTIMIZER)
    if name.startswith(("ProfilerStep#", "<")):
        # <built-in method _sequence_nr of MmBackward0 object at 0x7f26>: a call is not what it is
        # about, and ops that it runs have names of their own.
        return None
    if _OPTIMIZER.search(name):
        return ScopeName(PartKind.OPTIMIZER)
    scope = _parse_path(name)
    if scope.kind is None and scope.layer == NO_LAYER:
        return None
    phase = None
    if not _FORWARD.search(name):
        phase = next((phase for phase, pattern in _PHASES if pattern.search(name)), None)
    return ScopeName(scope.kind, scope.layer, phase=phase)


@lru_cache(1 << 16)
def parse_op_kind(name: str) -> PartKind | None:
    """The kind of part that an op says by its name alone; None for most."""
    return _find_kind(_OPS, name)


INDUCTOR = ("triton_", "cpp_fused_")
"""Prefixes of the kernels of torch.compile, which name the ops that are fused in them."""

_FUSED_KINDS = (
    # Elementwise ops of other parts are fused with the sums of these.
    (PartKind.LOSS, re.compile(r"log_softmax|cross_entropy")),
    (
        PartKind.EMBEDDING,
        re.compile(r"embedding_dense_backward|fused_(_to_copy_)?embedding(_\d|$)"),
    ),
    (PartKind.ATTENTION, re.compile(r"scaled_dot_product|flash_attn|flash_attention|flex_att")),
    (PartKind.NORM, re.compile(r"rms_norm|layer_norm|group_norm|batch_norm|rsqrt|var_mean")),
    (PartKind.OPTIMIZER, re.compile(r"_foreach_|addcdiv|linalg_vector_norm")),
    (PartKind.MLP, re.compile(r"silu|gelu|relu")),
)


@lru_cache(1 << 14)
def find_fused_kind(kernel: str) -> PartKind | None:
    """The kind of part that a kernel of torch.compile does by the ops that it fuses, of several the
    one that decides its shape; None for others."""
    return _find_kind(_FUSED_KINDS, kernel) if kernel.startswith(INDUCTOR) else None


_SAID_KINDS = (
    (PartKind.ATTENTION, re.compile(r"qkv|attn|attention|(?<![a-z])out_?proj", re.IGNORECASE)),
    (
        PartKind.MLP,
        re.compile(
            r"mlp|ffn|(?<![a-z])fc_?\d|(silu|gelu|relu)_(and_)?mul|swiglu|geglu", re.IGNORECASE
        ),
    ),
)
"""Kernels that were written for a part, such as the gated activations of vLLM and Liger."""


@lru_cache(1 << 14)
def find_said_kind(kernel: str) -> PartKind | None:
    """The kind of part that a kernel says by its own name; None for most."""
    return _find_kind(_SAID_KINDS, kernel)


@lru_cache(1 << 16)
def parse_node_kind(name: str) -> PartKind | None:
    """The kind of part that a node of autograd says by its name alone."""
    return _find_kind(_NODE_KINDS, name)


def _find_kind(table: tuple[tuple[PartKind, re.Pattern[str]], ...], name: str) -> PartKind | None:
    return next((kind for kind, pattern in table if pattern.search(name)), None)


_WORD_BEGIN = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def _split_words(name: str) -> str:
    """The words of a name in lower case with _ between them; MoE is one word, ViT is two."""
    return _WORD_BEGIN.sub("_", name.replace("MoE", "Moe")).lower()


def _parse_class(name: str, number: int) -> ScopeName:
    lowered = _split_words(name)
    kind = None if _WHOLE_MODEL.search(lowered) else _find_kind(_KINDS, lowered)
    is_layer = kind is None and _LAYER_CLASS.search(lowered) and not _NO_LAYER_CLASS.search(lowered)
    return ScopeName(
        kind=kind,
        layer=number if is_layer else NO_LAYER,
        layer_class=name if is_layer else "",
        is_module=True,
        is_linear="linear" in lowered,
    )


def _parse_path(path: str) -> ScopeName:
    """The scope of a module's path such as "model.layers.3.self_attn.q_proj"; the first component
    with a kind decides, and within an MLP its experts and router."""
    numbered = _NUMBERED.search(path)
    within = path[numbered.end() :] if numbered else path
    kind: PartKind | None = None
    for component in re.split(r"[.\[\]/ ]+", within):
        lowered = _split_words(component)
        found = _find_kind(_KINDS, lowered)
        if lowered == "gate" and kind in (PartKind.MLP, PartKind.EXPERTS):
            found = PartKind.ROUTER
        if lowered == "output" and numbered is None:
            found = PartKind.HEAD
        kind = nest_kind(kind, found)
    layer = int(numbered["number"]) if numbered else NO_LAYER
    return ScopeName(kind, layer, is_module=True)


_WITHIN = {
    PartKind.MLP: (PartKind.EXPERTS, PartKind.ROUTER),
    PartKind.EXPERTS: (PartKind.ROUTER,),
}


def nest_kind(outer: PartKind | None, inner: PartKind | None) -> PartKind | None:
    """The kind of what is of one kind inside another: the outer one, as a norm of queries belongs
    to attention, except for the parts of a mixture of experts."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    return inner if inner in _WITHIN.get(outer, ()) else outer
