"""Log lines as Gazette's tools write them (spec/cli.md §1): logrus text, its terminal form, or JSON, on stderr.

Structured fields travel in `extra={"fields": {…}}` of the standard library's logging.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn, TextIO

__all__ = ["LEVELS", "CommandFailed", "fatal", "log", "set_up_logging"]

LEVELS = {
    "trace": 5,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
_NAMES = {
    5: "trace",
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warning",
    logging.ERROR: "error",
    logging.CRITICAL: "fatal",
}
_COLORS = {"warning": 33, "error": 31, "fatal": 31, "info": 36}
_PLAIN = re.compile(r"[A-Za-z0-9\-._/@^+]*")
_MESSAGE_WIDTH = 44

log = logging.getLogger("broadsheet.cli")


class CommandFailed(Exception):
    """A command cannot go on. `message` says what failed; `fields` why, and what to do about it."""

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields


def fatal(message: str, **fields: object) -> NoReturn:
    """Log one line of level fatal and exit with status 1."""
    log.critical(message, extra={"fields": fields})
    raise SystemExit(1)


def set_up_logging(level: str, style: str, stream: TextIO | None = None) -> None:
    """Log to `stream` (stderr). `style` is text, color or json; text on a terminal is color without NO_COLOR."""
    stream = stream or sys.stderr
    formatter: logging.Formatter
    if style == "json":
        formatter = JsonFormatter()
    elif style == "color" or stream.isatty():
        formatter = TerminalFormatter(colors=style == "color" or "NO_COLOR" not in os.environ)
    else:
        formatter = TextFormatter()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(LEVELS[level], logging.INFO))  # libraries do not chat
    logging.getLogger("broadsheet").setLevel(LEVELS[level])


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields


def _level(record: logging.LogRecord) -> str:
    return _NAMES.get(record.levelno, record.levelname.lower())


def _quote(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`time="2026-11-21T03:11:32Z" level=info msg="successfully applied" revision=3`"""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        parts = [f'time="{stamp}"', f"level={_level(record)}", f"msg={_quote(record.getMessage())}"]
        parts.extend(f"{name}={_quote(value)}" for name, value in sorted(_fields(record).items()))
        return _with_traceback(self, record, " ".join(parts))


class TerminalFormatter(logging.Formatter):
    """`INFO[0000] successfully applied                          revision=3`, seconds since the start in brackets."""

    def __init__(self, *, colors: bool) -> None:
        super().__init__()
        self._colors = colors
        self._begin = time.time()

    def format(self, record: logging.LogRecord) -> str:
        level = _level(record)
        seconds = int(record.created - self._begin)
        parts = [f"{self._paint(level, level[:4].upper())}[{seconds:04}] {record.getMessage():<{_MESSAGE_WIDTH}} "]
        parts.extend(
            f"{self._paint(level, name)}={_quote(value)}" for name, value in sorted(_fields(record).items())
        )
        return _with_traceback(self, record, " ".join(parts).rstrip())

    def _paint(self, level: str, text: str) -> str:
        return f"\x1b[{_COLORS.get(level, 37)}m{text}\x1b[0m" if self._colors else text


class JsonFormatter(logging.Formatter):
    """One object a line: level, msg, time (RFC 3339) and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        line = {**_fields(record), "level": _level(record), "msg": record.getMessage(), "time": stamp}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, sort_keys=True, default=str)


def _with_traceback(formatter: logging.Formatter, record: logging.LogRecord, line: str) -> str:
    return f"{line}\n{formatter.formatException(record.exc_info)}" if record.exc_info else line
