"""plan: jobs with a known best layout."""

from __future__ import annotations

import json
import time
import tomllib
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model import hardware_config, model_table, plan_search
from stepsplit.analyzer.model.comm_measured import Rates
from stepsplit.analyzer.model.config import (
    Experts,
    Framework,
    JobConfig,
    ParallelConfig,
    TrainingConfig,
)
from stepsplit.analyzer.model.config_checks import find_violation
from stepsplit.analyzer.model.config_decode import format_toml
from stepsplit.analyzer.model.config_file import parse_job
from stepsplit.analyzer.model.memory import compute_memory, is_within_memory
from stepsplit.analyzer.model.plan import from_json, plan, to_json
from stepsplit.analyzer.model.plan_search import LowerBound, build_candidate
from stepsplit.analyzer.model.plan_space import (
    Plan,
    build_decision_tree,
    format_job_lines,
    list_families,
    split_layers_evenly,
)
from stepsplit.analyzer.model.predict import predict

MOST_S = 30.0
"""For 10,000 layouts."""


def job(model: str, seq_len: int, global_batch: int, device: str = "h100-sxm") -> JobConfig:
    """A preset's model on a preset's device, with Megatron-LM; one rank, which a plan ignores."""
    recipe = TrainingConfig(seq_len, micro_batch=1, global_batch=global_batch)
    return JobConfig(
        model_table.load_model(model),
        ParallelConfig(),
        recipe,
        hardware_config.load_hardware(device),
    )


SMALL = job("gpt2-355m", 1024, 16)
MIDDLE = job("llama-2-13b", 4096, 16)
NODE = job("llama-2-70b", 4096, 64)
EXPERTS = job("mixtral-8x7b", 4096, 16)


def jobs_that_fit(one: JobConfig, gpus: int) -> list[JobConfig]:
    """Every valid layout that fits, checked one by one."""
    every = [each for family in list_families(one, gpus) for each in family]
    possible = [each for each in every if find_violation(each) is None]
    return [each for each in possible if is_within_memory(each, compute_memory(each))]


SLOW_IN_TURN = (pytest.mark.slow, pytest.mark.in_turn("analyzer/model"))


def slow_network(one: JobConfig) -> JobConfig:
    """Nodes of two GPUs, joined by 10 gigabit Ethernet."""
    link = replace(one.hardware.inter, name="slow", bytes_per_s=1.25e9, latency_ns=30_000)
    return replace(one, hardware=replace(one.hardware, gpus_per_node=2, inter=link))


def test_a_model_that_fits_one_gpu_is_data_parallel() -> None:
    found = plan(SMALL, 8)
    assert found.best.choice.axes == (1, 1, 1, 8, 1)
    assert [(trial.question, trial.fits) for trial in found.tree] == [("one GPU", True)]


def test_one_gpu_is_one_rank() -> None:
    found = plan(SMALL, 1)
    assert found.best.choice.axes == (1, 1, 1, 1, 1)
    assert found.places == ()


def test_a_model_too_big_for_one_gpu_uses_tp_inside_a_node() -> None:
    whole = replace(NODE.training, global_batch=1)
    found = plan(replace(NODE, model=replace(NODE.model, layers=32), training=whole), 8)
    assert found.best.choice.axes == (8, 1, 1, 1, 1)
    assert [(place.axis, place.nodes) for place in found.places] == [("tp", 1)]


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/model")
def test_pp_crosses_slow_links_and_tp_stays_in_the_node() -> None:
    found = plan(slow_network(NODE), 32)
    best = found.best.choice
    assert best.pp > 1
    shown = [found.best, *(each.candidate for each in found.runners_up)]
    assert all(each.choice.tp <= 2 for each in shown)
    assert next(place for place in found.places if place.axis == "pp").nodes > 1


def test_the_decision_tree_ends_at_the_first_fit() -> None:
    tree = build_decision_tree(NODE, 64)
    assert [trial.fits for trial in tree] == [False] * (len(tree) - 1) + [True]
    assert tree[0].ranks == 1
    assert tree[0].peak_bytes > 80 * 2**30


@pytest.fixture(scope="module")
def sixteen() -> Plan:
    return plan(MIDDLE, 16, top=6)


def test_every_layout_is_accounted_for(sixteen: Plan) -> None:
    searched = sixteen.searched
    refused = sum(count for _, count in searched.refused)
    every = sum(len(family) for family in list_families(MIDDLE, 16))
    assert searched.considered == every == refused + searched.too_big + searched.fit
    assert searched.timed <= searched.fit


@pytest.mark.parametrize(
    ("workers", "most_queued", "timed_first"),
    [
        pytest.param(2, 4_000, 0, marks=SLOW_IN_TURN),
        pytest.param(2, 4_000, 100, marks=SLOW_IN_TURN),
        pytest.param(3, 10, 5, marks=SLOW_IN_TURN),
    ],
)
def test_several_processes_find_the_same_plan(
    sixteen: Plan,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    most_queued: int,
    timed_first: int,
) -> None:
    """Also where more layouts have to be timed than the processes return, and where others time
    them."""
    monkeypatch.setattr(plan_search, "LEAST_FAMILIES", 0)
    monkeypatch.setattr(plan_search, "MOST_QUEUED", most_queued)
    monkeypatch.setattr(plan_search, "TIMED_FIRST", timed_first)
    assert to_json(plan(MIDDLE, 16, top=6, workers=workers)) == to_json(sixteen)


def test_recomputed_parts_are_written_as_a_job_takes_them() -> None:
    """A list; a plan of an earlier version, which joined them to one word, is read as before."""
    parts = replace(SMALL.training, recompute_parts=frozenset({"norms", "activation"}))
    found = plan(replace(SMALL, training=parts), 2, top=1, keep=frozenset({"recompute"}))
    text = to_json(found)
    value = json.loads(text)["best"]["choice"]["recompute"]
    tables = {"model": {"preset": "gpt2-355m"}, "hardware": {"preset": "h100-sxm"}}
    sizes = {"seq_len": 1024, "micro_batch": 1, "global_batch": 16, "recompute": value}
    read = parse_job(format_toml(tables | {"training": sizes}))
    assert read.training.recompute_parts == parts.recompute_parts
    older = text.replace('["activation", "norms"]', '"activation+norms"')
    assert older != text and from_json(older) == from_json(text) == found


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/model")
def test_several_processes_find_the_same_pareto_list(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = plan(SMALL, 4, top=1, pareto=True)
    monkeypatch.setattr(plan_search, "LEAST_FAMILIES", 0)
    assert to_json(plan(SMALL, 4, top=1, pareto=True, workers=2)) == to_json(alone)


def test_several_processes_say_too_that_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_search, "LEAST_FAMILIES", 0)
    with pytest.raises(UsageError, match="no layout on 1 x"):
        plan(MIDDLE, 1, workers=2)


@pytest.mark.parametrize("framework", ["megatron", pytest.param("fsdp2", marks=SLOW_IN_TURN)])
def test_the_fitting_layouts_are_all_that_fit(framework: Framework) -> None:
    one = replace(MIDDLE, training=replace(MIDDLE.training, framework=framework))
    assert plan(one, 8, top=1).searched.fit == len(jobs_that_fit(one, 8))


def test_tp_crosses_nodes_only_if_it_is_kept() -> None:
    far = replace(MIDDLE, parallel=ParallelConfig(tp=4, rank_order=("dp", "cp", "ep", "tp", "pp")))
    free = [each.parallel for family in list_families(far, 16) for each in family]
    assert {layout.tp for layout in free if layout.dp == 8} == {1}
    kept = list_families(far, 16, frozenset({"tp"}))
    assert {each.parallel.tp for family in kept for each in family} == {4}


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/model")
def test_no_untimed_layout_is_faster(sixteen: Plan) -> None:
    steps = sorted(build_candidate(each, Rates()).step_ns for each in jobs_that_fit(MIDDLE, 16))
    assert sixteen.best.step_ns == steps[0]


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/model")
@pytest.mark.parametrize("one", [MIDDLE, EXPERTS], ids=["dense", "experts"])
def test_the_result_equals_that_of_timing_every_layout(
    one: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = plan(one, 16, top=6)
    monkeypatch.setattr(LowerBound, "compute_step_ns", lambda _floor, _job: 0.0)
    every = plan(one, 16, top=6)
    assert every.searched.timed == every.searched.fit > found.searched.timed
    assert replace(found, searched=every.searched) == every


@pytest.mark.parametrize(
    ("one", "gpus"),
    [
        pytest.param(SMALL, 4, id="small"),
        pytest.param(NODE, 16, id="node"),
        *(
            pytest.param(one, 16, id=name, marks=SLOW_IN_TURN)
            for name, one in {
                "slow": slow_network(MIDDLE),
                "experts": EXPERTS,
                "overlap": replace(
                    MIDDLE, parallel=ParallelConfig(overlap=frozenset({"tp", "cp", "dp"}))
                ),
                "all-gather": replace(MIDDLE, parallel=ParallelConfig(context_kind="all-gather")),
                "fsdp2": replace(MIDDLE, training=replace(MIDDLE.training, framework="fsdp2")),
                "deepspeed": replace(
                    MIDDLE, training=replace(MIDDLE.training, framework="deepspeed")
                ),
            }.items()
        ),
    ],
)
def test_no_step_is_below_its_lower_bound(one: JobConfig, gpus: int) -> None:
    """The lower bound that allows skipping a layout is correct."""
    floor = LowerBound(Rates())
    fitting = jobs_that_fit(one, gpus)
    assert fitting
    for each in islice(fitting, 0, None, 1 + len(fitting) // 200):
        assert floor.compute_step_ns(each) <= predict(each).split.step_ns


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/model")
def test_the_pareto_list_is_that_of_timing_every_layout() -> None:
    """On 1, 2 and 4 GPUs: no layout of any is faster than a listed one of at most as many GPUs with
    at least 5 % of the device's memory less."""
    found = plan(SMALL, 4, top=1, pareto=True)
    listed = [(each.gpus, each.candidate.step_ns, each.headroom_bytes) for each in found.pareto]
    assert {gpus for gpus, _, _ in listed} == {1, 2, 4}
    assert listed == sorted(listed)
    assert len(listed) > 3
    least = 0.05 * SMALL.hardware.memory_bytes
    for gpus in (1, 2, 4):
        for each in jobs_that_fit(SMALL, gpus):
            peak = max(stage.total_bytes for stage in compute_memory(each))
            headroom = SMALL.hardware.memory_bytes - peak
            step_ns = build_candidate(each, Rates()).step_ns
            assert any(
                fewer <= gpus and ns <= step_ns and free > headroom - least
                for fewer, ns, free in listed
            )


def test_a_price_gives_the_cost_of_a_million_tokens() -> None:
    found = plan(SMALL, 2, top=1, price_per_gpu_hour=3.0, pareto=True)
    tokens = 16 * 1024
    expected = 3.0 * 2 * found.best.step_ns / 3.6e12 / tokens * 1e6
    assert found.compute_cost(found.best, 2) == pytest.approx(expected)
    body = json.loads(to_json(found))
    assert body["cost_per_million_tokens"] == pytest.approx(expected)
    cheapest = min(row["cost_per_million_tokens"] for row in body["pareto"])
    assert cheapest <= expected
    assert from_json(to_json(found)) == found
    for older in ("tokens", "price_per_gpu_hour", "pareto", "cost_per_million_tokens"):
        del body[older]
    assert from_json(json.dumps(body)).compute_cost(found.best, 2) is None
    with pytest.raises(UsageError, match="price per GPU hour must be above 0"):
        plan(SMALL, 2, price_per_gpu_hour=-1.0)


def test_the_rule_of_thumb_spreads_experts() -> None:
    """Mixtral's 8 experts over the ranks of a node: its states fit where they did not on ep 1."""
    trials = build_decision_tree(EXPERTS, 16)
    assert {trial.ep for trial in trials if trial.ranks >= 8} == {8}
    assert trials[0].ep == 1
    assert all(trial.ep == 1 for trial in build_decision_tree(MIDDLE, 16))


def test_runners_up_are_other_splits_of_the_gpus_in_order(sixteen: Plan) -> None:
    axes = [sixteen.best.choice.axes, *(r.candidate.choice.axes for r in sixteen.runners_up)]
    assert len(set(axes)) == len(axes) == 6
    behind = [each.behind_ns for each in sixteen.runners_up]
    assert behind == sorted(behind)
    assert behind[0] >= 0


def test_the_reasons_add_up_to_the_difference(sixteen: Plan) -> None:
    for one in sixteen.runners_up:
        rounding_ns = 1_000
        assert abs(sum(each.delta_ns for each in one.reasons) - one.behind_ns) < rounding_ns
        assert {each.bucket for each in one.reasons} <= set(BUCKETS)
        assert one.more_bytes == one.candidate.peak_bytes - sixteen.best.peak_bytes


def test_kept_settings_are_those_of_the_job() -> None:
    pinned = replace(MIDDLE, parallel=ParallelConfig(tp=4, pp=2))
    found = plan(pinned, 16, frozenset({"tp", "pp"}))
    shown = [found.best, *(each.candidate for each in found.runners_up)]
    assert {each.choice.axes[:2] for each in shown} == {(4, 2)}


@pytest.mark.parametrize(
    "one", [MIDDLE, pytest.param(EXPERTS, marks=SLOW_IN_TURN)], ids=["dense", "experts"]
)
@pytest.mark.parametrize(
    "stated",
    [
        {"training.framework": "megatron"},
        *(
            pytest.param(stated, marks=SLOW_IN_TURN)
            for stated in (
                {"parallel": {"tp": 2, "pp": 4, "dp_replicate": 2, "schedule": "zb-h1"}},
                {"training.framework": "fsdp2"},
                {"parallel": {"dp": 16, "zero": 3}},
                {"parallel": {"tp": 8, "dp": 2, "overlap": ["tp", "dp"], "dispatcher": "deepep"}},
                {
                    "parallel": {"dp": 16},
                    "training.recompute": "full",
                    "training.recompute_layers": 3,
                },
                {"parallel": {"cp": 2, "dp": 8, "context": "all-gather", "sum_once": True}},
            )
        ),
    ],
)
def test_a_layout_written_to_a_job_toml_predicts_the_same(
    one: JobConfig, stated: dict[str, Any]
) -> None:
    """The lines replace [parallel], and keys of [training], of the file that was planned."""
    tables = tomllib.loads(RUN.format(model=one.model.name))
    for place, value in stated.items():
        table, _, key = place.partition(".")
        tables.setdefault(table, {}).update({key: value} if key else value)
    planned = parse_job(format_toml(tables))
    best = plan(planned, 16, top=1).best
    new = tomllib.loads("\n".join(format_job_lines(planned, best.choice)))
    merged = tables | {
        "parallel": new["parallel"],
        "training": tables["training"] | new["training"],
    }
    again = parse_job(format_toml(merged))
    assert again.parallel.world_size == 16
    assert predict(again).split.step_ns == best.step_ns
    assert max(stage.total_bytes for stage in predict(again).memory) == best.peak_bytes


RUN = """\
[hardware]
preset = "h100-sxm"
[model]
preset = "{model}"
[training]
micro_batch = 1
seq_len = 4096
global_batch = 16
"""


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/model")
def test_experts_are_split_over_ranks() -> None:
    found = plan(EXPERTS, 16)
    experts = EXPERTS.model.experts
    assert isinstance(experts, Experts)
    choice = found.best.choice
    assert experts.count % choice.ep == 0
    assert any(each.candidate.choice.ep > 1 for each in found.runners_up) or choice.ep > 1


def test_the_schedule_and_stages_of_the_job_are_searched_too() -> None:
    """DualPipe's two copies of 40 layers have 16 stages each, and no number of layers is refused
    for another number of stages."""
    own = (2, *[3] * 9, *[2] * 5, 1)
    layout = ParallelConfig(pp=16, schedule="dualpipe", layers_per_stage=own)
    stated = replace(MIDDLE, parallel=layout, training=replace(MIDDLE.training, global_batch=64))
    every = [one for family in list_families(stated, 32) for one in family]
    mine = {each.parallel.layers_per_stage for each in every if each.parallel.pp == 16}
    assert mine == {own, split_layers_evenly(40, 16)}
    both = [one for one in every if one.parallel.schedule == "dualpipe" and one.parallel.pp == 16]
    assert {one.parallel.layers_per_stage for one in both} == {own, split_layers_evenly(40, 16)}
    assert not any("layers_per_stage" in str(find_violation(each)) for each in every)


def test_uneven_stages_leave_the_ends_lighter() -> None:
    assert split_layers_evenly(126, 16) == (7, *(8,) * 14, 7)
    assert split_layers_evenly(9, 4) == (2, 3, 2, 2)
    assert split_layers_evenly(8, 4) is None


def test_the_ends_of_a_pipeline_may_have_only_embedding_and_head() -> None:
    """Llama 3's 126 layers in 16 stages of 8 chunks (arXiv:2407.21783, section 3.3.2)."""
    assert split_layers_evenly(126, 128) == (0, *(1,) * 126, 0)
    assert split_layers_evenly(125, 128) is None
    llama = job("llama-3.1-405b", 8192, 2048)
    kept = replace(llama, parallel=ParallelConfig(tp=8, pp=16))
    found = list_families(kept, 8192, frozenset({"tp", "pp", "cp"}))
    assert 8 in {each.parallel.chunks for family in found for each in family}


@pytest.mark.parametrize("gpus", [0, 10**12])
def test_no_gpus_and_more_than_any_cluster_has_are_rejected(gpus: int) -> None:
    with pytest.raises(UsageError, match=f"GPUs must be 1 to 1,000,000, not {gpus}; set --gpus"):
        plan(SMALL, gpus)


def test_ulysses_follows_from_each_cp() -> None:
    """Four ranks that exchange heads, as far as they divide cp."""
    own = replace(MIDDLE.parallel, cp=8, ulysses=4)
    layouts = {
        (each.parallel.cp, each.parallel.ulysses)
        for family in list_families(replace(MIDDLE, parallel=own), 16)
        for each in family
    }
    assert layouts == {(1, 1), (2, 2), (4, 4), (8, 4), (16, 4)}
    assert build_decision_tree(replace(MIDDLE, parallel=own), 16)


def test_a_planned_layout_keeps_the_order_of_ranks() -> None:
    ordered = replace(MIDDLE, parallel=ParallelConfig(rank_order=("cp", "tp", "ep", "dp", "pp")))
    best = plan(ordered, 8).best.choice
    assert 'rank_order = "cp-tp-ep-dp-pp"' in format_job_lines(ordered, best)


def test_a_layout_with_less_than_the_margin_is_listed_once_and_its_chance_is_said() -> None:
    """What is not stated may need more: such a layout leaves a margin with a lower chance."""
    job = parse_job(
        '[model]\npreset = "gpt2-1.5b"\n[training]\nseq_len = 1024\nmicro_batch = 1\n'
        'global_batch = 64\nframework = "megatron"\n[hardware]\npreset = "h100-sxm"\n'
        f"memory_bytes = {int(32.625 * 2**30)}\n[parallel]\ndp = 8\n"
    )
    found = plan(job, gpus=8, keep=("tp", "pp", "zero", "micro_batch", "recompute"))
    choices = [one.choice for one in (found.best, *(one.candidate for one in found.runners_up))]
    assert len(set(map(repr, choices))) == len(choices)
    assert found.best.fit_chance is not None and found.margin <= found.best.fit_chance


def test_if_no_layout_fits_the_closest_is_named() -> None:
    with pytest.raises(UsageError, match=r"no layout on 4 x h100-sxm fits; the closest is tp 4 "):
        plan(NODE, 4)


def test_if_no_layout_is_valid_the_broken_rule_is_named() -> None:
    odd = replace(SMALL, parallel=ParallelConfig(tp=3))
    with pytest.raises(UsageError, match=r"is valid \(heads .*\btp\)"):
        plan(odd, 3, frozenset({"tp"}))


@pytest.mark.slow
@pytest.mark.alone
def test_ten_thousand_layouts_take_less_than_thirty_seconds() -> None:
    start = time.perf_counter()
    considered = plan(NODE, 64).searched.considered
    assert (time.perf_counter() - start) / considered * 10_000 < MOST_S
    assert considered > 5_000


OPEN = """
[model]
preset = "llama-2-70b"
[training]
seq_len = 4096
micro_batch = 1
global_batch = 64
recipe = "of a publisher"
[hardware]
preset = "h100-sxm"
"""


def test_a_plan_is_as_sure_as_the_prediction_of_its_layout() -> None:
    """Communication of tp may be overlapped or not, which the first file leaves open."""
    for layout, confidence in (("", "medium"), ('[parallel]\noverlap = ["dp", "tp"]\n', "high")):
        one = parse_job(OPEN + layout)
        best = plan(one, 64, top=2).best
        lines = tomllib.loads("\n".join(format_job_lines(one, best.choice)))
        tables = tomllib.loads(OPEN)
        training = {**tables["training"], **lines["training"]}
        found = predict(parse_job(format_toml({**tables, **lines, "training": training})))
        assert best.confidence == found.confidence == confidence
        is_open = any("keys that are not stated" in note for note in found.notes)
        assert is_open == (confidence == "medium")
