"""run.json, written by rank 0 from what the ranks have published so far."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from stepsplit.collectors.formats.run_spec import RUN_FILE, RunSpec, merge_groups, write_run_json
from stepsplit.collectors.guard import warn_on_failure
from stepsplit.collectors.job.job_store import EXIT_GUARD
from stepsplit.collectors.job.launcher import read_labels
from stepsplit.collectors.job.process_groups import read_job
from stepsplit.collectors.job.rank_description import (
    RankDescription,
    collect_descriptions,
    describe_rank,
    has_other_ranks,
    publish,
)
from stepsplit.collectors.probes.versions import read_max_connections, read_versions
from stepsplit.collectors.record.user_spec import UserSpec


class RunFile:
    """The run.json of a recording; ranks exchange their descriptions through the job's store."""

    def __init__(
        self, folder: Path, name: str, key: str, user_spec: UserSpec, role: str = ""
    ) -> None:
        self._folder, self._name, self._key, self._stated = folder, name, key, user_spec
        self._role = role
        self._known: tuple[RankDescription, ...] = ()
        self._world_size, self._backend = 1, ""
        self._ranks_written = 0
        self._writing = threading.Lock()

    def describe(self) -> RankDescription:
        """Reads this rank's description, which the run.json of rank 0 begins with."""
        own = describe_rank()
        # At the end of the script there may be no process group any more.
        _, self._world_size, self._backend = read_job()
        self._known = (own,)
        return own

    def publish(self) -> None:
        """Publishes this rank's description to the other ranks."""
        for own in self._known:
            publish(self._key, own)

    def write(self, timeout_s: float) -> None:
        """Writes run.json on rank 0, and again only if more ranks are known since."""
        if not self._is_writer():
            return
        self.collect(timeout_s)
        with self._writing:
            self._write_news()

    def write_first(self) -> None:
        """Writes run.json on rank 0 from what it knows, without a call to the store."""
        # If another thread writes it right now, there is a first run.json anyway.
        if self._is_writer() and self._writing.acquire(blocking=False):
            try:
                self._write_news()
            finally:
                self._writing.release()

    def _write_news(self) -> None:
        if len(self._known) > self._ranks_written:
            write_run_json(self._folder, self._build_spec(self._known))
            self._ranks_written = len(self._known)

    def collect(self, timeout_s: float) -> None:
        """Collects on rank 0 what the other ranks have published, without writing it."""
        if not self._is_writer():
            return
        with self._writing:
            if len(self._known) < self._world_size:
                known, world_size = self._known, self._world_size
                self._known = collect_descriptions(self._key, known, world_size, timeout_s)

    def run_within_step(self, action: Callable[[float], None]) -> None:
        """Runs write or collect without a call to the store, which holds all ranks', in a step."""
        if not self._is_writer() or not has_other_ranks():
            action(0.0)
            return

        def run() -> None:
            with warn_on_failure(0, RUN_FILE), EXIT_GUARD.poll() as may_ask:
                if may_ask:
                    action(0.0)

        threading.Thread(target=run, name="stepsplit-run", daemon=True).start()

    def _is_writer(self) -> bool:
        return bool(self._known) and self._known[0].rank.rank == 0

    def _build_spec(self, descriptions: tuple[RankDescription, ...]) -> RunSpec:
        return RunSpec(
            name=self._name,
            world_size=self._world_size,
            backend=self._backend,
            mesh=self._stated.mesh,
            model=self._stated.model,
            training=self._stated.training,
            ranks=tuple(each.rank for each in descriptions),
            groups=merge_groups(group for each in descriptions for group in each.groups),
            versions=read_versions(),
            hosts=tuple({each.machine.host: each.machine for each in descriptions}.values()),
            max_connections=read_max_connections(),
            role=self._role,
            labels=read_labels(),
        )
