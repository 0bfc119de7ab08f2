"""The comparison of cold analyses runs commands in pairs and says what each took."""

from __future__ import annotations

import gzip
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.required import shared_trace

from benchmarks import cold_analysis
from benchmarks.inputs import capture_graph

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "tp2_pp2" / "rank0_trace.json.gz"


@pytest.mark.slow
def test_a_row_compares_pairs_of_whole_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for Perfetto's program, which loads by reading."""
    loader = tmp_path / "trace_processor_shell"
    loader.write_text(f"#!{sys.executable}\nimport sys\nsum(open(sys.argv[3], 'rb').read())\n")
    loader.chmod(loader.stat().st_mode | stat.S_IXUSR)
    trace = tmp_path / "rank0_trace.json"
    trace.write_bytes(gzip.decompress(SAMPLE.read_bytes()))
    arguments = ["--trace-processor", str(loader), "--repeat", "2", str(trace)]
    assert cold_analysis.main([*arguments, "--packed", "--start", str(trace)]) == 0
    _, _, row, _, _, _, packed, _, start, _ = capsys.readouterr().out.splitlines()
    name, _, other, own, ratio, spread, *_ = (cell.strip() for cell in row.strip("|").split("|"))
    assert name == str(trace)
    least, most = map(float, spread.split(" to "))
    assert 1 < least <= float(ratio) <= most
    assert float(own) > float(other) > 0
    # What a small file takes is its start, packed or not.
    by_gz, _, by_zst, *_ = packed.strip("|").split("|")[1:]
    assert 0.5 < float(by_gz) < 2 and 0.5 < float(by_zst) < 2
    assert start.startswith(f"analyze of {trace} above import numpy: ")


def test_a_command_that_fails_is_no_measurement() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        cold_analysis.measure([sys.executable, "-c", "raise SystemExit(3)"])


def test_the_kernels_of_a_step_become_those_of_one_graph() -> None:
    """Of the four traces that are repeated, the one of which no recording is at hand."""
    packed = shared_trace("kineto_tracelens") / "h100__Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz"
    trace = json.loads(gzip.decompress(packed.read_bytes()))
    entries = capture_graph(trace["traceEvents"])
    launch = next(one for one in entries if one["name"] == "cudaGraphLaunch")
    kernels = [one for one in entries if one.get("cat") == "kernel"]
    assert len(kernels) == 1465
    assert {one["args"]["correlation"] for one in kernels} == {launch["args"]["correlation"]}
    assert len({one["args"]["graph node id"] for one in kernels}) == len(kernels)
    assert all(one["ts"] > launch["ts"] + launch["dur"] for one in kernels)
