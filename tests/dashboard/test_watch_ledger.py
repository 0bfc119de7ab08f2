"""The ledger of a watched job where it is shown: page, terminal, JSON and sinks say the same."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import create_engine, text
from support.page_text import read_tables
from support.watch_builders import RUN, batch, minutes_ago

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.report.ledger import IncarnationLedger, Ledger, LedgerRow, sum_rows
from stepsplit.analyzer.report.ledger_words import format_gpu_hours, format_rows
from stepsplit.analyzer.watch import reducer as reducer_module
from stepsplit.analyzer.watch.records import WatchBatch
from stepsplit.analyzer.watch.reducer import Reducer, WatchFolder
from stepsplit.collectors.formats.watch_notes import (
    Beat,
    BeatFile,
    Launch,
    Note,
    NoteFile,
    RankEnded,
    RankSpan,
    RankStarted,
    RankWindow,
    note_launch,
)
from stepsplit.dashboard.commands.analyze import analyze_command
from stepsplit.dashboard.pages.address import AddressQuery
from stepsplit.dashboard.pages.watch import build_watch_page, read_watch_view
from stepsplit.dashboard.sinks.scalars import build_batch_points
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.store.watch import StoredLedger
from stepsplit.dashboard.web.server import create_server

S = 10**9


def _write_night(folder: Path, t0: int) -> None:
    """Two ranks of host a; killed after a checkpoint and a hang, started again, ended."""
    for rank in range(2):
        notes: list[Note] = []
        for number, (at, first) in enumerate([(1, 0), (40, 14)]):
            t = t0 + at * S
            notes += [
                RankStarted(rank, 2, "a", 1, number, 0.005, t + 6 * S, t, t + 2 * S, t + 5 * S,
                            first),
                RankWindow(rank, first + 4, first + 23, t + 6 * S, t + 8 * S + rank, 20, S // 10,
                           S // 10, S // 10, 0, ()),
            ]  # fmt: skip
        hang = RankWindow(
            rank, 24, 43, t0 + 9 * S, t0 + 23 * S, 20, S // 10, S // 10, 10 * S, 0,
            ((30, t0 + 22 * S, 10 * S),),
        )  # fmt: skip
        notes[2:2] = [RankSpan(rank, "checkpoint", t0 + 9 * S, t0 + 11 * S + 7), hang]
        notes.append(RankEnded(rank, 38, t0 + 49 * S))
        NoteFile(folder, rank).write(notes)
        BeatFile(folder, rank, 0).write(Beat(50, t0 + 24 * S, t0 + 25 * S))
    note_launch(folder, Launch("a", 7, 0, t0, t0 + 26 * S, -9))
    note_launch(folder, Launch("a", 8, 1, t0 + 39 * S, t0 + 50 * S, 0))


def _reduce(folder: Path, host: str = "a") -> WatchBatch:
    found = Reducer(WatchFolder(folder, RUN, host)).collect(is_last=True)
    assert found is not None
    return found


def _scrape(store: Store) -> dict[tuple[str, ...], float]:
    text = create_server(store).test_client().get("/metrics").get_data(as_text=True)
    return {
        (one.name.removeprefix("stepsplit_watch_"), one.labels.get("row", "")): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if "ledger" in one.name or "goodput" in one.name
    }


def _build_page(store: Store, now_ns: int) -> Any:
    run = store.watches.find_watch(RUN)
    assert run is not None
    chosen = AddressQuery({})
    return build_watch_page(read_watch_view(store.watches, run, chosen, now_ns), chosen)


def test_page_terminal_json_and_sinks_agree_to_the_digit(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / RUN
    t0 = minutes_ago(3)
    _write_night(folder, t0)
    one = _reduce(folder)
    assert store.watches.add_batch(one).accepted

    runner = CliRunner()
    printed = runner.invoke(analyze_command, [str(folder), "--json", "-"]).output
    whole = json.loads(printed)
    rows: Sequence[Mapping[str, Any]] = whole["rows"]
    assert sum(row["ns"] for row in rows) == whole["wall_ns"] == 50 * S
    assert one.ledger is not None and json.loads(msgspec.json.encode(one.ledger)) == whole

    page = _build_page(store, minutes_ago(0))
    tables = read_tables(page)
    shown = next(table for table in tables if table[-1].get("row") == "wall clock")
    screen = runner.invoke(analyze_command, [str(folder)]).output
    for row in shown[:-1]:
        line = next(line for line in screen.splitlines() if line.startswith(f"{row['row']}  "))
        words = " ".join(row[name] for name in ("time", "share", "number", "GPU hours")).split()
        assert line[len(row["row"]) :].split()[: len(words)] == words
    assert len(shown) == len(rows) + 1
    assert f"wall clock {shown[-1]['time']} ({shown[-1]['GPU hours']} GPU hours)" in screen

    scraped = _scrape(store)
    assert scraped["goodput_ratio", ""] == whole["goodput"]
    assert scraped["goodput_is_bound", ""] == 0
    for row in rows:
        assert scraped["ledger_seconds", row["kind"]] == row["ns"] / 1e9
        assert scraped["ledger_gpu_hours", row["kind"]] == row["gpu_hours"]
    point = build_batch_points(one)[-1]
    logged = {scalar.name: scalar.value for scalar in point.scalars}
    assert (point.step, logged["stepsplit/goodput_ratio"]) == (50, whole["goodput"])
    assert {f"stepsplit/ledger_{row['kind']}_s": row["ns"] / 1e9 for row in rows}.items() <= (
        logged.items()
    )


def test_a_ledger_is_sent_once_if_nothing_changes_and_by_one_host(tmp_path: Path) -> None:
    _write_night(tmp_path, minutes_ago(3))
    reducer = Reducer(WatchFolder(tmp_path, RUN, "a"))
    first = reducer.collect()
    # The first one is due a minute after the begin.
    assert first is not None and first.ledger is None
    last = reducer.collect(is_last=True)
    assert last is not None and last.ledger is not None
    assert reducer.collect(is_last=True) is None
    other = Reducer(WatchFolder(tmp_path, RUN, "b")).collect(is_last=True)
    assert other is None or other.ledger is None


def test_a_ledger_of_many_starts_is_sent_with_its_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_night(tmp_path, minutes_ago(3))
    monkeypatch.setattr(reducer_module, "MOST_LEDGER_BYTES", 100)
    ledger = _reduce(tmp_path).ledger
    assert ledger is not None
    assert [one.incarnation for one in ledger.incarnations] == [1]
    assert sum(row.ns for row in ledger.rows) == ledger.wall_ns == 50 * S


def _make_ledger(seconds: int, ranks: tuple[int, ...] = (0,), **parts: Any) -> Ledger:
    rows = (LedgerRow("train", seconds * S, 10, 1.0),)
    start = IncarnationLedger(
        incarnation=0, begin_unix_ns="0", wall_ns=seconds * S, ranks=ranks, world_size=4,
        first_step=0, last_step=9, ending="lost", rows=rows,
    )  # fmt: skip
    usual = {
        "run": "x", "wall_ns": seconds * S, "goodput": 1.0, "is_goodput_bound": True, "hosts": 1,
        "rows": rows, "incarnations": (start,), "lacks": ("a\x1b[31m\nb",),
    }  # fmt: skip
    return Ledger(**{**usual, **parts})


def test_the_newest_ledger_of_the_host_with_the_lowest_rank_counts(store: Store) -> None:
    now = minutes_ago(0)
    for number, (host, ledger, unix_ns) in enumerate([
        ("b", _make_ledger(50, (2, 3)), now),
        ("a", _make_ledger(20), now - 9 * S),
        # Kept while the dashboard was away.
        ("a", _make_ledger(10), now - 99 * S),
    ]):  # fmt: skip
        store.watches.add_batch(batch(id=str(number), host=host, unix_ns=unix_ns, ledger=ledger))
    run = store.watches.find_watch(RUN)
    assert run is not None
    stored = store.watches.read_ledger(run.id)
    assert stored is not None
    assert (stored.host, stored.ledger.wall_ns, stored.ledger.run) == ("a", 20 * S, RUN)
    assert stored.ledger.lacks == (r"a\x1b[31m b",)
    # A start that an admin has the store forget takes its ledger along.
    store.watches.add_batch(batch(id="9", incarnation=1, ledger=_make_ledger(70)))
    assert store.watches.forget_start(run.id, 1)
    stored = store.watches.read_ledger(run.id)
    assert stored is None or stored.ledger.wall_ns == 50 * S


@pytest.mark.parametrize(
    "parts",
    [
        {"wall_ns": 21 * S},
        {"wall_ns": -S, "rows": (LedgerRow("train", -S, 1, 0.0),)},
        {"rows": (LedgerRow("train", 20 * S, -1, 0.0),)},
        {"rows": (LedgerRow("<b>", 20 * S, 1, 0.0),)},
        {"rows": (LedgerRow("t" * 300, 20 * S, 1, 0.0),)},
        {"rows": (LedgerRow("train", 20 * S, 1, -1e300),)},
        {"rows": (LedgerRow("train", 20 * S, 1 << 60, 0.0),)},
        {"wall_ns": 0, "rows": tuple(LedgerRow(f"k{n}", 0, 1, 0.0) for n in range(1000))},
        # Two series of the same name are no answer to Prometheus.
        {"wall_ns": 20 * S, "rows": (LedgerRow("train", 10 * S, 1, 0.0),) * 2},
        {"rows": (LedgerRow("tr\u0430in", 20 * S, 1, 0.0),), "goodput": 0.0},
        {"rows": (*_make_ledger(20).rows, *(LedgerRow(f"k{n}", 0, 0, 0.0) for n in range(9)))},
        {"rows": (LedgerRow("train", 20 * S, 10, float("nan")),)},
        {"rows": (LedgerRow("train", 20 * S, 10, float("inf")),)},
        {"schema": "stepsplit.ledger/9"},
        {"goodput": 0.01},
        {"goodput": float("nan")},
        {"goodput": 1.5},
        {"incarnations": _make_ledger(20).incarnations * 2},
        {"incarnations": _make_ledger(30).incarnations},
        *(
            {"incarnations": (msgspec.structs.replace(_make_ledger(20).incarnations[0], **wrong),)}
            for wrong in (
                {"ranks": (1 << 40,)}, {"ranks": (0, 0)}, {"ranks": (-1,)}, {"ranks": (4,)},
                {"world_size": 1 << 40}, {"begin_unix_ns": "x"}, {"begin_unix_ns": "9" * 5000},
            )
        ),
        {"incarnations": ()},
        {"incarnations": (msgspec.structs.replace(_make_ledger(20).incarnations[0], ranks=()),)},
    ],
)  # fmt: skip
def test_a_ledger_that_cannot_be_is_refused(store: Store, parts: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        store.watches.add_batch(batch(ledger=_make_ledger(20, **parts)))


def _sum_printed(texts: Sequence[str], unit: str = "") -> Decimal:
    return sum((Decimal(one.removesuffix(unit).replace(",", "")) for one in texts), Decimal())


@pytest.mark.parametrize("hours", [1e-4, 0.0278, 1.0, 33.37, 999.7, 2048.0, 123456.0])
@pytest.mark.parametrize("seconds", [3, 50, 400])
def test_rows_as_printed_add_up_to_the_wall_clock(seconds: int, hours: float) -> None:
    third, kinds = seconds * S // 3, ("train", "checkpoint", "stall")
    rows = tuple(LedgerRow(kind, third, 1, hours / 3) for kind in kinds)
    *shown, whole = format_rows(_make_ledger(1, wall_ns=3 * third, rows=rows))
    assert _sum_printed([one.share for one in shown], " %") == 100
    assert whole.share == "100.0 %"
    if third < 100 * S:
        printed = _sum_printed([one.time for one in shown], " s")
        assert printed == _sum_printed([whole.time], " s")
    assert _sum_printed([one.gpu_hours for one in shown]) == _sum_printed([whole.gpu_hours])
    assert whole.gpu_hours == format_gpu_hours(hours)
    assert _sum_printed([whole.gpu_hours]) == pytest.approx(Decimal(hours), rel=Decimal("0.005"))


def test_long_times_and_many_gpu_hours_are_printed_in_full() -> None:
    rows = (
        LedgerRow("train", 111_840 * S + S // 2, 1, 123_456.4),
        LedgerRow("stall", S // 2, 1, 0.7),
    )
    *shown, whole = format_rows(_make_ledger(1, wall_ns=111_841 * S, rows=rows))
    assert [one.time for one in shown] == ["31 h 4 min 1 s", "0 s"]
    assert (whole.time, whole.gpu_hours) == ("31 h 4 min 1 s", "123,457")
    assert [format_gpu_hours(one) for one in (2048, 999.7, 0.0)] == ["2,048", "1,000", "0.00"]


def _make_starts(*lengths: tuple[int, int]) -> Ledger:
    """A start of each (gap, seconds of steps that count)."""
    starts = tuple(
        IncarnationLedger(
            incarnation=number, begin_unix_ns="1000", wall_ns=(gap + long) * S, ranks=(0,),
            world_size=4, first_step=0, last_step=9, ending="lost",
            rows=(LedgerRow("train", long * S, 10, float(long)),)
            + (LedgerRow("restart_gap", gap * S, 1, float(gap)),) * (gap > 0),
        )
        for number, (gap, long) in enumerate(lengths)
    )  # fmt: skip
    rows = sum_rows([row for one in starts for row in one.rows])
    wall_ns = sum(one.wall_ns for one in starts)
    goodput = sum(long for _, long in lengths) * S / wall_ns
    lacks = ("start 1: notes of 1 of 4 ranks", "start 2: notes of 1 of 4 ranks")
    return _make_ledger(1, wall_ns=wall_ns, rows=rows, incarnations=starts, goodput=goodput,
                        lacks=lacks)  # fmt: skip


def test_a_forgotten_start_is_taken_out_of_the_ledger(store: Store) -> None:
    def forget(number: int) -> StoredLedger | None:
        store.watches.delete(RUN)
        for place in range(3):
            ledger = _make_starts((0, 10), (4, 20), (6, 30))
            store.watches.add_batch(batch(id=str(place), incarnation=place, ledger=ledger))
        run = store.watches.find_watch(RUN)
        assert run is not None and store.watches.forget_start(run.id, number)
        return store.watches.read_ledger(run.id)

    found = {number: forget(number) for number in range(3)}
    expected = {0: (56, 50, 6, [1, 2]), 1: (46, 40, 6, [0, 2]), 2: (34, 30, 4, [0, 1])}
    for number, (wall, train, gap, numbers) in expected.items():
        stored = found[number]
        assert stored is not None
        ledger = stored.ledger
        assert [one.incarnation for one in ledger.incarnations] == numbers
        assert {row.kind: (row.ns, row.gpu_hours) for row in ledger.rows} == {
            "train": (train * S, train), "restart_gap": (gap * S, gap),
        }  # fmt: skip
        assert (ledger.wall_ns, ledger.goodput) == (wall * S, train / wall)
        assert ledger.lacks[0].startswith(f"start {number + 1} is forgotten")
        assert not any(one.startswith(f"start {number + 1}:") for one in ledger.lacks)


def test_a_ledger_of_the_newest_start_goes_with_it_and_else_says_what_stays(store: Store) -> None:
    for number, forgotten in enumerate((0, 1)):
        whole = _make_starts((0, 10), (4, 20))
        ledger = msgspec.structs.replace(whole, incarnations=whole.incarnations[-1:])
        for place in range(2):
            of_start = ledger if place else None
            store.watches.add_batch(
                batch(id=f"{number} {place}", incarnation=place, ledger=of_start)
            )
        run = store.watches.find_watch(RUN)
        assert run is not None and store.watches.forget_start(run.id, forgotten)
        stored = store.watches.read_ledger(run.id)
        assert (stored is None) == (forgotten == 1)
        assert stored is None or "its time is in these rows" in stored.ledger.lacks[0]
        store.watches.delete(RUN)


def test_a_clock_that_was_ahead_once_keeps_out_no_ledger(store: Store) -> None:
    now = minutes_ago(0)
    for number, unix_ns in enumerate([now + 3000 * S, time.time_ns() + S]):
        ledger = _make_ledger(20 + number)
        store.watches.add_batch(batch(id=str(number), unix_ns=unix_ns, ledger=ledger))
    run = store.watches.find_watch(RUN)
    assert run is not None
    stored = store.watches.read_ledger(run.id)
    assert stored is not None and stored.ledger.wall_ns == 21 * S


def test_a_row_of_a_later_version_has_its_own_name(store: Store) -> None:
    rows = (LedgerRow("power_cap", 20 * S, 3, 0.5),)
    start = msgspec.structs.replace(_make_ledger(20).incarnations[0], rows=rows)
    ledger = _make_ledger(20, rows=rows, incarnations=(start,), goodput=0.0)
    store.watches.add_batch(batch(ledger=ledger))
    tables = read_tables(_build_page(store, minutes_ago(0)))
    assert any(row.get("row") == "power_cap" for table in tables for row in table)
    assert _scrape(store)["ledger_gpu_hours", "power_cap"] == 0.5


def test_a_stored_ledger_that_cannot_be_read_is_none(store: Store, tmp_path: Path) -> None:
    store.watches.add_batch(batch(ledger=_make_ledger(20)))
    engine = create_engine(store.url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE watch_ledgers SET ledger = :text"), {"text": b'{"a": 1}'})
    engine.dispose()  # from Python 3.13 on, SQLite's warn in a later test if they are not closed
    assert "goodput" not in str(_build_page(store, minutes_ago(0)))
    assert _scrape(store) == {}
    store.watches.add_batch(batch(id="2", ledger=_make_ledger(20)))
    assert "goodput" in str(_build_page(store, minutes_ago(0)))


def test_a_run_without_a_ledger_has_no_section(store: Store) -> None:
    store.watches.add_batch(batch())
    assert "goodput" not in str(_build_page(store, minutes_ago(0)))
    assert _scrape(store) == {}
