"""Work on files, in this process or side by side in others."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stepsplit.analyzer.errors import DataError

LEAST_BYTES = 48 << 20
"""Less than this is read before another process has started."""

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""(bytes done, bytes in all), each time a piece of work is done."""


@dataclass(frozen=True, slots=True)
class Task(Generic[T]):
    """A call that reads a file of this size, or a part of it; another process can make it too."""

    where: str
    size_bytes: int
    function: Callable[..., T]
    arguments: tuple[Any, ...]

    def run(self) -> T | DataError:
        """What the call returns, or what is wrong with the file."""
        try:
            return self.function(*self.arguments)
        except DataError as error:
            return error


def no_progress(done_bytes: int, all_bytes: int) -> None:
    """Nobody watches."""


def run_all(
    tasks: Sequence[Task[T]], workers: int, progress: Progress = no_progress
) -> list[T | DataError]:
    """What each task gave, in their order.

    Up to that many processes share the work where there is enough of it. When the caller is
    interrupted they end at once, and what they had on disk is removed.
    """
    total, done = sum(task.size_bytes for task in tasks), 0
    found: dict[int, T | DataError] = {}
    for index, result in _results(tasks, workers if total >= LEAST_BYTES else 1):
        found[index] = result
        done += tasks[index].size_bytes
        progress(done, total)
    return [found[index] for index in range(len(tasks))]


def _results(tasks: Sequence[Task[T]], workers: int) -> Iterator[tuple[int, T | DataError]]:
    if min(workers, len(tasks)) < 2:
        yield from ((index, task.run()) for index, task in enumerate(tasks))
        return
    with _pool(min(workers, len(tasks))) as pool:
        index_of = {pool.submit(task.run): index for index, task in enumerate(tasks)}
        while index_of:
            for future in wait(index_of, return_when=FIRST_COMPLETED).done:
                index = index_of.pop(future)
                yield index, _result(future, tasks[index].where)


def _result(future: Future[T | DataError], where: str) -> T | DataError:
    try:
        return future.result()
    except BrokenProcessPool:
        mend = "name fewer files at once, or read with one worker"
        raise DataError(where, "a worker process died, perhaps for lack of memory", mend) from None


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes: a fork would copy the threads' locks of a server that reads."""
    others = set(multiprocessing.active_children())
    with tempfile.TemporaryDirectory(prefix="stepsplit-") as folder:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, context, _begin, (folder,))
        try:
            yield pool
        except BaseException:
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(folder: str) -> None:
    """The parent alone answers ctrl-C; what workers unpack lies in its folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tempfile.tempdir = folder
