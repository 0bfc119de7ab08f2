"""How much memory a large upload costs the server: python tests/benchmarks/uploads.py [GB]

Sends a file through the real server, whole by PUT and in parts by PATCH, and prints by how much the
server's processes grew at their peak. Ends with 1 where that is 100 MB or more.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from support.dashboard_processes import Dashboard, open_store, running_dashboard

from stepsplit.dashboard.connection import Connection
from stepsplit.dashboard.upload import Sender
from stepsplit.dashboard.upload_files import FileToSend

TARGET_BYTES = 100_000_000
_BLOCK = os.urandom(1 << 20)


@dataclass(frozen=True)
class Cost:
    """What one upload took: seconds, and bytes by which the server grew."""

    way: str
    seconds: float
    grown_bytes: int


def main() -> int:
    """0 where every way is below the target."""
    size = int(float(sys.argv[1] if len(sys.argv) > 1 else "2") * 1e9)
    with tempfile.TemporaryDirectory() as folder:
        costs = uploaded(Path(folder), size)
    for cost in costs:
        rate = size / cost.seconds / 1e6
        grown = cost.grown_bytes / 1e6
        print(f"{cost.way:5}  {size / 1e9:g} GB  {cost.seconds:.1f} s  {rate:.0f} MB/s  "  # noqa: T201
              f"server grew by {grown:.1f} MB")  # fmt: skip
    return int(any(cost.grown_bytes >= TARGET_BYTES for cost in costs))


def uploaded(folder: Path, size_bytes: int) -> list[Cost]:
    """Uploads a file of about that size each way, and checks that it arrived."""
    trace = folder / "rank0_trace.json"
    with trace.open("wb") as file:
        for _ in range(size_bytes >> 20):
            file.write(_BLOCK)
    with running_dashboard(folder, "--workers", "0") as dashboard:
        _settle(dashboard)
        return [
            _measured("PUT", dashboard, lambda: _put(folder, dashboard, trace)),
            _measured("PATCH", dashboard, lambda: _patch(folder, dashboard, trace)),
        ]


def _measured(way: str, dashboard: Dashboard, upload: Callable[[], None]) -> Cost:
    before, begun = _memory(dashboard, "VmRSS"), time.monotonic()
    upload()
    seconds = time.monotonic() - begun
    return Cost(way, seconds, _memory(dashboard, "VmHWM") - before)


def _put(folder: Path, dashboard: Dashboard, trace: Path) -> None:
    parts, size = urlsplit(dashboard.url), trace.stat().st_size
    run_id = _new_run(dashboard)
    link = http.client.HTTPConnection(str(parts.hostname), parts.port)
    with trace.open("rb") as file:
        place = f"/api/v1/runs/{run_id}/files/{trace.name}"
        link.request("PUT", place, file, {"Content-Length": str(size)})
        assert link.getresponse().status == 201
    link.close()
    _check(folder, run_id, trace)


def _patch(folder: Path, dashboard: Dashboard, trace: Path) -> None:
    run_id, connection = _new_run(dashboard), Connection(dashboard.url, None)
    Sender(connection).send(run_id, FileToSend(trace, trace.name, trace.stat().st_size))
    connection.close()
    _check(folder, run_id, trace)


def _new_run(dashboard: Dashboard) -> str:
    connection = Connection(dashboard.url, None)
    run_id = Sender(connection).create("benchmark", {})
    connection.close()
    return run_id


def _check(folder: Path, run_id: str, trace: Path) -> None:
    with open_store(folder) as store:
        kept = store.find_folder(run_id) / "input" / trace.name
        assert _sha256(kept) == _sha256(trace)
        kept.unlink()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _settle(dashboard: Dashboard) -> None:
    """Waits until every process has loaded what it needs."""
    before = 0
    while (now := _memory(dashboard, "VmRSS")) != before:
        before = now
        time.sleep(1.0)


def _memory(dashboard: Dashboard, field: str) -> int:
    """Bytes of all server processes together."""
    return sum(_of_process(pid, field) for pid in dashboard.server())


def _of_process(pid: int, field: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


if __name__ == "__main__":
    sys.exit(main())
