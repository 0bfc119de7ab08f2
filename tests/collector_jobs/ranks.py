"""python ranks.py SCRIPT [ARGUMENT ...]: starts two ranks of it, as a launcher does.

Says what each has said, and with which status it ended; ends with the first that is not 0.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def main(command: list[str]) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, *command], env=_environment(rank, port), stdout=subprocess.PIPE
        )
        for rank in (0, 1)
    ]
    said = [rank.communicate()[0].decode() for rank in ranks]
    statuses = [rank.returncode for rank in ranks]
    sys.stdout.write(f"{''.join(said)}statuses {statuses}\n")
    return next((128 - status if status < 0 else status for status in statuses if status), 0)


def _environment(rank: int, port: int) -> dict[str, str]:
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return os.environ | {name: str(value) for name, value in own.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
