"""The size of NCCL's log is limited while NCCL writes to it."""

import socket
from pathlib import Path

import pytest

from stepsplit.collectors.probes.nccl_log import build_log_path, truncate_log

LINE = b"host:1:1 [0] NCCL INFO AllReduce: opCount 0\n"


def test_a_log_above_the_limit_keeps_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "host.1.log"
    with path.open("wb", buffering=0) as nccl:
        nccl.write(LINE * 100_000)
        assert truncate_log(path, max_bytes=1 << 20)
        nccl.write(LINE)
        taken = path.stat().st_blocks * 512

    assert taken < 1.1 * (1 << 20)
    assert path.read_bytes().startswith(LINE * 20_000)
    assert truncate_log(path, max_bytes=1 << 20)
    assert path.stat().st_size == 1 << 20


def test_small_and_missing_logs_are_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(LINE)

    assert not truncate_log(path)
    assert not truncate_log(tmp_path / "none")
    assert path.read_bytes() == LINE


def test_only_a_log_per_process_is_truncated() -> None:
    assert build_log_path({}, 7) is None
    assert build_log_path({"NCCL_DEBUG_FILE": "/shared.log"}, 7) is None
    found = build_log_path({"NCCL_DEBUG_FILE": "/nccl/%h.%p.log"}, 7)
    assert found is not None and found.name.endswith(".7.log")


@pytest.mark.parametrize(
    ("host", "file"),
    [
        ("node7", "node7.7.log"),
        ("node7.cluster.example.org", "node7.7.log"),
        ("ip-10-0-0-1.ec2.internal", "ip-10-0-0-1.7.log"),
    ],
)
def test_the_name_of_the_host_ends_at_its_first_dot_as_in_nccl(host: str, file: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: host)

        path = build_log_path({"NCCL_DEBUG_FILE": "/nccl/%h.%p.log"}, 7)

    assert path == Path("/nccl", file)
