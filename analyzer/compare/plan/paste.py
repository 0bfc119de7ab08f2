"""A layout as the lines of a RUN.toml."""

from __future__ import annotations

from stepsplit.analyzer.compare.plan.plan import Choice


def toml_lines(choice: Choice, experts: bool = False) -> tuple[str, ...]:
    """What the plan chose for [parallel] and [training], to be pasted; what a RUN.toml takes for
    granted is left out. experts: the model has some."""
    parallel = [*_axes(choice), *_experts(choice, experts), *_pipeline(choice)]
    return "[parallel]", *parallel, "[training]", *_training(choice)


def _axes(choice: Choice) -> list[str]:
    """zero always stands: its default hangs on the framework."""
    lines = [f"{key} = {getattr(choice, key)}" for key in ("tp", "pp", "cp", "ep")]
    lines = [line for line in lines if not line.endswith(" = 1")]
    shards = choice.zero == 3
    if shards and choice.dp_replicate > 1:
        lines += [f"dp_replicate = {choice.dp_replicate}", f"dp_shard = {choice.dp_shard}"]
    else:
        lines.append(f"dp = {choice.dp_replicate * choice.dp_shard}")
    lines.append(f"zero = {choice.zero}")
    if choice.sequence_parallel:
        lines.append("sequence_parallel = true")
    return lines


def _experts(choice: Choice, experts: bool) -> list[str]:
    """Megatron cuts experts by tp unless told not to."""
    return [f"expert_tp = {choice.expert_tp}"] if experts and choice.tp > 1 else []


def _pipeline(choice: Choice) -> list[str]:
    if choice.pp == 1:
        return []
    lines = [f'schedule = "{choice.schedule}"']
    if choice.chunks > 1:
        lines.append(f"chunks = {choice.chunks}")
    if choice.layers_per_stage is not None:
        lines.append(f"layers_per_stage = {list(choice.layers_per_stage)}")
    return lines


def _training(choice: Choice) -> list[str]:
    return [f"micro_batch = {choice.micro_batch}", f'recompute = "{choice.recompute}"']
