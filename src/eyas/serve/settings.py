"""What an operator decides about a server; nothing here changes a token."""

from __future__ import annotations

from pydantic import Field, SecretStr

from eyas.config import StrictModel


class ServeSettings(StrictModel):
    """Names, keys and limits of one server."""

    model_names: tuple[str, ...] = Field(min_length=1)
    """What requests may call the model; answers carry the first."""
    api_keys: tuple[SecretStr, ...] = ()
    """Any of them opens the API; none = open to everyone."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of a prompt and its answer; None = the model's context."""
    max_body_bytes: int = Field(default=8 << 20, ge=1)
    read_seconds: float = Field(default=30.0, gt=0)
    """How long a client may pause while it sends a body."""
    max_choices: int = Field(default=128, ge=1)
    """Prompts times `n` of one request."""
    request_seconds: float | None = Field(default=None, gt=0)
    """The longest a request may wait and run; None = as long as it takes."""
    write_seconds: float = Field(default=30.0, gt=0)
    """How long a reader may take nothing before its request is cancelled."""
    backlog_chunks: int = Field(default=1024, ge=1)
    """Chunks kept for a reader that is slower than the engine."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long running requests may go on after SIGTERM."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages elsewhere that may call the API (CORS); `*` = any."""
