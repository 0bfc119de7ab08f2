"""run.json and the mesh: the description of the recorded job."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stepsplit.collectors.run_spec import (
    GroupInfo,
    Mesh,
    ModelSpec,
    RankInfo,
    RunSpec,
    Training,
    from_json,
    to_json,
    write_run_json,
)

SPEC = RunSpec(
    name="exp1",
    world_size=4,
    backend="gloo",
    mesh=Mesh.of({"pp": 2, "tp": 2}),
    model=ModelSpec(layers=4, hidden=256, gated=False),
    training=Training(seq_len=64, microbatches=8, schedule="1f1b"),
    ranks=(RankInfo(0, 0, "node1", 4711, "cpu"),),
    groups=(GroupInfo("0", "default_pg", (0, 1, 2, 3)), GroupInfo("1", "mesh_pp", (0, 2))),
    versions=(("python", "3.11.7"), ("torch", "2.13.0")),
)


def test_a_mesh_places_ranks_with_the_last_axis_fastest() -> None:
    mesh = Mesh.of({"pp": 2, "dp": 2, "tp": 2})

    assert mesh.axes == ("pp", "dp_replicate", "tp")
    assert [mesh.coordinate(5, axis) for axis in mesh.axes] == [1, 0, 1]
    assert mesh.line(5, "pp") == (1, 5)
    assert mesh.line(5, "dp_replicate") == (5, 7)
    assert mesh.line(5, "tp") == (4, 5)
    assert mesh.line(5, "cp") == (5,)


@pytest.mark.parametrize(
    ("sizes", "complaint"), [({"xx": 2}, "unknown mesh axis"), ({"tp": 0}, "at least one rank")]
)
def test_an_invalid_mesh_is_refused(sizes: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Mesh.of(sizes)


def test_a_mesh_must_have_as_many_ranks_as_the_job() -> None:
    with pytest.raises(ValueError, match=r"the mesh tp=2 has 2 ranks but the job has 3"):
        RunSpec("exp1", 3, "gloo", mesh=Mesh.of({"tp": 2}))


def test_run_json_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = write_run_json(tmp_path / "exp1", SPEC)

    assert from_json(path.read_bytes()) == SPEC
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]


def test_unknown_fields_of_a_newer_run_json_are_ignored() -> None:
    body = json.loads(to_json(SPEC))
    body["ranks"][0]["rack"] = 7
    body["model"]["rope_theta"] = 1e4

    assert from_json(json.dumps(body)) == SPEC


@pytest.mark.parametrize("text", ["[]", "{}", '{"schema": "stepsplit.run/1"}', "{"])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_json(text)


def test_importing_the_collectors_does_not_import_torch() -> None:
    code = "import sys, stepsplit.collectors.record; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_profile_run_is_loaded_on_first_access() -> None:
    pytest.importorskip("torch")
    import stepsplit.collectors as collectors
    from stepsplit.collectors.profiler import profile_run

    assert collectors.profile_run is profile_run
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = collectors.nonsense
