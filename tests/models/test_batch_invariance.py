"""In batch-invariant mode a token's logits are the same bits in any company, order and chunking."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepinfer.models import build

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 100,  # no multiple of a vector register
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "use_sliding_window": True,
    "sliding_window": 40,
    "max_window_layers": 1,
}
WIDE: dict[str, Any] = {  # the embedded model's layer
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
}
LENGTHS = (71, 130, 1, 70, 33)


def random_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    width, hidden = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", width // heads)
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "lm_head.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
            "self_attn.q_proj": (heads * head_dim, width),
            "self_attn.k_proj": (kv_heads * head_dim, width),
            "self_attn.v_proj": (kv_heads * head_dim, width),
            "self_attn.o_proj": (width, heads * head_dim),
            "mlp.gate_proj": (hidden, width),
            "mlp.up_proj": (hidden, width),
            "mlp.down_proj": (width, hidden),
        }
        if config["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return {
        name: torch.randn(shape, generator=generator) * (0.06 if len(shape) > 1 else 1.0)
        for name, shape in shapes.items()
    }


@pytest.fixture(params=[1, 2], ids=lambda count: f"{count} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=["tiny float32", "wide float32", "wide float16"])
def model(request: pytest.FixtureRequest, paging: Any) -> Any:
    size, dtype = request.param.split()
    config = {"tiny": TINY, "wide": WIDE}[size]
    return build(config, random_tensors(config), paging.Options(dtype=dtype, batch_invariant=True))


def texts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def test_any_company_order_and_chunking_gives_the_same_bits(
    model: Any, paging: Any, threads: int
) -> None:
    """Whole and alone against random company, chunks of up to 60 tokens, other blocks."""
    ids = texts(model.vocab_size)
    alone = [
        paging.Driver(model, seed=9).step([(paging.sequence(text), len(text))])[0] for text in ids
    ]
    for seed, max_chunk in ((1, 60), (2, 9)):
        driver = paging.Driver(model, seed=seed)
        mixed = driver.finish([paging.sequence(text) for text in ids], max_chunk)
        assert all(torch.equal(a, b) for a, b in zip(alone, mixed, strict=True))


def test_decoding_gives_the_bits_of_prefill(model: Any, paging: Any) -> None:
    text = texts(model.vocab_size)[3]
    (whole,) = paging.Driver(model).step([(paging.sequence(text), len(text))])
    driver, sequence = paging.Driver(model, seed=5), paging.sequence(text)
    one_by_one = [driver.step([(sequence, 1)])[0] for _ in text]
    assert torch.equal(whole, torch.cat(one_by_one))


def test_rows_may_be_permuted(model: Any, paging: Any, threads: int) -> None:
    ids = texts(model.vocab_size)

    def step(order: list[int]) -> dict[int, torch.Tensor]:
        """Everything but two tokens first, then a step with single tokens and pairs."""
        driver = paging.Driver(model, seed=sum(order[:2]))
        sequences = {index: paging.sequence(ids[index]) for index in order}
        driver.step([(sequences[i], len(ids[i]) - 2) for i in order if len(ids[i]) > 2])
        rows = [(sequences[i], 2 if i == 1 else 1) for i in order]
        return dict(zip(order, driver.step(rows), strict=True))

    expected = step([0, 1, 2, 3, 4])
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3], [1, 3]):
        for index, logits in step(order).items():
            assert torch.equal(logits, expected[index])


def test_invariant_logits_are_close_to_the_default_ones(paging: Any) -> None:
    tensors = random_tensors(TINY)
    text = texts(TINY["vocab_size"])[1]
    fast, invariant = (
        paging.Driver(build(TINY, tensors, paging.Options(batch_invariant=mode))).step(
            [(paging.sequence(text), len(text))]
        )[0]
        for mode in (False, True)
    )
    torch.testing.assert_close(invariant, fast, rtol=1e-4, atol=1e-4)


def test_the_thread_count_is_restored(paging: Any) -> None:
    model = build(TINY, random_tensors(TINY), paging.Options(batch_invariant=True))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        paging.Driver(model).step([(paging.sequence([1, 2, 3]), 3)])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
