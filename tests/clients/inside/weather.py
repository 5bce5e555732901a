"""The model that answers are parsed into, for clients that take a Pydantic model as a schema."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    """The weather in a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Bern", "Basel"]
    days: Literal[1, 2, 3]
