"""A prediction lists the formulas that the job uses, and no others."""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections import Counter
from dataclasses import replace

import pytest
from support.prediction_builders import GPT, H100, job

from stepsplit.analyzer import model
from stepsplit.analyzer.model.comm_measured import Rates, TransferSweep, TunerCost, TunerTable
from stepsplit.analyzer.model.config import (
    Experts,
    Framework,
    JobConfig,
    LatentAttention,
    ParallelConfig,
    TrainingConfig,
)
from stepsplit.analyzer.model.explain import explain
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.memory import compute_memory
from stepsplit.analyzer.model.parameters import (
    CONVENTIONS,
    count_stage_parameters,
    count_step_flops,
)
from stepsplit.analyzer.model.pipeline import compute_pipeline
from stepsplit.analyzer.model.predict import (
    ORDER,
    collect_formulas,
    compute_stage_times,
    predict,
    time_messages,
)
from stepsplit.analyzer.model.schedule_names import Schedule
from stepsplit.analyzer.model.stragglers import compute_skew

ALONE = (
    "parameters.total", "parameters.stage", "parameters.layer", "flops.C1", "flops.mfu",
    "memory.states_megatron", "memory.activations", "memory.logits", "memory.layer_gradient",
    "memory.peak", "memory.reserved", "step.kernel", "step.accumulate", "step.optimizer",
    "step.host", "step.bound",
)  # fmt: skip
EACH = (
    "comm.wire", "comm.choice", "comm.ring", "comm.tree", "comm.nvls", "step.exposed",
)  # fmt: skip
"""Of every job of more than one rank on a switch that sums."""
MIXTURE = replace(GPT, experts=Experts(count=8, top_k=2, ffn=4096))


def formulas_of(a_job: JobConfig, rates: Rates | None = None) -> tuple[Formula, ...]:
    return predict(a_job, rates).formulas


def ids(a_job: JobConfig, rates: Rates | None = None) -> set[str]:
    return {formula.id for formula in formulas_of(a_job, rates)}


def more(layout: ParallelConfig, **changes: object) -> set[str]:
    """Formulas that a layout adds to those of every job of several ranks."""
    found = ids(replace(job(layout=layout, recipe=TrainingConfig(2048, 1, 16)), **changes))  # type: ignore[arg-type]
    # Small layers wait for their launches, however they are split.
    return found - {*ALONE, *EACH, "step.host_calls"}


def test_launches_are_counted_where_a_device_waits_for_them() -> None:
    split, alone = (ParallelConfig(tp=tp) for tp in (8, 1))
    found = [
        "step.host_calls" in ids(job(layout=one, recipe=TrainingConfig(2048, 1, 16)))
        for one in (split, alone)
    ]
    assert found == [True, False]


def test_one_rank_uses_no_formula_of_messages() -> None:
    one = formulas_of(job(layout=ParallelConfig(), recipe=TrainingConfig(2048, 1, 16)))
    assert tuple(formula.id for formula in one) == ALONE


@pytest.mark.parametrize(
    ("layout", "formulas"),
    [
        (ParallelConfig(dp_replicate=8), {"comm.ddp"}),
        (ParallelConfig(dp_replicate=8, zero=1), {"comm.zero", "comm.norm"}),
        (ParallelConfig(dp_shard=8, zero=3), {"comm.fsdp", "comm.norm", "memory.gathered"}),
        (
            ParallelConfig(dp_replicate=2, dp_shard=4, zero=3),
            {"comm.fsdp", "comm.hsdp", "comm.norm", "memory.gathered"},
        ),
        (ParallelConfig(tp=8), {"comm.tensor", "comm.loss", "comm.norm"}),
        (
            ParallelConfig(tp=8, sequence_parallel=True),
            {"comm.tensor", "comm.sequence", "comm.loss", "comm.norm"},
        ),
        (ParallelConfig(cp=8), {"comm.context_ring", "comm.send", "comm.ddp", "step.ring_pieces"}),
        (
            ParallelConfig(cp=8, context_kind="ulysses"),
            {"comm.context_ulysses", "comm.all_to_all", "comm.ddp"},
        ),
    ],
)
def test_each_strategy_adds_its_own(layout: ParallelConfig, formulas: set[str]) -> None:
    assert more(layout) == formulas


@pytest.mark.parametrize(
    ("schedule", "formulas"),
    [("1f1b", {"comm.tied"}), ("zb-v", set()), ("dualpipe", {"comm.dualpipe"})],
)
def test_a_pipeline_adds_its_bubble_and_what_its_schedule_sends(
    schedule: Schedule, formulas: set[str]
) -> None:
    found = more(ParallelConfig(pp=4, dp_replicate=2, schedule=schedule))
    assert found - {"comm.ddp"} == formulas | {
        "schedule.in_flight", "comm.pipeline", "comm.send", "comm.norm",
        "pipeline.bubble_fraction", "pipeline.bubble_overhead",
    }  # fmt: skip


def test_experts_and_latent_attention_add_their_parameters_and_messages() -> None:
    latent = LatentAttention(query_rank=512, kv_rank=256, nope=64, rope=32, value=64)
    found = more(ParallelConfig(dp_replicate=8, ep=8), model=replace(MIXTURE, latent=latent))
    assert found == {
        "parameters.latent_attention", "parameters.experts", "comm.experts", "comm.all_to_all",
        "comm.ddp",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "states"),
    [
        ("megatron", "memory.states_megatron"),
        ("deepspeed", "memory.states_deepspeed"),
        ("fsdp2", "memory.states_fsdp"),
        ("zero-paper", "memory.states"),
    ],
)
def test_each_framework_has_its_own_states(framework: Framework, states: str) -> None:
    found = ids(job(recipe=TrainingConfig(2048, 1, 16, framework=framework)))
    assert {name for name in found if name.startswith("memory.states")} == {states}


def test_recomputation_and_offload_have_their_own_formulas() -> None:
    recipe = TrainingConfig(2048, 1, 16, recompute="full", offload=frozenset({"optimizer"}))
    found = ids(job(layout=ParallelConfig(), recipe=recipe))
    assert found - set(ALONE) == {
        "flops.recompute", "memory.recompute_full",
        "memory.offload", "step.host_update", "step.transfers",
    }  # fmt: skip
    assert not {"memory.activations", "step.optimizer"} & found


def test_many_nodes_add_stragglers_and_groups_over_nodes_have_no_switch() -> None:
    wide = ParallelConfig(dp_replicate=32)
    found = ids(job(layout=wide, recipe=TrainingConfig(2048, 1, 32)))
    assert found - {*ALONE, *EACH} == {"comm.ddp", "step.skew"}
    assert "comm.nvls" not in found
    assert "comm.nvls" in ids(
        job(layout=ParallelConfig(dp_replicate=16), recipe=TrainingConfig(2048, 1, 16))
    )
    assert "comm.nvls" not in ids(job(hardware=replace(H100, nvls=0.0)))


def test_measured_links_are_named() -> None:
    sweep = TransferSweep("all_reduce", 8, 8, (1024.0, 2048.0), (1e4, 2e4))
    table = TunerTable(8, 8, (TunerCost("all_reduce", 1e4, 1e11),))
    a_job = job(layout=ParallelConfig(dp_replicate=8))
    measured = ids(a_job, Rates((sweep,), (table,)))
    assert measured - ids(a_job) == {"comm.sweep", "comm.tuner"}


def test_no_formula_is_named_twice_and_all_that_are_explained_are_named() -> None:
    busy = job(
        model=MIXTURE,
        layout=ParallelConfig(
            tp=2, pp=2, cp=2, dp_replicate=4, ep=2, sequence_parallel=True, zero=1
        ),
        recipe=TrainingConfig(2048, 1, 64, recompute="selective"),
    )
    named = Counter(formula.id for formula in formulas_of(busy))
    explained = {one.formula.id for one in explain(busy, predict(busy))}
    assert max(named.values()) == 1
    assert explained - set(named) == {"link.nvlink", "link.nic"}


def test_every_formula_of_a_computation_has_its_place_in_the_order() -> None:
    """Except those of the rates of links, which every prediction may show."""
    names = (name for _, name, _ in pkgutil.iter_modules(model.__path__, f"{model.__name__}."))
    modules = [vars(importlib.import_module(name)) for name in names]
    defined = {one.id for module in modules for one in module.values() if isinstance(one, Formula)}
    placed = [one.id for one in ORDER]
    assert len(set(placed)) == len(placed)
    assert set(placed) - {one.id for one in CONVENTIONS.values()} == defined - {
        "link.nvlink", "link.nic",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.alone
def test_collecting_formulas_is_fast() -> None:
    a_job = job()
    held, timed = count_stage_parameters(a_job), time_messages(a_job, Rates())
    stages = compute_stage_times(a_job, held, timed)
    pipeline = compute_pipeline(a_job, stages, timed)
    parts = (
        count_step_flops(a_job),
        compute_memory(a_job),
        timed,
        stages,
        pipeline,
        compute_skew(a_job),
    )
    started = time.perf_counter()
    for _ in range(1000):
        collect_formulas(held, *parts, None)
    assert time.perf_counter() - started < 0.1
