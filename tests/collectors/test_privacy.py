"""What a real recording says about the machine, as docs/privacy.md lists it."""

import gzip
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stepsplit.analyzer.redact import redact_recording

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "privacy.md"

TRAINING = """
import sys
import torch
from stepsplit.collectors import profile_run

model = torch.nn.Linear(256, 256)
optimizer = torch.optim.AdamW(model.parameters())

def slow_private_step():
    for _ in range(40):
        model(torch.ones(256, 256)).sum().backward()
    optimizer.step()

with profile_run(sys.argv[1], wait=1, warmup=1, active=3) as run:
    for _ in range(8):
        slow_private_step()
        run.step()
"""

HOST = "the host's name"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training in the home of a user alice, with secrets in its environment and arguments."""
    home = tmp_path_factory.mktemp("homes") / "home" / "alice"
    home.mkdir(parents=True)
    (home / "train.py").write_text(TRAINING)
    secrets = {"WANDB_API_KEY": "s3cret-token", "USER": "alice", "HOME": str(home)}
    command = [sys.executable, str(home / "train.py"), "runs/exp1", "--password", "hunter2"]
    subprocess.run(command, check=True, cwd=home, env=os.environ | secrets)
    return home / "runs" / "exp1"


def find_words(folder: Path) -> dict[str, set[str]]:
    """The private words in each file, by their kind."""
    words = {
        HOST: rf"\b{re.escape(socket.gethostname())}\b", "user": r"\balice\b", "path": r"/home/",
        "argument": "hunter2", "environment": "s3cret", "code": "slow_private_step",
    }  # fmt: skip
    found = {}
    for path in sorted(folder.iterdir()):
        packed = path.name.endswith(".gz")
        text = (gzip.decompress(path.read_bytes()) if packed else path.read_bytes()).decode()
        found[path.name] = {kind for kind, word in words.items() if re.search(word, text)}
    return found


def test_a_recording_holds_the_host_and_places_in_the_code_and_no_secret(recording: Path) -> None:
    assert find_words(recording) == {
        "rank0_record.json": {HOST, "code"},
        "rank0_trace.json.gz": {HOST},
        "run.json": {HOST},
    }


def test_its_redacted_copy_holds_none_of_them(recording: Path, tmp_path: Path) -> None:
    redact_recording([recording], tmp_path / "copy")

    assert find_words(tmp_path / "copy") == {
        "rank0_record.json": set(),
        "rank0_trace.json.gz": set(),
        "run.json": set(),
    }


def test_the_page_lists_every_field_of_a_recording(recording: Path) -> None:
    listed = set(re.findall(r"`([\w.]+)`", PAGE.read_text()))
    for name in ("run.json", "rank0_record.json"):
        fields = json.loads((recording / name).read_text()).keys() - {"schema"}
        assert fields - listed == set(), name
    with gzip.open(recording / "rank0_trace.json.gz") as file:
        assert json.load(file).keys() - listed == set()
