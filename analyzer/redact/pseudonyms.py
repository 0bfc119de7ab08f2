"""The pseudonym of each replaced text, the same one in all files of a copy."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

DIGITS, LETTERS, HEX = "digits", "letters", "hex"


@dataclass(frozen=True, slots=True)
class Replacement:
    """How many distinct texts of a field were replaced, and in how many places."""

    field: str
    distinct: int
    places: int


@dataclass(slots=True)
class Pseudonyms:
    """The pseudonym of each replaced text by its kind, and how often each kind was replaced."""

    _names: defaultdict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    _places: Counter[str] = field(default_factory=Counter)

    def replace(self, kind: str, text: str, style: str = DIGITS) -> str:
        """The pseudonym of the text: host1, or with other styles stepsa or 0x1."""
        if not text:
            return text
        self._places[kind] += 1
        names = self._names[kind]
        if text not in names:
            number = len(names) + 1
            names[text] = {
                DIGITS: f"{kind}{number}",
                LETTERS: f"{kind}{_spell(number)}",
                HEX: f"{number:#x}",
            }[style]
        return names[text]

    def invert(self) -> dict[str, dict[str, str]]:
        """{kind: {pseudonym: text}}."""
        return {
            kind: {name: text for text, name in names.items()}
            for kind, names in self._names.items()
        }

    def summarize(self) -> tuple[Replacement, ...]:
        """What was replaced, by kind."""
        return tuple(
            Replacement(kind, len(names), self._places[kind])
            for kind, names in sorted(self._names.items())
        )


def _spell(number: int) -> str:
    """1 as a, 26 as z, 27 as aa: readers take the digits of some names for a number of theirs."""
    text = ""
    while number:
        number, letter = divmod(number - 1, 26)
        text = chr(ord("a") + letter) + text
    return text
