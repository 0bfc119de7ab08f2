"""Texts from files and strangers, made fit for any database."""

from __future__ import annotations


def plain(text: str, most: int) -> str:
    """The text on one line of at most so many characters, without what PostgreSQL refuses."""
    whole = text.encode("utf-8", "replace").decode().replace("\0", "")
    line = " ".join(whole.split())
    return line if len(line) <= most else line[: most - 1] + "…"
