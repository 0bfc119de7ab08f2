"""What the training thread does beside its steps, as its spans say it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from stepsplit.collectors.formats.watch_notes import RankDropped, read_notes
from stepsplit.collectors.probes.launch_times import UNKNOWN_LAUNCH
from stepsplit.collectors.probes.spans import LEAST_SPAN_NS, SpanLog, mark
from stepsplit.collectors.watch.background import WatchThread
from stepsplit.collectors.watch.plan import WatchPlan

PAUSE_S = 2 * LEAST_SPAN_NS / 1e9


class Model:
    """A module with parts, as torch's train() goes through them."""

    def __init__(self, *parts: Model) -> None:
        self._modules = {str(at): part for at, part in enumerate(parts)}


def set_mode(log: SpanLog, module: Model, mode: bool, outermost: Model | None = None) -> None:
    """What model.train() and model.eval() note of a module and of its parts."""
    time.sleep(0 if outermost else PAUSE_S)
    log.note_mode(module, mode, outermost or module)
    for part in module._modules.values() if mode else ():
        set_mode(log, part, mode, outermost or module)


def log_modes(steps_before: int, calls: Iterable[tuple[Model, bool] | None]) -> list[str]:
    """The spans after these calls of train(), of eval() and ends of steps (None)."""
    log = SpanLog()
    log.is_on, log.steps = True, steps_before
    for call in calls:
        if call is None:
            log.end_step()
        else:
            set_mode(log, *call)
    return [span.mark for span in log.take()]


def test_an_evaluation_begins_after_the_first_step() -> None:
    model = Model(Model())

    assert log_modes(0, [(model, False), (model, True)]) == []
    assert log_modes(1, [(model, False), (model, True)]) == ["evaluation"]
    assert log_modes(1, [(model, False), None, (model, True)]) == []


def test_a_frozen_part_is_not_evaluated_in_each_microbatch() -> None:
    frozen = Model()
    model = Model(frozen, Model())
    step = [(model, True), (frozen, False), (model, True), (frozen, False), (model, True), None]

    assert log_modes(1, step + step) == []
    # The model that is frozen in part is evaluated as a whole.
    assert log_modes(1, [*step, (model, False), *step]) == ["evaluation"]


@pytest.mark.parametrize("before", [[], [True]])
def test_what_is_evaluated_within_its_wrapper_is_trained_by_that(before: list[bool]) -> None:
    model = Model(Model(), Model())
    wrapper = Model(Model(model))

    calls = [*((wrapper, mode) for mode in before), (model, False), (wrapper, True)]
    assert log_modes(1, calls) == ["evaluation"]


def test_the_thread_that_ends_the_steps_is_the_one_that_trains() -> None:
    log, found = SpanLog(), []
    log.is_on = True

    def train() -> None:
        for _ in range(2):
            begin = log.begin("checkpoint")
            time.sleep(PAUSE_S)
            log.end("checkpoint", begin)
            found.append(len(log.take()))
            log.end_step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found == [0, 1]


def test_a_watch_may_end_while_a_module_changes_its_mode() -> None:
    log, failures = SpanLog(), []
    log.is_on, log.steps = True, 1
    models = [Model() for _ in range(20)]
    is_over = threading.Event()

    def close() -> None:
        try:
            while not is_over.is_set():
                log.close()
        except Exception as error:  # noqa: BLE001 - what the test asks for
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=close)
    thread.start()
    try:
        for _ in range(3000):
            for model in models:
                log.note_mode(model, False, model)
            log.note_mode(models[3], True, models[3])
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert failures == []


@pytest.mark.parametrize("name", [None, ["evaluation"], 3])
def test_a_mark_of_any_name_raises_nothing(name: Any) -> None:
    with mark(name):
        pass


def test_a_beat_that_cannot_be_written_is_said_once_and_ends_no_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", fail)
    plan = WatchPlan(str(tmp_path), "exp1", every_steps=100)
    link = WatchThread(plan, None, 0, 1, 0, None, UNKNOWN_LAUNCH, knows_steps_before=True)
    link.start()
    time.sleep(0.8)  # three polls
    link.notes.put(RankDropped(0, 1, 1))
    link.close(None)

    kinds = [type(note).__name__ for note in read_notes(tmp_path / "ranks/rank0.jsonl").notes]
    assert kinds == ["RankStarted", "RankDropped", "RankEnded"]
    assert capsys.readouterr().err.count("lost its newest step") == 1


SCRIPT = """
import json, sys, time
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import save as save_shards
from stepsplit.collectors import mark
from stepsplit.collectors.probes.spans import SPANS, watch_spans

watch_spans()
found = {"names": [hasattr(one, "__wrapped__") for one in (dcp.save, dcp.load, save_shards)]}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x):
        self.drop.eval()
        with mark("evaluation"):
            return self.drop(x)

one = torch.ones(2)
compiled = torch.compile(Model(), backend="eager", fullgraph=True)(one)
exported = torch.export.export(Model(), (one,), strict=True).module()(one)
found["values"] = [compiled.tolist(), exported.tolist()]

SPANS.take()
torch._dynamo.reset()
torch.compile(lambda x: x * 3, backend="eager")(one)
found["marks"] = [span.mark for span in SPANS.take()]

model = Model()
found["modes"] = [
    torch.nn.Module.train(self=model, mode=False).training, model.train().drop.training
]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_code_that_is_compiled_or_imported_before_runs_as_without_a_watch() -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "names": [True, True, True],
        "values": [[1, 1], [1, 1]],
        "marks": ["compile"],
        "modes": [False, True],
    }


def test_a_step_of_torchft_waits_for_its_quorum_heals_and_commits(tmp_path: Path) -> None:
    """By an imitation of its Manager: only what the training thread waits for is a span."""
    (tmp_path / "torchft").mkdir()
    (tmp_path / "torchft" / "__init__.py").touch()
    (tmp_path / "torchft" / "manager.py").write_text("""
import threading, time
class Manager:
    def start_quorum(self):
        self.thread = threading.Thread(target=self._wait)
        self.thread.start()
    def _wait(self):
        time.sleep(0.02)
    def wait_quorum(self):
        self.thread.join()
    def _apply_pending_state_dict(self):
        time.sleep(0.01)
    def should_commit(self):
        self._apply_pending_state_dict()
        time.sleep(0.01)
        return True
""")
    script = """
from stepsplit.collectors.probes.spans import SPANS, watch_spans
watch_spans()
from torchft.manager import Manager
manager = Manager()
manager.start_quorum()
manager.wait_quorum()
assert manager.should_commit()
print(*(f"{one.mark}={(one.end_unix_ns - one.begin_unix_ns) / 1e6:.0f}" for one in SPANS.take()))
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    spans = [one.split("=") for one in done.stdout.split()]
    assert [mark for mark, _ in spans] == ["quorum", "heal", "commit"]
    assert all(int(took) >= least for (_, took), least in zip(spans, (15, 9, 19), strict=True))
