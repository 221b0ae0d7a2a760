"""The command line: its commands, their help, errors and exit codes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import deepinfer
from deepinfer.cli import chat, flags, generate, main, plan, serve
from deepinfer.errors import CheckpointError, ConfigError, DeviceError

CHECKOUT = Path(__file__).parent.parent.parent
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "serve": serve.parser,
    "generate": generate.parser,
    "chat": chat.parser,
    "plan": plan.parser,
}


@pytest.mark.parametrize("command", PARSERS)
def test_help_lists_every_flag_with_a_text(command: str) -> None:
    parser = PARSERS[command]()
    assert parser.prog == f"deepinfer {command}"
    text = parser.format_help()
    for flag in flags.ENGINE_FLAGS:
        assert flag.names.split()[0] in text


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deepinfer", *arguments]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)


def test_version_and_help_need_no_torch() -> None:
    code = (
        "import sys; from deepinfer.cli import main\n"
        "for words in (['--version'], ['--help'], ['serve', '--help'], ['chat', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"deepinfer {deepinfer.__version__}" in done.stdout


def test_without_a_command_it_lists_them() -> None:
    done = run()
    assert done.returncode == 2
    for command in ("serve", "generate", "chat", "plan", "bench"):
        assert f"  {command} " in done.stdout


def test_an_unknown_command_is_named_beside_the_known_ones() -> None:
    done = run("sevre")
    assert done.returncode == 2
    assert "'sevre'" in done.stderr
    assert "serve" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--port", "99999"),
        ("serve", "--max-num-seqs", "0"),
        ("generate", "Hi", "--memory-utilization", "2"),
        ("generate", "Hi", "--raw", "--system", "Be brief."),
        ("chat", "--kv-cache-memory-bytes", "lots"),
    ],
)
def test_a_wrong_setting_is_one_message_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"deepinfer {arguments[0]}: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a setting"), 2),
        (CheckpointError("a file"), 2),
        (DeviceError("a step"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr(plan, "main", fail)
    assert main(["plan"]) == code
    assert str(error) in capsys.readouterr().err
