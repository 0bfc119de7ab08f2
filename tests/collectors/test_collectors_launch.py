"""Starting the demo training: the parts that need no torch process."""

import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from stepsplit.collectors.demo import launch
from stepsplit.collectors.demo.arguments import (
    CALIBRATION,
    Command,
    DemoArgs,
    check_mesh,
    choose_calibration_mesh,
    parse_command,
    parse_parallel,
)
from stepsplit.collectors.demo.launch import RANK_BYTES, LaunchError, fit_to_memory
from stepsplit.collectors.formats.run_spec import Mesh


def test_axes_are_ordered_outermost_first() -> None:
    assert parse_parallel("tp=2, pp=4,dp=3") == Mesh(("pp", "dp_replicate", "tp"), (4, 3, 2))
    assert parse_parallel("fsdp=4,dp=2") == Mesh(("dp_replicate", "dp_shard"), (2, 4))


def test_axes_of_size_1_are_dropped_except_the_last() -> None:
    assert parse_parallel("tp=2,pp=1") == Mesh(("tp",), (2,))
    assert parse_parallel("pp=1") == Mesh(("dp_replicate",), (1,))


@pytest.mark.parametrize("text", ["", "tp", "tp=", "tp=0", "tp=-1", "tp=x", "xx=2", "tp=2;pp=2"])
def test_an_invalid_layout_is_a_one_line_error(text: str) -> None:
    with pytest.raises(ValueError, match="use tp=2,pp=2,dp=2") as refused:
        parse_parallel(text)

    assert "\n" not in str(refused.value)


def test_an_axis_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="dp_replicate is given twice"):
        parse_parallel("dp=2,dp_replicate=2")


def test_low_memory_halves_dp_first_then_pp_then_tp() -> None:
    mesh = parse_parallel("tp=2,pp=2,dp=2")

    assert fit_to_memory(mesh, 8 * RANK_BYTES) == mesh
    assert fit_to_memory(mesh, 8 * RANK_BYTES - 1) == parse_parallel("tp=2,pp=2")
    assert fit_to_memory(mesh, 3 * RANK_BYTES) == parse_parallel("tp=2")
    assert fit_to_memory(mesh, 0) == parse_parallel("dp=1")


def test_demo_arguments_round_trip_through_the_command_line() -> None:
    recipe = DemoArgs(steps=9, microbatches=8, slow_rank=1, slow_ms=150, slow_kind="sleep")
    mesh = parse_parallel("tp=2,pp=2")
    line = ["--out", "runs/a", "--parallel", mesh.format(), *recipe.format_arguments()]

    assert parse_command(line) == Command(Path("runs/a"), mesh, recipe)


@pytest.mark.parametrize(
    ("layout", "other"),
    [
        ("tp=2,pp=2,dp=2", "dp=4,tp=2"),
        ("dp=4,tp=2", "dp=8"),
        ("pp=2", "tp=2"),
        ("tp=2", "dp=2"),
        ("dp=3", "fsdp=3"),
        ("dp=1", "dp=1"),
    ],
)
def test_a_calibration_is_of_another_layout_with_as_many_ranks(layout: str, other: str) -> None:
    found = choose_calibration_mesh(parse_parallel(layout))
    assert found == parse_parallel(other)
    check_mesh(CALIBRATION, found)


def test_layers_must_be_divisible_by_pp(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_command(["--out", "runs/a", "--parallel", "pp=3"])

    assert "layers (2) must be divisible by pp (3)" in capsys.readouterr().err


def run_ranks(code: str, tmp_path: Path, world_size: int = 2, patience_s: float = 30.0) -> float:
    """Runs the code as every rank under the launcher; returns the seconds it took."""
    begin = time.monotonic()
    with ExitStack() as stack:
        ranks = launch._start([sys.executable, "-c", code], world_size, tmp_path, stack)
        launch._wait_for_ranks(ranks, begin + patience_s)
    return time.monotonic() - begin


def test_if_a_rank_fails_the_others_end_and_the_error_has_its_stderr(tmp_path: Path) -> None:
    code = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('no GPU'); time.sleep(60)"
    begin = time.monotonic()

    with pytest.raises(LaunchError, match=r"rank 1 exited with status 1\nno GPU"):
        run_ranks(code, tmp_path)

    assert time.monotonic() - begin < 20


def test_a_run_that_does_not_end_is_killed(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="ranks 0, 1 did not finish in time"):
        run_ranks("import time; time.sleep(60)", tmp_path, patience_s=0.5)
