"""examples/clusters: the commands of each file, run as a cluster would, with what it would set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepsplit.collectors.__main__ import main
from stepsplit.collectors.formats.run_spec import from_json

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"

# Runs a command once for each node, one after the other, as srun would with a task on each.
SRUN = """#!/usr/bin/env bash
set -euo pipefail
[[ "$1" == --kill-on-bad-exit=1 ]]
shift
for node in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$node SLURM_PROCID=$node "$@"; done
"""
# Names come one after the other: what has read enough after the first must not end the job.
SCONTROL = """#!/usr/bin/env bash
[[ "$*" == "show hostnames node[3-4]" ]] && echo node3 && sleep 0.1 && echo node4
"""
NOTES = f"""#!{sys.executable}
import json, sys
with open({{calls!r}}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""


def put(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    (folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "programs"
    folder.mkdir()
    put(folder, "stepsplit", NOTES.format(calls=str(tmp_path / "calls")))
    put(folder, "srun", SRUN)
    put(folder, "scontrol", SCONTROL)
    return folder


def run_bash(programs: Path, arguments: list[str], **variables: str) -> list[list[str]]:
    """What `stepsplit` was called with."""
    path = f"{programs}{os.pathsep}/usr/bin{os.pathsep}/bin"
    subprocess.run(
        ["bash", *arguments], check=True, cwd=programs.parent, env={"PATH": path, **variables}
    )
    calls = (programs.parent / "calls").read_text().splitlines()
    return [json.loads(call) for call in calls]


def find_command(call: list[str]) -> list[str]:
    """The words of the recorded command, whose options `record` takes."""
    assert call[0] == "record"
    return call[call.index("--") + 1 :]


def parse_torchrun(words: list[str]) -> Mapping[str, Any]:
    """The options as torchrun itself reads them."""
    run = pytest.importorskip("torch.distributed.run")
    assert words[0] == "torchrun"
    parsed: Mapping[str, Any] = vars(run.get_args_parser().parse_args(words[1:]))
    return parsed


def test_slurm_records_on_each_node_of_the_job(programs: Path) -> None:
    calls = run_bash(
        programs,
        [str(CLUSTERS / "slurm.sbatch"), "train.py", "--steps", "a word"],
        SLURM_JOB_ID="47110815",
        SLURM_JOB_NODELIST="node[3-4]",
        SLURM_NNODES="2",
        SLURM_GPUS_ON_NODE="8",
        STEPSPLIT_OUT="s3://bucket/runs",
    )

    assert [call[1:3] for call in calls] == [["--out", "s3://bucket/runs/47110815"]] * 2
    for node, call in enumerate(calls):
        options = parse_torchrun(find_command(call))
        assert (options["nnodes"], options["nproc_per_node"]) == ("2", "8")
        assert (options["node_rank"], options["master_addr"]) == (node, "node3")
        assert 20000 <= options["master_port"] < 40000
        assert options["training_script"] == "train.py"
        assert options["training_script_args"] == ["--steps", "a word"]


def test_skypilot_records_on_each_node_of_the_job(programs: Path) -> None:
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    (call,) = run_bash(
        programs,
        ["-c", task["run"]],
        SKYPILOT_TASK_ID="sky-2026-11-30-12-00-00_train",
        SKYPILOT_NUM_NODES=str(task["num_nodes"]),
        SKYPILOT_NODE_RANK="1",
        SKYPILOT_NUM_GPUS_PER_NODE="8",
        SKYPILOT_NODE_IPS="10.0.0.3\n10.0.0.4",
        **task["envs"],
    )

    assert call[1:3] == ["--out", "s3://bucket/runs/sky-2026-11-30-12-00-00_train"]
    options = parse_torchrun(find_command(call))
    assert (options["nnodes"], options["node_rank"], options["nproc_per_node"]) == ("2", 1, "8")
    assert (options["master_addr"], options["training_script"]) == ("10.0.0.3", "train.py")


@pytest.mark.slow
def test_kubeflow_records_what_its_runtime_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    trainer = yaml.safe_load((CLUSTERS / "kubeflow.yaml").read_text())["spec"]["trainer"]
    out = tmp_path / "exp1"
    (url,) = [word for word in trainer["command"] if "://" in word]
    assert url == "s3://bucket/runs/$(TRAINJOB)"
    # On the disk, and with the file that the image would have; PET_ as the runtime sets it.
    script = Path(__file__).parents[2] / "examples" / "plain_ddp.py"
    replaced = {url: str(out), "50": "5", "train.py": str(script)}
    words = [replaced.get(word, word) for word in (*trainer["command"], *trainer["args"])]
    for name, value in {
        "PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "29513", "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)

    assert main(words[1:]) == 0

    assert from_json((out / "run.json").read_bytes()).world_size == 2
