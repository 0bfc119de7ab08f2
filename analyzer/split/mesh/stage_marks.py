"""Which stage of the pipeline a rank's own marks say it holds."""

from __future__ import annotations

import re

from stepsplit.analyzer.trace import Events

_MARK = re.compile(r"stepsplit::[FB] stage=(\d{1,9}) |PP:(\d{1,9})[FB]\d+$")


def marked_stage(events: Events) -> int | None:
    """The first of the stages whose forwards and backwards are marked; None where none is."""
    marks = (_MARK.match(name) for name in events.names)
    return min((int(m[1] or m[2]) for m in marks if m is not None), default=None)
