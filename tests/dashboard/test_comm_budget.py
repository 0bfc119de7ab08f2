"""The pytest fixture comm_budget: one process, torchrun, with and without a baseline."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
IN_TURN = pytest.mark.in_turn("dashboard/pytest_plugin.py")

STEP = '''
import os

import torch
from torch import distributed


def train(run, extra=0):
    """Steps of two all_reduces where there is a job, and of a product."""
    square = torch.ones(256, 256)
    for _ in range(run.total_steps):
        for _ in range(2 + extra):
            torch.mm(square, square)
            if distributed.is_initialized():
                distributed.all_reduce(square.clone())
        run.step()
'''
ALONE = f"""{STEP}
def test_step(comm_budget):
    with comm_budget("exposed_comm:<=50%", "calls:<=0") as run:
        train(run)
    with comm_budget() as run:
        train(run)
"""
JOB = f"""{STEP}
import pytest


@pytest.fixture(scope="module", autouse=True)
def job():
    distributed.init_process_group("gloo")
    yield
    distributed.destroy_process_group()


def test_step(comm_budget):
    with comm_budget() as run:
        train(run, int(os.environ.get("EXTRA", "0")))


def test_without_a_block(comm_budget):
    assert comm_budget is not None
"""
LAUNCHES = """
import os
import subprocess
import sys


def test_launched(comm_budget, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, os.environ["RANKS"], os.environ["DEMO"], "nothing"]
    command += ["--out", str(out), "--parallel", "dp=2", "--steps", "6", "--active", "3"]
    command += ["--layers", "2", "--hidden", "64", "--seq-len", "16"]
    subprocess.run(command, check=True, capture_output=True)
    comm_budget.recorded(out, "calls:<=4", "bytes:<=1MB")
"""
JOBS = Path(__file__).parents[1] / "collector_jobs"


def said(
    folder: Path, *words: str, ranks: int = 1, **more: str
) -> subprocess.CompletedProcess[str]:
    """Runs pytest on the folder's tests; under torchrun with more than one rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(launcher if ranks > 1 else []), "-m", "pytest"]
    command += ["-p", "no:cacheprovider", "-p", "no:dash", "-rA", *words, str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | more
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=240)


def test_limits_need_no_baseline_and_two_blocks_are_two_runs(tmp_path: Path) -> None:
    (tmp_path / "test_alone.py").write_text(ALONE)
    found = said(tmp_path)
    assert found.returncode == 0 and "1 passed" in found.stdout, found.stdout


def test_a_job_is_compared_with_its_baseline(tmp_path: Path) -> None:
    (tmp_path / "test_job.py").write_text(JOB)
    made = said(tmp_path, "--stepsplit-update", ranks=2)
    assert made.returncode == 0, made.stdout
    baseline = tmp_path / "comm_budgets" / "test_job.test_step.json"
    assert baseline.exists() and [*baseline.parent.iterdir()] == [baseline]
    same = said(tmp_path, ranks=2)
    assert same.returncode == 0 and same.stdout.count("2 passed") == 2, same.stdout
    more = said(tmp_path, ranks=2, EXTRA="1")
    assert more.returncode == 1
    # Both ranks fail with the message of rank 0: a job whose ranks disagree would hang.
    assert more.stdout.count("REGRESSED: calls, bytes") >= 2, more.stdout
    assert (
        "all_reduce: +2 calls per step (baseline: 4 of 262 kB; candidate: 6 of 262 kB)"
        in more.stdout
    )


@IN_TURN
def test_a_recording_that_the_test_launched_itself(tmp_path: Path) -> None:
    (tmp_path / "test_launched.py").write_text(LAUNCHES)
    places = {"RANKS": str(JOBS / "ranks.py"), "DEMO": str(JOBS / "planted_demo.py")}
    found = said(tmp_path, **places)
    assert found.returncode == 0 and "1 passed" in found.stdout, found.stdout


ALIKE = """
import os

import pytest


class TestSmall:
    def test_step(self, comm_budget):
        comm_budget.recorded(os.environ["SMALL"])


class TestLarge:
    @pytest.mark.parametrize("name", ["a b", "a-b"])
    def test_step(self, comm_budget, name):
        comm_budget.recorded(os.environ["LARGE"] if name == "a b" else os.environ["SMALL"])


def test_typo(comm_budget):
    comm_budget.recorded(os.environ["SMALL"], "calls:exat")
"""
SAMPLES = Path(__file__).parents[2] / "sample_traces"


def test_tests_of_like_names_have_baselines_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "test_alike.py").write_text(ALIKE)
    places = {"SMALL": str(SAMPLES / "pp2_m2"), "LARGE": str(SAMPLES / "dp4")}
    made = said(tmp_path, "--stepsplit-update", **places)
    # A budget that cannot be read is no reason to write a baseline.
    assert "1 failed, 3 passed" in made.stdout and "exat" in made.stdout, made.stdout
    names = sorted(path.name for path in (tmp_path / "comm_budgets").iterdir())
    assert names[1:] == [
        "test_alike.TestLarge.test_step[a-b].json", "test_alike.TestSmall.test_step.json",
    ]  # fmt: skip
    assert names[0].startswith("test_alike.TestLarge.test_step[a-b]-")
    again = said(tmp_path, "-k", "step", **places)
    assert "3 passed" in again.stdout, again.stdout


UNSURE = f"""{STEP}
def test_unsure(comm_budget):
    with comm_budget("idle:<=50%") as run:
        train(run)


def test_without_baseline(comm_budget):
    with comm_budget() as run:
        train(run)
"""


@IN_TURN
@pytest.mark.parametrize("strict", [False, True], ids=["loose", "strict"])
def test_an_inconclusive_run_is_skipped_or_fails_with_strict(strict: bool, tmp_path: Path) -> None:
    (tmp_path / "test_unsure.py").write_text(UNSURE)
    found = said(tmp_path, *(["--stepsplit-strict"] if strict else []))
    assert found.returncode == 1
    assert ("2 failed" if strict else "1 failed, 1 skipped") in found.stdout, found.stdout
    assert "noise unknown with one run per side" in found.stdout
    assert "no baseline yet; create it with --stepsplit-update" in found.stdout


def test_only_the_plugin_is_imported_without_the_fixture(tmp_path: Path) -> None:
    loaded = "[name for name in sys.modules if name.startswith('stepsplit')]"
    (tmp_path / "test_plain.py").write_text(
        f"import sys\n\ndef test_plain():\n    assert {loaded} == {EXPECTED}\n"
    )
    found = said(tmp_path)
    assert found.returncode == 0, found.stdout


EXPECTED = ["stepsplit", "stepsplit.dashboard", "stepsplit.dashboard.pytest_plugin"]


FAILS = f"""{STEP}
import pytest


@pytest.fixture(scope="module", autouse=True)
def job():
    distributed.init_process_group("gloo")
    yield
    distributed.destroy_process_group()


@pytest.fixture
def disk():
    if distributed.get_rank() == 1:
        raise OSError("no space left")


def test_before_it_begins(comm_budget, disk):
    with comm_budget("calls:<=9") as run:
        train(run)


def test_in_its_block(comm_budget):
    with comm_budget("calls:<=9") as run:
        train(run)
        assert distributed.get_rank() == 0, "a loss is nan"


def test_after_its_block(comm_budget):
    with comm_budget("calls:<=9") as run:
        train(run)
    assert distributed.get_rank() == 1, "rank 0 is wrong"


def test_skipped(comm_budget):
    if distributed.get_rank() == 1:
        pytest.skip("no such device")
    with comm_budget("calls:<=9") as run:
        train(run)


def test_afterwards(comm_budget):
    with comm_budget("calls:<=9") as run:
        train(run)
"""


def test_a_failure_on_one_rank_ends_the_test_on_the_others_and_the_next_one_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_fails.py").write_text(FAILS)
    began = time.monotonic()
    # With its 300 s of patience for each of four tests, this would be killed.
    found = said(tmp_path, ranks=2)
    assert time.monotonic() - began < 120
    assert found.returncode == 1
    assert "the test failed on rank 1: no space left" in found.stdout, found.stdout
    assert "the test failed on rank 1: a loss is nan" in found.stdout
    assert "the test failed on rank 0: rank 0 is wrong" in found.stdout
    assert "the test was skipped on rank 1: no such device" in found.stdout
    assert found.stdout.count("PASSED") == 2 and "test_afterwards" in found.stdout
