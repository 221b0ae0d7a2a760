"""Checkpoints as users have them, on disk, served by a whole Engine: transformers is the oracle.

Each family is saved by transformers, random and tiny, with a tokenizer that the `tokenizers`
library trained: as one file or in shards, in float32 or bfloat16. GGUF files of such models are
written by the `gguf` package. What transformers itself generates, greedily and one prompt at a
time, the engine must give in a batch, in chunks, from a warm cache and after preemption.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

import tokenizers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: E402

from deepinfer import Engine, EngineConfig, SamplingParams  # noqa: E402
from deepinfer.runtime.build import plan_device  # noqa: E402

CHECKOUT = Path(__file__).parents[1]
NUM_TOKENS = 48
BLOCK_TOKENS = 8
MAX_MODEL_LEN = 192
PROMPT_LENGTHS = (3, 90, 33, 17, 64)  # most far beyond the sliding window of 16, one of full blocks
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 16
BLOCK_BYTES = LAYERS * BLOCK_TOKENS * 2 * KV_HEADS * HEAD_DIM * 4

SPECIAL = ("<|start|>", "<|end|>", "<|turn|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn|>{{ message.role }}\n"
    "{{ message.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
SHAPE: dict[str, Any] = {
    "vocab_size": 352,  # padded beyond the tokenizer's 320
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Case:
    """A model to save, and how."""

    family: str
    options: dict[str, Any]
    dtype: torch.dtype = torch.float32
    shard_size: str = "1GB"


CASES = {
    "llama": Case("Llama", {}, shard_size="60KB"),
    "llama-tied-llama3": Case(
        "Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}, torch.bfloat16
    ),
    "llama-yarn": Case("Llama", {"rope_parameters": YARN}, torch.bfloat16, "60KB"),
    "mistral": Case("Mistral", {"sliding_window": 16}, shard_size="60KB"),
    "qwen2": Case("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": Case("Qwen3", {}, torch.bfloat16),
}


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk, and what transformers makes of it."""

    path: Path
    prompts: list[list[int]]
    expected: list[list[int]]  # what follows each prompt


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte-level BPE, trained on this file, as transformers wraps it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    backend.train([__file__], trainer)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|start|>", eos_token="<|end|>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def random_model(case: Case) -> Any:
    """Every parameter matters: norms and biases are random too."""
    config = getattr(transformers, f"{case.family}Config")(**{**SHAPE, **case.options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, f"{case.family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model


def random_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 320, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def continuation(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """transformers' own greedy answer."""
    options = {"max_new_tokens": NUM_TOKENS, "eos_token_id": None, **options}
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            pad_token_id=0,
            **options,
        )[0].tolist()
    return list(ids[len(prompt) :])


def oracle(path: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(
            str(path), dtype=torch.float32, **options
        ).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Callable[[str], Saved]:
    """saved(name of a case): made when first asked for."""
    made: dict[str, Saved] = {}

    def make(name: str) -> Saved:
        path = tmp_path_factory.mktemp("checkpoints") / name
        case = CASES[name]
        random_model(case).to(case.dtype).save_pretrained(path, max_shard_size=case.shard_size)
        jinja_file = name != "qwen2"  # which keeps its template in tokenizer_config.json
        tokenizer.save_pretrained(path, save_jinja_files=jinja_file)
        prompts = random_prompts()
        model = oracle(path)
        return Saved(path, prompts, [continuation(model, prompt) for prompt in prompts])

    def get(name: str) -> Saved:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return get


def settings(path: Path, **overrides: Any) -> EngineConfig:
    sizes = {
        "dtype": "float32",
        "block_tokens": BLOCK_TOKENS,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "num_threads": 1,
    }
    return EngineConfig(**{"model": str(path), **sizes, **overrides})


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    text: str
    cached_tokens: int
    preemptions: int


async def answer(engine: Engine, prompt: Any, **overrides: Any) -> Answer:
    params = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **overrides}
    token_ids: list[int] = []
    text = ""
    async with engine.generate(prompt, SamplingParams(**params)) as stream:
        async for delta in stream:
            token_ids += delta.token_ids
            text += delta.text
    assert delta.usage is not None
    assert delta.timeline is not None
    return Answer(token_ids, text, delta.usage.cached_tokens, delta.timeline.preemptions)


async def answers(engine: Engine, prompts: Sequence[Any]) -> list[Answer]:
    """Of all prompts in one batch; afterwards the engine's books must balance."""
    given = await asyncio.gather(*(answer(engine, prompt) for prompt in prompts))
    engine.check()
    assert engine.stats().num_blocks_held == 0
    return given


# --- Hugging Face directories ---

# A step's most tokens and its most prefill; the prompts have up to 90 tokens, blocks have 8.
CHUNKS = {
    "chunks of 5": {
        "max_num_batched_tokens": 13,
        "max_prefill_tokens_beside_decode": 5,
        "min_prefill_tokens": 5,
    },
    "chunks of 16": {
        "max_num_batched_tokens": 24,
        "max_prefill_tokens_beside_decode": 16,
        "min_prefill_tokens": 16,
    },
    "chunks of 64": {"max_num_batched_tokens": 72, "max_prefill_tokens_beside_decode": 64},
}
FEW_BLOCKS = {"kv_cache_memory_bytes": 25 * BLOCK_BYTES}  # the five answers need 49 in the end
FULL_BLOCKS = [  # of each prompt, before its last token
    (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS for length in PROMPT_LENGTHS
]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("name", CASES)
async def test_greedy_answers_are_those_of_transformers(
    name: str, overlap: bool, saved: Callable[[str], Saved]
) -> None:
    """In one batch: cold, then warm; in chunks; with so few blocks that some must give way."""
    checkpoint = saved(name)
    for settings_name, changes in {"": {}, **CHUNKS, "few blocks": FEW_BLOCKS}.items():
        async with Engine(settings(checkpoint.path, overlap=overlap, **changes)) as engine:
            for turn in ("cold", "warm"):
                given = await answers(engine, checkpoint.prompts)
                context = f"{settings_name} {turn}"
                assert [a.token_ids for a in given] == checkpoint.expected, context
                preemptions = sum(a.preemptions for a in given)
                if settings_name == "few blocks":
                    assert preemptions > 0, context
                else:
                    assert preemptions == 0, context
                    wanted = FULL_BLOCKS if turn == "warm" else [0] * len(FULL_BLOCKS)
                    assert [a.cached_tokens for a in given] == wanted, context


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
async def test_batch_invariant_answers_are_the_same_bits_in_any_company(
    name: str, saved: Callable[[str], Saved]
) -> None:
    """Sampled, so that a single different bit soon shows, and the log-probabilities themselves."""
    checkpoint = saved(name)

    async def run(prompts: list[list[int]], **changes: Any) -> list[Any]:
        async def one(engine: Engine, prompt: list[int]) -> Any:
            params = SamplingParams(seed=7, max_tokens=24, ignore_eos=True, logprobs=2)
            async with engine.generate(prompt, params) as stream:
                return [entry async for delta in stream for entry in delta.logprobs or ()]

        async with Engine(settings(checkpoint.path, batch_invariant=True, **changes)) as engine:
            return await asyncio.gather(*(one(engine, prompt) for prompt in prompts))

    alone = [(await run([prompt]))[0] for prompt in checkpoint.prompts]
    assert [len(entries) for entries in alone] == [24] * len(alone)
    assert await run(checkpoint.prompts) == alone
    assert await run(checkpoint.prompts[::-1], **CHUNKS["chunks of 5"]) == alone[::-1]
    assert await run(checkpoint.prompts, **FEW_BLOCKS, overlap=False) == alone


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # template in a file, and in the JSON
async def test_text_goes_in_and_out_as_with_transformers(
    name: str, saved: Callable[[str], Saved], tokenizer: Any
) -> None:
    checkpoint = saved(name)
    messages = [
        {"role": "user", "content": "  Wie heißt das?\n"},
        {"role": "assistant", "content": "def f(x):\n    return 12345  # 数字 🙂"},
        {"role": "user", "content": "and <b>then</b>?"},
    ]
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint.path)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    async with Engine(settings(checkpoint.path)) as engine:
        assert engine.chat_template is not None
        assert engine.tokenizer.encode_rendered(engine.chat_template.render(messages)) == ids
        given = await answer(engine, "return CHECKOUT / path")
        prompt = theirs("return CHECKOUT / path")["input_ids"]
        assert given.token_ids == continuation(oracle(checkpoint.path), prompt)
        assert given.text == theirs.decode(given.token_ids, skip_special_tokens=True)


async def test_generation_config_says_where_answers_end_and_how_they_are_sampled(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    """Any of its end ids ends an answer, where transformers' own generate ends it."""
    original = saved("llama-tied-llama3")
    path = tmp_path / "copy"
    shutil.copytree(original.path, path)
    prompt, expected = original.prompts[1], original.expected[1]
    end = expected[20]
    stored = {"eos_token_id": [1, end], "do_sample": True, "temperature": 0.6, "top_k": 9}
    (path / "generation_config.json").write_text(json.dumps(stored))
    until_end = continuation(oracle(path), prompt, eos_token_id=stored["eos_token_id"])
    assert until_end == expected[: expected.index(end) + 1]
    async with Engine(settings(path)) as engine:
        assert engine.default_params() == SamplingParams(temperature=0.6, top_k=9)
        given = await answer(engine, prompt, ignore_eos=False)
    assert given.token_ids == until_end


# --- GGUF files ---


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp's order of the rows of Llama's q and k: rotary pairs side by side."""
    rows, width = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, width)
    return halves.swapaxes(1, 2).reshape(rows, width)


def write_gguf(path: Path, model: Any, tokenizer: Any) -> None:
    """Writes the model with a mix of quantisations, and rounds its own weights as it does so."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    add_vocabulary(writer, tokenizer, config.vocab_size)
    kind = gguf.MODEL_ARCH[config.model_type.upper()]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    formats = [gguf.GGMLQuantizationType[f] for f in ("Q8_0", "Q5_1", "Q4_0", "F16", "Q4_1")]
    with torch.no_grad():
        for number, (name, weight) in enumerate(model.named_parameters()):
            stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if weight.ndim == 1:
                writer.add_tensor(stored_name, weight.numpy())
                continue
            form = formats[number % len(formats)]
            packed = gguf.quants.quantize(weight.numpy(), form)
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(packed, form)))
            moved = weight
            part = name.split(".")[-2]
            if config.model_type == "llama" and part in heads:
                moved = interleaved(weight, heads[part])
            packed = gguf.quants.quantize(moved.numpy(), form)
            writer.add_tensor(stored_name, packed, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: Any, tokenizer: Any, vocab_size: int) -> None:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    padding = [f"[PAD{n}]" for n in range(len(tokens), vocab_size)]
    kinds = [gguf.TokenType.CONTROL if t in SPECIAL else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + padding)
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * len(padding))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
async def test_quantised_gguf_files_answer_as_transformers_does_with_their_weights(
    name: str, tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / f"tiny-{name}.Q4_1.gguf"
    model = random_model(CASES[name])
    write_gguf(path, model, tokenizer)
    prompts = random_prompts()
    expected = [continuation(model, prompt) for prompt in prompts]
    async with Engine(settings(path, **CHUNKS["chunks of 16"])) as engine:
        assert engine.model_name == f"tiny-{name}"
        for _ in range(2):
            given = await answers(engine, prompts)
            assert [a.token_ids for a in given] == expected
        text = "def f(x): <|end|>\n  return 'naïve' 1234"
        assert engine.tokenizer.encode(text) == tokenizer(text)["input_ids"]
        assert engine.chat_template is not None


# --- without weights, without memory, without luck ---


async def test_a_lone_config_json_is_served_with_dummy_weights(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    shutil.copy(saved("qwen3").path / "config.json", tmp_path)
    config = settings(tmp_path, load_format="dummy")
    async with Engine(config) as engine:
        given = await answer(engine, "Grüße", temperature=1.0, seed=1, max_tokens=40)
        assert len(given.token_ids) == 40
        assert given.text
        assert engine.tokenizer.decode(engine.tokenizer.encode("Grüße")) == "Grüße"
    async with Engine(config) as engine:
        again = await answer(engine, "Grüße", temperature=1.0, seed=1, max_tokens=40)
    assert again.token_ids == given.token_ids


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("dtype", ["auto", "float16"])
async def test_the_plan_is_what_the_engine_does(
    name: str, dtype: str, saved: Callable[[str], Saved]
) -> None:
    config = settings(saved(name).path, dtype=dtype, kv_cache_memory_bytes=100 * BLOCK_BYTES)
    plan = plan_device(config)
    async with Engine(config) as engine:
        lines = engine.explain()
        assert engine.max_model_len == plan.memory.max_model_len
        assert engine.stats().num_blocks == plan.memory.num_blocks - 1 == 99
    # The first reason and the room name the free memory, which is never twice the same.
    for reason in plan.memory.reasons:
        if "free" not in reason and "room" not in reason:
            assert reason in lines
    weights = next(reason for reason in plan.memory.reasons if reason.startswith("weights"))
    assert any(line.startswith(weights.split(", workspace")[0]) for line in lines)


def test_the_plan_makes_room_for_either_dtype_that_a_measurement_may_choose(
    saved: Callable[[str], Saved],
) -> None:
    def weights_bytes(**changes: Any) -> int:
        return plan_device(settings(saved("llama").path, **changes)).memory.weights_bytes

    float32, float16 = weights_bytes(dtype="float32"), weights_bytes(dtype="float16")
    assert float32 < float16  # of layers as narrow as these, packing makes more
    assert weights_bytes(dtype="auto") == float16
    assert weights_bytes(dtype="auto", batch_invariant=True) == float32


def without_a_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def truncated(path: Path) -> None:
    os.truncate(path / "model.safetensors", 200_000)


def configured(**changes: Any) -> Callable[[Path], None]:
    """`None` removes a setting."""

    def change(path: Path) -> None:
        stored = json.loads((path / "config.json").read_text()) | changes
        kept = {key: value for key, value in stored.items() if value is not None}
        (path / "config.json").write_text(json.dumps(kept))

    return change


def sampled_badly(path: Path) -> None:
    (path / "generation_config.json").write_text('{"temperature": "hot"}')


DAMAGES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "tensor missing": (without_a_tensor, ("model.layers.1.mlp.up_proj.weight", "is missing")),
    "wrong shape": (configured(intermediate_size=128), ("[96, 64] and should be [128, 64]",)),
    "truncated": (truncated, ("model.safetensors (200,000 bytes)", "damaged")),
    "architecture": (configured(model_type="mamba"), ("'mamba'", "qwen3")),
    "setting missing": (configured(max_position_embeddings=None), ("max_position_embeddings",)),
    "rope": (
        configured(rope_parameters={"rope_type": "llama3", "factor": 4.0, "rope_theta": 1e4}),
        ("llama3", "low_freq_factor"),
    ),
    "sampling": (sampled_badly, ("temperature", "'hot'")),
}


def run_generate(model: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deepinfer", "generate", "--model", str(model), "Hello"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def one_message(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 2, run.stderr
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line.startswith("deepinfer generate: ")
    return line


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_ends_the_command_with_one_message(
    damage: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(saved("qwen2").path, path)
    break_it, told = DAMAGES[damage]
    break_it(path)
    message = one_message(run_generate(path))
    for words in told:
        assert words in message


def test_an_id_of_the_hub_is_not_downloaded() -> None:
    message = one_message(run_generate("nobody/nothing-7b"))
    assert "hf download nobody/nothing-7b" in message
