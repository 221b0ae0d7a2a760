"""The waiting room: bounded, in order of priority and arrival, with ageing so that nobody starves.

It knows sequences, not blocks: who fits is decided in `admit.py`, which walks `candidates()`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from deepinfer.errors import QueueFullError
from deepinfer.scheduler.sequence import Sequence, Status


class WaitingRoom:
    """One first-in-first-out line per priority class; lower numbers go first."""

    def __init__(self, max_requests: int, max_tokens: int, ageing_s: float) -> None:
        """After each `ageing_s` seconds at the head of its line a request counts one class up."""
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._ageing_s = ageing_s
        self._lines: dict[int, deque[Sequence]] = {}
        self.num_requests = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self.num_requests

    def push(self, sequence: Sequence, tokens_per_s: float = 0.0) -> None:
        """Raises `QueueFullError`; `tokens_per_s`, if known, turns the excess into a wait."""
        tokens = self.num_tokens + len(sequence.token_ids)
        too_many = self.num_requests >= self._max_requests
        # One request alone may exceed the token bound: refusing it for ever would help nobody.
        if too_many or (tokens > self._max_tokens and self.num_requests):
            wait_s = min(600.0, max(1.0, self.num_tokens / tokens_per_s if tokens_per_s else 1.0))
            raise QueueFullError(
                f"The queue is full: {self.num_requests} of {self._max_requests} requests and "
                f"{self.num_tokens} of {self._max_tokens} tokens are waiting. "
                f"Try again in about {wait_s:.0f} s.",
                wait_s,
            )
        self._line(sequence).append(sequence)
        self._count(sequence, 1)

    def push_front(self, sequence: Sequence) -> None:
        """A preempted sequence returns to the head of its line; bounds do not apply to it."""
        self._line(sequence).appendleft(sequence)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        line = self._line(sequence)
        line.remove(sequence)
        if not line:
            del self._lines[sequence.request.priority]
        self._count(sequence, -1)

    def candidates(self, now: float, most: int) -> Iterator[Sequence]:
        """At most `most` sequences in the order in which they deserve admission.

        The caller may `remove` the sequence it was just given.
        """
        lines = {key: list(islice(line, most)) for key, line in self._lines.items()}
        heads = dict.fromkeys(lines, 0)
        for _ in range(most):
            best: tuple[int, float, int] | None = None
            for key, line in lines.items():
                if heads[key] < len(line):
                    arrived_s = line[heads[key]].request.arrived_s
                    rank = (key - int((now - arrived_s) / self._ageing_s), arrived_s, key)
                    best = rank if best is None else min(best, rank)
            if best is None:
                return
            key = best[2]
            heads[key] += 1
            yield lines[key][heads[key] - 1]

    def all(self) -> list[Sequence]:
        return [sequence for line in self._lines.values() for sequence in line]

    def _line(self, sequence: Sequence) -> deque[Sequence]:
        return self._lines.setdefault(sequence.request.priority, deque())

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.num_requests += sign
        self.num_tokens += sign * len(sequence.token_ids)

    def check(self) -> None:
        waiting = self.all()
        assert self.num_requests == len(waiting)
        assert self.num_tokens == sum(len(sequence.token_ids) for sequence in waiting)
        assert len({id(sequence) for sequence in waiting}) == len(waiting), "waits twice"
        assert all(s.status is Status.WAITING and s.slot == -1 for s in waiting)
