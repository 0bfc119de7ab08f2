"""What-if replays compared with recordings of the changed run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from cuda_simulator.jobs import Job
from cuda_simulator.simulate import simulate
from support.builders import GpuTrace
from support.required import shared_repro
from support.samples import SAMPLES, read_golden

from stepsplit.analyzer import UsageError, what_if
from stepsplit.analyzer.diagnose.what_if import parse_change
from stepsplit.dashboard import cli

REPLAY_OFF = 0.05
"""How far a replay of a recorded run may be from the run that was then recorded."""


def mean_step_ns(name: str) -> float:
    return mean(row.step_ns for row in read_golden(name).steps if row.kind == "full")


def test_a_change_is_written_as_it_is_read() -> None:
    words = ["even", "even-ranks", "even-stages", "no-slow-ranks", "no-idle", "overlap"]
    words += ["link:tp=2", "microbatches=8", "schedule=zb-h1", "replicas=2"]
    found = what_if(SAMPLES / "tp2_pp2_dp2", changes=words)
    assert [str(row.change) for row in found.changes] == words


@pytest.mark.parametrize(
    ("read", "written"),
    [("2", "2"), ("1.", "1"), (".5", "0.5"), ("0.001", "0.001"), ("1000", "1000"),
     ("123.456789", "123.456789"), ("999.999999999", "999.999999999"),
     ("0.0010000001", "0.0010000001"), (str(1 / 3), str(1 / 3))],
)  # fmt: skip
def test_a_factor_of_a_link_is_written_as_it_is_read(read: str, written: str) -> None:
    """With all digits and without an exponent."""
    change = parse_change(f"link:tp={read}")
    assert (change.times, str(change)) == (float(read), f"link:tp={written}")
    assert parse_change(str(change)) == change


@pytest.mark.parametrize("times", ["0.0009", "1000.5", "1000000", "0.000000001", "999999999"])
def test_a_factor_that_no_link_has_is_refused(times: str, tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 10).kernel("gemm", 0, 10)
    with pytest.raises(UsageError) as refused:
        what_if(trace.write(tmp_path), changes=[f"link:tp={times}"])
    expected = f"'link:tp={times}': the factor of a link is from 0.001 to 1,000 times its speed"
    assert str(refused.value) == expected


@pytest.mark.parametrize(
    "words",
    [
        "", "link:tp", "link:tp=0", "link:tp=.", "link:tp=1.2.3", f"link:tp={'9' * 400}",
        "microbatches=0", f"microbatches={'9' * 5_000}", "microbatches=٣", "faster",
    ],
)  # fmt: skip
def test_other_words_are_refused_and_shown_how(words: str, tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 10).kernel("gemm", 0, 10)
    with pytest.raises(UsageError, match="microbatches=8"):
        what_if(trace.write(tmp_path), changes=[words])


def test_the_replay_of_more_microbatches_is_the_run_that_was_recorded_with_them() -> None:
    """Two recordings of one training, of 2 and of 8 microbatches a step: each foretells a
    microbatch of the other."""
    two, eight = mean_step_ns("pp2_m2") / 2, mean_step_ns("pp2_m8") / 8
    more = what_if(SAMPLES / "pp2_m2", changes=["microbatches=8"]).changes[0].step_ns / 2
    fewer = what_if(SAMPLES / "pp2_m8", changes=["microbatches=2"]).changes[0].step_ns / 8
    assert more == pytest.approx(eight, rel=REPLAY_OFF)
    assert fewer == pytest.approx(two, rel=REPLAY_OFF)
    assert abs(two / eight - 1) > 2 * REPLAY_OFF, "the two recordings are too similar for this test"


@pytest.mark.parametrize("count", [8, 24])
def test_more_microbatches_where_forwards_are_not_annotated(count: int, tmp_path: Path) -> None:
    """Against a second simulator, which runs the job with as many microbatches; a step of the same
    work then has 12 of them, or the time of that share of it."""
    job = Job("pp3_dp2", pp=3, dp=2, layers=1, microbatches=12, whole_kernels=True)
    simulate(job).write(tmp_path)
    truth_ns = simulate(replace(job, microbatches=count)).step_ns * 12 / count
    [found] = what_if(tmp_path, changes=[f"microbatches={count}"]).changes
    assert found.step_ns == pytest.approx(truth_ns, rel=0.01)


def test_the_pace_of_gpipe_is_that_of_its_forwards_and_backwards(tmp_path: Path) -> None:
    """Three microbatches on two stages: forwards of 10, then backwards of 20. Each further one
    takes 30; six of the same size are twice the work."""
    stages = [("0", "mesh_pp", [0, 1])]
    first, last = (GpuTrace(rank, 2, groups=stages).step(1, 0, 120) for rank in (0, 1))
    for i in range(3):
        first.kernel("forward", 10 * i, 10 * i + 10, launched=i)
        first.message("send", 1, 10 * i + 10, 10 * i + 11, launched=i)
        last.message("recv", 0, 10 * i + 10, 10 * i + 11, launched=i)
        last.kernel("forward", 10 * i + 11, 10 * i + 20, launched=i)
    for i in range(3):
        last.kernel("backward", 40 + 20 * i, 60 + 20 * i, launched=4 + i)
        last.message("send", 0, 60 + 20 * i, 61 + 20 * i, launched=4 + i)
        first.message("recv", 1, 60 + 20 * i, 61 + 20 * i, launched=4 + i)
        first.kernel("backward", 61 + 20 * i, 80 + 20 * i, launched=4 + i)
    found = what_if(first.write(tmp_path), last.write(tmp_path), changes=["microbatches=6"])
    step_ns = found.step_ns
    assert found.changes[0].step_ns == (step_ns + 3 * 30_000) / 2


def test_a_group_of_several_axes_is_on_the_links_of_the_outermost(tmp_path: Path) -> None:
    """Gradients are reduced over dp and cp: a faster cp helps the gather of keys alone."""
    groups = [("0", "mesh_cp", [0, 1]), ("1", "mesh_cp", [2, 3]), ("2", "", [0, 1, 2, 3])]
    traces = []
    for rank in range(4):
        trace = GpuTrace(rank, 4, groups=groups).step(1, 0, 70)
        trace.collective("AllGather", "all_gather", 0, 10, group=str(rank // 2))
        trace.kernel("gemm", 10, 40).all_reduce(40, 60, group="2").kernel("adam", 60, 70)
        traces.append(trace.write(tmp_path))
    mesh = [{"axis": "dp_replicate", "size": 2}, {"axis": "cp", "size": 2}]
    run = {
        "schema": "stepsplit.run/1",
        "name": "r",
        "world_size": 4,
        "backend": "nccl",
        "mesh": mesh,
    }
    (tmp_path / "run.json").write_text(json.dumps(run))
    found = what_if(tmp_path, changes=["link:cp=2", "link:dp_replicate=2", "link:dp=2"])
    assert [row.gain_ns for row in found.changes] == [5_000, 10_000, 10_000]
    assert str(found.changes[2].change) == "link:dp_replicate=2"


def test_twice_the_replicas_send_a_little_more(tmp_path: Path) -> None:
    """Of 2 ranks each sends half the bytes, of 4 three quarters: 10 become 15."""
    groups = [("0", "mesh_dp_replicate", [0, 1])]
    traces = []
    for rank in (0, 1):
        trace = GpuTrace(rank, 2, groups=groups).step(1, 0, 60)
        traces.append(trace.kernel("gemm", 0, 40).all_reduce(40, 50).kernel("adam", 50, 60))
    found = what_if(*(trace.write(tmp_path) for trace in traces), changes=["replicas=2"])
    assert [row.gain_ns for row in found.changes] == [-5_000]


@pytest.mark.parametrize(
    ("count", "gain_us"),
    [(1, -4), (2, 0)],
)
def test_merged_buckets_save_latency_and_wait_for_their_last_part(
    count: int, gain_us: int, tmp_path: Path
) -> None:
    """Buckets of 1, 3 and 3 k floats take 4, 6 and 6: 3 of it is latency. In one bucket all take 10
    after the backward, not 6; of two buckets the second is the third."""
    traces = []
    for rank in (0, 1):
        trace = GpuTrace(rank, 2, groups=[("0", "mesh_dp_replicate", [0, 1])]).step(1, 0, 56)
        trace.kernel("backward", 0, 40, launched=1)
        trace.all_reduce(10, 14, nelems=1000, launched=2, stream=20)
        trace.all_reduce(20, 26, nelems=3000, launched=3, stream=20)
        trace.all_reduce(40, 46, nelems=3000, launched=4, stream=20)
        traces.append(trace.kernel("adam", 46, 56, launched=5).write(tmp_path))
    found = what_if(*traces, changes=[f"buckets={count}"])
    assert [(str(row.change), row.gain_ns) for row in found.changes] == [
        (f"buckets={count}", 1000 * gain_us)
    ]


def test_buckets_can_only_be_merged(tmp_path: Path) -> None:
    trace = GpuTrace(0, 2, groups=[("0", "mesh_dp_replicate", [0, 1])]).step(1, 0, 56)
    trace.kernel("backward", 0, 40).all_reduce(40, 46)
    with pytest.raises(UsageError, match="at most 1 gradient reductions per step"):
        what_if(trace.write(tmp_path), changes=["buckets=1"])


def test_stages_made_even_share_their_work(tmp_path: Path) -> None:
    """Rank 1 computes 60 and rank 0 20 before they meet; even, both have 40."""
    traces = []
    for rank, busy in ((0, 20), (1, 60)):
        trace = GpuTrace(rank, 2, groups=[("0", "mesh_pp", [0, 1])]).step(1, 0, busy)
        traces.append(trace.kernel("gemm", 0, busy).all_reduce(busy, 70))
    found = what_if(*(trace.write(tmp_path) for trace in traces), changes=["even-stages"])
    assert found.step_ns == 40_000, "a step ends with its compute"
    assert [row.gain_ns for row in found.changes] == [0]


def test_a_link_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="no communication on 'cp'; it has pp"):
        what_if(SAMPLES / "pp2_m2", changes=["link:cp=2"])


def test_without_words_all_usual_changes_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["what-if", str(SAMPLES / "tp2_pp2")]) == 0
    shown = capsys.readouterr().out
    assert "link:all=2" in shown
    assert "slowdown by stragglers and load imbalance" in shown
    assert "…" not in shown


def test_json_on_standard_output_is_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["what-if", str(SAMPLES / "pp2_m2"), "--change", "schedule=zb-h1", "--json", "-"]
    assert cli.run(words) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "stepsplit.what_if/1"
    assert [row["change"] for row in body["changes"]] == ["schedule=zb-h1"]
    assert body["changes"][0]["step_ns"] + body["changes"][0]["gain_ns"] == body["step_ns"]


def test_a_schedule_needs_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["what-if", str(SAMPLES / "dp4"), "--change", "schedule=gpipe"]) == 2
    assert "no pipeline detected" in capsys.readouterr().err


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (SAMPLES.parent / "docs" / "causes.md").read_text()
    command = next(line for line in page.splitlines() if line.startswith("stepsplit what-if"))
    words = command.replace("sample_traces", str(SAMPLES)).split()[1:]
    assert cli.run(words) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert f"```\n{printed}\n```" in page


def test_more_microbatches_of_a_zero_bubble_schedule_go_at_its_usual_pace() -> None:
    """The last backwards follow each other faster. The truth is a step of twice as many, halved."""
    folder = shared_repro("causes3/zb_what_if_microbatches")
    truth = json.loads((folder / "truth.json").read_text())
    (said,) = what_if(folder / "with", changes=["microbatches=16"]).changes
    assert said.step_ns / 1e6 == pytest.approx(truth["step_without_ms"] * 8 / 16, rel=0.02)
