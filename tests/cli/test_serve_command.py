"""`deepinfer serve`: what it says, and its life as a real process."""

from __future__ import annotations

import pytest

from deepinfer.cli.serve import curl_line
from deepinfer.serve.settings import ServerConfig


@pytest.mark.parametrize(
    ("config", "chat", "parts"),
    [
        (ServerConfig(), True, ["/v1/chat/completions", '"messages"']),
        (ServerConfig(), False, ["/v1/completions", '"prompt"']),
        (ServerConfig(uds="/tmp/a b"), True, ["--unix-socket '/tmp/a b' http://localhost/v1/"]),
        (ServerConfig(tls_cert_file="c", tls_key_file="k"), True, ["curl -s -k "]),
        (ServerConfig(api_keys=("hidden",)), True, ["Bearer $DEEPINFER_API_KEY"]),
    ],
)
def test_the_curl_line_fits_the_server(config: ServerConfig, chat: bool, parts: list[str]) -> None:
    line = curl_line("it's a model", config, "http://127.0.0.1:8000", chat=chat)
    for part in parts:
        assert part in line
    assert "hidden" not in line
    assert "\n" not in line
