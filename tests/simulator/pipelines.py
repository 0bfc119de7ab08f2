"""What the ranks of a pipeline do: the plan of each, with layers, messages and boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simulator.layers import LENGTHS, MLP, Work, half, job, layer, optimizer
from simulator.meshes import Fleet
from simulator.plans import Pipeline, Plan, plans_of
from simulator.program import Begin, End, Job
from simulator.schedules import Action
from simulator.writer import Leg, Writer

RING_BYTES = 64_000_000
"""What a rank of an axis cp sends around for each layer: more than its compute hides."""


def pipeline(fleet: Fleet, each: Work, seed: int, how: Pipeline, layers: Sequence[int] = ()) -> Job:
    """A job over an axis pp, and tp, cp and dp_replicate where the mesh has them.

    each.layers are those of one stage, unless layers tells those of every stage.
    """
    stages = len(fleet.line(0, "pp"))
    plans = plans_of(how, stages)
    layers = layers or (each.layers,) * stages

    def body(writer: Writer) -> None:
        stage = fleet.coordinate(writer.rank, "pp")
        work = replace(each, layers=layers[stage])
        _play(writer, work, how, plans[stage])
        if "dp_replicate" in fleet.axes:
            for _ in range(4):
                writer.block("dp_replicate", "all_reduce", work.layers * work.weight_bytes // 4)
        if "mp" in fleet.axes:
            writer.block("mp", "all_reduce", 8)
        optimizer(writer, work)

    name = "_".join(axis for axis, _ in fleet.mesh)
    return job(f"{name}_{how.schedule}", fleet, each, seed, body, how.schedule, how.microbatches)


def _play(writer: Writer, work: Work, how: Pipeline, plan: Plan) -> None:
    """Writes a plan; computing waits for a message where it needs it, for the last sends at the
    end."""
    line, arrived = writer.fleet.line(writer.rank, "pp"), dict[Action, str]()
    sent = None
    for item in plan:
        if isinstance(item, Action):
            _act(writer, work, how, item, arrived)
            continue
        legs = [Leg(h.op, line[h.peer], work.activation_bytes) for h in item.hands]
        done = writer.exchange("pp", legs)
        arrived |= {hand.action: done for hand in item.hands if hand.op == "recv"}
        if item.blocking:
            writer.wait(done)
        sent = done
    if sent:
        writer.wait(sent)


def _act(
    writer: Writer, work: Work, how: Pipeline, action: Action, arrived: dict[Action, str]
) -> None:
    if how.boxes:
        writer.put(Begin(f"PP:{action.stage}{action.kind}{action.microbatch}"))
    toward = {"F": -1, "B": 1, "I": 1, "W": 0}[action.kind]
    kinds = "F" if action.kind == "F" else "BI"
    for kind in kinds if toward else "":
        source = Action(kind, action.stage + toward, action.microbatch)
        if source in arrived:
            writer.wait(arrived.pop(source))
    for _ in range(work.layers):
        if "cp" in writer.fleet.axes and action.kind in "FB":
            attend_around(writer, replace(work, activation_bytes=RING_BYTES), action.kind)
            half(writer, work, MLP, action.kind)
        else:
            layer(writer, work, action.kind)
    if how.boxes:
        writer.put(End())


def attend_around(writer: Writer, work: Work, kind: str) -> None:
    ring = writer.fleet.line(writer.rank, "cp")
    at, sent = ring.index(writer.rank), LENGTHS[kind] * work.activation_bytes
    legs = (Leg("send", ring[(at + 1) % len(ring)], sent), Leg("recv", ring[at - 1], sent))
    for _ in range(len(ring) - 1):
        passed = writer.exchange("cp", legs)
        half(writer, work, ("flash_attention",), kind, 0.5 / len(ring))
        writer.wait(passed)
    half(writer, work, ("flash_attention",), kind, 0.5 / len(ring))
