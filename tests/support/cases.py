"""Tables of cases checked by one test: all cases run, and one failure names each that is wrong."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.required import absent

Test = Callable[..., None]


def for_each(
    names: str | Sequence[str],
    cases: Iterable[Any],
    ids: Callable[[Any], object] | Iterable[str] | None = None,
) -> Callable[[Test], Test]:
    """Takes what pytest.mark.parametrize takes, and makes one test of all cases.

    The test is called with each case in turn. Cases that fail are collected, and the test fails
    once, with the message of each. tmp_path, where the test asks for it, is a folder for each case.
    Use pytest.mark.parametrize where a case takes a second or changes global state (monkeypatch).
    """
    arguments = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    table = list(cases)
    if not table:
        return _skip
    labels = ids if ids is None or callable(ids) else list(ids)

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        fixtures = [p for name, p in signature.parameters.items() if name not in arguments]

        @functools.wraps(test)
        def check_all(**given: Any) -> None:
            failed = []
            for number, case in enumerate(table):
                label = _label(number, case, labels)
                own = dict(given)
                if "tmp_path" in own:
                    own["tmp_path"] = _make_folder(given["tmp_path"], number)
                try:
                    test(**_bind(arguments, case), **own)
                except (AssertionError, pytest.fail.Exception) as error:
                    failed.append(f"{label}: {_describe(error)}")
                except Exception as error:
                    error.add_note(f"in case {label}")
                    raise
            if failed:
                message = f"{len(failed)} of {len(table)} cases fail\n" + "\n".join(failed)
                pytest.fail(message, pytrace=False)

        check_all.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return check_all

    return decorate


def _skip(test: Test) -> Test:
    """The test of no case: those are read from files beside the project, which are not here."""

    def skipped() -> None:
        absent("traces", f"the files of {test.__name__} are not beside the project")

    return skipped


def _bind(arguments: list[str], case: Any) -> dict[str, Any]:
    if len(arguments) == 1:
        return {arguments[0]: case}
    return dict(zip(arguments, case, strict=True))


def _make_folder(parent: Path, number: int) -> Path:
    folder = parent / f"case{number}"
    folder.mkdir()
    return folder


def _label(number: int, case: Any, ids: Any) -> str:
    if ids is None:
        shown = repr(case)
        return shown if len(shown) <= 120 else f"case {number}, {shown[:120]}..."
    return str(ids(case) if callable(ids) else ids[number])


def _describe(error: BaseException) -> str:
    """The error and the line of the tests that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    here = [f for f in frames if Path(f.filename).is_relative_to(Path(__file__).parents[1])]
    last = here[-1] if here else frames[-1]
    return f"{Path(last.filename).name}:{last.lineno}: {type(error).__name__}: {error}"
