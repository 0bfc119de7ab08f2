"""A config file and its content, and what of it becomes which key of job.toml."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stepsplit.analyzer.errors import DataError, parse_toml

MAX_YAML_BYTES = 1 << 17
"""Of YAML, whose parser takes seconds for a megabyte; configs have some kilobytes."""


@dataclass(frozen=True)
class JobFile:
    """A config file: its path and its bytes, decoded when a kind asks for them."""

    path: str
    content: bytes

    @property
    def suffix(self) -> str:
        return Path(self.path).suffix.lower()

    @cached_property
    def text(self) -> str:
        """The text, "" if it is not UTF-8."""
        try:
            return self.content.decode("utf-8-sig")
        except UnicodeDecodeError:
            return ""

    @cached_property
    def tables(self) -> Mapping[str, Any]:
        """The values of a JSON, YAML or TOML file, by its suffix; empty if it has none."""
        try:
            if self.suffix == ".json" or self.text.lstrip()[:1] == "{":
                return _get_mapping(json.loads(self.text))
            if self.suffix in (".yaml", ".yml"):
                return _get_mapping(self._load_yaml())
            if self.suffix == ".toml":
                return parse_toml(self.path, self.content)
        except (ValueError, RecursionError, DataError):
            pass
        return {}

    def _load_yaml(self) -> object:
        if len(self.content) > MAX_YAML_BYTES:
            raise DataError(self.path, "too large for a YAML config", "check the path")
        # Only these files need it, and it takes as long to import as a prediction.
        import yaml

        try:
            return yaml.load(self.text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.YAMLError:
            return None

    def build_error(self, problem: str, hint: str) -> DataError:
        return DataError(self.path, problem, hint)


def _get_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


@dataclass
class JobTablesBuilder:
    """The tables of a job.toml that a file describes, filled key by key.

    omitted are settings of the file that matter and that the model has no key for.
    """

    sections: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {"model": {}, "parallel": {}, "training": {}, "hardware": {}}
    )
    omitted: list[str] = field(default_factory=list)

    def put(self, section: str, key: str, value: object) -> None:
        """States a key; a value of None states nothing."""
        if value is not None:
            self.sections[section][key] = value

    def list_stated(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The tables that have a key."""
        return ((name, keys) for name, keys in self.sections.items() if keys)


@dataclass(frozen=True, slots=True)
class JobFileKind:
    """A kind of config file.

    name: the word of --from. title: what it is in messages. recognize: whether a file is of the
    kind. read: states the keys of job.toml that it says; raises DataError for a file that it cannot
    be. unsaid: keys that every job has a value for, which files of the kind have no word for.
    of_transformers: whether the model that it describes is one of transformers.
    """

    name: str
    title: str
    recognize: Callable[[JobFile], bool]
    read: Callable[[JobFile, JobTablesBuilder], None]
    unsaid: frozenset[str] = frozenset()
    of_transformers: bool = False


# Values as the files write them.


def find_number(values: Mapping[str, Any], *keys: str) -> int | None:
    """The whole number of the first of these keys that has one."""
    for key in keys:
        value = values.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    return None


def find_flag(values: Mapping[str, Any], key: str) -> bool | None:
    value = values.get(key)
    return value if isinstance(value, bool) else None


def find_word(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return value if isinstance(value, str) else ""


def find_table(values: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """The table at the end of these keys; empty if there is none."""
    for key in keys:
        values = _get_mapping(values.get(key))
    return values
