"""Signatures of mesh axes: what the calls on groups without a known name look like along each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from stepsplit.analyzer.trace import OP_CODE

Counts = npt.NDArray[np.float64]


class AxisSignature(Struct, frozen=True):
    """What the calls of the groups along one axis look like: an entry of a table.

    is_marked: whether ranges around the calls show the axis. They decide before any pattern, in the
    order of the table. Patterns go by the number, the order and the bytes of the calls; no two
    entries have patterns that fit the same calls.
    """

    axis: str
    patterns: tuple[UsagePattern, ...]
    is_marked: UsageCondition | None = None


class UsagePattern(Struct, frozen=True):
    """Conditions on the usage of a group: all of needs hold, and none of absent."""

    needs: tuple[UsageCondition, ...]
    absent: tuple[UsageCondition, ...]

    def __call__(self, usage: Usage) -> bool:
        return all(need(usage) for need in self.needs) and not any(
            one(usage) for one in self.absent
        )


class Usage(Struct, frozen=True):
    """Mean calls per step and rank, shape (ops,), before the first backward of a step and after it.

    early_bytes: bytes of the early calls. hooked: reductions in a hook of autograd, which are of
    gradients. sizes: number of distinct all_to_all sizes on the group. sharded: FSDP issued the
    group's gathers. experts: a library of expert parallelism issued
    all_to_alls. activations: layers of tensor parallelism reduce on the group. replicated:
    DistributedDataParallel can reduce its gradients on no other group. late_share: fraction of the
    all_reduced bytes that are reduced outside of the backward, in sizes that no forward reduces.
    exchanges: whether there are all_to_alls, in whatever part of a step. gathers_attend,
    exchanges_attend: fraction of the all_gathers, of the all_to_alls, next to attention; None if
    there are none, or if the kernels or ops do not show where attention is. grouped: fraction of
    the all_to_alls next to the grouped products of experts.
    """

    early: Counts
    late: Counts
    early_bytes: Counts
    hooked: Counts
    sizes: int = 0
    sharded: bool = False
    activations: bool = False
    experts: bool = False
    replicated: bool = False
    late_share: float = 0.0
    exchanges: bool = False
    gathers_attend: float | None = None
    exchanges_attend: float | None = None
    grouped: float = 0.0

    def infer_axis(self) -> str | None:
        """The axis of a group with this usage; None if several axes are possible."""
        fitting = (one.axis for one in AXIS_SIGNATURES if any(fit(self) for fit in one.patterns))
        return self.find_marked_axis() or next(fitting, None)

    def find_marked_axis(self) -> str | None:
        """The axis that the ranges around the calls show; None without such ranges."""
        marked = (one.axis for one in AXIS_SIGNATURES if one.is_marked and one.is_marked(self))
        return next(marked, None)

    @property
    def sums_gradients(self) -> bool:
        """Whether tensors are reduced after the start of the first backward."""
        return bool(self.late[[_SUM, _SCATTER]].any())


UsageCondition: TypeAlias = Callable[[Usage], bool]
"""A condition on the usage of a group."""


# Conditions on the calls.

MIN_REPEATS = 4
"""Minimum all_reduces before the first backward of a step: two per layer for two layers. At 8 a
model of two layers has no tp axis; test_layout.py passes at 2 too."""

_ODD_SHARE = 0.5
"""Calls that move less than this fraction of the bytes do not decide what a group is for.
test_layout.py passes at 0.25 too; at 1 no loop would average gradients."""

_MOST = 0.5
"""More than this fraction of the calls of a group are next to attention: keys and values once a
pass, heads on both sides of it. Gathers of weights come before the products of a layer."""

_GATHER, _SUM, _SCATTER = (OP_CODE[op] for op in ("all_gather", "all_reduce", "reduce_scatter"))


class HasMeanCalls(Struct, frozen=True):
    """The op is called before the first backward of a step ("early") or after it ("late"), and at
    least this often per step."""

    op: str
    when: Literal["early", "late"]
    at_least: float = 0

    def __call__(self, usage: Usage) -> bool:
        count = (usage.early if self.when == "early" else usage.late)[OP_CODE[self.op]]
        return bool(count > 0 and count >= self.at_least)


def _exchanges(usage: Usage) -> bool:
    return usage.exchanges


def _varies_exchanges(usage: Usage) -> bool:
    return usage.sizes > MIN_REPEATS


def _gathers_for_attention(usage: Usage) -> bool:
    return (usage.gathers_attend or 0) > _MOST


def _exchanges_for_attention(usage: Usage) -> bool:
    return (usage.exchanges_attend or 0) > _MOST


def _exchanges_for_experts(usage: Usage) -> bool:
    """Whether exchanges are next to grouped products, or never next to the attention that runs."""
    return usage.grouped > _ODD_SHARE / 2 or usage.exchanges_attend == 0


def _sums_in_both_passes(usage: Usage) -> bool:
    return bool(min(usage.early[_SUM], usage.late[_SUM]) >= MIN_REPEATS)


def _sums_early(usage: Usage) -> bool:
    """Whether the all_reduces before the backward may be of activations.

    They are not if gradients are scattered in hooks, or if they are small against the weights
    that are gathered.
    """
    small = usage.early_bytes[_SUM] < _ODD_SHARE * usage.early_bytes[_GATHER]
    return bool(usage.early[_SUM] and not usage.hooked[_SCATTER] and not small)


def _averages_outside(usage: Usage) -> bool:
    """Whether a loop averages gradients after the backward."""
    return usage.late_share > _ODD_SHARE and not usage.early[[_GATHER, _SCATTER]].any()


def _sums_or_updates_late(usage: Usage) -> bool:
    """Whether gradients are reduced, or scattered to the owners of weights that then return."""
    return bool(usage.late[_SUM] or (usage.late[_GATHER] and usage.late[_SCATTER]))


# The table.

_EARLY_GATHER, _LATE_GATHER = (HasMeanCalls("all_gather", when) for when in ("early", "late"))

_EARLY_SCATTER, _LATE_SCATTER = (HasMeanCalls("reduce_scatter", when) for when in ("early", "late"))

AXIS_SIGNATURES = (
    AxisSignature(
        "dp_shard",
        is_marked=lambda usage: usage.sharded,
        patterns=(
            # Weights are gathered in both passes and reduce-scattered only in the backward.
            UsagePattern(
                needs=(_EARLY_GATHER, _LATE_GATHER, _LATE_SCATTER),
                absent=(
                    _exchanges, _EARLY_SCATTER, _sums_early, _sums_in_both_passes,
                    _gathers_for_attention,
                ),
            ),
        ),
    ),
    # Keys and values are gathered before attention, or heads exchanged around it.
    AxisSignature(
        "cp",
        patterns=(
            UsagePattern(needs=(_gathers_for_attention,), absent=(_exchanges,)),
            UsagePattern(needs=(_exchanges_for_attention,), absent=(_varies_exchanges,)),
        ),
    ),
    AxisSignature(
        "tp",
        is_marked=lambda usage: usage.activations,
        patterns=(
            # Layers reduce, or gather and scatter, activations in both passes.
            UsagePattern(
                needs=(_sums_in_both_passes,), absent=(_exchanges, _averages_outside)
            ),
            UsagePattern(
                needs=(
                    HasMeanCalls("all_gather", "early", MIN_REPEATS),
                    HasMeanCalls("reduce_scatter", "early", MIN_REPEATS),
                    HasMeanCalls("reduce_scatter", "late", MIN_REPEATS),
                ),
                absent=(_exchanges, _gathers_for_attention),
            ),
        ),
    ),
    # Replicated weights have no collective before the backward, or small ones.
    AxisSignature(
        "dp_replicate",
        is_marked=lambda usage: usage.replicated or bool(usage.hooked[_SUM]),
        patterns=(
            UsagePattern(needs=(_averages_outside,), absent=(_exchanges,)),
            UsagePattern(
                needs=(_sums_or_updates_late,),
                absent=(
                    _exchanges, _EARLY_GATHER, _EARLY_SCATTER, _sums_early, _sums_in_both_passes,
                    _gathers_for_attention,
                ),
            ),
        ),
    ),
    # Expert all_to_alls vary in size, all_to_alls of attention heads do not.
    AxisSignature(
        "ep",
        is_marked=lambda usage: usage.experts,
        patterns=(
            UsagePattern(needs=(_exchanges, _varies_exchanges), absent=()),
            UsagePattern(
                needs=(_exchanges, _exchanges_for_experts),
                absent=(_varies_exchanges, _exchanges_for_attention),
            ),
        ),
    ),
)  # fmt: skip
