"""The runtime: everything between a StepPlan and sampled ids.

    scheduler ── StepPlan ──▶ device ──▶ runner ──▶ model, kernels ──▶ sampler ── StepResult ──▶

    device.py    CpuDevice: one worker thread behind the Device protocol of `step.py`
    runner.py    plan -> tensors -> forward -> ids; the memory of running sequences, by slot
    sampler.py   logits -> ids and log-probabilities; philox.py is its random stream
    memory.py    how many KV blocks, how long a context, and why; host.py reads the machine
    build.py     settings -> a device that runs; the engine calls this
    scripted.py  a device without arithmetic that verifies every plan: tests, simulation
    weights/     checkpoints on disk

Importing this package, `scripted` or `memory` does not import torch.
"""
