"""Flags of the command line, from one table: each row ties a flag to a field of a settings struct.

Type and default come from the struct (EngineConfig, ServerConfig, SamplingParams) where they are
declared; only the flag's name and its help text stand here. A flag that is not given is absent from
the result, so a default is never written twice. Names follow what users of vLLM and SGLang know;
where those differ from the field's name, the table says so.
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from deepinfer.config import EngineConfig
from deepinfer.errors import ConfigError
from deepinfer.logs import LogFormat, LogLevel, configure_logging
from deepinfer.types import SamplingParams

_BYTE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Flag:
    """One row: the flag's names, the field it sets, and what to tell about it."""

    names: str  # "--port" or "--gpu-memory-utilization --memory-utilization"
    field: str
    help: str
    metavar: str | None = None

    @property
    def negates(self) -> bool:
        return self.names.startswith("--no-")


ENGINE_FLAGS = (
    Flag("--model", "model", "GGUF file or Hugging Face directory", "PATH"),
    Flag("--served-model-name", "served_model_name", "the name that clients use", "NAME"),
    Flag(
        "--tokenizer",
        "tokenizer",
        "directory or tokenizer.json, if not the checkpoint's own",
        "PATH",
    ),
    Flag("--chat-template", "chat_template", "file with a jinja chat template", "FILE"),
    Flag("--load-format", "load_format", "dummy: random weights of the right shapes"),
    Flag("--dtype", "dtype", "of the weights in matrix products; auto: the fastest measured"),
    Flag("--seed", "seed", "of the requests that bring none, and of dummy weights"),
    Flag("--device", "device", "where the model runs"),
    Flag("--num-threads", "num_threads", "threads of a CPU device; 0: one per core"),
    Flag(
        "--kv-cache-memory-bytes",
        "kv_cache_memory_bytes",
        "size of the KV cache, such as 2G; 0: what memory allows",
        "SIZE",
    ),
    Flag(
        "--gpu-memory-utilization --memory-utilization",
        "memory_utilization",
        "share of the free memory that weights and cache may take",
        "SHARE",
    ),
    Flag("--max-model-len", "max_model_len", "prompt and answer, in tokens; 0: what fits"),
    Flag("--max-num-seqs", "max_num_seqs", "sequences that run at once"),
    Flag("--block-size", "block_tokens", "positions per KV block", "TOKENS"),
    Flag("--max-num-batched-tokens", "max_num_batched_tokens", "tokens of one step; 0: derived"),
    Flag(
        "--max-prefill-tokens-beside-decode",
        "max_prefill_tokens_beside_decode",
        "prompt tokens that a step with running answers takes at most",
        "TOKENS",
    ),
    Flag(
        "--min-prefill-tokens",
        "min_prefill_tokens",
        "tokens of each step that are kept for waiting prompts",
        "TOKENS",
    ),
    Flag("--max-waiting-requests", "max_waiting_requests", "more are refused with 503"),
    Flag("--max-waiting-tokens", "max_waiting_tokens", "more prompt tokens are refused with 503"),
    Flag("--max-skips", "max_skips", "how often smaller requests may pass one that does not fit"),
    Flag(
        "--no-enable-prefix-caching",
        "enable_prefix_caching",
        "do not reuse the KV of prompts that begin alike",
    ),
    Flag("--no-overlap", "overlap", "plan a step only after the one before; same tokens, slower"),
    Flag(
        "--batch-invariant",
        "batch_invariant",
        "the same seed gives the same text whatever else is in the batch; slower",
    ),
    Flag(
        "--drain-timeout",
        "drain_timeout_s",
        "how long running requests may go on after SIGTERM",
        "SECONDS",
    ),
)

SERVER_FLAGS = (
    Flag("--host", "host", "address to listen on; 0.0.0.0: all", "ADDRESS"),
    Flag("--port", "port", "0: any that is free"),
    Flag("--uds", "uds", "listen on this Unix socket instead", "PATH"),
    Flag("--ssl-certfile", "tls_cert_file", "certificate, PEM; with the key: HTTPS", "FILE"),
    Flag("--ssl-keyfile", "tls_key_file", "its private key, PEM", "FILE"),
    Flag("--api-key", "api_keys", "a key that clients may use; may be given again", "KEY"),
    Flag(
        "--allowed-origins",
        "cors_origins",
        "web origin that may call, or *; may be given again",
        "ORIGIN",
    ),
    Flag("--model-alias", "model_aliases", "one more name of the model; may be given again"),
    Flag("--max-body-bytes", "max_body_bytes", "larger requests are refused with 413", "SIZE"),
    Flag("--max-n", "max_n", "answers to one prompt at most"),
    Flag("--max-prompts", "max_prompts", "prompts, times n, in one completions request at most"),
    Flag("--request-timeout", "request_timeout_s", "deadline of every request; 0: none", "SECONDS"),
    Flag("--body-timeout", "body_timeout_s", "time to send a request's body", "SECONDS"),
    Flag(
        "--shutdown-timeout",
        "shutdown_timeout_s",
        "how long answers may be under way when the server stops",
        "SECONDS",
    ),
    Flag(
        "--keepalive-interval",
        "keepalive_interval_s",
        "silence after which a stream gets a comment",
        "SECONDS",
    ),
    Flag(
        "--encode-in-thread-characters",
        "encode_in_thread_characters",
        "longer texts are tokenised beside the event loop",
    ),
)

SAMPLING_FLAGS = (
    Flag("--max-tokens", "max_tokens", "length of the answer at most"),
    Flag("--min-tokens", "min_tokens", "length of the answer at least"),
    Flag("--temperature", "temperature", "0 always takes the most likely token"),
    Flag("--top-k", "top_k", "choose among the k most likely tokens; 0: off"),
    Flag("--top-p", "top_p", "choose among the most likely tokens that make up this share"),
    Flag("--min-p", "min_p", "drop tokens less likely than this share of the likeliest"),
    Flag("--stop", "stop", "end before this text; may be given again", "TEXT"),
    Flag("--ignore-eos", "ignore_eos", "go on where the model would end"),
)


def command_parser(
    command: str, description: str, *, positional: str = "", epilog: str | None = None
) -> argparse.ArgumentParser:
    """A subcommand's parser, without flags yet; `positional` is what its usage line ends in."""
    return argparse.ArgumentParser(
        prog=f"deepinfer {command}",
        allow_abbrev=False,
        usage=f"deepinfer {command} [flags] {positional}".rstrip(),
        description=description,
        epilog=epilog,
    )


def add_flags(
    parser: argparse.ArgumentParser,
    title: str,
    struct: type[msgspec.Struct],
    flags: Sequence[Flag],
    *,
    show_defaults: bool = True,
) -> None:
    """Adds the rows of a table to a parser, in a group of their own."""
    group = parser.add_argument_group(title)
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    for flag in flags:
        field = fields[flag.field]
        group.add_argument(
            *flag.names.split(),
            dest=_destination(struct, flag.field),
            default=argparse.SUPPRESS,
            help=flag.help + (_default_text(field.default) if show_defaults else ""),
            **_keywords(field.type, flag),
        )


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """The positional MODEL; `engine_config` reconciles it with --model."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="GGUF file or Hugging Face directory; default: the embedded SmolLM2-135M-Instruct",
    )


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "engine", EngineConfig, ENGINE_FLAGS)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    title = "sampling (what is not given: as the checkpoint recommends)"
    add_flags(parser, title, SamplingParams, SAMPLING_FLAGS, show_defaults=False)


def given(
    parsed: argparse.Namespace, struct: type[msgspec.Struct], flags: Iterable[Flag]
) -> dict[str, Any]:
    """The fields that were set on the command line."""
    found = {}
    for flag in flags:
        destination = _destination(struct, flag.field)
        if hasattr(parsed, destination):
            value = getattr(parsed, destination)
            found[flag.field] = tuple(value) if isinstance(value, list) else value
    return found


def engine_config(parsed: argparse.Namespace, model: str | None = None) -> EngineConfig:
    """The validated EngineConfig; `model` is the positional argument of commands that have one."""
    values = given(parsed, EngineConfig, ENGINE_FLAGS)
    if model is not None:
        if values.get("model", model) != model:
            raise ConfigError(
                f"Two models are named, {model!r} and --model {values['model']!r}. Name one.",
                "model",
            )
        values["model"] = model
    config = EngineConfig(**values)
    config.validate()
    return config


def sampling_params(parsed: argparse.Namespace, default: SamplingParams) -> SamplingParams:
    """`default` (what the checkpoint recommends) with the given flags put over it."""
    return msgspec.structs.replace(default, **given(parsed, SamplingParams, SAMPLING_FLAGS))


def _destination(struct: type[msgspec.Struct], field: str) -> str:
    # Structs share names ("seed", "model"); the struct's name keeps them apart in one namespace.
    return f"{struct.__name__}.{field}"


def _default_text(default: object) -> str:
    if isinstance(default, bool) or default in ("", ()):
        return ""  # the help text says what happens without the flag
    return f" (default: {default})"


def _keywords(annotation: Any, flag: Flag) -> dict[str, Any]:
    """What argparse must know about a field of this type."""
    if annotation is bool:
        return {"action": "store_false" if flag.negates else "store_true"}
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [kind for kind in typing.get_args(annotation) if kind is not types.NoneType]
        return _keywords(inner[0], flag)
    if origin is Literal:
        return {"choices": typing.get_args(annotation)}
    metavar = flag.metavar or {int: "N", float: "X"}.get(annotation, "NAME")
    if origin is tuple:
        return {"action": "append", "metavar": metavar}
    parse = _byte_count if flag.field.endswith("_bytes") else annotation
    return {"type": parse, "metavar": metavar}


def _byte_count(text: str) -> int:
    """ "1000", "2G" or "2GiB" (powers of 1024), "2g" (powers of 1000)."""
    number = text.removesuffix("iB").removesuffix("B")
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        return int(float(number.removesuffix(unit)) * _BYTE_UNITS[unit])
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write bytes, or a number with K, M or G, such as 512M or 2G"
        ) from None


def add_log_flags(parser: argparse.ArgumentParser, level: LogLevel) -> None:
    """The flags of `configure_logging`; `level` is the command's default."""
    group = parser.add_argument_group("logging")
    group.add_argument("--log-format", choices=typing.get_args(LogFormat), default="text")
    group.add_argument("--log-level", choices=typing.get_args(LogLevel), default=level)


def parse_and_configure_logging(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> argparse.Namespace:
    """What the arguments say; logging is as they ask from here on."""
    parsed = parser.parse_args(arguments)
    configure_logging(parsed.log_format, parsed.log_level)
    return parsed
