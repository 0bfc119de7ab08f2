"""`stepsplit check` of jobs of several roles: the RL step, its phases, and each role."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.builders import GpuTrace
from support.role_builders import STEPS, Job

from stepsplit.analyzer import check_runs
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.report.io import save
from stepsplit.analyzer.report.roles import ROLES_NAME, roles_to_json


def make_job(folder: Path, generate_us: int, train_us: int = 30) -> Job:
    """A rollout that generates and a trainer that trains and then sends the weights."""
    job = Job(folder / "exp1")
    groups = [("0", "default_pg", range(2))]
    rollout, trainer = (GpuTrace(rank, 2, groups=groups) for rank in (0, 1))
    for step in STEPS:
        period = generate_us + train_us + 10
        at, end = period * step, period * (step + 1)
        for trace in (rollout, trainer):
            trace.step(step, at, end)
        rollout.annotation("generate", at, at + generate_us)
        rollout.kernel("decode", at, at + generate_us)
        trainer.annotation("reward", at, at + generate_us)
        trainer.kernel("score", at, at + generate_us)
        trainer.annotation("train", at + generate_us, at + generate_us + train_us)
        trainer.kernel("gemm", at + generate_us, at + generate_us + train_us)
        trainer.annotation("Optimizer.step#Adam.step", end - 12, end - 11)
        for trace in (rollout, trainer):
            called = end - 10 if trace is trainer else at + generate_us
            trace.all_reduce(called, end, Seq=step)
    job.add("rollout", 2, rollout)
    job.add("trainer", 2, trainer)
    return job


def make_runs(folder: Path, generate_us: int, train_us: int = 30) -> list[Path]:
    """Three runs that differ by 1 µs."""
    return [
        make_job(folder / str(number), generate_us + number, train_us).folder for number in range(3)
    ]


def test_the_rl_step_its_phases_and_each_role_have_budgets(tmp_path: Path) -> None:
    baseline = make_runs(tmp_path / "a", 50)
    slower = make_runs(tmp_path / "b", 50, 60)
    result = check_runs(
        slower, baseline,
        ["step:10%", "phase:generation:10%", "phase:training:10%", "trainer/step:10%",
         "rollout/compute:10%,50pt", "calls:exact"],
    )  # fmt: skip
    found = {row.metric: (row.answer, row.baseline, row.candidate) for row in result.gated}
    assert found == {
        "step": ("regressed", 91_000, 121_000),
        "phase.generation": ("pass", 51_000, 51_000),
        "phase.training": ("regressed", 30_000, 60_000),
        "trainer/step": ("regressed", 91_000, 121_000),
        "rollout/compute": ("pass", *found["rollout/compute"][1:]),
        "rollout/calls": ("pass", 1, 1),
        "trainer/calls": ("pass", 1, 1),
    }
    assert result.answer == "regressed"


def test_a_folder_of_an_analysis_and_a_baseline_file_give_the_same(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from stepsplit.dashboard.commands.check import baseline_command

    job = make_job(tmp_path, 50)
    analysis, out = job.examine(), tmp_path / "out"
    for role, one in analysis.analyses.items():
        save(out / role, one.report, one.tables)
    (out / ROLES_NAME).write_bytes(roles_to_json(analysis.job))
    file = tmp_path / "baseline.json"
    done = CliRunner().invoke(baseline_command, [str(job.folder), "--out", str(file)])
    assert done.exit_code == 0, done.output
    for place in (out, file):
        result = check_runs([job.folder], [place], ["calls:exact", "trainer/bytes:exact"])
        assert result.answer == "pass"
        assert [row.metric for row in result.gated] == [
            "rollout/calls", "trainer/calls", "trainer/bytes",
        ]  # fmt: skip
    with pytest.raises(DataError, match="the analysis of several roles; name the folder of one"):
        from stepsplit.analyzer import compare_runs

        compare_runs(out, out)


def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path: Path) -> None:
    job = make_job(tmp_path, 50)
    both, one = [job.folder], [job.folder / "trainer"]
    for candidate, budget, words in (
        (both, "critic/step:5%", "the roles of the runs are rollout, trainer"),
        (one, "trainer/step:5%", "these runs have none"),
        (both, "../x/step:5%", "unknown metric"),
        (both, "phase:nothing:5%", "has no phase.nothing"),
    ):
        with pytest.raises(UsageError, match=words):
            check_runs(candidate, candidate, [budget])
    with pytest.raises(UsageError, match=r"their roles are (rollout, trainer|none) in exp1"):
        check_runs(both, one, ["step:5%"])


def test_a_role_of_roles_json_is_no_path(tmp_path: Path) -> None:
    job = make_job(tmp_path, 50)
    analysis, out = job.examine(), tmp_path / "out"
    for role, made in analysis.analyses.items():
        save(out / role, made.report, made.tables)
    body = json.loads(roles_to_json(analysis.job))
    body["roles"][0]["name"] = "../out/rollout"
    (out / ROLES_NAME).write_text(json.dumps(body))
    with pytest.raises(DataError):
        check_runs([out], [out], ["calls:exact"])
