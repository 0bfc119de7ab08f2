"""Measurements that a job.toml names win over the closed form."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.work_builders import LLAMA_ON_H100

from stepsplit.analyzer import predict, read_job, read_rates
from stepsplit.analyzer.errors import DataError

SWEEP = """\
# Using devices
{devices}
#       size         count      type   redop    root     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)
    33554432       8388608     float     sum      -1   1000.0   33.55   58.72      0
    67108864      16777216     float     sum      -1   2000.0   33.55   58.72      0
   134217728      33554432     float     sum      -1   4000.0   33.55   58.72      0
# nccl-tests version 2.17.1 all_reduce_perf
"""


def a_run(folder: Path, measured: str = "") -> Path:
    devices = "\n".join(
        f"#  Rank  {i} Group  0 Pid  1 on node1 device  {i} [0x07] NVIDIA H100" for i in range(8)
    )
    (folder / "all_reduce.txt").write_text(SWEEP.format(devices=devices))
    (folder / "job.toml").write_text(LLAMA_ON_H100 + measured)
    return folder / "job.toml"


def test_a_job_without_measurements_has_no_rates(tmp_path: Path) -> None:
    path = a_run(tmp_path)
    rates = read_rates(path, read_job(path).hardware)
    assert (rates.sweeps, rates.tables) == ((), ())


def test_a_measured_sweep_gives_the_time_of_its_own_sizes(tmp_path: Path) -> None:
    path = a_run(tmp_path, 'measured = ["all_reduce.txt"]\n')
    job = read_job(path)
    prediction = predict(job, read_rates(path, job.hardware))
    summed = [
        each
        for each in prediction.communication
        if each.message.op == "all_reduce" and each.message.message_bytes == 67_108_864
    ]
    assert {each.message.phase for each in summed} == {"forward", "backward"}
    assert [each.time.ns / each.message.count for each in summed] == pytest.approx([2e6, 2e6])


def test_a_file_without_measurements_is_rejected_with_a_hint(tmp_path: Path) -> None:
    path = a_run(tmp_path, 'measured = ["job.toml"]\n')
    with pytest.raises(DataError, match=r"job\.toml: contains no sweep .*; use the output of nccl"):
        read_rates(path, read_job(path).hardware)
