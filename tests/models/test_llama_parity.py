"""Every member of the dense family gives transformers' numbers through our paged, chunked path."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from deepinfer.models import build  # noqa: E402

SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
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
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "llama rope linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "llama rope llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama rope yarn": ("Llama", {"rope_parameters": YARN}),
    "llama rope yarn deepseek": (
        "Llama",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1, "beta_fast": 16}},
    ),
    "mistral window": ("Mistral", {"sliding_window": 8}),
    "mistral full": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": ("Qwen2", QWEN_WINDOW),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3 bias and window": ("Qwen3", {"head_dim": 32, "attention_bias": True, **QWEN_WINDOW}),
}


def reference_model(case: str, seed: int = 5) -> Any:
    """A random checkpoint whose every parameter matters: norms and biases are random too."""
    family, options = CASES[case]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model


def ours(reference: Any, options: Any) -> Any:
    """The same weights in our model, by way of the configuration's usual spelling."""
    config = reference.config.to_dict()
    rope = config.pop("rope_parameters", None)
    if rope:
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return build(config, reference.state_dict(), options)


def prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 199, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, paging: Any) -> None:
    reference = reference_model(case)
    driver = paging.Driver(ours(reference, paging.Options()))
    texts = prompts(1, (61, 33, 1, 18))
    computed = driver.finish([paging.sequence(text) for text in texts])
    for text, logits in zip(texts, computed, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([text])).logits[0]
        scale = expected.abs().max()
        assert (logits - expected).abs().max() <= 1e-4 * scale


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_transformers(case: str, paging: Any) -> None:
    """64 tokens each: sequences of different lengths decode together, some late ones prefill."""
    reference = reference_model(case)
    driver = paging.Driver(ours(reference, paging.Options()), seed=3)
    texts = prompts(2, (30, 11, 5))
    sequences = [paging.sequence(text) for text in texts]
    wanted = [len(text) + 64 for text in texts]
    while True:
        rows = [
            (s, min(len(s.token_ids) - s.computed, 4))
            for s, total in zip(sequences, wanted, strict=True)
            if len(s.token_ids) < total
        ]
        if not rows:
            break
        for (sequence, _), logits in zip(rows, driver.step(rows), strict=True):
            if sequence.computed == len(sequence.token_ids):
                sequence.token_ids.append(int(logits[-1].argmax()))
    for text, sequence in zip(texts, sequences, strict=True):
        with torch.no_grad():
            expected = reference.generate(
                torch.tensor([text]),
                attention_mask=torch.ones(1, len(text), dtype=torch.int64),
                max_new_tokens=64,
                do_sample=False,
            )[0].tolist()
        assert sequence.token_ids == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", ["llama tied", "qwen2"])
def test_narrow_weights_stay_close_to_float32(case: str, dtype: str, paging: Any) -> None:
    reference = reference_model(case)
    text = prompts(3, (40,))[0]
    exact, narrow = (
        paging.Driver(ours(reference, paging.Options(dtype=kind))).finish([paging.sequence(text)])[
            0
        ]
        for kind in ("float32", dtype)
    )
    error = (narrow - exact).norm() / exact.norm()
    assert 0 < error < {"float16": 2e-3, "bfloat16": 2e-2}[dtype]
