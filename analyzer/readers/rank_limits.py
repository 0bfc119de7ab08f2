"""How many ranks a file may state before it is taken for damaged."""

from __future__ import annotations

from stepsplit.collectors.formats.run_spec import MAX_RANKS as MAX_RANKS

MAX_LISTED_RANKS = 1 << 20
"""Of a group whose ranks are counted out from a number in a file: a few bytes must not make a list
that fills the memory. No cluster has as many."""
