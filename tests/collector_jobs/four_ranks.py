"""python four_ranks.py SCRIPT [ARGUMENT ...]: starts four ranks of it, and waits for all of them.

torch is imported once, before the ranks are forked. Unlike torchrun it leaves the others alone when
a rank ends.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys

import torch.distributed

N_RANKS = 4


def main(command: list[str]) -> None:
    assert torch.distributed.is_available()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(N_RANKS):
        pid = os.fork()
        if not pid:
            run_rank(command, rank, port)
            return
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def run_rank(command: list[str], rank: int, port: int) -> None:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": N_RANKS, "LOCAL_WORLD_SIZE": N_RANKS,
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    os.environ.update({name: str(value) for name, value in own.items()})
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
