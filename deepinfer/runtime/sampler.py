"""From logits to token ids: filters, the draw, and raw log-probabilities, for rows of any mix.

Owns the sampling parameters by slot. Knows neither sequences nor plans: the runner tells slots and
positions. What a row gets depends on its logits, parameters, seed and position alone, never on
the rows beside it, because every decision is taken in integers:

    weight[i] = floor(exp((logit[i] - best logit) / temperature) * 2 ** 40)      int64
    kept      = top-k, then top-p, then min-p, in the order (logit downwards, id upwards)
    token     = first i, by id, with  sum of kept weight[0 .. i]  >  floor(bits * total / 2 ** 64)

A sum of integers has no rounding, so neither its order nor the shape of the batch can change a
token, and the fast paths below (no filter: no ranking; few candidates: no full sort) are exactly
the slow one. A token that is 2 ** 40 times less likely than the best one is never drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.runtime.philox import Purpose, Uint64Array, random_bits, scale_bits
from deepinfer.step import BoolArray, SequenceStart

Int64Array = NDArray[np.int64]

_ONE = 2.0**40  # the weight of the best token
_UNLIMITED = np.iinfo(np.int64).max
_LOWEST_TEMPERATURE = 1e-6  # below it every other token has weight 0 anyway
_CANDIDATES = (64, 1024)  # numbers of best tokens to rank before all are sorted
_ROWS_AT_ONCE = 32  # that draw: keeps intermediate arrays small enough for the allocator to reuse


class SamplingState:
    """Sampling parameters of the sequence in each slot, a structure of arrays [num_slots]."""

    def __init__(self, num_slots: int) -> None:
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)  # 0: off
        self.top_p = np.ones(num_slots, np.float64)
        self.min_p = np.zeros(num_slots, np.float64)
        self.seed = np.zeros(num_slots, np.uint64)
        self.stops_from = np.zeros(num_slots, np.int64)  # earlier positions mask the stop ids
        self.num_logprobs = np.full(num_slots, -1, np.int64)  # -1: off
        self.stop_token_ids: list[tuple[int, ...]] = [()] * num_slots

    def load(self, start: SequenceStart) -> None:
        slot, params = start.slot, start.params
        temperature = params.temperature
        self.temperature[slot] = max(temperature, _LOWEST_TEMPERATURE) if temperature else 0.0
        self.top_k[slot] = max(params.top_k, 0)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = start.seed % 2**64
        self.stops_from[slot] = start.prompt_tokens + params.min_tokens
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.stop_token_ids[slot] = start.stop_token_ids


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the rows of the logits that asked. `top` is as wide as the largest wish among them."""

    rows: Int64Array  # [wanted]
    chosen: NDArray[np.float32]  # [wanted]
    top_token_ids: Int64Array  # [wanted, k], best first, equal ones by id
    top: NDArray[np.float32]  # [wanted, k]


def sample(
    logits: torch.Tensor,
    slots: Int64Array,
    positions: Int64Array,
    state: SamplingState,
    mask: torch.Tensor | None = None,
) -> tuple[Int64Array, Logprobs | None]:
    """Draws one token a row.

    logits: float32 [rows, vocab_size], overwritten; slots: [rows]; positions: [rows], the index
    that the token will have in its sequence; mask: int32 [rows, ceil(vocab_size / 32)], bit
    `id % 32` of word `id // 32` set where the id is allowed. Returns ids [rows] and what was asked
    of log-probabilities.
    """
    asked = np.flatnonzero(state.num_logprobs[slots] >= 0)
    raw = torch.log_softmax(logits[torch.from_numpy(asked)], dim=1) if len(asked) else None
    if mask is not None:
        _apply_mask(logits, mask)
    _mask_early_stops(logits, slots, positions, state)
    token_ids = _choose(logits, slots, positions, state)
    if raw is None:
        return token_ids, None
    k = min(int(state.num_logprobs[slots[asked]].max()), raw.shape[1])
    return token_ids, _logprobs(raw, asked, token_ids[asked], k)


def _apply_mask(logits: torch.Tensor, mask: torch.Tensor) -> None:
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    allowed = ((mask[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits.masked_fill_(~allowed, -torch.inf)


def _mask_early_stops(
    logits: torch.Tensor, slots: Int64Array, positions: Int64Array, state: SamplingState
) -> None:
    """No stop token before min_tokens are out."""
    for row in np.flatnonzero(positions < state.stops_from[slots]).tolist():
        stop_ids = [i for i in state.stop_token_ids[slots[row]] if 0 <= i < logits.shape[1]]
        if stop_ids:
            logits[row, stop_ids] = -torch.inf


def _choose(
    logits: torch.Tensor, slots: Int64Array, positions: Int64Array, state: SamplingState
) -> Int64Array:
    greedy = state.temperature[slots] == 0.0
    if greedy.all():
        return _greedy(logits)
    token_ids = np.empty(len(slots), np.int64)
    if greedy.any():
        token_ids[greedy] = _greedy(_take(logits, greedy))
    drawn = ~greedy
    token_ids[drawn] = _draw(_take(logits, drawn), slots[drawn], positions[drawn], state)
    return token_ids


def _greedy(logits: torch.Tensor) -> Int64Array:
    """[rows, vocab_size] -> [rows]; of equal logits the lowest id."""
    best: Int64Array = logits.argmax(dim=1).numpy()
    return best


def _draw(
    logits: torch.Tensor, slots: Int64Array, positions: Int64Array, state: SamplingState
) -> Int64Array:
    """One token a row from its kept distribution."""
    rows = _Rows(
        bits=random_bits(state.seed[slots], positions, Purpose.SAMPLE),
        temperature=state.temperature[slots],
        top_k=np.where(state.top_k[slots] < logits.shape[1], state.top_k[slots], 0),
        top_p=state.top_p[slots],
        min_p=state.min_p[slots],
    )
    token_ids = np.empty(len(slots), np.int64)
    for begin in range(0, len(slots), _ROWS_AT_ONCE):
        part = slice(begin, begin + _ROWS_AT_ONCE)
        token_ids[part] = _draw_part(logits[part], rows.take(part))
    return token_ids


def _draw_part(logits: torch.Tensor, rows: _Rows) -> Int64Array:
    """Rows without ranking filters are the cheap ones: they need no order of their tokens."""
    ranked = (rows.top_k > 0) | (rows.top_p < 1.0)
    token_ids = np.empty(len(ranked), np.int64)
    if ranked.any():
        token_ids[ranked] = _draw_ranked(_take(logits, ranked), rows.take(ranked))
    if not ranked.all():
        token_ids[~ranked] = _draw_unranked(_take(logits, ~ranked), rows.take(~ranked))
    return token_ids


@dataclass(frozen=True, slots=True)
class _Rows:
    """The parameters of rows that draw, [rows] each."""

    bits: Uint64Array
    temperature: NDArray[np.float32]
    top_k: Int64Array
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]

    def take(self, which: BoolArray | Int64Array | slice) -> _Rows:
        return _Rows(
            self.bits[which],
            self.temperature[which],
            self.top_k[which],
            self.top_p[which],
            self.min_p[which],
        )

    def lowest_weight(self) -> torch.Tensor:
        """int64 [rows, 1]: what min-p asks of a weight."""
        return torch.from_numpy(np.ceil(self.min_p * _ONE).astype(np.int64))[:, None]


def _draw_unranked(logits: torch.Tensor, rows: _Rows) -> Int64Array:
    weights = _weights(logits, logits.amax(dim=1, keepdim=True), rows.temperature)
    if (rows.min_p > 0.0).any():
        weights.masked_fill_(weights < rows.lowest_weight(), 0)
    return _pick(weights, rows.bits).numpy()


def _draw_ranked(logits: torch.Tensor, rows: _Rows) -> Int64Array:
    """Ranks a few best tokens; a row whose kept set may reach beyond them tries with more."""
    token_ids = np.empty(len(rows.bits), np.int64)
    totals = np.zeros(len(rows.bits), np.int64)  # of all weights: top-p needs it without top-k
    unlimited = rows.top_k == 0
    if unlimited.any():
        part = _take(logits, unlimited)
        weights = _weights(part, part.amax(dim=1, keepdim=True), rows.temperature[unlimited])
        totals[unlimited] = weights.sum(dim=1).numpy()
    pending = np.arange(len(rows.bits))
    for size in _CANDIDATES:
        tried = pending[rows.top_k[pending] < size]
        if len(tried) and size < logits.shape[1]:
            part = logits if len(tried) == len(logits) else logits[torch.from_numpy(tried)]
            found, certain = _draw_candidates(part, rows.take(tried), totals[tried], size)
            token_ids[tried[certain]] = found[certain]
            pending = np.setdiff1d(pending, tried[certain], assume_unique=True)
    if len(pending):
        part = logits[torch.from_numpy(pending)]
        token_ids[pending] = _draw_sorted(part, rows.take(pending), totals[pending])
    return token_ids


def _draw_candidates(
    logits: torch.Tensor, rows: _Rows, totals: Int64Array, size: int
) -> tuple[Int64Array, BoolArray]:
    """Draws among the `size` best: ids [rows], and whether the kept set was certain [rows].

    It is when its last member is better than the last candidate: then no token that was left out
    ranks before or beside it.
    """
    values, ids = _rank(logits, size)
    weights = _weights(values, values[:, :1], rows.temperature)
    num_kept = _num_kept(weights, rows, totals)
    worst = values.gather(1, (num_kept - 1).clamp(min=0))
    certain: BoolArray = (worst > values[:, -1:]).squeeze(1).numpy()
    weights.masked_fill_(torch.arange(size) >= num_kept, 0)
    ids, by_id = ids.sort(dim=1)
    chosen = _pick(weights.gather(1, by_id), rows.bits)
    return ids.gather(1, chosen[:, None]).squeeze(1).numpy(), certain


def _draw_sorted(logits: torch.Tensor, rows: _Rows, totals: Int64Array) -> Int64Array:
    """Draws whatever the size of the kept set. Sorts values without their ids, which is several
    times faster, and keeps what is above the last kept value, and of those equal to it the first.
    """
    values = torch.from_numpy(np.sort(logits.numpy(), axis=1)[:, ::-1].copy())
    num_kept = _num_kept(_weights(values, values[:, :1], rows.temperature), rows, totals)
    worst = values.gather(1, (num_kept - 1).clamp(min=0))
    above, equal = logits > worst, logits == worst
    num_equal = num_kept - above.sum(dim=1, keepdim=True)
    kept = above | (equal & (equal.cumsum(dim=1) <= num_equal))
    weights = _weights(logits, values[:, :1], rows.temperature).masked_fill_(~kept, 0)
    return _pick(weights, rows.bits).numpy()


def _num_kept(weights: torch.Tensor, rows: _Rows, totals: Int64Array) -> torch.Tensor:
    """weights: int64 [rows, n] of the n best tokens, best first; totals: [rows] sum over all
    tokens, used where top-k is off -> int64 [rows, 1]: how many of the best pass all filters."""
    if (rows.top_k > 0).any():
        limits = np.where(rows.top_k > 0, rows.top_k, weights.shape[1])
        beyond = torch.arange(weights.shape[1]) >= torch.from_numpy(limits)[:, None]
        weights = weights.masked_fill(beyond, 0)
        totals = np.where(rows.top_k > 0, weights.sum(dim=1).numpy(), totals)
    mass = np.maximum(np.ceil(rows.top_p * totals), 1.0).astype(np.int64)
    wanted = torch.from_numpy(np.where(rows.top_p < 1.0, mass, _UNLIMITED))[:, None]
    before = weights.cumsum(dim=1) - weights
    # Each condition holds for a leading part of the ranking, so their number is enough.
    kept = (weights > 0) & (before < wanted) & (weights >= rows.lowest_weight())
    return kept.sum(dim=1, keepdim=True)


def _weights(
    values: torch.Tensor, best: torch.Tensor, temperature: NDArray[np.float32]
) -> torch.Tensor:
    """values: [rows, n]; best: [rows, 1]; temperature: [rows] -> int64 [rows, n], 0 .. 2 ** 40."""
    lowest = torch.finfo(values.dtype).min  # a row that is masked altogether has no NaN
    scaled = values - best.clamp(min=lowest)
    scaled.div_(torch.from_numpy(temperature)[:, None]).exp_().mul_(_ONE)
    return scaled.to(torch.int64)


def _pick(weights: torch.Tensor, bits: Uint64Array) -> torch.Tensor:
    """Inverse distribution function in integers. weights: int64 [rows, n] -> int64 [rows]."""
    sums = weights.cumsum(dim=1)
    totals = sums[:, -1].numpy().astype(np.uint64)
    targets = torch.from_numpy(scale_bits(bits, totals).astype(np.int64))[:, None]
    chosen = torch.searchsorted(sums, targets, right=True).squeeze(1)
    return chosen.clamp_(max=weights.shape[1] - 1)  # matters only if all weights are 0


def _rank(values: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `size` largest of each row and their ids, best first, equal ones by id.

    Which of several values equal to the last one are in the result is open unless all are asked.
    """
    if size == values.shape[1]:
        best, ids = torch.sort(values, dim=1, descending=True, stable=True)
        return best, ids
    _, ids = values.topk(size, dim=1, sorted=False)
    ids = ids.sort(dim=1).values
    best, order = torch.sort(values.gather(1, ids), dim=1, descending=True, stable=True)
    return best, ids.gather(1, order)


def _logprobs(raw: torch.Tensor, rows: Int64Array, token_ids: Int64Array, k: int) -> Logprobs:
    """raw: float32 [wanted, vocab_size] log-probabilities of `rows`."""
    chosen = raw.gather(1, torch.from_numpy(token_ids)[:, None]).squeeze(1)
    top, ids = _rank(raw, min(k + 1, raw.shape[1]))
    tied = (top[:, k - 1] == top[:, -1]) if 0 < k < top.shape[1] else torch.zeros(0)
    if tied.any():
        top[tied], ids[tied] = (part[:, : top.shape[1]] for part in _rank(raw[tied], raw.shape[1]))
    return Logprobs(rows, chosen.numpy(), ids[:, :k].numpy(), top[:, :k].numpy())


def _take(tensor: torch.Tensor, rows: BoolArray) -> torch.Tensor:
    return tensor if rows.all() else tensor[torch.from_numpy(rows)]
