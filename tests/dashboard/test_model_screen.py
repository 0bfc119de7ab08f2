"""The screen of a prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import RenderableType
from support.prediction_builders import GIB, GPT, MS, job, prediction
from support.screens import print_lines

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.model.comm_ops import CommOp
from stepsplit.analyzer.model.config import ParallelConfig, TrainingConfig
from stepsplit.analyzer.model.explain import explain
from stepsplit.analyzer.model.formulas import CheckedRule, Explanation, Formula, RuleOfThumb, Symbol
from stepsplit.analyzer.model.prediction import Band, Communication, Prediction
from stepsplit.dashboard.reporters.prediction import build_formula_listing, build_prediction_screen

SCREEN = """\
model gpt-1.3b   1.31B parameters   8 x h100-sxm (1 node)   tp 2 pp 2 dp_replicate 2
16 sequences of 2,048 tokens per step   8 microbatches of 1 per rank   bf16 adam, megatron
recompute full
step 460 ms (430-500 ms)   confidence high   8,904 tokens/s per rank   MFU 8.1 %, HFU 10.6 % (C1)
peak memory 14.5 GiB (14.0-15.0 GiB, stage 0) of 80.0 GiB (18.1 %): fits

            predicted   share
compute        400 ms  87.0 %  ████████████████████████████████████████████████████████████
collective    33.0 ms   7.2 %  ████▉
p2p           2.00 ms   0.4 %  ▎
skew          0.00 ms   0.0 %
bubble        17.0 ms   3.7 %  ██▌
copy          0.00 ms   0.0 %
idle          8.00 ms   1.7 %  █▏
overlapped communication: 0.00 ms; model FLOPs: 297 TFLOP, with recomputation: 390 TFLOP

pipeline 1f1b, 8 microbatches: bubble fraction 11.1 %, bubble overhead 12.5 %
stage               0         1
parameters       354M      353M
compute        360 ms    400 ms
bubble        60.0 ms   17.0 ms
weights       1.0 GiB   1.0 GiB
gradients     2.0 GiB   2.0 GiB
optimizer     4.0 GiB   4.0 GiB
activations   6.0 GiB   3.0 GiB
transient     0.5 GiB   0.5 GiB
other         1.0 GiB   1.0 GiB
peak memory  14.5 GiB  11.5 GiB

communication per step of a rank of stage 1
axis  op phase              calls     size     sent          time  exposed
tp    all_reduce forward      192  8.39 MB  1.61 GB  11.0-14.0 ms  12.0 ms
tp    all_reduce backward     192  8.39 MB  1.61 GB  11.0-14.0 ms  12.0 ms
dp    all_reduce grad_sync     30  41.9 MB  1.26 GB  11.0-14.0 ms  9.00 ms
pp    send backward             8  8.39 MB  67.1 MB  1.00-4.00 ms  2.00 ms

note: host-bound: launching a layer takes about as long as computing it
"""

LISTING = """\

FORMULAS with the numbers of this job

bytes of a rank = 1.26 GB
  comm.ddp: 2 (N-1)/N g P
  calls: 1 all_reduce grad_sync
  N = 2         ranks
  P = 354M      parameters
  B = 450 GB/s  nvlink4
  A. Author, 2020
  rule of thumb "2 P" gives 707 MB: P counts elements

COMMON RULES OF THUMB about these formulas
"all-reduce moves 2P" is correct in another unit: 2P elements (B. Author, 2021)
"""


def shown(what: RenderableType, width: int = 100) -> str:
    return "".join(f"{line}\n" for line in print_lines(what, width=width))


def test_the_screen_shows_time_split_and_memory() -> None:
    assert shown(build_prediction_screen(job(), prediction())) == SCREEN


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(width: int) -> None:
    lines = shown(build_prediction_screen(job(), many_stages()), width).splitlines()
    lines += shown(build_formula_listing(explain(job(), prediction())), width).splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if "…" in line]


def many_stages() -> Prediction:
    """Sixteen stages of large numbers; the eighth is the slowest, the third the fullest."""
    whole = prediction()
    splits = [Split((12_000 + i) * MS, bubble_ns=(1_000 - i) * MS) for i in range(16)]
    splits[8] = Split(15_000 * MS, bubble_ns=10 * MS)
    memory = [replace(whole.memory[1], stage=i, activations_bytes=100 * GIB) for i in range(16)]
    memory[3] = replace(memory[3], activations_bytes=130 * GIB)
    rows = tuple(
        replace(row, message=replace(row.message, stage=8, op="reduce_scatter", axis="expert_dp"))
        for row in whole.communication
    )
    return replace(
        whole, splits=tuple(splits), split=splits[8], memory=tuple(memory),
        parameters_per_stage=(354_000_000,) * 16, communication=rows,
    )  # fmt: skip


def test_of_many_stages_the_ends_the_slowest_and_the_fullest_are_shown() -> None:
    lines = shown(build_prediction_screen(job(), many_stages())).splitlines()
    assert [line.split() for line in lines if line.startswith("stage")] == [
        ["stage", "0", "1", "2", "3", "8", "15"]
    ]
    assert "and 10 more stages (see --json)" in lines


def test_a_stage_that_does_not_fit_is_marked() -> None:
    full = replace(prediction(), fits=False, memory=(
        replace(prediction().memory[0], activations_bytes=81 * GIB), prediction().memory[1],
    ))  # fmt: skip
    text = shown(build_prediction_screen(job(), full))
    assert " of 80.0 GiB (111.9 %): DOES NOT FIT\n" in text


def test_mfu_is_unknown_without_a_peak() -> None:
    text = shown(build_prediction_screen(job(), replace(prediction(), mfu=None, hfu=None)))
    words = "8,904 tokens/s per rank MFU unknown: no peak at this dtype"
    assert words in " ".join(text.split())


def test_a_single_rank_omits_pipeline_and_communication() -> None:
    alone = ParallelConfig(zero=0)
    recipe = TrainingConfig(
        2048, 1, 1, optimizer="sgd", framework="ddp", offload=frozenset({"optimizer"})
    )
    one = replace(
        prediction(), splits=prediction().splits[1:], memory=prediction().memory[1:],
        communication=(), notes=(), confidence="low",
    )  # fmt: skip
    text = shown(build_prediction_screen(job(replace(GPT, name=""), alone, recipe), one))
    assert text.startswith(
        "model of 24 layers, hidden size 2,048   1.31B parameters   1 x h100-sxm (1 node)"
        "   one rank\n"
        "1 sequence of 2,048 tokens per step   1 microbatch of 1 per rank   bf16 sgd, ddp"
        "   offload optimizer\n"
        "step 460 ms (430-500 ms)   confidence low"
    )
    assert "no pipeline: one stage\n" in text
    assert "communication per step" not in text


def test_zero_stage_and_stages_per_rank_are_shown() -> None:
    layout = ParallelConfig(
        tp=2, pp=2, dp_shard=2, zero=3, sequence_parallel=True, schedule="interleaved", chunks=2
    )
    text = shown(build_prediction_screen(job(layout=layout), prediction()), 120)
    assert "tp 2 pp 2 dp_shard 2, sequence parallel, ZeRO-3\n" in text
    assert "pipeline interleaved, 2 stages per rank, 8 microbatches:" in text


def test_trained_adapters_and_offloaded_layers_are_shown() -> None:
    """24 layers of rank 8: 8 (2,048 + 3 x 2,048) parameters each on queries, keys and values."""
    recipe = TrainingConfig(
        2048, 1, 8, lora_rank=8, lora_targets=frozenset({"qkv"}),
        offload=frozenset({"activations", "optimizer"}), offload_layers=6,
    )  # fmt: skip
    text = shown(build_prediction_screen(job(recipe=recipe), prediction()), 160)
    assert "parameters, 1.57M of adapters trained   " in text
    assert "LoRA of rank 8   offload activations of 6 layers, optimizer\n" in text


def test_a_formula_is_shown_with_its_numbers_and_the_rule_of_thumb() -> None:
    one = Explanation(
        Formula("comm.ddp", "2 (N-1)/N g P", "A. Author, 2020"),
        "bytes of a rank",
        (
            Symbol("N", "ranks", 2),
            Symbol("P", "parameters", 353_607_680, "parameters"),
            Symbol("B", "nvlink4", 450e9, "bytes_per_s"),
        ),
        1_258_291_200,
        "bytes",
        (RuleOfThumb("2 P", 707_215_360, "P counts elements"),),
        "calls: 1 all_reduce grad_sync",
    )
    two = CheckedRule(
        "two-phi", "all-reduce moves 2P", "unit", "2P elements", "B. Author, 2021", ("comm.ddp",)
    )
    assert shown(build_formula_listing([one], [two])) == LISTING


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_count(8_030_261_248), "8.03B"),
        (units.format_count(1_008_000_000_000), "1.01T"),
        (units.format_count(512), "512"),
        (units.format_flops(3.2e18), "3.20 EFLOP"),
        (units.format_tokens_per_second(3.444), "3.44 tokens/s"),
        (units.format_milliseconds_range(0.9e6, 1_234e6), "1-1,234 ms"),
    ],
)
def test_counts_work_rates_and_bands_are_formatted(text: str, expected: str) -> None:
    assert text == expected


def test_op_and_phase_wrap_in_a_narrow_table() -> None:
    """An op and its phase share a column, which alone may take a second line."""
    message = CommOp("zero-1", "reduce_scatter", "expert_dp", 1, "grad_sync", 1000, GIB, GIB, GIB)
    row = Communication(message, Band(9e9, 8e9, 9e9), 9_000 * MS)
    lines = shown(
        build_prediction_screen(job(), replace(prediction(), communication=(row,))), 80
    ).splitlines()
    (first,) = [i for i, line in enumerate(lines) if line.startswith("expert_dp")]
    assert lines[first].split()[1:3] == ["reduce_scatter", "1,000"]
    assert lines[first + 1].split() == ["grad_sync"]
