"""When each action of a pipeline starts if nothing but its dependencies holds it up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from simulator.schedules import Action


@dataclass(frozen=True, slots=True)
class Durations:
    """How long one action of each kind takes, in any unit."""

    forward: int = 1
    backward: int = 1
    input_gradient: int = 1
    weight_gradient: int = 1

    def of(self, action: Action) -> int:
        return {
            "F": self.forward,
            "B": self.backward,
            "I": self.input_gradient,
            "W": self.weight_gradient,
        }[action.kind]


def runnable(orders: Sequence[Sequence[Action]], durations: Durations | None = None) -> int:
    """The makespan, if each rank plays its actions in order, each after those that it needs.

    Every action lasts one unit by default. Raises ValueError where an action is missing or twice,
    or where ranks would wait for each other forever.
    """
    durations = durations or Durations()
    begun = starts(orders, durations)
    return max(start + durations.of(action) for action, start in begun.items())


def starts(orders: Sequence[Sequence[Action]], durations: Durations) -> dict[Action, int]:
    """When each action starts; raises as runnable does."""
    known = {action for order in orders for action in order}
    _check_whole(orders)
    begun: dict[Action, int] = {}
    place, free = [0] * len(orders), [0] * len(orders)
    while len(begun) < len(known):
        before = len(begun)
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                action = order[place[rank]]
                needed = needs(action, known)
                if not all(other in begun for other in needed):
                    break
                ends = [begun[other] + durations.of(other) for other in needed]
                begun[action] = max([free[rank], *ends])
                free[rank] = begun[action] + durations.of(action)
                place[rank] += 1
        if len(begun) == before:
            stuck = [order[at] for order, at in zip(orders, place, strict=True) if at < len(order)]
            raise ValueError(f"ranks wait for each other: next are {stuck}")
    return begun


def needs(action: Action, known: Collection[Action]) -> list[Action]:
    """The actions that must end before this one starts, among those known."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "W":
        return [Action("I", stage, microbatch)]
    if action.kind == "F":
        candidates = [Action("F", stage - 1, microbatch)]
    else:
        candidates = [Action(kind, stage + 1, microbatch) for kind in "BI"]
        candidates.append(Action("F", stage, microbatch))
    return [other for other in candidates if other in known]


def _check_whole(orders: Sequence[Sequence[Action]]) -> None:
    """Every microbatch passes a run of stages, equally many each, forth and back once."""
    done: dict[tuple[int, int], list[str]] = {}
    for action in (action for order in orders for action in order):
        done.setdefault((action.microbatch, action.stage), []).append(action.kind)
    wrong = {at: kinds for at, kinds in done.items() if sorted(kinds) not in (["B", "F"], [*"FIW"])}
    passed = Counter(microbatch for microbatch, _ in done)
    spans = {
        mb: max(s for m, s in done if m == mb) - min(s for m, s in done if m == mb) for mb in passed
    }
    if wrong or len(set(passed.values())) > 1 or any(spans[mb] + 1 != passed[mb] for mb in passed):
        raise ValueError(f"actions are missing or done twice: {wrong or passed}")
