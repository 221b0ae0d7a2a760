"""Each command as a user runs it: a real process, the embedded model, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent.parent
SMALL = ("--max-num-seqs", "4", "--max-model-len", "512", "--num-threads", "1")
PATIENCE_S = 120.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "deepinfer", *arguments]


class Server:
    """A `deepinfer serve` process and the lines that it has logged."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []

    def read_until(self, pattern: str) -> re.Match[str]:
        """Reads log lines up to the first that matches."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"ended without {pattern!r}:\n" + "".join(self.lines))

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def wait_until_listening(self) -> None:
        self.url = self.read_until(r"Listening on (http://[\d.:]+)").group(1)

    def post(self, path: str, body: object) -> urllib.request.Request:
        return urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    process = subprocess.Popen(
        command("serve", "--port", "0", *SMALL, *arguments),
        cwd=CHECKOUT,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            server = Server(process)
            server.wait_until_listening()
            yield server
        finally:
            process.kill()


def test_generate_prints_the_answer_alone_on_standard_output() -> None:
    arguments = ("--raw", "--temperature", "0", "--max-tokens", "6", *SMALL)
    done = subprocess.run(
        command("generate", "The capital of France is", *arguments),
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Paris" in done.stdout
    assert done.stderr == ""


def test_generate_json_reads_standard_input_and_uses_the_chat_template() -> None:
    done = subprocess.run(
        command("generate", "-", "--json", "--temperature", "0", "--max-tokens", "6", *SMALL),
        cwd=CHECKOUT,
        input="Name three colours.",
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert answer["prompt"] == "Name three colours."
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens"] > 20  # the template's own tokens count
    assert answer["finish_reason"] == "length"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_life_of_a_server_up_to_a_drain_that_completes_running_requests() -> None:
    with serving() as server:
        assert server.status("/health") == 200  # also while the model loads
        server.read_until("Ready after")
        assert server.status("/ready") == 200

        line = server.read_until("(curl .*)").group(1)
        printed = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
        answer = json.loads(printed.stdout)
        assert answer["choices"][0]["message"]["content"]

        body = {"prompt": "Count:", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with urllib.request.urlopen(server.post("/v1/completions", body)) as stream:
            events = [stream.readline()]
            server.process.send_signal(signal.SIGTERM)
            server.read_until("Draining: 1 running")
            assert server.status("/ready") == 503
            events += stream.readlines()
        assert events[-2] == b"data: [DONE]\n"
        chunks = [json.loads(event[6:]) for event in events if event.startswith(b"data: {")]
        assert "length" in [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
        server.read_until("Closed")
        assert server.process.wait(PATIENCE_S) == 0


def test_a_second_interrupt_ends_running_requests_at_once() -> None:
    with serving() as server:
        server.read_until("Ready after")
        body = {"prompt": "Count:", "max_tokens": 450, "ignore_eos": True, "stream": True}
        with urllib.request.urlopen(server.post("/v1/completions", body)) as stream:
            stream.readline()
            server.process.send_signal(signal.SIGINT)
            server.read_until("Draining: 1 running")
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(PATIENCE_S) == 130
            with contextlib.suppress(OSError):
                assert b"[DONE]" not in stream.read()


def test_a_signal_while_loading_ends_it_in_peace() -> None:
    with serving() as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0


def test_a_port_that_is_taken_is_one_message_and_exit_code_2() -> None:
    with serving() as server:
        port = server.url.rpartition(":")[2]
        second = subprocess.run(
            command("serve", "--port", port, *SMALL),
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert second.returncode == 2
        assert port in second.stderr
        assert "Traceback" not in second.stderr


class Terminal:
    """A process on a pseudo-terminal: what it shows, and keys."""

    def __init__(self, arguments: list[str]) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(CHECKOUT)
            # As from a terminal, also where the tests run in the background, which ignores it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execv(arguments[0], arguments)
        self._shown = b""

    def read_until(self, text: bytes) -> bytes:
        """What was shown up to and with `text`."""
        end_s = time.monotonic() + PATIENCE_S
        while text not in self._shown:
            assert select.select([self._fd], [], [], end_s - time.monotonic())[0], self._shown
            self._shown += os.read(self._fd, 4096)
        before, _, self._shown = self._shown.partition(text)
        return before + text

    def press(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def exit_code(self) -> int:
        with contextlib.suppress(OSError):  # the terminal is gone when the process is
            while os.read(self._fd, 4096):
                pass
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_chat_answers_and_an_interrupt_stops_the_answer_alone() -> None:
    terminal = Terminal(command("chat", "--ignore-eos", "--max-tokens", "300", *SMALL))
    terminal.read_until(b"\n> ")
    terminal.press(b"Tell me a long story.\n")
    terminal.read_until(b"story.\r\n")
    terminal.read_until(b" ")  # the answer has begun
    terminal.press(b"\x03")
    summary = terminal.read_until(b"stopped")
    assert b"tokens, the first after" in summary
    terminal.read_until(b"> ")
    terminal.press(b"/reset\n")
    terminal.read_until(b"forgotten")
    terminal.read_until(b"> ")
    terminal.press(b"\x04")
    assert terminal.exit_code() == 0
