"""The scheduler: pure Python and numpy, no torch, no I/O, no clock of its own, no randomness.

    rank      one engine process; this scheduler drives one
    sequence  one request being answered: a prompt and what was sampled after it
    slot      the place of a running sequence: a row of the arrays here and of the device's buffers
    block     the KV of `block_tokens` consecutive positions; shared between sequences when equal
    step      one launch of the device; *row*: one sequence's share of it
    known     token ids that a sequence has: its prompt and its committed output
    expected  known, plus the tokens that steps in flight will have sampled (optimistic)
    computed  positions whose KV exists, or will once the steps in flight are done
    committed positions whose KV exists for certain

There are no phases: every step closes the gap between expected and computed, by one for a sequence
that decodes, by a chunk for one that prefills, resumes or replays.

    verb      file         what it does
    submit    state.py     a request enters the waiting room, or is refused
    admit     admit.py     a waiting sequence gets a slot and the blocks its prefix already has
    plan      plan.py      (state, now) -> StepPlan: who computes which positions next
    commit    commit.py    a step's results -> tokens, finishes, published and freed blocks
    cancel    state.py     a sequence leaves, at any moment
    check     everywhere   proof that the books balance

Open `loop.py` first: it names these verbs in their order.
"""
