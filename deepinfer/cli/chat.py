"""`deepinfer chat`: a conversation in the terminal.

While the user types, the event loop stands still; each answer is one run of it, which Ctrl-C
cancels. So the interrupt reaches the answer and not the program, without a signal handler.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence

from deepinfer.cli import flags
from deepinfer.cli.run import new_runner, show_progress
from deepinfer.client import EngineClient
from deepinfer.errors import ConfigError, DeepinferError
from deepinfer.types import SamplingParams

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def parser() -> argparse.ArgumentParser:
    result = flags.command_parser("chat", "Talk to a model in the terminal.", epilog=_HELP)
    result.add_argument("--system", metavar="TEXT", help="system message that goes before")
    flags.add_sampling_flags(result)
    flags.add_engine_flags(result)
    flags.add_log_flags(result, level="warning")
    return result


def main(arguments: Sequence[str]) -> int:
    parsed = flags.parse_and_configure_logging(parser(), arguments)
    config = flags.engine_config(parsed)
    from deepinfer.engine import Engine

    with new_runner() as runner:
        engine = Engine(config, on_progress=show_progress)
        try:
            runner.run(engine.start())
            params = flags.sampling_params(parsed, engine.default_params())
            _talk(runner, engine, Conversation(engine, parsed.system), params)
        finally:
            runner.run(engine.aclose())
    return 0


class Conversation:
    """The messages so far."""

    def __init__(self, engine: EngineClient, system: str | None) -> None:
        if engine.chat_template is None:
            raise ConfigError(
                f"{engine.model_name} has no chat template. Name one with --chat-template, or let "
                "it continue a text: deepinfer generate --raw."
            )
        self._template = engine.chat_template
        self._tokenizer = engine.tokenizer
        self._start = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self._messages = list(self._start)

    def prompt_for(self, question: str) -> list[int]:
        messages = [*self._messages, {"role": "user", "content": question}]
        return self._tokenizer.encode_rendered(self._template.render(messages))

    def add(self, question: str, answer: str) -> None:
        self._messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]


def _talk(
    runner: asyncio.Runner, engine: EngineClient, conversation: Conversation, params: SamplingParams
) -> None:
    """Reads a line, answers it, and so on until the user leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history in `input`)
    print(f"{engine.model_name}. {_HELP}")
    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            print("\n" + _HELP)
            continue
        except EOFError:
            print()
            return
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
            print("The conversation is forgotten.")
        elif line.startswith("/"):
            print(_HELP)
        elif line:
            _answer(runner, engine, conversation, params, line)


def _answer(
    runner: asyncio.Runner,
    engine: EngineClient,
    conversation: Conversation,
    params: SamplingParams,
    question: str,
) -> None:
    """Prints one answer. An interrupted one stays in the conversation as far as it was read."""
    answer = Answer()
    try:
        runner.run(answer.stream(engine, conversation.prompt_for(question), params))
    except KeyboardInterrupt:
        answer.stopped = True
    except DeepinferError as error:
        print(f"{error}\n{_HELP}", file=sys.stderr)
        return
    conversation.add(question, answer.text)
    print(f"\n\033[2m{answer.summary()}\033[0m" if sys.stdout.isatty() else "")


class Answer:
    """The text of one answer as it grows, and how fast it came."""

    def __init__(self) -> None:
        self.text = ""
        self.stopped = False
        self._num_tokens = 0
        self._started_s = self._first_s = self._last_s = time.monotonic()

    async def stream(self, engine: EngineClient, prompt: list[int], params: SamplingParams) -> None:
        async with engine.generate(prompt, params) as stream:
            async for delta in stream:
                self._last_s = time.monotonic()
                if not self._num_tokens:
                    self._first_s = self._last_s
                self._num_tokens += len(delta.token_ids)
                self.text += delta.text
                print(delta.text, end="", flush=True)

    def summary(self) -> str:
        first = (
            f"{self._num_tokens} tokens, the first after {self._first_s - self._started_s:.2f} s"
        )
        busy_s = self._last_s - self._first_s
        rate = f", then {(self._num_tokens - 1) / busy_s:.1f} tokens/s" if busy_s > 0 else ""
        return first + rate + (", stopped" if self.stopped else "")
