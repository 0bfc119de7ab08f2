"""A plan as JSON, in and out, in the keys that scripts rely on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.compare.plan.plan import (
    SCHEMA,
    Candidate,
    Choice,
    Place,
    Plan,
    Reason,
    RunnerUp,
    Searched,
    Trial,
)
from stepsplit.analyzer.errors import DataError

_MEND = "plan the job again"


def to_json(plan: Plan) -> str:
    """The plan as JSON text of the schema stepsplit.plan/1; times are whole ns.

    Each part of the top level has a line of its own.
    """
    body = {
        "schema": SCHEMA,
        "gpus": plan.gpus,
        "best": _candidate_row(plan.best),
        "runners_up": [_runner_row(one) for one in plan.runners_up],
        "tree": [asdict(trial) for trial in plan.tree],
        "places": [asdict(place) for place in plan.places],
        "searched": asdict(plan.searched) | {"refused": dict(plan.searched.refused)},
    }
    parts = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items())
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def from_json(text: str, source: object = "plan.json") -> Plan:
    """The plan of the text. Raises DataError where the text is none of this schema."""
    try:
        body = json.loads(text)
        if body["schema"] == SCHEMA:
            return _plan(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(source, f"not a stepsplit plan ({error})", _MEND) from None
    raise DataError(source, f"of schema {body['schema']}, not {SCHEMA}", _MEND)


def _candidate_row(one: Candidate) -> dict[str, Any]:
    return asdict(one) | {"exposed_ns": dict(one.exposed_ns), "step_ns": one.step_ns}


def _runner_row(one: RunnerUp) -> dict[str, Any]:
    return {
        "candidate": _candidate_row(one.candidate),
        "behind_ns": one.behind_ns,
        "more_bytes": one.more_bytes,
        "reasons": [asdict(reason) for reason in one.reasons],
    }


def _plan(body: Mapping[str, Any]) -> Plan:
    searched = body["searched"]
    return Plan(
        gpus=int(body["gpus"]),
        best=_candidate(body["best"]),
        runners_up=tuple(_runner(row) for row in body["runners_up"]),
        tree=tuple(Trial(**row) for row in body["tree"]),
        places=tuple(Place(**row) for row in body["places"]),
        searched=Searched(**{**searched, "refused": tuple(searched["refused"].items())}),
    )


def _candidate(row: Mapping[str, Any]) -> Candidate:
    layers = row["choice"]["layers_per_stage"]
    stages = None if layers is None else tuple(layers)
    told = {key: value for key, value in row.items() if key != "step_ns"}
    told["choice"] = Choice(**{**row["choice"], "layers_per_stage": stages})
    told["split"] = Split(**row["split"])
    told["exposed_ns"] = tuple(row["exposed_ns"].items())
    found = Candidate(**told)
    if found.step_ns != row["step_ns"]:
        raise ValueError(f"step_ns {row['step_ns']} where its buckets add up to {found.step_ns}")
    return found


def _runner(row: Mapping[str, Any]) -> RunnerUp:
    reasons = tuple(Reason(**reason) for reason in row["reasons"])
    return RunnerUp(_candidate(row["candidate"]), row["behind_ns"], row["more_bytes"], reasons)
