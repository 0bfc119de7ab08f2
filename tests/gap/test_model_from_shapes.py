"""The model of a job, from the shapes of ops written by hand."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.builders import CpuTrace
from support.splitting import recording_of, split_of

from stepsplit.analyzer import analyze, predict, read_job
from stepsplit.analyzer.gap.model_from_shapes import NO_SHAPE, ModelShape, infer_model_shape
from stepsplit.analyzer.model.config import LatentAttention
from stepsplit.collectors import Mesh, RunSpec
from stepsplit.dashboard import cli

Op = tuple[str, Sequence[Sequence[int]]]
"""A name and the shapes of its inputs."""
BATCH, TOKENS, HIDDEN, VOCAB = 2, 6, 16, 40
ONE_PASS = BATCH * TOKENS


def linear(inputs: int, outputs: int, *bias: int) -> Op:
    return ("aten::linear", [[BATCH, TOKENS, inputs], [outputs, inputs], bias])


def attend(heads: int, kv_heads: int, size: int, *, tokens: int = TOKENS) -> Op:
    keys = [BATCH, kv_heads, tokens, size]
    return ("aten::scaled_dot_product_attention", [[BATCH, heads, tokens, size], keys, keys])


def embed(rows: int, index: Sequence[int] = (BATCH, TOKENS)) -> Op:
    return ("aten::embedding", [[rows, HIDDEN], index])


SHIFTED = ("aten::layer_norm", [[BATCH, TOKENS, HIDDEN], [], [HIDDEN], [HIDDEN]])
SCALED = ("aten::rms_norm", [[BATCH, TOKENS, HIDDEN], [], [HIDDEN]])
LOSS = ("aten::cross_entropy_loss", [[ONE_PASS, VOCAB], [ONE_PASS]])
GPT_LAYER = (
    SHIFTED, linear(16, 48, 48), attend(4, 4, 4), linear(16, 16, 16),
    SHIFTED, linear(16, 64, 64), linear(64, 16, 16),
)  # fmt: skip
GPT_BEGIN = (embed(VOCAB), embed(9, (TOKENS,)))
GPT_END = (SHIFTED, linear(16, VOCAB), LOSS)
GPT = (*GPT_BEGIN, *GPT_LAYER * 3, *GPT_END)
TIED = ((VOCAB, HIDDEN), (9, HIDDEN), (16, 16))
UNTIED = ((VOCAB, HIDDEN), *TIED)
LLAMA_LAYER = (
    SCALED, linear(16, 16), linear(16, 8), linear(16, 8), attend(4, 2, 4), linear(16, 16),
    SCALED, linear(16, 44), linear(16, 44), linear(44, 16),
)  # fmt: skip
LLAMA = (embed(VOCAB), *LLAMA_LAYER * 2, SCALED, linear(16, VOCAB), LOSS)
KNOWN = ModelShape(
    layers=3, hidden=16, heads=4, kv_heads=4, ffn=64, gated=False, vocab=VOCAB, tied=True,
    learned_positions=9, norm="layer", biases=True, qkv_biases=False, qk_norm=False,
    seq_len=TOKENS, micro_batch=BATCH, microbatches=1, dtype="fp32",
)  # fmt: skip
OF_LLAMA = replace(
    KNOWN, layers=2, kv_heads=2, ffn=44, gated=True, tied=False, learned_positions=0, norm="rms",
    biases=False,
)  # fmt: skip


def write(
    folder: Path,
    forward: Iterable[Op],
    gradients: Iterable[Sequence[int]] = TIED,
    *,
    rank: int = 0,
    ranks: int = 1,
    passes: int = 1,
    again: Iterable[Op] = (),
    **args: object,
) -> None:
    """One step of a rank: forwards, and backwards which compute `again` and complete gradients."""
    trace, now = CpuTrace(rank, ranks), 1.0
    for _ in range(passes):
        for name, dims in forward:
            trace.op(name, now, now + 8, **{"Input Dims": dims}, **args)
            now += 10
        for name, dims in again:
            trace.annotation("autograd::engine::evaluate_function: Checkpoint", now, now + 9, 7)
            trace.op(name, now + 1, now + 8, 7, **{"Input Dims": dims})
            now += 10
        for shape in gradients:
            trace.op("torch::autograd::AccumulateGrad", now, now + 1, 7, **{"Input Dims": [shape]})
            now += 2
    trace.step(0, 0, now + 1).write(folder)


def infer(folder: Path, mesh: Mesh | None = None, split_vocab: bool | None = None) -> ModelShape:
    recording = recording_of(folder)
    ranks = recording.traces[0].world_size
    split = split_of(recording, None if mesh is None else RunSpec("run", ranks, "gloo", mesh))
    return infer_model_shape(split, mesh, split_vocab)


def test_a_gpt_of_three_layers_with_a_tied_head(tmp_path: Path) -> None:
    write(tmp_path, GPT)
    assert infer(tmp_path) == KNOWN


def test_a_llama_with_grouped_queries_and_a_gated_mlp(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, UNTIED)
    assert infer(tmp_path) == OF_LLAMA


def test_keys_repeated_before_the_attention_are_counted_by_their_gemms(tmp_path: Path) -> None:
    repeated = (attend(4, 4, 4) if op == attend(4, 2, 4) else op for op in LLAMA)
    write(tmp_path, repeated, UNTIED)
    assert infer(tmp_path) == OF_LLAMA


def test_an_op_that_calls_another_counts_once_and_a_backward_not_at_all(tmp_path: Path) -> None:
    """aten::linear calls aten::addmm; a checkpointed layer runs again in the backward."""
    write(tmp_path, GPT, again=GPT_LAYER, passes=4)
    (trace,) = recording_of(tmp_path).traces
    rows = [trace.events.name_of(row) for row in range(len(trace.events))]
    assert rows.count("aten::linear") == 4 * (3 * 4 + 1 + 4)
    assert infer(tmp_path) == replace(KNOWN, microbatches=4)


def test_heads_of_their_own_size(tmp_path: Path) -> None:
    wide = (*GPT_BEGIN, linear(16, 72), attend(3, 3, 8), linear(24, 16), linear(16, 30),
            linear(30, 16), *GPT_END)  # fmt: skip
    write(tmp_path, wide)
    assert infer(tmp_path) == replace(
        KNOWN, layers=1, heads=3, kv_heads=3, head_size=8, ffn=30, biases=False, qk_norm=None
    )


def test_a_weight_added_to_the_embedding_is_a_learned_position(tmp_path: Path) -> None:
    added = ("aten::add", [[BATCH, TOKENS, HIDDEN], [TOKENS, HIDDEN], []])
    write(tmp_path, (embed(VOCAB), added, *GPT_LAYER * 3, *GPT_END))
    assert infer(tmp_path) == replace(KNOWN, learned_positions=TOKENS)


def test_a_residual_of_one_sequence_is_no_position(tmp_path: Path) -> None:
    """It has the shape of a weight for each position of the sequence."""
    residual: Op = ("aten::add", [[1, TOKENS, HIDDEN], [1, TOKENS, HIDDEN], []])
    one = (embed(VOCAB, (1, TOKENS)), *(*LLAMA_LAYER, residual) * 2, *LLAMA[-3:])
    write(tmp_path, one, UNTIED)
    assert infer(tmp_path) == replace(OF_LLAMA, micro_batch=1)
    write(tmp_path, one, (*UNTIED, (1, 9, HIDDEN)))
    assert infer(tmp_path) == replace(OF_LLAMA, micro_batch=1, learned_positions=9)


def test_positions_may_be_looked_up_for_each_sequence_as_token_types_are(tmp_path: Path) -> None:
    tables = (embed(VOCAB), embed(9, (BATCH, TOKENS)), embed(2, (BATCH, TOKENS)))
    write(tmp_path, (*tables, *GPT_LAYER * 3, *GPT_END))
    assert infer(tmp_path) == KNOWN


def test_projections_with_biases_and_norms_of_heads(tmp_path: Path) -> None:
    """As Qwen2 and Qwen3 have them."""
    biased = tuple((name, [*dims[:2], [1]]) if name == "aten::linear" else (name, dims)
                   for name, dims in LLAMA_LAYER[1:4])  # fmt: skip
    of_heads: Op = ("aten::rsqrt", [[BATCH, TOKENS, 4, 1]])
    layer = (SCALED, *biased, of_heads, of_heads, *LLAMA_LAYER[4:])
    write(tmp_path, (embed(VOCAB), *layer * 2, *LLAMA[-3:]), UNTIED)
    assert infer(tmp_path) == replace(OF_LLAMA, qkv_biases=True, qk_norm=True)


def grouped(inputs: int, outputs: int, experts: int = 8, top_k: int = 2) -> Op:
    return ("aten::_grouped_mm", [[top_k * ONE_PASS, inputs], [experts, inputs, outputs]])


ROUTER = (linear(16, 8), ("aten::topk", [[ONE_PASS, 8]]))


def test_experts_in_grouped_gemms(tmp_path: Path) -> None:
    """Mixtral's layers in transformers, gate and up in one weight."""
    layer = (*LLAMA_LAYER[:7], *ROUTER, grouped(16, 2 * 12), grouped(12, 16))
    write(tmp_path, (embed(VOCAB), *layer * 2, *LLAMA[-3:]), UNTIED)
    assert infer(tmp_path) == replace(
        OF_LLAMA, ffn=12, experts=8, top_k=2, expert_ffn=12, shared_ffn=0, dense_layers=0
    )


def test_latent_attention_with_shared_experts_behind_a_dense_layer(tmp_path: Path) -> None:
    """DeepSeek-V3's layers, gate and up of the experts apart; queries are compressed to 7."""
    keys = [BATCH, 4, TOKENS, 6]
    attention = (
        SCALED, linear(16, 7), linear(7, 24), linear(16, 5), linear(3, 28),
        ("aten::scaled_dot_product_attention", [keys, keys, [BATCH, 4, TOKENS, 3]]),
        linear(12, 16), SCALED,
    )  # fmt: skip
    dense = (*attention, linear(16, 44), linear(16, 44), linear(44, 16))
    shared = (linear(16, 10), linear(16, 10), linear(10, 16))
    mixture = (*attention, *ROUTER, grouped(16, 9), grouped(16, 9), grouped(9, 16), *shared)
    write(tmp_path, (embed(VOCAB), *dense, *mixture * 2, *LLAMA[-3:]), UNTIED)
    assert infer(tmp_path) == replace(
        OF_LLAMA, layers=3, kv_heads=4, experts=8, top_k=2, expert_ffn=9, shared_ffn=10,
        dense_layers=1, latent=LatentAttention(query_rank=7, kv_rank=3, nope=4, rope=2, value=3),
    )  # fmt: skip


def test_the_classes_of_images_are_no_vocabulary(tmp_path: Path) -> None:
    classes = ("aten::cross_entropy_loss", [[BATCH, VOCAB], [BATCH]])
    write(tmp_path, (*GPT_LAYER * 3, SHIFTED, linear(16, VOCAB, VOCAB), classes))
    assert infer(tmp_path, Mesh.of({})) == replace(
        KNOWN, vocab=None, tied=None, learned_positions=None, qk_norm=None
    )


def test_attention_of_separate_products(tmp_path: Path) -> None:
    """softmax(Q K^T) V, whose batches are sequences times heads, and transposed weights."""
    layer = (
        ("aten::addmm", [[48], [ONE_PASS, 16], [16, 48]]),
        ("aten::bmm", [[BATCH * 4, TOKENS, 4], [BATCH * 4, 4, TOKENS]]),
        ("aten::bmm", [[BATCH * 4, TOKENS, TOKENS], [BATCH * 4, TOKENS, 4]]),
        ("aten::addmm", [[16], [ONE_PASS, 16], [16, 16]]),
        SHIFTED,
        ("aten::addmm", [[64], [ONE_PASS, 16], [16, 64]]),
        ("aten::addmm", [[16], [ONE_PASS, 64], [64, 16]]),
    )
    write(tmp_path, (*GPT_BEGIN, *(SHIFTED, *layer) * 3, *GPT_END))
    assert infer(tmp_path) == KNOWN


def test_the_stages_of_a_pipeline_add_up(tmp_path: Path) -> None:
    """Whether both ends share a weight is unknown: they are on different ranks."""
    write(tmp_path, (*GPT_BEGIN, *GPT_LAYER * 2), ranks=2, passes=3)
    write(tmp_path, (*GPT_LAYER, *GPT_END), rank=1, ranks=2, passes=3)
    found = infer(tmp_path, Mesh.of({"pp": 2}))
    assert found == replace(KNOWN, microbatches=3, tied=None, qk_norm=None)


def test_a_stage_that_was_not_recorded_leaves_the_layers_unknown(tmp_path: Path) -> None:
    write(tmp_path, (*GPT_BEGIN, *GPT_LAYER * 2), ranks=2)
    found = infer(tmp_path, Mesh.of({"pp": 2}))
    assert (found.layers, found.hidden, found.heads, found.ffn) == (None, 16, 4, 64)


def test_shards_of_tensor_parallelism_are_put_together(tmp_path: Path) -> None:
    """Megatron-LM's ops see the shards of weights, also of the embedding and the head."""
    layer = (
        SHIFTED, linear(16, 24, 24), attend(2, 2, 4), linear(8, 16),
        SHIFTED, linear(16, 32, 32), linear(32, 16),
    )  # fmt: skip
    ends = ((SHIFTED, linear(16, 20)), ("aten::log_softmax", [[ONE_PASS, 20]]))
    for rank in range(2):
        forward = (embed(20), embed(9, (TOKENS,)), *layer * 3, *ends[0], ends[1])
        write(tmp_path, forward, rank=rank, ranks=2)
    mesh = Mesh.of({"tp": 2})
    some_biases = replace(KNOWN, biases=None, qkv_biases=None, tied=None)
    assert infer(tmp_path, mesh, split_vocab=True) == some_biases
    assert infer(tmp_path, mesh, split_vocab=False) == replace(some_biases, vocab=20)
    assert infer(tmp_path, mesh) == replace(some_biases, vocab=None)


def test_whole_weights_with_local_heads_are_of_dtensor(tmp_path: Path) -> None:
    layer = tuple(attend(2, 2, 4) if op == attend(4, 4, 4) else op for op in GPT_LAYER)
    for rank in range(2):
        write(tmp_path, (*GPT_BEGIN, *layer * 3, *GPT_END), rank=rank, ranks=2)
    assert infer(tmp_path, Mesh.of({"tp": 2})) == KNOWN


def test_context_parallel_ranks_have_a_part_of_the_sequence(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, GPT, rank=rank, ranks=2)
    assert infer(tmp_path, Mesh.of({"cp": 2})) == replace(KNOWN, seq_len=2 * TOKENS)


def test_the_dtype_is_that_of_the_gemms(tmp_path: Path) -> None:
    types = {"Input type": ["c10::BFloat16", "c10::BFloat16", "c10::BFloat16"]}
    write(tmp_path, GPT, **types)
    assert infer(tmp_path) == replace(KNOWN, dtype="bf16")


def test_other_layers_than_of_a_transformer_are_not_guessed(tmp_path: Path) -> None:
    """A third GEMM between the widths of the MLP: attention is known, the MLP is not."""
    layer = (*GPT_LAYER, linear(64, 64))
    write(tmp_path, (*GPT_BEGIN, *layer * 3, *GPT_END))
    unknown = replace(KNOWN, ffn=None, gated=None, biases=None, qkv_biases=None)
    assert infer(tmp_path) == unknown


def adapt(base: Op, rank: int) -> tuple[Op, ...]:
    """A linear layer with an adapter."""
    outputs, inputs = base[1][1]
    return base, linear(inputs, rank), linear(rank, outputs)


@pytest.mark.parametrize(
    ("adapted", "targets"),
    [
        ({1, 2, 3, 5, 7, 8, 9}, None),
        ({1, 3}, ("qkv",)),
        ({1, 2, 3, 5}, ("qkv", "output")),
        ({7, 8, 9}, ("mlp",)),
    ],
)
def test_adapters_are_distinguished_from_the_layers_that_they_belong_to(
    tmp_path: Path, adapted: set[int], targets: tuple[str, ...] | None
) -> None:
    """Ranks of 2 beside widths of 8 to 44. The gradients are those of adapters alone."""
    layer = [
        op
        for place, one in enumerate(LLAMA_LAYER)
        for op in (adapt(one, 2) if place in adapted else (one,))
    ]
    write(tmp_path, (embed(VOCAB), *layer * 2, SCALED, linear(16, VOCAB), LOSS), [(2, 16)])
    assert infer(tmp_path) == replace(OF_LLAMA, tied=None, lora_rank=2, lora_targets=targets)


def test_a_router_counts_the_experts(tmp_path: Path) -> None:
    layer = (*GPT_LAYER[:4], linear(16, 8), ("aten::topk", [[ONE_PASS, 8]]))
    write(tmp_path, (*GPT_BEGIN, *layer * 3, *GPT_END))
    assert infer(tmp_path).experts == 8


def test_without_shapes_nothing_is_inferred(tmp_path: Path) -> None:
    CpuTrace().step(0, 0, 10).op("aten::linear", 1, 9).write(tmp_path)
    assert infer(tmp_path) == NO_SHAPE


def run(*words: str | Path) -> None:
    assert cli.run([str(word) for word in words]) == 0


def test_analyze_writes_a_job_that_it_then_compares_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, job = tmp_path / "run", tmp_path / "job.toml"
    folder.mkdir()
    write(folder, GPT)
    run("analyze", folder, "--write-job", job)
    assert capsys.readouterr().err == f"{job}: pass it with --job\n"
    written = tomllib.loads(job.read_text())
    assert written["model"] == {
        "layers": 3, "hidden": 16, "heads": 4, "kv_heads": 4, "ffn": 64, "gated": False,
        "vocab": 40, "tied": True, "learned_positions": 9, "norm": "layer", "biases": True,
        "qkv_biases": False, "qk_norm": False,
    }  # fmt: skip
    assert written["training"] == {
        "seq_len": 6, "micro_batch": 2, "microbatches": 1, "dtype": "fp32", "framework": "fsdp2"
    }  # fmt: skip
    run("model", job)
    run("analyze", folder, "--job", job)


def test_keys_that_cannot_be_inferred_are_asked_for_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, job = tmp_path / "run", tmp_path / "job.toml"
    folder.mkdir()
    CpuTrace().step(0, 0, 10).op("aten::linear", 1, 9).write(folder)
    asked = (
        "fill in [model] layers, hidden, heads, vocab and [training] seq_len, micro_batch,"
        " global_batch"
    )
    hint = "a recording with --shapes gives most of them"
    run("analyze", folder, "--write-job", job)
    assert capsys.readouterr().err == f"{job}: {asked}, then pass it with --job; {hint}\n"
    text = job.read_text()
    assert "# heads =   # needed: attention heads\n" in text
    assert '# dtype =   # not inferred; default "bf16"\n' in text
    for key, value in {
        "layers": 3, "hidden": 16, "heads": 4, "vocab": 40, "seq_len": 6, "micro_batch": 2,
        "global_batch": 2,
    }.items():  # fmt: skip
        text = text.replace(f"# {key} = ", f"{key} = {value}")
    job.write_text(text)
    run("model", job)
    run("analyze", folder, "--job", job)


def test_the_model_alone_predicts_the_same_or_it_is_said_why(tmp_path: Path) -> None:
    folder, job = tmp_path / "run", tmp_path / "job.toml"
    folder.mkdir()
    write(folder, GPT)
    run("analyze", folder, "--write-job", job)
    for text, left_out in (
        (job.read_text(), None),
        (job.read_text().replace('dtype = "fp32"\n', ""), "[training] dtype"),
    ):
        job.write_text(text)
        report = analyze(folder, job=job)
        assert report.gap is not None and report.prediction is not None
        notes = [note for note in report.gap.notes if note.startswith(str(job))]
        said = f"{job} leaves out {left_out}: here as in the recording, in `stepsplit model` the"
        assert notes == ([] if left_out is None else [f"{said} defaults"])
        alone = predict(read_job(job)).split.step_ns
        assert (report.prediction.split.step_ns == alone) is (left_out is None)
