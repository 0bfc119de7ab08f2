"""What the ranks of a test tell each other: through the job's store, without a collective."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import msgspec

PATIENCE_S, POLL_S = 300.0, 0.05
"""So long a rank waits for another, which may still pack its files."""
_NUMBERS = count()
"""Ranks run the same tests in the same order, so that they number alike what they tell."""


class Outcome(msgspec.Struct, frozen=True):
    """What a test's runs come to: the verdict's answer, "updated" for a new baseline, or "error";
    in words."""

    answer: str
    words: str


class Ranks:
    """The ranks of the job that the test is; one rank alone where there is no job."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return int(os.environ.get("RANK", "0")) == 0

    def folder(self, own: Path) -> Path:
        """Rank 0's folder, for all to record into."""
        told = self._from_first(str(own))
        return own if told is None else Path(told)

    def written(self) -> None:
        """Every rank has written its files, as rank 0 knows when this returns."""
        from stepsplit.collectors import job_info

        rank, world_size, backend = job_info.job()
        number = next(_NUMBERS)
        if backend == "none":
            return
        if not self.first:
            job_info.tell(f"comm_budget/{number}/{rank}", "written")
            return
        for other in range(1, world_size):
            job_info.heard(f"comm_budget/{number}/{other}", PATIENCE_S, POLL_S)

    def outcome(self, own: Outcome | None) -> Outcome:
        """What rank 0 says; where there is no job to hear it in, the others leave it to rank 0."""
        from stepsplit.collectors import job_info

        told = self._from_first(None if own is None else msgspec.json.encode(own).decode())
        if told is not None:
            return msgspec.json.decode(told, type=Outcome)
        if job_info.job()[2] == "none":
            return Outcome("pass", "rank 0 judges")
        return Outcome("error", f"rank 0 said nothing within {PATIENCE_S:.0f} s")

    def _from_first(self, own: str | None) -> str | None:
        """Rank 0's word; None where it gave none in time, or there is no job to hear it."""
        from stepsplit.collectors import job_info

        number = next(_NUMBERS)
        if job_info.job()[2] == "none":
            return own if self.first else None
        if self.first and own is not None:
            job_info.tell(f"comm_budget/{number}", own)
            return own
        return job_info.heard(f"comm_budget/{number}", PATIENCE_S, POLL_S)
