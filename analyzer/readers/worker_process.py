"""A process that runs tasks of the one that started it: the other end of workers.py.

python -m stepsplit.analyzer.readers.worker_process DESCRIPTOR FOLDER
"""

from __future__ import annotations

import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection


def main(arguments: Sequence[str]) -> None:
    """Runs the tasks that come through the descriptor until it is closed, unpacking into the
    folder, which the other process removes."""
    # Ctrl-C is for the other process, which ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, tempfile.tempdir = int(arguments[0]), arguments[1]
    with Connection(descriptor) as connection, suppress(EOFError, ConnectionError):
        while True:
            task = connection.recv_bytes()
            try:
                result, failure = pickle.loads(task).run(), None
            except Exception as error:  # noqa: BLE001 - raised again in the other process
                error.add_note(f"in a worker process:\n{traceback.format_exc()}")
                result, failure = None, error
            connection.send((result, failure))


if __name__ == "__main__":
    main(sys.argv[1:])
