"""Keys as other programs name them, in a job.toml that someone typed from memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from stepsplit.analyzer import read_job
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.config_file import MODEL_KEYS, PARALLEL_KEYS, TRAINING_KEYS, parse_job
from stepsplit.analyzer.model.hardware_config import HARDWARE_KEYS
from stepsplit.analyzer.model.key_aliases import ALIASES
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
            # strategy = true says nothing.
            assert set(convert(True)) <= {*keys[section], "strategy"}, alias
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
        "model: sequence_length = 8192 as training: seq_len = 8192",
        'parallel: strategy = "FSDP" as zero = 3',
        "parallel: virtual_pipeline_stages = 1 as chunks = 1",
        "hardware: num_nodes = 1 as parallel: nodes = 1",
        "parallel: nodes = 1 as gpus = 8",
    } <= set(job.notes)


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
        ("mbs = 1", "mbs = 1\ntp = 2", "training.tp: unknown key; move it under [parallel]"),
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
        parse_job(ELSEWHERE.replace("mbs = 1", "mbs = 0\ntp = 2").replace("gbs = 64", "gbs = 0"))
    first, others = str(raised.value).split("; and 2 more: ")
    assert first.endswith("move it under [parallel]") and "\n" not in others
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

    assert note("") == [
        "model as 5.63B parameters, but llama-3.1-8b has 8.03B: gated, tied are not stated (taken: "
        'gated = false, tied = true); write preset = "llama-3.1-8b" or state them'
    ]
    assert note("gated = true") == ["model: tied = false (not stated)"]
    assert note("gated = true\ntied = false") == []
    assert note("gated = false\ntied = true") == [
        'model as 5.63B parameters, but llama-3.1-8b has 8.03B; write preset = "llama-3.1-8b" or '
        "another name"
    ]
    file = tmp_path / "job.toml"
    file.write_text(NUMBERS.format(keys=""))
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
    with pytest.raises(DataError, match=r"batch_size: unknown key; write micro_batch_size"):
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
