"""Answers a batch of questions and prints them, with a progress bar on the way.

    .venv/bin/python examples/offline_inference.py
    .venv/bin/python examples/offline_inference.py --model /models/Qwen3-0.6B --max-tokens 200

`LLM` brings its own event loop, so this is all a script needs. The prompts share the engine's
batch: 32 of them take a fraction of the time that one after another would.
"""

from __future__ import annotations

import argparse

from deepinfer import LLM, SamplingParams

TOPICS = ("the moon", "a lighthouse", "bread", "an old bicycle", "snow", "a library", "tea", "rain")
FORMS = ("Write one sentence about {}.", "Name three things that go with {}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="", help="default: the embedded model")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()

    questions = [form.format(topic) for form in FORMS for topic in TOPICS]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens)

    with LLM(arguments.model) as llm:
        completions = llm.chat(conversations, params)

    for question, completion in zip(questions, completions, strict=True):
        print(f"{question}\n    {completion.text.strip()}\n")
    total = sum(completion.usage.completion_tokens for completion in completions)
    slowest_s = max(completion.timeline.total_s for completion in completions)
    print(f"{len(completions)} answers, {total} tokens, the last one after {slowest_s:.1f} s.")


if __name__ == "__main__":
    main()
