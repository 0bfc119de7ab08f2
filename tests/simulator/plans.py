"""What each rank of a pipeline computes, sends and receives, in order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from simulator.playing import Durations, starts
from simulator.schedules import Action, Order, actions


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How a job is cut into stages; boxes: each action is annotated as torch's schedules do."""

    schedule: str
    microbatches: int
    chunks: int = 1
    boxes: bool = True


@dataclass(frozen=True, slots=True)
class Hand:
    """One end of the message that carries what an action yields to the neighboring stage."""

    op: str
    peer: int
    action: Action


@dataclass(frozen=True, slots=True)
class Exchange:
    """A batch of messages of one rank; blocking: computing waits for its sends as well."""

    hands: tuple[Hand, ...]
    blocking: bool


Plan = tuple[Action | Exchange, ...]


def plans_of(how: Pipeline, stages: int) -> tuple[Plan, ...]:
    """The plan of each rank of a pipeline; Megatron's own for 1f1b."""
    if how.schedule == "1f1b":
        return tuple(_megatron(rank, stages, how.microbatches) for rank in range(stages))
    return _in_order(actions(how.schedule, stages, how.microbatches, how.chunks))


def _megatron(rank: int, stages: int, microbatches: int) -> Plan:
    """1F1B as Megatron does it: in the steady state what goes to a neighbor and what comes from it
    are one batch, and computing waits for both."""
    warm = min(stages - rank - 1, microbatches)

    def forward(op: str, microbatch: int) -> Hand | None:
        peer = rank + (1 if op == "send" else -1)
        sender = min(rank, peer)
        known = 0 <= peer < stages and microbatch < microbatches
        return Hand(op, peer, Action("F", sender, microbatch)) if known else None

    def backward(op: str, microbatch: int) -> Hand | None:
        peer = rank + (-1 if op == "send" else 1)
        known = 0 <= peer < stages
        return Hand(op, peer, Action("B", max(rank, peer), microbatch)) if known else None

    plan: list[Action | Exchange | None] = []
    for mb in range(warm):
        plan += [_batch(forward("recv", mb)), Action("F", rank, mb), _batch(forward("send", mb))]
    plan.append(_batch(forward("recv", warm)))
    for mb in range(warm, microbatches):
        back = mb - warm
        plan += [Action("F", rank, mb), _batch(forward("send", mb), backward("recv", back))]
        plan += [Action("B", rank, back), _batch(backward("send", back), forward("recv", mb + 1))]
    for mb in range(microbatches - warm, microbatches):
        plan += [_batch(backward("recv", mb)), Action("B", rank, mb), _batch(backward("send", mb))]
    return tuple(item for item in plan if item is not None)


def _batch(*hands: Hand | None) -> Exchange | None:
    known = tuple(hand for hand in hands if hand is not None)
    return Exchange(known, blocking=True) if known else None


def _in_order(orders: Sequence[Order]) -> tuple[Plan, ...]:
    """Single messages, each queued where the schedule's grid with equal stages has it: every rank
    sees its messages in the order of one common clock, so that no two wait for each other."""
    durations = Durations(backward=2)
    begun = starts(orders, durations)
    home = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    entries: list[list[tuple[int, int, int, Action | Exchange]]] = [
        [(begun[action], 1, 0, action) for action in order] for order in orders
    ]
    hands = sorted((begun[a] + durations.of(a), a) for a in begun if _consumer(a, begun))
    for nth, (at, action) in enumerate(hands):
        consumer = _consumer(action, begun)
        assert consumer is not None
        here, there = home[action.stage], home[consumer.stage]
        if here != there:
            entries[here].append((at, 0, nth, _single("send", there, action)))
            entries[there].append((at, 0, nth, _single("recv", here, action)))
    return tuple(tuple(item for *_, item in sorted(e, key=lambda x: x[:3])) for e in entries)


def _single(op: str, peer: int, action: Action) -> Exchange:
    return Exchange((Hand(op, peer, action),), blocking=False)


def _consumer(action: Action, known: Collection[Action]) -> Action | None:
    """The action of the neighboring stage that needs what this one yields."""
    toward = {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
    kinds = "F" if action.kind == "F" else "BI"
    there = (Action(kind, action.stage + toward, action.microbatch) for kind in kinds)
    return next((other for other in there if toward and other in known), None)
