"""ServerConfig: every setting of the HTTP front, documented where it is declared.

Settings of the engine behind it are in `deepinfer/config.py`.
"""

from __future__ import annotations

import msgspec

from deepinfer.errors import ConfigError

MEBIBYTE = 1024 * 1024


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the HTTP front is built from. `validate()` raises `ConfigError` naming the field."""

    # --- where it listens ---
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    uds: str = ""  # path of a Unix socket; listens there instead of on host and port
    tls_cert_file: str = ""  # PEM; with the key: HTTPS
    tls_key_file: str = ""

    # --- who may ask ---
    api_keys: tuple[str, ...] = ()  # empty: nobody needs a key
    cors_origins: tuple[str, ...] = ()  # origins of web pages that may call; "*": all; empty: none
    model_aliases: tuple[str, ...] = ()  # names accepted beside the engine's own

    # --- limits ---
    max_body_bytes: int = 16 * MEBIBYTE
    max_n: int = 64  # answers to one prompt
    max_prompts: int = 1024  # prompts, times n, in one completions request
    request_timeout_s: float = 0.0  # deadline of every request, from arrival; 0: only its own
    body_timeout_s: float = 60.0  # how long a client may take to send its body
    shutdown_timeout_s: float = 60.0  # how long answers under way may take when the server stops

    # --- behaviour ---
    keepalive_interval_s: float = 15.0  # silence after which a stream gets a comment
    encode_in_thread_characters: int = 4096  # longer texts are tokenised beside the event loop

    def validate(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must lie in [0, 65535].", "port")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            missing = "tls_key_file" if self.tls_cert_file else "tls_cert_file"
            raise ConfigError(
                f"{missing} is empty; TLS needs a certificate and its key, both as PEM files.",
                missing,
            )
        if any(not key for key in self.api_keys):
            raise ConfigError("An API key is empty; leave it out or give it a value.", "api_keys")
        for name in ("max_body_bytes", "max_n", "max_prompts", "encode_in_thread_characters"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.", name)
        for name in ("body_timeout_s", "keepalive_interval_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive.", name)
        for name in ("request_timeout_s", "shutdown_timeout_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must not be negative.", name
                )
