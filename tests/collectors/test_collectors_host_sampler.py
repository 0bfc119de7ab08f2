"""Looks at the training thread's place in the code, and garbage collections."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepsplit.collectors.formats.rank_record import CodeFrame, HostSamples  # noqa: E402
from stepsplit.collectors.probes import host_sampler  # noqa: E402
from stepsplit.collectors.probes.host_sampler import HostSampler, find_place  # noqa: E402

HERE = Path(__file__).relative_to(Path.cwd()).as_posix()


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostSampler]:
    """Looks every 2 ms, whatever they cost."""
    monkeypatch.setattr(host_sampler, "INTERVAL_S", 0.002)
    monkeypatch.setattr(host_sampler, "MAX_SHARE", 1e9)
    made = HostSampler(0)
    yield made
    made.stop()


def count_places(samples: HostSamples) -> Counter[tuple[CodeFrame, ...]]:
    assert len(samples.at_unix_ns) == len(samples.place)
    return Counter(samples.places[one] for one in samples.place)


class Texts(torch.utils.data.Dataset[int]):  # type: ignore[name-defined, misc]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        time.sleep(0.05)
        return index


def test_a_slow_data_set_is_seen_at_its_line_and_not_in_torch(sampler: HostSampler) -> None:
    begun_ns = time.time_ns()
    sampler.start()
    list(torch.utils.data.DataLoader(Texts()))
    samples = sampler.stop()
    ((frame,), looks), *_ = count_places(samples).most_common(1)
    line = Texts.__getitem__.__code__.co_firstlineno + 1
    assert (frame.file, frame.line) == (HERE, line)
    assert frame.function.endswith("__getitem__")
    assert looks >= 0.5 * len(samples.place)
    assert begun_ns <= samples.at_unix_ns[0] <= samples.at_unix_ns[-1] <= time.time_ns()


def test_only_the_thread_that_made_it_is_looked_at(sampler: HostSampler) -> None:
    ended = threading.Event()
    other = threading.Thread(target=ended.wait, args=(10,))
    other.start()
    sampler.start()
    time.sleep(0.05)
    ended.set()
    other.join()
    lines = {frame.function for place in sampler.stop().places for frame in place}
    assert lines == {"test_only_the_thread_that_made_it_is_looked_at"}


def test_garbage_collections_are_kept_with_their_time(sampler: HostSampler) -> None:
    sampler.start()
    kept = [[] for _ in range(100_000)]  # type: ignore[var-annotated]
    began_ns = time.time_ns()
    gc.collect()
    ended_ns = time.time_ns()
    (pause,) = (p for p in sampler.stop().gc_pauses if began_ns <= p.at_unix_ns)
    assert pause.generation == 2
    assert pause.at_unix_ns + pause.took_ns <= ended_ns
    assert pause.took_ns >= host_sampler.MIN_PAUSE_NS
    del kept


def test_after_its_end_nothing_of_it_is_left(sampler: HostSampler) -> None:
    before = list(gc.callbacks)
    sampler.start()
    sampler.start()
    assert len(gc.callbacks) == len(before) + 1
    (thread,) = (one for one in threading.enumerate() if one.name == "stepsplit-host")
    sampler.stop()
    thread.join(5)
    assert not thread.is_alive()
    assert gc.callbacks == before
    assert sampler.stop() is not None, "twice, and without a start, is allowed"


def test_a_long_recording_is_thinned_out(
    sampler: HostSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_sampler, "MAX_LOOKS", 8)
    sampler.start()
    time.sleep(0.3)
    at_ns = sampler.stop().at_unix_ns
    assert len(at_ns) < 8
    assert at_ns[-1] - at_ns[0] >= 0.1e9, "of all the time"


def test_a_failing_look_is_a_warning(
    sampler: HostSampler, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(frame: object) -> None:
        raise RuntimeError("no frames")

    monkeypatch.setattr(host_sampler, "find_place", fail)
    sampler.start()
    time.sleep(0.1)
    assert sampler.stop().place == ()
    assert capfd.readouterr().err == (
        "stepsplit: rank 0: lost the places in the code where its host spends time: no frames\n"
    )


def frame_in(file: str, outer: Any = None) -> Any:
    code = compile("0", file, "exec")
    return SimpleNamespace(f_code=code, f_lineno=7, f_back=outer)


def test_the_place_is_outside_of_torch_and_the_standard_library() -> None:
    user = frame_in("/home/me/train.py", frame_in("/home/me/launch.py"))
    torch_frame = frame_in(str(Path(torch.__file__).parent / "nn" / "module.py"), user)
    library = frame_in("/venv/lib/python3.11/site-packages/transformers/trainer.py", torch_frame)
    innermost = frame_in(threading.__file__, frame_in("<string>", library))

    def find(frame: FrameType | None) -> list[str]:
        place: tuple[tuple[CodeType, int], ...] | None = find_place(frame)
        return [code.co_filename for code, _ in place or ()]

    assert find(torch_frame) == ["/home/me/train.py"]
    assert find(innermost) == [library.f_code.co_filename, "/home/me/train.py"]
    assert find(frame_in(threading.__file__)) == []


def test_a_file_is_named_from_its_package_or_the_job_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/opt/scripts"])
    name = host_sampler.shorten_file
    assert name("/venv/lib/python3.11/site-packages/a/b.py") == "a/b.py"
    assert name(str(tmp_path / "data" / "loader.py")) == "data/loader.py"
    assert name("/opt/scripts/train.py") == "train.py"
    assert name("/elsewhere/train.py") == "/elsewhere/train.py"
