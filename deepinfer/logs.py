"""How log lines look: for people in a terminal, or one JSON object a line for machines.

Only the command line calls `configure_logging`; a library never configures logging, so an engine
embedded in another service logs the way that service wants. Whoever logs about a request attaches
its id, and both formats show it:

    log.info("first token after %.0f ms", 80.0, extra={"request_id": request_id})

    12:30:01.250 INFO    engine  [cmpl-7f3a] first token after 80 ms
    {"time":"2026-01-31T12:30:01.250+00:00","level":"info","logger":"deepinfer.engine",
     "message":"first token after 80 ms","request_id":"cmpl-7f3a"}
"""

from __future__ import annotations

import datetime
import logging
import sys
from typing import Any, Literal, TextIO, get_args

import msgspec

from deepinfer.errors import ConfigError

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_PACKAGE = "deepinfer"


def configure_logging(
    format: LogFormat = "text", level: LogLevel = "info", stream: TextIO | None = None
) -> None:
    """Sends all log records to `stream` (standard error by default), replacing what was set up.

    `level` applies to this package; other libraries are heard from "warning" on.
    """
    for value, kind, field in ((format, LogFormat, "log_format"), (level, LogLevel, "log_level")):
        if value not in get_args(kind):
            known = ", ".join(get_args(kind))
            raise ConfigError(f"{field} is {value!r}; it must be one of {known}.", field)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger(_PACKAGE).setLevel(level.upper())
    logging.captureWarnings(True)


def _short(logger: str) -> str:
    return logger.removeprefix(_PACKAGE + ".")


class TextFormatter(logging.Formatter):
    """Time, level, logger without the package's name, request id if there is one, message."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created)
        request_id = getattr(record, "request_id", None)
        about = f"[{request_id}] " if request_id else ""
        line = (
            f"{moment:%H:%M:%S}.{int(record.msecs):03d} {record.levelname:<7} "
            f"{_short(record.name):<7} {about}{record.getMessage()}"
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One object a line; everything that was passed as `extra` becomes a key."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        fields: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD_ATTRIBUTES and name not in fields:
                fields[name] = value
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields, enc_hook=str).decode()
