"""Keys as other programs name them, in a job.toml that someone typed from memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from stepsplit.analyzer import read_job
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.config_file import decode_job_to_plan, parse_job, read_tables
from stepsplit.analyzer.model.hardware_config import HARDWARE_KEYS
from stepsplit.analyzer.model.key_aliases import ALIASES
from stepsplit.analyzer.model.layout_table import PARALLEL_KEYS
from stepsplit.analyzer.model.model_table import MODEL_KEYS, load_model
from stepsplit.analyzer.model.parameters import count_parameters
from stepsplit.analyzer.model.preset_names import list_hardware_names
from stepsplit.analyzer.model.training_table import TRAINING_KEYS
from stepsplit.dashboard.commands.model import model_command

OURS = """
[model]
preset = "llama-3.1-8b"
[parallel]
dp_shard = 8
chunks = 1
[training]
seq_len = 8192
micro_batch = 1
global_batch = 64
recompute = "full"
dropout = false
[hardware]
preset = "h100-sxm"
"""

TYPED = """
[model]
preset = "llama-3.1-8b"
[parallel]
fsdp = 8
vpp = 1
[training]
seq_length = 8192
mbs = 1
gbs = 64
activation_checkpointing = true
dropout = 0.0
[hardware]
gpu = "H100"
"""


def test_a_job_typed_with_the_keys_of_other_programs_is_the_same_job() -> None:
    ours, typed = parse_job(OURS), parse_job(TYPED)
    assert typed == ours and typed.stated == ours.stated
    assert ours.notes == () and typed.notes == (
        "parallel: fsdp = 8 as dp_shard = 8",
        "parallel: vpp = 1 as chunks = 1",
        "training: seq_length = 8192 as seq_len = 8192",
        "training: mbs = 1 as micro_batch = 1",
        "training: gbs = 64 as global_batch = 64",
        'training: activation_checkpointing = true as recompute = "full"',
        "training: dropout = 0.0 as dropout = false",
        'hardware: gpu = "H100" as preset = "h100-sxm"',
    )


def test_steps_to_accumulate_are_microbatches_of_a_rank() -> None:
    job = parse_job(TYPED.replace("gbs = 64", "gas = 4"))
    assert (job.microbatches, job.training.global_batch) == (4, 32)


def test_the_screen_says_what_was_read_as_what(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(TYPED)
    shown = CliRunner().invoke(model_command, [str(file)])
    assert "read training: mbs = 1 as micro_batch = 1" in shown.output.splitlines()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("mbs = 1\nmicro_batch = 2", "training.mbs: says the same as micro_batch, with another"),
        ("mbs = 0", "training.micro_batch: 0 is not a valid count"),
        ("mbs = 1\ndropout = -1", "training.dropout: -1 is neither true nor false"),
        ("mbs = 1\ngradient_checkpointing = 3", "training.recompute: 3 is not a list"),
    ],
)
def test_a_value_that_our_key_may_not_have_is_refused(line: str, problem: str) -> None:
    text = TYPED.replace("mbs = 1", line).replace("dropout = 0.0\n", "")
    text = text.replace("activation_checkpointing = true\n", "")
    with pytest.raises(DataError) as raised:
        parse_job(text)
    assert problem in str(raised.value) and "more:" not in str(raised.value)


def test_a_job_without_a_gpu_has_one_mistake() -> None:
    with pytest.raises(DataError) as raised:
        parse_job(TYPED.replace('gpu = "H100"', "gpus_per_host = 8"))
    message = str(raised.value)
    assert "hardware.preset: missing; write preset" in message
    assert "memory_bytes_per_s" not in message


def test_an_alias_is_no_key_of_its_own_and_becomes_one() -> None:
    keys = {
        "model": MODEL_KEYS, "parallel": PARALLEL_KEYS, "training": TRAINING_KEYS,
        "hardware": (*HARDWARE_KEYS, "preset"),
    }  # fmt: skip
    for section, aliases in ALIASES.items():
        for alias, convert in aliases.items():
            # strategy = true says nothing, and stays what was typed.
            assert set(convert(True)) <= {*keys[section], alias, "strategy", "preset"}, alias
            assert alias == "dropout" or alias not in keys[section], alias


# Keys in another table than ours, and models by the names of a hub.

ELSEWHERE = """
[model]
preset = "meta-llama/Llama-3.1-8B-Instruct"
sequence_length = 8192
[parallel]
strategy = "FSDP"
virtual_pipeline_stages = 1
[training]
mbs = 1
gbs = 64
activation_checkpointing = true
dropout = 0.0
[hardware]
preset = "H100"
num_nodes = 1
"""


def test_keys_that_stand_in_another_table_are_moved() -> None:
    job = parse_job(ELSEWHERE)
    assert job == parse_job(TYPED)
    assert {
        'model: preset = "meta-llama/Llama-3.1-8B-Instruct" as preset = "llama-3.1-8b"',
        "model: sequence_length = 8192 as of [training]",
        "training: sequence_length = 8192 as seq_len = 8192",
        'parallel: strategy = "FSDP" as zero = 3',
        "parallel: virtual_pipeline_stages = 1 as chunks = 1",
        "hardware: num_nodes = 1 as of [parallel]",
        "parallel: num_nodes = 1 as nodes = 1",
        "parallel: nodes = 1 as gpus = 8",
    } <= set(job.notes)


def test_a_key_in_two_tables_that_are_not_its_own_has_one_value() -> None:
    text = ELSEWHERE.replace("num_nodes = 1", "sequence_length = 4096")
    problem = r"hardware\.sequence_length: says the same as training\.s\w+, with another value"
    with pytest.raises(DataError, match=problem):
        parse_job(text)


@pytest.mark.parametrize("line", ["num_gpus = 16", "gpus = 16", "nodes = 2", "num_nodes = 2"])
@pytest.mark.parametrize("section", ["hardware", "parallel"])
def test_gpus_and_nodes_stand_in_either_table(line: str, section: str) -> None:
    text = ELSEWHERE.replace("num_nodes = 1\n", "").replace(f"[{section}]", f"[{section}]\n{line}")
    assert parse_job(text).parallel.dp_shard == 16


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("num_nodes = 1", "nodes = 1\ngpus = 4", "parallel.nodes: 1 x hardware.gpus_per_node (8)"),
        ("mbs = 1", "mbs = 1\nseq_len = 4096", "model.sequence_length: says the same as training."),
        ('"FSDP"', '"megatron"', "parallel.strategy: unknown key; write zero = 3 for FSDP, zero"),
        ('strategy = "FSDP"', "dp = 4", "parallel.nodes: as gpus = 8 does not match tp (1) x pp"),
        ("mbs = 1", "mbs = 1\nzero = 1", "parallel.strategy: says the same as zero, with another"),
        (
            "mbs = 1",
            "mbs = 1\nbatch_size = 2",
            "training.batch_size: unknown key; write micro_batch",
        ),
    ],
)
def test_the_hint_names_the_key_that_is_meant(before: str, after: str, problem: str) -> None:
    with pytest.raises(DataError) as raised:
        parse_job(ELSEWHERE.replace(before, after))
    assert problem in str(raised.value) and "more:" not in str(raised.value)


def test_several_mistakes_are_separated() -> None:
    with pytest.raises(DataError) as raised:
        text = ELSEWHERE.replace("mbs = 1", "mbs = 0\ntotal_batch_size = 2")
        parse_job(text.replace("gbs = 64", "gbs = 0"))
    first, others = str(raised.value).split("; and 2 more: ")
    assert first.endswith("write global_batch (sequences per step, of all ranks)")
    assert "\n" not in others
    assert [one.partition(":")[0] for one in others.split(" | ")] == [
        "training.micro_batch", "training.global_batch",
    ]  # fmt: skip


NUMBERS = """
[model]
name = "meta-llama/Llama-3.1-8B"
layers = 32
hidden = 4096
heads = 32
kv_heads = 8
ffn = 14336
vocab = 128256
{keys}
[training]
seq_len = 8192
micro_batch = 1
global_batch = 8
[hardware]
gpu = "H100"
"""


def test_a_model_by_numbers_says_what_it_takes_and_whether_it_is_the_one_of_its_name(
    tmp_path: Path,
) -> None:
    def note(keys: str) -> list[str]:
        notes = parse_job(NUMBERS.format(keys=keys)).notes
        return [one for one in notes if one.startswith("model")]

    # What states nothing else than the preset of its name is that model.
    assert note("") == [
        'model: gated = true, tied = false, norm = "rms", biases = false as in llama-3.1-8b, '
        "which has its sizes"
    ]
    assert note("gated = true\ntied = false") == []
    assert note("biases = true") == [
        "model as 5.63B parameters, but llama-3.1-8b has 8.03B: gated, tied are not stated (taken: "
        'gated = false, tied = true); write preset = "llama-3.1-8b" or state them'
    ]
    assert note("gated = true\nqk_norm = true") == ["model: tied = false (not stated)"]
    assert note("gated = false\ntied = true") == [
        'model as 5.63B parameters, but llama-3.1-8b has 8.03B; write preset = "llama-3.1-8b" or '
        "another name"
    ]
    file = tmp_path / "job.toml"
    file.write_text(NUMBERS.format(keys="biases = true"))
    shown = " ".join(CliRunner().invoke(model_command, [str(file)]).output.split())
    assert "read model as 5.63B parameters, but llama-3.1-8b has 8.03B" in shown
    written = CliRunner().invoke(model_command, [str(file), "--json", "-"]).output
    assert any("llama-3.1-8b has 8.03B" in one for one in json.loads(written)["read_as"])


FLAT = """
model = "llama-3.1-8b"
fsdp = 8
vpp = 1
seq_length = 8192
mbs = 1
gbs = 64
activation_checkpointing = true
dropout = 0.0
gpu = "H100"
"""


def test_a_file_without_tables_is_read_by_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(FLAT)
    assert read_job(path) == parse_job(TYPED)
    path.write_text(FLAT + "batch_size = 3\n")
    with pytest.raises(DataError, match=r"training.batch_size: unknown key; write micro_batch \("):
        read_job(path)
    # Whose preset it is, its name says.
    path.write_text(FLAT.replace("gpu =", "preset ="))
    assert read_job(path) == parse_job(TYPED)
    assert read_job(path, settings=["preset=Llama2 70B"]).model.name == "llama-2-70b"
    path.write_text(FLAT.replace('gpu = "H100"', 'preset = "X100"'))
    with pytest.raises(DataError, match=r"preset is a key of several tables; write model\.preset"):
        read_job(path)
    path.write_text(FLAT + 'name = "a"\n')
    with pytest.raises(DataError, match=r"name is a key of several tables; write model\.name or"):
        read_job(path)


def test_other_names_of_the_table_and_of_the_dtype() -> None:
    other = TYPED.replace("[parallel]", "[parallelism]").replace("mbs = 1", "mbs = 1\nbf16 = true")
    job = parse_job(other)
    assert job == parse_job(TYPED)
    assert job.notes[0] == "[parallelism] as [parallel]"
    assert 'training: bf16 = true as dtype = "bf16"' in job.notes
    assert parse_job(TYPED.replace("mbs = 1", 'mbs = 1\nprecision = "bfloat16"')) == job
    assert parse_job(TYPED.replace("mbs = 1", "mbs = 1\nfp8 = true")).training.dtype == "fp8"


# Whole jobs as users of other programs type them, without a look at our keys.

TRANSFORMERS = """
[model]
name = "meta-llama/Llama-3.1-8B"
[training]
per_device_train_batch_size = 2
gradient_accumulation_steps = 8
max_seq_length = 4096
bf16 = true
gradient_checkpointing = true
attn_implementation = "flash_attention_2"
optim = "adamw_torch_fused"
[parallel]
fsdp = "full_shard auto_wrap"
[hardware]
gpu = "H100"
num_gpus = 16
"""
MEGATRON = """
[model]
num_layers = 80
hidden_size = 8192
ffn_hidden_size = 28672
num_attention_heads = 64
num_query_groups = 8
vocab_size = 128256
swiglu = true
untie_embeddings_and_output_weights = true
[parallel]
tensor_model_parallel_size = 8
pipeline_model_parallel_size = 4
num_layers_per_virtual_pipeline_stage = 5
data_parallel_size = 16
sequence_parallel = true
use_distributed_optimizer = true
overlap_grad_reduce = true
overlap_param_gather = true
tp_comm_overlap = true
[training]
micro_batch_size = 1
global_batch_size = 1024
seq_length = 8192
bf16 = true
recompute_granularity = "selective"
[hardware]
gpu = "h100"
"""
DEEPSPEED = """
[model]
preset = "llama-2-13b"
[parallel]
zero_stage = 3
world_size = 32
[training]
train_micro_batch_size_per_gpu = 4
gradient_accumulation_steps = 4
sequence_length = 4096
bf16 = { enabled = true }
activation_checkpointing = true
optimizer = "AdamW"
[hardware]
gpu = "NVIDIA A100-SXM4-80GB"
"""
NANOGPT = """
[model]
n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
vocab_size = 50304
dropout = 0.0
bias = false
[training]
batch_size = 12
gradient_accumulation_steps = 40
dtype = "bfloat16"
compile = true
[hardware]
gpu = "a100"
gpus = 8
"""


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        (TRANSFORMERS, """
            [model]
            preset = "llama-3.1-8b"
            [parallel]
            zero = 3
            gpus = 16
            [training]
            seq_len = 4096
            micro_batch = 2
            microbatches = 8
            dtype = "bf16"
            recompute = "full"
            flash_attention = true
            optimizer = "adam"
            fused_optimizer = true
            [hardware]
            preset = "h100-sxm"
         """),
        (MEGATRON, """
            [model]
            layers = 80
            hidden = 8192
            ffn = 28672
            heads = 64
            kv_heads = 8
            vocab = 128256
            gated = true
            tied = false
            [parallel]
            tp = 8
            pp = 4
            dp = 16
            chunks = 4
            zero = 1
            sequence_parallel = true
            overlap = ["dp", "tp"]
            [training]
            seq_len = 8192
            micro_batch = 1
            global_batch = 1024
            dtype = "bf16"
            recompute = "selective"
            [hardware]
            preset = "h100-sxm"
         """),
        (DEEPSPEED, """
            [model]
            preset = "llama-2-13b"
            [parallel]
            zero = 3
            world_size = 32
            [training]
            seq_len = 4096
            micro_batch = 4
            microbatches = 4
            dtype = "bf16"
            recompute = "full"
            optimizer = "adam"
            [hardware]
            preset = "a100-sxm-80gb"
         """),
        (NANOGPT, """
            [model]
            layers = 12
            heads = 12
            hidden = 768
            vocab = 50304
            biases = false
            [parallel]
            gpus = 8
            [training]
            seq_len = 1024
            micro_batch = 12
            global_batch = 480
            dtype = "bf16"
            dropout = false
            compile = true
            framework = "ddp"
            [hardware]
            preset = "a100-sxm-80gb"
         """),
    ],
    ids=["transformers", "megatron", "deepspeed", "nanogpt"],
)  # fmt: skip
def test_a_job_typed_from_memory_is_the_job_that_is_meant(typed: str, ours: str) -> None:
    read, meant = parse_job(typed), parse_job(ours)
    assert replace(read, notes=(), stated=None) == replace(meant, notes=(), stated=None)
    assert read.stated == meant.stated
    # What no key of ours says alone is said with the settings that it was read from.
    assert (
        "num_layers_per_virtual_pipeline_stage = 5, use_distributed_optimizer = true,"
        " overlap_grad_reduce = true, tp_comm_overlap = true,"
        ' recompute_granularity = "selective" as Megatron-LM\'s: parallel: zero = 1,'
        ' overlap = ["dp", "tp"], chunks = 4; training: recompute = "selective"' in read.notes
    ) == (typed == MEGATRON)


def test_a_flag_of_megatron_and_a_norm_of_gradients_become_values_of_ours() -> None:
    text = MEGATRON.replace("use_distributed_optimizer", "distributed_optimizer")
    text = text.replace("bf16 = true", "bf16 = true\nclip_grad = 1.0")
    text = text.replace("num_layers = 80", "num_layers = 80\nmax_position_embeddings = 9")
    job = parse_job(text.replace("tensor_model_parallel_size", "tp_size"))
    assert (job.parallel.zero, job.parallel.tp, job.training.clip_gradients) == (1, 8, True)
    assert not parse_job(text.replace("clip_grad = 1.0", "grad_clip = 0")).training.clip_gradients


TWELVE_LAYERS = """
[model]
layers = 12
hidden = 1024
heads = 16
vocab = 50304
[parallel]
pp = 4
num_layers_per_virtual_pipeline_stage = 1
[training]
seq_len = 1024
micro_batch = 1
global_batch = 64
[hardware]
preset = "h100-sxm"
"""


def test_settings_of_megatron_beside_our_keys_depend_on_them() -> None:
    assert parse_job(TWELVE_LAYERS).parallel.chunks == 3


@pytest.mark.parametrize(
    ("table", "keys", "key"),
    [
        ("[parallel]", "zero = 1\nuse_distributed_optimizer = false", "parallel.zero"),
        ("[training]", 'recompute = "none"\nrecompute_granularity = "full"', "training.recompute"),
    ],
)
def test_a_setting_of_megatron_that_contradicts_our_key_is_a_mistake(
    table: str, keys: str, key: str
) -> None:
    with pytest.raises(DataError, match=f"{key}: is said by settings of Megatron-LM, too"):
        parse_job(TWELVE_LAYERS.replace(table, f"{table}\n{keys}"))


def test_a_torchtitan_file_may_name_the_device(tmp_path: Path) -> None:
    file = tmp_path / "llama3_8b.toml"
    file.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\ntensor_parallel_degree = 1\n'
        "[training]\nlocal_batch_size = 1\nseq_len = 8192\n"
        '[hardware]\ngpu = "H100"\nngpu = 8\n'
    )
    job = read_job(file)
    assert (job.hardware.name, job.parallel.dp_shard) == ("h100-sxm", 8)


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("Llama-3.1-8B", "Pythia-6.9B", "model.preset: 'pythia-6.9b' is unknown; write"),
        ('"full_shard auto_wrap"', '"some"', "parallel.dp_shard: 'some' is not a valid count"),
        ('"flash_attention_2"', '"ring"', "training.flash_attention: 'ring' is neither true nor"),
        ('gpu = "H100"', 'gpu = "H100 SXM5"\nvoltage = 1', "hardware.voltage: unknown key"),
    ],
)
def test_what_is_not_understood_is_one_mistake(before: str, after: str, problem: str) -> None:
    with pytest.raises(DataError) as raised:
        parse_job(TRANSFORMERS.replace(before, after))
    assert problem in str(raised.value) and "more:" not in str(raised.value)


# Names of devices as drivers report them, and a config of DeepSpeed as a table.


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("nvidia_h100_80gb_hbm3", "h100-sxm"),
        # With the memory of datasheets; that of the H100 PCIe is HBM2e.
        ("a100-80gb-hbm2e", "a100-sxm-80gb"),
        ("a100-40gb-hbm2", "a100-sxm-40gb"),
        ("H100 80GB HBM2e", "h100-pcie"),
        # These have no preset, and are not those of nearly the same name.
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H20-3e", "h20-3e"),
    ],
)
@pytest.mark.parametrize("key", ["gpu", "preset"])
def test_a_device_has_the_name_that_its_driver_reports(name: str, preset: str, key: str) -> None:
    text = TYPED.replace('gpu = "H100"', f'{key} = "{name}"')
    if preset in list_hardware_names():
        assert parse_job(text).hardware.name == preset
    else:
        with pytest.raises(DataError, match=f"hardware.preset: '{preset}' is unknown; write "):
            parse_job(text)


PASTED = """
[deepspeed]
train_micro_batch_size_per_gpu = 4
gradient_accumulation_steps = 4
[deepspeed.bf16]
enabled = true
[deepspeed.zero_optimization]
stage = 3
[deepspeed.optimizer]
type = "AdamW"
"""

WITHOUT_BATCH = DEEPSPEED.replace("zero_stage = 3\n", "").replace(
    """train_micro_batch_size_per_gpu = 4
gradient_accumulation_steps = 4
""",
    "",
)


def test_a_config_of_deepspeed_stands_in_a_table_of_its_own() -> None:
    read = parse_job(WITHOUT_BATCH + PASTED)
    meant = parse_job(DEEPSPEED.replace("[training]", '[training]\nframework = "deepspeed"'))
    assert replace(read, notes=(), stated=None) == replace(meant, notes=(), stated=None)
    assert read.stated == meant.stated
    assert read.notes[0] == (
        '[deepspeed] as parallel: zero = 3; training: framework = "deepspeed", micro_batch = 4,'
        ' microbatches = 4, dtype = "bf16", optimizer = "adam"'
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('deepspeed = "ds.json"\n' + WITHOUT_BATCH, "stepsplit model job.toml ds_config.json"),
        (WITHOUT_BATCH + "[deepspeed]\nfile = 1\n", "deepspeed: has no key of DeepSpeed's JSON"),
        (
            WITHOUT_BATCH.replace("[training]", "[training]\nmbs = 2") + PASTED,
            "training.micro_batch: is said by settings of DeepSpeed, too, with another value",
        ),
    ],
)
def test_a_table_of_deepspeed_that_cannot_be_read_says_what_to_do(text: str, problem: str) -> None:
    with pytest.raises(DataError) as raised:
        parse_job(text)
    assert problem in str(raised.value)


# Whole files as people typed them from memory, of jobs that others had published.

TORCHTITAN = """
model = "Qwen3-32B"
gpu = "GB200"
num_gpus = 16
[parallelism]
data_parallel_shard_degree = 4
tensor_parallel_degree = 4
[training]
seq_len = 8192
local_batch_size = 1
steps = 50
compile = true
"""

PLAYBOOK = """
[model]
name = "Qwen3-235B-A22B"
[parallel]
TP = 2
EP = 32
PP = 8
VPP = 4
dispatcher = "DeepEP"
[train]
seq_length = 4096
mbs = 1
gbs = 2048
precision = "bf16"
[cluster]
gpu = "H100"
num_gpus = 256
"""

ADAPTERS = """
[model]
name = "llama2-70b"
[training]
lora_rank = 16
lora_alpha = 32
sequence_length = 8192
micro_batch_size = 1
global_batch_size = 8
fp8 = "hybrid"
framework = "primus"
[hardware]
gpu = "MI355X"
gpus = 8
"""

TRAINER = """
[model]
name_or_path = "Qwen/Qwen3-4B"
attn_implementation = "flash_attention_2"
torch_dtype = "bfloat16"
[trainer]
per_device_train_batch_size = 1
gradient_accumulation_steps = 8
max_seq_length = 16384
gradient_checkpointing = true
optim = "paged_adamw_8bit"
learning_rate = 1e-5
bf16 = true
[hardware]
gpu = "A100-40GB"
num_gpus = 1
"""


def read_typed(text: str, folder: Path) -> dict[str, object]:
    """What the file says: model, device, tp, pp, chunks, ep, ranks, dtype, framework."""
    file = folder / "job.toml"
    file.write_text(text)
    job = read_job(file)
    layout, training = job.parallel, job.training
    return {
        "model": job.model.name, "gpu": job.hardware.name, "gpus": layout.world_size,
        "layout": (layout.tp, layout.pp, layout.chunks, layout.ep, layout.dp_shard),
        "dtype": training.dtype, "framework": training.framework,
    }  # fmt: skip


def test_keys_before_the_tables_of_torchtitan_name_model_and_device(tmp_path: Path) -> None:
    assert read_typed(TORCHTITAN, tmp_path) == {
        "model": "qwen3-32b", "gpu": "gb200", "gpus": 16, "layout": (4, 1, 1, 1, 4),
        "dtype": "bf16", "framework": "fsdp2",
    }  # fmt: skip


SIZES_IN_DEGREES = """
[model]
name = "llama3-8b"
num_layers = 32
hidden_size = 4096
num_attention_heads = 32
num_key_value_heads = 8
intermediate_size = 14336
vocab_size = 128256
rope_theta = 500000
[parallelism]
strategy = "fsdp2"
data_parallel_shard_degree = 16
tensor_parallel_degree = 1
reshard_after_forward = true
[training]
sequence_length = 8192
local_batch_size = 2
gradient_accumulation_steps = 4
precision = "bf16"
activation_checkpointing = "full"
[hardware]
gpu = "H100"
num_nodes = 2
network = "infiniband 400Gb/s"
"""

BESIDE_DEEPSPEED = """
framework = "deepspeed"
[model]
type = "llama"
size = "7b"
layers = 32
d_model = 4096
n_heads = 32
d_ff = 11008
vocab_size = 32000
max_seq_len = 4096
[deepspeed]
zero_stage = 3
train_micro_batch_size_per_gpu = 4
gradient_accumulation_steps = 8
bf16 = true
overlap_comm = true
gradient_checkpointing = true
[cluster]
nodes = 4
gpus_per_node = 8
gpu_type = "A100-80GB"
interconnect = "200Gb HDR InfiniBand"
"""

EXPERTS_OF_MEGATRON = """
[model]
name = "mixtral-8x7b"
num_layers = 32
hidden_size = 4096
ffn_hidden_size = 14336
num_attention_heads = 32
num_query_groups = 8
num_experts = 8
moe_router_topk = 2
vocab_size = 32000
[parallel]
framework = "megatron"
pipeline_model_parallel_size = 4
expert_model_parallel_size = 8
num_gpus = 64
use_distributed_optimizer = true
[train]
seq_length = 4096
micro_batch_size = 1
global_batch_size = 256
bf16 = true
moe_grouped_gemm = true
overlap_grad_reduce = true
overlap_param_gather = true
[hardware]
gpu = "H100-80GB-SXM"
nvlink = true
ib = "8x400G"
"""


def test_sizes_of_a_model_beside_degrees_are_no_file_of_torchtitan(tmp_path: Path) -> None:
    assert read_typed(SIZES_IN_DEGREES, tmp_path) == {
        "model": "llama3-8b", "gpu": "h100-sxm", "gpus": 16, "layout": (1, 1, 1, 1, 16),
        "dtype": "bf16", "framework": "fsdp2",
    }  # fmt: skip
    job = parse_job(SIZES_IN_DEGREES)
    assert (job.parallel.reshard_after_forward, job.microbatches) == ("always", 4)
    # That it is gated and has a head of its own is said by its name.
    assert count_parameters(job.model) == count_parameters(load_model("llama-3-8b"))


def test_keys_of_a_training_in_the_table_of_deepspeed_are_read(tmp_path: Path) -> None:
    assert read_typed(BESIDE_DEEPSPEED, tmp_path) == {
        "model": "llama-7b", "gpu": "a100-sxm-80gb", "gpus": 32, "layout": (1, 1, 1, 1, 32),
        "dtype": "bf16", "framework": "deepspeed",
    }  # fmt: skip
    job = read_job(tmp_path / "job.toml")
    assert (job.parallel.zero, job.training.recompute) == (3, "full")
    assert job.training.global_batch == 4 * 8 * 32
    assert job.parallel.overlap == {"dp"}
    assert "deepspeed: zero_stage = 3 as of [parallel]" in job.notes
    assert count_parameters(job.model) == count_parameters(load_model("llama-7b"))


def test_keys_that_name_what_is_taken_anyway_are_read_as_nothing(tmp_path: Path) -> None:
    assert read_typed(EXPERTS_OF_MEGATRON, tmp_path) == {
        "model": "mixtral-8x7b", "gpu": "h100-sxm", "gpus": 64, "layout": (1, 4, 1, 8, 1),
        "dtype": "bf16", "framework": "megatron",
    }  # fmt: skip
    job = parse_job(EXPERTS_OF_MEGATRON)
    assert job.hardware.inter.name == "ib-ndr-400" and job.model.gated
    assert {
        'parallel: framework = "megatron" as of [training]',
        "training: overlap_param_gather = true as of [parallel]",
        "parallel: overlap_param_gather = true as nothing",
        "training: moe_grouped_gemm = true as nothing",
        "hardware: nvlink = true as nothing",
    } <= {*job.notes}
    with pytest.raises(DataError, match=r"hardware\.nvlink: unknown key"):
        parse_job(EXPERTS_OF_MEGATRON.replace("nvlink = true", "nvlink = false"))


NAMED = """
[model]
name = "{name}"
{sizes}
[training]
seq_len = 4096
micro_batch = 1
global_batch = 64
[hardware]
gpu = "H100"
"""
MIXTRAL = """
layers = 32
hidden = 4096
heads = 32
ffn = 14336
vocab = 32000
kv_heads = 8
gated = true
tied = false
"""
DEEPSEEK = "layers = 61\nhidden = 7168\nheads = 128\nvocab = 129280"


@pytest.mark.parametrize(
    ("name", "sizes", "note"),
    [
        ("mixtral-8x7b", MIXTRAL, "model as 7.24B parameters, but mixtral-8x7b has 46.7B; write"),
        ("deepseek-v3", DEEPSEEK, "model as 38.5B parameters, but deepseek-v3 has 671B: gated, "),
    ],
)
def test_a_name_gives_a_model_by_numbers_no_experts(name: str, sizes: str, note: str) -> None:
    job = parse_job(NAMED.format(name=name, sizes=sizes))
    assert job.model.experts is None and job.model.latent is None
    assert job.notes[-1].startswith(note) and f'write preset = "{name}"' in job.notes[-1]


def test_a_name_gives_a_model_by_numbers_no_size_that_it_must_state() -> None:
    with pytest.raises(DataError, match=r"model\.hidden: missing") as raised:
        parse_job(NAMED.format(name="llama-2-7b", sizes="layers = 32"))
    assert "model.heads: missing" in str(raised.value)
    sizes = "layers = 32\nhidden = 4096\nheads = 32\nvocab = 32000"
    job = parse_job(NAMED.format(name="llama-2-7b", sizes=sizes))
    assert replace(job.model, name="llama-2-7b") == load_model("llama-2-7b")
    assert job.notes[-1] == (
        "model: gated = true, tied = false, kv_heads = 32, ffn = 11008, "
        'norm = "rms", biases = false as in llama-2-7b, which has its sizes'
    )


SMALL = """
[model]
preset = "llama-2-7b"
{model}
[parallel]
gpus = 16
{parallel}
[training]
seq_len = 4096
micro_batch = 1
global_batch = 64
{training}
[hardware]
gpu = "H100"
{hardware}
"""


@pytest.mark.parametrize(
    ("section", "line", "problem"),
    [
        ("parallel", 'scheduler = "gpipe"', r"write schedule in \[parallel\]"),
        ("training", 'scheduler = "gpipe"', r"write schedule in \[parallel\]"),
        ("training", 'scheduler = "Interleaved1F1B"', r"write schedule in \[parallel\]"),
        ("parallel", 'type = "fsdp"', "name the model or the GPU by its preset"),
        ("training", 'type = "lora"', "name the model or the GPU by its preset"),
        ("hardware", 'type = "a100"', "name the model or the GPU by its preset"),
        (
            "parallel",
            "size = 16",
            "name the model or the GPU by its preset, and ranks",
        ),
        ("parallel", "dim = 8", "write hidden, layers or biases"),
        ("parallel", "depth = 4", "write hidden, layers or biases"),
        ("hardware", "bias = true", "write hidden, layers or biases"),
        ("parallel", "eps = 1e-8", "leave it out"),
        ("training", 'device = "cuda"', r"write the preset of the GPU in \[hardware\]"),
        ("training", 'preset = "h200-sxm"', "write "),
        ("parallel", "hidden_size = 64", r"move it under \[model\]"),
        ("training", "layers = 4", r"move it under \[model\]"),
        ("parallel", "lr = 1e-4", r"move it under \[training\]"),
        ("training", 'transformer_impl = "local"', "write "),
        ("training", "moe_grouped_gemm = false", "write "),
        ("training", "bias_swiglu_fusion = false", "write "),
        ("training", "masked_softmax_fusion = false", "write "),
        ("training", "masked_softmax_fusion = 1", "write "),
    ],
)
def test_a_key_that_may_mean_something_else_where_it_stands_is_refused(
    section: str, line: str, problem: str
) -> None:
    empty = dict.fromkeys(("model", "parallel", "training", "hardware"), "")
    key = line.partition(" ")[0]
    with pytest.raises(DataError, match=rf"{section}\.{key}: unknown key; {problem}") as raised:
        parse_job(SMALL.format(**empty | {section: line}))
    assert "more:" not in str(raised.value)


def test_what_is_taken_anyway_and_a_schedule_of_the_learning_rate_are_read_as_nothing() -> None:
    lines = 'scheduler = "cosine"\ntransformer_impl = "transformer_engine"\neps = 1e-8'
    text = SMALL.format(model="", parallel="", training=lines, hardware="")
    assert 'training: scheduler = "cosine" as nothing' in parse_job(text).notes


@pytest.mark.parametrize(
    ("parallel", "training", "problem"),
    [
        ("", 'sharding_strategy = "HYBRID_SHARD"', "does not say how many replicas there are"),
        ("", 'dp_type = "hsdp"', "does not say how many replicas there are"),
        (
            "pp = 2\nlocal_batch_size = 8", "microbatches = 8",
            r"training\.local_batch_size: may be one microbatch or all of them",
        ),
    ],
)  # fmt: skip
def test_a_key_in_another_table_is_judged_beside_the_others(
    parallel: str, training: str, problem: str, tmp_path: Path
) -> None:
    text = SMALL.format(model="", parallel=parallel, training=training, hardware="")
    if "local_batch_size" in parallel:
        text = text.replace("micro_batch = 1\nglobal_batch = 64\n", "")
    with pytest.raises(DataError, match=problem):
        parse_job(text)
    file = tmp_path / "job.toml"
    file.write_text(text)
    with pytest.raises(DataError, match=problem):
        read_job(file)


def test_axes_in_capitals_and_tables_of_other_names(tmp_path: Path) -> None:
    assert read_typed(PLAYBOOK, tmp_path) == {
        "model": "qwen3-235b-a22b", "gpu": "h100-sxm", "gpus": 256, "layout": (2, 8, 4, 32, 1),
        "dtype": "bf16", "framework": "megatron",
    }  # fmt: skip
    job = parse_job(PLAYBOOK)
    assert job.parallel.dispatcher == "deepep"
    assert {
        "[train] as [training]", "[cluster] as [hardware]",
        "parallel: TP, EP, PP, VPP in small letters",
    } <= {*job.notes}  # fmt: skip


def test_both_spellings_of_an_axis_are_refused() -> None:
    with pytest.raises(DataError, match=r"parallel\.TP: unknown key"):
        parse_job(PLAYBOOK.replace("EP = 32", "tp = 2"))


def test_adapters_and_formats_of_other_programs(tmp_path: Path) -> None:
    assert read_typed(ADAPTERS, tmp_path) == {
        "model": "llama-2-70b", "gpu": "mi355x", "gpus": 8, "layout": (1, 1, 1, 1, 1),
        "dtype": "fp8", "framework": "megatron",
    }  # fmt: skip
    assert "training: lora_alpha = 32 as nothing" in parse_job(ADAPTERS).notes


def test_arguments_of_transformers(tmp_path: Path) -> None:
    assert read_typed(TRAINER, tmp_path) == {
        "model": "qwen3-4b", "gpu": "a100-sxm-40gb", "gpus": 1, "layout": (1, 1, 1, 1, 1),
        "dtype": "bf16", "framework": "huggingface",
    }  # fmt: skip
    job = parse_job(TRAINER)
    assert (job.microbatches, job.training.optimizer) == (8, "adam-8bit")
    sharded = TRAINER.replace("num_gpus = 1", "num_gpus = 8\n[parallel]\nfsdp = 8")
    assert parse_job(sharded).training.framework == "fsdp2"


def test_a_key_before_the_tables_and_in_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('gpu = "H100"\n' + TYPED)
    with pytest.raises(DataError, match=r"stands before the tables, and in \[hardware\]"):
        read_job(file)


def test_one_batch_size_is_one_mistake() -> None:
    with pytest.raises(DataError) as raised:
        parse_job(TYPED.replace("mbs = 1\ngbs = 64", "batch_size = 2"))
    message = str(raised.value)
    assert "write micro_batch (sequences of a rank at once)" in message and "more" not in message


# Keys that mean something else beside others.

BESIDE = """
[model]
preset = "llama-3.1-70b"
[parallel]
gpus = 64
{layout}
[training]
seq_len = 8192
{training}
[hardware]
gpu = "h100"
"""


@pytest.mark.parametrize("key", ["local_batch_size", "device_batch_size"])
@pytest.mark.parametrize(
    "pipeline", ["pp = 4", "pipeline_parallel = 4", "layers_per_stage = [40, 40]"]
)
def test_the_batch_of_a_rank_is_refused_beside_a_pipeline(
    key: str, pipeline: str, tmp_path: Path
) -> None:
    batch = f"{key} = 8\nmicrobatches = 4"
    assert parse_job(BESIDE.format(layout="", training=batch)).training.micro_batch == 8
    problem = f"training.{key}: may be one microbatch or all of them"
    hint = "write micro_batch and microbatches"
    with pytest.raises(DataError, match=f"{problem}.*{hint}"):
        parse_job(BESIDE.format(layout=pipeline, training=batch))
    file = tmp_path / "job.toml"
    file.write_text(BESIDE.format(layout="", training=batch).replace("[training]", "[train]"))
    with pytest.raises(DataError, match=problem):
        read_job(file, settings=("pp=4",))
    assert read_job(file, settings=("pp=4", "micro_batch=1")).training.micro_batch == 1
    file.write_text(BESIDE.format(layout=pipeline, training=batch))
    with pytest.raises(DataError, match=problem):
        decode_job_to_plan(read_tables([file]))


@pytest.mark.parametrize(
    "line",
    [
        'strategy = "hsdp"',
        'dp_type = "H-SDP"',
        'sharding_strategy = "HYBRID_SHARD"',
        'fsdp = "hybrid_shard auto_wrap"',
    ],
)
def test_hybrid_shards_need_the_number_of_replicas(line: str, tmp_path: Path) -> None:
    batch = "micro_batch = 1\nmicrobatches = 1"
    text = BESIDE.format(layout=line, training=batch)
    with pytest.raises(DataError, match="does not say how many replicas there are; add dp_replic"):
        parse_job(text)
    job = parse_job(BESIDE.format(layout=f"{line}\ndp_replicate = 8", training=batch))
    assert (job.parallel.dp_replicate, job.parallel.dp_shard, job.parallel.zero) == (8, 8, 3)
    file = tmp_path / "job.toml"
    file.write_text(text)
    assert read_job(file, settings=("dp_replicate=8",)).parallel == job.parallel


@pytest.mark.parametrize("flags", ['bf16 = true\nfp8 = "hybrid"', "fp8 = true\nbf16 = true"])
def test_fp8_beside_bf16_is_fp8(flags: str) -> None:
    batch = f"{flags}\nmicro_batch = 1\nmicrobatches = 1"
    job = parse_job(BESIDE.format(layout="", training=batch))
    assert job.training.dtype == "fp8"
    assert "training: bf16 = true as nothing, beside fp8" in job.notes
    with pytest.raises(DataError, match="says the same as dtype, with another value"):
        parse_job(BESIDE.format(layout="", training=batch.replace("bf16", "fp16")))


@pytest.mark.parametrize("key", ["offload_optimizer", "optimizer_offload"])
@pytest.mark.parametrize(
    ("value", "offloaded"),
    [
        ('"none"', frozenset()),
        ('{ device = "none" }', frozenset()),
        ('{ device = "cpu", pin_memory = true }', frozenset({"optimizer"})),
        ('"cpu"', frozenset({"optimizer"})),
        ("false", frozenset()),
    ],
)
def test_an_offloaded_optimizer_as_deepspeed_says_it(
    key: str, value: str, offloaded: frozenset[str]
) -> None:
    training = f"micro_batch = 1\nmicrobatches = 1\n{key} = {value}"
    assert parse_job(BESIDE.format(layout="", training=training)).training.offload == offloaded


@pytest.mark.parametrize("key", ["shard_degree", "data_parallel_shard_degree", "fsdp"])
@pytest.mark.parametrize(("replicas", "shards"), [("", 32), ("dp_replicate = 4", 8)])
def test_a_shard_degree_of_minus_one_is_all_that_is_left(
    key: str, replicas: str, shards: int
) -> None:
    layout = f"tp = 2\n{replicas}\n{key} = -1"
    job = parse_job(BESIDE.format(layout=layout, training="micro_batch = 1\nmicrobatches = 1"))
    assert (job.parallel.dp_shard, job.parallel.zero) == (shards, 3)
    with pytest.raises(DataError, match="-2 is not a valid count"):
        parse_job(BESIDE.format(layout=f"{key} = -2", training="micro_batch = 1"))


def test_keys_before_the_tables_do_not_override_those_of_another_program(tmp_path: Path) -> None:
    file = tmp_path / "torchtitan.toml"
    file.write_text("tp = 2\n" + TORCHTITAN)
    with pytest.raises(DataError, match=r"parallel\.tp: 2 beside tables that say tp = 4; remove"):
        read_job(file)
    file.write_text("tp = 4\n" + TORCHTITAN)
    assert read_job(file).parallel.tp == 4
    assert read_job(file, settings=("tp=2", "dp_shard=8")).parallel.tp == 2


@pytest.mark.parametrize(
    ("words", "link"),
    [
        ("400G InfiniBand", "ib-ndr-400"),
        ("IB NDR", "ib-ndr-400"),
        ("NDR200", "ib-hdr-200"),
        ("HDR200 x 8", "ib-hdr-200"),
        ("8x 400G InfiniBand", "ib-ndr-400"),
        ("RoCE 200 Gb/s", "roce-200"),
        ("efa-p5", "efa-p5"),
    ],
)
def test_a_network_by_its_kind_and_rate(words: str, link: str) -> None:
    batch = "micro_batch = 1\nmicrobatches = 1"
    plain = BESIDE.format(layout="", training=batch)
    for key in ("network", "nic", "nodes_link"):
        job = parse_job(f'{plain}{key} = "{words}"\n')
        assert job.hardware.inter.name == link


def test_a_network_without_a_rate_is_asked_for() -> None:
    text = BESIDE.format(layout="", training="micro_batch = 1\nmicrobatches = 1")
    with pytest.raises(DataError, match="'infiniband' is unknown; write ib-ndr-400"):
        parse_job(f'{text}network = "infiniband"\n')


@pytest.mark.parametrize(
    "lines",
    [
        "batch_size = 2\ngrad_accum = 4",
        "batch_size_per_gpu = 2\ngrad_accum_steps = 4",
        "per_gpu_batch_size = 2\naccumulate_grad_batches = 4",
    ],
)
def test_microbatches_as_other_trainers_count_them(lines: str) -> None:
    words = 'mixed_precision = "bf16-mixed"\ntorch_compile = true\ncheckpoint_activations = true'
    training = parse_job(BESIDE.format(layout="", training=f"{lines}\n{words}")).training
    assert (training.micro_batch, training.global_batch) == (2, 2 * 4 * 64)
    assert (training.dtype, training.compile, training.recompute) == ("bf16", True, "full")


def test_a_missing_size_is_named_once() -> None:
    text = BESIDE.format(layout="", training="micro_batch = 1\nmicrobatches = 1")
    sizes = "layers = 24\nheads = 16\nvocab = 50304\nhidden_dim = 2048"
    with pytest.raises(DataError) as raised:
        parse_job(text.replace('preset = "llama-3.1-70b"', sizes))
    assert "write hidden (width of the model) or ffn (of an MLP)" in str(raised.value)
    assert str(raised.value).count("hidden") == 4
    assert "divisible" not in str(raised.value)
