"""Config files of other programs, as people have them, read as jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from stepsplit.analyzer import read_job
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.model.config import Experts, LatentAttention, ModelConfig
from stepsplit.analyzer.model.model_table import load_model
from stepsplit.analyzer.model.plan import from_json as plan_from_json
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.prediction import prediction_from_json
from stepsplit.dashboard.commands.model import model_command, plan_command

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip

BATCH = ("seq_len=8192", "micro_batch=1", "global_batch=64")

REST = (*BATCH, "gpus=64", "gpu=h100")


def write(folder: Path, name: str, content: str | Mapping[str, Any]) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# Hugging Face: config.json.


def test_a_config_of_hugging_face_is_the_model_of_its_preset(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, "config.json", LLAMA), settings=REST)
    assert replace(job.model, name="llama-3.1-8b") == load_model("llama-3.1-8b")
    assert (job.parallel.world_size, job.training.seq_len) == (64, 8192)


GEMMA = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
        "num_hidden_layers": 62, "sliding_window": 1024, "vocab_size": 262144,
    },
    "vision_config": {"hidden_size": 1152},
}  # fmt: skip

SCOUT = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "num_attention_heads": 40, "num_key_value_heads": 8,
        "head_dim": 128, "num_hidden_layers": 48, "num_local_experts": 16, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1, "vocab_size": 202048, "use_qk_norm": True,
    },
}  # fmt: skip

GLM = {
    "model_type": "glm4_moe", "hidden_size": 5120, "intermediate_size": 12288,
    "num_hidden_layers": 92, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151552, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 160,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1536,
    "first_k_dense_replace": 3, "tie_word_embeddings": False,
}  # fmt: skip

DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "vocab_size": 129280, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip

OLMO_3 = {
    "model_type": "olmo3", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "vocab_size": 100352, "sliding_window": 4096,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
}  # fmt: skip

QWEN_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "decoder_sparse_step": 1, "use_sliding_window": False,
    "sliding_window": 4096,
}  # fmt: skip

GPT_2 = {
    "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "vocab_size": 50257,
}  # fmt: skip

GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 201088, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (GEMMA, "gemma-3-27b"), (SCOUT, "llama-4-scout"), (GLM, "glm-4.6"),
        (DEEPSEEK, "deepseek-v3"), (OLMO_3, "olmo-3-7b"), (QWEN_MOE, "qwen3-30b-a3b"),
        (GPT_OSS, "gpt-oss-20b"),
    ],
)  # fmt: skip
def test_the_public_config_of_a_model_is_its_preset(
    tmp_path: Path, config: Mapping[str, Any], preset: str
) -> None:
    job = read_job(write(tmp_path, "config.json", config), settings=REST)
    assert replace(job.model, name=preset) == load_model(preset)


def test_a_gpt_2_has_positions_biases_and_the_activation_of_transformers(tmp_path: Path) -> None:
    settings = (*REST, "seq_len=1024")
    model = read_job(write(tmp_path, "config.json", GPT_2), settings=settings).model
    assert model == ModelConfig(
        layers=12, hidden=768, heads=12, kv_heads=12, head_size=64, ffn=3072, vocab=50257,
        positions=1024, activation="gelu_new",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention"]}, "linear attention"),
        ({"model_type": "deepseek_v32", "index_topk": 2048}, "sparse attention"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"}, "several kinds"),
        ({"model_type": "mamba2"}, "Mamba"),
        ({"model_type": "never_seen"}, "model_type 'never_seen' is unknown"),
    ],
)
def test_a_model_of_other_layers_is_refused(
    tmp_path: Path, change: Mapping[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        read_job(write(tmp_path, "config.json", {**LLAMA, **change}), settings=REST)


# What a file leaves out is asked for at once, and may stand in another file.


def test_all_that_is_missing_is_one_message(tmp_path: Path) -> None:
    path = write(tmp_path, "config.json", LLAMA)
    with pytest.raises(DataError) as raised:
        read_job(path)
    assert str(raised.value) == (
        f"{path}: does not state training.seq_len, training.micro_batch, training.global_batch, "
        "parallel.gpus, hardware.preset; add --set seq_len=8192 --set micro_batch=1 "
        "--set global_batch=64 --set gpus=8 --set gpu=h100 with your values, or name a job.toml "
        "with them as well"
    )


JOB = """
[parallel]
fsdp = 16
[training]
seq_len = 4096
mbs = 2
gbs = 64
[hardware]
gpu = "H100"
"""


def test_a_small_job_toml_says_the_rest_and_wins(tmp_path: Path) -> None:
    config = write(tmp_path, "config.json", LLAMA)
    job = read_job(config, write(tmp_path, "job.toml", JOB), settings=["parallel.tp=2"])
    assert (job.model.layers, job.parallel.dp_shard, job.parallel.tp) == (32, 16, 2)
    assert (job.training.seq_len, job.microbatches) == (4096, 2)


DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}  # fmt: skip


def test_a_model_of_hugging_face_trains_by_a_config_of_deepspeed(tmp_path: Path) -> None:
    files = write(tmp_path, "config.json", LLAMA), write(tmp_path, "ds_config.json", DEEPSPEED)
    job = read_job(*files, settings=["gpu=h100", "gpus=16", "seq_len=8192"])
    training = job.training
    assert (training.framework, training.micro_batch, job.microbatches) == ("deepspeed", 2, 4)
    assert (job.parallel.zero, job.parallel.dp_shard) == (3, 16)
    assert (training.offload, training.clip_gradients) == (frozenset({"optimizer"}), False)


def test_recomputation_is_open_where_no_file_has_a_word_for_it(tmp_path: Path) -> None:
    """With plenty of memory left; a job.toml beside them could have said it."""
    config, deepspeed = write(tmp_path, "config.json", LLAMA), {**DEEPSPEED}
    deepspeed["zero_optimization"] = {"stage": 3}
    files = config, write(tmp_path, "ds_config.json", deepspeed)
    settings = ["gpu=a100", "gpus=16", "seq_len=4096"]

    def find_open(*more: Path, settings: Sequence[str] = settings) -> tuple[list[str], str]:
        found = predict(read_job(*files, *more, settings=settings))
        return [one.key for one in found.unstated], found.confidence

    assert find_open() == (["training.recompute"], "medium")
    assert "training.recompute" not in find_open(settings=[*settings, "recompute=none"])[0]
    beside, fused = write(tmp_path, "job.toml", JOB), [*settings, "unfused=[]"]
    assert "training.recompute" not in find_open(beside, settings=fused)[0]


def test_what_transformers_fills_in_is_asked_for(tmp_path: Path) -> None:
    auto = {**DEEPSPEED, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    path = write(tmp_path, "ds_config.json", {**auto, "gradient_accumulation_steps": "auto"})
    with pytest.raises(DataError, match=r"training\.micro_batch, training\.global_batch, parallel"):
        read_job(path)


# Megatron-LM: scripts, flags and YAML.

SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NNODES:-4}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
N_DENSE=3; rm -rf /  # never run
TP=4
SEQ_LENGTH=8192
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES)
MODEL_ARGS=(
    --num-layers $((30 + 2))   # 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    # --num-layers 99
)
GPT_ARGS="
    --seq-length ${SEQ_LENGTH} \\
    --max-position-embeddings $SEQ_LENGTH \\
"
DATA_ARGS+=("--vocab-size 128256")
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size=2 \\
    --num-layers-per-virtual-pipeline-stage 4 --sequence-parallel \\
    --micro-batch-size 1 --global-batch-size 128 --bf16 --use-distributed-optimizer \\
    --overlap-grad-reduce --recompute-granularity selective --attention-backend fused
"""


def test_the_program_of_torchrun_belongs_to_no_flag(tmp_path: Path) -> None:
    script = tmp_path / "pretrain.sh"
    script.write_text(
        "NNODES=4\ntorchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py --num-layers 32"
        " --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1"
        " --global-batch-size 64 --vocab-size 32000 --tensor-model-parallel-size 4\n"
    )
    assert read_job(script, settings=["gpu=h100"]).parallel.world_size == 32


def test_a_script_of_megatron_is_read_and_never_run(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, "train.sh", SCRIPT), settings=["gpu=h100"])
    assert replace(job.model, name="llama-3.1-8b") == load_model("llama-3.1-8b")
    layout, training = job.parallel, job.training
    assert (layout.tp, layout.pp, layout.dp, layout.chunks) == (4, 2, 4, 4)
    assert (layout.sequence_parallel, layout.zero, layout.overlap) == (True, 1, {"dp"})
    assert (layout.schedule, job.microbatches) == ("interleaved", 32)
    assert (training.seq_len, training.recompute) == (8192, "selective")
    assert training.attention_kernel == "cudnn" and job.model.positions == 0


def test_flags_alone_are_a_gpt_unless_they_say_otherwise(tmp_path: Path) -> None:
    flags = (
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024"
        " --max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size 64 --fp16"
        " --tokenizer-type GPT2BPETokenizer --hidden-dropout 0.1"
    )
    job = read_job(write(tmp_path, "flags.txt", flags), settings=["gpu=a100", "gpus=8"])
    assert job.model == ModelConfig(
        layers=24, hidden=1024, heads=16, kv_heads=16, head_size=64, ffn=4096, vocab=50257,
        positions=2048,
    )  # fmt: skip
    assert (job.training.dtype, job.training.dropout) == ("fp16", True)
    write(tmp_path, "flags.txt", flags.replace("GPT2BPETokenizer", "Llama2Tokenizer"))
    assert read_job(tmp_path / "flags.txt", settings=["gpu=a100", "gpus=8"]).model.vocab == 32000


def test_experts_and_latent_attention_of_megatron(tmp_path: Path) -> None:
    flags = (
        "N=58\nARGS=(--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432"
        " --num-attention-heads 128 --seq-length 4096 --micro-batch-size 1 --global-batch-size 512"
        " --vocab-size 129280 --swiglu --normalization RMSNorm --disable-bias-linear"
        " --untie-embeddings-and-output-weights --position-embedding-type rope --num-experts 256"
        " --moe-layer-freq '([0]*3+[1]*'$N')' --moe-router-topk 8 --moe-ffn-hidden-size 2048"
        " --moe-shared-expert-intermediate-size 2048 --multi-latent-attention --q-lora-rank 1536"
        " --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128"
        " --pipeline-model-parallel-size 16 --expert-model-parallel-size 8"
        " --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2"
        " --moe-enable-deepep --fp8-format hybrid)"
    )
    job = read_job(write(tmp_path, "dsv3.sh", flags), settings=["gpu=h100", "gpus=128"])
    assert replace(job.model, name="deepseek-v3") == load_model("deepseek-v3")
    assert job.parallel.layers_per_stage == (3, *[4] * 14, 2)
    assert (job.parallel.dispatcher, job.training.dtype) == ("deepep", "fp8")


YAML = """
ENV_VARS:
  NCCL_ALGO: Ring
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --micro-batch-size: 4
  --global-batch-size: 32
  --seq-length: 1024
  --max-position-embeddings: 1024
  --tensor-model-parallel-size: 2
  --vocab-size: 51200
  --sequence-parallel: true
  --bf16: true
"""


def test_yaml_of_megatron(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, "model_config.yaml", YAML), settings=["gpu=h100", "gpus=8"])
    assert (job.model.layers, job.model.positions, job.parallel.tp) == (12, 1024, 2)
    assert (job.parallel.sequence_parallel, job.training.global_batch) == (True, 32)


def test_hybrid_layers_of_megatron_are_refused(tmp_path: Path) -> None:
    flags = "--num-layers 24 --hidden-size 1024 --hybrid-override-pattern M-M*"
    with pytest.raises(DataError, match="--hybrid-override-pattern: layers of this kind"):
        read_job(write(tmp_path, "flags.sh", flags), settings=REST)


# torchtitan.

TITAN = """
[job]
description = "Llama 3 405B training"
[model]
name = "llama3"
flavor = "405B"
converters = ["float8"]
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "full"
[compile]
enable = true
[float8]
recipe_name = "rowwise"
"""


def test_a_toml_of_torchtitan(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, "405b.toml", TITAN), settings=["gpu=h100", "gpus=128"])
    layout, training = job.parallel, job.training
    assert job.model == load_model("llama-3.1-405b")
    assert (layout.tp, layout.dp_replicate, layout.dp_shard, layout.zero) == (8, 2, 8, 3)
    assert (layout.sequence_parallel, layout.overlap) == (True, {"dp", "tp"})
    assert (training.micro_batch, training.global_batch, job.microbatches) == (2, 32, 1)
    assert (training.dtype, training.fp8_scaling, training.compile) == ("fp8", "row", True)
    assert training.recompute == "full"


def test_a_local_batch_of_torchtitan_goes_through_the_pipeline(tmp_path: Path) -> None:
    text = TITAN.replace("= 2\nseq", "= 8\nseq").replace(
        "[activation",
        'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "1F1B"\n[activation',
    )
    job = read_job(write(tmp_path, "405b.toml", text), settings=["gpu=h100", "gpus=128"])
    assert (job.parallel.pp, job.training.micro_batch, job.microbatches) == (4, 1, 8)


# Megatron-Bridge.

BRIDGE = """
from megatron.bridge.recipes.llama import llama31_70b_pretrain_config
cfg = llama31_70b_pretrain_config()
cfg.model.tensor_model_parallel_size = 4
cfg.model.pipeline_model_parallel_size = 4
cfg.model.virtual_pipeline_model_parallel_size = 5
# cfg.model.tensor_model_parallel_size = 8
cfg.train.global_batch_size = 128
cfg.train.micro_batch_size = 1
cfg.model.seq_length = 8192
cfg.mixed_precision = "bf16_with_fp8_current_scaling_mixed"
"""


def test_overrides_of_a_recipe_in_python(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, "run.py", BRIDGE), settings=["gpu=h100", "gpus=64"])
    assert job.model == load_model("llama-3.1-70b")
    assert (job.parallel.tp, job.parallel.pp, job.parallel.chunks, job.parallel.zero) == (
        4,
        4,
        5,
        1,
    )
    assert (job.training.dtype, job.training.global_batch) == ("fp8", 128)
    assert "run.py: not read: what the recipe itself sets" in " ".join(job.notes)


def test_overrides_of_a_recipe_in_yaml_and_on_a_command_line(tmp_path: Path) -> None:
    model = "model:\n  tensor_model_parallel_size: 2\n  seq_length: 4096\n"
    yaml = f"{model}train:\n  global_batch_size: 8\n"
    settings = ["model=llama-3-8b", "micro_batch=1", "gpu=h100", "gpus=8"]
    in_yaml = read_job(write(tmp_path, "conf.yaml", yaml), settings=settings)
    command = (
        "python run.py --recipe llama3_8b_pretrain_config model.tensor_model_parallel_size=2"
        " model.seq_length=4096 ++train.global_batch_size=8 train.micro_batch_size=1"
    )
    typed = read_job(write(tmp_path, "cmd.txt", command), settings=["gpu=h100", "gpus=8"])
    assert typed == in_yaml


# Kinds, settings and errors.


def test_the_kind_may_be_given(tmp_path: Path) -> None:
    path = write(tmp_path, "model.cfg", json.dumps(LLAMA))
    assert read_job(path, kind="hugging-face", settings=REST).model.layers == 32
    with pytest.raises(UsageError, match="--from 'hf' is unknown; write job, hugging-face"):
        read_job(path, kind="hf", settings=REST)
    with pytest.raises(DataError, match=r"does not state model\.layers, model\.hidden"):
        read_job(path, kind="megatron")


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("seq_len", "--set 'seq_len' is not KEY=VALUE"),
        ("sequence=3", "--set sequence: unknown key; write sequence_len, seqlen, sequence_length"),
        ("name=a", "--set name is a key of several tables; write model.name or hardware.name"),
    ],
)
def test_a_setting_that_says_nothing_is_refused(tmp_path: Path, setting: str, problem: str) -> None:
    path = write(tmp_path, "job.toml", "[model]\nlayers = 2\n")
    with pytest.raises((UsageError, DataError), match=problem):
        read_job(path, settings=[setting])


@pytest.mark.parametrize("name", ["config.json", "conf.yaml", "train.sh", "t.toml", "run.py"])
def test_bytes_of_any_kind_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    for content in (b"", b"\xff\xfe\x00", b"{", b"[1, 2]", b"a: &a [*a]", b"--num-layers"):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises((DataError, UsageError)) as raised:
            read_job(path)
        assert "\n" not in str(raised.value)


def test_what_was_read_is_on_the_screen_in_json_and_in_the_plan(tmp_path: Path) -> None:
    config, note = write(tmp_path, "config.json", LLAMA), "config.json (Hugging Face config.json)"
    options = [part for one in REST for part in ("--set", one)]
    shown = CliRunner().invoke(model_command, [str(config), *options])
    assert f"read {note}: model: layers = 32" in shown.output, shown.output
    written = CliRunner().invoke(model_command, [str(config), *options, "--json", "-"])
    assert prediction_from_json(written.output).read_as[0].startswith(note)
    planned = ["--gpus", "8", "--workers", "1", "--json", "-"]
    without = [part for one in (*BATCH, "gpu=h100") for part in ("--set", one)]
    result = CliRunner().invoke(plan_command, [str(config), *without, *planned])
    assert plan_from_json(result.output).read_as[0].startswith(note)


def test_layers_that_stages_do_not_divide_are_split_and_named(tmp_path: Path) -> None:
    config = write(tmp_path, "config.json", {**LLAMA, "num_hidden_layers": 30})
    job = read_job(config, settings=[*REST, "pp=4"])
    assert job.parallel.layers_per_stage == (8, 8, 7, 7)
    assert job.notes[-1] == "parallel: 30 layers on 4 stages as layers_per_stage = [8, 8, 7, 7]"


def test_sizes_of_experts_and_latent_attention_are_typed(tmp_path: Path) -> None:
    model = read_job(write(tmp_path, "config.json", DEEPSEEK), settings=REST).model
    assert model.experts == Experts(256, 8, 2048, 2048, 3)
    assert model.latent == LatentAttention(1536, 512, 128, 64, 128)


def test_deepspeed_runs_a_model_of_transformers_operation_by_operation(tmp_path: Path) -> None:
    """Unless the job says which of its operations are fused."""
    model, engine = tmp_path / "config.json", tmp_path / "ds.json"
    model.write_text(json.dumps(LLAMA))
    engine.write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}')
    usual = ("gpu=h100", "gpus=8", "seq_len=4096", "micro_batch=1", "global_batch=8")
    eager = read_job(model, engine, settings=usual)
    fused = read_job(model, engine, settings=(*usual, "unfused=[]"))
    assert eager.training.unfused == {"norms", "rotary", "activation"}
    assert (eager.training.framework, fused.training.unfused) == ("deepspeed", frozenset())
    assert any("as transformers runs them" in note for note in eager.notes)
    assert predict(eager).split.step_ns > 1.1 * predict(fused).split.step_ns
