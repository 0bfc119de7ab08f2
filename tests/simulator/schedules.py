"""In which order each rank of a pipeline does its forwards and backwards.

Written from the papers: GPipe (Huang et al. 2019), 1F1B and interleaved (Narayanan et al. 2021),
ZB-H1 (Qi et al. 2023), ZB-V (Qi et al. 2024), DualPipe and DualPipeV (DeepSeek-AI 2025).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "dualpipe")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """Work of a stage on a microbatch: F forward, B backward, or its halves I (input) and W (weight
    gradients)."""

    kind: str
    stage: int
    microbatch: int


Order = tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class _Lane:
    """One chunk of a rank: its stage, and the microbatches that pass through it."""

    stage: int
    microbatches: range


def actions(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> tuple[Order, ...]:
    """What each of so many ranks does, in order.

    stages counts ranks: interleaved holds chunks stages a rank (rank r holds r, r + p, ...), the V
    shapes two (r and 2p - 1 - r). dualpipe holds two models: stages 0 to p - 1 of one, p to 2p - 1
    of the other, each of which passes half of the microbatches.
    Raises ValueError where the schedule is not known or not defined for these sizes.
    """
    _check(schedule, stages, microbatches, chunks)
    if schedule == "interleaved":
        return tuple(_interleaved(r, stages, microbatches, chunks) for r in range(stages))
    return tuple(_phased(schedule, r, stages, microbatches) for r in range(stages))


def _check(schedule: str, stages: int, microbatches: int, chunks: int) -> None:
    defined = {
        "interleaved": chunks > 1 and microbatches % stages == 0,
        "dualpipe-v": microbatches >= 2 * stages,
        "dualpipe": stages % 2 == 0 and microbatches % 2 == 0 and microbatches >= 2 * stages,
    }
    if schedule not in SCHEDULES or not defined.get(schedule, True):
        sizes = f"{stages} stages, {microbatches} microbatches, {chunks} chunks"
        raise ValueError(f"no schedule {schedule} of {sizes}")


def _interleaved(rank: int, stages: int, microbatches: int, chunks: int) -> Order:
    """Megatron's order: groups of p microbatches walk through the chunks, one after another."""
    total = chunks * microbatches
    warm = min((stages - rank - 1) * 2 + (chunks - 1) * stages, total)

    def nth(kind: str, n: int) -> Action:
        turn, place = divmod(n, stages * chunks)
        chunk = place // stages if kind == "F" else chunks - 1 - place // stages
        return Action(kind, chunk * stages + rank, turn * stages + place % stages)

    steady = [
        nth(kind, n - lag) for n in range(warm, total) for kind, lag in (("F", 0), ("B", warm))
    ]
    cool = [nth("B", n) for n in range(total - warm, total)]
    return (*(nth("F", n) for n in range(warm)), *steady, *cool)


Phase = tuple[str, int]
"""A pattern of kinds and chunks, such as "F0 B1", and how often it is repeated."""


def _phased(schedule: str, rank: int, p: int, m: int) -> Order:
    """The order of a schedule whose ranks repeat patterns."""
    both = (_Lane(rank, range(m)), _Lane(2 * p - 1 - rank, range(m)))
    match schedule:
        case "naive":
            return _walk([("F0 B0", m)], both)
        case "gpipe":
            return _walk([("F0", m), ("B0", m)], both)
        case "1f1b":
            warm = min(p - rank - 1, m)
            return _walk([("F0", warm), ("F0 B0", m - warm), ("B0", warm)], both)
        case "zb-h1":
            return _walk(_zb_h1(rank, p, m), both)
        case "zb-v":
            return _walk(_zb_v(rank, p, m), both)
        case "dualpipe-v":
            return _walk(_dual(rank, p, m), both)
    down, up = _Lane(rank, range(m // 2)), _Lane(2 * p - 1 - rank, range(m // 2, m))
    lanes = (down, up) if rank < p // 2 else (up, down)
    return _walk(_dual(min(rank, p - 1 - rank), p // 2, m // 2), lanes)


def _zb_h1(rank: int, p: int, m: int) -> list[Phase]:
    """As 1F1B, but weight gradients lag by one microbatch a rank and fill what 1F1B leaves open."""
    warm, full = p - rank - 1, max(m, p)
    steady = full - warm - rank
    return [("F0", warm), ("F0 I0", rank), ("F0 I0 W", steady), ("I0 W", warm), ("W", rank)]


def _zb_v(rank: int, p: int, m: int) -> list[Phase]:
    full = max(m, 2 * p - 1)
    warm = [("F0", 2 * (p - rank) - 1), ("F1 F0", rank), ("F1 I1 W", p - rank)]
    cool = [("I0 I1", rank), ("I0 W0", p - rank), ("W1", rank), ("W0", rank)]
    return [*warm, ("F0 I0 W F1 I1 W", full - p), *cool]


def _dual(rank: int, p: int, m: int) -> list[Phase]:
    """Both chunks at once: from the middle of the V (or of the two pipelines) outwards."""
    outer, inner = p - rank - 1, rank + 1
    warm = [("F0", 2 * outer), ("F0 F1", inner), ("I1 W F1", outer)]
    steady = [("F0 B1 F1 B0", m - 2 * p + inner), ("B1 F1 B0", outer)]
    whole = inner // 2
    turn = [("B1 B0", whole), ("B1 I0", inner % 2), ("I1 I0", inner - whole - inner % 2)]
    return [*warm, *steady, *turn, ("W I0", outer), ("W", inner)]


def _walk(phases: Iterable[Phase], lanes: Sequence[_Lane]) -> Order:
    """Plays the patterns; F counts up in its chunk, B and I count up together, W takes the oldest
    input gradient that waits (of its chunk, if one is named). Microbatches beyond the last of the
    chunk are left out."""
    forwards, backwards = [0, 0], [0, 0]
    waiting: deque[tuple[int, int]] = deque()
    order: list[Action] = []
    for kind, chunk in _letters(phases):
        if kind == "W":
            chunk, nth = next(w for w in waiting if chunk in (None, w[0]))
            waiting.remove((chunk, nth))
        else:
            assert chunk is not None
            counts = forwards if kind == "F" else backwards
            nth, counts[chunk] = counts[chunk], counts[chunk] + 1
            if kind == "I":
                waiting.append((chunk, nth))
        if nth < len(lanes[chunk].microbatches):
            order.append(Action(kind, lanes[chunk].stage, lanes[chunk].microbatches[nth]))
    return tuple(order)


def _letters(phases: Iterable[Phase]) -> Iterator[tuple[str, int | None]]:
    for pattern, times in phases:
        for word in pattern.split() * times:
            yield word[0], int(word[1]) if len(word) > 1 else None
