"""The documentation is true: its tables equal the code's, its commands run, its answers come.

Code blocks say by their language what they are:

    bash     commands. `curl` is run against a server with the embedded model; of `deepinfer` and
             `make` the flags and targets are checked
    python   with an import: a program, which is run; without: a fragment, which is compiled
    json     after a command: its answer, compared in shape. Values are the moment's
    http     after `curl -i`: status, headers and body, compared in full but for the numbers
    text     after `curl -N`: the kinds of events, in order
"""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import contextlib
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest

from deepinfer.cli import flags
from deepinfer.config import EngineConfig
from deepinfer.engine import Engine
from deepinfer.runtime import memory
from deepinfer.scheduler.policy import Policy
from deepinfer.scheduler.prefix import NUM_GHOSTS
from deepinfer.serve import openai, system
from deepinfer.serve.app import create_app, run_server
from deepinfer.serve.metrics import PrometheusObserver
from deepinfer.serve.protocol import ChatCompletionRequest, CompletionRequest
from deepinfer.serve.requests import NOT_SERVED
from deepinfer.serve.settings import ServerConfig
from deepinfer.types import PrefixMiss, SamplingParams

CHECKOUT = Path(__file__).parent.parent
HTTP_API = CHECKOUT / "docs" / "http-api.md"
CONFIGURATION = CHECKOUT / "docs" / "configuration.md"
PAGES = (CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md")))
# Addresses in the documentation, and what stands there while it is tested.
PLAIN, ENCRYPTED, SOCKET = "http://127.0.0.1:8000", "https://localhost:8443", "/tmp/deepinfer.sock"
API_KEY = "secret"
PATIENCE_S = 120


# --- reading the pages ---


class Block(NamedTuple):
    """A fenced block. Only blank lines stand between it and `after`."""

    place: str  # "http-api.md:12"
    language: str
    text: str
    stands_alone: bool  # it is nobody's `after`
    after: Block | None


def read_blocks(page: Path) -> list[Block]:
    source = page.read_text()
    found = list(re.finditer(r"^```(\w*)\n(.*?)^```$", source, re.MULTILINE | re.DOTALL))
    blocks: list[Block] = []
    for index, match in reversed(list(enumerate(found))):
        begin = found[index - 1].end() if index else 0
        next_begin = found[index + 1].start() if index + 1 < len(found) else len(source)
        is_next_adjacent = bool(blocks) and not source[match.end() : next_begin].strip()
        line = source.count("\n", 0, match.start()) + 1
        stands_alone = bool(source[begin : match.start()].strip())
        after = blocks[0] if is_next_adjacent else None
        blocks.insert(0, Block(f"{page.name}:{line}", match[1], match[2], stands_alone, after))
    return blocks


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def blocks_of(language: str) -> pytest.MarkDecorator:
    found = [block for block in BLOCKS if block.language == language]
    return pytest.mark.parametrize("block", found, ids=[block.place for block in found])


def read_section(page: Path, title: str) -> str:
    """What stands between this heading and the next."""
    match = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)
    assert match is not None, f"{page.name} has no section {title!r}"
    return match[1]


def read_tables(text: str) -> list[list[list[str]]]:
    """Each table as rows of cells; the first row is the header's."""
    tables = []
    for match in re.finditer(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in match[0].splitlines()
            if not line.startswith("|---")
        ]
        tables.append(rows)
    return tables


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def commands(script: str) -> Iterator[str]:
    """The commands of a script, each with its continuation lines and without comments."""
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if line.rstrip().endswith(("\\", "|")):
            continue
        with contextlib.suppress(ValueError):  # a quotation goes on in the next line
            if shlex.split(pending, comments=True):
                yield pending.strip()
            pending = ""
    assert not pending.strip(), f"a quotation never ends: {pending}"


# --- tables against code ---


def spelled(default: object) -> str:
    return repr(default).replace("'", '"')


@pytest.mark.parametrize(
    ("title", "struct", "table"),
    [
        ("The engine", EngineConfig, flags.ENGINE_FLAGS),
        ("The server", ServerConfig, flags.SERVER_FLAGS),
        ("Sampling parameters", SamplingParams, flags.SAMPLING_FLAGS),
    ],
)
def test_every_setting_stands_with_its_flag_and_default(
    title: str, struct: type[msgspec.Struct], table: tuple[flags.Flag, ...]
) -> None:
    rows = read_tables(read_section(CONFIGURATION, title))[0]
    header, documented = rows[0], {}
    for row in rows[1:]:
        assert len(row) == len(header), row
        (name,) = codes(row[0])
        told = set(codes(row[header.index("flag")]))
        documented[name] = (told, *codes(row[header.index("default")]))
    names = {flag.field: set(flag.names.split()) for flag in table}
    fields = msgspec.structs.fields(struct)
    assert documented == {
        field.name: (names.get(field.name, set()), spelled(field.default)) for field in fields
    }


def test_sampling_parameters_stand_with_their_names_over_http() -> None:
    rows = read_tables(read_section(CONFIGURATION, "Sampling parameters"))[0][1:]
    known = {*CompletionRequest.__struct_fields__, *ChatCompletionRequest.__struct_fields__}
    assert {name for row in rows for name in codes(row[1])} <= known
    assert all(codes(row[1]) for row in rows)


def test_numbers_in_the_text_are_the_codes() -> None:
    text = " ".join(CONFIGURATION.read_text().split())
    defaults = {field.name: field.default for field in msgspec.structs.fields(Policy)}
    assert f"Each {defaults['ageing_s']:.0f} seconds (`ageing_s`)" in text
    assert f"first {defaults['look_ahead']} (`look_ahead`)" in text
    assert f"The last {NUM_GHOSTS} evicted blocks" in text
    assert f"a workspace of {memory.WORKSPACE_BYTES >> 20} MiB" in text
    assert f"sequences of {memory.TYPICAL_TOKENS} tokens need" in text
    reasons = read_tables(read_section(CONFIGURATION, "Prefix caching"))[0][1:]
    assert [codes(row[0])[0] for row in reasons] == [str(miss) for miss in PrefixMiss]


def test_limits_are_the_defaults() -> None:
    defaults = {
        flag.names: getattr(config, flag.field)
        for config, table in (
            (EngineConfig(), flags.ENGINE_FLAGS),
            (ServerConfig(), flags.SERVER_FLAGS),
        )
        for flag in table
    }
    told = re.findall(r"`(--[\w-]+)`, (\d+)( MiB)?", read_section(HTTP_API, "Limits"))
    assert len(told) > 5
    for flag, number, unit in told:
        assert int(number) << (20 if unit else 0) == defaults[flag], flag


@pytest.mark.parametrize("page", [HTTP_API, CONFIGURATION], ids=lambda page: page.name)
def test_flags_within_the_text_exist(page: Path) -> None:
    known = set(" ".join(flag.names for flag in flags.SAMPLING_FLAGS).split())
    for command in ("serve", "plan"):
        parser = importlib.import_module(f"deepinfer.cli.{command}").parser()
        known.update(name for action in parser._actions for name in action.option_strings)
    assert set(re.findall(r"`(--[\w-]+)", page.read_text())) <= known


def test_every_endpoint_stands_in_the_table() -> None:
    rows = read_tables(read_section(HTTP_API, "Endpoints"))[0][1:]
    endpoints = (*openai.ENDPOINTS, *system.ENDPOINTS)
    assert {codes(row[0])[0]: row[2] == "yes" for row in rows} == {
        f"{endpoint.method} {endpoint.path.replace(':.+', '')}": endpoint.needs_key
        for endpoint in endpoints
    }


def test_every_request_field_stands_as_served_or_as_refused() -> None:
    *served, refused = read_tables(read_section(HTTP_API, "Requests"))
    fields = {*CompletionRequest.__struct_fields__, *ChatCompletionRequest.__struct_fields__}
    named = {name for table in served for row in table[1:] for name in codes(row[0])}
    told: dict[str, str] = {name: row[1] for row in refused[1:] for name in codes(row[0])}
    assert told.keys() == NOT_SERVED.keys() | {"best_of"}
    assert named == fields - told.keys()
    for field, neutral in NOT_SERVED.items():
        spellings = [json.dumps(value) for value in neutral if value is not None]
        assert told[field].split(", ") == (spellings or [""]), field


def test_error_codes_are_those_that_the_front_gives() -> None:
    rows = read_tables(read_section(HTTP_API, "Errors"))[0][1:]
    told = {code for row in rows for code in codes(row[1])}
    source = "".join(path.read_text() for path in (CHECKOUT / "deepinfer/serve").glob("*.py"))
    assert {code for code in told if f'"{code}"' not in source} == set()
    assert set(re.findall(r'\bcode ?= ?"(\w+)"', source)) <= told


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in (HTTP_API, CONFIGURATION):
        for name, anchor in re.findall(r"\]\(([\w./-]*)#?([\w-]*)\)", page.read_text()):
            target = page.parent / name if name else page
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in headings}
            assert not anchor or anchor in anchors, f"{page.name}: {name}#{anchor}"


# --- commands that are not run: do their flags and targets exist? ---


def known_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))


def check_flags(command: str, arguments: list[str]) -> None:
    module = {"bench": "deepinfer.bench"}.get(command, f"deepinfer.cli.{command}")
    of_command = importlib.import_module(module)
    if hasattr(of_command, "parser"):
        of_command.parser().parse_args(arguments)  # exits where a flag is wrong


def check_command(command: str) -> None:
    words = shlex.split(command, comments=True)
    if words[0] == "deepinfer":
        check_flags(words[1], words[2:])
    elif words[0] == "make":
        variables = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        targets = [word for word in words[1:] if "=" not in word]
        assert set(targets) <= known_targets(), command
        if targets in (["serve"], ["chat"]):
            check_flags(targets[0], shlex.split(variables.get("ARGS", "")))
    elif words[0].startswith("python") and len(words) > 1 and words[1].endswith(".py"):
        assert (CHECKOUT / words[1]).exists(), command


@blocks_of("bash")
def test_commands_have_real_flags_and_targets(block: Block) -> None:
    for command in commands(block.text):
        check_command(command)


@pytest.mark.parametrize("page", [HTTP_API, CONFIGURATION], ids=lambda page: page.name)
def test_commands_within_the_text_exist(page: Path) -> None:
    names = importlib.import_module("deepinfer.cli")._COMMANDS
    for line in re.findall(r"`((?:make|deepinfer) [^`]+)`", page.read_text()):
        program, name = line.split()[:2]
        assert name in (names if program == "deepinfer" else known_targets()), line


# --- one engine, three ways in: plain, encrypted with keys, and a Unix socket ---


class Site(NamedTuple):
    url: str
    encrypted_url: str
    directory: Path  # with cert.pem

    def localise(self, text: str) -> str:
        for documented, real in (
            (PLAIN, self.url),
            (ENCRYPTED, self.encrypted_url.replace("127.0.0.1", "localhost")),
            (SOCKET, str(self.directory / "socket")),
        ):
            text = text.replace(documented, real)
        return text

    def run(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "CURL_HOME": str(self.directory),
            "DEEPINFER_API_KEY": API_KEY,
            "NO_PROXY": "*",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(CHECKOUT),
        }
        return subprocess.run(
            arguments,
            cwd=self.directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def curl(self, script: str) -> str:
        done = self.run(["bash", "-euo", "pipefail", "-c", self.localise(script)])
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout


def make_certificate(directory: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)


def server_configs(directory: Path) -> list[ServerConfig]:
    return [
        ServerConfig(port=0),
        ServerConfig(
            port=0,
            tls_cert_file=str(directory / "cert.pem"),
            tls_key_file=str(directory / "key.pem"),
            api_keys=(API_KEY,),
            cors_origins=("https://app.example",),
        ),
        ServerConfig(uds=str(directory / "socket")),
    ]


async def serve(
    configs: list[ServerConfig],
    started: concurrent.futures.Future[tuple[list[str], Callable[[], object]]],
) -> None:
    """Until the second value of `started` is called, from whatever thread."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    observer = PrometheusObserver()
    # A short context, because not every example says how long its answer may become.
    engine_config = EngineConfig(max_model_len=128, max_num_seqs=8, num_threads=1)
    try:
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(Engine(engine_config, observer=observer))
            urls = []
            for config in configs:
                app = create_app(engine, config, observer)
                urls.append((await stack.enter_async_context(run_server(app, config))).url)
            started.set_result((urls, lambda: loop.call_soon_threadsafe(stopping.set)))
            await stopping.wait()
    except BaseException as error:
        if not started.done():
            started.set_exception(error)
        raise


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if shutil.which("curl") is None or shutil.which("openssl") is None:
        pytest.skip("curl or openssl is not installed")
    directory = tmp_path_factory.mktemp("site")
    make_certificate(directory)
    started: concurrent.futures.Future[Any] = concurrent.futures.Future()
    configs = server_configs(directory)
    thread = threading.Thread(target=lambda: asyncio.run(serve(configs, started)))
    thread.start()
    try:
        urls, stop = started.result(PATIENCE_S)
        try:
            yield Site(urls[0], urls[1], directory)
        finally:
            stop()
    finally:
        thread.join()


# --- commands that are run, and what they answer ---

OPEN_KEYS = ("stalls_ms", "top_logprobs")  # their keys are data


def shape(value: Any) -> Any:
    """Keys and types of a JSON value. A list is the distinct shapes of its items, in order."""
    if isinstance(value, dict):
        return {
            key: "open" if key in OPEN_KEYS and inner else shape(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return distinct([shape(item) for item in value])
    return "number" if isinstance(value, int | float) else type(value).__name__


def distinct(items: list[Any]) -> list[Any]:
    return [item for i, item in enumerate(items) if item not in items[:i]]


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return distinct([line if line == "[DONE]" else shape(json.loads(line)) for line in lines])


class Exchange(NamedTuple):
    """An HTTP answer as `curl -i` shows it."""

    status_line: str
    headers: dict[str, str]
    body: str

    @classmethod
    def parse(cls, text: str) -> Exchange:
        head, _, body = text.replace("\r\n", "\n").partition("\n\n")
        if head.startswith("HTTP/1.1 1"):  # 100 Continue
            return cls.parse(body)
        status_line, *lines = head.splitlines()
        pairs = (line.split(": ", 1) for line in lines)
        return cls(status_line, {name.lower(): value for name, value in pairs}, body.strip())


def without_numbers(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r"[0-9a-f]{32}(-\d+)?", "ID", text))


def assert_equal_but_for_numbers(actual: Exchange, documented: Exchange) -> None:
    assert actual.status_line == documented.status_line
    for name, value in documented.headers.items():
        assert without_numbers(actual.headers[name]) == without_numbers(value)
    assert without_numbers(actual.body) == without_numbers(documented.body)


RUN = [block for block in BLOCKS if block.language == "bash" and "curl " in block.text]


@pytest.mark.parametrize("block", RUN, ids=[block.place for block in RUN])
def test_curl_gets_the_answer_that_is_shown(site: Site, block: Block) -> None:
    answer = block.after
    settings = ["silent", "show-error", f"max-time = {PATIENCE_S}"]
    if answer is None or answer.language != "http":
        settings.append("fail-with-body")
    (site.directory / ".curlrc").write_text("\n".join(settings))
    script = "\n".join(command for command in commands(block.text) if "curl " in command)
    output = site.curl(script)
    if answer is None:
        return
    if answer.language == "json":
        assert shape(json.loads(output)) == shape(json.loads(answer.text))
    elif answer.language == "text":
        assert events(output) == events(answer.text)
    elif answer.language == "http":
        assert_equal_but_for_numbers(Exchange.parse(output), Exchange.parse(answer.text))


@blocks_of("python")
def test_python_runs(site: Site, block: Block) -> None:
    compile(block.text, block.place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if "import " in block.text:
        done = site.run([sys.executable, "-c", site.localise(block.text)])
        assert done.returncode == 0, done.stderr


@blocks_of("json")
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


def test_a_scrape_has_the_metrics_that_stand_in_the_tables(site: Site) -> None:
    scrape = site.curl(f"curl {PLAIN}/metrics")
    found: dict[str, set[str]] = {"gauge": set(), "counter": set(), "histogram": set()}
    for name, kind in re.findall(r"^# TYPE (deepinfer:\w+) (\w+)$", scrape, re.MULTILINE):
        found[kind].add(name)
    told = {
        table[0][0].split(",")[0]: {codes(row[0])[0] for row in table[1:]}
        for table in read_tables(read_section(HTTP_API, "Metrics"))
    }
    assert told == found


# --- refusals that need an engine in a certain state ---


async def full(start_engine: Any) -> Any:
    engine = await start_engine(max_num_seqs=1, max_waiting_requests=1)
    engine.device.hold()
    running = engine.generate("running")
    await engine.until(lambda: engine.stats().num_running)
    return engine, (running, engine.generate("waiting"))


async def draining(start_engine: Any) -> Any:
    engine = await start_engine()
    await engine.drain()
    return engine, ()


async def loading(make_engine: Any) -> Any:
    return make_engine(), ()


STATES = {"queue_full": full, "draining": draining, "unavailable": loading}
REFUSALS = {
    json.loads(exchange.body)["error"]["code"]: exchange
    for block in BLOCKS
    if block.language == "http" and block.stands_alone
    for exchange in [Exchange.parse(block.text)]
}


def test_every_refusal_is_provoked() -> None:
    assert REFUSALS.keys() == STATES.keys()


@pytest.mark.parametrize("code", STATES)
async def test_refusals(start_engine: Any, make_engine: Any, code: str) -> None:
    make = make_engine if code == "unavailable" else start_engine
    engine, streams = await STATES[code](make)
    config = ServerConfig(port=0)
    async with (
        run_server(create_app(engine, config), config) as server,
        aiohttp.ClientSession(server.url) as session,
        session.post("/v1/completions", json={"prompt": "x"}) as response,
    ):
        body = await response.text()
    for stream in streams:
        await stream.aclose()
    status_line = f"HTTP/1.1 {response.status} {response.reason}"
    headers = {name.lower(): value for name, value in response.headers.items()}
    assert_equal_but_for_numbers(Exchange(status_line, headers, body), REFUSALS[code])
