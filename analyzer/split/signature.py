"""Signatures: what the calls of a strategy look like, and the matcher that finds them on a rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
from msgspec import Struct, field

from stepsplit.analyzer.split.call_purposes import find_spans
from stepsplit.analyzer.split.strategy import Strategy
from stepsplit.analyzer.split.strategy_evidence import CALL, RankEvidence, collapse_repeats
from stepsplit.analyzer.trace import OP_CODE, Bool, Category, Group, Int64


class Signature(Struct, frozen=True, kw_only=True):
    """What the calls of one strategy look like: an entry of a table.

    name is printed, with the axis: a fixed one, one by the calls, or None for a strategy that
    shares no work among ranks. The strategy is found if one of the patterns fits; the first that
    does gives the detail. patterns are for recordings whose host ops show forwards and backwards,
    device_patterns for those where only the axis of a group and its calls are known. of: what is
    compared with them: the calls on each group of a rank, all calls of a rank, or each pipeline.
    unless: strategies that explain the same calls; if one of them fits, this one does not.
    """

    name: str
    patterns: tuple[Pattern, ...]
    device_patterns: tuple[Pattern, ...] = ()
    axis: str | Callable[[CallSet], str] | None = None
    of: Literal["group", "rank", "pipeline"] = "group"
    unless: tuple[str, ...] = ()


class Pattern(Struct, frozen=True):
    """Conditions on calls: all of needs hold, and none of absent.

    detail is printed after the name of the strategy. If it is a function of the calls, the pattern
    only fits if it does not return None.
    """

    needs: tuple[Condition, ...] = ()
    absent: tuple[Condition, ...] = ()
    detail: str | Callable[[CallSet], str | None] = ""

    def __call__(self, calls: CallSet) -> bool:
        return all(map(calls.satisfies, self.needs)) and not any(map(calls.satisfies, self.absent))


def match_signatures(
    evidence: RankEvidence,
    signatures: Sequence[Signature],
    schedule: str | None = None,
    *,
    has_messages: bool = False,
) -> list[Strategy]:
    """The strategies of a rank whose signatures fit, in the order of the signatures.

    Args:
        evidence: What the rank recorded.
        signatures: The strategies to look for.
        schedule: The pipeline schedule of the run, None if unknown.
        has_messages: Whether any rank of the run sent or received messages.
    """
    rank = RankMatcher(evidence, signatures, schedule, has_messages)
    return [
        strategy
        for signature in signatures
        for calls in rank.list_sets(signature)
        if (strategy := rank.match(signature, calls)) is not None
    ]


class RankMatcher(Struct, dict=True):
    """Compares signatures with the calls of one rank."""

    evidence: RankEvidence
    signatures: Sequence[Signature]
    schedule: str | None
    has_messages: bool
    _known: dict[tuple[Signature, CallSet], Strategy | None] = field(default_factory=dict)

    @cached_property
    def all_calls(self) -> CallSet:
        return CallSet(self, None, np.arange(len(self.evidence.row)))

    @cached_property
    def groups(self) -> list[CallSet]:
        """The calls on each group of more than one rank."""
        return [
            CallSet(self, group, np.flatnonzero(self.evidence.is_on(group)))
            for group in self.evidence.list_groups()
        ]

    @cached_property
    def pipelines(self) -> list[CallSet]:
        """A set for each pipeline of a different length, without calls."""
        lines = {len(line): line for line in self.evidence.layout.pipelines}
        return [CallSet(self, Group("", line, ""), np.arange(0)) for line in lines.values()]

    def list_sets(self, signature: Signature) -> list[CallSet]:
        """What the signature is compared with."""
        if signature.of == "rank":
            return [self.all_calls]
        return self.groups if signature.of == "group" else self.pipelines

    def match(self, signature: Signature, calls: CallSet) -> Strategy | None:
        """The strategy if the signature fits these calls, else None."""
        if (signature, calls) not in self._known:
            self._known[signature, calls] = self._compare(signature, calls)
        return self._known[signature, calls]

    def fits(self, name: str, calls: CallSet) -> bool:
        """Whether the first signature of this name fits these calls."""
        first = next(one for one in self.signatures if one.name == name)
        return self.match(first, calls) is not None

    def _compare(self, signature: Signature, calls: CallSet) -> Strategy | None:
        has_passes = len(self.evidence.passes) > 0
        for pattern in signature.patterns if has_passes else signature.device_patterns:
            if not calls.satisfies(pattern):
                continue
            detail = pattern.detail if isinstance(pattern.detail, str) else pattern.detail(calls)
            if detail is None:
                continue
            if any(self.fits(other, calls) for other in signature.unless):
                return None
            axis = signature.axis(calls) if callable(signature.axis) else signature.axis
            return Strategy(signature.name, axis, len(calls.ranks) or None, detail)
        return None


class CallSet(Struct, frozen=True, eq=False, dict=True):
    """The calls of a rank on one group, or all its calls if group is None.

    rows are those of the rank's evidence. All columns are of shape (rows,).
    """

    rank: RankMatcher
    group: Group | None
    rows: Int64
    _known: dict[Condition, bool] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the group; () for all calls of a rank."""
        return self.group.ranks if self.group is not None else ()

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes of the group; empty if unknown."""
        layout = self.rank.evidence.layout
        return layout.find_axes(self.group) if self.group is not None else frozenset()

    def satisfies(self, condition: Condition) -> bool:
        """Whether the condition holds for these calls; it is evaluated once."""
        if condition not in self._known:
            self._known[condition] = condition(self)
        return self._known[condition]

    def select(
        self,
        ops: Sequence[str],
        parts: Sequence[int] = (),
        *,
        by_fsdp: bool | None = None,
        with_scalars: bool = False,
    ) -> Bool:
        """Which calls have one of these ops and are issued in one of these parts of a step.

        Args:
            ops: Names of ops.
            parts: FORWARD, BACKWARD or AFTER; all calls if empty, also those of unknown part.
            by_fsdp: True for those that FSDP issued, False for the others, None for both.
            with_scalars: Whether losses, norms and flags count too, not only tensors.
        """
        chosen = np.isin(self._op, [OP_CODE[op] for op in ops])
        if parts:
            chosen &= np.isin(self.rank.evidence.part[self.rows], parts)
        if by_fsdp is not None:
            chosen &= self.rank.evidence.shards[self.rows] == by_fsdp
        return chosen if with_scalars else chosen & self._is_tensor

    def sum_bytes(self, ops: Sequence[str], parts: Sequence[int]) -> int:
        """The bytes of the tensors of these calls."""
        size = self.rank.evidence.message_bytes[self.rows[self.select(ops, parts)]]
        return int(np.maximum(size, 0).sum())

    @cached_property
    def _op(self) -> Int64:
        return self.rank.evidence.op[self.rows]

    @cached_property
    def _is_tensor(self) -> Bool:
        return self.rank.evidence.is_tensor[self.rows]


Condition: TypeAlias = Callable[[CallSet], bool]
"""A condition on calls: a function of them, or one of the types below, which are functions too."""


# What calls there are, and how many.


class HasCalls(Struct, frozen=True):
    """Tensors are moved by one of these ops, in one of these parts of a step.

    Without parts any call counts, also one of unknown part. by_fsdp: True counts only calls that
    FSDP issued, False only others.
    """

    ops: tuple[str, ...]
    parts: tuple[int, ...] = ()
    by_fsdp: bool | None = None

    def __call__(self, calls: CallSet) -> bool:
        return bool(calls.select(self.ops, self.parts, by_fsdp=self.by_fsdp).any())


class HasCallRatio(Struct, frozen=True):
    """There are at least this many calls of some ops for each call of others, over all steps."""

    ops: tuple[str, ...]
    ratio: float
    other_ops: tuple[str, ...]

    def __call__(self, calls: CallSet) -> bool:
        count, others = calls.select(self.ops).sum(), calls.select(self.other_ops).sum()
        return bool(count >= self.ratio * others)


class HasByteRatio(Struct, frozen=True):
    """Some calls move at least this many bytes for each byte of others."""

    ops: tuple[str, ...]
    parts: tuple[int, ...]
    ratio: float
    other_ops: tuple[str, ...]
    other_parts: tuple[int, ...]

    def __call__(self, calls: CallSet) -> bool:
        others = calls.sum_bytes(self.other_ops, self.other_parts)
        return calls.sum_bytes(self.ops, self.parts) >= self.ratio * others


# In which order, and on which group.


class HasOrder(Struct, frozen=True):
    """A regular expression fits the forwards of all steps, as a string.

    In it X is a call of these ops, L a matrix product, A attention, E an embedding look-up, K an
    expert selection and | the start of a backward (RankEvidence.build_sequence). min_share: it
    fits more than this fraction of the calls; None if once is enough. Repeated letters count as
    one, unless with_repeats.
    """

    pattern: str
    ops: tuple[str, ...]
    min_share: float | None = None
    by_fsdp: bool | None = None
    with_scalars: bool = False
    with_repeats: bool = False

    def __call__(self, calls: CallSet) -> bool:
        evidence = calls.rank.evidence
        chosen = calls.select(self.ops, by_fsdp=self.by_fsdp, with_scalars=self.with_scalars)
        mask = np.zeros(len(evidence.row), dtype=np.bool_)
        mask[calls.rows[chosen]] = True
        sequence = evidence.build_sequence(mask) if chosen.any() else ""
        sequence = sequence if self.with_repeats else collapse_repeats(sequence)
        if self.min_share is None:
            return re.search(self.pattern, sequence) is not None
        fitting = len(re.findall(self.pattern, sequence))
        return fitting > self.min_share * sequence.count(CALL)


UNKNOWN_AXIS = ""


class IsAlong(Struct, frozen=True):
    """The group lies along some of these axes only; with UNKNOWN_AXIS its axes may be unknown."""

    axes: tuple[str, ...]

    def __call__(self, calls: CallSet) -> bool:
        return calls.axes <= {*self.axes} and (bool(calls.axes) or UNKNOWN_AXIS in self.axes)


# What else the rank recorded.


class HasEvent(Struct, frozen=True):
    """There is an event of this name, or with this beginning if it ends in *.

    on_host: only ops and annotations of the host count.
    """

    name: str
    on_host: bool = False

    def __call__(self, calls: CallSet) -> bool:
        events, prefix = calls.rank.evidence.trace.events, self.name.removesuffix("*")
        if self.on_host:
            return len(find_spans(events, prefix)) > 0
        if prefix == self.name:
            return self.name in events.names
        return any(name.startswith(prefix) for name in events.names)


_MIN_COPIES = 4
"""Minimum copies per step to count as tensors; a loss or a batch takes fewer. The number is not
measured: the test of offloading copies 4 tensors, so it fails at 8 and passes at 2."""


class HasCopies(Struct, frozen=True):
    """Tensors are copied "DtoH" or "HtoD" in at least one of these parts of a step."""

    way: Literal["DtoH", "HtoD"]
    parts: tuple[int, ...]

    def __call__(self, calls: CallSet) -> bool:
        evidence = calls.rank.evidence
        events = evidence.trace.events
        copies = events.name_mask(tuple(self.way in name for name in events.names))
        rows = np.flatnonzero(events.is_category(Category.MEMCPY) & copies)
        launches = events.find_launches(rows)
        when = events.start_ns[launches[launches >= 0]]
        nothing = np.zeros(len(when), dtype=np.bool_)
        part = evidence.passes.classify_part(when, evidence.steps, nothing)
        least = _MIN_COPIES * max(1, len(evidence.steps))
        return any(int((part == one).sum()) >= least for one in self.parts)


# Other conditions and other strategies.


class AnyOf(Struct, frozen=True):
    """At least one of the conditions holds."""

    conditions: tuple[Condition, ...]

    def __call__(self, calls: CallSet) -> bool:
        return any(map(calls.satisfies, self.conditions))


class OnAnyGroup(Struct, frozen=True):
    """The condition holds for the calls on a group of the rank, this one or another."""

    condition: Condition

    def __call__(self, calls: CallSet) -> bool:
        return any(group.satisfies(self.condition) for group in calls.rank.groups)


class Fits(Struct, frozen=True):
    """One of these strategies fits the calls: the first entry of its name in the table."""

    names: tuple[str, ...]

    def __call__(self, calls: CallSet) -> bool:
        return any(calls.rank.fits(name, calls) for name in self.names)
