"""run.json of a large job: the training thread of rank 0 does not ask the store for each rank."""

import json
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from stepsplit.collectors import profile_run  # noqa: E402
from stepsplit.collectors.formats.run_spec import from_json  # noqa: E402
from stepsplit.collectors.job import job_store, rank_description  # noqa: E402
from stepsplit.collectors.record import active_recording, run_file  # noqa: E402

RANKS = 2_000


class Store:
    """The job's store with what the ranks have published; counts the calls of each thread."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values, self.calls = values, list[tuple[str, str]]()

    def clone(self) -> "Store":
        return self

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: str) -> None:
        self._count("set")
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self._count("check")
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._count("multi_get")
        return [self.values[key] for key in keys]

    def get(self, key: str) -> bytes:
        self._count("get")
        return self.values[key]

    def _count(self, call: str) -> None:
        self.calls.append((threading.current_thread().name, call))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A job of 2,000 ranks, of which this is the first; all others have published theirs."""
    own = rank_description.describe_rank()
    values = {}
    for rank in range(1, RANKS):
        description = replace(own, rank=replace(own.rank, rank=rank))
        key = rank_description._build_store_key(f"{tmp_path.name}@2", rank)
        values[key] = json.dumps(asdict(description)).encode()
    store = Store(values)
    for module in (job_store, rank_description):
        monkeypatch.setattr(module, "get_store", lambda: store)
    for module in (rank_description, run_file, active_recording):
        monkeypatch.setattr(module, "read_job", lambda: (0, RANKS, "nccl"))
    return store


def record(folder: Path) -> None:
    with profile_run(folder, active=1) as run:
        for _ in range(5):
            run.step()
        for thread in threading.enumerate():
            if thread.name == "stepsplit-run":
                thread.join()


def test_the_training_thread_makes_one_call_to_the_store(tmp_path: Path, store: Store) -> None:
    record(tmp_path)

    assert [call for thread, call in store.calls if thread == "MainThread"] == ["set"]
    assert [rank.rank for rank in from_json((tmp_path / "run.json").read_bytes()).ranks] == list(
        range(RANKS)
    )


def test_ranks_are_asked_for_in_batches(tmp_path: Path, store: Store) -> None:
    record(tmp_path)

    # 256 at a time; it was two calls for each rank.
    assert len(store.calls) == 1 + 2 * 8


def test_missing_ranks_are_found_by_halves_and_the_others_are_kept(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active_recording, "LATE_RANKS_TIMEOUT_S", 0.0)
    for rank in (7, 1500):
        del store.values[rank_description._build_store_key(f"{tmp_path.name}@2", rank)]

    record(tmp_path)

    ranks = [rank.rank for rank in from_json((tmp_path / "run.json").read_bytes()).ranks]
    assert ranks == [rank for rank in range(RANKS) if rank not in (7, 1500)]
    assert len(store.calls) < 70
