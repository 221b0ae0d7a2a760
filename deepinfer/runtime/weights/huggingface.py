"""Checkpoint directories as Hugging Face lays them out.

Owns the reading of config.json, generation_config.json, tokenizer files, chat templates and
safetensors, single or sharded. Nothing is downloaded. Tensor data is mapped and read when asked
for, by the `safetensors` library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from deepinfer.errors import CheckpointError, UnsupportedModelError
from deepinfer.runtime.weights.checkpoint import Checkpoint, LazyTensors, TensorInfo

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPE_BITS = re.compile(r"[A-Z]+(\d+)")


def open_directory(directory: Path) -> Checkpoint:
    config = read_config(directory)  # first: a directory without one is not a model at all
    return describe_directory(directory, "safetensors", config, _open_tensors(directory))


def describe_directory(
    directory: Path, stored_as: str, config: dict[str, Any], tensors: LazyTensors
) -> Checkpoint:
    """Reads the text files of a directory whose tensors come from elsewhere (dummy ones, say)."""
    tokenizer_config = _read_json(directory / "tokenizer_config.json", optional=True)
    tokenizer_json = directory / "tokenizer.json"
    return Checkpoint(
        name=_model_name(directory),
        path=directory,
        format=stored_as,
        config=config,
        tensors=tensors,
        generation_config=_generation_config(directory / "generation_config.json"),
        tokenizer_config=tokenizer_config,
        chat_template=_chat_template(directory, tokenizer_config),
        tokenizer_json=tokenizer_json if tokenizer_json.is_file() else None,
    )


def read_config(directory: Path) -> dict[str, Any]:
    return normalise(_read_json(directory / "config.json"), directory)


def normalise(stored: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """One spelling for what config.json may say in several, and the defaults it may leave out.

    `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (before) both become the
    latter; `rope_scaling` is None or has a `rope_type` other than "default". A sliding window that
    `use_sliding_window` switches off becomes None.
    """
    config = dict(stored)
    config.update(_rope(config, source))
    config.pop("rope_parameters", None)
    hidden_size, num_heads = config.get("hidden_size"), config.get("num_attention_heads")
    if config.get("num_key_value_heads") is None and num_heads:
        config["num_key_value_heads"] = num_heads
    if config.get("head_dim") is None and hidden_size and num_heads:
        config["head_dim"] = hidden_size // num_heads
    config.setdefault("tie_word_embeddings", False)
    config.setdefault("sliding_window", None)
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = None
    return config


def _rope(config: Mapping[str, Any], source: Path) -> dict[str, Any]:
    settings = dict(config.get("rope_scaling") or {})
    settings.update(config.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in settings.values()):
        raise UnsupportedModelError(
            f"{source / 'config.json'} has RoPE settings that differ between kinds of layers "
            f"({', '.join(settings)}); one for all layers is implemented."
        )
    theta = settings.pop("rope_theta", None)
    if theta is None:
        theta = config.get("rope_theta")
    older_spelling = settings.pop("type", None)
    rope_type = settings.pop("rope_type", None) or older_spelling or "default"
    return {
        "rope_theta": 10000.0 if theta is None else float(theta),
        "rope_scaling": None if rope_type == "default" else {"rope_type": rope_type, **settings},
    }


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if optional:
            return {}
        raise CheckpointError(
            f"{path} is missing. A model directory needs config.json, tokenizer.json and "
            "safetensors files; copy the whole repository of the model."
        )
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}, not an object.")
    return content


def _generation_config(path: Path) -> dict[str, Any]:
    """Its sampling settings become the defaults of every request, so they must be numbers."""
    stored = _read_json(path, optional=True)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        value = stored.get(name)
        if value is not None and not isinstance(value, (int, float)):
            raise CheckpointError(
                f"{path} has {name} = {value!r}; a number is expected. Correct it."
            )
    return stored


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def _model_name(directory: Path) -> str:
    """The directory's name; inside the Hugging Face cache the name of the repository."""
    resolved = directory.resolve()
    if resolved.parent.name == "snapshots":
        repository = resolved.parent.parent.name
        return repository.removeprefix("models--").rpartition("--")[2] or resolved.name
    return resolved.name


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja goes first; then tokenizer_config.json, one template or named ones."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    stored = tokenizer_config.get("chat_template")
    if isinstance(stored, list):
        named = [item for item in stored if isinstance(item, dict)]
        named.sort(key=lambda item: item.get("name") != "default")  # stable: else the first
        stored = named[0].get("template") if named else None
    return stored if isinstance(stored, str) else None


def _open_tensors(directory: Path) -> LazyTensors:
    shards = {file: _Shard(directory / file) for file in _shard_names(directory)}
    places: dict[str, _Shard] = {}
    infos: dict[str, TensorInfo] = {}
    for shard in shards.values():
        for name in shard.handle.keys():  # noqa: SIM118 (not a mapping)
            places[name] = shard
            infos[name] = shard.info(name)
    if (directory / _INDEX).is_file() and not (directory / _SINGLE).is_file():
        _check_index(directory, places)

    def read(name: str) -> torch.Tensor:
        tensor: torch.Tensor = places[name].handle.get_tensor(name)
        return tensor

    return LazyTensors(directory, infos, read)


class _Shard:
    """One open safetensors file: its header is read, its data mapped."""

    def __init__(self, path: Path) -> None:
        try:
            self.handle: Any = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing. Fetch it again into the directory of the model."
            ) from None
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} ({path.stat().st_size:,} bytes) is damaged: {error}. Fetch it again."
            ) from error

    def info(self, name: str) -> TensorInfo:
        stored = self.handle.get_slice(name)
        dtype = str(stored.get_dtype())
        match = _DTYPE_BITS.match(dtype)
        info = TensorInfo(tuple(stored.get_shape()), dtype, 0)
        num_bits = int(match[1]) if match else 8
        return TensorInfo(info.shape, dtype, info.num_values * num_bits // 8)


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = _read_json(directory / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{directory / _INDEX} has no 'weight_map'.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{directory / _INDEX} places {name!r} in {file!r}, "
                "which is not a file of this directory."
            )
    return weight_map


def _shard_names(directory: Path) -> list[str]:
    if (directory / _SINGLE).is_file():
        return [_SINGLE]
    if (directory / _INDEX).is_file():
        names = sorted(set(_weight_map(directory).values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{directory} lacks {len(missing)} of the {len(names)} files that {_INDEX} names, "
                f"{missing[0]} first. Fetch them into the directory."
            )
        return names
    if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
        raise UnsupportedModelError(
            f"{directory} has weights in pickle files only, which are not opened because they can "
            "run code. Convert them: save_pretrained of a current transformers writes safetensors."
        )
    raise CheckpointError(
        f"{directory} has neither {_SINGLE} nor {_INDEX}. Fetch the weights of the model, or use "
        "load format 'dummy' for random ones."
    )


def _check_index(directory: Path, places: Mapping[str, _Shard]) -> None:
    for name, file in _weight_map(directory).items():
        if name not in places:
            raise CheckpointError(
                f"{_INDEX} of {directory} places the tensor {name!r} in {file}, where it is not. "
                "Index and shards belong to different versions; fetch both again."
            )
