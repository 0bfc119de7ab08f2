"""What is said of those who hold a job up: one sentence a cause."""

from __future__ import annotations

from collections.abc import Sequence

from stepsplit.analyzer.hang.collectives import named
from stepsplit.analyzer.hang.hang import Mismatch, Stuck, StuckGroup
from stepsplit.analyzer.hang.scene import Scene

NOTHING_STUCK = "nothing is stuck: every call in the dumps has completed"
_MOST_NAMED, _MOST_TOLD = 8, 3


def whole(messages: Sequence[str]) -> tuple[str, ...]:
    """The sentences of the first culprits, and how many more there are."""
    more = len(messages) - _MOST_TOLD
    told = (f"and {more} more such",) if more > 0 else ()
    return (*messages[:_MOST_TOLD], *told) or (NOTHING_STUCK,)


def hold(ranks: tuple[int, ...], held: tuple[int, ...], scene: Scene) -> str:
    """Who holds whom up."""
    others = {one.rank for one in scene.ranks} - set(ranks)
    whom = "everybody" if others <= set(held) else f"{len(held)} of {len(others)} other ranks"
    if not held:
        return f"{_named(ranks)} {_verb(ranks, 'hangs', 'hang')}"
    return f"{_named(ranks)} {_verb(ranks, 'holds', 'hold')} {whom} up"


def not_called(ranks: tuple[int, ...], call: Stuck) -> str:
    """They have not come to a call."""
    return f"{_verb(ranks, 'it has', 'they have')} not called {_call(call)}"


def unfinished(ranks: tuple[int, ...], call: Stuck, scene: Scene) -> str:
    """They have not come to a call, for they stand in an older one."""
    stands = f"{_verb(ranks, 'does', 'do')} not finish {_open_call(ranks, scene)}"
    return f"{not_called(ranks, call)}, and {stands}"


def no_dump(ranks: tuple[int, ...], call: Stuck) -> str:
    """Only they can be missing."""
    left = f"{_verb(ranks, 'it', 'they')} left none, and all others have called {_call(call)}"
    return f", as far as dumps tell: {left}"


def mismatch(found: Mismatch) -> str:
    """On what members disagree."""
    sides = "; ".join(f"{side.value} on {_named(side.ranks)}" for side in found.sides)
    return f"call {found.seq} of {found.group.in_words} differs in {found.what}: {sides}"


def deadlock(ranks: tuple[int, ...], calls: Sequence[Stuck]) -> str:
    """They wait for each other in different calls."""
    waits = [
        f"{_named(call.waiting)} in {_call(call)} for {_named(call.waits_for)}"
        for call in calls
        if call.missing
    ]
    return f"{_named(ranks)} wait for each other: {'; '.join(waits[:_MOST_TOLD])}"


def not_ending(ranks: tuple[int, ...], call: Stuck) -> str:
    """They are all there, and it does not end."""
    there = f"all members have called {_call(call)} and none has completed it"
    return f"{there}: look at the devices and the network of {_named(ranks)}"


def alone(ranks: tuple[int, ...], scene: Scene) -> str:
    """They do not finish what nobody else is missing from."""
    verb = _verb(ranks, "does", "do")
    return f"{_named(ranks)} {verb} not finish {_open_call(ranks, scene)}: nobody is missing"


def _call(call: Stuck) -> str:
    return _in_words(call.op, call.seq, call.group)


def _in_words(op: str, seq: int, group: StuckGroup) -> str:
    return f"{op} {seq} of {group.in_words}"


def _named(ranks: Sequence[int]) -> str:
    """Such as "rank 3", "ranks 3 and 7", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 9 more"."""
    names = [str(rank) for rank in ranks[:_MOST_NAMED]]
    if len(ranks) == 1:
        return f"rank {names[0]}"
    more = len(ranks) - len(names)
    last = f"{more} more" if more else names.pop()
    return f"ranks {', '.join(names)} and {last}"


def _verb(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


def _open_call(ranks: tuple[int, ...], scene: Scene) -> str:
    """The oldest call in which all of them stand, alone where there is one; else the first's."""
    shared = [call for call in scene.stuck if set(ranks) <= set(call.waiting)]
    if shared:
        call = min(shared, key=lambda one: (bool(one.waits_for), int(one.called_unix_ns)))
        return _call(call) + (
            ", which its other members have completed" if call.completed else ""
        )  # fmt: skip
    first = scene.oldest_open(ranks[0])
    assert first is not None, "an unfinished rank has an open call"
    return _in_words(first.op, first.seq, named(first.group))
