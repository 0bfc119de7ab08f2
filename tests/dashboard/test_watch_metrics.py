"""Watched runs as Prometheus scrapes them, and the Grafana dashboard that asks for them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families
from support.watch_builders import MS, RUN, batch, minutes_ago, rank_sample, sample, window

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.watch.records import WatchBatch
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.server import create_server

GRAFANA = Path(__file__).parents[2] / "docs" / "grafana.json"
PREFIX = "stepsplit_watch_"
SECOND_NS = 10**9


def _scrape(store: Store) -> dict[tuple[str, ...], float]:
    """The samples of watched runs by name without the prefix, run and other label."""
    client: FlaskClient = create_server(store).test_client()
    text = client.get("/metrics").get_data(as_text=True)
    return {
        (one.name.removeprefix(PREFIX), one.labels.pop("run"), *one.labels.values()): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.name.startswith(PREFIX)
    }


def _list_night(name: str = RUN) -> list[WatchBatch]:
    """Two hosts of a run that began three hours ago: 100 ms a step then, 110 ms now."""
    begin, now = minutes_ago(180), minutes_ago(1)
    early = batch(
        id="1", run=name, unix_ns=begin + 2 * SECOND_NS,
        windows=tuple(window(rank, begin + SECOND_NS) for rank in range(4)),
    )  # fmt: skip
    at = minutes_ago(2)
    local_ns = (40 * MS, 45 * MS, 60 * MS, 50 * MS)
    slow = {
        rank: replace(
            window(rank, now, 110 * MS, spread_ns=(rank + 1) * MS), local_ns=local_ns[rank]
        )
        for rank in range(4)
    }
    of_host = [
        batch(
            id=f"2{host}", run=name, host=host, unix_ns=now, overhead=0.002 + 0.001 * (host == "b"),
            windows=tuple(slow[rank] for rank in ranks),
            samples=(sample(500, at, *(rank_sample(r, 9 * MS * r) for r in ranks), id=host),),
            dropped={"sample": 2} if host == "a" else {},
        )
        for host, ranks in (("a", (0, 1)), ("b", (2, 3)))
    ]  # fmt: skip
    empty = sample(600, now, id="c", no_data="the profiler was in use")
    return [early, *of_host, batch(id="3", run=name, unix_ns=now, samples=(empty,))]


def _add(store: Store, batches: list[WatchBatch]) -> None:
    for one in batches:
        assert store.watches.add_batch(one).accepted


def test_a_scrape_has_the_newest_numbers_of_all_hosts_of_a_run(store: Store) -> None:
    batches = _list_night()
    _add(store, batches)

    found = _scrape(store)

    times = [found["step_seconds", RUN, quantile] for quantile in ("0", "0.5", "1")]
    assert times == pytest.approx([0.106, 0.110, 0.114])
    assert found["level_ratio", RUN, "step_time"] == pytest.approx(1.1)
    shares = {bucket: found["share", RUN, bucket] for bucket in BUCKETS}
    assert sum(shares.values()) == pytest.approx(1)
    assert (shares["compute"], shares["idle"]) == (0.70, 0.04)
    assert found["exposed_seconds", RUN, "tp"] == pytest.approx(0.012)
    assert found["exposed_seconds", RUN, "dp"] == pytest.approx(0.014)
    # The three others wait 27 ms in all for rank 3, which is on the second host.
    assert found["caused_wait_rank", RUN] == 3
    assert found["caused_wait_seconds", RUN] == pytest.approx(0.009)
    # Local times of 40, 45, 60 and 50 ms: rank 2 is 15 ms above the lower median.
    assert found["worst_rank", RUN] == 2
    assert found["late_seconds", RUN] == pytest.approx(0.015)
    assert found["overhead_ratio", RUN] == pytest.approx(0.003)
    assert found["dropped_total", RUN, "sample"] == 2
    sampled_ns = batches[1].samples[0].unix_ns
    assert found["last_sample_timestamp_seconds", RUN] == pytest.approx(sampled_ns / SECOND_NS)
    data_ns = batches[-1].unix_ns
    assert found["last_data_timestamp_seconds", RUN] == pytest.approx(data_ns / SECOND_NS)


def test_a_run_without_samples_or_an_hour_has_fewer_metrics(store: Store) -> None:
    _add(store, [batch(windows=(window(0, minutes_ago(1)),))])

    assert {key[0] for key in _scrape(store)} == {"step_seconds", "last_data_timestamp_seconds"}


def test_a_restart_and_a_run_without_data_for_an_hour(store: Store) -> None:
    old = minutes_ago(61)
    _add(store, [batch(run="old", unix_ns=old, windows=(window(0, old - SECOND_NS),))])
    _add(store, _list_night())
    now = minutes_ago(0.5)
    restarted = window(0, now, 300 * MS)
    _add(store, [batch(id="4", incarnation=1, unix_ns=now, windows=(restarted,))])

    found = _scrape(store)

    assert {key[1] for key in found} == {RUN}
    assert found["step_seconds", RUN, "0.5"] == pytest.approx(0.3)
    assert ("level_ratio", RUN, "step_time") not in found


def test_the_number_of_series_does_not_grow_with_the_ranks(store: Store) -> None:
    at = minutes_ago(1)
    ranks = range(256)
    large = batch(
        world_size=256, windows=tuple(window(rank, at) for rank in ranks),
        samples=(sample(9, at, *(rank_sample(rank, rank * MS) for rank in ranks)),),
    )  # fmt: skip
    _add(store, [large])

    assert len(_scrape(store)) < 20


# The Grafana dashboard.


def _list_expressions(node: Any) -> list[str]:
    if isinstance(node, list):
        return [found for one in node for found in _list_expressions(one)]
    if not isinstance(node, dict):
        return []
    own = [node[key] for key in ("expr", "definition") if isinstance(node.get(key), str)]
    return own + [found for one in node.values() for found in _list_expressions(one)]


def test_grafana_asks_for_metrics_and_labels_that_are_served(store: Store) -> None:
    _add(store, _list_night())
    client = create_server(store).test_client()
    families = text_string_to_metric_families(client.get("/metrics").get_data(as_text=True))
    labels = {one.name: set(one.labels) for family in families for one in family.samples}
    dashboard = json.loads(GRAFANA.read_text())

    expressions = _list_expressions(dashboard)

    assert len(expressions) >= len(dashboard["panels"])
    asked = set()
    for expression in expressions:
        (name,) = re.findall(rf"{PREFIX}\w+", expression)
        asked.add(name)
        assert name in labels, expression
        used = re.findall(r"(\w+)=~?\"", expression)
        used += re.findall(r"by \((\w+)\)", expression)
        used += re.findall(r", (\w+)\)$", expression)
        assert used, expression
        assert set(used) <= labels[name], expression
    # And nothing that is served of a run is missing on it.
    assert asked == {name for name in labels if name.startswith(PREFIX)}


def test_the_alert_rules_of_the_docs_are_about_metrics_that_are_served(store: Store) -> None:
    _add(store, _list_night())
    served = {f"{PREFIX}{key[0]}" for key in _scrape(store)}

    asked = set(re.findall(rf"{PREFIX}\w+", (GRAFANA.parent / "alerts.md").read_text()))

    assert len(asked) >= 4
    assert asked <= served


def test_grafana_takes_the_dashboard_with_any_data_source() -> None:
    dashboard = json.loads(GRAFANA.read_text())

    assert [one["pluginId"] for one in dashboard["__inputs"]] == ["prometheus"]
    assert isinstance(dashboard["schemaVersion"], int)
    variables = {one["name"] for one in dashboard["templating"]["list"]}
    assert variables == {"datasource", "run"}
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(one["datasource"]["uid"] == "${datasource}" for one in panel["targets"])
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
