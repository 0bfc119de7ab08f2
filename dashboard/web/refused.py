"""A request that is not done as asked, told in one line."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from flask import Response, jsonify
from sqlalchemy.exc import SQLAlchemyError

_LOG = logging.getLogger("stepsplit.requests")


class Refused(Exception):
    """The HTTP status, a line for whoever asked, and headers that help to go on."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        self.status, self.headers = status, dict(headers or {})
        super().__init__(message)


def as_json(error: Refused) -> Response:
    """The answer that tells it."""
    answer = jsonify(error=str(error))
    answer.status_code = error.status
    answer.headers.update(error.headers)
    return answer


def away(error: SQLAlchemyError) -> Response:
    """The answer while the database is away."""
    _LOG.error("the database is away: %s", str(error).splitlines()[0])
    return as_json(Refused(503, "the database is away; try again soon", {"Retry-After": "5"}))
