"""Keys as other programs name them, in a job.toml that someone typed from memory."""

from __future__ import annotations

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
            assert set(convert(True)) <= set(keys[section]), alias
            assert alias == "dropout" or alias not in keys[section], alias


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
