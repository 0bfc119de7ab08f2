"""plan against published layouts: those of Llama 3 405B and GPT-3 175B are near its best."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepsplit.analyzer.model.config import JobConfig, ParallelConfig, TrainingConfig
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.model_table import load_model
from stepsplit.analyzer.model.plan import plan
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.validation.published_runs import build_megascale
from stepsplit.analyzer.validation.tables import Published, PublishedRow

NEAR = 1.10
AXES = frozenset({"tp", "pp", "cp"})


def rows(table: str, gpus: int) -> list[PublishedRow]:
    """The rows with this number of GPUs."""
    return [row for row in Published().read_records(table) if row.read_count("gpus") == gpus]


def behind(
    job: JobConfig, gpus: int, keep: frozenset[str], own_keep: frozenset[str] = AXES
) -> float:
    """Step time of the best layout with the job's tp, pp and cp over that of the best layout."""
    own = plan(job, gpus, own_keep, top=1).best
    assert own.choice.axes[:3] == (job.parallel.tp, job.parallel.pp, job.parallel.cp)
    return own.step_ns / plan(job, gpus, keep, top=1).best.step_ns


@pytest.mark.slow
@pytest.mark.in_turn(
    "analyzer/model/plan.py", "analyzer/model/plan_search.py", "analyzer/model/plan_space.py"
)
def test_gpt3_on_1024_a100_with_megatron() -> None:
    """Jiang et al., MegaScale, table 2, Megatron-LM's row of 1,024: tp 8, pp 8, dp 16.

    With the best settings of the same split of the GPUs it is 6.2 % behind; with its own 6 chunks
    and microbatches of 1 7.3 %, what is recomputed left free: the paper does not say.
    """
    (case,) = (case for row in rows("megascale_table2", 1024) for case in build_megascale(row))
    assert (case.job.parallel.tp, case.job.parallel.pp, case.job.parallel.dp) == (8, 8, 16)
    assert behind(case.job, 1024, frozenset()) < NEAR
    assert behind(case.job, 1024, frozenset(), AXES | {"chunks", "micro_batch"}) < NEAR


@pytest.mark.slow
@pytest.mark.in_turn(
    "analyzer/model/plan.py", "analyzer/model/plan_search.py", "analyzer/model/plan_space.py"
)
def test_llama_3_405b_on_8192_h100() -> None:
    """Grattafiori et al., table 4, first row: tp 8, cp 1, pp 16, dp 64.

    Sharded data parallelism, keys and values gathered over cp. The batch is 16M tokens in 2,048
    sequences. With cp kept, the published split is near the best that fits. With cp free, cp 4
    saves the recomputation that fsdp2's memory needs; without it, as it was trained (section
    3.3.2), the published layout is near that.
    """
    (row,) = rows("llama3_405b_table4", 8192)
    layout = ParallelConfig(
        tp=row.read_count("tp"), pp=row.read_count("pp"), cp=row.read_count("cp"), zero=3,
        dp_shard=row.read_count("dp"), context_kind="all-gather", overlap=frozenset({"dp"}),
    )  # fmt: skip
    recipe = TrainingConfig(
        seq_len=row.read_count("seq"), micro_batch=1, framework="fsdp2", fused_loss=False,
        global_batch=row.read_count("dp") * row.read_count("batch_per_dp"),
    )  # fmt: skip
    job = JobConfig(load_model("llama-3.1-405b"), layout, recipe, load_hardware("h100-sxm"))
    assert (layout.tp, layout.pp, layout.world_size) == (8, 16, 8192)
    assert behind(job, 8192, frozenset({"cp"})) < NEAR
    own = plan(job, 8192, AXES, top=1).best.choice
    trained = replace(
        layout, zero=own.zero, dp_shard=1, dp_replicate=64, sequence_parallel=True,
        schedule=own.schedule, chunks=own.chunks, layers_per_stage=own.layers_per_stage,
    )  # fmt: skip
    free_ns = plan(job, 8192, frozenset(), top=1).best.step_ns
    assert predict(replace(job, parallel=trained)).split.step_ns / free_ns < NEAR
