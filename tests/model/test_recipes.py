"""A GPU and a key of job.toml are added to a copy of the code, as CONTRIBUTING.md says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRESETS = "analyzer/model/presets"
JOB = """
[model]
preset = "llama-3.1-8b"
[parallel]
dp = 8
zero = 1
[training]
seq_len = 4096
micro_batch = 1
global_batch = 16
{training}
[hardware]
preset = "{gpu}"
"""


class Copy:
    """A copy of the code that is imported as stepsplit, and a folder to run it in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.code = folder, folder / "stepsplit"
        for room in ("analyzer", "collectors", "dashboard"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / room, self.code / room, ignore=ignored)

    def edit(self, file: str, old: str, new: str) -> None:
        text = (self.code / file).read_text()
        assert text.count(old) == 1, (file, old)
        (self.code / file).write_text(text.replace(old, new))

    def append(self, file: str, entry: str) -> None:
        with (self.code / file).open("a") as opened:
            opened.write(entry)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "COLUMNS": "100"}
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )

    def predict(self, gpu: str, training: str = "") -> subprocess.CompletedProcess[str]:
        """Runs `stepsplit model` for the job on this GPU, with more lines of [training]."""
        (self.folder / "job.toml").write_text(JOB.format(gpu=gpu, training=training))
        return self.run("-m", "stepsplit.dashboard", "model", "job.toml")

    def print_value(self, imported: str, expression: str) -> str:
        """What Python prints for the expression; imported is the rest of "from stepsplit."."""
        done = self.run("-c", f"from stepsplit.{imported}; print({expression})")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


# A GPU.

H200_NVL = """
["h200-nvl"]
source = "NVIDIA H200 NVL datasheet"
driver_name = '(?<!G)H200 NVL'
family = "hopper"
memory_bytes = 150_754_820_096
memory_bytes_per_s = 4.8e12
gpus_per_node = 8
intra = "pcie-5"
nodes_link = "ib-ndr-400"

["h200-nvl".peaks]
source = "the same (dense)"
bf16 = 835.5e12
"""


def test_a_gpu_of_a_known_family_is_one_entry(copy: Copy) -> None:
    copy.append(f"{PRESETS}/hardware/h200.toml", H200_NVL)

    done = copy.predict("h200-nvl")
    assert (done.returncode, done.stderr) == (0, "")
    assert "8 x h200-nvl (1 node)" in done.stdout
    names = "[find_preset(f'NVIDIA {name}') for name in ('H200 NVL', 'H200', 'GH200 NVL')]"
    found = copy.print_value("analyzer.model.preset_names import find_preset", names)
    assert found == "['h200-nvl', 'h200-sxm', None]"


X1 = """
["x1"]
source = "a datasheet"
family = "x"
memory_bytes = 150_754_820_096
memory_bytes_per_s = 4.8e12
gpus_per_node = 8
intra = "nvlink-4"
nodes_link = "ib-ndr-400"

["x1".peaks]
source = "the same"
bf16 = 1.0e15
"""

X = """
[x]
source = "a guess"
gemm = 0.7
attention = 0.5
unfused_attention = 0.5
memory = 0.8
launch_ns = 4000.0
"""


def test_a_gpu_of_a_new_family_needs_an_entry_for_the_family_too(copy: Copy) -> None:
    copy.append(f"{PRESETS}/hardware/x1.toml", X1)
    assert "family: 'x' is unknown; write " in copy.predict("x1").stderr

    copy.append(f"{PRESETS}/efficiency.toml", X)

    done = copy.predict("x1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "8 x x1 (1 node)" in done.stdout
    assert "x1: efficiencies are not calibrated" in done.stdout


# A key of job.toml.


def test_a_key_of_job_toml_is_one_field(copy: Copy) -> None:
    copy.edit(
        "analyzer/model/config.py",
        '    program: str = ""\n',
        '    program: str = ""\n    data_workers: Natural = 0\n',
    )

    done = copy.predict("h100-sxm", "data_workers = 2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "8 x h100-sxm (1 node)" in done.stdout
    used = copy.print_value(
        "analyzer.redact.fields import JOB_FIELDS; from stepsplit.analyzer import read_job",
        "read_job('job.toml').training.data_workers, 'data_workers' in JOB_FIELDS",
    )
    assert used == "2 True"

    wrong = copy.predict("h100-sxm", "data_workers = -1\ndata_worker = 1")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    assert "training.data_worker: unknown key; write data_workers" in wrong.stderr
    assert "data_workers: -1 is not a valid count; write an integer >= 0" in wrong.stderr
