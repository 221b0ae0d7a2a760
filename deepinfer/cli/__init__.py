"""The `deepinfer` command: finds the subcommand, runs it, and turns errors into one message.

This package is the only place that touches signals, the process's logging and its exit code. Each
subcommand is a module with `main(arguments) -> exit code`, imported when it is called for, so that
`--help` and `--version` need neither torch nor a server.

Exit codes: 0 done, 1 the work failed, 2 a flag, setting or checkpoint is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

import deepinfer
from deepinfer.errors import ConfigError, DeepinferError, MemoryPlanError, ModelError, RequestError
from deepinfer.runtime.host import limit_spinning

_COMMANDS = {
    "serve": ("deepinfer.cli.serve", "serve a model over HTTP, with the OpenAI protocol"),
    "generate": ("deepinfer.cli.generate", "print the answer to one prompt"),
    "chat": ("deepinfer.cli.chat", "talk to a model in the terminal"),
    "plan": ("deepinfer.cli.plan", "say what fits in memory, before loading anything"),
    "bench": ("deepinfer.bench", "measure the scheduler or the engine"),
}

_SETTINGS_ERRORS = (ConfigError, MemoryPlanError, ModelError, RequestError)


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, _COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="deepinfer",
        usage="deepinfer [--version] COMMAND ...",
        description="An LLM inference engine in pure Python and Triton.",
        epilog=f"commands:\n{commands}\n\n`deepinfer COMMAND --help` lists the flags of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"deepinfer {deepinfer.__version__}")
    parser.add_argument("command", choices=list(_COMMANDS), help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = _parser()
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given:
        parser.print_help()
        return 2
    parsed = parser.parse_args(given)
    limit_spinning()
    try:
        return _run(parsed.command, parsed.arguments)
    except BrokenPipeError:
        # The reader of our output has left, as `| head` does. Nothing is wrong, and nothing must
        # be flushed to it when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(command: str, arguments: list[str]) -> int:
    try:
        module = importlib.import_module(_COMMANDS[command][0])
        code: int = module.main(arguments)
        return code
    except KeyboardInterrupt:
        return 130
    except DeepinferError as error:
        if logging.getLogger("deepinfer").isEnabledFor(logging.DEBUG):
            logging.getLogger("deepinfer").debug("This is where it happened:", exc_info=True)
        print(f"deepinfer {command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, _SETTINGS_ERRORS) else 1
