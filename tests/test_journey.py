"""One request, told end to end: from the bytes of an HTTP body to the bytes of the answer.

The reader's second file, after `scheduler/loop.py`. Part one walks the stations by hand, in the
order in which a request passes them, with the real model and the real parts. Part two sends the
same bytes through the whole house and gets the same answer.
"""

from __future__ import annotations

import asyncio
import json

import aiohttp
import msgspec
import numpy as np
import pytest

from deepinfer.config import EngineConfig
from deepinfer.engine import Engine
from deepinfer.runtime.build import build_device
from deepinfer.scheduler.admit import admit
from deepinfer.scheduler.commit import commit
from deepinfer.scheduler.plan import plan
from deepinfer.scheduler.policy import Policy
from deepinfer.scheduler.prefix import root_key
from deepinfer.scheduler.sequence import Sequence, Status
from deepinfer.scheduler.state import SchedulerState
from deepinfer.serve.app import ServerConfig, create_app, run_server
from deepinfer.serve.metrics import PrometheusObserver
from deepinfer.serve.protocol import ChatCompletionRequest
from deepinfer.serve.requests import sampling_params, template_messages
from deepinfer.text.chat import ChatTemplate
from deepinfer.text.detokenizer import Detokenizer
from deepinfer.text.tokenizer import Tokenizer
from deepinfer.types import FinishReason, Request, SamplingParams

BODY = json.dumps(
    {
        "messages": [
            {"role": "system", "content": "Answer in one short sentence."},
            {"role": "user", "content": "What is the capital of France? <|im_end|> is just text."},
        ],
        "temperature": 0,
        "max_tokens": 12,
        "stream": True,
    }
).encode()

CONFIG = EngineConfig(
    dtype="float32",
    max_model_len=256,
    max_num_seqs=4,
    block_tokens=16,
    max_num_batched_tokens=32,
    min_prefill_tokens=8,
)


@pytest.fixture(scope="module")
def built():
    """The device and what it knows of its model. Loading takes about two seconds."""
    built = build_device(CONFIG, lambda line: None)
    yield built
    asyncio.run(built.device.close())


async def test_the_stations_one_by_one(built):
    # 1. Bytes become a typed request of the protocol.
    body = msgspec.json.decode(BODY, type=ChatCompletionRequest)
    assert body.messages[1].role == "user"

    # 2. The protocol's request becomes the house's own: neutral sampling parameters ...
    params = sampling_params(body, SamplingParams(), max_tokens=body.max_tokens, logprobs=None)
    assert params == SamplingParams(temperature=0.0, max_tokens=12)

    # 3. ... and a prompt: the chat template writes the special tokens, the user cannot.
    tokenizer = Tokenizer.from_checkpoint(built.checkpoint)
    template = ChatTemplate(built.checkpoint.chat_template, tokenizer)
    rendered = template.render(template_messages(body.messages, "system"))
    assert rendered.text.startswith("<|im_start|>system\nAnswer in one short sentence.<|im_end|>")
    assert rendered.text.endswith("<|im_start|>assistant\n")
    prompt = tokenizer.encode_rendered(rendered)
    end_of_turn = tokenizer.encode("<|im_end|>")[0]
    assert prompt.count(end_of_turn) == 2  # the template's two, not the user's look-alike
    assert tokenizer.decode(prompt, skip_special_tokens=False) == rendered.text

    # 4. The engine resolves what was left open and hands a Request to the scheduler.
    request = Request(
        id="journey",
        prompt_token_ids=np.array(prompt, np.int32),
        params=params,
        seed=0,
        max_total_tokens=len(prompt) + 12,
        stop_token_ids=tokenizer.eos_token_ids,
    )
    device = built.device
    block_tokens = device.cache_spec.block_tokens
    policy = Policy(
        max_num_batched_tokens=32,
        max_prefill_tokens_beside_decode=16,
        min_prefill_tokens=8,
        max_waiting_requests=10,
        max_waiting_tokens=1000,
        max_skips=8,
    )
    state = SchedulerState(device.cache_spec, device.num_blocks, device.num_slots, 256, policy)
    sequence = Sequence(request, root_key("journey", block_tokens))
    state.submit(sequence)
    assert sequence.status is Status.WAITING

    # 5. Admission gives it a slot; nothing of its prompt is cached yet, and the reason is noted.
    admit(state, now=1.0)
    assert (sequence.slot, sequence.prefix_miss.value) == (1, "cold")

    # 6. The first plan: as much of the prompt as a step's budget allows, no token to sample.
    first = plan(state, now=1.0)
    assert (first.first.tolist(), first.count.tolist()) == ([0], [32])
    assert (first.samples.tolist(), len(first.starts)) == ([False], 1)
    assert first.table_columns.tolist() == [0, 1]  # two blocks of 16 positions

    # 7. The device runs it. The second plan is made before the first one's results are known.
    device.forward(first)
    device.sample(first)
    second = plan(state, now=1.0)
    assert second.first.tolist() == [32]
    assert second.count.tolist() == [len(prompt) - 32]
    assert second.samples.tolist() == [True]
    device.forward(second)

    # 8. The results come in. Full blocks are published for others to share.
    commit(state, first, await device.collect(), now=2.0)
    assert (len(state.prefix), sequence.new_token_ids) == (2, [])
    device.sample(second)

    # 9. And so on, one step ahead, until the sequence ends; its blocks are free that moment.
    previous = second
    while not sequence.finished:
        step = plan(state, now=2.0)
        if step is not None:
            device.forward(step)
        commit(state, previous, await device.collect(), now=3.0)
        if step is not None:
            device.sample(step)
        previous = step
    if previous is not None:  # a row for a sequence that had ended: its result is thrown away
        commit(state, previous, await device.collect(), now=4.0)
    assert state.pool.num_held == 0
    state.check()

    # 10. The outbox becomes text, in the caller's own task.
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(sequence.new_token_ids)
    assert "Paris" in detokenizer.take() + detokenizer.finish()
    assert sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


async def test_the_whole_house_gives_the_same_answer(built):
    by_hand = await _answer_by_hand(built)
    observer = PrometheusObserver()
    async with Engine(CONFIG, observer=observer) as engine:
        config = ServerConfig(port=0)
        async with (
            run_server(create_app(engine, config, observer), config) as server,
            aiohttp.ClientSession(server.url) as client,
            client.post(
                "/v1/chat/completions",
                data=BODY,
                headers={"content-type": "application/json", "x-request-id": "journey"},
            ) as answer,
        ):
            assert answer.status == 200
            assert answer.headers["x-request-id"] == "journey"
            lines = (await answer.text()).split("\n\n")
            async with client.get("/metrics") as metrics:
                exposed = await metrics.text()
        engine.check()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )
    assert text == by_hand
    assert len(chunks) > 5, "tokens come one by one"
    assert 'deepinfer:num_requests_running{model_name="SmolLM2-135M-Instruct"} 0.0' in exposed


async def _answer_by_hand(built) -> str:
    """Stations 1 to 10 with the smallest possible machinery: one sequence, no scheduler ahead."""
    engine = Engine(CONFIG, build=lambda config, tell: build_device(config, tell))
    async with engine:
        body = msgspec.json.decode(BODY, type=ChatCompletionRequest)
        template = engine.chat_template
        assert template is not None
        prompt = engine.tokenizer.encode_rendered(
            template.render(template_messages(body.messages, "system"))
        )
        params = SamplingParams(temperature=0.0, max_tokens=12)
        return "".join([delta.text async for delta in engine.generate(prompt, params)])
