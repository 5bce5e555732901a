"""Servers that the measuring verbs compare, in addition to engines of this process or instead of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typer import Option

from eyas.cli.common.aliases import option_name
from eyas.cli.common.display import note
from eyas.cli.common.options import LoadedDrafterOptions, RuntimeOptions
from eyas.cli.common.verb import GivenOptions
from eyas.errors import UsageError

if TYPE_CHECKING:
    from eyas.bench.offline.external import Endpoint
    from eyas.bench.serving.servers import Side
    from eyas.types import SamplingParams


_GROUPS = (RuntimeOptions, LoadedDrafterOptions)
_OURS = ("draft_model", "method", "tree", "coupled", *(each.name for group in _GROUPS for each in fields(group)))
"""Options about an engine in this process."""
ENDPOINT = "endpoint"
BASELINE = "baseline"
_KEY = "EYAS_API_KEY"


@dataclass(frozen=True)
class MeasuredEndpointOptions:
    """The server that is measured, and the one it is compared with."""

    PANEL: ClassVar[str] = "Endpoint"
    endpoint: Annotated[
        str | None, Option(help="URL[,model=NAME][,speculate=false]: measure the OpenAI-compatible server there.")
    ] = None
    baseline_endpoint: Annotated[
        str | None,
        Option(help="The server to compare it with, in the same form (default: eyas's plain engine, with --model)."),
    ] = None
    tokenizer: Annotated[
        str | None,
        Option(help="Render prompts with it here and send token ids to servers that take them (default: --model's)."),
    ] = None
    api_key: Annotated[str | None, Option(envvar=_KEY, show_envvar=True, help="API key to send to servers.")] = None
    timeout: Annotated[float, Option(min=1, help="Seconds for a server's whole answer.")] = 600.0


def check_endpoints(options: MeasuredEndpointOptions, model: str | None, given: GivenOptions) -> None:
    """Raise UsageError for options that would be ignored, and for a missing target."""
    if options.endpoint is None:
        about = sorted(given & {"baseline_endpoint", "tokenizer", "timeout"})
        about += ["api_key"] if options.api_key != os.environ.get(_KEY) else []  # the variable may be for other verbs
        if about:
            raise UsageError(f"{_flags(about)}: about a server; give --endpoint")
        if model is None:
            raise UsageError("give --model, or --endpoint for a server that is already running")
        return
    if model is None and (ours := [name for name in _OURS if name in given]):
        raise UsageError(f"{_flags(ours)}: about an engine here, not the server; give --model or leave it out")
    if model is not None and options.baseline_endpoint is not None:
        raise UsageError(
            "--baseline-endpoint and --model are two baselines: give one of them (--tokenizer MODEL is enough for "
            "prompts as token ids)"
        )


def endpoint_sides(options: MeasuredEndpointOptions) -> dict[str, Side]:
    """The servers that were given, by name, the baseline first. Raises UsageError."""
    from eyas.bench.serving.servers import parse_side

    urls = {BASELINE: options.baseline_endpoint, ENDPOINT: options.endpoint}
    return {name: parse_side(url, name) for name, url in urls.items() if url is not None}


@contextmanager
def open_endpoints(
    options: MeasuredEndpointOptions, sides: Mapping[str, Side], params: SamplingParams, tokenizer: Any
) -> Iterator[dict[str, Endpoint]]:
    """Connect to the servers; with a tokenizer, those that take token ids are sent them. Raises EndpointError."""
    from eyas.bench.offline.external import Endpoint

    with ExitStack() as stack:
        servers: dict[str, Endpoint] = {}
        for name, side in sides.items():
            servers[name] = stack.enter_context(Endpoint(side, params, options.timeout, options.api_key, tokenizer))
            if tokenizer is not None and not servers[name].sends_ids:
                note(f"note: {side.url} takes no token ids: it is sent text, and applies its own chat template")
        yield servers


def _flags(names: Sequence[str]) -> str:
    return ", ".join(map(option_name, names))
