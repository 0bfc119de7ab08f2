"""What a gate said of the runs, as the list of runs shows it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import delete, insert

from stepsplit.dashboard.store.database import Database
from stepsplit.dashboard.store.schema import VERDICTS
from stepsplit.dashboard.store.text import plain


@dataclass(frozen=True, slots=True)
class VerdictRow:
    """The last answer to a run, "pass", "regressed" or "inconclusive", with its headline."""

    answer: str
    words: str


class Verdicts:
    """The last verdict of each run that was judged."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, run_id: str, answer: str, words: str) -> None:
        """Keeps the answer, in place of an earlier one."""
        row = {"run_id": run_id, "answer": answer, "words": plain(words, 500)}
        with self._database.writing() as connection:
            connection.execute(delete(VERDICTS).where(VERDICTS.c.run_id == run_id))
            connection.execute(insert(VERDICTS), {**row, "judged_unix_ns": time.time_ns()})
