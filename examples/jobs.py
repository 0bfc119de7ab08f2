"""Every run of the examples, beside each the job.toml that describes it to `stepsplit model`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Example:
    """One run: torchrun --nproc-per-node {ranks} examples/{script} {arguments}.

    job is the job.toml of that very run.
    """

    name: str
    script: str
    arguments: tuple[str, ...]
    ranks: int
    job: str


def _example(name: str, command: str, ranks: int, job: str) -> Example:
    script, *arguments = command.split()
    return Example(name, script, tuple(arguments), ranks, job)


def _job(
    parallel: str,
    framework: str,
    *,
    sequences: int = 16,
    dtype: str = "fp32",
    hardware: str = "cpu",
    model: str = "",
    training: str = "",
) -> str:
    """job.toml's text; parallel, model and training are further lines of its tables."""
    return f"""[model]
layers = 4
hidden = 128
heads = 4
vocab = 512
learned_positions = true
tied = false
biases = false
{model}
[parallel]
{parallel}

[training]
seq_len = 64
micro_batch = 8
global_batch = {sequences}
dtype = "{dtype}"
optimizer = "adam"
framework = "{framework}"
{training}
[hardware]
preset = "{hardware}"
"""


_DDP = _job("dp = 2", "ddp")
_FSDP = _job("dp_shard = 2", "fsdp2")
_KEPT = _job('dp_shard = 2\nreshard_after_forward = "never"', "fsdp2")
_OFFLOADED = _job("dp_shard = 2", "fsdp2", training='offload = ["optimizer", "parameters"]\n')
_OFFLOADED_STATES = 'offload = ["optimizer"]\n'
_HSDP = _job("dp_replicate = 2\ndp_shard = 2", "fsdp2", sequences=32)
_TENSOR = _job("tp = 2", "fsdp2", sequences=8)
_SEQUENCE = _job("tp = 2\nsequence_parallel = true", "fsdp2", sequences=8)
_EXPERTS = _job("dp = 2\nep = 2", "megatron", model="experts = 4\ntop_k = 2\n")
_THREE_D = _job("tp = 2\npp = 2\ndp = 2", "megatron", sequences=64)


def _pipeline(schedule: str, called: str = "", ranks: int = 2, further: str = "") -> Example:
    """pipeline.py with a schedule; called: the model's word for it."""
    parallel = f'pp = {ranks}\nschedule = "{called or schedule}"{further}'
    job = _job(parallel, "fsdp2", sequences=32)
    name = f"pipeline-{schedule}" + (f"-{ranks}-ranks" if ranks > 2 else "")
    return _example(name, f"pipeline.py --schedule {schedule}", ranks, job)


def _recomputing(way: str) -> Example:
    job = _job("dp_shard = 2", "fsdp2", training=f'recompute = "{way}"\n')
    return _example(f"checkpointing-{way}", f"checkpointing.py --recompute {way}", 2, job)


def _precision(dtype: str) -> Example:
    # Of the devices that the model knows a CPU computes nothing in fp16.
    job = _job("dp = 2", "ddp", dtype=dtype, hardware="h100-sxm")
    return _example(f"precision-{dtype}", f"precision.py --dtype {dtype}", 2, job)


def _deepspeed(zero: int, further: str = "", sequences: int = 16, training: str = "") -> Example:
    job = _job(f"dp = 2\nzero = {zero}", "deepspeed", sequences=sequences, training=training)
    command = f"deepspeed_zero.py --zero {zero}{further}"
    name = f"deepspeed-zero{zero}{further.removesuffix(' 2').replace(' -', '')}"
    return _example(name, command, 2, job)


EXAMPLES = (
    _example("ddp", "ddp.py", 2, _DDP),
    _example("ddp-accumulate", "ddp.py --accumulate 2", 2, _job("dp = 2", "ddp", sequences=32)),
    _example("zero1", "zero1.py", 2, _job("dp = 2\nzero = 1", "ddp")),
    _example("fsdp-zero2", "fsdp.py --zero 2", 2, _KEPT),
    _example("fsdp-zero3", "fsdp.py --zero 3", 2, _FSDP),
    _example("fsdp-offload", "fsdp.py --zero 3 --offload", 2, _OFFLOADED),
    _example("hsdp", "fsdp.py --replicas 2", 4, _HSDP),
    _example("tensor", "tensor.py", 2, _TENSOR),
    _example("tensor-sequence", "tensor.py --sequence-parallel", 2, _SEQUENCE),
    *(_pipeline(schedule) for schedule in ("naive", "gpipe", "1f1b", "zb-v", "dualpipe-v")),
    _pipeline("interleaved", further="\nchunks = 2"),
    _pipeline("zero-bubble", called="zb-h1"),
    _pipeline("1f1b", ranks=4),
    _example("context", "context.py", 2, _job("cp = 2", "ddp", sequences=8)),
    _example("context-4-ranks", "context.py", 4, _job("cp = 4", "ddp", sequences=8)),
    _example("experts", "experts.py", 2, _EXPERTS),
    _example("three-d", "three_d.py", 8, _THREE_D),
    *(_recomputing(way) for way in ("none", "full", "selective")),
    *(_precision(dtype) for dtype in ("bf16", "fp16")),
    _deepspeed(1),
    # With one microbatch ZeRO-2 sends what ZeRO-1 does.
    _deepspeed(2, " --accumulate 2", sequences=32),
    _deepspeed(3),
    *(_deepspeed(zero, " --offload", training=_OFFLOADED_STATES) for zero in (1, 2, 3)),
)
"""fp8 is left out: it needs a GPU."""
