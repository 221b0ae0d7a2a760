"""The table that ties flags to settings."""

from __future__ import annotations

import msgspec
import pytest

from deepinfer.cli import flags, generate, serve
from deepinfer.config import EngineConfig
from deepinfer.errors import ConfigError
from deepinfer.serve.settings import ServerConfig
from deepinfer.types import SamplingParams

# Fields of SamplingParams that a single prompt in a terminal does without.
NOT_IN_THE_TERMINAL = {
    "seed",  # --seed is the engine's, and seeds what brings none
    "stop_token_ids",
    "include_stop",
    "skip_special_tokens",
    "logprobs",
}


def engine_config(*arguments: str) -> EngineConfig:
    return flags.engine_config(serve.parser().parse_args(arguments))


@pytest.mark.parametrize("struct", [EngineConfig, ServerConfig])
def test_every_setting_has_a_flag(struct: type[msgspec.Struct]) -> None:
    table = flags.ENGINE_FLAGS if struct is EngineConfig else flags.SERVER_FLAGS
    assert sorted(flag.field for flag in table) == sorted(struct.__struct_fields__)


def test_sampling_parameters_have_flags_except_the_programmatic_ones() -> None:
    fields = {flag.field for flag in flags.SAMPLING_FLAGS}
    assert fields == set(SamplingParams.__struct_fields__) - NOT_IN_THE_TERMINAL


def test_flags_bear_the_names_that_users_of_other_engines_know() -> None:
    known = """
        --host --port --uds --model --served-model-name --tokenizer --chat-template --max-model-len
        --max-num-seqs --max-num-batched-tokens --block-size --dtype --device --load-format --seed
        --kv-cache-memory-bytes --gpu-memory-utilization --no-enable-prefix-caching --api-key
        --ssl-certfile --ssl-keyfile --allowed-origins
    """
    names = {
        name for flag in flags.ENGINE_FLAGS + flags.SERVER_FLAGS for name in flag.names.split()
    }
    assert names >= set(known.split())


def test_what_is_not_given_keeps_the_default_of_the_struct() -> None:
    assert engine_config() == EngineConfig()


def test_each_kind_of_flag_reaches_its_field() -> None:
    config = engine_config(
        *("--dtype", "float32", "--max-model-len", "512", "--memory-utilization", "0.5"),
        *("--no-overlap", "--no-enable-prefix-caching", "--batch-invariant"),
        *("--kv-cache-memory-bytes", "1.5G", "--seed", "7"),
    )
    assert config == EngineConfig(
        dtype="float32",
        max_model_len=512,
        memory_utilization=0.5,
        overlap=False,
        enable_prefix_caching=False,
        batch_invariant=True,
        kv_cache_memory_bytes=3 * 2**29,
        seed=7,
    )


@pytest.mark.parametrize(
    ("text", "count"), [("1000", 1000), ("2k", 2000), ("2K", 2048), ("3GiB", 3 * 2**30)]
)
def test_sizes_may_have_units(text: str, count: int) -> None:
    assert engine_config("--kv-cache-memory-bytes", text).kv_cache_memory_bytes == count


def test_a_flag_given_again_adds_to_its_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPINFER_API_KEY", raising=False)
    parsed = serve.parser().parse_args(["--api-key", "one", "--api-key", "two"])
    assert serve.server_config(parsed).api_keys == ("one", "two")


def test_the_api_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_API_KEY", "secret")
    assert serve.server_config(serve.parser().parse_args([])).api_keys == ("secret",)
    parsed = serve.parser().parse_args(["--api-key", "given"])
    assert serve.server_config(parsed).api_keys == ("given",)


def test_the_model_is_positional_or_a_flag_but_not_two() -> None:
    parse = serve.parser().parse_args
    assert flags.engine_config(parse(["--model", "a.gguf"])).model == "a.gguf"
    assert flags.engine_config(parse([]), model="a.gguf").model == "a.gguf"
    with pytest.raises(ConfigError, match=r"'b.gguf'.*'a.gguf'"):
        flags.engine_config(parse(["--model", "a.gguf"]), model="b.gguf")


def test_sampling_flags_go_over_what_the_checkpoint_recommends() -> None:
    parsed = generate.parser().parse_args(["Hi", "--top-p", "0.5", "--stop", "a", "--stop", "b"])
    recommended = SamplingParams(temperature=0.6, top_p=0.95)
    assert flags.sampling_params(parsed, recommended) == SamplingParams(
        temperature=0.6, top_p=0.5, stop=("a", "b")
    )
