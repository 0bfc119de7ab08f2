"""How ranks share one model's layers and sequences: tp, sp, cp, ep."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepsplit.analyzer.split.strategy.passes import BACKWARD, FORWARD
from stepsplit.analyzer.split.strategy.seen import Seen, once_each
from stepsplit.analyzer.split.strategy.strategy import Strategy
from stepsplit.analyzer.trace import OP_CODE, Group

_LOSS = re.compile(r"XX+\|")
_LOOK_UP = re.compile(r"EX")
_MOST = 0.5
"""What is told of most of the calls is told of the group."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a group does in the forwards of a rank."""

    group: Group
    strategies: tuple[Strategy, ...]


def model_strategies(seen: Seen) -> list[Taken]:
    """The strategies of the groups that work on one sample together."""
    found = [Taken(group, tuple(_of_group(seen, group))) for group in seen.groups()]
    return [taken for taken in found if taken.strategies]


def _of_group(seen: Seen, group: Group) -> list[Strategy]:
    axes, size = seen.layout.axes_of(group), len(group.ranks)
    if axes == {"tp"}:
        return _tensor(seen, group)
    if not axes <= {"cp", "ep", "dp_replicate", "dp_shard"}:
        return []
    if "ep" not in axes and (kind := _context_kind(seen, group)) is not None:
        return [Strategy("cp", "cp", size, kind)]
    routes = axes == {"ep"} or (not axes and _routes_tokens(seen, group))
    exchanges = (seen.on(group) & seen.of("all_to_all") & seen.is_tensor).any()
    return [Strategy("ep", "ep", size)] if routes and exchanges else []


def _tensor(seen: Seen, group: Group) -> list[Strategy]:
    """Activations are summed (tp), or gathered and scattered along the sequence (sp as well).

    A vocabulary in parts is summed between the look-up and the first layer, and for the loss twice
    or more between the last product and the backward: its maximum, its sum, the target's logit.
    """
    mask, size = seen.on(group), len(group.ranks)
    forward = seen.counts(mask & seen.is_tensor)[FORWARD]
    sums, scatters, gathers = (
        bool(forward[OP_CODE[op]]) for op in ("all_reduce", "reduce_scatter", "all_gather")
    )
    if not (sums or scatters):
        return []
    found = [Strategy("tp", "tp", size)]
    if scatters and gathers:
        found.append(Strategy("sp", "tp", size))
    looked_up = seen.story(mask & seen.is_tensor & seen.of("all_reduce", "reduce_scatter"))
    if _LOOK_UP.search(looked_up):
        found.append(Strategy("vocabulary", "tp", size))
    if _LOSS.search(seen.story(mask & seen.of("all_reduce"))):
        found.append(Strategy("loss", "tp", size))
    return found


def _context_kind(seen: Seen, group: Group) -> str | None:
    """ring, all-gather or ulysses, by what the calls are beside attention; None for neither.

    A ring attends before or after each hop. Ulysses spreads heads before attention and sequences
    after it. Keys and values are gathered after the products that make them.
    """
    mask = seen.on(group) & ~seen.shards & seen.is_tensor
    hops = once_each(seen.story(mask & seen.of("send", "recv", "send_recv")))
    if _share(r"(?<=A)X|X(?=A)", hops) > _MOST:
        return "ring"
    swaps = once_each(seen.story(mask & seen.of("all_to_all")))
    if "X" in swaps and not _routed(swaps):
        return _kind_of_swaps(swaps)
    gathers = once_each(seen.story(mask & seen.of("all_gather")))
    late = seen.counts(mask)[BACKWARD]
    back = any(late[OP_CODE[op]] for op in ("reduce_scatter", "all_gather", "all_reduce"))
    return "all-gather" if back and _share(r"X(?=A)", gathers) > _MOST else None


def _kind_of_swaps(story: str) -> str | None:
    if "AXA" in story or ("XA" in story and "AX" not in story):
        return "ring"
    return "ulysses" if "XAX" in story else None


def _routes_tokens(seen: Seen, group: Group) -> bool:
    """Whether all_to_alls go around products that a choice of experts comes before."""
    mask = seen.on(group) & seen.is_tensor & seen.of("all_to_all")
    return _routed(once_each(seen.story(mask)))


def _routed(story: str) -> bool:
    return re.search(r"K[^|LX]*X[^X|]*L[^X|]*X", story) is not None


def _share(pattern: str, story: str) -> float:
    """Of the runs of calls in the story, how many the pattern finds."""
    return len(re.findall(pattern, story)) / max(1, story.count("X"))
