"""Records the token ids that other implementations give for `hard_strings.HARD_STRINGS`.

    python record_token_ids.py transformers MODEL.gguf     (tens of seconds)
    python record_token_ids.py cyllama MODEL.gguf          (llama.cpp, in an environment of its own)

Each run replaces its own entry of smollm2_token_ids.json. `special` are the ids with special
tokens parsed, `plain` those with special tokens taken as ordinary text.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path

from hard_strings import HARD_STRINGS

Encode = Callable[[str, bool], list[int]]  # (text, parse special tokens) -> ids


def transformers_encode(path: Path) -> Encode:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)

    def encode(text: str, parse_special: bool) -> list[int]:
        tokenizer.backend_tokenizer.encode_special_tokens = not parse_special
        return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    return encode


def cyllama_encode(path: Path) -> Encode:
    from cyllama.llama.llama_cpp import LlamaModel, LlamaModelParams

    model = LlamaModel(str(path), LlamaModelParams())

    def encode(text: str, parse_special: bool) -> list[int]:
        # The vocabulary points into the model: asking anew keeps the model alive.
        return list(model.get_vocab().tokenize(text, False, parse_special))

    return encode


def main() -> None:
    library, path = sys.argv[1], Path(sys.argv[2])
    encode = {"transformers": transformers_encode, "cyllama": cyllama_encode}[library](path)
    record = Path(__file__).with_name("smollm2_token_ids.json")
    stored = json.loads(record.read_text()) if record.exists() else {"oracles": {}}
    stored["texts"] = list(HARD_STRINGS)
    stored["oracles"][library] = {
        "version": importlib.metadata.version(library),
        "special": [encode(text, True) for text in HARD_STRINGS],
        "plain": [encode(text, False) for text in HARD_STRINGS],
    }
    record.write_text(json.dumps(stored, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
