"""`stepsplit check` of jobs of several roles: the RL step, its phases, and each role."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.builders import GpuTrace
from support.role_builders import STEPS, Job, make_rollouts, make_trainer

from stepsplit.analyzer import check_runs
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.report.io import save
from stepsplit.analyzer.report.roles import ROLES_NAME, roles_from_json, roles_to_json


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
        (both, "/step:5%", "unknown metric"),
        (both, "phase:nothing:5%", "has no phase.nothing"),
    ):
        with pytest.raises(UsageError, match=words):
            check_runs(candidate, candidate, [budget])
    with pytest.raises(
        UsageError, match=r"none in exp1 \(baseline\); rollout, trainer in exp1 \(c"
    ):
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


def make_apart(folder: Path, rollouts: int, trainers: int, shift_us: int = 0) -> Job:
    """Rollouts and trainers that are programs of their own, with a steady RL step."""
    job = Job(folder / "exp1")
    for role, count, busy in (("rollout", rollouts, 60), ("trainer", trainers, 20)):
        traces = []
        for rank in range(count):
            trace = GpuTrace(rank, count)
            for step in STEPS:
                at = (100 + shift_us) * step
                trace.step(step, at, at + 100 + shift_us).kernel("work", at, at + busy)
                trace.kernel("end", at + 99 + shift_us, at + 100 + shift_us)
                if role == "trainer":
                    trace.annotation("Optimizer.step#Adam.step", at + 98, at + 99)
            traces.append(trace)
        job.add(role, count, *traces)
    return job


def test_roles_of_another_size_are_another_job_whatever_the_budget(tmp_path: Path) -> None:
    before = [make_apart(tmp_path / "a", 1, 2).folder]
    after = [make_apart(tmp_path / "b", 2, 1, 1).folder]
    for budget in ("step:50%", "trainer/step:50%"):
        words = r"world size is \d in exp1: \w+ \(baseline\), \d in exp1: \w+ \(candidate\)"
        with pytest.raises(UsageError, match=words):
            check_runs(after, before, [budget])
    result = check_runs(after, before, ["step:50%"], across_setups=True)
    assert result.candidate.setup.ranks == () and result.candidate.setup.world_size == 3
    assert [text.partition(" in ")[0] for text in result.warnings] == [
        "rollout: world size is 1", "rollout: ranks recorded is 1 ranks (0, ...)",
        "trainer: world size is 2", "trainer: ranks recorded is 2 ranks (0, 1, ...)",
    ]  # fmt: skip


def test_a_truncated_trace_of_a_role_is_said_of_the_whole(tmp_path: Path) -> None:
    whole, torn = make_apart(tmp_path / "a", 2, 1), make_apart(tmp_path / "b", 2, 1, 1)
    assert not any("what rollout" in text for text in whole.examine().job.lacks)
    trace = next((torn.folder / "rollout").glob("rank1_trace*"))
    text = gzip.decompress(trace.read_bytes())
    trace.write_bytes(gzip.compress(text[: len(text) * 9 // 10]))
    lacks = torn.examine().job.lacks
    assert any(one.startswith("what rollout/1 did: the file is truncated") for one in lacks)
    result = check_runs([torn.folder], [whole.folder], ["step:50%"])
    said = [text for text in result.warnings if text.startswith("exp1: rollout/1: ")]
    assert "exp1: rollout/1: the file is truncated" in said[-1]


def test_the_budget_of_one_role_goes_before_one_of_all_in_any_order(tmp_path: Path) -> None:
    before, after = make_runs(tmp_path / "a", 50), make_runs(tmp_path / "b", 50, 60)
    found = []
    for budgets in (
        ["trainer/compute:0.1pt", "compute:50%,50pt"],
        ["compute:50%,50pt", "trainer/compute:0.1pt"],
    ):
        result = check_runs(after, before, budgets)
        found.append({row.metric: row.budget for row in result.gated})
    expected = {"rollout/compute": "50%,50pt", "trainer/compute": "0.1pt"}
    assert found == [expected, expected]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body.update(roles=[]), "has no role"),
        (lambda body: body.update(steps=[]), "no counted RL step"),
        (lambda body: [one.update(is_counted=False) for one in body["steps"]], "no counted RL"),
        (lambda body: body["roles"].append(body["roles"][0]), "a role twice"),
        (lambda body: body["roles"][0].update(rank_times=[]), "a time for each rank"),
    ],
)
def test_a_strange_roles_json_is_refused(
    tmp_path: Path, change: Callable[[dict[str, object]], object], words: str
) -> None:
    job = Job(tmp_path / "exp1")
    job.add("rollout", 2, *make_rollouts())
    job.add("trainer", 1, make_trainer())
    text = roles_to_json(job.examine().job)
    assert roles_to_json(roles_from_json(text)) == text
    body = json.loads(text)
    change(body)
    with pytest.raises(DataError, match=words):
        roles_from_json(json.dumps(body).encode())


@pytest.mark.parametrize("roles", [["rollout", "rollout"], ["x\x1b[2J"], ["a/b"], [""], "nested"])
def test_strange_roles_of_a_baseline_file_are_refused(tmp_path: Path, roles: list[str]) -> None:
    from stepsplit.analyzer.analysis import read_run_metrics
    from stepsplit.analyzer.regression.metrics import to_json

    file = tmp_path / "baseline.json"
    file.write_bytes(to_json(read_run_metrics(make_job(tmp_path, 50).folder)))
    assert [one.role for one in read_run_metrics(file)[0].roles] == ["rollout", "trainer"]
    body = json.loads(file.read_text())
    (run,) = body["runs"]
    if roles == "nested":
        run["roles"][0]["roles"] = [run["roles"][1]]
    else:
        run["roles"] = [run["roles"][0] | {"role": name} for name in roles]
    file.write_text(json.dumps(body))
    with pytest.raises(DataError, match="are no roles"):
        read_run_metrics(file)
