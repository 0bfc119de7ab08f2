"""Which ranks are in each group, where some dumps list the members and others do not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stepsplit.analyzer.readers.flight_recorder import FlightDump
from stepsplit.analyzer.readers.ranks import MOST_RANKS
from stepsplit.analyzer.trace import Group

_DEFAULT = "default_pg"


@dataclass(frozen=True, slots=True, eq=False)
class JobGroup:
    """A group of the job, one object each: it is equal to itself alone, and quick to look up."""

    name: str
    ranks: tuple[int, ...]
    description: str


@dataclass(frozen=True, slots=True)
class JobGroups:
    """The groups of a job. guessed: the members of some are only those that spoke of them."""

    guessed: bool
    _of_rank: Mapping[tuple[int, str], JobGroup]

    def of(self, rank: int, name: str) -> JobGroup | None:
        """The group that the rank means by the name; None where it is in none."""
        return self._of_rank.get((rank, name))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that is in a group."""
        return tuple(sorted({rank for group in self._of_rank.values() for rank in group.ranks}))


def job_groups(dumps: Sequence[FlightDump]) -> JobGroups:
    """The groups, as a member's dump lists them, else of the ranks whose dumps speak of them.

    The default group holds every rank up to the highest. gloo lists no groups.
    """
    listed: dict[str, dict[tuple[int, ...], JobGroup]] = defaultdict(dict)
    for group in (group for dump in dumps for group in dump.groups if group.ranks):
        whole = JobGroup(group.name, group.ranks, group.description)
        listed[group.name].setdefault(group.ranks, whole)
    spoken = [(dump.rank, group) for dump in dumps for group in _spoken(dump)]
    unlisted: dict[str, JobGroup] = {}
    of_rank: dict[tuple[int, str], JobGroup] = {}
    for rank, group in spoken:
        own = group.ranks or next((ranks for ranks in listed[group.name] if rank in ranks), ())
        if own:
            of_rank[rank, group.name] = listed[group.name][own]
            continue
        if group.name not in unlisted:
            unlisted[group.name] = _guessed(group.name, spoken)
        of_rank[rank, group.name] = unlisted[group.name]
    return JobGroups(any(not _is_default(group) for group in unlisted.values()), of_rank)


def _spoken(dump: FlightDump) -> list[Group]:
    """The groups of the dump; one of which it holds a status alone has no description."""
    known = {group.name for group in dump.groups}
    named = {status.group_name for status in dump.statuses if status.group_name}
    return [*dump.groups, *(Group(name, (), "") for name in sorted(named - known))]


def _guessed(name: str, spoken: Sequence[tuple[int, Group]]) -> JobGroup:
    same = [(rank, one) for rank, one in spoken if one.name == name and not one.ranks]
    description = next((one.description for _, one in same if one.description), "")
    group = JobGroup(name, tuple(sorted({rank for rank, _ in same})), description)
    most = max(rank for rank, _ in spoken) + 1
    if not _is_default(group) or most > MOST_RANKS:
        return group
    return replace(group, ranks=tuple(range(most)))


def _is_default(group: JobGroup) -> bool:
    return group.description == _DEFAULT or (group.name == "0" and not group.description)
