"""One request's state. A running sequence is a view on its slot: a row of the arrays in `Slots`.

Arrays, because the hot path touches every running sequence in every step: a step's bookkeeping is a
few dozen numpy operations whatever the number of sequences, and nothing in it grows with context.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deepinfer.step import Int32Array
from deepinfer.types import FinishReason, PrefixMiss, Request, TokenLogprob

NUM_STOP_IDS = 8  # stop token ids per slot that are compared in the arrays; more go one by one

StopCheck = Callable[[int], str | None]
"""Is fed each new token id of a sequence; returns the stop string that it completes, if any."""


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # lost its blocks; its last step in flight still counts
    FINISHED = "finished"


class Sequence:
    """What is known of a request beside its row of `Slots`."""

    __slots__ = (
        "admitted_s",
        "announced",
        "blocked_by",
        "blocked_since_s",
        "cached_tokens",
        "error",
        "finish_reason",
        "finished_s",
        "first_token_s",
        "id",
        "keys",
        "last_token_s",
        "listener",
        "new_logprobs",
        "new_token_ids",
        "num_output_tokens",
        "preemptions",
        "prefix_miss",
        "reach",
        "request",
        "root",
        "skips",
        "slot",
        "stalls_s",
        "status",
        "stop_check",
        "stop_match",
        "token_ids",
    )

    def __init__(
        self, request: Request, root: bytes = b"", stop_check: StopCheck | None = None
    ) -> None:
        self.request = request
        self.id = request.id
        self.root = root  # of the hash chain, see prefix.py
        self.stop_check = stop_check
        self.status = Status.WAITING
        self.slot = -1
        self.token_ids: Int32Array = request.prompt_token_ids  # while it has no slot
        self.keys: list[bytes] = []  # of its full blocks, as far as they were needed
        self.announced: list[bytes] = []  # keys it told the prefix index that it computes
        # The outbox: the engine empties it in the consumer's own task.
        self.new_token_ids: list[int] = []
        self.new_logprobs: list[TokenLogprob] = []
        self.num_output_tokens = 0  # set when it ends or loses its slot
        self.finish_reason: FinishReason | None = None
        self.finished_s = 0.0
        self.stop_match: str | int | None = None
        self.error: BaseException | None = None
        self.listener: Callable[[], None] | None = None  # called when the outbox has news
        # The books of time and luck.
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.cached_tokens = 0
        self.prefix_miss = PrefixMiss.NONE
        self.preemptions = 0
        self.reach = 0  # blocks of its prefix that were cached when last looked at
        self.skips = 0  # times that a later request passed it
        self.blocked_by: str | None = None
        self.blocked_since_s = 0.0
        self.stalls_s: dict[str, float] = {}

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def block(self, cause: str | None, now: float) -> None:
        """Waits because of `cause` from now on (None: it waits no more). Adds up the time."""
        if cause == self.blocked_by:
            return
        if self.blocked_by is not None:
            spent = now - self.blocked_since_s
            self.stalls_s[self.blocked_by] = self.stalls_s.get(self.blocked_by, 0.0) + spent
        self.blocked_by = cause
        self.blocked_since_s = now


class Slots:
    """The state of running sequences, one row a slot. Row 0 is the dummy's and stays zero."""

    def __init__(self, num_slots: int, max_tokens: int, block_tokens: int) -> None:
        columns = -(-max_tokens // block_tokens)

        def counters() -> NDArray[np.int64]:
            return np.zeros(num_slots, np.int64)

        self.sequences: list[Sequence | None] = [None] * num_slots
        self.token_ids = np.zeros((num_slots, max_tokens + 1), np.int32)
        self.table = np.zeros((num_slots, columns), np.int32)
        self.num_blocks = counters()
        self.capacity = counters()  # positions that its blocks hold
        self.prompt = counters()  # tokens of the prompt
        self.known = counters()
        self.expected = counters()
        self.computed = counters()
        self.committed = counters()
        self.published = counters()  # positions in blocks that were offered to the prefix index
        self.write_from = counters()
        self.limit = counters()  # known never exceeds it
        self.stops_from = counters()  # stop ids count once known has reached it (min_tokens)
        self.in_flight = counters()  # steps in flight that have a row of it
        self.wants = np.zeros(num_slots, np.bool_)  # still takes tokens
        self.decoding = np.zeros(num_slots, np.bool_)  # running, and its gap is down to one
        self.checks = np.zeros(num_slots, np.bool_)  # has a stop check, or too many stop ids
        self.stop_ids = np.full((num_slots, NUM_STOP_IDS), -1, np.int32)
        self.last_token_s = np.zeros(num_slots, np.float64)

    def blocks(self, slot: int) -> list[int]:
        held: list[int] = self.table[slot, : self.num_blocks[slot]].tolist()
        return held

    def occupy(self, slot: int, sequence: Sequence, cached: int, computed: int) -> None:
        """`cached` tokens stand in the cache; computing starts at position `computed`."""
        request = sequence.request
        known = len(sequence.token_ids)
        self.sequences[slot] = sequence
        self.token_ids[slot, :known] = sequence.token_ids
        self.prompt[slot] = len(request.prompt_token_ids)
        self.known[slot] = self.expected[slot] = known
        self.computed[slot] = self.committed[slot] = computed
        self.published[slot] = self.write_from[slot] = cached
        self.limit[slot] = request.max_total_tokens
        self.stops_from[slot] = self.prompt[slot] + request.params.min_tokens
        stop_ids = request.stop_token_ids[:NUM_STOP_IDS]
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
        many = len(request.stop_token_ids) > NUM_STOP_IDS
        self.checks[slot] = many or sequence.stop_check is not None
        self.in_flight[slot] = 0
        self.wants[slot] = True
        self.decoding[slot] = False
        last_token_s = sequence.last_token_s
        self.last_token_s[slot] = np.nan if last_token_s is None else last_token_s

    def vacate(self, slot: int) -> None:
        self.sequences[slot] = None
        self.wants[slot] = self.decoding[slot] = False
        self.num_blocks[slot] = self.capacity[slot] = 0
        self.known[slot] = self.expected[slot] = self.computed[slot] = 0
        self.committed[slot] = self.in_flight[slot] = 0
