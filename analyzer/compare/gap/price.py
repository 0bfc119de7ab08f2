"""What the model says of a call like one that it predicts, but of another size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stepsplit.analyzer.model.comm_measured import Rates
from stepsplit.analyzer.model.config import Job
from stepsplit.analyzer.model.predict import call_ns
from stepsplit.analyzer.model.prediction import Communication

Price = Callable[[Communication, int], float]
"""(a predicted message, bytes of one call) -> how long a call like it of that size takes, in ns."""
_SUMS = "dp_cp"
"""The prediction's word for the ranks that the model calls dp, where cp is among them."""


def price_of(job: Job, rates: Rates) -> Price:
    """The price of the job's calls; of a predicted size it is the prediction's own."""

    def price(like: Communication, message_bytes: int) -> float:
        message = like.message
        each_ns = like.time.ns / message.count
        if message_bytes == message.message_bytes:
            return each_ns
        own = replace(message, axis="dp" if message.axis == _SUMS else message.axis)
        there_ns = call_ns(job, own, rates).ns
        here_ns = call_ns(job, replace(own, message_bytes=message_bytes), rates).ns
        times = here_ns / there_ns if there_ns else message_bytes / message.message_bytes
        return each_ns * times

    return price
