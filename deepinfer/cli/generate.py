"""`deepinfer generate PROMPT`: loads a model, prints one answer as it comes, and leaves.

A model that has a chat template gets the prompt as a user's message, since that is what it was
trained on; `--raw` has it continue the text as it stands. The answer goes to standard output,
everything else to standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from deepinfer.cli import flags
from deepinfer.cli.run import new_runner, show_progress
from deepinfer.client import EngineClient
from deepinfer.config import EngineConfig
from deepinfer.errors import ConfigError
from deepinfer.types import Delta


def parser() -> argparse.ArgumentParser:
    result = flags.command_parser(
        "generate", "Print the answer to one prompt, as it comes.", positional="PROMPT"
    )
    result.add_argument("prompt", metavar="PROMPT", help="the text; - reads standard input")
    result.add_argument("--raw", action="store_true", help="continue the text: no chat template")
    result.add_argument("--system", metavar="TEXT", help="system message that goes before")
    result.add_argument("--json", action="store_true", help="print one JSON object at the end")
    flags.add_sampling_flags(result)
    flags.add_engine_flags(result)
    flags.add_log_flags(result, level="warning")
    return result


def main(arguments: Sequence[str]) -> int:
    parsed = flags.parse_and_configure_logging(parser(), arguments)
    config = flags.engine_config(parsed)
    if parsed.raw and parsed.system:
        raise ConfigError("--raw uses no messages, so --system has no place. Drop one of them.")
    text = sys.stdin.read() if parsed.prompt == "-" else parsed.prompt
    with new_runner() as runner:
        runner.run(_generate(config, text, parsed))
    return 0


async def _generate(config: EngineConfig, text: str, parsed: argparse.Namespace) -> None:
    from deepinfer.engine import Engine

    async with Engine(config, on_progress=show_progress) as engine:
        params = flags.sampling_params(parsed, engine.default_params())
        prompt = text if parsed.raw else as_conversation(engine, text, parsed.system)
        deltas: list[Delta] = []
        async with engine.generate(prompt, params) as stream:
            async for delta in stream:
                deltas.append(delta)
                if not parsed.json:
                    print(delta.text, end="", flush=True)
    print(_json(engine.model_name, text, deltas) if parsed.json else "")


def as_conversation(engine: EngineClient, text: str, system: str | None) -> str | list[int]:
    """The prompt of a model with a chat template; the text itself for one without."""
    template = engine.chat_template
    if template is None:
        if system:
            raise ConfigError(f"{engine.model_name} has no chat template: --system has no place.")
        return text
    messages = [{"role": "user", "content": text}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return engine.tokenizer.encode_rendered(template.render(messages))


def _json(model: str, prompt: str, deltas: Sequence[Delta]) -> str:
    last = deltas[-1]
    fields: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "text": "".join(delta.text for delta in deltas),
        "token_ids": [token_id for delta in deltas for token_id in delta.token_ids],
        "finish_reason": last.finish_reason,
        "usage": last.usage,
        "timeline": last.timeline,
    }
    return msgspec.json.encode(fields).decode()
