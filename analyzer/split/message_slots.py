"""Forwards and backwards of a pipeline stage from the order of its messages and of its launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.trace import Bool, Int64

NEXT, PREVIOUS, RECEIVE = 1, -1, 0
"""What a message of a stage is: the output of a forward to the next stage, the output of a backward
to the previous one, or a receive from either."""

Names = tuple[int, ...]


class StagePosition(Struct, frozen=True):
    """The place of a rank in its pipeline; chunks is the number of stages that each rank has."""

    at: int
    stages: int
    chunks: int = 1

    @property
    def is_first(self) -> bool:
        return self.at == 0

    @property
    def is_last(self) -> bool:
        return self.at == self.stages - 1


class LaunchedWork(Struct, frozen=True):
    """The kernels of one rank in one step, in the order in which its host launched them.

    Columns of one length. gap: the number of messages of the rank before each launch. backward:
    launched by a backward; all False if has_backwards is, where that is unknown.
    """

    name: Int64
    gap: Int64
    took_ns: Int64
    backward: Bool
    has_backwards: bool


class StagePass(Struct, frozen=True):
    """One forward, backward or weight gradient: rows [first, after) of the work."""

    phase: str
    chunk: int
    microbatch: int
    first: int
    after: int


class _Unit(Struct):
    """Consecutive launches between messages of one kind, and whether their output was sent."""

    first: int
    after: int
    backward: bool
    sent: bool = False


def order_passes(
    work: LaunchedWork, messages: Sequence[int], place: StagePosition
) -> tuple[StagePass, ...]:
    """The passes of a stage in one step; () if the order does not show each of them.

    A stage sends the output of a pass right after it, so that what it launched before a message to
    the next stage is a forward, before one to the previous stage a backward. Receives may be posted
    early. Passes without a message in between are separated by the thread that launched them, or by
    a sequence of kernels that repeats that of other passes. Weight gradients are what backwards
    launch after their output was sent.

    Args:
        work: The kernels of the step.
        messages: The kind of each message of the rank, in the order of issue.
        place: The place of the rank in its pipeline.
    """
    units = _list_units(work) if work.has_backwards else _guess_units(work, messages, place)
    _mark_sent(units, work, messages)
    forwards = list(_find_forwards(units, work, place))
    backwards, weights = _find_backwards(units, work, place)
    if not forwards or len(forwards) != len(backwards):
        return ()
    numbers = _number_passes(forwards, backwards, place)
    if numbers is None:
        return ()
    parts = [("forward", forwards, numbers[0]), ("backward", backwards, numbers[1])]
    if len(weights) == len(backwards) and place.chunks == 1:
        parts.append(("weight", weights, numbers[1]))
    return tuple(
        StagePass(phase, chunk, microbatch, unit.first, unit.after)
        for phase, units_of_phase, order in parts
        for unit, (chunk, microbatch) in zip(units_of_phase, order, strict=True)
    )


def _list_units(work: LaunchedWork) -> list[_Unit]:
    """The launches between two messages, split where a backward begins or ends."""
    label = 2 * work.gap + work.backward
    edges = np.flatnonzero(np.diff(label, prepend=-1, append=-1))
    return [
        _Unit(first, after, bool(work.backward[first]))
        for first, after in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]


_FORWARD_SHARE = 1 / 3
"""Share of a forward in the compute of a microbatch. On the last stage, where no message separates
its forward from its backward, it only places their border: they leave no bubble in between."""


def _guess_units(work: LaunchedWork, messages: Sequence[int], place: StagePosition) -> list[_Unit]:
    """The launches between two messages by what is sent after them, without other evidence."""
    units: list[_Unit] = []
    whole = _list_units(work)
    pure = next((unit for unit in whole if NEXT in _list_following(unit, work, messages)), None)
    for unit in whole:
        following = _list_following(unit, work, messages)
        border = unit.first
        if NEXT in following and pure is not None:
            # On the first stage a backward may come before the forward, which begins a step.
            border = max(unit.first, unit.after - (pure.after - pure.first))
        elif place.is_last and PREVIOUS in following:
            done = np.cumsum(work.took_ns[unit.first : unit.after])
            border = unit.first + int(np.searchsorted(done, _FORWARD_SHARE * done[-1], "right"))
            units += [_Unit(unit.first, border, False), _Unit(border, unit.after, True)]
            continue
        elif not place.is_last or not following:
            border = unit.after
        if border > unit.first:
            units.append(_Unit(unit.first, border, True))
        if border < unit.after:
            units.append(_Unit(border, unit.after, False))
    return [unit for unit in units if unit.after > unit.first]


def _list_following(unit: _Unit, work: LaunchedWork, messages: Sequence[int]) -> Sequence[int]:
    """The messages between a unit and the next one."""
    low = int(work.gap[unit.after - 1])
    high = int(work.gap[unit.after]) if unit.after < len(work.gap) else len(messages)
    return messages[low:high]


def _mark_sent(units: Sequence[_Unit], work: LaunchedWork, messages: Sequence[int]) -> None:
    """Marks the units whose output was sent: the last of its kind before each send."""
    at, waiting = 0, dict[bool, _Unit]()
    for number, message in enumerate(messages):
        while at < len(units) and work.gap[units[at].first] <= number:
            waiting[units[at].backward] = units[at]
            at += 1
        if message != RECEIVE and (unit := waiting.pop(message == PREVIOUS, None)) is not None:
            unit.sent = True


def _find_forwards(
    units: Sequence[_Unit], work: LaunchedWork, place: StagePosition
) -> Iterator[_Unit]:
    """The forwards, in order. Those of the last stage are not sent; what a step launches after its
    last backward is no forward."""
    last = max((i for i, unit in enumerate(units) if unit.backward), default=0)
    forwards = [unit for unit in units[:last] if not unit.backward]
    if not place.is_last:
        forwards = [unit for unit in forwards if unit.sent]
    least_ns = 0.5 * float(np.median([_sum_ns(unit, work) for unit in forwards] or [0]))
    template = _find_template(forwards, work)
    for unit in forwards:
        if unit.sent or _sum_ns(unit, work) >= least_ns:
            yield from _split_repeats(unit, template, work)


def _find_backwards(
    units: Sequence[_Unit], work: LaunchedWork, place: StagePosition
) -> tuple[list[_Unit], list[_Unit]]:
    """(backwards, weight gradients). The backwards of the first stage are not sent."""
    found = [unit for unit in units if unit.backward]
    if place.is_first:
        template = _find_template(found, work)
        if len(found) > 1 and not work.has_backwards:
            # Kernels at the end of a step that no other backward has are the optimizer's.
            known = {name for unit in found[:-1] for name in _list_names(unit, work)}
            last = found[-1]
            while last.after > last.first + 1 and int(work.name[last.after - 1]) not in known:
                last.after -= 1
        return [one for unit in found for one in _split_repeats(unit, template, work)], []
    template = _find_template([unit for unit in found if unit.sent], work)
    backwards: list[_Unit] = []
    rest: list[_Unit] = []
    for unit in found:
        border = unit.after - len(template) if unit.sent else unit.after
        if unit.sent and _list_names(unit, work)[-len(template) :] != template:
            border = unit.first
        if border > unit.first:
            if rest and rest[-1].after == unit.first:
                rest[-1].after = border
            else:
                rest.append(_Unit(unit.first, border, True))
        if border < unit.after:
            backwards.append(_Unit(border, unit.after, True, True))
    template = _find_template(rest, work)
    return backwards, [one for unit in rest for one in _split_repeats(unit, template, work)]


def _find_template(units: Sequence[_Unit], work: LaunchedWork) -> Names:
    """The most frequent sequence of kernels, the shortest of those."""
    counts = Counter(_list_names(unit, work) for unit in units)
    return min(counts, key=lambda names: (-counts[names], len(names)), default=())


def _split_repeats(unit: _Unit, template: Names, work: LaunchedWork) -> Iterator[_Unit]:
    """The parts of a unit that repeats the sequence several times, else the unit."""
    names, size = _list_names(unit, work), max(1, len(template))
    times = len(names) // size
    if names != template * times:
        times, size = 1, len(names)
    for first in range(unit.first, unit.first + times * size, size):
        yield _Unit(first, first + size, unit.backward, unit.sent)


def _list_names(unit: _Unit, work: LaunchedWork) -> Names:
    return tuple(work.name[unit.first : unit.after].tolist())


def _sum_ns(unit: _Unit, work: LaunchedWork) -> int:
    return int(work.took_ns[unit.first : unit.after].sum())


Order = list[tuple[int, int]]


def _number_passes(
    forwards: Sequence[_Unit], backwards: Sequence[_Unit], place: StagePosition
) -> tuple[Order, Order] | None:
    """(chunk, microbatch) of each forward and backward; None if their order is unknown.

    With several chunks microbatches pass them in groups of as many as there are ranks, as in
    Megatron-LM's interleaved schedule, or all at once. Outputs of the last chunk are not sent by
    the last rank, nor gradients of the first by the first.
    """
    chunks, count = place.chunks, len(forwards)
    if chunks == 1:
        in_order = [(0, number) for number in range(count)]
        return in_order, in_order
    microbatches, rest = divmod(count, chunks)
    for group in (place.stages, microbatches):
        if rest or not group or microbatches % group:
            continue
        order = []
        for number in range(count):
            turn, at = divmod(number, group * chunks)
            order.append((at // group, turn * group + at % group))
        back = [(chunks - 1 - chunk, microbatch) for chunk, microbatch in order]
        sent = [not (place.is_last and chunk == chunks - 1) for chunk, _ in order]
        returned = [not (place.is_first and chunk == 0) for chunk, _ in back]
        if sent == [one.sent for one in forwards] and returned == [one.sent for one in backwards]:
            return order, back
    return None


# Two stages on each rank: a V, or two opposite directions.


def order_folded_passes(
    work: LaunchedWork, messages: Sequence[int], place: StagePosition, *, both_ways: bool
) -> tuple[StagePass, ...]:
    """The passes in one step of a rank with stages r (chunk 0) and 2p - 1 - r (chunk 1) of 2p; ()
    if the order does not show each of them.

    The chunks send in opposite directions, which separates them; unsent is what ends on the first
    or last rank, or stays there. Passes without a message in between are separated by the kernels
    of those that are sent; what these leave of the backwards are weight gradients.

    Args:
        work: The kernels of the step; nothing is found where backwards are not known.
        messages: The kind of each message of the rank, in the order of issue.
        place: The place of the rank in its pipeline.
        both_ways: Each chunk has microbatches of its own.
    """
    units = _list_units(work) if work.has_backwards else []
    last = max((i for i, unit in enumerate(units) if unit.backward), default=-1)
    launched: list[_Launched] = []
    for unit in units[: last + 1]:  # what follows is the optimizer
        following = _list_following(unit, work, messages)
        toward = next((kind for kind in following if kind != RECEIVE), RECEIVE)
        launched.append(_Launched(unit.first, _list_names(unit, work), unit.backward, toward))
    # In one direction outputs only go on, and gradients only back.
    if not any(one.toward == (NEXT if one.backward else PREVIOUS) for one in launched):
        return ()
    forward = min((one.names for one in launched if not one.backward), key=len, default=())
    ends = sorted({one.names for one in launched if one.backward and one.toward}, key=len)
    # On the last rank an unsent backward of the same kernels may come before each that is sent.
    halves = [names[: len(names) // 2] for names in ends]
    for known in (
        [],
        *([half] for half, names in zip(halves, ends, strict=True) if half * 2 == names),
    ):
        backwards = list(known)
        for names in ends:
            if not any(names[-len(one) :] == one for one in backwards):
                backwards.append(names)
        if passes := _place_folded_passes(launched, forward, backwards, place, both_ways):
            return passes
    return ()


def pair_passes(
    work: LaunchedWork, partner_gap: Int64, messages: Sequence[int], place: StagePosition
) -> tuple[StagePass, ...]:
    """The passes in one step of one of two ranks that hand microbatches on to each other in both
    directions, whose forwards and backwards are known to belong together; () if its sends do not
    fit them.

    Each rank has the first stage of one direction and the last of the other. A first stage sends
    the output of a forward before it runs its backward, so that passes without a send in between
    are of a last stage. A microbatch then sends one message, an output or a gradient, after the
    launches among which its forward is. If as many follow these as there are forwards among them,
    the other microbatches are of the first stage: of those of the last one the earliest would lack
    its send. Weight gradients outside of autograd belong to no pass.

    Args:
        work: The kernels of the step.
        partner_gap: The gap of the other pass of the microbatch of each launch; -1 for unknown.
        messages: The kind of each message of the rank, in the order of issue.
        place: The place of the rank in its pipeline.
    """
    known = np.flatnonzero(partner_gap >= 0)
    sends_before = np.cumsum([0, *(message != RECEIVE for message in messages)])
    own, partner = sends_before[work.gap[known]], sends_before[partner_gap[known]]
    backward = work.backward[known]
    label = np.stack((backward, *np.where(backward, (partner, own), (own, partner))), axis=1)
    edges = np.flatnonzero(np.any(np.diff(label, axis=0, prepend=-1, append=-1), axis=1))
    # (backward, sends before the forward, sends before the backward): rows [first, after).
    rows: dict[tuple[int, int, int], tuple[int, int]] = {}
    for low, high in pairwise(edges.tolist()):
        key = tuple(label[low].tolist())
        if key in rows:  # of several microbatches
            return ()
        rows[key] = (int(known[low]), int(known[high - 1]) + 1)
    microbatches = [sends for is_back, *sends in rows if not is_back]
    if {(1, *sends) for sends in microbatches} != {key for key in rows if key[0]}:
        return ()
    launches, forwards = np.unique(own), Counter(forward for forward, _ in microbatches)
    follow = np.diff(launches, prepend=0, append=sends_before[-1])
    if follow.tolist() != [0, *(forwards[at] for at in launches.tolist())]:
        return ()
    first = [sends for sends in microbatches if sends[0] < sends[1]]
    last = [sends for sends in microbatches if sends[0] == sends[1]]
    if not first or not last:
        return ()
    # Chunk 0 is of the direction that begins on the first rank.
    chunks = (last, first) if place.is_last else (first, last)
    numbered = enumerate((chunk, *sends) for chunk, own in enumerate(chunks) for sends in own)
    return tuple(
        StagePass(phase, chunk, number, *rows[is_back, forward, back])
        for number, (chunk, forward, back) in numbered
        for is_back, phase in enumerate(("forward", "backward"))
    )


class _Launched(Struct, frozen=True):
    """Consecutive launches between messages of one kind, and where the output of the last pass
    among them is sent; RECEIVE if nowhere."""

    first: int
    names: Names
    backward: bool
    toward: int


def _place_folded_passes(
    launched: Sequence[_Launched],
    forward: Names,
    backwards: Sequence[Names],
    place: StagePosition,
    both_ways: bool,
) -> tuple[StagePass, ...]:
    """The passes, if those have these kernels; () if their numbers do not fit."""
    found: list[StagePass] = []
    counts: Counter[tuple[str, int]] = Counter()
    weights: list[tuple[int, int]] = []
    split: list[StagePass] = []
    shortest = min(backwards, key=len, default=())
    for one in launched:
        own = sorted(backwards, key=len, reverse=True) if one.backward else [forward]
        at, spans = 0, list[tuple[int, int]]()
        while at < len(one.names):
            size = next((len(p) for p in own if p and one.names[at : at + len(p)] == p), 0)
            if size:
                spans.append((at, at + size))
            elif weights and weights[-1][1] == one.first + at:
                weights[-1] = (weights[-1][0], one.first + at + 1)
            else:
                weights.append((one.first + at, one.first + at + 1))
            at += size or 1
        for number, (begin, end) in enumerate(spans, 1 - len(spans)):
            toward = one.toward if number == 0 else RECEIVE
            if toward == RECEIVE and not (place.is_first or place.is_last):
                return ()
            # Unsent on the first rank is what would be sent to the previous one.
            onward = toward == NEXT if toward else place.is_last
            chunk = int(onward == one.backward)
            phase = "backward" if one.backward else "forward"
            done = counts[phase, chunk]
            counts[phase, chunk] += 1
            found.append(StagePass(phase, chunk, done, one.first + begin, one.first + end))
            if one.backward and one.names[begin:end] == shortest:
                split.append(found[-1])
    numbers = [counts[phase, chunk] for chunk in (0, 1) for phase in ("forward", "backward")]
    if numbers[0] != numbers[1] or numbers[2] != numbers[3] or not all(numbers):
        return ()
    if not both_ways and numbers[0] != numbers[2]:
        return ()
    # All weight gradients have as many kernels.
    total = sum(after - first for first, after in weights)
    if total and not split:
        return ()
    size, odd = divmod(total, max(len(split), 1))
    if odd or any((after - first) % max(size, 1) for first, after in weights):
        return ()
    pieces = [
        (at, at + size) for first, after in weights for at in range(first, after, max(size, 1))
    ]
    found += [
        StagePass("weight", of.chunk, of.microbatch, first, after)
        for of, (first, after) in zip(split, pieces, strict=bool(total))
    ]
    apart = numbers[0] if both_ways else 0
    return tuple(
        StagePass(one.phase, one.chunk, one.microbatch + apart * one.chunk, one.first, one.after)
        for one in found
    )
