"""A Device without arithmetic: its next token is a pure function of the sequence's token ids.

It owns a pretended memory and holds every plan against it, as a real device would suffer it: the
KV of a position is a fingerprint of all token ids up to that position, written through the block
table and read back before use. A block that was reused too early, a table entry that never
arrived, a position that nobody computed or a row that starts in the wrong place is a
`PlanViolation`, raised at once by `forward` and kept in `violations`.

It knows no tensor and no wall clock: how long a step lasts is a function of the plan, on the Clock
it is given. Scheduler tests call it, and simulations that ask what a schedule would cost.

    fingerprint of a position p, kept at [block_table[p // block_tokens], p % block_tokens]:

        sum of mix(token_ids[j]) * FACTOR ** j  for j <= p,  modulo 2 ** 64;  0: nothing valid here
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from deepinfer.clock import Clock
from deepinfer.errors import DeviceError, EngineClosedError
from deepinfer.step import (
    CacheSpec,
    Int32Array,
    SequenceStart,
    StepLogprobs,
    StepPlan,
    StepResult,
)

NextToken = Callable[[Int32Array], int]
"""token_ids: int32 [known] -> the token id that follows. Must be a pure function."""

_Uint64Array = NDArray[np.uint64]
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_GARBAGE_TOKEN = 0


class PlanViolation(AssertionError):
    """The plan contradicts the contract in `step.py` or what earlier plans put in memory."""


def hashed_next_token(vocab_size: int, window: int = 8, seed: int = 0) -> NextToken:
    """A token that depends on the last `window` ids and on the length, and looks random."""

    def next_token(token_ids: Int32Array) -> int:
        state = (len(token_ids) * 0x9E3779B97F4A7C15 + seed) & 0xFFFFFFFFFFFFFFFF
        for token in token_ids[-window:].tolist():
            state = ((state ^ token) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
            state ^= state >> 29
        return state % vocab_size

    return next_token


def tabled_next_token(answers: Mapping[Sequence[int], Sequence[int]]) -> NextToken:
    """Each prompt of the table is followed by its answer, and by token 0 when that is used up."""
    table = {tuple(prompt): tuple(answer) for prompt, answer in answers.items()}

    def next_token(token_ids: Int32Array) -> int:
        known = tuple(token_ids.tolist())
        for length in range(len(known), 0, -1):
            answer = table.get(known[:length])
            if answer is not None:
                done = len(known) - length
                return answer[done] if done < len(answer) else 0
        raise KeyError(f"no prompt in the table begins {known[:8]}")

    return next_token


def generate_alone(
    next_token: NextToken,
    prompt: Sequence[int],
    num_tokens: int,
    stop_token_ids: Sequence[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """What a device with this function must produce for one sequence, whatever the schedule."""
    known = np.empty(len(prompt) + num_tokens, np.int32)
    known[: len(prompt)] = prompt
    end = len(prompt)
    while end < len(known):
        early = end - len(prompt) < min_tokens
        known[end] = _allowed(next_token(known[:end]), stop_token_ids if early else ())
        end += 1
        if known[end - 1] in stop_token_ids:
            break
    answer: list[int] = known[len(prompt) : end].tolist()
    return answer


def _allowed(token: int, banned: Sequence[int], mask: Any | None = None) -> int:
    """The token, or the next higher one that is neither banned nor masked (words of 32 bits)."""
    while token in banned or (mask is not None and not int(mask[token >> 5]) >> (token & 31) & 1):
        token += 1
        if mask is not None and token >= 32 * len(mask):
            token = 0
    return token


class _Slot:
    """What the device holds for one running sequence. Arrays grow by doubling."""

    def __init__(self, start: SequenceStart) -> None:
        self.start = start
        self.known = len(start.token_ids)
        self.token_ids: Int32Array = np.array(start.token_ids, dtype=np.int32)
        self.table: Int32Array = np.zeros(8, np.int32)
        self.fingerprints: _Uint64Array = np.zeros(0, np.uint64)
        self.num_fingerprints = 0
        self.lost = False  # a step with this sequence failed: what it computes is garbage

    def append(self, token: int) -> None:
        if self.known == len(self.token_ids):
            self.token_ids = np.resize(self.token_ids, 2 * self.known + 16)
        self.token_ids[self.known] = token
        self.known += 1

    def set_table(self, column: int, block: int) -> None:
        if column >= len(self.table):
            grown = np.zeros(2 * column, np.int32)
            grown[: len(self.table)] = self.table
            self.table = grown
        self.table[column] = block

    def extend_fingerprints(self, powers: _Uint64Array) -> None:
        """Brings `fingerprints` up to `known`. powers: [known or more], FACTOR ** j."""
        begin, end = self.num_fingerprints, self.known
        if end <= begin:
            return
        if end > len(self.fingerprints):
            grown = np.zeros(max(end, 2 * begin), np.uint64)
            grown[:begin] = self.fingerprints[:begin]
            self.fingerprints = grown
        terms = _mix(self.token_ids[begin:end]) * powers[begin:end]
        before = self.fingerprints[begin - 1] if begin else np.uint64(0)
        with np.errstate(over="ignore"):
            self.fingerprints[begin:end] = np.cumsum(terms, dtype=np.uint64) + before
        self.num_fingerprints = end


@dataclass(slots=True)
class _Step:
    """A step on its way through the device."""

    plan: StepPlan
    ready_s: float
    duration_s: float
    error: BaseException | None = None
    result: StepResult | None = None


class ScriptedDevice:
    """Implements `step.Device`. Steps are computed when they are enqueued, delivered in their time.

    `hold()` withholds results until `release()`; `fail(number)` makes that step fail.
    `log` tells the calls in order: ("forward", n), ("sample", n), ("collect", n).
    `check=False` drops the pretended KV memory and every verification, for speed.
    """

    def __init__(
        self,
        cache_spec: CacheSpec,
        num_blocks: int,
        num_slots: int,
        next_token: NextToken,
        clock: Clock,
        step_time: Callable[[StepPlan], float] = lambda plan: 0.0,
        check: bool = True,
    ) -> None:
        self.cache_spec = cache_spec
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.log: list[tuple[str, int]] = []
        self.violations: list[str] = []
        self._next_token = next_token
        self._clock = clock
        self._step_time = step_time
        self._check = check
        self._slots: list[_Slot | None] = [None] * num_slots
        shape = (num_blocks, cache_spec.block_tokens) if check else (0, 0)
        self._kv: _Uint64Array = np.zeros(shape, np.uint64)
        self._powers: _Uint64Array = np.ones(1, np.uint64)
        self._unsampled: _Step | None = None
        self._finished: deque[_Step] = deque()
        self._free_at_s = clock.now()
        self._last_number: int | None = None
        self._failing: set[int] = set()
        self._closed = False
        self._permits: int | None = None  # results that may leave; None: no limit
        self._permitted = asyncio.Event()

    # --- the Device protocol ---

    def forward(self, plan: StepPlan) -> None:
        self._require_open()
        self.log.append(("forward", plan.number))
        if self._unsampled is not None:
            self._violate(plan, f"step {self._unsampled.plan.number} was not sampled yet")
        self._check_shape(plan)
        self._apply_changes(plan)
        duration_s = self._step_time(plan)
        self._free_at_s = max(self._free_at_s, self._clock.now()) + duration_s
        step = _Step(plan, self._free_at_s, duration_s)
        if plan.number in self._failing:
            step.error = RuntimeError(f"step {plan.number} was told to fail")
            self._lose_rows(plan)
        else:
            self._compute(plan)
        self._unsampled = step
        self._last_number = plan.number

    def sample(self, plan: StepPlan, mask: Any | None = None) -> None:
        self._require_open()
        self.log.append(("sample", plan.number))
        step = self._unsampled
        if step is None or step.plan is not plan:
            self._violate(plan, "sample() without its forward()")
        self._unsampled = None
        if step.error is None:
            step.result = self._draw(step, mask)
        # Host work between forward and sample may outlast the forward: the later moment counts.
        step.ready_s = max(step.ready_s, self._clock.now())
        self._free_at_s = max(self._free_at_s, step.ready_s)
        self._finished.append(step)

    async def collect(self) -> StepResult:
        self._require_open()
        if not self._finished:
            raise PlanViolation("collect() without a sampled step: it would wait for ever")
        step = self._finished[0]  # stays there while we wait: a cancelled collect loses nothing
        await self._clock.sleep_until(step.ready_s)
        while self._permits == 0 and not self._closed:
            self._permitted.clear()
            await self._permitted.wait()
        self._require_open()
        if self._permits is not None:
            self._permits -= 1
        self._finished.popleft()
        self.log.append(("collect", step.plan.number))
        if step.result is None:
            raise DeviceError(
                f"Step {step.plan.number} with {len(step.plan.slots)} rows failed: {step.error}. "
                "The requests in it are lost; later steps run."
            ) from step.error
        return step.result

    async def close(self) -> None:
        self._closed = True
        self._unsampled = None
        self._finished.clear()
        self._permitted.set()

    # --- what tests do to it ---

    def hold(self) -> None:
        """Results stay inside until `release`."""
        self._permits = 0

    def release(self, num_steps: int | None = None) -> None:
        """Lets `num_steps` more results out; `None`: all, from now on."""
        self._permits = None if num_steps is None else (self._permits or 0) + num_steps
        self._permitted.set()

    def fail(self, number: int) -> None:
        """Step `number` will fail: its rows' KV is lost and `collect` raises `DeviceError`."""
        self._failing.add(number)

    @property
    def num_outstanding(self) -> int:
        """Steps enqueued and not yet collected."""
        return len(self._finished) + (self._unsampled is not None)

    def known_token_ids(self, slot: int) -> Int32Array:
        """A copy of what the device knows of the sequence in `slot`: prompt and sampled ids."""
        held = self._slots[slot]
        return np.zeros(0, np.int32) if held is None else held.token_ids[: held.known].copy()

    # --- a step ---

    def _apply_changes(self, plan: StepPlan) -> None:
        """Starts, then table entries. Also done for a step that fails."""
        for start in plan.starts:
            if self._check and not 0 <= start.slot < self.num_slots:
                self._violate(plan, f"start in slot {start.slot} of {self.num_slots}")
            if self._check and not 1 <= start.prompt_tokens <= len(start.token_ids):
                self._violate(
                    plan,
                    f"start in slot {start.slot} has {len(start.token_ids)} ids, "
                    f"{start.prompt_tokens} of them prompt",
                )
            self._slots[start.slot] = _Slot(start)
        for slot, column, block in zip(
            plan.table_slots.tolist(),
            plan.table_columns.tolist(),
            plan.table_blocks.tolist(),
            strict=True,
        ):
            if self._check and not 0 <= block < self.num_blocks:
                self._violate(plan, f"table of slot {slot} names block {block}")
            self._held(plan, slot).set_table(column, block)

    def _compute(self, plan: StepPlan) -> None:
        """Reads back every earlier position, then writes those of the step."""
        if not self._check:
            return
        rows = list(_rows(plan))
        for slot, first, count, samples, write_from in rows:
            self._check_row(plan, slot, first, count, samples, write_from)
        for slot, first, count, _, write_from in rows:
            self._write(plan, slot, max(first, write_from), first + count)
        for slot, first, count, _, _ in rows:
            self._read_back(plan, slot, first, first + count)

    def _check_row(
        self, plan: StepPlan, slot: int, first: int, count: int, samples: bool, write_from: int
    ) -> None:
        held = self._held(plan, slot)
        end = first + count
        if held.lost:
            return
        if end > held.known:
            self._violate(plan, f"slot {slot}: row ends at {end}, only {held.known} ids known")
        if samples != (end == held.known):
            self._violate(
                plan, f"slot {slot}: row ends at {end} of {held.known} known, samples={samples}"
            )
        if not 0 <= write_from <= held.known:
            self._violate(
                plan, f"slot {slot}: write_from {write_from} is outside of 0 .. {held.known}"
            )
        self._extend(held)
        self._read_back(plan, slot, 0, max(first, write_from))

    def _write(self, plan: StepPlan, slot: int, begin: int, end: int) -> None:
        held = self._held(plan, slot)
        blocks, offsets = self._places(held, begin, end)
        if (blocks == 0).any():
            at = begin + int(np.argmin(blocks != 0))
            self._violate(plan, f"slot {slot}: no block for position {at} that it computes")
        self._kv[blocks, offsets] = 0 if held.lost else held.fingerprints[begin:end]

    def _read_back(self, plan: StepPlan, slot: int, begin: int, end: int) -> None:
        held = self._held(plan, slot)
        if held.lost or end <= begin:
            return
        blocks, offsets = self._places(held, begin, end)
        wrong = self._kv[blocks, offsets] != held.fingerprints[begin:end]
        if wrong.any():
            at = int(np.argmax(wrong))
            block = int(blocks[at])
            if block == 0:
                what = "has no block"
            elif self._kv[block, offsets[at]] == 0:
                what = f"was never computed in block {block}"
            else:
                what = f"is another sequence's in block {block}"
            self._violate(
                plan, f"slot {slot}: position {begin + at} {what}; the row needs {begin} .. {end}"
            )

    def _lose_rows(self, plan: StepPlan) -> None:
        """The step failed midway: its rows are lost, their KV must not be trusted by anybody."""
        for slot, first, count, _, write_from in _rows(plan):
            self._held(plan, slot).lost = True
            if self._check:
                self._write(plan, slot, max(first, write_from), first + count)

    def _draw(self, step: _Step, mask: Any | None) -> StepResult:
        plan = step.plan
        num_rows = len(plan.slots)
        token_ids = np.zeros((num_rows, 1), np.int32)
        num_tokens = np.zeros(num_rows, np.int32)
        wanted: list[int] = []
        slots = plan.slots.tolist()
        for row in np.flatnonzero(plan.samples).tolist():
            held = self._held(plan, slots[row])
            token = _GARBAGE_TOKEN if held.lost else self._next(held, mask, row)
            held.append(token)
            token_ids[row, 0] = token
            num_tokens[row] = 1
            if held.start.params.logprobs is not None:
                wanted.append(row)
        return StepResult(
            number=plan.number,
            token_ids=token_ids,
            num_tokens=num_tokens,
            logprobs=self._logprobs(plan, wanted, token_ids) if wanted else None,
            device_s=step.duration_s,
        )

    def _next(self, held: _Slot, mask: Any | None, row: int) -> int:
        start = held.start
        early = held.known - start.prompt_tokens < start.params.min_tokens
        return _allowed(
            self._next_token(held.token_ids[: held.known]),
            start.stop_token_ids if early else (),
            None if mask is None else mask[row],
        )

    def _logprobs(self, plan: StepPlan, wanted: list[int], token_ids: Int32Array) -> StepLogprobs:
        """Made-up but consistent: the chosen token is the best, at -0.5; each next loses 0.5."""
        rows = np.array(wanted, np.int32)
        asked = (self._held(plan, slot).start.params.logprobs for slot in plan.slots[rows].tolist())
        k = max(number or 0 for number in asked)
        chosen = np.full((len(rows), 1), -0.5, np.float32)
        top_ids = (token_ids[rows][:, :, None] + np.arange(k)).astype(np.int32)
        top = np.broadcast_to(-0.5 * np.arange(1, k + 1, dtype=np.float32), top_ids.shape)
        return StepLogprobs(rows=rows, chosen=chosen, top_token_ids=top_ids, top=top.copy())

    # --- memory and complaints ---

    def _places(self, held: _Slot, begin: int, end: int) -> tuple[Int32Array, NDArray[np.int64]]:
        """Block and offset of positions begin .. end; block 0 where the table has none."""
        positions = np.arange(begin, end)
        columns = positions // self.cache_spec.block_tokens
        inside = columns < len(held.table)
        blocks = np.where(inside, held.table[np.where(inside, columns, 0)], 0).astype(np.int32)
        return blocks, positions % self.cache_spec.block_tokens

    def _extend(self, held: _Slot) -> None:
        if len(self._powers) < held.known:
            factors = np.full(2 * held.known, _FACTOR, np.uint64)
            factors[0] = 1
            self._powers = np.cumprod(factors, dtype=np.uint64)
        held.extend_fingerprints(self._powers)

    def _held(self, plan: StepPlan, slot: int) -> _Slot:
        held = self._slots[slot] if 0 <= slot < self.num_slots else None
        if held is None:
            self._violate(plan, f"slot {slot} holds no sequence")
        return held

    def _check_shape(self, plan: StepPlan) -> None:
        if not self._check:
            return
        if self._last_number is not None and plan.number <= self._last_number:
            self._violate(plan, f"number does not follow step {self._last_number}")
        num_rows = len(plan.slots)
        for name in ("first", "count", "samples", "write_from", "tail_start"):
            if len(getattr(plan, name)) != num_rows:
                self._violate(plan, f"{name} has {len(getattr(plan, name))} rows, not {num_rows}")
        if len(np.unique(plan.slots)) != num_rows:
            self._violate(plan, f"a slot has two rows: {plan.slots.tolist()}")
        if num_rows and (plan.count.min() < 1 or plan.first.min() < 0):
            self._violate(plan, "a row is empty or starts below position 0")
        if plan.num_tokens != int(plan.count.sum()):
            self._violate(plan, f"num_tokens {plan.num_tokens} is not the sum of count")

    def _violate(self, plan: StepPlan, what: str) -> NoReturn:
        message = f"step {plan.number}: {what}"
        self.violations.append(message)
        raise PlanViolation(message)

    def _require_open(self) -> None:
        if self._closed:
            raise EngineClosedError("The device is closed.")


def _rows(plan: StepPlan) -> Any:
    """Tuples (slot, first, count, samples, write_from)."""
    columns = (plan.slots, plan.first, plan.count, plan.samples, plan.write_from)
    return zip(*(column.tolist() for column in columns), strict=True)


def _mix(token_ids: Int32Array) -> _Uint64Array:
    """Spreads ids over 64 bits, so that sums of different sequences differ."""
    state = token_ids.astype(np.uint64) + np.uint64(0x632BE59BD9B4E019)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
