"""A role in the metadata of a recording, and the folder that it is in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from stepsplit.collectors import profile_run  # noqa: E402
from stepsplit.collectors.__main__ import main  # noqa: E402
from stepsplit.collectors.formats.rank_record import read_record  # noqa: E402
from stepsplit.collectors.formats.run_spec import RunSpec, from_json, to_json  # noqa: E402
from stepsplit.collectors.record.plan import RecordPlan, parse_plan  # noqa: E402


def test_a_role_is_in_the_folder_and_the_metadata(tmp_path: Path) -> None:
    with profile_run(tmp_path / "exp1", role="rollout", wait=0, warmup=0, active=1) as run:
        torch.ones(2) + 1
        run.step()
    folder = tmp_path / "exp1" / "rollout"
    spec = from_json((folder / "run.json").read_text())
    assert (spec.name, spec.role) == ("exp1", "rollout")
    assert read_record((folder / "rank0_record.json").read_text()).role == "rollout"
    assert (folder / "rank0_trace.json.gz").exists()


def test_without_a_role_the_files_are_as_before() -> None:
    spec = RunSpec("exp1", 1, "gloo")
    assert "role" not in json.loads(to_json(spec))
    assert from_json(to_json(replace(spec, role="actor"))).role == "actor"


@pytest.mark.parametrize("role", ["../up", "a/b", "nccl", "samples", "-x", "a" * 33, "a\n", "."])
def test_a_role_that_is_no_folder_is_refused(role: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="role"):
        profile_run(tmp_path, role=role)
    with pytest.raises(ValueError, match="role"):
        parse_plan(json.dumps({"out": "o", "name": "n", "first": 1, "role": role}))
    with pytest.raises(ValueError, match="role"):
        from_json(json.dumps({"schema": "stepsplit.run/1", "name": "n", "world_size": 1,
                              "backend": "gloo", "role": role}))  # fmt: skip


def test_samples_are_of_the_only_role(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not with every"):
        profile_run(tmp_path, role="rollout", every=100)


def test_a_plan_keeps_its_role() -> None:
    plan = RecordPlan("o/rollout", "n", 1, role="rollout")
    assert parse_plan(plan.format_json()) == plan


def test_record_needs_the_folder_that_roles_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "--role", "rollout", "--", "true"]) == 2
    assert "--role needs --out" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["true", "no-such-command"])
def test_a_role_that_records_nothing_leaves_no_folder(command: str, tmp_path: Path) -> None:
    out = tmp_path / "exp1"
    main(["record", "--out", str(out), "--role", "rollout", "--", command])
    assert not out.exists()
    (out / "trainer").mkdir(parents=True)
    main(["record", "--out", str(out), "--role", "rollout", "--", command])
    assert [path.name for path in out.iterdir()] == ["trainer"]
