"""The embedded model's tokenizer, and the hard strings with the ids that others give for them."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer.runtime.weights import Checkpoint, open_checkpoint
from deepinfer.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    return open_checkpoint("")


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer.from_checkpoint(checkpoint)


@pytest.fixture(scope="session")
def recorded() -> dict[str, Any]:
    """texts, and by oracle: version, special (ids with special tokens parsed) and plain."""
    return json.loads((DATA / "smollm2_token_ids.json").read_text())
