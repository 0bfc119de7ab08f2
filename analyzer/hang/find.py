"""Flight Recorder dumps -> the hang that they tell of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.hang.collectives import find_mismatches, named, stuck_collectives
from stepsplit.analyzer.hang.culprits import find_culprits
from stepsplit.analyzer.hang.groups import JobGroups, job_groups
from stepsplit.analyzer.hang.hang import (
    Culprit,
    Hang,
    HangWarning,
    LastCall,
    StackFrame,
    Stuck,
)
from stepsplit.analyzer.hang.messages import stuck_messages
from stepsplit.analyzer.hang.progress import Progress, progress_of
from stepsplit.analyzer.hang.scene import Scene
from stepsplit.analyzer.hang.verdict import whole
from stepsplit.analyzer.readers.compression import files_of
from stepsplit.analyzer.readers.flight_recorder import FlightDump, read_dump
from stepsplit.analyzer.readers.registry import FLIGHT, NSYS, TRACE, kinds_of
from stepsplit.analyzer.readers.sources import Source

_GUESSED = "the dumps do not list the members of groups: taken are the ranks that called on them"


def find_hang(*places: str | Path) -> Hang | None:
    """The hang that the Flight Recorder dumps in the places tell of; None where nothing is stuck.

    Raises DataError where a place is missing, holds no dump, or holds two dumps of a rank.
    """
    found = read_calls(places)
    return found if found.stuck else None


def read_calls(places: Sequence[str | Path]) -> Hang:
    """How the calls stand by the dumps in the places. Raises DataError as find_hang does."""
    dumps, warnings = read_dumps(places)
    if not dumps:
        why = f": {warnings[0].message}" if warnings else ""
        raise DataError(places[0] if places else "no path", f"no Flight Recorder dump in it{why}",
                        "name the folder of a job's dumps")  # fmt: skip
    return how_calls_stand(dumps, warnings)


def only_dumps(places: Sequence[str | Path]) -> bool:
    """Whether there are Flight Recorder dumps in the places and no traces. Raises DataError."""
    with files_of([str(place) for place in places]) as sources:
        kinds = {kind for source in sources for kind in _kinds(source)}
    return FLIGHT.name in kinds and kinds.isdisjoint((TRACE.name, NSYS.name))


def read_dumps(
    places: Sequence[str | Path],
) -> tuple[tuple[FlightDump, ...], tuple[HangWarning, ...]]:
    """The dumps in the places, and what of them could not be read or told. Raises DataError."""
    dumps: list[FlightDump] = []
    warnings: list[HangWarning] = []
    with files_of([str(place) for place in places]) as sources:
        for source in (one for one in sources if FLIGHT.name in _kinds(one)):
            try:
                dumps.append(read_dump(source))
            except DataError as error:
                told = f"{source.inner.name}: {error.problem}"
                warnings.append(HangWarning("file_skipped", told))
    warnings += [HangWarning(n.code, n.message, n.rank) for dump in dumps for n in dump.notes]
    return tuple(dump for dump in dumps if dump.rank >= 0), tuple(warnings)


def _kinds(source: Source) -> tuple[str, ...]:
    try:
        return tuple(kind.name for kind in kinds_of(source))
    except DataError:
        return ()


def how_calls_stand(dumps: Sequence[FlightDump], warnings: Sequence[HangWarning] = ()) -> Hang:
    """What the dumps say, whether or not anything is stuck; one dump a rank.

    Raises DataError where two dumps are of one rank: they are of two incidents.
    """
    _refuse_two_of_a_rank(dumps)
    groups = job_groups(dumps)
    ranks = progress_of(dumps, groups)
    mismatches = find_mismatches(ranks)
    stuck = (*stuck_collectives(ranks, mismatches), *stuck_messages(ranks))
    scene = Scene(stuck, mismatches if stuck else (), ranks)
    culprits = find_culprits(scene)
    return Hang(
        verdict="; ".join(whole([one.message for one in culprits])),
        ranks=tuple(rank.rank for rank in ranks),
        no_dump=tuple(sorted(set(groups.ranks) - {rank.rank for rank in ranks})),
        culprits=culprits,
        stuck=tuple(sorted(stuck, key=lambda call: _order(call, culprits))),
        mismatches=scene.mismatches,
        last_calls=_last_calls(ranks, culprits, stuck),
        warnings=(*warnings, *_guessed(groups)),
    )


def _refuse_two_of_a_rank(dumps: Sequence[FlightDump]) -> None:
    rank, count = Counter(dump.rank for dump in dumps).most_common(1)[0] if dumps else (-1, 0)
    if count > 1:
        first, second = [dump.source for dump in dumps if dump.rank == rank][:2]
        problem = f"a second dump of the rank, beside {first}"
        raise DataError(second, problem, "name the dumps of one hang", rank)


def _order(call: Stuck, culprits: Sequence[Culprit]) -> tuple[int, int, int]:
    """What explains most comes first: waits for a culprit, what a culprit stands in, the rest."""
    to_blame = {rank for one in culprits for rank in one.ranks}
    if to_blame & (set(call.waits_for) - set(call.waiting)):
        level = 0
    elif to_blame & set(call.waiting):
        level = 1
    else:
        level = 2 if call.missing or call.no_dump else 3
    return level, -len(call.waiting), int(call.called_unix_ns)


def _last_calls(
    ranks: Sequence[Progress], culprits: Sequence[Culprit], stuck: Iterable[Stuck]
) -> tuple[LastCall, ...]:
    """Where the culprits are, then others that are waited for and not there."""
    to_blame = [rank for one in culprits for rank in one.ranks]
    missing = sorted({one.rank for call in stuck for one in call.missing})
    calls = {rank.rank: rank.calls[-1] for rank in ranks if rank.calls}
    return tuple(
        LastCall(
            rank=rank,
            group=named(call.group),
            op=call.op,
            seq=call.seq,
            state=call.state,
            called_unix_ns=str(call.created_unix_ns),
            stack=tuple(StackFrame(one.function, one.file, one.line) for one in call.stack),
        )
        for rank in dict.fromkeys([*to_blame, *missing])
        if (call := calls.get(rank)) is not None
    )


def _guessed(groups: JobGroups) -> tuple[HangWarning, ...]:
    return (HangWarning("groups_guessed", _GUESSED),) if groups.guessed else ()
