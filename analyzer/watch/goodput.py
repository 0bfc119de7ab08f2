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
    text = "which steps were done again is not known, so that its goodput is at most this"
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
        doubts=(Doubt(GOODPUT_BOUND, text, None),) if ledger.is_goodput_bound else (),
        complete=train,
    )
