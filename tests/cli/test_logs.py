"""The two shapes of a log line."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest

from deepinfer.errors import ConfigError
from deepinfer.logs import configure_logging


def test_a_text_line_has_time_level_short_name_request_and_message() -> None:
    stream = io.StringIO()
    configure_logging("text", "info", stream)
    logging.getLogger("deepinfer.engine").info("%d tokens", 7, extra={"request_id": "cmpl-1"})
    logging.getLogger("deepinfer.engine").info("idle")
    with_id, without = stream.getvalue().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} INFO    engine  \[cmpl-1\] 7 tokens", with_id)
    assert without.endswith("INFO    engine  idle")


def test_a_json_line_is_one_object_with_every_extra() -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    log = logging.getLogger("deepinfer.serve.app")
    log.warning("slow\nclient", extra={"request_id": "chat-2", "lag_s": 0.5, "odd": object})
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "slow\nclient"
    assert (first["level"], first["logger"]) == ("warning", "deepinfer.serve.app")
    assert (first["request_id"], first["lag_s"]) == ("chat-2", 0.5)
    assert first["odd"] == str(object)
    assert first["time"].endswith("+00:00")
    assert "ValueError: broken" in second["exception"]


def test_the_level_is_ours_and_others_are_heard_from_warning_on() -> None:
    stream = io.StringIO()
    configure_logging("text", "debug", stream)
    logging.getLogger("deepinfer.engine").debug("ours")
    logging.getLogger("elsewhere").info("theirs, unheard")
    logging.getLogger("elsewhere").warning("theirs, heard")
    ours, theirs = stream.getvalue().splitlines()
    assert ours.endswith("DEBUG   engine  ours")
    assert theirs.endswith("WARNING elsewhere theirs, heard")


@pytest.mark.parametrize(("format", "level"), [("xml", "info"), ("text", "loud")])
def test_an_unknown_format_or_level_is_refused_with_the_known_ones(format: str, level: str) -> None:
    with pytest.raises(ConfigError, match=r"text, json|debug, info"):
        configure_logging(format, level)  # type: ignore[arg-type]
