"""The ledger of a watched job: by hand, by random jobs, and from damaged folders."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.regression.checks import parse_budgets
from stepsplit.analyzer.regression.judge import check_candidate
from stepsplit.analyzer.report.ledger import Ledger, ledger_to_json
from stepsplit.analyzer.watch.goodput import build_goodput_metrics
from stepsplit.analyzer.watch.ledger import build_ledger, read_ledger
from stepsplit.collectors.formats import watch_notes
from stepsplit.collectors.formats.watch_notes import (
    LAUNCHES,
    LEFT,
    Beat,
    BeatFile,
    Launch,
    Note,
    NoteFile,
    RankEnded,
    RankSpan,
    RankStarted,
    RankWindow,
    build_notes_path,
    count_incarnations,
    note_launch,
)

S = 1_000_000_000
T0 = 1_800_000_000 * S


def _start(number: int, at_s: float, before: int | None = 0, rank: int = 0) -> RankStarted:
    """A process that began at at_s, had torch after 2 s, its first step after 5, its watch at 6."""
    t = T0 + int(at_s * S)
    return RankStarted(
        rank, 1, "h", 1, number, 0.005, t + 6 * S, t, t + 2 * S, t + 5 * S, before
    )  # fmt: skip


def _window(
    first: int, begin_s: float, end_s: float, long: Sequence[tuple[int, float, float]] = ()
) -> RankWindow:
    """20 steps of 0.1 s, but the long ones: (step, end, seconds)."""
    longest = tuple((step, T0 + int(end * S), int(took * S)) for step, end, took in long)
    most = max([took for _, _, took in long], default=0.1)
    return RankWindow(
        0, first, first + 19, T0 + int(begin_s * S), T0 + int(end_s * S), 20, S // 10, S // 10,
        int(most * S), 0, longest,
    )  # fmt: skip


def _span(mark: str, begin_s: float, end_s: float, rank: int = 0) -> RankSpan:
    return RankSpan(rank, mark, T0 + int(begin_s * S), T0 + int(end_s * S))


def _show(ledger: Ledger) -> dict[str, tuple[float, int]]:
    return {row.kind: (row.ns / S, row.count) for row in ledger.rows}


def test_each_second_of_a_killed_and_restarted_job_has_its_row() -> None:
    # Command at 0; process at 1; first step until 6; watch from step 4 on (numbers from 0).
    first: list[Note] = [
        _start(0, 1.0),
        _span("process_group", 3.0, 4.0),
        _span("compile", 4.5, 5.5),
        _window(4, 6.3, 8.3),
        # One step has a checkpoint of 3 s in it, another one hangs for 10 s.
        _span("checkpoint", 8.5, 11.5),
        _window(24, 8.3, 23.1, [(25, 11.6, 3.1), (30, 22.1, 10.0)]),
    ]
    # Killed 1.5 s after the last window: ten steps more had ended, the last of them at 24.1.
    beats = {(0, 0): Beat(53, T0 + int(24.1 * S), T0 + int(24.2 * S))}
    # The second command begins 5 s later, from the checkpoint at step 30.
    again: list[Note] = [
        _start(1, 30.0, 30),
        _window(34, 35.3, 37.3),
        _window(54, 37.3, 39.3),
        RankEnded(0, 74, T0 + int(40.3 * S)),
    ]
    launches = [
        Launch("h", 7, 0, T0, T0 + int(24.5 * S), -9),
        Launch("h", 8, 1, T0 + int(29.5 * S), T0 + int(41.3 * S), 0),
    ]
    ledger = build_ledger("w", {0: [*first, *again]}, beats, launches)

    assert ledger.wall_ns == int(41.3 * S)
    assert _show(ledger) == {
        # 3 + 20 + 20 + 10 steps, of which the hang and the checkpoint are taken out; then 54 to 73.
        # A step of the first start is its other start-up.
        "train": (pytest.approx(0.3 + 2.0 + 14.8 - 3.0 - 9.9 + 1.0 + 2.0), 73),
        "redone": (pytest.approx(0.3 + 2.0), 23),
        "checkpoint": (3.0, 1),
        "compile": (1.0, 1),
        "launcher": (pytest.approx(1.0 + 0.5), 0),
        "imports": (4.0, 0),
        "process_group": (1.0, 1),
        "startup": (pytest.approx(3.0 + 3.0 - 2.0), 2),
        "stall": (pytest.approx(9.9), 1),
        "restart_gap": (pytest.approx(5.0), 1),
        # After the last word of the killed rank its launcher ends; the step in which it was killed
        # is not known.
        "shutdown": (pytest.approx(0.3 + 2.0), 0),
        "unknown": (pytest.approx(0.1), 0),
    }
    assert ledger.goodput == pytest.approx(7.2 / 41.3)
    assert [one.ending for one in ledger.incarnations] == ["lost", "ended"]
    assert ledger.lacks == ()
    assert msgspec.json.decode(ledger_to_json(ledger), type=Ledger) == ledger


@pytest.mark.parametrize("lacks", ["nothing", "beat", "end", "minute"])
def test_a_launcher_ends_after_its_killed_ranks_as_far_as_that_is_known(lacks: str) -> None:
    """Without beats they may have lived on, and after over a minute have hung."""
    notes: list[Note] = [_start(0, 1.0), _window(4, 6.3, 8.3)]
    beats = {(0, 0): Beat(23, T0 + int(8.3 * S), T0 + int(8.4 * S))}
    exit_s = 99.4 if lacks == "minute" else 15.4
    end = None if lacks == "end" else T0 + int(exit_s * S)
    launches = [Launch("h", 7, 0, T0, end, -9)]
    rows = _show(build_ledger("w", {0: notes}, {} if lacks == "beat" else beats, launches))
    assert rows.get("shutdown", (0.0, 0))[0] == (7.0 if lacks == "nothing" else 0.0)
    rest_s = {"nothing": 0.1, "beat": 7.1, "end": 0.1, "minute": 91.1}[lacks]
    assert rows["unknown"][0] == pytest.approx(rest_s)


def test_a_rank_that_waits_for_the_checkpoint_of_another_one_does_not_stall() -> None:
    one = [_start(0, 0.0), _window(4, 5.3, 10.3, [(9, 9.5, 3.1)]),
           RankEnded(0, 24, T0 + int(10.3 * S))]  # fmt: skip
    ledger = build_ledger("w", {0: [*one, _span("checkpoint", 6.4, 9.4)], 1: one})
    assert _show(ledger)["checkpoint"] == (3.0, 1)
    assert "stall" not in _show(ledger)


def test_without_a_count_of_the_optimizer_goodput_is_a_bound() -> None:
    notes: list[Note] = [_start(0, 0.0, None), _window(4, 5.3, 7.3), _start(1, 9.0, None)]
    ledger = build_ledger("w", {0: notes})
    assert ledger.is_goodput_bound
    assert any("not known" in lack for lack in ledger.lacks)
    assert "redone" not in _show(ledger)


def test_the_time_before_an_attach_is_not_of_the_watch() -> None:
    started = RankStarted(0, 1, "h", 1, 0, 0.005, T0)
    ledger = build_ledger("w", {0: [started, _window(500, 0.0, 2.0)]})
    assert ledger.wall_ns == 2 * S
    assert _show(ledger) == {"train": (2.0, 20)}
    assert "before the watch" in ledger.lacks[0]


def test_an_earlier_command_does_not_end_a_job_that_was_attached_to() -> None:
    before: list[Note] = [_start(0, 1.0), _window(4, 6.3, 8.3), RankEnded(0, 24, T0 + 9 * S)]
    attached = RankStarted(0, 1, "h", 1, 1, 0.005, T0 + 100 * S)
    launches = [Launch("h", 7, 0, T0, T0 + 10 * S, 0)]
    ledger = build_ledger("w", {0: [*before, attached, _window(500, 100, 102)]}, {}, launches)
    assert [one.ending for one in ledger.incarnations] == ["ended", "lost"]
    assert any("still runs" in lack for lack in ledger.lacks)


def test_a_watch_that_was_left_is_not_the_end_of_the_job() -> None:
    notes: list[Note] = [
        RankStarted(0, 1, "h", 1, 0, 0.005, T0), _window(500, 0, 2),
        RankEnded(0, 520, T0 + 3 * S, LEFT), RankEnded(0, 520, T0 + 3 * S),
    ]  # fmt: skip
    ledger = build_ledger("w", {0: notes})
    assert ledger.incarnations[0].ending == "lost"
    assert _show(ledger) == {"train": (2.0, 20), "unknown": (1.0, 0)}
    assert any("while it went on" in lack for lack in ledger.lacks)


def test_commands_and_starts_without_notes_are_a_gap() -> None:
    # A command that fails before its ranks note anything; the next one a day later has its number.
    day = 86_400
    launches = [
        Launch("h", 7, 0, T0, T0 + 10 * S, 1),
        Launch("h", 8, 0, T0 + day * S, T0 + (day + 20) * S, 0),
    ]
    notes: list[Note] = [_start(0, day + 1.0), _window(4, day + 6.3, day + 8.3)]
    rows = _show(build_ledger("w", {0: notes}, {}, launches))
    assert (rows["restart_gap"], rows["launcher"]) == ((day, 1), (1.0, 0))

    # A launcher whose first ranks die early, and that starts them again.
    notes = [_start(1, 41.0), _window(4, 46.3, 48.3)]
    ledger = build_ledger("w", {0: notes}, {}, [Launch("h", 7, 0, T0, T0 + 50 * S, 0)])
    assert ledger.wall_ns == 50 * S
    assert _show(ledger)["restart_gap"] == (41.0, 1)
    assert "(1)" in ledger.lacks[0]


def test_steps_that_one_start_does_twice_are_done_again() -> None:
    notes: list[Note] = [
        _start(0, 0.0), _window(4, 5.3, 7.3), _start(0, 10.0, 4), _window(8, 15.3, 17.3),
    ]  # fmt: skip
    rows = _show(build_ledger("w", {0: notes}))
    # Of 20 steps and the 3 before them 19 were done already.
    assert (rows["redone"][1], rows["train"][1]) == (19, 3 + 20 + 4)


def test_rows_add_up_whatever_happens() -> None:
    for seed in range(300):
        generator = random.Random(seed)
        notes, beats, launches = _invent_job(generator)
        ledger = build_ledger("w", notes, beats, launches)
        for part in (ledger, *ledger.incarnations):
            assert sum(row.ns for row in part.rows) == part.wall_ns, seed
            assert all(row.ns >= 0 and row.count >= 0 for row in part.rows), seed
        hours = sum(one.wall_ns * len(one.ranks) for one in ledger.incarnations) / 3.6e12
        assert ledger.gpu_hours == pytest.approx(hours), seed
        assert 0.0 <= ledger.goodput <= 1.0


def _invent_job(
    generator: random.Random,
) -> tuple[dict[int, list[Note]], dict[tuple[int, int], Beat], list[Launch]]:
    """Starts killed anywhere, clocks that are set back, marks that overlap, steps that repeat."""
    ranks = generator.randint(1, 3)
    notes: dict[int, list[Note]] = {rank: [] for rank in range(ranks)}
    beats: dict[tuple[int, int], Beat] = {}
    launches: list[Launch] = []
    at = 0.0
    for number in range(generator.randint(1, 4)):
        at += generator.choice([3.0, 0.1, -20.0])
        launch = at - generator.choice([1.0, 0.0, 50.0])
        before = generator.choice([None, 0, 13, 40])
        last = at
        for rank in range(ranks):
            own, now, step = notes[rank], at + generator.random(), (before or 0) + 4
            own.append(_start(number, now, before, rank))
            now += 6.3
            for _ in range(generator.randint(0, 6)):
                took = generator.choice([2.0, 20.0, -5.0])
                long = [(step, now + took / 2, generator.random() * 30)] * generator.randint(0, 3)
                own.append(_window(step, now, now + took, long))
                mark = generator.choice(["checkpoint", "evaluation", "compile", "no such mark"])
                begin = now + generator.uniform(-8, 8)
                own.append(_span(mark, begin, begin + generator.uniform(-1, 9), rank))
                now, step = now + took, step + generator.choice([20, 23, 500, -30])
            if generator.random() < 0.5:
                own.append(RankEnded(rank, step, T0 + int((now + 1) * S)))
            if generator.random() < 0.7:
                end = T0 + int(now * S)
                beats[rank, number] = Beat(step + 7, end, end + generator.randint(-S, 40 * S))
            last = now
        at = last
        if generator.random() < 0.7:
            end = generator.choice([None, T0 + int((at + 2) * S)])
            launches.append(Launch("h", number, number, T0 + int(launch * S), end, 1))
    return notes, beats, launches


def test_a_goodput_is_checked_without_a_baseline_and_without_statistics() -> None:
    notes: list[Note] = [_start(0, 0.0), _window(4, 5.3, 9.3), RankEnded(0, 24, T0 + 10 * S)]
    ledger = build_ledger("w", {0: notes})
    assert ledger.goodput == pytest.approx(0.43)
    run = build_goodput_metrics(ledger)
    answers = {
        rule: check_candidate([run], [], parse_budgets([rule])).answer
        for rule in ("goodput:40%", "goodput:>=40%", "goodput:95%")
    }
    assert answers == {
        "goodput:40%": "pass", "goodput:>=40%": "pass", "goodput:95%": "regressed"
    }  # fmt: skip
    assert not ledger.is_goodput_bound
    # The screen says no more than the check.
    still = build_ledger("w", {0: notes[:2]})
    assert still.lacks and still.is_goodput_bound
    again: list[Note] = [_start(0, 0.0, None), _window(4, 5.3, 9.3), _start(1, 9.3, None)]
    bound = build_goodput_metrics(build_ledger("w", {0: again}))
    result = check_candidate([bound], [], parse_budgets(["goodput:1%"]))
    assert result.answer == "inconclusive" and "at most" in result.gated[0].note
    for rule in ("goodput:150%", "goodput:>=100.1%"):
        with pytest.raises(UsageError, match="more than 100%"):
            parse_budgets([rule])


@pytest.mark.parametrize("lack", ["ranks", "end", "attach", "lines", "start"])
def test_a_goodput_of_which_something_is_not_known_does_not_pass(lack: str) -> None:
    number = 1 if lack == "start" else 0
    started = _start(number, 0.0)
    if lack == "ranks":
        started = replace(started, world_size=8)
    if lack == "attach":
        started = RankStarted(0, 1, "h", 1, 0, 0.005, T0)
    notes: list[Note] = [started, _window(4, 5.3, 9.3)]
    notes += [] if lack == "end" else [RankEnded(0, 24, T0 + 10 * S)]
    lacks = ["3 lines of notes are torn"] if lack == "lines" else []
    run = build_goodput_metrics(build_ledger("w", {0: notes}, lacks=lacks))
    assert check_candidate([run], [], parse_budgets(["goodput:1%"])).answer == "inconclusive"
    assert check_candidate([run], [], parse_budgets(["goodput:99%"])).answer == "regressed"


def test_notes_that_are_cut_off_before_the_newest_step_are_said() -> None:
    notes: list[Note] = [_start(0, 0.0), _window(4, 5.3, 7.3), RankEnded(0, 200, T0 + 40 * S)]
    whole = {(0, 0): Beat(43, T0 + 9 * S, T0 + 9 * S)}
    assert build_ledger("w", {0: notes}, whole).lacks == ()
    cut = {(0, 0): Beat(199, T0 + 39 * S, T0 + 40 * S)}
    (lack,) = build_ledger("w", {0: notes}, cut).lacks
    assert lack.startswith("start 1: the last notes of rank 0 are lost")


@pytest.mark.parametrize("jump_s", [-7200.0, 7200.0])
def test_a_clock_that_is_set_is_said(jump_s: float) -> None:
    notes: list[Note] = [
        _start(0, 1.0), _window(4, 6.3 + jump_s, 8.3 + jump_s), RankEnded(0, 24, T0 + 9 * S)
    ]  # fmt: skip
    launches = [Launch("h", 7, 0, T0, T0 + 10 * S, 0)]
    ledger = build_ledger("w", {0: notes}, {}, launches)
    assert [lack for lack in ledger.lacks if "a clock was set" in lack]
    assert sum(row.ns for row in ledger.rows) == ledger.wall_ns
    assert ledger.is_goodput_bound


# Folders.


def _write(folder: Path) -> None:
    NoteFile(folder, 0).write([_start(0, 0.0), _window(4, 5.3, 7.3)])
    BeatFile(folder, 0, 0).write(Beat(23, T0 + int(7.3 * S), T0 + int(7.4 * S)))
    note_launch(folder, Launch("h", 1, 0, T0 - S))


def test_a_folder_is_read_also_when_lines_are_damaged(tmp_path: Path) -> None:
    _write(tmp_path)
    whole = read_ledger(tmp_path)
    assert _show(whole)["launcher"] == (1.0, 0)
    path = build_notes_path(tmp_path, 0)
    path.write_bytes(path.read_bytes() + b'{"kind": "window", "rank": "x"}\n[1]\nno json\n{"torn')
    ledger = read_ledger(tmp_path)
    assert ledger.rows == whole.rows
    assert ledger.lacks[0].startswith("3 lines")


def test_a_start_is_known_also_when_its_first_notes_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_notes, "MAX_NOTES_BYTES", 64 << 10)
    notes = NoteFile(tmp_path, 0)
    notes.write([_start(0, 0.0)])
    BeatFile(tmp_path, 0, 0).write(Beat(23, T0 + 7 * S, T0 + 7 * S))
    windows = [_window(4 + 20 * n, 5.3 + 2 * n, 7.3 + 2 * n) for n in range(900)]
    for at in range(0, len(windows), 20):
        notes.write(windows[at : at + 20])
    kept = sum(path.stat().st_size for path in (tmp_path / "ranks").glob("*.jsonl*"))
    assert kept < 2.2 * (64 << 10)
    ledger = read_ledger(tmp_path)
    assert len(ledger.incarnations) == 1
    assert ledger.wall_ns == int(1805.3 * S)
    rows = _show(ledger)
    assert rows["startup"][1] == 1 and rows["unknown"][0] > 100 and rows["train"][0] > 100
    assert count_incarnations(tmp_path) == 1

    # The notes of a start are all gone; its beats are not.
    for path in (tmp_path / "ranks").glob("*.jsonl*"):
        path.unlink()
    assert count_incarnations(tmp_path) == 1


def test_a_start_whose_notes_have_moved_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_notes, "MAX_NOTES_BYTES", 64 << 10)
    NoteFile(tmp_path, 0).write([_start(0, 0.0), *[_window(4, 5.3, 7.3)] * 400])
    assert not build_notes_path(tmp_path, 0).exists()
    build_notes_path(tmp_path, 0).touch()
    assert count_incarnations(tmp_path) == 1


def test_launches_with_other_values_are_lost_lines(tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / LAUNCHES / "h.jsonl"
    body = json.loads(path.read_text())
    wrong = [{"unix_ns": "x"}, {"unix_ns": None}, {"incarnation": [1]}, {"end_unix_ns": 1.5},
             {"status": "0"}, {"pid": 10**30}, {"host": 3}, {"incarnation": -1}]  # fmt: skip
    with path.open("a") as file:
        for one in wrong:
            file.write(json.dumps(body | {"pid": 2} | one) + "\n")
    ledger = read_ledger(tmp_path)
    assert ledger.lacks[0].startswith(f"{len(wrong)} lines")
    assert _show(ledger)["launcher"] == (1.0, 0)
    assert count_incarnations(tmp_path) == 1


def test_a_folder_without_a_start_is_an_error_of_one_line(tmp_path: Path) -> None:
    path = build_notes_path(tmp_path, 0)
    path.parent.mkdir()
    for content in (b"", b"\x00\xff\n", b'{"kind": "started"}\n', b"[" * 100_000 + b"\n"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="no rank has noted its start"):
            read_ledger(tmp_path)


def test_numbers_of_another_world_are_lost_lines(tmp_path: Path) -> None:
    _write(tmp_path)
    path = build_notes_path(tmp_path, 0)
    lines = path.read_text().splitlines()
    for name in ("start_unix_ns", "median_step_ns", "first_step"):
        for value in (10**400, -(10**30), "1", 1.5, None, [], float("inf")):
            body = json.loads(lines[1]) | {name: value}
            path.write_text(f"{lines[0]}\n{json.dumps(body)}\n")
            ledger = read_ledger(tmp_path)
            assert sum(row.ns for row in ledger.rows) == ledger.wall_ns


def test_damaged_notes_give_a_ledger_or_an_error(tmp_path: Path) -> None:
    _write(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    contents = {path: path.read_bytes() for path in files}
    generator = random.Random(1)
    for _ in range(300):
        for path, content in contents.items():
            damaged = bytearray(content)
            for _ in range(generator.randint(0, 4)):
                damaged[generator.randrange(len(damaged))] = generator.randrange(256)
            path.write_bytes(damaged[: generator.choice([len(damaged), len(damaged) // 2])])
        try:
            ledger = read_ledger(tmp_path)
        except DataError:
            continue
        assert sum(row.ns for row in ledger.rows) == ledger.wall_ns
