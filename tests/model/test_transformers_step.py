"""Steps of transformers on a GPU: bandwidth of its kernels, DDP's buckets, torch.compile."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from support.work_builders import TINY, job

from stepsplit.analyzer import JobConfig, predict
from stepsplit.analyzer.model.config import Framework
from stepsplit.analyzer.model.device_speed import compute_device_speed
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.host_time import compute_layer_host_ns
from stepsplit.analyzer.model.memory_states import compute_layers_by_kind
from stepsplit.analyzer.model.model_table import load_model

MEASURED_BYTES_PER_NS = 2723
"""Of torch's AdamW on an H100: 80 bytes of each of 1.92B parameters in 56.4 ms."""


def on(device: str, framework: Framework = "huggingface", **training: Any) -> JobConfig:
    """A Llama on one device."""
    one = job(load_model("llama-3-8b"), framework=framework, fused_optimizer=False, **training)
    return replace(one, hardware=load_hardware(device))


def read_bandwidth(one: JobConfig) -> float:
    """Bytes per ns of its memory-bound kernels."""
    return 1e6 / compute_device_speed(one).compute_memory_ns(1e6)


def test_the_more_bandwidth_a_multiprocessor_has_the_smaller_share_it_reaches() -> None:
    h100, h200 = (read_bandwidth(on(device)) for device in ("h100-sxm", "h200-sxm"))
    assert h100 == pytest.approx(MEASURED_BYTES_PER_NS, rel=0.01)
    assert h200 == pytest.approx(0.75 * 4800, rel=0.01)


@pytest.mark.parametrize(
    "one",
    [on("h100-sxm", compile=True), on("h100-sxm", "megatron"), on("a100-sxm-80gb")],
    ids=["compiled", "megatron", "a100"],
)
def test_other_kernels_and_devices_reach_the_share_of_the_family(one: JobConfig) -> None:
    hardware = one.hardware
    share = hardware.memory_bytes_per_s / 1e9 * hardware.efficiency.memory
    assert read_bandwidth(one) == pytest.approx(share)


def test_a_stated_share_is_the_one_that_is_reached() -> None:
    h100 = on("h100-sxm")
    stated = replace(h100.hardware, efficiency=replace(h100.hardware.efficiency, memory=0.5))
    assert read_bandwidth(replace(h100, hardware=stated)) == pytest.approx(0.5 * 3350)


def test_a_model_in_ddp_runs_its_kernels_and_copies_gradients_to_buckets_and_back() -> None:
    plain, wrapped = (on("h100-sxm", framework) for framework in ("huggingface", "ddp"))
    added_ns = predict(wrapped).split.compute_ns - predict(plain).split.compute_ns
    parameters = predict(plain).parameters
    assert added_ns == pytest.approx(4 * 4 * parameters / read_bandwidth(plain), rel=0.03)


def test_compiled_kernels_are_launched_faster() -> None:
    eager, compiled = (
        compute_layer_host_ns(on("h100-sxm", compile=is_compiled)) for is_compiled in (False, True)
    )
    assert (eager, compiled) == (74 * 13_480, 30 * 13_480)


# What a compiled model keeps of each layer, as torch allocates it on a CPU.

COMPILED = """
import json, sys
import torch, transformers
from torch.profiler import ProfilerActivity, profile

torch.manual_seed(0)
shape = json.loads(sys.argv[1])
config = transformers.LlamaConfig(**shape, tie_word_embeddings=False, use_cache=False)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
if sys.argv[2] == "bfloat16":
    model = model.bfloat16()
model.compile()
tokens = torch.randint(0, shape["vocab_size"], (2, 256))

def forward():
    with torch.autocast("cpu", torch.bfloat16, enabled=sys.argv[2] == "float32"):
        return model(input_ids=tokens, labels=tokens).loss

forward().backward()
model.zero_grad()
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
    loss = forward()
print(sum(event.self_cpu_memory_usage for event in profiler.events()))
"""

DENSE = replace(TINY, hidden=256, heads=4, kv_heads=1, head_size=64, ffn=704, gated=True, vocab=512)


def measure_layer_bytes(dtype: str) -> float:
    """Bytes that are allocated between forward and backward for each token of a layer."""
    kept = []
    for layers in (1, 2):
        shape = {
            "hidden_size": DENSE.hidden,
            "intermediate_size": DENSE.ffn,
            "num_attention_heads": DENSE.heads,
            "num_key_value_heads": DENSE.kv_heads,
            "num_hidden_layers": layers,
            "vocab_size": DENSE.vocab,
        }
        command = [sys.executable, "-c", COMPILED, json.dumps(shape), dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        kept.append(int(done.stdout.split()[-1]))
    return (kept[1] - kept[0]) / 512


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/model/memory_states.py", "analyzer/model/presets/frameworks.toml")
@pytest.mark.parametrize(("dtype", "is_autocast"), [("float32", True), ("bfloat16", False)])
def test_a_compiled_layer_keeps_what_torch_allocates(dtype: str, is_autocast: bool) -> None:
    pytest.importorskip("transformers")
    one = job(DENSE, framework="huggingface", compile=True, master_weights=is_autocast)
    kept = compute_layers_by_kind(one).dense.total_bytes / one.tokens
    weights = 256 * (2 * 256 + 2 * 64 + 3 * 704) if is_autocast else 0
    measured = measure_layer_bytes(dtype) - 2 * weights / 512
    assert kept == pytest.approx(measured, rel=0.07)
