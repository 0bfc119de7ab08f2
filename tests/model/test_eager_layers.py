"""Layers of transformers that run operation by operation: what they save and move, counted as torch
runs them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from support.work_builders import TINY, UNIT, job

from stepsplit.analyzer import JobConfig
from stepsplit.analyzer.model.config import Experts, UnfusedPart
from stepsplit.analyzer.model.elementwise import (
    CLAMPED_MOVED,
    EAGER_RATE,
    EXPERT_BIASES_MOVED,
    UNFUSED_MOVED,
    ElementwiseTime,
    Moved,
    time_elementwise,
    time_routing,
)
from stepsplit.analyzer.model.layer_time import count_routed_tokens
from stepsplit.analyzer.model.memory_states import CLAMPED_SAVED, compute_layers_by_kind

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.in_turn("analyzer/model")]

TOKENS = 1536
"""Not a size of any weight."""

DENSE = replace(TINY, hidden=384, heads=6, kv_heads=2, head_size=64, ffn=640, gated=True, vocab=100)
NORMED = replace(DENSE, qk_norm=True)
ROUTED = replace(DENSE, experts=Experts(8, 2, 768))
PLAIN = replace(
    TINY, hidden=384, heads=6, kv_heads=6, head_size=64, ffn=640, vocab=100, norm="layer",
    positions=4096,
)  # fmt: skip
MODELS = {
    "llama": DENSE, "qwen3": NORMED, "mixtral": ROUTED,
    "gpt2": replace(PLAIN, activation="gelu_new"), "opt": replace(PLAIN, activation="relu"),
}  # fmt: skip
CONFIGS = {
    "llama": "LlamaConfig",
    "qwen3": "Qwen3Config",
    "mixtral": "MixtralConfig",
}

UNSEEN = {"detach", "view", "_unsafe_view", "t", "alias", "empty", "empty_like", "new_empty",
          "empty_strided", "as_strided", "_reshape_alias", "lift_fresh"}  # fmt: skip
"""Operations that move nothing, beside views."""


@dataclass(frozen=True)
class Layer:
    """Bytes of one layer and token."""

    saved: float
    forward: float
    backward: float


@dataclass
class Counter(TorchDispatchMode):  # type: ignore[misc]
    """Sums what operations other than GEMMs and attention read and write, except on weights."""

    weights: frozenset[tuple[int, ...]]
    moved: int = field(default=0)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        read = list_tensors(args)
        if name == "copy_":
            read = read[1:]
        written = list_tensors([made])
        moved = (*read, *written)
        is_still = func.is_view or name in UNSEEN or "mm" in name or "attention" in name
        if not is_still and not any(tuple(each.shape) in self.weights for each in moved):
            self.moved += sum(map(count_bytes, moved))
        return made


def list_tensors(values: Any) -> list[Any]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [each for value in values for each in list_tensors(value)]
    return []


def count_bytes(tensor: Any) -> int:
    """Of the elements that exist: an expanded dimension has one."""
    sizes = (
        1 if stride == 0 else size
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    count = 1
    for size in sizes:
        count *= size
    return count * int(tensor.element_size())


def build_transformer(name: str, layers: int) -> Any:
    transformers = pytest.importorskip("transformers")
    shape, torch_shape = MODELS[name], {}
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=shape.hidden, n_inner=shape.ffn, n_layer=layers, n_head=shape.heads,
            vocab_size=shape.vocab, n_positions=4096, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )  # fmt: skip
        return build_of(config)
    if name == "opt":
        config = transformers.OPTConfig(
            hidden_size=shape.hidden, ffn_dim=shape.ffn, num_hidden_layers=layers, dropout=0,
            num_attention_heads=shape.heads, word_embed_proj_dim=shape.hidden,
            vocab_size=shape.vocab, max_position_embeddings=4096, use_cache=False,
        )  # fmt: skip
        return build_of(config)
    if shape.experts is not None:
        torch_shape = {"num_local_experts": shape.experts.count,
                       "num_experts_per_tok": shape.experts.top_k}  # fmt: skip
    config = getattr(transformers, CONFIGS[name])(
        num_hidden_layers=layers, hidden_size=shape.hidden, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_size, vocab_size=shape.vocab,
        intermediate_size=shape.experts.ffn if shape.experts else shape.ffn, use_cache=False,
        max_position_embeddings=4096, **torch_shape,
    )  # fmt: skip
    return build_of(config)


def build_of(config: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def count_model(name: str, layers: int, precision: str) -> Layer:
    """Bytes of all layers and what is outside of them, per token."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = build_transformer(name, layers).to(dtype).train()
    ids = torch.randint(0, 100, (1, TOKENS))
    is_cast = precision == "autocast"
    return count_step(model, ids, torch.autocast("cpu") if is_cast else nullcontext())


def count_step(model: Any, ids: Any, precision: AbstractContextManager[Any]) -> Layer:
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    shapes = {tuple(each.shape) for each in model.parameters() if each.dim() > 1}
    weights = frozenset(shapes | {shape[::-1] for shape in shapes})
    saved: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        if tuple(tensor.shape) not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    forward, backward = Counter(weights), Counter(weights)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with precision, hooks, forward:
        result = model(input_ids=ids).logits.sum()
    kept = sum(each.untyped_storage().nbytes() for key, each in saved.items() if key not in own)
    with backward:
        result.backward()
    return Layer(kept / TOKENS, forward.moved / TOKENS, backward.moved / TOKENS)


def count_layer(name: str, precision: str) -> Layer:
    """Bytes of a layer: of a model with three over one with two."""
    two, three = (count_model(name, layers, precision) for layers in (2, 3))
    return Layer(
        three.saved - two.saved, three.forward - two.forward, three.backward - two.backward
    )


def build(name: str, precision: str) -> JobConfig:
    return job(
        MODELS[name], framework="huggingface", seq_len=TOKENS, master_weights=precision != "bf16",
        dtype="fp32" if precision == "fp32" else "bf16",
        activation_dtype="fp32" if precision == "fp32" else "bf16",
    )  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "opt"])
def test_a_layer_without_autocast_saves_what_torch_does(name: str, precision: str) -> None:
    one, found = build(name, precision), count_layer(name, precision)
    saved_bytes = compute_layers_by_kind(one).dense.total_bytes
    assert saved_bytes / TOKENS == pytest.approx(found.saved, rel=0.01)


@pytest.mark.parametrize("precision", ["autocast", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_a_layer_saves_and_moves_what_torch_does(name: str, precision: str) -> None:
    """The constants are whole numbers of bytes; what they leave out is less than 2 %."""
    one, found = build(name, precision), count_layer(name, precision)
    layers, experts = compute_layers_by_kind(one), one.model.experts
    layer = layers.expert or layers.dense
    assert layer.total_bytes / TOKENS == pytest.approx(found.saved, rel=0.01)

    if experts is None:
        moved = time_elementwise(one, UNIT, TOKENS * one.model.ffn)
        routing = ElementwiseTime(0.0, 0.0)
    else:
        routed = count_routed_tokens(one, experts)
        moved = time_elementwise(one, UNIT, 0.0, routed * experts.ffn)
        routing = time_routing(one, UNIT, routed)
    forward, backward = (
        (moved.forward_ns + routing.forward_ns) * EAGER_RATE / TOKENS,
        (moved.backward_ns + routing.backward_ns) * EAGER_RATE / TOKENS,
    )
    assert forward == pytest.approx(found.forward, rel=0.02)
    assert backward == pytest.approx(found.backward, rel=0.02)


def build_parts() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The operations of each part in 16 bits, and their inputs of one size each."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)

    angles = torch.randn(1, TOKENS, 64, dtype=torch.bfloat16)
    rotate = partial(apply_rotary_pos_emb, cos=angles, sin=angles)
    mask = torch.zeros(TOKENS, TOKENS, dtype=torch.bfloat16)
    return {
        "norms": (LlamaRMSNorm(384).bfloat16(), (draw(1, TOKENS, 384),)),
        "rotary": (rotate, (draw(1, 6, TOKENS, 64), draw(1, 6, TOKENS, 64))),
        "activation": (
            lambda gate, up: torch.nn.functional.silu(gate) * up,
            (draw(TOKENS, 384), draw(TOKENS, 384)),
        ),
        "softmax": (
            lambda scores: torch.softmax((scores * 0.125 + mask).float(), -1).bfloat16(),
            (draw(2, TOKENS, TOKENS),),
        ),
    }


@pytest.mark.parametrize("part", UNFUSED_MOVED)
def test_an_unfused_part_moves_what_torch_does(part: UnfusedPart) -> None:
    run, inputs = build_parts()[part]
    check_moved(run, inputs, UNFUSED_MOVED[part])


def check_moved(run: Any, inputs: tuple[Any, ...], moved: Moved) -> None:
    """What an element of the result moves, forward and backward."""
    forward, backward = Counter(frozenset()), Counter(frozenset())
    with forward:
        made = list_tensors(run(*inputs))
    gradients = [torch.ones_like(each) for each in made]
    with backward:
        torch.autograd.backward(made, gradients)
    elements = sum(each.numel() for each in made)
    assert forward.moved / elements == pytest.approx(moved.forward, rel=0.04)
    assert backward.moved / elements == pytest.approx(moved.backward, rel=0.04)


def count_saved(run: Any, inputs: tuple[Any, ...]) -> float:
    """Bytes per element of the result that its backward keeps beside the inputs."""
    kept = dict[int, int]()

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        (made,) = list_tensors(run(*inputs))
    for each in inputs:
        kept.pop(each.untyped_storage().data_ptr(), None)
    return float(sum(kept.values()) / made.numel())


def run_clamped_swiglu(both: Any, weight: Any) -> Any:
    """gpt-oss's activation of an expert, weighted by the router."""
    gate, up = both.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    activated = gate * torch.sigmoid(gate * 1.702) * (up + 1)
    return (activated * weight).to(both.dtype)


def add_expert_biases(results: Any, biases: Any, weight: Any) -> Any:
    """Biases of each expert, weighted by the router."""
    each = zip(results.chunk(4), biases, weight.chunk(4), strict=True)
    return torch.cat([one + bias * share for one, bias, share in each]).to(results.dtype)


def test_clamped_swiglu_and_biases_of_experts_move_what_torch_does() -> None:
    both = torch.randn(TOKENS, 2 * 512, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.rand(TOKENS, 1, requires_grad=True)
    check_moved(run_clamped_swiglu, (both, weight), CLAMPED_MOVED)
    assert count_saved(run_clamped_swiglu, (both, weight)) == pytest.approx(CLAMPED_SAVED, rel=0.01)
    results = torch.randn(TOKENS, 512, dtype=torch.bfloat16, requires_grad=True)
    biases = [torch.zeros(512, dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]
    check_moved(add_expert_biases, (results, biases, weight), EXPERT_BIASES_MOVED)
