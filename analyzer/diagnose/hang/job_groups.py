"""The process groups of a job and their members, which not all dumps list."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import Struct

from stepsplit.analyzer.diagnose.hang.result import StuckGroup
from stepsplit.analyzer.readers.flight_recorder import FlightDump
from stepsplit.analyzer.readers.rank_limits import MAX_RANKS
from stepsplit.analyzer.trace import Group


@dataclass(frozen=True, slots=True, eq=False)
class JobGroup:
    """A process group of the job; one object per group, compared by identity."""

    name: str
    ranks: tuple[int, ...]
    description: str


_DEFAULT = "default_pg"


class JobGroups(Struct, frozen=True):
    """The groups of a job. guessed: names of those whose members are the ranks that used them."""

    guessed: frozenset[str]
    _of_rank: Mapping[tuple[int, str], JobGroup]

    def find_group(self, rank: int, name: str) -> JobGroup | None:
        """The group with this name on the rank; None if the rank is in no such group."""
        return self._of_rank.get((rank, name))

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of all groups."""
        return tuple(sorted({rank for group in self._of_rank.values() for rank in group.ranks}))


def find_job_groups(dumps: Sequence[FlightDump], known: Iterable[Group] = ()) -> JobGroups:
    """The groups as listed in a member's dump, else inferred from the ranks that mention them.

    The default group has every rank up to the highest. gloo lists no groups; known are those that
    another file lists.
    """
    listed: dict[str, dict[tuple[int, ...], JobGroup]] = defaultdict(dict)
    for group in known:
        named = JobGroup(group.name, group.ranks, group.description)
        listed[group.name].setdefault(group.ranks, named)
    for group in (group for dump in dumps for group in dump.groups if group.ranks):
        whole = JobGroup(group.name, group.ranks, group.description)
        listed[group.name].setdefault(group.ranks, whole)
    mentioned = [(dump.rank, group) for dump in dumps for group in _list_groups(dump)]
    unlisted: dict[str, JobGroup] = {}
    of_rank: dict[tuple[int, str], JobGroup] = {}
    for rank, group in mentioned:
        own = group.ranks or next((ranks for ranks in listed[group.name] if rank in ranks), ())
        if own:
            of_rank[rank, group.name] = listed[group.name][own]
            continue
        if group.name not in unlisted:
            same = [(at, one) for at, one in mentioned if one.name == group.name and not one.ranks]
            description = next((one.description for _, one in same if one.description), "")
            members = tuple(sorted({at for at, _ in same}))
            inferred = JobGroup(group.name, members, description)
            # The default group has every rank, also those of which there is no dump.
            count = max(at for at, _ in mentioned) + 1
            if _is_default(inferred) and count <= MAX_RANKS:
                inferred = replace(inferred, ranks=tuple(range(count)))
            unlisted[group.name] = inferred
        of_rank[rank, group.name] = unlisted[group.name]
    guessed = frozenset(group.name for group in unlisted.values() if not _is_default(group))
    return JobGroups(guessed, of_rank)


def _list_groups(dump: FlightDump) -> list[Group]:
    """The groups of a dump, also those with only a status, which have no description."""
    known = {group.name for group in dump.groups}
    names = {status.group_name for status in dump.statuses if status.group_name}
    return [*dump.groups, *(Group(name, (), "") for name in sorted(names - known))]


def _is_default(group: JobGroup) -> bool:
    return group.description == _DEFAULT or (group.name == "0" and not group.description)


def describe_group(group: JobGroup) -> StuckGroup:
    """The group as it is reported."""
    return StuckGroup(group.name, group.description, group.ranks)
