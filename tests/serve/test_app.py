"""What holds for all routes: keys, origins, sizes, ids, sockets, and how a server ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deepinfer.errors import ConfigError
from deepinfer.serve.app import ServerConfig, create_app, run_server

OPEN = ["/", "/health", "/ready", "/version", "/metrics", "/openapi.json"]


async def test_key_policy(serve: Any) -> None:
    async with serve(api_keys=("first", "second")) as front:
        for path in OPEN:
            assert (await front.get(path)).status == 200, path
        for path in ("/v1/models", "/nowhere"):
            assert (await front.get(path)).status == 401
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            assert (await front.post(path, {})).status == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer first"}, 200),
        ({"Authorization": "bearer second"}, 200),
        ({"x-api-key": "second"}, 200),
        ({"Authorization": "Bearer firs"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Basic first"}, 401),
        ({"Authorization": "Bearer f\u00efrst"}, 401),
        ({"x-api-key": ""}, 401),
    ],
)
async def test_keys(serve: Any, headers: dict[str, str], status: int) -> None:
    async with serve(api_keys=("first", "second")) as front:
        reply = await front.get("/v1/models", headers=headers)
        assert reply.status == status
        if status == 401:
            assert reply.error["code"] == "invalid_api_key"
            assert reply.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("abc-123", True),
        ("a/b+c=d:e@f.g_h", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("has space", False),
        ("-leading", False),
        ('quote"', False),
        ("", False),
    ],
)
async def test_request_id(front: Any, given: str, is_kept: bool) -> None:
    reply = await front.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": given})
    returned = reply.headers["x-request-id"]
    assert (returned == given) == is_kept
    assert returned
    assert reply.json["id"] == f"cmpl-{returned}"
    assert front.engine.calls[0]["request_id"].startswith(returned)


async def test_the_same_request_id_twice_gives_the_engine_two(front: Any) -> None:
    for _ in range(2):
        await front.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": "same"})
    first, second = (call["request_id"] for call in front.engine.calls)
    assert first != second


async def test_log_lines_carry_the_id(front: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="deepinfer.serve"):
        reply = await front.chat()
        await front.get("/health")
    chat, health = [record for record in caplog.records if record.name == "deepinfer.serve"]
    assert chat.request_id == reply.headers["x-request-id"]  # type: ignore[attr-defined]
    assert "POST /v1/chat/completions 200" in chat.getMessage()
    assert (chat.levelno, health.levelno) == (logging.INFO, logging.DEBUG)


async def test_internal_errors_are_logged_with_trace_and_id(
    front: Any, caplog: pytest.LogCaptureFixture
) -> None:
    front.engine.refusal = ZeroDivisionError("secret")
    reply = await front.chat()
    record = next(record for record in caplog.records if record.levelno == logging.ERROR)
    assert record.exc_info is not None
    assert record.request_id == reply.headers["x-request-id"]  # type: ignore[attr-defined]
    assert reply.headers["x-request-id"] in reply.error["message"]


async def test_body_limit(serve: Any) -> None:
    async with serve(max_body_bytes=1000) as front:
        assert (await front.complete("x" * 400)).status == 200
        reply = await front.complete("x" * 2000)
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")
        assert "1000" in reply.error["message"]

        async def pieces() -> Any:
            for _ in range(30):
                yield b"x" * 100

        headers = {"Content-Type": "application/json"}
        reply = await front.call("POST", "/v1/completions", data=pieces(), headers=headers)
        assert reply.status == 413


async def test_body_that_never_comes(serve: Any) -> None:
    async with serve(body_timeout_s=0.01) as front:
        reader, writer = await front.open_socket()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 50\r\n\r\n{"
        )
        assert b" 408 " in await reader.readline()
        writer.close()


@pytest.mark.parametrize(
    "rest",
    [
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcdefgh\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc",
        b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
        b"Content-Encoding: deflate\r\nContent-Length: 4\r\n\r\nabcd",
        b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}{",
        b"Content-Length: -1\r\n\r\n{}",
    ],
)
async def test_broken_transfer_is_the_clients_mistake(front: Any, rest: bytes) -> None:
    reader, writer = await front.open_socket()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(head + rest)
    assert b" 400 " in await reader.readline()
    writer.close()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"secret" * 4000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\x1b[31m HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
async def test_a_peer_that_breaks_the_protocol_cannot_fill_the_log(
    front: Any, caplog: pytest.LogCaptureFixture, nonsense: bytes
) -> None:
    with caplog.at_level(logging.INFO):
        reader, writer = await front.open_socket()
        writer.write(nonsense)
        assert b" 400 " in await reader.readline()
        await reader.read()
        writer.close()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("deepinfer.serve", logging.INFO)
    assert record.exc_info is None
    assert "\n" not in record.getMessage()
    assert "secret" not in record.getMessage()


@pytest.mark.parametrize(
    ("declared", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("application/vnd.x+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
    ],
)
async def test_declared_type(front: Any, declared: str, status: int) -> None:
    headers = {"Content-Type": declared}
    reply = await front.call("POST", "/v1/completions", data=b'{"prompt": "x"}', headers=headers)
    assert reply.status == status


async def test_unknown_paths_and_methods(front: Any) -> None:
    reply = await front.get("/nowhere")
    assert (reply.status, reply.error["code"]) == (404, "not_found")
    reply = await front.get("/v1/completions")
    assert (reply.status, reply.headers["Allow"]) == (405, "POST")
    assert reply.error["type"] == "invalid_request_error"


async def test_probes_may_use_head(front: Any) -> None:
    reply = await front.call("HEAD", "/ready")
    assert (reply.status, reply.text) == (200, "")


PREFLIGHT = {
    "Origin": "https://page.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


async def test_no_origins_unless_asked(front: Any) -> None:
    reply = await front.get("/health", headers={"Origin": "https://page.example"})
    assert "Access-Control-Allow-Origin" not in reply.headers
    assert (await front.call("OPTIONS", "/v1/completions", headers=PREFLIGHT)).status == 405


@pytest.mark.parametrize("origins", [("https://page.example",), ("*",)])
async def test_allowed_origins(serve: Any, origins: tuple[str, ...]) -> None:
    async with serve(cors_origins=origins, api_keys=("k",)) as front:
        reply = await front.call("OPTIONS", "/v1/completions", headers=PREFLIGHT)
        assert reply.status == 204
        assert reply.headers["Access-Control-Allow-Origin"] == "https://page.example"
        assert "authorization" in reply.headers["Access-Control-Allow-Headers"]
        headers = {"Origin": "https://page.example"}
        refused = await front.post("/v1/completions", {"prompt": "x"}, headers=headers)
        assert refused.status == 401
        assert refused.headers["Access-Control-Allow-Origin"] == "https://page.example"
        headers["Authorization"] = "Bearer k"
        body = {"prompt": "x", "stream": True}
        streamed = await front.post("/v1/completions", body, headers=headers)
        assert streamed.headers["Access-Control-Allow-Origin"] == "https://page.example"
        assert "x-request-id" in streamed.headers["Access-Control-Expose-Headers"]


async def test_other_origins(serve: Any) -> None:
    async with serve(cors_origins=("https://page.example",)) as front:
        headers = PREFLIGHT | {"Origin": "https://evil.example"}
        reply = await front.call("OPTIONS", "/v1/completions", headers=headers)
        assert reply.status == 405
        assert "Access-Control-Allow-Origin" not in reply.headers


async def test_unix_socket(serve: Any, tmp_path: Path) -> None:
    path = tmp_path / "front.sock"
    async with serve(uds=str(path)) as front:
        assert front.server.uds == str(path)
        assert (await front.chat()).status == 200
    assert not path.exists()


async def test_unix_socket_that_cannot_be(engine: Any, tmp_path: Path) -> None:
    config = ServerConfig(uds=str(tmp_path / "nowhere" / "front.sock"))
    with pytest.raises(ConfigError, match=r"front\.sock: No such file"):
        async with run_server(create_app(engine, config), config):
            pass


@pytest.fixture
def tls_files(tmp_path: Path) -> tuple[str, str]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-keyout", key, "-out", cert, "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return str(cert), str(key)


async def test_tls(serve: Any, tls_files: tuple[str, str]) -> None:
    cert, key = tls_files
    async with serve(tls_cert_file=cert, tls_key_file=key) as front:
        assert front.server.url.startswith("https://")
        reply = await front.chat(stream=True)
        assert reply.events[-1] == "[DONE]"


async def test_tls_files_that_are_none(engine: Any, tmp_path: Path) -> None:
    path = tmp_path / "none.pem"
    config = ServerConfig(tls_cert_file=str(path), tls_key_file=str(path), port=0)
    with pytest.raises(ConfigError, match=r"none\.pem"):
        async with run_server(create_app(engine, config), config):
            pass


async def test_port_in_use(front: Any, engine: Any) -> None:
    config = ServerConfig(port=front.server.port)
    with pytest.raises(ConfigError, match=str(front.server.port)):
        async with run_server(create_app(engine, config), config):
            pass


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"port": 70000}, "port"),
        ({"tls_cert_file": "x"}, "tls_key_file"),
        ({"tls_key_file": "x"}, "tls_cert_file"),
        ({"api_keys": ("",)}, "api_keys"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"max_n": 0}, "max_n"),
        ({"keepalive_interval_s": 0.0}, "keepalive_interval_s"),
        ({"body_timeout_s": float("nan")}, "body_timeout_s"),
        ({"request_timeout_s": -1.0}, "request_timeout_s"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**settings).validate()
    assert caught.value.field == field


async def test_leaving_the_server_lets_answers_finish(serve: Any, engine: Any) -> None:
    engine.gate.hold()
    async with asyncio.TaskGroup() as group, serve() as front:
        reader, writer = await front.open_socket()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 31\r\n\r\n{"prompt": "x", "stream": true}'
        )
        await engine.gate.waiting.wait()

        async def finish_once_closed() -> bytes:
            with contextlib.suppress(OSError):  # refused: the server no longer accepts
                while True:
                    _, probe = await front.open_socket()
                    probe.close()
            engine.gate.let(100)
            return await reader.read()

        answer = group.create_task(finish_once_closed())
    assert b"[DONE]" in answer.result()
    assert not engine.streams[0].was_cancelled
    writer.close()
