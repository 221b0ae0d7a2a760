"""What every protocol tells at the end of an answer: usage, timings, why it ended.

`Choice` gathers one stream's deltas. Times leave in milliseconds; the engine counts seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.serve.protocol import PromptTokensDetails, Timings, UsageInfo
from deepinfer.types import Delta, Timeline, TokenLogprob, Usage


class Choice:
    """One answer to one prompt. Choices of the same prompt share its tokens in the usage."""

    def __init__(self, index: int, *, is_first_of_prompt: bool = True) -> None:
        self.index = index
        self.is_first_of_prompt = is_first_of_prompt
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self.stop_match: str | int | None = None
        self.usage = Usage(0, 0)
        self.timeline = Timeline()

    def take(self, delta: Delta) -> None:
        """Keeps all of it, for an answer that is sent at once."""
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        self.take_end(delta)

    def take_end(self, delta: Delta) -> None:
        """Keeps only what comes with the last delta, for an answer that is streamed."""
        if delta.finish_reason is not None:
            self.finish_reason = str(delta.finish_reason)
            self.stop_match = delta.stop_match
            self.usage = delta.usage or self.usage
            self.timeline = delta.timeline or self.timeline

    @property
    def text(self) -> str:
        return "".join(self.texts)


def usage_info(choices: Sequence[Choice]) -> UsageInfo:
    """A prompt counts once, however many answers it got."""
    prompts = [choice.usage for choice in choices if choice.is_first_of_prompt]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(choice.usage.completion_tokens for choice in choices)
    return UsageInfo(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(usage.cached_tokens for usage in prompts)),
    )


def slowest(choices: Sequence[Choice]) -> Timeline:
    return max((choice.timeline for choice in choices), key=lambda timeline: timeline.total_s)


def timings(timeline: Timeline) -> Timings:
    return Timings(
        queued_ms=_ms(timeline.queued_s),
        prefill_ms=_ms(timeline.prefill_s),
        decode_ms=_ms(timeline.decode_s),
        total_ms=_ms(timeline.total_s),
        cached_tokens=timeline.cached_tokens,
        prefix_miss=str(timeline.prefix_miss),
        preemptions=timeline.preemptions,
        stalls_ms={cause: _ms(seconds) for cause, seconds in timeline.stalls_s.items()},
    )


def timeline_header(timeline: Timeline) -> str:
    """`timings` on one line, for `x-deepinfer-timeline`."""
    parts = [
        f"queued_ms={_ms(timeline.queued_s)}",
        f"prefill_ms={_ms(timeline.prefill_s)}",
        f"decode_ms={_ms(timeline.decode_s)}",
        f"total_ms={_ms(timeline.total_s)}",
        f"cached_tokens={timeline.cached_tokens}",
        f"prefix_miss={timeline.prefix_miss}",
        f"preemptions={timeline.preemptions}",
    ]
    parts += [f"stall_{cause}_ms={_ms(seconds)}" for cause, seconds in timeline.stalls_s.items()]
    return "; ".join(parts)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
