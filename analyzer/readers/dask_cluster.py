"""Runs tasks on the workers of a Dask scheduler, which may be on other machines.

A scheduler and its workers run the code that they are sent, and what they return is unpickled
here: only addresses on this machine, or with TLS in both directions, are accepted. The results are
records of arrays, as between processes of one machine; the workers do not write to the event store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from msgspec import Struct

from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.readers.workers import Task

if TYPE_CHECKING:
    from distributed import Client

T = TypeVar("T")

TIMEOUT_S = 30
"""How long the scheduler may take to answer, and then the first worker to be there."""

_QUEUED_A_THREAD = 2
"""Tasks that run or wait per thread of a worker: so many results are in memory at most."""


class DaskCluster(Struct, frozen=True):
    """The workers of a scheduler, connected to; worker_count is that of their threads."""

    address: str
    worker_count: int
    client: Client

    def run(self, tasks: Sequence[Task[T]]) -> Iterator[tuple[int, T | DataError]]:
        """Yields each task's index and result. The tasks of a worker that is lost run again on the
        others. Raises DataError for a task that was lost with several workers."""
        from distributed import as_completed

        todo = iter(enumerate(tasks))
        running: dict[str, int] = {}
        completed = as_completed(loop=self.client.loop)

        def submit_next() -> None:
            for index, task in todo:
                future = self.client.submit(task.run, pure=False)
                running[future.key] = index
                completed.add(future)
                return

        # Each result that comes back sends the next task.
        for _ in range(_QUEUED_A_THREAD * self.worker_count):
            submit_next()
        for future in completed:
            index = running.pop(future.key)
            yield index, _gather(tasks[index].where, future.result)
            future.release()
            submit_next()


@contextmanager
def connect(address: str) -> Iterator[DaskCluster]:
    """Connects to a scheduler such as tls://10.0.0.1:8786, with the certificates that Dask is
    configured with. Raises UsageError if the address is not safe, or no scheduler answers."""
    check_address(address)
    try:
        from distributed import Client
    except ImportError:
        hint = "install it with: pip install 'stepsplit[scale]'"
        raise UsageError(f"a scheduler needs distributed; {hint}") from None
    try:
        client = Client(address, timeout=TIMEOUT_S, set_as_default=False)
    except (OSError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(
            f"{address}: no Dask scheduler answers ({reason}); check the address, and with tls://"
            " the certificates in Dask's configuration"
        ) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=TIMEOUT_S)
        except OSError:  # TimeoutError is one
            hint = "start one with: dask worker"
            raise UsageError(f"{address}: the scheduler has no worker; {hint}") from None
        yield DaskCluster(address, max(sum(client.nthreads().values()), 1), client)


def check_address(address: str) -> None:
    """Raises UsageError unless the scheduler is on this machine or speaks TLS."""
    try:
        parts = urlsplit(address)
        host, has_port = parts.hostname or "", parts.port is not None
    except ValueError:
        host, has_port = "", False
    if not host or not has_port or parts.scheme not in ("tcp", "tls"):
        hint = "write tls://HOST:PORT, or tcp://127.0.0.1:PORT"
        raise UsageError(f"{address!r} is not the address of a scheduler; {hint}")
    # By its address or the one name that is always this machine: others are resolved by whoever
    # answers for names.
    try:
        is_here = ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    if parts.scheme == "tcp" and not is_here:
        raise UsageError(
            f"{address}: a scheduler runs the code it is sent, so that one on another machine needs"
            " TLS; write tls://HOST:PORT, or tunnel the port and write tcp://127.0.0.1:PORT"
        )


def _gather(where: str, take: Callable[[], Any]) -> Any:
    """The result of a task; what goes wrong on a worker, other than with its file, is one line."""
    from distributed import KilledWorker
    from distributed.client import FutureCancelledError

    try:
        return take()
    except KilledWorker:
        hint = "give the workers more memory, or leave the file out"
        raise DataError(where, "its worker died each time, possibly out of memory", hint) from None
    except (FutureCancelledError, OSError) as error:
        hint = "start it again"
        raise DataError(where, f"the Dask scheduler was lost ({error})", hint) from None
    except ImportError as error:
        hint = "install the same stepsplit there as here"
        raise DataError(where, f"a Dask worker cannot read it ({error})", hint) from None
