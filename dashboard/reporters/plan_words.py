"""A plan in words: how a layout is called, and why a runner-up lost."""

from __future__ import annotations

from stepsplit.analyzer import units
from stepsplit.analyzer.model.plan_space import Candidate, Choice, Reason, RunnerUp

LEAST = 0.0005
"""Of the best's step: what changes less is not worth a word."""
MOST_REASONS = 3
_PLAIN = {
    "skew": "waiting for the slowest node", "copy": "offloading", "idle": "waiting for the host",
    "bubble": "bubble", "collective": "collectives", "p2p": "messages",
}  # fmt: skip


def axes_words(choice: Choice) -> str:
    """The axes of more than one rank: "tp 8 pp 16 dp 64"."""
    sizes = zip(("tp", "pp", "cp", "dp", "ep"), choice.axes, strict=True)
    return " ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one GPU"


def settings_words(one: Candidate) -> str:
    """What goes with the axes: schedule, ZeRO, what is recomputed, microbatches."""
    choice = one.choice
    chunks = f" of {choice.chunks} stages a rank" if choice.chunks > 1 else ""
    known = (
        f"{choice.schedule}{chunks}" if choice.pp > 1 else "",
        f"{_microbatches(one.microbatches)} of {choice.micro_batch:,}",
        f"ZeRO-{choice.zero}" if choice.zero else "",
        f"in groups of {choice.dp_shard}" if choice.zero == 3 and choice.dp_replicate > 1 else "",
        f"expert tp {choice.expert_tp}" if choice.expert_tp > 1 else "",
        "sequence parallel" if choice.sequence_parallel else "",
        "" if choice.recompute == "none" else f"recompute {choice.recompute}",
        "uneven stages" if choice.layers_per_stage else "",
    )
    return ", ".join(part for part in known if part)


def lost_words(best: Candidate, one: RunnerUp) -> str:
    """What costs it most, in shares of the best's step, and what it gains against that."""
    step_ns = best.step_ns
    told = [reason for reason in one.reasons if abs(reason.delta_ns) > LEAST * step_ns]
    more = [reason for reason in told if reason.delta_ns > 0][:MOST_REASONS]
    less = [reason for reason in told if reason.delta_ns < 0][-1:]
    if not more:
        return f"as fast, with {_memory(one.more_bytes)}"
    words = ", ".join(_reason(best, one.candidate, reason) for reason in more)
    return words + "".join(f"; gains {_reason(best, one.candidate, reason)}" for reason in less)


def _microbatches(count: int) -> str:
    return f"{count:,} microbatch{'es' if count > 1 else ''}"


def _memory(more_bytes: int) -> str:
    if not more_bytes:
        return "as much memory"
    return f"{units.gibibytes(abs(more_bytes))} {'more' if more_bytes > 0 else 'less'} memory"


def _reason(best: Candidate, other: Candidate, reason: Reason) -> str:
    share = units.signed_percent(reason.delta_ns / best.step_ns)
    return f"{_what(best, other, reason)} {share}{_why(other, reason)}"


def _what(best: Candidate, other: Candidate, reason: Reason) -> str:
    if reason.bucket == "compute":
        return _compute(best.choice, other.choice) if reason.delta_ns > 0 else "compute"
    if reason.bucket == "p2p" and reason.axis == "pp":
        return "messages between stages"
    return f"exposed {reason.axis}" if reason.axis else _PLAIN[reason.bucket]


def _compute(best: Choice, other: Choice) -> str:
    """What makes the same model take more computing."""
    if other.recompute != best.recompute and other.recompute != "none":
        return f"recomputation ({other.recompute})"
    if other.tp > best.tp:
        return "narrower products"
    if other.micro_batch < best.micro_batch or other.cp > best.cp:
        return "shorter products"
    return "compute of the slowest stage"


def _why(other: Candidate, reason: Reason) -> str:
    choice = other.choice
    if reason.bucket == "bubble" and choice.pp > 1:
        chunks = f" x {choice.chunks}" if choice.chunks > 1 else ""
        return f" ({_microbatches(other.microbatches)} for {choice.pp} stages{chunks})"
    sizes = dict(zip(("tp", "pp", "cp", "dp", "ep"), choice.axes, strict=True))
    size = sizes.get(reason.axis, 0)
    return f" ({reason.axis} {size})" if size and reason.axis != "pp" else ""
