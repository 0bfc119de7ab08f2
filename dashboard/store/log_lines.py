"""What a server and its workers log: quiet text for people, or a JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]


class JsonLines(logging.Formatter):
    """One JSON object a record; a record's fields are beside what every line has."""

    def format(self, record: logging.LogRecord) -> str:
        """The line. Nothing that lets somebody in is ever among a record's fields."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logs(form: LogFormat) -> None:
    """From now on this process logs to standard error: as text only what went wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter("%(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("stepsplit").setLevel(logging.INFO if form == "json" else logging.WARNING)
