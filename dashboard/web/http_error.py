"""A refused request, and its response."""

from __future__ import annotations

from collections.abc import Mapping

from flask import Response, jsonify


class HttpError(Exception):
    """A refused request: HTTP status, message, and extra response headers."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        self.status, self.headers = status, dict(headers or {})
        super().__init__(message)


def build_error_response(error: HttpError) -> Response:
    """The error as JSON response."""
    response = jsonify(error=str(error))
    response.status_code = error.status
    response.headers.update(error.headers)
    return response
