"""Published layouts of large models: predicted step against the published one, and their rank.

python tests/benchmarks/published_layouts.py [--plan] [--name WORD]

Prints the table of docs/model.md. --plan also searches all layouts of each model on its GPUs, and
names the rank of the published split among the best 8 and what the search took.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.config_file import parse_job, read_job_to_plan
from stepsplit.analyzer.model.parameters import Convention, count_model_flops
from stepsplit.analyzer.model.plan import plan
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.prediction import Prediction

TOP = 8
"""Splits of the GPUs that the search returns."""


@dataclass(frozen=True, slots=True)
class PublishedLayout:
    """A run with its job.toml and its published seconds per step, or TFLOP/s per GPU and how its
    FLOPs are counted."""

    name: str
    source: str
    toml: str
    seconds: float = 0.0
    tflops: float = 0.0
    convention: Convention = "C1"

    def compute_step_s(self, job: JobConfig) -> float:
        if self.seconds:
            return self.seconds
        flops = count_model_flops(job, self.convention)
        return flops / (self.tflops * 1e12 * job.parallel.world_size)


def _write_toml(model: str, parallel: str, training: str, hardware: str) -> str:
    tables = zip(
        ("model", "parallel", "training", "hardware"), (model, parallel, training, hardware),
        strict=True,
    )  # fmt: skip
    return "\n".join(f"[{name}]\n" + body.replace("; ", "\n") for name, body in tables)


LLAMA = 'preset = "llama-3.1-405b"'
LLAMA_LAYERS = f"layers_per_stage = {[1, *[2] * 62, 1]}"
LLAMA_LAYOUT = (
    'zero = 2; sequence_parallel = true; overlap = ["dp"]; schedule = "interleaved"; chunks = 4; '
    + LLAMA_LAYERS
)
"""The paper interleaves with a number of chunks that it does not say; 4 assumed."""
H100, A100 = 'preset = "h100-sxm"', 'preset = "a100-sxm-80gb"'
NEMOTRON = (
    'zero = 1; sequence_parallel = true; schedule = "interleaved"; chunks = 8;'
    ' overlap = ["dp", "tp"]'
)
MOE = (
    'pp = 16; ep = 64; dp = 128; expert_tp = 1; zero = 1; schedule = "dualpipe";'
    ' overlap = ["ep", "dp"]; dispatcher = "deepep"; expert_nodes = 4;'
    " layers_per_stage = [3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2]"
)
FALCON = (
    "layers = 80; hidden = 14848; heads = 232; kv_heads = 8; head_size = 64; ffn = 59392;"
    " vocab = 65024; biases = false; parallel_block = true"
)

LAYOUTS = (
    PublishedLayout(
        "BLOOM 176B, 384 A100", "arXiv:2211.05100, section 3.4: 156 TFLOP/s with recomputation",
        _write_toml(
            'preset = "bloom-176b"',
            "tp = 4; pp = 12; dp = 8; zero = 1; layers_per_stage ="
            " [5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5]",
            'seq_len = 2048; micro_batch = 2; global_batch = 2048; recompute = "full"', A100,
        ),
        tflops=156.0, convention="C3",
    ),
    PublishedLayout(
        "OPT-175B, 992 A100", "arXiv:2205.01068, section 2.4: 147 TFLOP/s, up to",
        _write_toml(
            'preset = "opt-175b"', 'tp = 8; dp = 124; zero = 3; overlap = ["dp"]',
            'seq_len = 2048; micro_batch = 8; global_batch = 992; framework = "fsdp2";'
            ' recompute = "full"', A100,
        ),
        tflops=147.0, convention="C3",
    ),
    PublishedLayout(
        "Falcon-180B, 4,096 A100 40 GB",
        "arXiv:2311.16867: tp 8, pp 8, dp 64; 3.5T tokens in 7.0M GPU hours, stops included",
        _write_toml(
            FALCON, "tp = 8; pp = 8; dp = 64; zero = 1; sequence_parallel = true",
            "seq_len = 2048; micro_batch = 1; global_batch = 2048; flash_attention = true;"
            " dropout = false; fused_loss = true", 'preset = "a100-sxm-40gb"',
        ),
        seconds=2048 * 2048 * 7.0e6 * 3600 / (3.5e12 * 4096),
    ),
    PublishedLayout(
        "Nemotron-4 340B, 1,536 H100", "arXiv:2406.11704, table 3",
        _write_toml(
            'preset = "nemotron-4-340b"', f"tp = 8; pp = 12; dp = 16; {NEMOTRON}",
            "seq_len = 4096; micro_batch = 1; global_batch = 768", H100,
        ),
        seconds=10.3,
    ),
    PublishedLayout(
        "Nemotron-4 340B, 6,144 H100", "arXiv:2406.11704, table 3",
        _write_toml(
            'preset = "nemotron-4-340b"', f"tp = 8; pp = 12; dp = 64; {NEMOTRON}",
            "seq_len = 4096; micro_batch = 1; global_batch = 2304", H100,
        ),
        seconds=8.0,
    ),
    PublishedLayout(
        "Llama 3 405B, 8,192 H100, 8k", "arXiv:2407.21783, table 4: 430 TFLOP/s, causal",
        _write_toml(
            LLAMA, f"tp = 8; pp = 16; dp = 64; {LLAMA_LAYOUT}",
            "seq_len = 8192; micro_batch = 1; global_batch = 2048", H100,
        ),
        tflops=430.0, convention="C5",
    ),
    PublishedLayout(
        "Llama 3 405B, 16,384 H100, 131k", "arXiv:2407.21783, table 4: 380 TFLOP/s, causal",
        _write_toml(
            LLAMA,
            f'tp = 8; pp = 16; cp = 16; dp = 8; context = "all-gather"; {LLAMA_LAYOUT}',
            "seq_len = 131072; micro_batch = 1; global_batch = 128", H100,
        ),
        tflops=380.0, convention="C5",
    ),
    PublishedLayout(
        "DeepSeek-V3, 2,048 H800", "arXiv:2412.19437: 180,000 GPU hours per 1T tokens",
        _write_toml(
            'preset = "deepseek-v3"; mtp_layers = 1', MOE,
            'seq_len = 4096; micro_batch = 1; global_batch = 15360; dtype = "fp8";'
            ' recompute = ["mla-up", "norms", "activation"]; fp8_activations = true;'
            ' moments_dtype = "bf16"', 'preset = "h800-sxm"',
        ),
        seconds=15360 * 4096 * 180_000 * 3600 / (1e12 * 2048),
    ),
)  # fmt: skip


def describe(one: PublishedLayout, search: bool) -> str:
    """A row of the table."""
    job = parse_job(one.toml, one.name)
    found, published_s = predict(job), one.compute_step_s(job)
    step_s = found.split.step_ns / 1e9
    cells = [
        one.name, f"{published_s:.2f} s", f"{step_s:.2f} s", f"{step_s / published_s - 1:+.1%}",
        _describe_band(found, published_s), "yes" if found.fits else "no",
    ]  # fmt: skip
    cells += _describe_rank(one, job, found) if search else []
    return f"| {' | '.join([*cells, one.source])} |"


def _describe_band(found: Prediction, published_s: float) -> str:
    low, high = found.low_ns / 1e9, found.high_ns / 1e9
    inside = "inside" if low <= published_s <= high else "outside"
    return f"{low:.1f} to {high:.1f} s: {inside}"


def _describe_rank(one: PublishedLayout, job: JobConfig, found: Prediction) -> list[str]:
    """The rank of the published split in plan's result, how much its best is faster, and the CPU
    time of the search."""
    started = time.process_time()
    best = plan(_read_to_plan(one), job.parallel.world_size, top=TOP)
    spent_s = time.process_time() - started
    candidates = [best.best, *(each.candidate for each in best.runners_up)]
    layout = job.parallel
    axes = [(each.choice.tp, each.choice.pp, each.choice.cp, each.choice.ep) for each in candidates]
    own = layout.tp, layout.pp, layout.cp, layout.ep
    rank = str(axes.index(own) + 1) if own in axes else f"above {len(axes)}"
    behind = found.split.step_ns / best.best.step_ns - 1
    return [f"{rank} ({behind:+.1%})", f"{spent_s:.0f} s"]


def _read_to_plan(one: PublishedLayout) -> JobConfig:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(one.toml)
        return read_job_to_plan(path)


def list_rows(search: bool, word: str) -> Iterator[str]:
    heads = ["run", "published", "predicted", "error", "band", "fits"]
    heads += ["rank in plan (own settings over its best)", "search, CPU"] if search else []
    yield f"| {' | '.join([*heads, 'source'])} |"
    yield "|---" * (len(heads) + 1) + "|"
    for one in LAYOUTS:
        if word in one.name:
            yield describe(one, search)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--plan", action="store_true")
    options.add_argument("--name", default="")
    given = options.parse_args()
    for line in list_rows(given.plan, given.name):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
