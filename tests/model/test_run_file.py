from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.model.config import (
    Experts,
    HardwareConfig,
    JobConfig,
    LatentAttention,
    Link,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
)
from stepsplit.analyzer.model.config_decode import TomlTable, collect_kinds
from stepsplit.analyzer.model.config_file import (
    decode_job,
    decode_job_to_plan,
    parse_job,
    read_job,
    read_tables,
)
from stepsplit.analyzer.model.hardware_config import (
    HARDWARE_KEYS,
    load_efficiency,
    load_hardware,
    load_link,
)
from stepsplit.analyzer.model.layout_table import PARALLEL_KEYS
from stepsplit.analyzer.model.memory import compute_memory, compute_peak_bytes
from stepsplit.analyzer.model.model_table import MODEL_KEYS, load_model
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.training_table import TRAINING_KEYS

LLAMA = {"preset": "llama-3.1-8b"}
SMALL = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 1000}
TRAINING = {"seq_len": 4096, "micro_batch": 1, "global_batch": 64}
H100 = {"preset": "h100-sxm"}


def run(
    model: dict[str, Any] = LLAMA,
    parallel: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    device: dict[str, Any] = H100,
) -> JobConfig:
    """The job of TRAINING with the keys given, on any device."""
    tables = {
        "model": model,
        "parallel": parallel or {},
        "training": TRAINING | (training or {}),
        "hardware": device,
    }
    return decode_job(TomlTable("job.toml", "", tables))


def refusal(**tables: Any) -> str:
    with pytest.raises(DataError) as error:
        run(**tables)
    return str(error.value)


def test_a_job_file_has_model_layout_training_and_hardware(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("""
[model]
preset = "llama-3.1-70b"

[parallel]
tp = 8
pp = 4
dp = 2
rank_order = "tp-cp-ep-dp-pp"
sequence_parallel = true
zero = 1
schedule = "interleaved"
chunks = 5
overlap = ["dp", "pp"]
world_size = 64

[training]
seq_len = 8192
micro_batch = 1
global_batch = 128
dtype = "bf16"
optimizer = "adam"
recompute = "selective"
framework = "megatron"

[hardware]
preset = "h100-sxm"
nodes_link = "roce-400"
""")
    assert read_job(path) == JobConfig(
        load_model("llama-3.1-70b"),
        ParallelConfig(
            tp=8,
            pp=4,
            dp_replicate=2,
            sequence_parallel=True,
            zero=1,
            schedule="interleaved",
            chunks=5,
            overlap=frozenset({"dp", "pp"}),
        ),
        TrainingConfig(seq_len=8192, micro_batch=1, global_batch=128, recompute="selective"),
        load_hardware("h100-sxm", nodes_link="roce-400"),
    )


def test_a_job_can_be_parsed_from_text() -> None:
    text = """
model.preset = "gpt2-124m"
training = { seq_len = 1024, micro_batch = 4, microbatches = 3 }
hardware.preset = "a100-sxm-40gb"
"""
    assert parse_job(text) == JobConfig(
        load_model("gpt2-124m"),
        ParallelConfig(),
        TrainingConfig(
            seq_len=1024,
            micro_batch=4,
            global_batch=12,
            flash_attention=False,
            dropout=True,
            fused_loss=False,
        ),
        load_hardware("a100-sxm-40gb"),
    )


def test_a_model_given_by_sizes_is_a_gpt_by_default() -> None:
    assert run(SMALL).model == ModelConfig(
        layers=4, hidden=256, heads=4, kv_heads=4, head_size=64, ffn=1024, vocab=1000
    )


def test_a_gated_model_has_rms_norms_no_biases_and_a_head_of_its_own() -> None:
    gated = SMALL | {"gated": True, "ffn": 704, "kv_heads": 2}
    assert run(gated).model == ModelConfig(
        layers=4,
        hidden=256,
        heads=4,
        kv_heads=2,
        head_size=64,
        ffn=704,
        vocab=1000,
        gated=True,
        tied=False,
        norm="rms",
        biases=False,
    )


def test_learned_positions_are_a_number_or_one_for_each_token() -> None:
    assert run(SMALL | {"learned_positions": 8192}).model.positions == 8192
    assert run(SMALL | {"learned_positions": True}).model.positions == 4096
    assert run(SMALL | {"learned_positions": False}).model.positions == 0


def test_keys_override_the_sizes_of_a_preset() -> None:
    model = run(LLAMA | {"layers": 12, "tied": True, "name": "cut"}).model
    assert (model.layers, model.tied, model.name) == (12, True, "cut")
    assert (model.hidden, model.kv_heads, model.ffn) == (4096, 8, 14336)


@pytest.mark.parametrize(
    "experts",
    [
        {"experts": 8, "top_k": 2, "expert_ffn": 512, "shared_ffn": 128, "dense_layers": 1},
        {"experts": {"count": 8, "top_k": 2, "ffn": 512, "shared_ffn": 128, "dense_layers": 1}},
    ],
)
def test_experts_are_keys_of_model_or_a_table(experts: Any) -> None:
    found = run(SMALL | experts).model.experts
    assert found == Experts(count=8, top_k=2, ffn=512, shared_ffn=128, dense_layers=1)


def test_experts_have_the_width_of_the_mlp_by_default() -> None:
    assert run(SMALL | {"experts": 8, "top_k": 2, "ffn": 300}).model.experts == Experts(8, 2, 300)


def test_some_of_a_preset_s_experts_can_be_replaced() -> None:
    model = run({"preset": "mixtral-8x7b", "experts": {"count": 16}}).model
    assert model.experts == Experts(count=16, top_k=2, ffn=14336)


def test_latent_attention_has_a_table() -> None:
    sizes = {"kv_rank": 64, "nope": 32, "rope": 16, "value": 32}
    found = run(SMALL | {"latent": sizes}).model.latent
    assert found == LatentAttention(query_rank=0, kv_rank=64, nope=32, rope=16, value=32)


@pytest.mark.parametrize(
    ("parallel", "framework", "replicate", "shard", "zero"),
    [
        ({"dp": 8}, "megatron", 8, 1, 0),
        ({"dp": 8, "zero": 1}, "megatron", 8, 1, 1),
        ({"dp": 8, "zero": 3}, "deepspeed", 1, 8, 3),
        ({"dp": 8}, "fsdp2", 1, 8, 3),
        ({"dp_replicate": 8}, "fsdp2", 8, 1, 0),
        ({"dp_replicate": 2, "dp_shard": 4}, "fsdp2", 2, 4, 3),
        ({"world_size": 32, "tp": 4}, "megatron", 8, 1, 0),
        ({"gpus": 32, "tp": 2, "cp": 2}, "fsdp2", 1, 8, 3),
        ({}, "megatron", 1, 1, 0),
    ],
)
def test_dp_is_replicated_or_sharded_depending_on_zero(
    parallel: Any, framework: str, replicate: int, shard: int, zero: int
) -> None:
    layout = run(parallel=parallel, training={"framework": framework}).parallel
    assert (layout.dp_replicate, layout.dp_shard, layout.zero) == (replicate, shard, zero)


def test_sharded_weights_without_a_framework_are_fsdp2() -> None:
    assert run(parallel={"dp_shard": 8}).training.framework == "fsdp2"
    assert run(parallel={"dp": 8}).training.framework == "megatron"


@pytest.mark.parametrize(
    ("stated", "framework", "hidden"),
    [
        ({}, "megatron", set()),
        ({}, "fsdp2", {"dp"}),
        ({}, "deepspeed", {"dp"}),
        ({"overlap": False}, "fsdp2", set()),
        ({"overlap": True}, "megatron", {"tp", "cp", "ep", "dp", "pp"}),
        ({"overlap": ["tp"]}, "ddp", {"tp"}),
    ],
)
def test_overlap_defaults_to_the_frameworks(stated: Any, framework: str, hidden: Any) -> None:
    assert run(parallel=stated, training={"framework": framework}).parallel.overlap == hidden


def test_several_chunks_are_interleaved_by_default() -> None:
    assert run(parallel={"pp": 2, "chunks": 4}).parallel.schedule == "interleaved"


@pytest.mark.parametrize(
    ("stated", "recompute", "every"),
    [("none", "none", 1), ("full", "full", 1), ("every-4", "every", 4), ("sqrt", "sqrt", 1)],
)
def test_recomputation_settings_are_decoded(stated: str, recompute: str, every: int) -> None:
    recipe = run(training={"recompute": stated}).training
    assert (recipe.recompute, recipe.recompute_every) == (recompute, every)


@pytest.mark.parametrize(
    ("stated", "states", "target"),
    [
        ({}, set(), "cpu"),
        ({"offload": "cpu"}, {"optimizer"}, "cpu"),
        ({"offload": "nvme"}, {"optimizer"}, "nvme"),
        ({"offload": ["optimizer", "activations"]}, {"optimizer", "activations"}, "cpu"),
        ({"offload": ["activations"], "offload_to": "nvme"}, {"activations"}, "nvme"),
    ],
)
def test_offloaded_states_and_their_target_are_decoded(
    stated: Any, states: Any, target: str
) -> None:
    recipe = run(training=stated).training
    assert (recipe.offload, recipe.offload_to) == (states, target)


@pytest.mark.parametrize(
    ("framework", "dtype", "gradients", "activations"),
    [
        ("megatron", "bf16", "fp32", "bf16"),
        ("fsdp2", "bf16", "fp32", "bf16"),
        ("ddp", "bf16", "fp32", "bf16"),
        ("deepspeed", "fp16", "fp16", "fp16"),
        ("zero-paper", "fp16", "fp16", "fp16"),
        ("deepspeed", "fp8", "bf16", "bf16"),
        ("ddp", "fp32", "fp32", "fp32"),
        ("megatron", "fp32", "fp32", "fp32"),
    ],
)
def test_gradients_are_reduced_in_the_dtype_of_the_framework(
    framework: str, dtype: str, gradients: str, activations: str
) -> None:
    recipe = run(training={"framework": framework, "dtype": dtype}).training
    assert (recipe.gradient_dtype, recipe.activation_dtype) == (gradients, activations)


def test_hardware_can_be_given_by_numbers() -> None:
    device = {
        "name": "ours",
        "family": "hopper",
        "peaks": {"bf16": 5e14, "fp32": 3e13},
        "memory_bytes": 64_000_000_000,
        "memory_bytes_per_s": 2e12,
        "gpus_per_node": 4,
        "intra": {"bytes_per_s": 1e11, "ring": 0.9, "latency_ns": 2000},
        "nodes_link": "ib-hdr-200",
        "efficiency": {"gemm": 0.5},
    }
    assert run(device=device).hardware == HardwareConfig(
        name="ours",
        family="hopper",
        peaks_flops_per_s=(("fp32", 3e13), ("bf16", 5e14)),
        memory_bytes=64_000_000_000,
        memory_bytes_per_s=2e12,
        gpus_per_node=4,
        intra=Link("intra", 1e11, 0.9, 2000.0),
        inter=load_link("ib-hdr-200"),
        host=load_link("host-pcie-5"),
        efficiency=replace(load_efficiency("hopper"), gemm=0.5),
    )


def test_numbers_override_those_of_a_preset() -> None:
    device = run(device=H100 | {"gpus_per_node": 4, "memory_bytes": 10**11}).hardware
    assert (device.gpus_per_node, device.memory_bytes) == (4, 10**11)
    assert device.intra == load_hardware("h100-sxm").intra


def test_a_job_without_hardware_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"^job.toml: \[hardware\] is missing; write \[hardware\] preset"
    ):
        parse_job('model.preset = "gpt2-124m"\ntraining.seq_len = 1024')


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        (
            {"model": {"preset": "llama-3.1-8"}},
            "model.preset: 'llama-3.1-8' is unknown; write ll",
        ),
        ({"device": {"preset": "h1000"}}, "hardware.preset: 'h1000' is unknown; write h100-sxm,"),
        ({"model": {"layers": 4}}, "model.hidden: missing; give hidden"),
        ({"model": SMALL | {"gated": True}}, "model.ffn: missing; give ffn"),
        (
            {"model": SMALL | {"heads": 3}},
            "model.heads: hidden (256) must be divisible by heads (3); "
            "fix one of them or give head_size",
        ),
        ({"model": SMALL | {"layer": 4}}, "model.layer: unknown key; write layers, "),
        ({"model": SMALL | {"top_k": 2}}, "model.top_k: needs a model with experts; give experts"),
        ({"model": SMALL | {"experts": 8}}, "model.top_k: missing; give top_k"),
        (
            {"model": SMALL | {"layers": 0}},
            "model.layers: 0 is not a valid count; write an integer >= 1",
        ),
        ({"model": SMALL | {"layers": True}}, "model.layers: True is not a valid count; write an"),
        ({"model": SMALL | {"tied": 1}}, "model.tied: 1 is neither true nor false; write true or"),
        ({"model": SMALL | {"norm": "l2"}}, "model.norm: 'l2' is unknown; write rms or layer"),
        ({"parallel": {"tensor": 2}}, "parallel.tensor: unknown key; write "),
        ({"parallel": {"zero": 4}}, "parallel.zero: 4 is not a valid ZeRO stage; write 0, 1, "),
        (
            {"parallel": {"dp": 8, "dp_shard": 2}},
            "parallel.dp: cannot be combined with dp_shard; "
            "give either dp, or dp_replicate and dp_shard",
        ),
        (
            {"parallel": {"tp": 8, "dp": 4, "world_size": 64}},
            "parallel.world_size: 64 does not match tp (8) x pp (1) x dp (4) x cp (1) = 32; "
            "fix the axes or world_size",
        ),
        (
            {"parallel": {"tp": 8, "pp": 3, "gpus": 64}},
            "parallel.gpus: 64 is not divisible by tp (8) x pp (3) x cp (1); fix the axes or gpus",
        ),
        (
            {"parallel": {"rank_order": "tp-dp"}},
            "parallel.rank_order: 'tp-dp' is not a valid order of the axes; "
            'write "tp-cp-ep-dp-pp" in the order of the ranks, fastest-varying first',
        ),
        ({"parallel": {"overlap": 3}}, "parallel.overlap: 3 is not a list; write strings in [ ]"),
        (
            {"parallel": {"layers_per_stage": [1, -1]}},
            "parallel.layers_per_stage[1]: -1 is not a valid count; write an integer >= 0",
        ),
        ({"parallel": {"schedule": "1f1"}}, "parallel.schedule: '1f1' is unknown; write 1f1b, "),
        (
            {"training": {"microbatches": 3}},
            "training.global_batch: 64 does not match "
            "microbatches (3) x micro_batch (1) x dp (1) = 3; remove one of them",
        ),
        (
            {"training": {"recompute": "every-0"}},
            "training.recompute: 'every-0' is unknown; "
            "write none, selective, full, sqrt or every-4",
        ),
        ({"training": {"offload": ["all"]}}, "training.offload: 'all' is unknown; write optimizer"),
        ({"training": {"dtype": "bf8"}}, "training.dtype: 'bf8' is unknown; write fp8, bf16, "),
        ({"device": {"family": "hopper"}}, "hardware.peaks: missing; give peaks"),
        ({"device": H100 | {"peaks": {"bf16": "fast"}}}, "hardware.peaks.bf16: 'fast' is not a v"),
        ({"device": H100 | {"peaks": 1e15}}, "hardware.peaks: 1000000000000000.0 is not a table"),
        (
            {"device": H100 | {"nodes_link": "ib"}},
            "hardware.nodes_link: 'ib' is unknown; write ib-",
        ),
        ({"parallel": {"tp": 3}}, "heads (32) must be divisible by tp (3); fix heads or tp"),
    ],
)
def test_an_invalid_key_is_reported_with_its_hint(tables: Any, expected: str) -> None:
    assert refusal(**tables).startswith(f"job.toml: {expected}")


def test_all_mistakes_of_a_file_are_listed_in_one_line() -> None:
    listed = refusal(
        model=SMALL | {"layers": 0, "hiden": 3, "latent": {"kv_rank": True}},
        parallel={"tensor": 2, "zero": 4, "rank_order": "tp"},
        training={"micro_batch": math.nan, "recompute": "all"},
        device=H100 | {"peaks": {"bf16": math.inf}, "intra": {"ring": 0.5}, "learned": 3},
    )
    first, *others = re.findall(r"(?:model|parallel|training|hardware)\.[a-z0-9_.]+(?=:)", listed)
    assert listed.startswith(f"job.toml: {first}: unknown key; write hidden, ")
    assert f"; and {len(others)} more: {others[0]}: 0 is not a valid count;" in listed
    assert [first, *others] == [
        "model.hiden",
        "model.layers",
        "model.latent.nope",
        "model.latent.rope",
        "model.latent.value",
        "model.latent.kv_rank",
        "parallel.tensor",
        "parallel.zero",
        "parallel.rank_order",
        "training.micro_batch",
        "training.recompute",
        "hardware.learned",
        "hardware.intra.bytes_per_s",
        "hardware.peaks.bf16",
    ]


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        (10**19, "is not a valid count"),
        (-1, "is not a valid count"),
        (1.5, "is not a valid count"),
        (math.inf, "is not a valid count"),
        ("8", "is not a valid count"),
        ([8], "is not a valid count"),
    ],
)
def test_a_count_is_an_integer_within_limits(stated: Any, problem: str) -> None:
    refused = refusal(model=SMALL | {"vocab": stated})
    assert refused == f"job.toml: model.vocab: {stated!r} {problem}; write an integer >= 1"


def test_every_key_of_a_file_is_a_field_or_an_alias_of_one() -> None:
    """No key is listed twice; a key that is not a field sets another field or several."""
    spellings = {"dp", "world_size", "gpus", "nodes", "microbatches", "measured", "transfers"}
    spellings |= {"file"}
    experts = {"top_k", "expert_ffn", "shared_ffn", "dense_layers"}
    stated = {*MODEL_KEYS, *PARALLEL_KEYS, *TRAINING_KEYS, *HARDWARE_KEYS} - spellings - experts
    kinds = (ModelConfig, ParallelConfig, TrainingConfig, HardwareConfig)
    assert stated == {key for kind in kinds for key in collect_kinds(kind)}


def test_every_error_is_one_line() -> None:
    assert "\n" not in refusal(model={"preset": "a\nb"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"[model", "not valid TOML (Expected ']'"),
        (b"layers = 1" + b"0" * 5000, "not valid TOML (a number has over 4,300 digits)"),
        (
            b"[parallel]\ntp = 8 pp = 4\nzero = one # a comment\n[training]\nseq_len = 8k\n"
            b"overlap = [\n  'dp'\n]\ncompile = True",
            "line 2: tp is followed by another key; write one key in each line; and 3 more: "
            'line 3: zero one is not TOML; write zero = "one" for a word | line 5: seq_len 8k is no'
            " number; write digits alone | line 9: compile True is not TOML; write compile = true",
        ),
        (
            b'training = { seq_len = 4k, dtype = "a, b = 4k", micro_batch = 1, compile = True }',
            "line 1: seq_len 4k is no number; write digits alone; and 1 more: line 1: compile True"
            " is not TOML; write compile = true",
        ),
        (b"layer = 3\ntpp = 4", "layer: unknown key"),
        (b".".join([b"a"] * 20_000) + b" = 1", "has a key of more than 32 parts"),
        (b'model = { "a"' + b" . 'a b'" * 40 + b" = 1 }", "has a key of more than 32 parts"),
        (b"# " + b"a.b " * 300_000, "too large for a TOML file"),
        (
            b'{"model": {"preset": "llama-2-7b"}}',
            "is JSON, not TOML; write it as TOML: key = value",
        ),
        (
            b"# nothing\n",
            'is empty; begin with [model] preset = "llama-3.1-8b", [training] seq_len',
        ),
        (b"[modl]\n", "modl: unknown key; write model, parallel, training or hardware"),
        (
            b"model = 3\ntraining = 1\nhardware = 1\n",
            "model: 3 is not a table; write [model]; and 2 more: ",
        ),
        (b"hardware = 1\n", "hardware: 1 is not a table"),
        (b"tp = 8\n", "[model] is missing; write [model] preset = "),
        (b"tp = 8\n[parallel]\ntp = 4\n", "tp: stands before the tables, and in [parallel]; rem"),
        (b"[parallel]\ntp = 1\n", "[model] is missing; write [model] preset = "),
        (b"\x1f\x8b\x08\xff", "is not UTF-8 text; write it as TOML"),
        (b"\xef\xbb\xbf[training]\n", "[model] is missing"),
    ],
)
def test_an_invalid_job_file_is_reported(tmp_path: Path, text: bytes, expected: str) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(text)
    with pytest.raises(DataError) as error:
        read_job(path)
    assert str(error.value).startswith(f"{path}: {expected}")


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        (
            {"memory_bytes": 80},
            "memory_bytes: 80 bytes is not plausible; 80 GiB are 85_899_345_920 ",
        ),
        (
            {"memory_bytes_per_s": 3350},
            "memory_bytes_per_s: 3350 bytes per second is not plausible; 3350 GB/s are 3.35e+12 ",
        ),
        (
            {"peaks": {"bf16": 989}},
            "peaks.bf16: 989 FLOP/s is not plausible; 989 TFLOP/s are 9.89e+14 FLOP/s",
        ),
        (
            {"nodes_link": {"bytes_per_s": 50, "ring": 0.9, "latency_ns": 1e4}},
            "nodes_link.bytes_per_s: 50 bytes per second is not plausible; 50 GB/s are 5e+10 ",
        ),
        ({"peaks": {"bf16": 1e30}}, "peaks.bf16: 1e+30 FLOP/s is not plausible; give FLOP/s"),
        (
            {"memory_bytes_per_s": 3.35e9},
            "memory_bytes_per_s: 3.35e+09 bytes per second is not plausible; give bytes per second,"
            " 5e+10 to 1e+14",
        ),
        ({"memory_bytes": 80_000_000}, "memory_bytes: 8e+07 bytes is not plausible; give bytes, "),
        (
            {"efficiency": {"gemm": 75}},
            "efficiency.gemm: 75 of a peak is not plausible; 75 % are 0.75",
        ),
        (
            {"efficiency": {"memory": 1.5}},
            "efficiency.memory: 1.5 of a peak is not plausible; give",
        ),
        (
            {"efficiency": {"gemm": 1e-300}},
            "efficiency.gemm: 1e-300 of a peak is not plausible; give a number of at least 1e-06",
        ),
        ({"efficiency": {"jitter": 1e18}}, "efficiency.jitter: 1e+18 of a step is not plausible; "),
        (
            {"nodes_link": {"bytes_per_s": 5e10, "ring": 81, "latency_ns": 1e4}},
            "nodes_link.ring: 81 of the link's rate is not plausible; 81 % are 0.81",
        ),
        (
            {"attention": {"forward": 620, "backward": 540e12}},
            "attention.forward: 620 FLOP/s is not plausible; 620 TFLOP/s are 6.2e+14 FLOP/s",
        ),
        (
            {"attention": {"forward": 1e-300, "backward": 540e12}},
            "attention.forward: 1e-300 FLOP/s is not plausible; give FLOP/s, 1e+08 to 1e+17",
        ),
        ({"clock": 1755}, "clock: 1755 times the family's speed is not plausible; give times "),
        (
            {"multiprocessors": 10**18},
            "multiprocessors: 1e+18 multiprocessors is not plausible; give multiprocessors, 1",
        ),
        (
            {"learned": {"constant_bytes": -(10**12)}},
            "learned.constant_bytes: -1000000000000 bytes are more than the 85520809984 of the ",
        ),
        (
            {"learned": {"activations": 110.0}},
            "learned.activations: 110 times the activations is not plausible; 110 % are 1.1 times",
        ),
    ],
)
def test_a_rate_in_another_unit_is_refused_with_what_it_may_mean(device: Any, problem: str) -> None:
    assert refusal(device=H100 | device).startswith(f"job.toml: hardware.{problem}")


def test_numbers_that_are_not_plausible_are_all_listed() -> None:
    """A job with such an attention took 419,000 s with confidence high, or ended in an overflow."""
    device = H100 | {"attention": {"forward": 1e-300, "backward": 540.0}, "clock": 1e-300}
    words = refusal(device=device)
    assert all(key in words for key in ("attention.forward: ", "attention.backward: ", "clock: "))


def test_a_correction_beyond_the_predicted_memory_leaves_none_of_it() -> None:
    device = H100 | {"learned": {"constant_bytes": -85_000_000_000}}
    job = run(model=LLAMA | {"layers": 1}, device=device)
    assert compute_peak_bytes(job) == max(one.total_bytes for one in compute_memory(job)) == 0


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ({"recompute": "full", "recompute_layers": 99}, "recompute_layers (99) exceeds layers ("),
        ({"recompute": "every-999"}, "recompute (every-999) exceeds layers ("),
        (
            {"offload": ["activations"], "offload_layers": 99},
            "offload_layers (99) exceeds layers (",
        ),
    ],
)
def test_more_layers_are_not_recomputed_or_offloaded_than_the_model_has(
    stated: Any, problem: str
) -> None:
    assert refusal(training=stated).startswith(f"job.toml: {problem}")


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("efficiency.launch_ns", 4.5, "4.5 us are 4500 ns"),
        ("efficiency.host_ns", 1e15, "give ns, 1000 to 1e+10"),
        ("efficiency.gemm_result", 1000, "is not plausible"),
        ("nodes_link.latency_ns", 14, "14 us are 1.4e+04 ns"),
        ("gpus_per_node", 100_000, "is not plausible"),
        ("attention.forward", 6e16, "more than any peak of the device, 1.9789e+15"),
        ("host_update_bytes_per_s", 117, "117 GB/s are 1.17e+11 bytes per second"),
    ],
)
def test_times_and_counts_that_no_device_has_are_refused(key: str, value: float, hint: str) -> None:
    table, _, name = key.rpartition(".")
    link = {"bytes_per_s": 50e9, "ring": 0.9, "latency_ns": 14_000.0, "name": "ours"}
    inside = {**(link if table == "nodes_link" else {}), name: value}
    words = refusal(device=H100 | ({table: inside} if table else inside))
    assert key.replace("efficiency.", "") in words
    assert hint in words


@pytest.mark.parametrize("key", ["gradient_dtype", "activation_dtype"])
def test_gradients_and_activations_are_not_kept_in_8_bits(key: str) -> None:
    assert "'fp8' is unknown; write fp32, bf16 or fp16" in refusal(training={key: "fp8"})


def test_all_violated_constraints_are_named_at_once() -> None:
    words = refusal(model=LLAMA | {"kv_heads": 5}, parallel={"tp": 3})
    assert "heads (32) must be divisible by tp (3)" in words
    assert "more: heads (32) must be divisible by kv_heads (5); fix heads or kv_heads" in words


def test_scales_of_fp8_belong_to_training_in_fp8() -> None:
    assert refusal(training={"fp8_scaling": "row"}).startswith(
        "job.toml: fp8_scaling needs dtype fp8, not bf16"
    )


def test_the_peaks_of_a_processor_are_guesses_that_programs_may_exceed() -> None:
    processor = {"preset": "cpu", "memory_bytes_per_s": 3e9, "efficiency": {"gemm": 1.2}}
    assert run(device=processor).hardware.efficiency.gemm == 1.2


def test_a_batch_is_asked_for_in_either_of_its_keys() -> None:
    text = 'model.preset = "gpt2-124m"\ntraining = { seq_len = 8, micro_batch = 1 }\n'
    with pytest.raises(DataError) as error:
        parse_job(text + 'hardware.preset = "h100-sxm"\n')
    assert str(error.value) == (
        "job.toml: training.global_batch: missing; give global_batch (sequences per step, all"
        " ranks) or microbatches (per rank)"
    )


def test_a_layout_that_will_be_searched_need_not_fit_the_model(tmp_path: Path) -> None:
    """61 layers on 64 stages, and layers_per_stage of another search."""
    path = tmp_path / "job.toml"
    text = (
        '[model]\npreset = "deepseek-v3"\n[parallel]\npp = 64\nep = 64\ndp = 128\n'
        "bucket_bytes = 1000\n{}[training]\nseq_len = 8\nmicro_batch = 1\n"
        'global_batch = 1024\n[hardware]\npreset = "h100-sxm"\n'
    )
    path.write_text(text.format(""))
    with pytest.raises(DataError, match=r"layers \(61\) must be >= pp \(64\)"):
        read_job(path)
    found = decode_job_to_plan(read_tables((path,)))
    assert (found.parallel.pp, found.parallel.dp, found.parallel.ep) == (1, 1, 1)
    assert (found.training.framework, found.parallel.bucket_bytes) == ("megatron", 1000)
    with pytest.raises(DataError, match=r"layers \(61\) must be >= pp \(64\)"):
        decode_job_to_plan(read_tables((path,)), frozenset({"pp"}))
    path.write_text(text.format("layers_per_stage = [60, 1]\n").replace("pp = 64", "pp = 2"))
    for keep in (frozenset({"pp"}), frozenset[str]()):
        assert decode_job_to_plan(read_tables((path,)), keep).parallel.layers_per_stage == (60, 1)
    path.write_text(text.format("layers_per_stage = [60, 1]\n"))
    assert decode_job_to_plan(read_tables((path,))).parallel.layers_per_stage is None


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.toml: No such file or directory; check the path$"):
        read_job(tmp_path / "none.toml")


def test_gpt_of_megatron_on_a100_trains_as_its_papers_did() -> None:
    """Stored scores, dropout and a loss that is not fused; none of them on H100."""
    old, new = (
        run(SMALL, device={"preset": name}).training for name in ("a100-sxm-80gb", "h100-sxm")
    )
    assert (old.flash_attention, old.dropout, old.fused_loss) == (False, True, False)
    assert (new.flash_attention, new.dropout, new.fused_loss) == (True, False, True)


def test_aliases_are_accepted() -> None:
    words = {"framework": "torchtitan", "optimizer": "adamw"}
    one = run(SMALL, training=words, parallel={"dp": 2, "overlap": "dp"})
    assert (one.training.framework, one.training.optimizer) == ("fsdp2", "adam")
    assert one.parallel.overlap == {"dp"}
    staged = {"pp": 2, "schedule": "zb1p"}
    assert run(SMALL, parallel=staged).parallel.schedule == "zb-h1"


def test_megatron_shards_experts_over_tp_by_default() -> None:
    mixture = {"preset": "mixtral-8x7b"}
    assert run(mixture, parallel={"tp": 2, "dp": 4}).parallel.expert_tp == 2
    assert run(mixture, parallel={"tp": 2, "dp": 4, "expert_tp": 1}).parallel.expert_tp == 1
    assert run(SMALL, parallel={"tp": 2, "dp": 2}).parallel.expert_tp == 1


def test_a_stated_jitter_of_zero_is_zero() -> None:
    """It used to mean "as jitter"; a GEMM fraction of zero is not possible."""
    text = """[model]
preset = "llama-3.1-8b"
[parallel]
dp_shard = 32
[training]
seq_len = 4096
micro_batch = 1
global_batch = 32
framework = "fsdp2"
[hardware]
preset = "h100-sxm"
"""
    assert predict(parse_job(text)).split.skew_ns > 0
    still = parse_job(text + "efficiency.jitter_per_layer = 0\n")
    assert predict(still).split.skew_ns == 0
    with pytest.raises(DataError, match="gemm_fp8: 0 is not a valid number"):
        parse_job(text + "efficiency.gemm_fp8 = 0\n")
    with pytest.raises(DataError, match=r"gemm_nvfp4: 81 .*0\.81"):
        parse_job(text + "efficiency.gemm_nvfp4 = 81\n")
