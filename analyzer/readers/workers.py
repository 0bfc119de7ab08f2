"""Runs tasks on files in this process, in parallel worker processes, or on a cluster."""

from __future__ import annotations

import signal
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from msgspec import Struct

from stepsplit.analyzer.errors import DataError

if TYPE_CHECKING:
    from concurrent.futures import Future, ProcessPoolExecutor

LEAST_BYTES = 48 << 20
"""Below this size, reading in one process is faster than starting another."""

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total) after each task."""


class Task(Struct, Generic[T], frozen=True):
    """A call that reads a file or a part of it, of this size; can run in another process."""

    where: str
    size_bytes: int
    function: Callable[..., T]
    arguments: tuple[Any, ...]

    def run(self) -> T | DataError:
        """The result of the call, or the error of the file."""
        try:
            return self.function(*self.arguments)
        except DataError as error:
            return error


def ignore_progress(done_bytes: int, all_bytes: int) -> None:
    """The default: ignores progress."""


class Cluster(Protocol):
    """Workers that may be on other machines, with this many threads; they read the same paths."""

    @property
    def worker_count(self) -> int: ...

    def run(self, tasks: Sequence[Task[T]]) -> Iterator[tuple[int, T | DataError]]:
        """Yields each task's index and result."""


Workers = int | Cluster
"""The most processes on this machine, or a cluster."""


def count_workers(workers: Workers) -> int:
    """How many tasks can run at the same time."""
    return workers if isinstance(workers, int) else workers.worker_count


def run_all(
    tasks: Sequence[Task[T]],
    workers: Workers,
    progress: Progress = ignore_progress,
    receive: Callable[[T], T] | None = None,
) -> list[T | DataError]:
    """Runs all tasks and returns their results in order, each as receive returns it.

    Uses up to `workers` processes, including this one, if there is enough work, or the cluster.
    When the caller is interrupted, the other processes are terminated and their temporary files
    removed.
    """
    total, done = sum(task.size_bytes for task in tasks), 0
    results: dict[int, T | DataError] = {}
    if isinstance(workers, int) and total < LEAST_BYTES:
        workers = 1
    for index, result in _yield_results(tasks, workers):
        if receive is not None and not isinstance(result, DataError):
            result = receive(result)
        results[index] = result
        done += tasks[index].size_bytes
        progress(done, total)
    return [results[index] for index in range(len(tasks))]


def _yield_results(
    tasks: Sequence[Task[T]], workers: Workers
) -> Iterator[tuple[int, T | DataError]]:
    if isinstance(workers, int):
        yield from run_tasks(tasks, workers)
    else:
        yield from workers.run(tasks)


def run_tasks(
    tasks: Sequence[Task[T]], workers: int
) -> Generator[tuple[int, T | DataError], None, None]:
    """Yields each task's index and result. The caller works too, as one of the workers; if it
    closes the generator, the others are terminated."""
    todo = deque(enumerate(tasks))
    n_helpers = min(workers, len(tasks)) - 1
    if n_helpers < 1:
        yield from ((index, task.run()) for index, task in todo)
        return
    # Imported here, as in the functions below, because small recordings need no other process.
    from concurrent.futures import FIRST_COMPLETED, wait

    with _start_pool(n_helpers) as pool:
        running: dict[Future[T | DataError], int] = {}
        while todo or running:
            # While many tasks are left, each other worker has one more in its queue.
            while todo and len(running) < (2 * n_helpers if len(todo) > workers else n_helpers):
                index, task = todo.popleft()
                running[_send_task(pool, task)] = index
            own_task = todo.popleft() if todo else None
            if own_task is not None:
                yield own_task[0], own_task[1].run()
            for future in wait(running, 0 if own_task else None, FIRST_COMPLETED).done:
                index = running.pop(future)
                yield index, _await_result(future, tasks[index].where)


def _send_task(pool: ProcessPoolExecutor, task: Task[T]) -> Future[T | DataError]:
    from concurrent.futures import BrokenExecutor

    try:
        return pool.submit(task.run)
    except BrokenExecutor:
        raise _make_worker_error(task.where) from None


def _await_result(future: Future[T | DataError], where: str) -> T | DataError:
    from concurrent.futures import BrokenExecutor

    try:
        return future.result()
    except BrokenExecutor:
        raise _make_worker_error(where) from None


def _make_worker_error(where: str) -> DataError:
    hint = "name fewer files at once, or read with one worker"
    return DataError(where, "a worker process died, possibly out of memory", hint)


@contextmanager
def _start_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Spawned processes: a fork would copy the locks of other threads of a server."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    other_children = set(multiprocessing.active_children())
    with tempfile.TemporaryDirectory(prefix="stepsplit-") as folder:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, context, _init_worker, (folder,))
        try:
            yield pool
        except BaseException:
            for worker in set(multiprocessing.active_children()) - other_children:
                worker.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _init_worker(folder: str) -> None:
    """Leaves Ctrl-C to the parent process; workers unpack into its temporary folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tempfile.tempdir = folder
