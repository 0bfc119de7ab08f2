"""Logs of the server and its workers: text, or one JSON object per line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

from stepsplit.collectors.safe_io.safe_text import SafeStream, escape_controls, escape_json

LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """One JSON object per record, with the record's extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a JSON line. Records must not contain secrets in their fields."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return escape_json(json.dumps(line, ensure_ascii=False))


class _TextFormatter(logging.Formatter):
    """The message on one line, and the traceback of an exception below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape_controls(super().formatMessage(record))


def set_up_logs(form: LogFormat) -> None:
    """Sends logs to standard error: JSON lines, or text with warnings and errors only."""
    handler = logging.StreamHandler(SafeStream(sys.stderr))
    handler.setFormatter(JsonFormatter() if form == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("stepsplit").setLevel(logging.INFO if form == "json" else logging.WARNING)
