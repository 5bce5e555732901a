"""How often to try again, and how long to wait before."""

from __future__ import annotations

import random
import time
from email.utils import parsedate_to_datetime

from pydantic import Field

from eyas.config import StrictModel


class RetryPolicy(StrictModel):
    """Exponential backoff with jitter: before try n + 1 between half of `first * 2^(n-1)` seconds and all of it."""

    attempts: int = Field(default=6, ge=1)
    """In all, the first one included."""
    first: float = Field(default=1.0, ge=0)
    longest: float = Field(default=60.0, ge=0)
    """The most seconds between two tries, unless the endpoint asks for more by Retry-After."""

    def wait(self, failures: int, asked: float | None = None) -> float:
        """Seconds to wait after so many failures (at least 1), if the endpoint asked for `asked`."""
        backoff = min(self.longest, self.first * 2.0 ** min(failures - 1, 30)) * random.uniform(0.5, 1.0)
        return backoff if asked is None else max(asked, backoff)


def retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for: a number or a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
