"""Runs tasks on files in this process, in parallel worker processes, or on a cluster."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from msgspec import Struct

from stepsplit.analyzer.errors import DataError
from stepsplit.collectors.safe_io.helper_process import (
    build_helper_command,
    build_helper_environment,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

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
    if isinstance(workers, int):
        indexed: Iterator[tuple[int, Any]] = run_tasks(tasks, workers)
    else:
        indexed = workers.run(tasks)
    for index, result in indexed:
        if receive is not None and not isinstance(result, DataError):
            result = receive(result)
        results[index] = result
        done += tasks[index].size_bytes
        progress(done, total)
    return [results[index] for index in range(len(tasks))]


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

    with _start_workers(n_helpers) as send:
        running: dict[Future[T | DataError], int] = {}
        while todo or running:
            # While many tasks are left, each other worker has one more in its queue.
            while todo and len(running) < (2 * n_helpers if len(todo) > workers else n_helpers):
                index, task = todo.popleft()
                running[send(task)] = index
            # While this process works on a file, the others have theirs.
            own_task = todo.popleft() if todo else None
            if own_task is not None:
                yield own_task[0], own_task[1].run()
            # Without a task of its own it waits for theirs.
            for future in wait(running, 0 if own_task else None, FIRST_COMPLETED).done:
                index = running.pop(future)
                yield index, future.result()


@contextmanager
def _start_workers(number: int) -> Iterator[Callable[[Task[T]], Future[T | DataError]]]:
    """Starts the processes; yields what sends a task to the next idle one.

    They are no pool of multiprocessing: its processes search the current folder, which may be a
    recording, for modules, and run the user's script again.
    """
    from concurrent.futures import ThreadPoolExecutor
    from queue import SimpleQueue

    idle: SimpleQueue[_Worker] = SimpleQueue()

    def run(task: Task[T]) -> T | DataError:
        worker = idle.get()
        try:
            return worker.run(task)
        finally:
            idle.put(worker)

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="stepsplit-"))
        threads = stack.enter_context(ThreadPoolExecutor(number))
        for _ in range(number):
            worker = _Worker(folder)
            stack.callback(worker.stop)
            idle.put(worker)
        # First of all at the end, so that no thread sends another task.
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        yield lambda task: threads.submit(run, task)


_MODULE = "stepsplit.analyzer.readers.worker_process"


class _Worker:
    """Another process that runs tasks, which unpacks into the folder."""

    def __init__(self, folder: str) -> None:
        import subprocess
        from multiprocessing import Pipe

        self._connection, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                build_helper_command(_MODULE, str(number), folder),
                stdin=subprocess.DEVNULL,
                env=build_helper_environment(),
                pass_fds=[number],
            )

    def run(self, task: Task[T]) -> T | DataError:
        """The result of the task, or the error of its file. Raises what it raised there, and
        DataError if the process has died."""
        result: T | DataError
        try:
            self._connection.send(task)
            result, error = self._connection.recv()
        except (EOFError, OSError):
            hint = "name fewer files at once, or read with one worker"
            problem = "a worker process died, possibly out of memory"
            raise DataError(task.where, problem, hint) from None
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        """Ends the process, also in a task: it leaves nothing but files in the folder."""
        self._process.kill()
        self._process.wait()
