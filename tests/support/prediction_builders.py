"""A job and what a prediction of it says, laid down by hand: two stages, tp 2, dp 2."""

from __future__ import annotations

from stepsplit.analyzer import (
    Band,
    CommOp,
    Communication,
    Efficiency,
    HardwareConfig,
    JobConfig,
    ModelConfig,
    ParallelConfig,
    Prediction,
    Split,
    StageMemory,
    TrainingConfig,
)
from stepsplit.analyzer.model.comm_ops import PIPELINE, TENSOR
from stepsplit.analyzer.model.comm_time import CHOICE
from stepsplit.analyzer.model.comm_volume import DDP
from stepsplit.analyzer.model.config import Link
from stepsplit.analyzer.model.formulas import Formula

MS = 1_000_000
GIB = 2**30
MIB = 2**20

H100 = HardwareConfig(
    name="h100-sxm",
    family="hopper",
    peaks_flops_per_s=(("bf16", 1e15), ("fp32", 5e14)),
    memory_bytes=80 * GIB,
    memory_bytes_per_s=3.35e12,
    gpus_per_node=8,
    intra=Link("nvlink4", 450e9, 0.8, 2_000),
    inter=Link("ib-ndr-400", 50e9, 0.9, 5_000),
    host=Link("pcie-5", 55e9, 0.9, 10_000),
    efficiency=Efficiency(
        gemm=0.8, attention=0.5, unfused_attention=0.3, memory=0.8, launch_ns=5_000
    ),
    nvls=1.0,
)

GPT = ModelConfig(
    layers=24, hidden=2048, heads=16, kv_heads=16, head_size=128, ffn=8192, vocab=50_000,
    positions=2048, name="gpt-1.3b",
)  # fmt: skip


def job(
    model: ModelConfig = GPT,
    layout: ParallelConfig | None = None,
    recipe: TrainingConfig | None = None,
    hardware: HardwareConfig = H100,
) -> JobConfig:
    """A GPT of 1.3 billion parameters on one node: pp 2, tp 2, dp 2, eight microbatches."""
    return JobConfig(
        model,
        layout or ParallelConfig(tp=2, pp=2, dp_replicate=2),
        recipe or TrainingConfig(seq_len=2048, micro_batch=1, global_batch=16, recompute="full"),
        hardware,
    )


def prediction() -> Prediction:
    """What a model may say of that job; round numbers that agree with each other."""
    first = Split(360 * MS, 30 * MS, 2 * MS, 0, 60 * MS, 0, 8 * MS, overlapped_ns=5 * MS)
    last = Split(400 * MS, 33 * MS, 2 * MS, 0, 17 * MS, 0, 8 * MS)
    return Prediction(
        parameters=1_311_000_000,
        parameters_per_stage=(354_000_000, 353_000_000),
        memory=(
            StageMemory(0, 1 * GIB, 2 * GIB, 4 * GIB, 6 * GIB, GIB // 2, GIB),
            StageMemory(1, 1 * GIB, 2 * GIB, 4 * GIB, 3 * GIB, GIB // 2, GIB),
        ),
        model_flops=297_280_456_359_936,
        hardware_flops=389_639_433_093_120,
        communication=(
            _communication("tp", "all_reduce", "tp", 1, "forward", 192, 8 * MIB, 12, 0),
            _communication("tp", "all_reduce", "tp", 1, "backward", 192, 8 * MIB, 12, 0),
            _communication("ddp", "all_reduce", "dp", 1, "grad_sync", 30, 40 * MIB, 12, 3),
            _communication("pp", "send", "pp", 1, "backward", 8, 8 * MIB, 2, 0),
            _communication("pp", "send", "pp", 0, "forward", 8, 8 * MIB, 2, 0),
        ),
        bubble_fraction=1 / 9,
        bubble_overhead=1 / 8,
        splits=(first, last),
        split=last,
        low_ns=430 * MS,
        high_ns=500 * MS,
        convention="C1",
        mfu=0.0808,
        hfu=0.1059,
        tokens_per_s_per_gpu=8904.3,
        fits=True,
        confidence="high",
        notes=("host-bound: launching a layer takes about as long as computing it",),
        formulas=(Formula("pipeline.bubble", "(p-1)/(m+p-1)", "Narayanan SC'21 section 2.2.1"),),
    )


def _communication(
    strategy: str, op: str, axis: str, stage: int, phase: str, count: int, message_bytes: int,
    time_ms: int, hidden_ms: int,
) -> Communication:  # fmt: skip
    formula = {"tp": TENSOR, "ddp": DDP, "pp": PIPELINE}[strategy]
    message = CommOp(
        strategy, op, axis, stage, phase, count, message_bytes, message_bytes, message_bytes,
        (formula,),
    )  # fmt: skip
    time = Band(time_ms * MS, (time_ms - 1) * MS, (time_ms + 2) * MS, (CHOICE,))
    return Communication(message, time, (time_ms - hidden_ms) * MS)
