"""The job of a recorded run: from run.json, the steps and a part of a job.toml."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from support.builders import GpuTrace
from support.splitting import Recording, RunSplit, recording_of, split_of

from stepsplit.analyzer import JobConfig, UsageError, analyze, predict
from stepsplit.analyzer.gap.comm_gap import collect_messages, compare_messages
from stepsplit.analyzer.gap.config_from_trace import infer_job
from stepsplit.analyzer.model.config_decode import TomlTable, parse_table
from stepsplit.analyzer.model.preset_names import find_preset
from stepsplit.collectors import Mesh, ModelSpec, RunSpec, Training
from stepsplit.collectors.formats.run_spec import HostInfo

SAMPLES = Path(__file__).parents[2] / "sample_traces"
SHAPE = ModelSpec(
    layers=2, hidden=64, heads=4, kv_heads=4, ffn=256, gated=False, vocab=100, tied=False,
    learned_positions=32, norm="layer", biases=False,
)  # fmt: skip
TRAINING = Training(seq_len=32, micro_batch=4, global_batch=16, dtype="fp32", framework="torch")
HOST = HostInfo("host0", gpu="NVIDIA H100 80GB HBM3", gpus=2)
SPEC = RunSpec("run", 2, "nccl", Mesh.of({"tp": 2}), model=SHAPE, training=TRAINING, hosts=(HOST,))
SAMPLED = """
[model]
learned_positions = true
norm = "rms"
biases = false
"""
"""Settings that the collector did not record in the samples."""


def stated(text: str) -> TomlTable:
    return parse_table("job.toml", text.encode())


def found_in(folder: Path) -> tuple[Recording, RunSplit]:
    recording = recording_of(folder)
    return recording, split_of(recording)


@pytest.fixture
def found(tmp_path: Path) -> RunSplit:
    """Two ranks that only compute."""
    for rank in range(2):
        GpuTrace(rank, 2).step(1, 0, 100).kernel("gemm", 0, 90).write(tmp_path)
    return found_in(tmp_path)[1]


def on(found: RunSplit, mesh: Mesh) -> RunSplit:
    """The same ranks with a mesh."""
    layout = structs.replace(found.layout, mesh=mesh)
    return structs.replace(found, layout=layout)


def job(found: RunSplit, spec: RunSpec, text: str | None = None) -> JobConfig:
    split = found if spec.mesh is None else on(found, spec.mesh)
    return infer_job(spec, split, None if text is None else stated(text))


def test_run_json_alone_makes_a_job(found: RunSplit) -> None:
    made = job(found, SPEC)
    assert (made.model.layers, made.model.positions, made.model.biases) == (2, 32, False)
    assert (made.parallel.tp, made.parallel.dp, made.parallel.zero) == (2, 1, 0)
    assert (made.training.seq_len, made.training.dtype, made.microbatches) == (32, "fp32", 4)
    assert made.hardware.name == "h100-sxm"


@pytest.mark.parametrize(
    ("axis", "said", "framework", "zero"),
    [
        ("tp", "torch", "fsdp2", 0),
        ("dp_replicate", "torch", "ddp", 0),
        ("dp_shard", "torch", "fsdp2", 3),
        ("dp_shard", "torchtitan", "fsdp2", 3),
        ("dp_shard", "deepspeed", "deepspeed", 3),
        ("dp_replicate", "megatron-lm", "megatron", 0),
        ("dp_replicate", None, "ddp", 0),
    ],
)
def test_a_loop_of_ones_own_is_what_sends_the_same(
    found: RunSplit, axis: str, said: str | None, framework: str, zero: int
) -> None:
    training = replace(TRAINING, framework=said)
    made = job(found, replace(SPEC, mesh=Mesh.of({axis: 2}), training=training))
    assert (made.training.framework, made.parallel.zero) == (framework, zero)
    assert getattr(made.parallel, axis) == 2


def test_gradients_of_cut_weights_are_summed_by_hand(found: RunSplit) -> None:
    spec = replace(SPEC, world_size=4, mesh=Mesh.of({"dp": 2, "tp": 2}))
    made = job(found, spec)
    sums = [one.message for one in predict(made).communication if one.message.strategy == "ddp"]
    assert [(one.op, one.count) for one in sums] == [("all_reduce", 1)]
    assert made.parallel.overlap == frozenset()


def test_axis_options_are_read_from_run_json(found: RunSplit) -> None:
    training = replace(TRAINING, zero=1, split_vocab=False, bucket_bytes=1024, recompute="full")
    made = job(found, replace(SPEC, mesh=Mesh.of({"dp": 2}), training=training))
    parallel = made.parallel
    assert (parallel.zero, parallel.split_vocab, parallel.bucket_bytes) == (1, False, 1024)
    assert made.training.recompute == "full"


def test_several_states_may_be_offloaded(found: RunSplit) -> None:
    training = replace(TRAINING, offload="optimizer, parameters")
    made = job(found, replace(SPEC, mesh=Mesh.of({"fsdp": 2}), training=training))
    assert made.training.offload == {"optimizer", "parameters"}


def test_ranks_in_another_order(found: RunSplit) -> None:
    made = job(found, replace(SPEC, world_size=4, mesh=Mesh.of({"tp": 2, "dp": 2})))
    assert made.parallel.rank_order == ("dp", "tp", "cp", "ep", "pp")


def test_what_is_stated_wins(found: RunSplit) -> None:
    text = "[model]\nvocab = 128\n[parallel]\ndp = 2\ntp = 1\n[training]\nmicrobatches = 2\n"
    made = job(found, SPEC, text)
    assert (made.model.vocab, made.model.layers) == (128, 2)
    assert (made.parallel.dp, made.parallel.tp, made.microbatches) == (2, 1, 2)


def test_a_stated_preset_is_taken_whole(found: RunSplit) -> None:
    made = job(found, SPEC, '[model]\npreset = "gpt2-124m"\n[hardware]\npreset = "h200-sxm"\n')
    assert (made.model.name, made.model.layers) == ("gpt2-124m", 12)
    assert made.hardware.name == "h200-sxm"


def test_an_unknown_table_is_refused(found: RunSplit) -> None:
    with pytest.raises(Exception, match="modell"):
        job(found, SPEC, "[modell]\nvocab = 128\n")


def test_missing_keys_are_listed(found: RunSplit) -> None:
    spec = RunSpec("run", 2, "nccl", Mesh.of({"tp": 2}), training=Training(micro_batch=1))
    with pytest.raises(UsageError) as error:
        job(found, spec)
    assert str(error.value) == (
        "cannot infer [model] layers, hidden, heads, vocab, [training] seq_len, global_batch"
        " and [hardware] preset from the recording; analyze --write-job job.toml writes the rest;"
        " add them and pass it with --job"
    )


def test_the_file_that_lacks_them_is_named(found: RunSplit) -> None:
    spec = replace(SPEC, model=replace(SHAPE, vocab=None, gated=True, ffn=None))
    with pytest.raises(UsageError) as error:
        job(found, spec, "[model]\nhidden = 64\n")
    assert str(error.value) == (
        "cannot infer [model] vocab, ffn from the recording; add them to job.toml"
    )


def test_a_trace_alone_needs_a_run_file(found: RunSplit) -> None:
    """Two ranks with an unknown mesh may have any layout."""
    words = r"\[model\] layers, hidden, heads, vocab, \[parallel\] tp, pp, dp, \[training\]"
    with pytest.raises(UsageError, match=words):
        infer_job(None, found)


def test_two_ranks_without_run_json_take_the_layout_of_the_job_file(found: RunSplit) -> None:
    text = """
[model]
preset = "gpt2-124m"
[parallel]
dp = 2
[training]
seq_len = 128
micro_batch = 1
microbatches = 3
[hardware]
preset = "h100-sxm"
"""
    made = infer_job(None, found, stated(text))
    assert (made.parallel.world_size, made.microbatches) == (2, 3)


@pytest.mark.parametrize(
    ("device", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H20", "h20-sxm"),
        ("NVIDIA H800", "h800-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16gb"),
        ("Tesla V100-SXM3-32GB", "v100-sxm-32gb"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144gb"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H800 PCIe", None),
        ("NVIDIA B200", "b200-sxm"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300-sxm"),
        ("NVIDIA GB300", "gb300"),
        ("AMD Instinct MI300X", "mi300x"),
        ("cpu", "cpu"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA A40-48Q", None),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("", None),
    ],
)
def test_what_a_driver_calls_a_device(device: str, preset: str | None) -> None:
    assert find_preset(device) == preset


@pytest.mark.parametrize(
    ("sample", "further"),
    [
        ("dp4", "bucket_bytes = 4194304"),
        ("fsdp4", "root_unit = true"),
        ("tp2_pp2", ""),
        ("tp2_pp2_dp2", ""),
        ("pp2_m2", ""),
        ("pp2_m8", ""),
    ],
)
def test_recorded_runs_send_what_their_job_predicts(sample: str, further: str) -> None:
    recording, found = found_in(SAMPLES / sample)
    run = stated(f"{SAMPLED}[parallel]\n{further}\n")
    made = predict(infer_job(recording.spec, found, run))
    assert recording.spec is not None and recording.spec.model is not None
    assert made.parameters == recording.spec.model.parameters
    assert compare_messages(collect_messages(found), made).equal


def test_a_step_of_centuries_is_refused_in_one_line(tmp_path: Path) -> None:
    """Its parts would not add up to the ns."""
    stated_job = tmp_path / "job.toml"
    stated_job.write_text("[training]\nglobal_batch = 960000000000000000\n")
    with pytest.raises(UsageError, match="more than 100 days; check global_batch"):
        analyze(SAMPLES / "tp2_pp2", job=stated_job)
