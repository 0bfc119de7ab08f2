"""Runs a job's ranks on one GPU: one_gpu.py RANKS SCRIPT [ARGUMENT ...]

NCCL refuses two ranks of one host on one GPU; here each rank calls its host by a name of its own.
Their kernels run at the same time if CUDA's MPS daemon runs (mps.py), else by turns.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

LONGEST_S = 240


def main(ranks: int, *command: str) -> int:
    """The highest status of the ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen([sys.executable, *command], env=build_environment(rank, ranks, port))
        for rank in range(ranks)
    ]
    try:
        return max(abs(process.wait(LONGEST_S)) for process in processes)
    finally:
        for process in processes:
            process.kill()


def build_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """As torchrun gives it to the only rank of a host."""
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_HOSTID": f"host{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
