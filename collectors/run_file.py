"""run.json as rank 0 of a running job writes it: of what the ranks have told so far."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stepsplit.collectors import presence
from stepsplit.collectors.presence import Presence
from stepsplit.collectors.run_spec import (
    Mesh,
    ModelSpec,
    RunSpec,
    Training,
    merged_groups,
    write_run_json,
)


@dataclass(frozen=True, slots=True)
class Stated:
    """What only the user can tell of a run; None is unknown."""

    mesh: Mesh | None = None
    model: ModelSpec | None = None
    training: Training | None = None


class RunFile:
    """The run.json of a recording. Ranks find each other under the key in the job's store."""

    def __init__(self, folder: Path, name: str, key: str, stated: Stated) -> None:
        self._folder, self._name, self._key, self._stated = folder, name, key, stated
        self._told: Presence | None = None
        self._ranks_written = 0

    def publish(self) -> Presence:
        """Tells the other ranks of this one."""
        self._told = presence.presence()
        presence.publish(self._key, self._told)
        return self._told

    def write(self, timeout_s: float) -> None:
        """On rank 0 only, and again only where more ranks have become known."""
        rank, world_size, backend = presence.job()
        if rank != 0 or self._told is None or self._ranks_written == world_size:
            return
        told = presence.collect(self._key, self._told, world_size, timeout_s)
        if len(told) > self._ranks_written:
            write_run_json(self._folder, self._spec(told, world_size, backend))
            self._ranks_written = len(told)

    def _spec(self, told: tuple[Presence, ...], world_size: int, backend: str) -> RunSpec:
        return RunSpec(
            name=self._name,
            world_size=world_size,
            backend=backend,
            mesh=self._stated.mesh,
            model=self._stated.model,
            training=self._stated.training,
            ranks=tuple(each.rank for each in told),
            groups=merged_groups(group for each in told for group in each.groups),
            versions=presence.versions(),
            hosts=tuple({each.machine.host: each.machine for each in told}.values()),
        )
