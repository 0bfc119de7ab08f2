"""run.json and the mesh: the description of the recorded job."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stepsplit.collectors.formats.rank_record import (
    RankRecord,
    build_spec,
    read_record,
    write_record,
)
from stepsplit.collectors.formats.run_spec import (
    GroupInfo,
    Mesh,
    ModelSpec,
    RankInfo,
    RunSpec,
    Training,
    from_json,
    merge_groups,
    to_json,
    write_run_json,
)
from stepsplit.collectors.job.launcher import read_labels

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


def test_a_mesh_is_parsed_in_the_order_in_which_it_is_written() -> None:
    assert Mesh.parse("pp=2, fsdp=4,tp=1") == Mesh(("pp", "dp_shard", "tp"), (2, 4, 1))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ep=2", "'ep=2' is not an axis and a size; use tp=2,pp=2,dp=2 or fsdp=4"),
        ("tp", "'tp' is not an axis and a size; use tp=2,pp=2,dp=2 or fsdp=4"),
        ("tp=0", "'tp=0' is not an axis and a size; use tp=2,pp=2,dp=2 or fsdp=4"),
        (
            "tp=" + "9" * 5000,
            f"'tp={'9' * 37}' is not an axis and a size; use tp=2,pp=2,dp=2 or fsdp=4",
        ),
        ("dp=2,dp_replicate=2", "dp_replicate is given twice in 'dp=2,dp_replicate=2'"),
    ],
)
def test_an_invalid_text_of_a_mesh_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError) as refused:
        Mesh.parse(text)
    assert str(refused.value) == complaint


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


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (("ranks", 0, "host"), {"a": 1}, 'ranks[0].host: {"a": 1} is not a text'),
        (("ranks", 0, "rank"), "0", 'ranks[0].rank: "0" is not an integer'),
        (("ranks", 0, "pid"), True, "ranks[0].pid: true is not an integer"),
        (("ranks", 0), None, "ranks[0]: null is not an object"),
        (("ranks",), {}, "ranks: {} is not a list"),
        (("groups", 1, "ranks"), [0, 1.5], "groups[1].ranks[1]: 1.5 is not an integer"),
        (("groups", 1, "ranks", 0), 2**70, f"groups[1].ranks[0]: {2**70} is not an integer"),
        (("training", "schedule"), {"a": 1}, 'training.schedule: {"a": 1} is not a text'),
        (("model", "gated"), 0, "model.gated: 0 is not true or false"),
        (("mesh", 0, "size"), "2", 'mesh[0].size: "2" is not an integer'),
        (("versions",), [], "versions is not an object"),
        (("training", "microbatches"), 0, "training.microbatches: 0 is less than 1"),
        (("model", "layers"), -1, "model.layers: -1 is less than 1"),
        (("ranks", 0, "rank"), 4, "ranks[0].rank: 4 is not a rank of 4"),
        (("groups", 1, "ranks"), [0, -2], "groups[1].ranks: -2 is not a rank of 4"),
        (("hosts",), [{"host": "a", "gpus": -1}], "hosts[0].gpus: -1 is less than 0"),
        (("world_size",), 0, "world_size: 0 is not a number of ranks"),
        (("world_size",), 10**9, "world_size: 1000000000 is not a number of ranks"),
    ],
)
def test_a_field_of_another_type_or_out_of_range_is_named(
    place: tuple[str | int, ...], value: object, problem: str
) -> None:
    body = json.loads(to_json(SPEC))
    parent = body
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = value
    with pytest.raises(ValueError, match=r".") as error:
        from_json(json.dumps(body))
    assert str(error.value) == problem


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN"])
def test_numbers_that_json_does_not_have_are_refused(number: str) -> None:
    text = to_json(SPEC).replace('"world_size": 4', f'"world_size": {number}')
    with pytest.raises(ValueError, match=f"{number} is not valid JSON"):
        from_json(text)


def test_text_that_utf_8_cannot_encode_is_replaced() -> None:
    """Python writes other bytes of the environment or of file names as lone surrogates."""
    body = json.loads(to_json(SPEC))
    body["name"], body["versions"]["torch"] = "exp\udcff", "2.13\ud800"
    spec = from_json(json.dumps(body))
    assert (spec.name, spec.version("torch")) == ("exp?", "2.13?")


def test_a_missing_field_of_a_rank_is_named() -> None:
    body = json.loads(to_json(SPEC))
    del body["ranks"][0]["host"]
    with pytest.raises(ValueError, match=r"ranks\[0\].host is missing"):
        from_json(json.dumps(body))


def test_whole_numbers_may_be_written_as_decimals() -> None:
    body = json.loads(to_json(SPEC))
    body["training"]["seq_len"] = 64.0
    assert from_json(json.dumps(body)) == SPEC


def test_json_nested_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        from_json("[" * 100_000)


def test_a_number_of_thousands_of_digits_is_refused_in_words_of_the_file() -> None:
    text = to_json(SPEC).replace('"world_size": 4', '"world_size": 4' + "0" * 5000)
    with pytest.raises(ValueError, match=r"^a number has 5,001 digits$"):
        from_json(text)


@pytest.mark.parametrize("name", ["9" * 5000, "²"])
def test_a_group_whose_name_python_converts_to_no_number_is_sorted_by_its_name(name: str) -> None:
    groups = [GroupInfo(one, "", (0, 1)) for one in (name, "10", "2")]
    assert [group.name for group in merge_groups(groups)] == ["2", "10", name]


def test_importing_the_collectors_does_not_import_torch() -> None:
    code = "import sys, stepsplit.collectors.record.command; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_profile_run_is_loaded_on_first_access() -> None:
    pytest.importorskip("torch")
    import stepsplit.collectors as collectors
    from stepsplit.collectors.profiler import profile_run

    assert collectors.profile_run is profile_run
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = collectors.nonsense


def test_a_job_keeps_what_its_scheduler_and_opentelemetry_call_it() -> None:
    environment = {
        "SLURM_JOB_ID": "4711",
        "OTEL_RESOURCE_ATTRIBUTES": (
            "service.name=train,nemo.run.id=llama%2Fa1, dl.tensor_parallel.size=8,dl.,host.id=7"
        ),
    }
    assert read_labels(environment) == (
        ("SLURM_JOB_ID", "4711"),
        ("nemo.run.id", "llama/a1"),
        ("dl.tensor_parallel.size", "8"),
    )
    assert read_labels({"SLURM_JOB_ID": "", "OTEL_RESOURCE_ATTRIBUTES": "dl.a"}) == ()
    many = ",".join(f"dl.k{number}={'v' * 999}" for number in range(99))
    labels = read_labels({"OTEL_RESOURCE_ATTRIBUTES": many})
    assert (len(labels), {len(value) for _, value in labels}) == (16, {200})


def test_labels_are_in_run_json_and_in_that_of_gathered_records(tmp_path: Path) -> None:
    labels = (("SLURM_JOB_ID", "4711"), ("nemo.run.id", "a1"))
    assert from_json(to_json(replace(SPEC, labels=labels))).labels == labels
    assert "labels" not in json.loads(to_json(SPEC))
    record = RankRecord("exp1", RankInfo(0, 0, "node1", 4711, "cpu"), 4, "gloo", labels=labels)
    read = read_record(write_record(tmp_path, record).read_text())
    assert build_spec([read]).labels == labels


@pytest.mark.parametrize("labels", ["4711", ["a"], {"SLURM_JOB_ID": 4711}])
def test_labels_of_another_kind_are_refused(labels: object) -> None:
    text = json.dumps(json.loads(to_json(SPEC)) | {"labels": labels})
    with pytest.raises(ValueError, match="labels: expected an object of texts"):
        from_json(text)
