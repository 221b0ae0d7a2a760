"""Every exception that deepinfer raises on purpose.

    DeepinferError
    ├── ConfigError                a setting is wrong; raised before anything is loaded
    ├── ModelError                 a checkpoint cannot be served
    │   ├── UnsupportedModelError  architecture, tensor format or option without implementation
    │   └── CheckpointError        missing, truncated or inconsistent files and tensors
    ├── MemoryPlanError            what was asked for does not fit; says what would
    ├── RequestError               the caller's mistake (HTTP 400); `.field` names the culprit
    │   └── PromptTooLongError     carries both numbers
    ├── RefusedError               try again later (HTTP 503); `.retry_after_s` is computed
    │   ├── QueueFullError
    │   └── DrainingError
    ├── DeadlineExceededError      the request's own deadline passed (HTTP 504)
    └── EngineError                our side failed (HTTP 500)
        ├── DeviceError            a step failed on the device; only the rows in it are lost
        └── EngineClosedError      used before start or after close

A message says what happened, the number that matters, and what to do next.
"""

from __future__ import annotations


class DeepinferError(Exception):
    """Root of the tree above."""


class ConfigError(DeepinferError):
    """A setting is wrong. `field` is the name of the setting, as in `EngineConfig`."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelError(DeepinferError):
    """A checkpoint cannot be served."""


class UnsupportedModelError(ModelError):
    """The checkpoint is readable but needs something that is not implemented."""


class CheckpointError(ModelError):
    """Files or tensors are missing, truncated or contradict each other."""


class MemoryPlanError(DeepinferError):
    """The asked-for sizes do not fit in memory."""


class RequestError(DeepinferError):
    """The request is invalid. `field` names the parameter; `None`: no single one is at fault."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLongError(RequestError):
    """Prompt (plus the tokens asked for) exceeds the context limit."""

    def __init__(self, prompt_tokens: int, limit_tokens: int, message: str | None = None) -> None:
        super().__init__(
            message
            or (
                f"The prompt has {prompt_tokens} tokens, but at most {limit_tokens} fit "
                "(one position is kept for the answer). Shorten the prompt or start the server "
                "with a larger --max-model-len."
            ),
            field="prompt",
        )
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens


class RefusedError(DeepinferError):
    """The engine cannot take the request now. Retry after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFullError(RefusedError):
    """The waiting room is full, in requests or in tokens."""


class DrainingError(RefusedError):
    """The engine finishes what it has and takes nothing new."""


class DeadlineExceededError(DeepinferError):
    """The deadline that the request carried has passed before it finished."""


class EngineError(DeepinferError):
    """The engine failed; the request was not at fault."""


class DeviceError(EngineError):
    """A step failed on the device. Requests that were part of it end with this error."""


class EngineClosedError(EngineError):
    """The engine is not running: not started yet, closed, or failed for good."""
