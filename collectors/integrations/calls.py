"""Counts steps by the calls of a function, for frameworks without a callback."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Unpack

from stepsplit.collectors.guard import warn_on_failure
from stepsplit.collectors.integrations.common import FrameworkSpec, LazyRecording, Options
from stepsplit.collectors.job.process_groups import read_job

_P = ParamSpec("_P")
_R = TypeVar("_R")


def profile_calls(
    function: Callable[_P, _R], out: str | Path, **options: Unpack[Options]
) -> Callable[_P, _R]:
    """Wraps the function so that each call is a step of a recording to `out`.

    The recording begins with the first call, when the process groups exist, and ends with the
    process. The options are those of profile_run.
    """
    run = LazyRecording(out, **options)

    @functools.wraps(function)
    def step(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        run.begin(FrameworkSpec)
        result = function(*args, **kwargs)
        run.step()
        return result

    return step


@contextmanager
def call_after_each(owner: Any, name: str, callback: Callable[[Any], None]) -> Iterator[None]:
    """Within the block, `then` is called with the object after each call of the method."""
    original = vars(owner)[name]

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        with warn_on_failure(read_job()[0], "the count of its steps"):
            callback(self)
        return result

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, original)
