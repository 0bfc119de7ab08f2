"""NCCL's log stays below a size while NCCL writes on."""

from pathlib import Path

from stepsplit.collectors.nccl import cut, log_path

LINE = b"host:1:1 [0] NCCL INFO AllReduce: opCount 0\n"


def test_a_log_that_has_grown_too_large_keeps_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "host.1.log"
    with path.open("wb", buffering=0) as nccl:
        nccl.write(LINE * 100_000)
        assert cut(path, most_bytes=1 << 20)
        nccl.write(LINE)
        taken = path.stat().st_blocks * 512

    assert taken < 1.1 * (1 << 20)
    assert path.read_bytes().startswith(LINE * 20_000)
    assert cut(path, most_bytes=1 << 20)
    assert path.stat().st_size == 1 << 20


def test_a_small_log_and_none_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(LINE)

    assert not cut(path)
    assert not cut(tmp_path / "none")
    assert path.read_bytes() == LINE


def test_only_a_log_of_its_own_is_a_processes_to_cut() -> None:
    assert log_path({}, 7) is None
    assert log_path({"NCCL_DEBUG_FILE": "/shared.log"}, 7) is None
    found = log_path({"NCCL_DEBUG_FILE": "/nccl/%h.%p.log"}, 7)
    assert found is not None and found.name.endswith(".7.log")
