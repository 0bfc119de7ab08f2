"""The parallelism and memory strategies that can be detected: a table, and the detection by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stepsplit.analyzer.split.call_purposes import DDP_FORWARD
from stepsplit.analyzer.split.matching import MatchedCalls
from stepsplit.analyzer.split.mesh import RankLayout
from stepsplit.analyzer.split.signature import (
    UNKNOWN_AXIS,
    AnyOf,
    CallSet,
    Fits,
    HasCalls,
    HasCopies,
    HasEvent,
    HasOrder,
    IsAlong,
    OnAnyGroup,
    Pattern,
    Signature,
    match_signatures,
)
from stepsplit.analyzer.split.steps import Steps
from stepsplit.analyzer.split.strategy import Strategy
from stepsplit.analyzer.split.strategy_evidence import AFTER, BACKWARD, FORWARD, collect_evidence
from stepsplit.analyzer.split.strategy_rules import (
    ACTIVATION_SUMS,
    BY_FSDP,
    DEEPSPEED_ZERO_3,
    EXCHANGE,
    EXCHANGED_TOKENS,
    GATHER,
    GATHERED_AGAIN,
    GATHERED_TWICE,
    GRADIENT_SCATTERS,
    GRADIENT_SUMS,
    LATE,
    MESSAGES,
    ONLY_SUMMED,
    OWNED,
    REPLICATED,
    SCATTER,
    SHARDED,
    SUM,
    UPDATED_BY_OWNERS,
    ZERO_OPTIMIZER,
    casts_inputs,
    describe_accumulation,
    describe_precisions,
    describe_recomputation,
    describe_replicas,
    describe_summing_replicas,
    has_several_backwards,
    is_megatron,
    name_data_axis,
    name_expert_protocol,
    name_group_library,
    sums_after_each_backward,
    updates_on_host,
)
from stepsplit.analyzer.trace import RankTrace


def detect_strategies(
    traces: Sequence[RankTrace],
    steps: Sequence[Steps],
    matched: MatchedCalls,
    layout: RankLayout,
    schedule: str | None,
) -> tuple[Strategy, ...]:
    """Detects the strategies of all ranks from the events of their steps, each once, in the order
    of SIGNATURES; schedule is None if unknown.

    Ambiguous strategies are omitted; none is inferred from the mesh in run.json.
    """
    has_messages = any(trace.calls.is_message.any() for trace in traces)
    counts: Counter[Strategy] = Counter()
    for i, (trace, windows) in enumerate(zip(traces, steps, strict=True)):
        evidence = collect_evidence(trace, windows, matched.counts[matched.slice_trace(i)], layout)
        counts.update(
            set(match_signatures(evidence, SIGNATURES, schedule, has_messages=has_messages))
        )
    # If ranks differ only in the detail, the most frequent one is kept.
    most: dict[tuple[str, str | None, int | None], Strategy] = {}
    for one in sorted(counts, key=lambda s: (-counts[s], s.detail)):
        most.setdefault((one.name, one.axis, one.size), one)
    names = [signature.name for signature in SIGNATURES]
    return tuple(
        sorted(
            most.values(),
            key=lambda s: (names.index(s.name), s.axis or "", s.detail, -(s.size or 0)),
        )
    )


# What strategies are made of.

_MIN_CALL_SHARE = 0.5
"""A pattern must hold for more than this fraction of the calls of a group: for most of them.
test_strategies.py passes at 0.25 too."""

_SAME_SAMPLE = IsAlong((UNKNOWN_AXIS, "cp", "dp_replicate", "dp_shard"))
"""The ranks may work on parts of one sequence: no name of the group says otherwise."""

_ROUTED = r"K[^|LX]*X[^X|]*L[^X|]*X"
"""After an expert selection, exchanges surround a matrix product."""

_HEADS_EXCHANGED = HasOrder(rf"\A(?!.*{_ROUTED}).*X", EXCHANGE, by_fsdp=False)
"""Exchanges that are not of tokens for experts."""

_DATA_STRATEGIES = ("ddp", "zero-1", "zero-2", "fsdp", "hsdp")

_KEPT = "weights kept until the backward"

_SCATTERED_EARLY = HasCalls(GRADIENT_SCATTERS, (BACKWARD,))


def _can_be_pipeline(calls: CallSet) -> bool:
    """Whether messages or a schedule confirm the stages of the mesh."""
    return calls.rank.has_messages or bool(calls.rank.schedule)


def _name_schedule(calls: CallSet) -> str:
    return calls.rank.schedule or ""


# The table.

SIGNATURES = (
    Signature(
        name="ddp",
        axis=name_data_axis,
        patterns=(
            Pattern(
                needs=(REPLICATED,),
                # Gradients that are scattered, and weights that do not return, are of something
                # else.
                absent=(UPDATED_BY_OWNERS, HasCalls(GRADIENT_SCATTERS, LATE)),
            ),
        ),
        device_patterns=(Pattern(needs=(ONLY_SUMMED,), absent=(OnAnyGroup(GATHERED_TWICE),)),),
    ),
    # DistributedDataParallel around the cp groups, whose ranks have the same weights.
    Signature(
        name="ddp",
        axis="cp",
        patterns=(
            Pattern(
                needs=(
                    Fits(("cp",)),
                    HasEvent(f"{DDP_FORWARD}*"),
                    HasCalls(GRADIENT_SUMS, (BACKWARD,)),
                ),
                absent=(OnAnyGroup(Fits(_DATA_STRATEGIES)),),
            ),
        ),
    ),
    # ZeRO-2 reduce-scatters gradients during the backward or after each microbatch; ZeRO-1 reduces
    # them once. With one microbatch, reduced after the backward, both have the same traffic.
    Signature(
        name="zero-1",
        axis=name_data_axis,
        unless=("fsdp", "hsdp"),
        patterns=(
            # Megatron-LM's distributed optimizer may gather the weights in the next forward.
            Pattern(needs=(SHARDED, is_megatron), absent=(BY_FSDP,)),
            Pattern(needs=(OWNED, AnyOf((is_megatron, ZERO_OPTIMIZER)))),
            Pattern(
                needs=(OWNED,),
                absent=(_SCATTERED_EARLY, has_several_backwards),
                detail="or zero-2: with one microbatch they send the same",
            ),
            Pattern(needs=(OWNED,), absent=(_SCATTERED_EARLY, sums_after_each_backward)),
        ),
    ),
    Signature(
        name="zero-2",
        axis=name_data_axis,
        unless=("zero-1", "fsdp", "hsdp"),
        patterns=(
            Pattern(needs=(SHARDED,), detail=_KEPT),
            Pattern(
                needs=(OWNED, _SCATTERED_EARLY),
                detail="gradients scattered during the backward",
            ),
            Pattern(needs=(OWNED,)),
        ),
    ),
    Signature(
        name="fsdp",
        axis=name_data_axis,
        unless=("hsdp",),
        patterns=(
            Pattern(needs=(SHARDED, GATHERED_AGAIN)),
            # DeepSpeed's ZeRO-3 keeps weights that are needed again soon, and small ones on all
            # ranks.
            Pattern(needs=(SHARDED, DEEPSPEED_ZERO_3), detail=_KEPT),
            Pattern(needs=(OWNED, DEEPSPEED_ZERO_3), detail="weights too small to shard"),
        ),
        device_patterns=(Pattern(needs=(GATHERED_TWICE,)),),
    ),
    Signature(
        name="hsdp",
        axis=name_data_axis,
        patterns=(Pattern(needs=(SHARDED,), detail=describe_replicas),),
        device_patterns=(Pattern(needs=(GATHERED_TWICE,), detail=describe_summing_replicas),),
    ),
    # Activations are reduced, or gathered and scattered along the sequence (sp).
    Signature(
        name="tp",
        axis="tp",
        patterns=(Pattern(needs=(IsAlong(("tp",)), HasCalls(ACTIVATION_SUMS, (FORWARD,)))),),
        device_patterns=(
            Pattern(needs=(IsAlong(("tp",)), HasCalls(SUM))),
            Pattern(needs=(IsAlong(("tp",)), HasCalls(GATHER), HasCalls(SCATTER))),
        ),
    ),
    Signature(
        name="sp",
        axis="tp",
        patterns=(
            Pattern(
                needs=(
                    IsAlong(("tp",)),
                    HasCalls(GATHER, (FORWARD,)),
                    HasCalls(SCATTER, (FORWARD,)),
                )
            ),
        ),
        device_patterns=(
            Pattern(needs=(IsAlong(("tp",)), HasCalls(GATHER), HasCalls(SCATTER))),
        ),
    ),
    # A parallel vocabulary reduces between the look-up and the first layer.
    Signature(
        name="vocabulary",
        axis="tp",
        patterns=(Pattern(needs=(Fits(("tp",)), HasOrder("EX", ACTIVATION_SUMS))),),
    ),
    # A parallel loss reduces two or more times between the last GEMM and the backward: maximum,
    # sum, and target logit.
    Signature(
        name="loss",
        axis="tp",
        patterns=(
            Pattern(
                needs=(
                    Fits(("tp",)),
                    HasOrder(r"(?<!X)XX+\|", SUM, with_scalars=True, with_repeats=True),
                )
            ),
        ),
    ),
    Signature(
        name="cp",
        axis="cp",
        patterns=(
            # A ring computes attention before or after each hop.
            Pattern(
                needs=(
                    _SAME_SAMPLE,
                    HasOrder(r"(?<=A)X|X(?=A)", MESSAGES, _MIN_CALL_SHARE, by_fsdp=False),
                ),
                detail="ring",
            ),
            Pattern(
                needs=(
                    _SAME_SAMPLE,
                    _HEADS_EXCHANGED,
                    HasOrder(r"AXA|\A(?!.*AX).*XA", EXCHANGE, by_fsdp=False),
                ),
                detail="ring",
            ),
            # Ulysses exchanges heads before attention and sequences after it.
            Pattern(
                needs=(_SAME_SAMPLE, _HEADS_EXCHANGED, HasOrder("XAX", EXCHANGE, by_fsdp=False)),
                detail="ulysses",
            ),
            # Keys and values are gathered after their projections.
            Pattern(
                needs=(
                    _SAME_SAMPLE,
                    HasCalls((*GATHER, *ACTIVATION_SUMS), (BACKWARD,), by_fsdp=False),
                    HasOrder(r"X(?=A)", GATHER, _MIN_CALL_SHARE, by_fsdp=False),
                ),
                absent=(_HEADS_EXCHANGED,),
                detail="all-gather",
            ),
        ),
        device_patterns=(
            Pattern(needs=(IsAlong(("cp",)), HasCalls(MESSAGES)), detail="ring"),
            Pattern(needs=(IsAlong(("cp",)), HasCalls(EXCHANGE)), detail="ulysses"),
            Pattern(needs=(IsAlong(("cp",)), HasCalls(GATHER)), detail="all-gather"),
        ),
    ),
    Signature(
        name="ep",
        axis="ep",
        unless=("cp",),
        patterns=(
            Pattern(needs=(EXCHANGED_TOKENS,), detail=name_group_library),
            Pattern(needs=(IsAlong((UNKNOWN_AXIS,)), HasOrder(_ROUTED, EXCHANGE))),
        ),
        device_patterns=(Pattern(needs=(EXCHANGED_TOKENS,), detail=name_group_library),),
    ),
    # Kernels that do nothing but move tokens to experts and back, on a group that is not recorded.
    Signature(
        name="ep",
        axis="ep",
        of="rank",
        patterns=(Pattern(detail=name_expert_protocol),),
        device_patterns=(Pattern(detail=name_expert_protocol),),
    ),
    Signature(
        name="pp",
        axis="pp",
        of="pipeline",
        patterns=(Pattern(needs=(_can_be_pipeline,), detail=_name_schedule),),
        device_patterns=(Pattern(needs=(_can_be_pipeline,), detail=_name_schedule),),
    ),
    Signature(
        name="gradient accumulation",
        of="rank",
        patterns=(Pattern(detail=describe_accumulation),),
    ),
    Signature(name="recompute", of="rank", patterns=(Pattern(detail=describe_recomputation),)),
    # Activations are copied out in the forward and back in the backward.
    Signature(
        name="offload",
        of="rank",
        patterns=(
            Pattern(
                needs=(HasCopies("DtoH", (FORWARD,)), HasCopies("HtoD", (BACKWARD,))),
                detail="activations",
            ),
        ),
    ),
    # Gradients are copied out in the backward for weights that return in the forward.
    Signature(
        name="offload",
        of="rank",
        patterns=(
            Pattern(
                needs=(
                    HasCopies("DtoH", LATE),
                    HasCopies("HtoD", (FORWARD, AFTER)),
                    updates_on_host,
                ),
                detail="optimizer",
            ),
        ),
    ),
    Signature(
        name="autocast",
        of="rank",
        patterns=(Pattern(needs=(casts_inputs, HasEvent("ToCopyBackward0"))),),
    ),
    Signature(name="fp8", of="rank", patterns=(Pattern(needs=(HasEvent("aten::_scaled_mm"),)),)),
    Signature(
        name="mixed precision", of="rank", patterns=(Pattern(detail=describe_precisions),)
    ),
    # Gradients are divided by the loss scale and checked for infinity, as in GradScaler.
    Signature(
        name="loss scaling",
        of="rank",
        patterns=(
            Pattern(
                needs=(
                    HasEvent("aten::_amp_foreach_non_finite_check_and_unscale_*", on_host=True),
                    HasEvent("aten::_amp_update_scale_*", on_host=True),
                )
            ),
        ),
    ),
)  # fmt: skip
"""The strategies in the order in which they are shown; names that predicted messages also have are
spelled like those. The order does not decide which of two strategies fits: unless and absent do."""
