"""The screen of plan: the best layouts, why others are slower, and the rule-of-thumb layout."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from stepsplit.analyzer import units
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.plan_space import (
    Candidate,
    Choice,
    Plan,
    Reason,
    RunnerUp,
    format_job_lines,
)
from stepsplit.dashboard.reporters.console import DIM, Text
from stepsplit.dashboard.reporters.tables import build_table

MAX_REJECTED_KINDS = 3


def build_plan_screen(job: JobConfig, plan: Plan) -> RenderableType:
    """Builds the screen of a plan for a rich console of any width."""
    training, name = job.training, job.model.name or f"of {job.model.layers} layers"
    adapters = f", LoRA of rank {training.lora_rank}" if training.lora_rank else ""
    searched = plan.searched
    refused = searched.considered - searched.too_big - searched.fit
    search = f"{searched.considered:,} layouts considered: {searched.fit:,} fit, "
    search += f"{searched.too_big:,} do not fit, {refused:,} are invalid"
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in searched.refused[:MAX_REJECTED_KINDS])
    search += f" ({kinds})" if kinds else ""
    search += f"; {searched.timed:,} timed, others ruled out by lower bounds"
    parts: list[RenderableType] = [
        Group(
            Text(f"model {name}   {plan.gpus:,} x {job.hardware.name}", style="bold"),
            Text(
                f"{training.global_batch:,} sequences of {training.seq_len:,} tokens per step   "
                f"{training.dtype} {training.optimizer}, {training.framework}{adapters}"
            ),
        ),
        Text(search, style=DIM),
        _describe_margin(plan),
        Text(),
    ]
    # One line per layout.
    cost = ("1M tokens",) if plan.price_per_gpu_hour is not None else ()
    table = build_table(
        "", "layout", "step", "slower", "MFU", "memory", "fits", "confidence", *cost
    )
    table.columns[1].justify = "left"
    for rank, candidate in enumerate((plan.best, *(each.candidate for each in plan.runners_up)), 1):
        behind, chance = candidate.step_ns / plan.best.step_ns - 1, candidate.fit_chance
        table.add_row(
            str(rank),
            Text(format_axes(candidate.choice), style="bold" if rank == 1 else ""),
            units.format_milliseconds(candidate.step_ns),
            units.format_signed_percent(behind) if rank > 1 else "",
            "" if candidate.mfu is None else units.format_percent(candidate.mfu),
            f"{units.format_gibibytes(candidate.peak_bytes)}",
            # Never 100 %: the memory model has an error of its own.
            "" if chance is None else units.format_percent(min(chance, 0.99), 0),
            candidate.confidence,
            *_format_cost(plan, candidate, plan.gpus),
        )
    # The settings of each layout, and why it is slower.
    details = Table.grid(padding=(0, 2, 0, 0))
    details.add_column(no_wrap=True)
    details.add_column(overflow="fold")
    details.add_row("1", _build_settings(plan.best))
    for rank, runner_up in enumerate(plan.runners_up, 2):
        text = Text(explain_runner_up(plan.best, runner_up), style="yellow")
        details.add_row(str(rank), Group(_build_settings(runner_up.candidate), text))
    parts += [table, Text(), details, Text(), *_build_decision_tree(job, plan)]
    if plan.pareto:
        # The layouts that no other beats in step time, memory and number of GPUs at once.
        table = build_table("GPUs", "not beaten", "step", "headroom", "recompute", "MFU", *cost)
        table.columns[1].justify = "left"
        for point in plan.pareto:
            candidate = point.candidate
            table.add_row(
                f"{point.gpus:,}",
                format_axes(candidate.choice),
                units.format_milliseconds(candidate.step_ns),
                units.format_gibibytes(point.headroom_bytes),
                candidate.choice.recompute,
                "" if candidate.mfu is None else units.format_percent(candidate.mfu),
                *_format_cost(plan, candidate, point.gpus),
            )
        parts += [Text(), table]
    lines = format_job_lines(job, plan.best.choice)
    heading = "to job.toml: replace [parallel], and these keys of [training]"
    parts += [Text(), Text(heading, style="bold"), *map(Text, lines)]
    return Group(*parts)


def _describe_margin(plan: Plan) -> Text:
    """Why the first layout may be slower than another, or that none leaves a margin."""
    if not plan.margin:
        words = "no layout leaves a margin for the error of the memory model: the first may run"
        return Text(f"{words} out of memory", style="yellow")
    chance = units.format_percent(plan.margin, 0)
    sure = f"the first is the fastest that leaves a margin: it fits with {chance} or more"
    is_faster = any(one.behind_ns < 0 for one in plan.runners_up)
    return Text(f"{sure}; those that are faster may run out of memory" if is_faster else sure)


def _format_cost(plan: Plan, candidate: Candidate, gpus: int) -> tuple[str, ...]:
    """The cost of a million tokens in a cell of its own; no cell without a price."""
    cost = plan.compute_cost(candidate, gpus)
    return () if cost is None else (f"{cost:,.4g}",)


def _build_settings(candidate: Candidate) -> Text:
    # Schedule, microbatches, ZeRO stage and recomputation of a layout.
    choice = candidate.choice
    chunks = f", {choice.chunks} stages per rank" if choice.chunks > 1 else ""
    known = (
        f"{choice.schedule}{chunks}" if choice.pp > 1 else "",
        f"{_format_microbatches(candidate.microbatches)} of {choice.micro_batch:,}",
        f"ZeRO-{choice.zero}" if choice.zero else "",
        f"in groups of {choice.dp_shard}" if choice.zero == 3 and choice.dp_replicate > 1 else "",
        f"expert tp {choice.expert_tp}" if choice.expert_tp > 1 else "",
        "sequence parallel" if choice.sequence_parallel else "",
        "" if choice.recompute == "none" else f"recompute {choice.recompute}",
        "uneven stages" if choice.layers_per_stage else "",
    )
    return Text(", ".join(part for part in known if part))


def _build_decision_tree(job: JobConfig, plan: Plan) -> list[RenderableType]:
    """The decisions of the rule-of-thumb layout, and the links of the best layout."""
    table = build_table("rule of thumb", "memory per GPU", "")
    # The last trial of each question, and the last pipeline that does not fit.
    last = {trial.question: trial for trial in plan.tree}
    before = [trial for trial in plan.tree[-2:-1] if trial.pp > 1]
    for trial in [*list(last.values())[:-1], *before, *list(last.values())[-1:]]:
        needs = units.format_gibibytes(trial.peak_bytes)
        answer = Text("fits", style="green") if trial.fits else Text("does not fit", style=DIM)
        words = [f"tp {trial.tp}"] * (trial.tp > 1) + [f"pp {trial.pp}"] * (trial.pp > 1)
        words += [f"ep {trial.ep}"] * (trial.ep > 1)
        words += [f"ZeRO-{trial.zero}"] * (trial.zero > 0)
        table.add_row(f"{trial.question}{': ' if words else ''}{' '.join(words)}", needs, answer)
    final = plan.tree[-1]
    axes = (("tp", final.tp), ("pp", final.pp), ("ep", final.ep))
    sizes = [f"{axis} {size}" for axis, size in axes if size > 1]
    alone = "data parallelism only" if plan.gpus > 1 else "one GPU"
    by_hand = f"{' '.join(sizes)} and data parallelism" if sizes else alone
    places = []
    for place in plan.places:
        where = "within a node" if place.nodes == 1 else f"across {place.nodes:,} nodes"
        places.append(f"{place.axis} {place.ranks:,} {where} ({place.link})")
    links = ", ".join(places) or "none (one GPU)"
    gpu_memory = f"memory of a GPU: {units.format_gibibytes(job.hardware.memory_bytes)}"
    rest = Text(
        f"each in its most memory-efficient form, full recomputation; {gpu_memory}", style=DIM
    )
    return [
        table,
        rest,
        Text(f"rule-of-thumb layout: {by_hand}; fastest layout: {format_axes(plan.best.choice)}"),
        Text(f"links of the best layout: {links}"),
    ]


# Layouts as text, and why a runner-up is slower.

MIN_SHARE = 0.0005
"""Share of the best step time; smaller changes are omitted."""

MAX_REASONS = 3

_BUCKET_NAMES = {
    "skew": "stragglers", "copy": "offloading", "idle": "waiting for the host",
    "bubble": "bubble", "collective": "collectives", "p2p": "p2p messages",
}  # fmt: skip


def format_axes(choice: Choice) -> str:
    """The axes with more than one rank: "tp 8 pp 16 dp 64"."""
    sizes = zip(("tp", "pp", "cp", "dp", "ep"), choice.axes, strict=True)
    return " ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one GPU"


def explain_runner_up(best: Candidate, runner_up: RunnerUp) -> str:
    """What makes a runner-up slower, and what offsets it, as shares of the best step time."""
    step_ns = best.step_ns
    significant = [
        reason for reason in runner_up.reasons if abs(reason.delta_ns) > MIN_SHARE * step_ns
    ]
    more = [reason for reason in significant if reason.delta_ns > 0][:MAX_REASONS]
    # The reasons are in order, so that this is the largest of the gains.
    less = [reason for reason in significant if reason.delta_ns < 0][-1:]
    if not more and less:
        return f"faster: {_format_reason(best, runner_up.candidate, less[0])}"
    if not more:
        memory = "the same memory"
        # Of two equally fast layouts memory decides which one is first.
        if more_bytes := runner_up.more_bytes:
            size = units.format_gibibytes(abs(more_bytes))
            memory = f"{size} {'more' if more_bytes > 0 else 'less'} memory"
        return f"equally fast, with {memory}"
    words = ", ".join(_format_reason(best, runner_up.candidate, reason) for reason in more)
    return words + "".join(
        f"; offset by {_format_reason(best, runner_up.candidate, reason)}" for reason in less
    )


def _format_microbatches(count: int) -> str:
    return f"{count:,} microbatch{'es' if count > 1 else ''}"


def _format_reason(best: Candidate, candidate: Candidate, reason: Reason) -> str:
    """Such as "exposed tp +3.1 % (tp 8)"."""
    choice = candidate.choice
    if reason.bucket == "compute":
        # Why the same model needs more compute time; less needs no reason.
        if reason.delta_ns <= 0:
            what = "compute"
        elif choice.recompute != best.choice.recompute and choice.recompute != "none":
            what = f"recomputation ({choice.recompute})"
        elif choice.tp > best.choice.tp:
            what = "narrower GEMMs"
        elif choice.micro_batch < best.choice.micro_batch or choice.cp > best.choice.cp:
            what = "smaller GEMMs"
        else:
            what = "compute of the slowest stage"
    elif reason.bucket == "p2p" and reason.axis == "pp":
        what = "messages between pipeline stages"
    else:
        what = f"exposed {reason.axis}" if reason.axis else _BUCKET_NAMES[reason.bucket]
    sizes = dict(zip(("tp", "pp", "cp", "dp", "ep"), choice.axes, strict=True))
    size = sizes.get(reason.axis, 0)
    detail = f" ({reason.axis} {size})" if size and reason.axis != "pp" else ""
    if reason.bucket == "bubble" and choice.pp > 1:
        chunks = f" x {choice.chunks}" if choice.chunks > 1 else ""
        microbatches = _format_microbatches(candidate.microbatches)
        detail = f" ({microbatches} for {choice.pp} stages{chunks})"
    return f"{what} {units.format_signed_percent(reason.delta_ns / best.step_ns)}{detail}"
