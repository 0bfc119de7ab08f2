"""Who holds the job up, and why: what is found where the chains of waits end."""

from __future__ import annotations

from collections.abc import Sequence

from stepsplit.analyzer.hang import verdict
from stepsplit.analyzer.hang.chains import ChainEnd, chain_ends
from stepsplit.analyzer.hang.hang import Culprit, Mismatch, Stuck
from stepsplit.analyzer.hang.scene import Scene


def find_culprits(scene: Scene) -> tuple[Culprit, ...]:
    """The ranks at which the chains of waits end, those of one cause and call as one."""
    ends = chain_ends(scene.stuck)
    if not ends:
        return _nobody_waits(scene)
    same: dict[tuple[str, int], list[ChainEnd]] = {}
    for end in ends:
        same.setdefault((_cause(end, scene), _awaited(end, scene.stuck)), []).append(end)
    return tuple(_culprit(cause, at, found, scene) for (cause, at), found in same.items())


def _cause(end: ChainEnd, scene: Scene) -> str:
    calls = [scene.stuck[place] for place in end.calls]
    if any(scene.mismatch_of(call) for call in calls):
        return "mismatch"
    if calls:
        return "deadlock" if any(call.missing for call in calls) else "not_ending"
    if not scene.has_dump(end.ranks[0]):
        return "no_dump"
    return "not_called" if scene.oldest_open(end.ranks[0]) is None else "unfinished"


def _awaited(end: ChainEnd, stuck: Sequence[Stuck]) -> int:
    """The place of the oldest call among themselves, else of that in which most wait for them."""
    if end.calls:
        return min(end.calls, key=lambda at: int(stuck[at].called_unix_ns))
    places = [at for at, call in enumerate(stuck) if set(end.ranks) & set(call.waits_for)]
    return max(places, key=lambda at: (len(stuck[at].waiting), -int(stuck[at].called_unix_ns)))


def _culprit(cause: str, at: int, ends: Sequence[ChainEnd], scene: Scene) -> Culprit:
    ranks = tuple(sorted({rank for end in ends for rank in end.ranks}))
    held = tuple(sorted({rank for end in ends for rank in end.held} - set(ranks)))
    call = scene.stuck[at]
    hold = verdict.hold(ranks, held, scene)
    match cause:
        case "mismatch":
            return _disagreeing(ranks, held, [scene.stuck[i] for i in ends[0].calls], scene)
        case "deadlock":
            among = sorted({place for end in ends for place in end.calls})
            message = verdict.deadlock(ranks, [scene.stuck[place] for place in among])
        case "not_ending":
            message = verdict.not_ending(ranks, call)
        case "no_dump":
            message = f"{hold}{verdict.no_dump(ranks, call)}"
        case "unfinished":
            message = f"{hold}: {verdict.unfinished(ranks, call, scene)}"
        case _:
            message = f"{hold}: {verdict.not_called(ranks, call)}"
    return Culprit(ranks, cause, held, message)


def _disagreeing(
    ranks: tuple[int, ...], held: tuple[int, ...], calls: Sequence[Stuck], scene: Scene
) -> Culprit:
    """The odd ones alone are to blame; those who wait with them are held."""
    mismatch: Mismatch = next(one for call in calls if (one := scene.mismatch_of(call)))
    odd = tuple(rank for rank in ranks if rank in mismatch.odd) or ranks
    held = tuple(sorted({*held, *ranks} - set(odd)))
    message = f"{verdict.hold(odd, held, scene)}: {verdict.mismatch(mismatch)}"
    return Culprit(odd, "mismatch", held, message)


def _nobody_waits(scene: Scene) -> tuple[Culprit, ...]:
    """The ranks whose own calls are open, where nobody is waited for."""
    ranks = tuple(sorted({rank for call in scene.stuck for rank in call.waiting}))
    if not ranks:
        return ()
    return (Culprit(ranks, "unfinished", (), verdict.alone(ranks, scene)),)
