"""The goodput of a watched job as a metric that `stepsplit check` compares."""

from __future__ import annotations

from stepsplit.analyzer.regression.metrics import (
    GOODPUT,
    GOODPUT_BOUND,
    Doubt,
    RunMetrics,
    Setup,
    Value,
)
from stepsplit.analyzer.report.ledger import Ledger


def build_goodput_metrics(ledger: Ledger) -> RunMetrics:
    """The metrics of a watched job: its goodput, over all of its starts."""
    newest = ledger.incarnations[-1]
    train = sum(row.count for row in ledger.rows if row.kind == "train")
    return RunMetrics(
        name=ledger.run,
        setup=Setup(
            world_size=newest.world_size,
            ranks=newest.ranks,
            hosts=ledger.hosts,
            device="unknown",
            mesh=None,
            backend=None,
            schedule=None,
            microbatches=None,
            torch=None,
            nccl=None,
            driver=None,
        ),
        steps=train,
        values=(Value(GOODPUT, ledger.goodput),),
        calls=None,
        times=(),
        # Whatever is not known may have been no training.
        doubts=tuple(
            Doubt(GOODPUT_BOUND, f"its goodput is at most this: {lack}", None)
            for lack in ledger.lacks
        ),
        complete=train,
    )
