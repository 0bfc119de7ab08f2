"""Communicators out of what each process says of its own, and the global ranks they imply."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stepsplit.analyzer.readers.nccl.members import Handle, Owner
from stepsplit.analyzer.readers.nccl.nouns import Communicator, Member

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """The communicators, the one that each handle belongs to, and how many have no others found."""

    communicators: tuple[Communicator, ...]
    comm_of: tuple[int, ...]
    alone: int


def joined(handles: Sequence[Handle]) -> Joined:
    """The handles that are one communicator together.

    They share a commId or, of a split that prints none, parent, turn and color. Before 2.16 there
    is neither: handles of one size are one communicator if each rank is always the same process,
    in the whole log or on one host, and for several of them the n-th of each process belong
    together. What is ambiguous then is left alone.
    """
    parts: dict[Key, list[int]] = defaultdict(list)
    turns: Counter[Key] = Counter()
    keys: list[Key] = []
    for index, handle in enumerate(handles):
        turn = (handle.owner, handle.parent, handle.color)
        keys.append(_key(handle, keys, turns[turn]))
        turns[turn] += 1
        parts[keys[-1]].append(index)
    teams = sorted(team for part in parts.values() for team in _teams(handles, part))
    comm_of = [-1] * len(handles)
    for comm, team in enumerate(teams):
        for index in team:
            comm_of[index] = comm
    found = tuple(_communicator([handles[i] for i in team], comm_of) for team in teams)
    alone = sum(len(one.members) == 1 < one.nranks and _has_no_id(one) for one in found)
    return Joined(found, tuple(comm_of), alone)


def _key(handle: Handle, keys: Sequence[Key], turn: int) -> Key:
    if handle.comm_id.strip("0x"):
        return "id", handle.comm_id, handle.nranks
    if handle.color is not None:
        parent = keys[handle.parent] if 0 <= handle.parent < len(keys) else ()
        split = handle.split if handle.split >= 0 else turn
        return "split", parent, split, handle.color, handle.nranks
    return "size", handle.nranks


def _teams(handles: Sequence[Handle], part: Sequence[int]) -> list[list[int]]:
    known = [index for index in part if handles[index].rank >= 0]
    teams = [[index] for index in part if handles[index].rank < 0]
    whole = _by_turn(handles, known)
    if whole is not None:
        return teams + whole
    on_host: dict[str, list[int]] = defaultdict(list)
    for index in known:
        on_host[handles[index].host].append(index)
    for here in on_host.values():
        local = _by_turn(handles, here)
        for team in [[index] for index in here] if local is None else local:
            full = len(team) == handles[team[0]].nranks
            teams += [team] if full else [[index] for index in team]
    return teams


def _by_turn(handles: Sequence[Handle], part: Sequence[int]) -> list[list[int]] | None:
    """The n-th handles of each rank together; None where a rank is several processes."""
    owners: dict[int, Owner] = {}
    turns: Counter[int] = Counter()
    teams: dict[int, list[int]] = defaultdict(list)
    for index in part:
        handle = handles[index]
        if owners.setdefault(handle.rank, handle.owner) != handle.owner:
            return None
        teams[turns[handle.rank]].append(index)
        turns[handle.rank] += 1
    return list(teams.values()) if len(set(owners.values())) == len(owners) else None


def _communicator(team: Sequence[Handle], comm_of: Sequence[int]) -> Communicator:
    team = sorted(team, key=lambda handle: handle.rank)
    first = team[0]
    return Communicator(
        id=first.comm_id or f"{first.pointer}@{first.host}:{first.pid}",
        nranks=first.nranks,
        members=tuple(_member(handle) for handle in team),
        nodes=max(handle.nodes for handle in team),
        local_ranks=max(handle.local_ranks for handle in team),
        coll_channels=max(handle.coll_channels for handle in team),
        p2p_channels=max(handle.p2p_channels for handle in team),
        parent=comm_of[first.parent] if first.parent >= 0 else -1,
        color=first.color,
        key=first.key,
    )


def _member(handle: Handle) -> Member:
    return Member(
        rank=handle.rank,
        host=handle.host,
        pid=handle.pid,
        cuda_dev=handle.dev,
        nvml_dev=handle.nvml_dev,
        bus_id=handle.bus_id,
        pointer=handle.pointer,
        init_ns=handle.init_ns,
    )


def _has_no_id(communicator: Communicator) -> bool:
    return "@" in communicator.id and communicator.members[0].rank >= 0


@dataclass(frozen=True, slots=True)
class World:
    """The largest communicator of a log; comm is -1 where none is the one."""

    comm: int
    size: int
    ranks: dict[Owner, int]


NO_WORLD = World(-1, -1, {})


def world_of(communicators: Sequence[Communicator]) -> World:
    """The largest communicator: its ranks are taken for the job's.

    Several of that size must be of the same processes in the same order, else none is the one.
    """
    named = [i for i, one in enumerate(communicators) if one.members[0].rank >= 0]
    size = max((communicators[i].nranks for i in named), default=-1)
    largest = [i for i in named if communicators[i].nranks == size]
    ranks: dict[Owner, int] = {}
    owners: dict[int, Owner] = {}
    for member in (member for i in largest for member in communicators[i].members):
        owner = (member.host, member.pid, member.cuda_dev)
        rank = member.rank
        if ranks.setdefault(owner, rank) != rank or owners.setdefault(rank, owner) != owner:
            return NO_WORLD
    return World(largest[0], size, ranks) if largest else NO_WORLD


def global_ranks(communicator: Communicator, world: World) -> dict[int, int]:
    """The global rank of each rank of the communicator, as far as the log tells."""
    if communicator.nranks == world.size and world.comm >= 0:
        return {rank: rank for rank in range(world.size)}
    found = {
        member.rank: world.ranks.get((member.host, member.pid, member.cuda_dev), -1)
        for member in communicator.members
    }
    return {rank: told for rank, told in found.items() if rank >= 0 and told >= 0}
