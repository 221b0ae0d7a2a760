"""Commands configure the process's logging; each test leaves it as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    root, package = logging.getLogger(), logging.getLogger("deepinfer")
    before = (root.handlers[:], root.level, package.level)
    yield
    logging.captureWarnings(False)
    root.handlers[:], root.level, package.level = before
