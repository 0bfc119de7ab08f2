"""A job of several roles: ranks that have the same numbers, on one clock, in RL steps."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec import structs
from support.builders import BASE_NS, GpuTrace
from support.role_builders import STEPS, Job, make_one_group, make_rollouts, make_trainer

from stepsplit.analyzer import DataError, analyze
from stepsplit.analyzer.analysis import RoleAnalysis, examine_roles_or_run
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.report.roles import RoleJob
from stepsplit.dashboard.commands.analyze import analyze_command


@pytest.fixture
def programs(tmp_path: Path) -> Job:
    """Rollouts and a trainer that are programs of their own: both have a rank 0."""
    job = Job(tmp_path / "exp1")
    job.add("rollout", 2, *make_rollouts())
    job.add("trainer", 1, make_trainer())
    return job


def list_parts(job: RoleJob) -> dict[str, tuple[int, ...]]:
    """The µs of window, compute, transfer, wait, copy, idle and what is not recorded."""
    found = {
        f"{role.name}/{rank}": tuple(ns // 1000 for ns in structs.astuple(time))
        for role in job.roles
        for rank, time in zip(role.ranks, role.rank_times, strict=True)
    }
    return found


def test_ranks_of_two_programs_are_compared_on_one_clock(programs: Job) -> None:
    job = programs.examine().job
    assert job.run == "exp1"
    assert job.step_role == "trainer"
    assert [(step.step, step.step_ns, step.is_counted) for step in job.steps] == [
        (1, 100_000, True),
        (2, 100_000, True),
        (3, 100_000, True),
    ]
    assert list_parts(job) == {
        "rollout/0": (100, 31, 0, 0, 0, 69, 0),
        "rollout/1": (100, 81, 0, 0, 0, 19, 0),
        "trainer/0": (100, 20, 0, 0, 0, 80, 0),
    }
    assert [role.program for role in job.roles] == [0, 1]
    assert job.waits == ()
    (lack,) = job.lacks
    assert "(rollout; trainer)" in lack
    assert "compared by the clock, not by their calls" in lack


def test_each_role_has_its_own_report(programs: Job) -> None:
    analyses = programs.examine().analyses
    assert {role: one.report.run.ranks for role, one in analyses.items()} == {
        "rollout": (0, 1),
        "trainer": (0,),
    }
    alone = analyze(programs.folder / "rollout")
    assert analyses["rollout"].report == alone


def test_parts_add_up_to_each_step_on_every_rank(programs: Job) -> None:
    for row in programs.examine().job.rows:
        window_ns, *parts = structs.astuple(row.time)
        assert sum(parts) == window_ns


def test_clocks_of_programs_are_those_of_their_hosts(tmp_path: Path) -> None:
    """The trainer's recording begins 40 µs later by the clock, and lies so in the RL step."""
    job = Job(tmp_path / "exp1")
    job.add("rollout", 2, *make_rollouts())
    job.add("trainer", 1, make_trainer(base_ns=BASE_NS + 40_000, host="host1"))
    found = job.examine().job
    assert list_parts(found) == {
        # From 140: 60 of its step, in which the first one computes for no µs, and the last for one.
        "rollout/0": (100, 31, 0, 0, 0, 69, 0),
        "rollout/1": (100, 81, 0, 0, 0, 19, 0),
        "trainer/0": (100, 20, 0, 0, 0, 80, 0),
    }
    # The rollouts have no recording of the last 40 µs: the third step is not in the means.
    assert [step.is_counted for step in found.steps] == [True, True, False]
    assert [row.time.unrecorded_ns for row in found.rows if row.step == 3] == [40_000, 40_000, 0]
    assert "clocks of the hosts differ (host0, host1)" in found.lacks[1]


def test_calls_of_roles_in_one_process_group_are_matched(tmp_path: Path) -> None:
    analysis = make_one_group(tmp_path).examine()
    job = analysis.job
    assert list_parts(job) == {
        "rollout/0": (100, 30, 10, 60, 0, 0, 0),
        "rollout/1": (100, 50, 10, 40, 0, 0, 0),
        "trainer/2": (100, 90, 10, 0, 0, 0, 0),
    }
    assert [(row.role, row.owner, row.wait_ns) for row in job.waits] == [
        ("rollout", "trainer", 50_000)
    ]
    # From 50 to 90 µs both rollouts wait for the trainer.
    assert [(row.role, row.rank, row.held_ns, row.mark) for row in job.held] == [
        ("trainer", 2, 40_000, "")
    ]
    assert {role.program for role in job.roles} == {0}
    assert job.lacks == ()
    codes = {row.code for row in analysis.analyses["rollout"].report.warnings}
    assert "other_roles" in codes
    assert "ranks_missing" not in codes


def test_the_range_in_which_a_rank_holds_up_all_others_is_named(tmp_path: Path) -> None:
    job = make_one_group(tmp_path)
    trainer = GpuTrace(2, 3, groups=[("0", "default_pg", range(3))])
    for step in STEPS:
        at = 100 * step
        trainer.step(step, at, at + 100).kernel("gemm", at, at + 90)
        trainer.annotation("update_actor", at + 40, at + 85).annotation("inner", at + 60, at + 62)
        trainer.annotation("Optimizer.step#Adam.step", at + 1, at + 90)
        trainer.all_reduce(at + 90, at + 100, Seq=step)
    trainer.write(job.folder / "trainer")
    (held,) = job.examine().job.held
    assert (held.rank, held.held_ns, held.mark) == (2, 40_000, "update_actor")


def test_with_a_rank_that_is_not_recorded_no_one_holds_up_all_others(tmp_path: Path) -> None:
    job = make_one_group(tmp_path)
    next((job.folder / "rollout").glob("rank1_trace*")).unlink()
    found = job.examine().job
    assert found.held == ()
    assert found.lacks == (
        "of the ranks of rollout and trainer, these are not recorded: 1: which rank holds up all"
        " others is unknown",
    )


def test_messages_to_another_role_make_no_pipeline(tmp_path: Path) -> None:
    job = make_one_group(tmp_path, with_transfer=False)
    groups = [("0", "default_pg", range(3))]
    for rank, op, peer in ((0, "send", 2), (1, "send", 2), (2, "recv", 0), (2, "recv", 1)):
        role = "trainer" if rank == 2 else "rollout"
        trace = GpuTrace(rank, 3, groups=groups)
        for step in STEPS:
            at = 100 * step
            trace.step(step, at, at + 100).kernel("gemm", at, at + 50)
            trace.message(op, peer, at + 60, at + 70)
        trace.write(job.folder / role)
    report = job.examine().analyses["rollout"].report
    assert report.pipeline is None
    assert not any(one.name == "pp" for one in report.run.strategies)


def test_what_needs_one_program_says_so(programs: Job, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError) as caught:
        analyze(programs.folder)
    assert "a recording of the roles rollout, trainer" in str(caught.value)
    for option in ("--job=auto", "--mesh=dp=2", "--parts"):
        result = CliRunner().invoke(analyze_command, [str(programs.folder), option])
        assert isinstance(result.exception, UsageError)
        assert f"{option.partition('=')[0]}: for one role" in str(result.exception)


def test_the_screen_names_ranks_by_their_role(programs: Job, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(analyze_command, [str(programs.folder), "--out", str(out)])
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["rollout/1", "81.0", "%", *["0.0", "%"] * 3, "19.0", "%", "0.0", "%"] in lines
    assert sorted(path.name for path in out.iterdir()) == ["roles.json", "rollout", "trainer"]
    written = json.loads((out / "roles.json").read_text())
    assert written["schema"] == "stepsplit.roles/1"
    assert (out / "rollout" / "report.json").exists()


def test_a_role_without_an_optimizer_that_gives_the_steps_is_said(tmp_path: Path) -> None:
    job = Job(tmp_path / "exp1")
    job.add("rollout", 2, *make_rollouts())
    job.add("actor", 2, *make_rollouts())
    found = job.examine().job
    assert found.step_role == "actor"
    assert "no role has an optimizer: RL steps are taken to be the steps of actor" in found.lacks


def test_files_of_one_role_are_an_ordinary_recording(programs: Job) -> None:
    report = analyze(programs.folder / "trainer")
    assert report.run.ranks == (0,)
    assert {row.code for row in report.warnings} & {"older_captures", "mixed_world_sizes"} == set()


def test_a_trace_outside_of_all_roles_is_named(programs: Job) -> None:
    stray = make_trainer().write(programs.folder)
    broken = programs.folder / "rank7_trace.json"
    broken.write_text("")
    job = programs.examine().job
    assert job.lacks[0] == (
        f"which role these traces are of, as they lie in the folder of none: {stray}, {broken}"
    )
    assert list_parts(job)["trainer/0"] == (100, 20, 0, 0, 0, 80, 0)


@pytest.mark.parametrize("content", [None, "", "no trace"])
def test_a_role_that_cannot_be_read_is_said_first(programs: Job, content: str | None) -> None:
    programs.add("critic", 1)
    if content is not None:
        (programs.folder / "critic" / "rank0_trace.json").write_text(content)
    analysis = programs.examine()
    assert analysis.job.lacks[0].startswith(f"what critic did: {programs.folder / 'critic'}")
    assert content is None or "rank0_trace.json: " in analysis.job.lacks[0]
    assert [role.name for role in analysis.job.roles] == ["rollout", "trainer"]
    assert list_parts(analysis.job)["rollout/1"] == (100, 81, 0, 0, 0, 19, 0)


def test_without_the_trainer_the_steps_are_those_of_another_role(programs: Job) -> None:
    (programs.folder / "trainer" / "rank0_trace.json.gz").unlink()
    job = programs.examine().job
    assert job.step_role == "rollout"
    assert "what trainer did: " in job.lacks[0]
    assert "no role has an optimizer: RL steps are taken to be the steps of rollout" in job.lacks


def test_without_any_role_the_first_error_is_raised(tmp_path: Path) -> None:
    job = Job(tmp_path / "exp1")
    job.add("rollout", 2)
    job.add("trainer", 1)
    with pytest.raises(DataError, match="rollout: no trace found"):
        job.examine()


def test_of_an_archive_it_is_said_what_to_unpack(programs: Job, tmp_path: Path) -> None:
    archive = tmp_path / "e.tgz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(programs.folder, "exp1")
    analysis = examine_roles_or_run([archive])
    assert isinstance(analysis, RoleAnalysis)
    assert [role.command for role in analysis.job.roles] == [
        f"unpack {archive}, then stepsplit analyze exp1/rollout",
        f"unpack {archive}, then stepsplit analyze exp1/trainer",
    ]
    own = programs.examine().job.roles[0]
    assert own.command == f"stepsplit analyze {programs.folder / 'rollout'}"


@pytest.mark.parametrize(
    ("nelems", "later_us", "group", "doubt"),
    [
        (500, 0, range(4), "their calls in the groups of both do not match"),
        (1000, 2_000, range(4), "their calls look alike, but were not at the same time"),
        (1000, 0, (2, 3), "no call in common"),
        (1000, 0, range(4), ""),
    ],
)
def test_programs_of_one_size_are_one_group_only_if_their_calls_match(
    nelems: int, later_us: int, group: Sequence[int], doubt: str, tmp_path: Path
) -> None:
    job = Job(tmp_path / "exp1")
    for role, ranks, size, later, members in (
        ("rollout", (0, 1), 1000, 0, range(4) if len(group) == 4 else (0, 1)),
        ("trainer", (2, 3), nelems, later_us, group),
    ):
        traces = [
            GpuTrace(rank, 4, base_ns=BASE_NS + later * 1000, groups=[("0", "", members)])
            for rank in ranks
        ]
        for trace in traces:
            for step in STEPS:
                at, busy = 100 * step, 30 + 10 * trace.rank
                trace.step(step, at, at + 100).kernel("gemm", at, at + busy)
                trace.all_reduce(at + busy, at + 100, nelems=size, Seq=step)
        job.add(role, 4, *traces)
    found = job.examine().job
    assert len({role.program for role in found.roles}) == (2 if doubt else 1)
    assert [(row.role, row.owner) for row in found.waits] == (
        [] if doubt else [("rollout", "trainer")]
    )
    said = [lack for lack in found.lacks if "rollout and trainer are of one process group" in lack]
    assert len(said) == bool(doubt)
    assert all(doubt in lack for lack in said)


def test_ranks_of_other_roles_are_not_missing_in_the_folder_of_one(tmp_path: Path) -> None:
    job = make_one_group(tmp_path)
    report = analyze(job.folder / "rollout")
    (said,) = [row.message for row in report.warnings if row.code == "other_roles"]
    assert "other roles of the job (trainer 2)" in said
    assert report.summary is not None
    assert report.summary.lacks == ()
    shutil.move(job.folder / "rollout", tmp_path / "elsewhere")
    alone = analyze(tmp_path / "elsewhere")
    (said,) = [row.message for row in alone.warnings if row.code == "ranks_missing"]
    assert said.endswith("missing from the recording: 2: they may be of other roles than rollout")


@pytest.mark.parametrize("made", ["a link", "too large", "of another user", "a pipe"])
def test_folders_beside_that_of_a_role_are_read_with_care(tmp_path: Path, made: str) -> None:
    job = make_one_group(tmp_path)
    trainer = job.folder / "trainer"
    files = [trainer / "run.json", *trainer.glob("rank*_record.json")]
    if made == "a link":
        trainer = shutil.move(trainer, tmp_path / "elsewhere")
        (job.folder / "trainer").symlink_to(trainer)
    elif made == "of another user":
        if os.geteuid():
            pytest.skip("needs root")
        os.chown(trainer, 12345, 12345)
    for file in files:
        if made == "too large":
            with file.open("rb+") as wide:
                # A file without blocks takes no disk, and memory without a limit.
                wide.truncate(0)
                wide.truncate(300 << 20)
        elif made == "a pipe":
            file.unlink(missing_ok=True)
            os.mkfifo(file)
    tracemalloc.start()
    report = analyze(job.folder / "rollout")
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    codes = {row.code for row in report.warnings}
    assert "ranks_missing" in codes and "other_roles" not in codes
    assert most_bytes < 100 << 20
