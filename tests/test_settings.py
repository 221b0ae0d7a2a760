"""The settings are a decision: a new one changes this list, and whoever reviews it sees why."""

from __future__ import annotations

import msgspec
import pytest

from deepinfer.config import EngineConfig
from deepinfer.errors import ConfigError
from deepinfer.serve.settings import ServerConfig

ENGINE_FIELDS = """
    model served_model_name tokenizer chat_template load_format dtype seed
    device num_threads kv_cache_memory_bytes memory_utilization
    max_model_len max_num_seqs block_tokens max_num_batched_tokens
    max_prefill_tokens_beside_decode min_prefill_tokens
    max_waiting_requests max_waiting_tokens max_skips enable_prefix_caching
    overlap batch_invariant drain_timeout_s
"""

SERVER_FIELDS = """
    host port uds tls_cert_file tls_key_file
    api_keys cors_origins model_aliases
    max_body_bytes max_n max_prompts request_timeout_s body_timeout_s shutdown_timeout_s
    keepalive_interval_s encode_in_thread_characters
"""


@pytest.mark.parametrize(
    ("struct", "fields"), [(EngineConfig, ENGINE_FIELDS), (ServerConfig, SERVER_FIELDS)]
)
def test_the_field_list_is_frozen(struct: type[msgspec.Struct], fields: str) -> None:
    assert list(struct.__struct_fields__) == fields.split()
    assert len(struct.__struct_fields__) < 40
    assert struct.__struct_config__.frozen


def test_the_defaults_are_valid() -> None:
    EngineConfig().validate()
    ServerConfig().validate()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("block_tokens", 0),
        ("max_model_len", -1),
        ("num_threads", -1),
        ("memory_utilization", 0.0),
        ("memory_utilization", 1.5),
        ("max_num_batched_tokens", 8),
        ("drain_timeout_s", -1.0),
    ],
)
def test_a_wrong_engine_setting_is_named_with_its_value(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=str(value)) as caught:
        EngineConfig(**{field: value}).validate()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"port": 70000}, "port"),
        ({"tls_cert_file": "cert.pem"}, "tls_key_file"),
        ({"api_keys": ("",)}, "api_keys"),
        ({"max_n": 0}, "max_n"),
    ],
)
def test_a_wrong_server_setting_is_named(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**settings).validate()  # type: ignore[arg-type]
    assert caught.value.field == field
