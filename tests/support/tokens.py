"""Tokens of a text, as the public tokenizer o200k_base counts them."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any


@cache
def _load_encoding() -> Any:
    with warnings.catch_warnings():
        # It opens its tables in a way that Python will drop.
        warnings.simplefilter("ignore", DeprecationWarning)
        import bpe_openai

        return bpe_openai.get_encoding("o200k_base")


def count_tokens(text: str) -> int:
    """The number of tokens of a text."""
    return len(_load_encoding().encode(text, disallowed_special=()))
