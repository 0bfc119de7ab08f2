"""What is known of a watched training: batches of step times, samples and events.

One process beside the job on each host closes batches, keeps them in hosts/HOST.jsonl and sends
them to a dashboard. Traces stay on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import Struct, field

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.report.ledger import Ledger
from stepsplit.collectors.formats.watch_notes import RankWindow

SCHEMA = "stepsplit.watch/1"

SAMPLE_TAG = "sample"
"""A run on a dashboard with this tag is the analysis of the sample of that id."""

EventKind = Literal[
    "started", "restarted", "ended", "pause", "change", "drift", "capture", "no_data", "dropped",
    "sampling_ended", "lost_rank",
]  # fmt: skip


class RankSample(Struct, frozen=True, kw_only=True):
    """A rank's median step in a sample.

    Attributes:
        rank: The rank.
        split: The seven buckets.
        exposed_ns: Exposed communication by axis; "" where it is unknown.
        caused_wait_ns: How long other ranks waited for this one in a step.
        estimated: Whether a group of the rank lacked members, so that its waits are estimates.
    """

    rank: int
    split: Split
    exposed_ns: Mapping[str, int] = field(default_factory=dict)
    caused_wait_ns: int = 0
    estimated: bool = False


class RankFinding(Struct, frozen=True):
    """A finding of a sample that blames one rank.

    Attributes:
        rank: The rank.
        bucket: The bucket of that rank that it makes longer.
        text: One sentence.
    """

    rank: int
    bucket: str
    text: str


class WatchSample(Struct, frozen=True, kw_only=True):
    """Some recorded steps of some ranks, judged before they count.

    Attributes:
        id: Unique within the run: incarnation, step and host.
        step: The first recorded step.
        steps: The number of recorded steps.
        unix_ns: When the sample began.
        pivot: The rank whose groups are complete; None if all ranks were sampled.
        ranks: The ranks with data; empty if the sample does not count.
        no_data: Why the sample does not count; "" if it does.
        finding: The first finding of its analysis; "" without one.
        rank_findings: The findings that blame one rank, in the order of the report.
        cost_ns: The training time it cost on the worst rank: slower steps, stop and export.
        traces: The folder of its raw traces if they were kept, under that of the watch; "" if
            not.
    """

    id: str
    step: int
    steps: int
    unix_ns: int
    pivot: int | None = None
    ranks: tuple[RankSample, ...] = ()
    no_data: str = ""
    finding: str = ""
    rank_findings: tuple[RankFinding, ...] = ()
    cost_ns: int = 0
    traces: str = ""


class WatchEvent(Struct, frozen=True, kw_only=True):
    """Something that happened to the training or to its watch, for the marks on the chart.

    Attributes:
        kind: "started", "ended" of the job, "restarted" with a new level, and then with how it
            compares with the last one, "pause" for a step that took over five times the median (a
            checkpoint or an evaluation), "change" of the step time and what explains it, "drift" of
            a rank or host that has become late, "capture" of full traces, "no_data", "dropped",
            "sampling_ended", "lost_rank".
        step: The step, with the steps before a resumption.
        unix_ns: When.
        text: One sentence.
        rank: The rank it concerns; None for the whole job.
        before_ns: Of a change or drift, the level before; None for what explains a change.
        after_ns: The level since then.
        is_over: Whether the change or drift that began at this step is over.
    """

    kind: EventKind
    step: int
    unix_ns: int
    text: str
    rank: int | None = None
    before_ns: float | None = None
    after_ns: float | None = None
    is_over: bool = False


class WatchBatch(Struct, frozen=True, kw_only=True):
    """What one host has to tell since its last batch.

    Attributes:
        schema: "stepsplit.watch/1".
        id: Unique: a batch that is received twice counts once.
        run: The name of the run. Restarts of the job continue it.
        incarnation: The number of the job's start, from 0.
        host: The host that sends it.
        world_size: The job's ranks.
        unix_ns: When it was closed.
        interval_steps: The steps between samples, as the budget allows; None if there are no more.
        budget: The part of the training time that samples may cost.
        overhead: The part that they have cost in this incarnation; None before the first.
        windows: Step times of the ranks of this host.
        samples: Samples that this host has reduced.
        events: Events of this host.
        dropped: Numbers of what was given up since the last batch, by reason.
        ledger: What the wall clock of the whole job went to until now, by the notes in the folder
            of this host: once a minute from the host of its lowest rank, else None.
    """

    schema: str = SCHEMA
    id: str
    run: str
    incarnation: int
    host: str
    world_size: int
    unix_ns: int
    interval_steps: int | None = None
    budget: float
    overhead: float | None = None
    windows: tuple[RankWindow, ...] = ()
    samples: tuple[WatchSample, ...] = ()
    events: tuple[WatchEvent, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    ledger: Ledger | None = None


_HINT = "send batches of `stepsplit watch` of this version"


def encode_batch(batch: WatchBatch) -> bytes:
    """The batch as JSON on one line."""
    return msgspec.json.encode(batch)


def decode_batch(data: bytes, source: str) -> WatchBatch:
    """Reads a batch.

    Args:
        data: The JSON.
        source: The file or the sender, for the error.

    Raises:
        DataError: It is no batch of this schema.
    """
    try:
        batch = msgspec.json.decode(data, type=WatchBatch)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DataError(source, f"not a batch of a watch: {error}", _HINT) from None
    if batch.schema != SCHEMA:
        raise DataError(source, f"the schema is {batch.schema!r}, not {SCHEMA!r}", _HINT)
    return batch
