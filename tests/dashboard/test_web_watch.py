"""Watched runs through the HTTP API and their pages: batches, gaps, restarts, what was dropped."""

from __future__ import annotations

import json
import re
import time
from typing import Any
from urllib.parse import parse_qsl

import pytest
from flask.testing import FlaskClient
from support.page_text import read_tables
from support.report_builders import analysis
from support.store_builders import ask_page
from support.watch_builders import (
    MS,
    RUN,
    STORY,
    batch,
    event,
    list_story,
    minutes_ago,
    rank_sample,
    sample,
    window,
)

from stepsplit.analyzer.units import format_date
from stepsplit.analyzer.watch.records import WatchBatch, encode_batch
from stepsplit.dashboard.pages.address import AddressQuery, format_time
from stepsplit.dashboard.pages.watch import build_watch_page, read_watch_view
from stepsplit.dashboard.pages.watch_range import choose_range
from stepsplit.dashboard.store.run_row import Tag
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.store.watch import WatchedRun, WatchStart

WATCH = "/api/v1/watch"
CALLBACK = "/_dash-update-component"


def _send(client: FlaskClient, one: WatchBatch) -> Any:
    answer = client.post(WATCH, data=encode_batch(one), content_type="application/json")
    assert answer.status_code == 200, answer.text
    return answer.json


def _ask(client: FlaskClient, outputs: dict[str, str], inputs: list[Any], state: list[Any]) -> Any:
    """What the browser sends for a callback, and the new values of its outputs."""
    body = {
        "output": f"..{'...'.join(f'{part}.{name}' for part, name in outputs.items())}..",
        "outputs": [{"id": part, "property": name} for part, name in outputs.items()],
        "inputs": [{"id": i, "property": n, "value": v} for i, n, v in inputs],
        "state": [{"id": i, "property": n, "value": v} for i, n, v in state],
        "changedPropIds": [".".join(inputs[0][:2])],
    }
    answer = client.post(CALLBACK, json=body)
    assert answer.status_code in (200, 204), answer.text
    return answer.json["response"] if answer.status_code == 200 else None


def _open(client: FlaskClient, path: str, search: str = "") -> Any:
    """The components of a page."""
    outputs = {"page": "children", "zone": "hidden", "tick": "disabled", "mark": "data"}
    inputs = [
        ("url", "pathname", path), ("url", "search", search), ("tick", "n_intervals", 0),
    ]  # fmt: skip
    return _ask(client, outputs, inputs, [("mark", "data", "")])["page"]["children"]


def _find(node: Any, part: str) -> Any:
    """The properties of the component of this id; None if there is none."""
    if isinstance(node, list):
        return next((found for one in node if (found := _find(one, part))), None)
    if not isinstance(node, dict):
        return None
    if node.get("id") == part or node.get("props", {}).get("id") == part:
        return node.get("props", node)
    return next((found for one in node.values() if (found := _find(one, part))), None)


def _traces(page: Any, chart: str) -> dict[str, list[Any]]:
    traces: dict[str, list[Any]] = {}
    for trace in _find(page, chart)["figure"]["data"]:
        traces.setdefault(trace.get("name", ""), []).append(trace)
    return traces


def test_a_batch_counts_once(client: FlaskClient) -> None:
    one = batch(windows=(window(0, minutes_ago(1)),), dropped={"spool full": 3})

    answers = [_send(client, one), _send(client, one)]

    assert answers == [{"accepted": True}, {"accepted": False}]
    (row,) = (client.get(WATCH).json or {})["watches"]
    wanted = {
        "run": RUN, "world_size": 4, "incarnation": 0, "ended": None, "last_step": 20,
        "interval_steps": 200, "budget": 0.005, "overhead": None, "dropped": {"spool full": 3},
    }  # fmt: skip
    assert {name: row[name] for name in wanted} == wanted
    audit = (client.get("/api/v1/audit").json or {})["entries"]
    assert [(one["action"], one["target"]) for one in audit] == [("watch began", RUN)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not a batch of a watch"),
        (b"[" * 100_000, "not a batch of a watch"),
        (b'{"schema": "stepsplit.watch/1"}', "missing required field"),
        (encode_batch(batch(schema="stepsplit.watch/9")), "not 'stepsplit.watch/1'"),
        (encode_batch(batch(run="a/b")), "choose another --name"),
        (encode_batch(batch(windows=(window(-1, minutes_ago(1)),))), "must be between 0"),
        (encode_batch(batch(unix_ns=minutes_ago(-600))), "clock of host a is over an hour"),
    ],
)
def test_bad_input_is_refused_in_one_line(client: FlaskClient, body: bytes, reason: str) -> None:
    answer = client.post(WATCH, data=body)

    assert answer.status_code == 400
    error = (answer.json or {})["error"]
    assert reason in error and "\n" not in error
    assert (client.get(WATCH).json or {})["watches"] == []


def test_a_batch_that_is_too_large_is_refused(client: FlaskClient) -> None:
    assert client.post(WATCH, data=b" " * (5 << 20)).status_code == 413


def test_a_watched_run_can_be_deleted(client: FlaskClient) -> None:
    _send(client, batch(windows=(window(0, minutes_ago(1)),)))

    deleted = [client.delete(f"{WATCH}/{RUN}").status_code for _ in range(2)]

    assert deleted == [204, 404]
    assert (client.get(WATCH).json or {})["watches"] == []
    assert _send(client, batch()) == {"accepted": True}


def test_the_list_links_to_each_run_and_each_run_has_a_page(client: FlaskClient) -> None:
    assert "stepsplit watch --to URL" in json.dumps(_open(client, "/watch"))
    _send(client, batch(run="my night run", windows=(window(0, minutes_ago(1)),)))

    assert '"/watch/my%20night%20run"' in json.dumps(_open(client, "/watch"))
    page = json.dumps(_open(client, "/watch/my%20night%20run"))
    assert '"my night run"' in page
    paths = ("/watch", "/watch/my%20night%20run", "/watch/none", "/watch/a/b", "/watch/")
    assert [client.get(path).status_code for path in paths] == [200, 200, 404, 404, 404]


@pytest.mark.parametrize(
    "search", ["from=2300-01-01", "to=2300-01-01", "from=1971-01-01&to=9998-12-31"]
)
def test_a_range_beyond_what_databases_hold_has_a_page(client: FlaskClient, search: str) -> None:
    _send(client, batch(windows=(window(0, minutes_ago(1)),)))
    assert f'"{RUN}"' in ask_page(client, f"/watch/{RUN}", f"?{search}")


def test_a_restart_begins_a_new_line_and_is_marked(client: FlaskClient) -> None:
    for number, (ago, median_ms) in enumerate([(50, 100), (20, 150)]):
        windows = tuple(
            window(rank, minutes_ago(ago - at), median_ms * MS)
            for at in range(10)
            for rank in range(4)
        )
        kind, text = ("restarted", "world size 4 to 4") if number else ("started", "4 ranks")
        events = (event(kind, minutes_ago(ago), text),)  # type: ignore[arg-type]
        one = batch(
            id=str(number), incarnation=number, unix_ns=minutes_ago(ago - 10), windows=windows,
            events=events,
        )  # fmt: skip
        _send(client, one)

    page = _open(client, f"/watch/{RUN}", "?range=1h")

    traces = _traces(page, "watch-steps")
    lines = [_decode(trace["y"]) for trace in traces["median step"]]
    assert [set(line) for line in lines] == [{100.0}, {150.0}]
    assert "world size 4 to 4" in traces["restart"][0]["customdata"][0]
    assert "no step times have arrived" in traces["no data"][0]["customdata"][0]
    assert "start 2 of the job" in json.dumps(page)


def test_a_sample_without_data_is_a_gap_with_its_reason(client: FlaskClient) -> None:
    for number in range(5):
        at = minutes_ago(50 - 10 * number)
        why = "another profiler is attached" if number == 2 else ""
        ranks = [rank_sample(rank, wait_ns=rank * MS) for rank in range(4)]
        one = sample(number, at, *ranks, id=str(number), no_data=why)
        _send(client, batch(id=str(number), unix_ns=at, windows=(window(0, at),), samples=(one,)))

    page = _open(client, f"/watch/{RUN}", "?range=1h&unit=ms")

    traces = _traces(page, "watch-split")
    bars = [_decode(traces[bucket][0]["y"]) for bucket in ("compute", "skew", "bubble")]
    assert bars == [[70.0] * 4, [6.0] * 4, [0.0] * 4], "no bar stands for the sample without data"
    assert "another profiler is attached" in traces["no data"][0]["customdata"][0]
    exposed = _decode(_traces(page, "watch-exposed")["dp"][0]["y"])
    assert [None if y != y else y for y in exposed] == [14.0, 14.0, None, 14.0, 14.0]
    samples = json.dumps(page).count("no data: another profiler is attached")
    assert samples == 1


def test_the_page_shows_what_samples_cost_and_what_was_dropped(client: FlaskClient) -> None:
    one = batch(
        windows=(window(0, minutes_ago(1)),), overhead=0.0071, interval_steps=None,
        dropped={"batches: spool full": 2, "samples: reducer behind": 1},
    )  # fmt: skip
    _send(client, one)

    page = json.dumps(_open(client, f"/watch/{RUN}"))

    for words in ("0.71 %", "budget 0.50 %", "no more samples", "2 batches: spool full"):
        assert words in page


def test_the_page_shows_open_alerts_and_what_became_of_their_webhook(
    store: Store, client: FlaskClient
) -> None:
    levels = {"before_ns": 100.0 * MS, "after_ns": 120.0 * MS}
    changed = event("change", minutes_ago(9), "steps take 120 ms", 2_000, **levels)
    explained = event("change", minutes_ago(8), "mostly compute", 2_040, rank=3)
    _send(client, batch(events=(changed, explained), windows=(window(0, minutes_ago(1)),)))
    assert "webhook" not in _list_notes(client)[1]

    claimed = store.alerts.claim_delivery()
    assert claimed is not None
    store.alerts.record_failure(claimed, "the receiver answers 503", 10)

    since, state, *_ = _list_notes(client)
    assert since.endswith("UTC, step 2,000  ·  rank 3  ·  mostly compute")
    assert state == "webhook failed 1 of 3 times, trying again: the receiver answers 503"
    store.alerts.record_delivery(claimed)
    assert _list_notes(client)[1].startswith("webhook sent ")
    over = event("change", minutes_ago(9), "again", 2_000, is_over=True, **levels)
    _send(client, batch(id="over", events=(over,)))
    assert "open alert" not in json.dumps(_open(client, f"/watch/{RUN}"))


def test_what_happened_at_night_is_listed_with_begin_end_size_cause_and_rank(
    store: Store, client: FlaskClient
) -> None:
    began, over = minutes_ago(300), minutes_ago(240)
    slower = event(
        "change", began, "steps take 120 ms since step 2000, 100 ms before", 2_000,
        before_ns=100.0 * MS, after_ns=120.0 * MS, rank=3,
    )  # fmt: skip
    cause = event("change", began, "rank 3 is a straggler", 2_000, rank=3)
    ended = event("change", over, "again as before", 2_000, before_ns=120.0 * MS,
                  after_ns=100.0 * MS, is_over=True)  # fmt: skip
    pause = event("pause", minutes_ago(200), "a step of 9.1 s, 22 times the median", 2_500)
    steps = [window(rank, minutes_ago(at)) for rank in range(4) for at in (310, 180, 2)]
    _send(client, batch(unix_ns=began + 60 * 10**9, events=(slower, cause)))
    _send(client, batch(id="2", unix_ns=over, events=(ended,)))
    _send(client, batch(id="3", events=(pause,), windows=tuple(steps)))

    watch = store.watches.find_watch(RUN)
    assert watch is not None

    def list_rows(search: str) -> list[dict[str, str]]:
        chosen = AddressQuery(dict(parse_qsl(search)))
        view = read_watch_view(store.watches, watch, chosen, time.time_ns())
        page = build_watch_page(view, chosen, store.alerts.list_alerts(RUN, 100))
        tables = [one for one in read_tables(page) if one and "lasted" in one[0]]
        return tables[0] if tables else []

    rows = list_rows("range=1d")
    alert = next(one for one in rows if one["what"] == "step time")
    assert (alert["change"], alert["size"]) == ("+20.0 %", "100 ms to 120 ms a step")
    assert (alert["cause"], alert["rank"]) == ("rank 3 is a straggler", "3")
    assert alert["begin"] == format_date(began) and alert["end"]
    assert [one["size"] for one in rows if one["what"] == "pause"] == [pause.text]

    # Only what touches the range; a pause is a point of time, an alert is not.
    at = format_time((began + over) / 2e9)
    assert list_rows(f"from={at}&to={format_time(over / 1e9)}") == [alert]
    assert list_rows(f"to={format_time(began / 1e9 - 3_600)}") == []


@pytest.mark.parametrize(
    ("search", "level_s"),
    [
        ("range=1h", 60), ("range=1d", 600), ("range=7d", 3_600), ("range=1y", 86_400),
        ("from=2026-01-29 03:00&to=2026-01-29 05:00", 60),
        # Minutes are kept for four days, ten minutes for two weeks, hours for 100 days.
        ("from=2026-01-20 03:00&to=2026-01-20 05:00", 600),
        ("from=2026-01-10 03:00&to=2026-01-10 05:00", 3_600),
        ("from=2025-08-10&to=2025-08-11", 86_400),
        ("from=nonsense&to=0001-01-01", 600), ("from=2026-01-29 05:00&to=2026-01-29 03:00", 60),
    ],
)  # fmt: skip
def test_a_range_has_the_finest_slots_that_are_kept(search: str, level_s: int) -> None:
    now_s = 1_769_731_200  # 2026-01-30 00:00
    start = WatchStart(0, 4, (now_s - 400 * 86_400) * 10**9, now_s * 10**9, None)
    run = WatchedRun(1, RUN, 0, 0, now_s * 10**9, 1, 1, None, (start,), (), {})
    shown = choose_range(run, AddressQuery(dict(parse_qsl(search))), now_s * 10**9)
    within = shown.within
    assert within.level_s == level_s and shown.bin_s % level_s == 0
    assert within.first_unix_s % level_s == 0 and within.first_unix_s < within.last_unix_s
    assert (within.last_unix_s - within.first_unix_s) / shown.bin_s <= 200


def _list_notes(client: FlaskClient) -> list[str]:
    """The lines below the first alert of the page."""
    text = json.dumps(_open(client, f"/watch/{RUN}"), ensure_ascii=False)
    item = text.partition('"className": "alerts"')[0].rpartition('"1 open alert"')[2]
    return re.findall(r'"children": "([^"]*)", "className": "note"', item)


def test_a_sample_leads_to_the_stored_run_of_its_traces(store: Store, client: FlaskClient) -> None:
    known = analysis()
    run_id = store.import_report("deep", known.report, known.tables, [Tag("sample", "0-7-a")])
    taken = sample(7, minutes_ago(1), rank_sample(0), traces="samples/0-7")
    _send(client, batch(samples=(taken,)))

    page = json.dumps(_open(client, f"/watch/{RUN}"))

    assert f'"/run/{run_id}"' in page
    assert "traces on a: samples/0-7" in page


def test_the_page_updates_while_it_is_open(client: FlaskClient) -> None:
    _send(client, batch(windows=(window(0, minutes_ago(2)),)))
    page = _open(client, f"/watch/{RUN}", "?range=1h")
    mark = _find(page, "watch-mark")["data"]

    def update(mark: str) -> Any:
        return _ask(
            client,
            {"watch-live": "children", "watch-mark": "data"},
            [("watch-tick", "n_intervals", 1)],
            [
                ("url", "pathname", f"/watch/{RUN}"), ("url", "search", "?range=1h"),
                ("watch-mark", "data", mark),
            ],
        )  # fmt: skip

    _send(client, batch(id="second", windows=(window(0, minutes_ago(1), 300 * MS),)))
    changed = update(mark)
    assert 300.0 in _decode(_traces(changed, "watch-steps")["median step"][0]["y"])
    assert update(changed["watch-mark"]["data"]) is None, "nothing new since"


@pytest.mark.slow
def test_a_run_of_a_day_has_a_small_page(client: FlaskClient, store: Store) -> None:
    for one in list_story(minutes_ago(0)):
        store.watches.add_batch(one)

    pages = [_open(client, f"/watch/{STORY}", f"?range={r}") for r in ("1h", "1d", "30d")]

    assert all(len(json.dumps(page)) < 400_000 for page in pages)
    for chart in ("watch-lateness", "watch-caused-waits"):
        (grid,) = _traces(pages[1], chart)[""]
        assert grid["y"] == [str(rank) for rank in range(16)]


def _decode(values: Any) -> list[float]:
    """Numbers of a figure, which are packed."""
    import base64

    import numpy as np

    if isinstance(values, list):
        return values
    packed = np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"])
    numbers: list[float] = packed.tolist()
    return numbers
