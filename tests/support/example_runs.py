"""Runs of the scripts under examples/, and what the analyzer makes of their traces alone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from stepsplit.analyzer.gap.comm_gap import MessageComparison, collect_messages, compare_messages
from stepsplit.analyzer.model.config_file import parse_job
from stepsplit.analyzer.model.predict import predict
from support.dashboard_processes import find_free_port
from support.splitting import RunSplit, recording_of, split_of

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from jobs import EXAMPLES as JOBS, Example  # type: ignore[import-not-found]  # noqa: E402

__all__ = ["EXAMPLES", "JOBS", "SEEN", "Example", "Outcome", "outcome", "record_example"]

_LONGEST_S = 240

_ZERO_1 = "zero-1 (or zero-2: with one microbatch they send the same)"
_LAYERS = ("tp", "vocabulary", "loss")
SEEN = {
    "ddp": (("ddp",), "dp_replicate=2"),
    "ddp-accumulate": (
        ("ddp", "gradient accumulation (2 microbatches, gradients summed once)"),
        "dp_replicate=2",
    ),
    "zero1": (("zero-1",), "dp_replicate=2"),
    "fsdp-zero2": (("zero-2 (weights kept until the backward)",), "dp_shard=2"),
    "fsdp-zero3": (("fsdp",), "dp_shard=2"),
    "fsdp-offload": (("fsdp",), "dp_shard=2"),
    "hsdp": (("hsdp (2 replicas)",), "dp_replicate=2 dp_shard=2"),
    "tensor": (_LAYERS, "tp=2"),
    "tensor-sequence": (("tp", "sp", "vocabulary", "loss"), "tp=2"),
    "pipeline-naive": (("pp (naive)",), "pp=2"),
    "pipeline-gpipe": (("pp (gpipe)",), "pp=2"),
    "pipeline-1f1b": (("pp (1f1b)",), "pp=2"),
    "pipeline-1f1b-4-ranks": (("pp (1f1b)",), "pp=4"),
    "pipeline-interleaved": (("pp (interleaved)",), "pp=2"),
    "pipeline-zero-bubble": (("pp (zb-h1)",), "pp=2"),
    "pipeline-zb-v": (("pp (zb-v)",), "pp=2"),
    "pipeline-dualpipe-v": (("pp (dualpipe-v)",), "pp=2"),
    # DDP reduces the gradients of a ring's ranks.
    "context": (("ddp", "cp (ring)"), "cp=2"),
    "context-4-ranks": (("ddp", "cp (ring)"), "cp=4"),
    "experts": (("ddp", "ep"), "dp_replicate=2"),
    "three-d": (("ddp", *_LAYERS, "pp (1f1b)"), "pp=2 dp_replicate=2 tp=2"),
    "checkpointing-none": (("fsdp",), "dp_shard=2"),
    "checkpointing-full": (("fsdp", "recompute (full)"), "dp_shard=2"),
    "checkpointing-selective": (("fsdp", "recompute (selective)"), "dp_shard=2"),
    "precision-bf16": (("ddp", "autocast"), "dp_replicate=2"),
    "precision-fp16": (("ddp", "autocast", "loss scaling"), "dp_replicate=2"),
    "deepspeed-zero1": ((_ZERO_1,), "dp_replicate=2"),
    "deepspeed-zero2-accumulate": (
        (
            "zero-2",
            "gradient accumulation (2 microbatches, gradients summed after each)",
        ),
        "dp_replicate=2",
    ),
    "deepspeed-zero3": (("fsdp",), "dp_shard=2"),
    "deepspeed-zero1-offload": ((_ZERO_1,), "dp_replicate=2"),
    "deepspeed-zero2-offload": ((_ZERO_1,), "dp_replicate=2"),
    "deepspeed-zero3-offload": (("fsdp",), "dp_shard=2"),
}
"""The strategies and the mesh inferred from the traces alone, by run."""


@dataclass(frozen=True)
class Outcome:
    """A recorded run without its run.json and records: its split, and messages beside the model's.

    strategies are words such as "tp" and "pp (1f1b)", mesh such as "pp=2 tp=2" or "".
    """

    split: RunSplit
    strategies: tuple[str, ...]
    mesh: str
    messages: MessageComparison


def record_example(example: Example, out: Path) -> str:
    """Runs the example, one process a rank, and returns what they print; raises where one fails."""
    script = str(EXAMPLES / example.script)
    command = [sys.executable, script, *example.arguments, "--out", str(out)]
    port = find_free_port()
    ranks = [
        subprocess.Popen(
            command,
            env=_environment(rank, example.ranks, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(example.ranks)
    ]
    try:
        said = [rank.communicate(timeout=_LONGEST_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = [text for rank, text in zip(ranks, said, strict=True) if rank.returncode]
    assert not failed, failed[0][-2000:]
    return "".join(said)


def outcome(example: Example, folder: Path) -> Outcome:
    """What the traces alone tell: run.json and the ranks' records are deleted first."""
    for path in (*folder.glob("rank*_record.json"), folder / "run.json"):
        path.unlink()
    recording = recording_of(folder)
    assert recording.spec is None
    split = split_of(recording)
    mesh = split.layout.mesh
    axes = () if mesh is None else zip(mesh.axes, mesh.sizes, strict=True)
    return Outcome(
        split=split,
        strategies=tuple(
            f"{s.name} ({s.detail})" if s.detail else s.name for s in split.strategies
        ),
        mesh=" ".join(f"{axis}={size}" for axis, size in axes),
        messages=compare_messages(collect_messages(split), predict(parse_job(example.job))),
    )


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """As torchrun gives it to a rank."""
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
