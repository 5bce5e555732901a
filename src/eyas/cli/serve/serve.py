"""`eyas serve`: an OpenAI-compatible server, here (`elsewhere.py`: another engine's)."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol

from typer import Option

from eyas.cli.common.build import check_engine, drafter_advice, open_engine, tree_text
from eyas.cli.common.options import ChatTargetOptions, DraftOptions, TargetPanel
from eyas.cli.common.verb import INTERRUPTED, Feature, GivenOptions
from eyas.cli.serve.elsewhere import OWN_ENGINE, EnginePanel, refuse_engine_options, serve_elsewhere
from eyas.drafters.options import PREDICTION, needs_no_drafter
from eyas.errors import UsageError
from eyas.hub import find_target
from eyas.runtime import LOADING, keep_few_kernels, keep_freed_memory
from eyas.tree import is_auto

if TYPE_CHECKING:
    from eyas.engine import Engine
    from eyas.serve.context import ServeSettings
    from eyas.serve.learner import Learner

KEY_VARIABLE = "EYAS_API_KEY"


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, which requests it accepts, and what it logs."""

    PANEL: ClassVar[str] = "Server"
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 = all addresses.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 = any free one.")] = 8000
    api_key: Annotated[
        list[str], Option(help=f"A key that the API accepts; may be repeated (default: ${KEY_VARIABLE}, else no key).")
    ] = field(default_factory=list)
    served_model_name: Annotated[
        list[str], Option(help="The model's name in requests; may be repeated (default: --model, and its last part).")
    ] = field(default_factory=list)
    root_path: Annotated[str, Option(help="The path under which a proxy exposes the server, such as /eyas.")] = ""
    ssl_certfile: Annotated[
        Path | None,
        Option(
            "--ssl-certfile", "--ssl-cert-file",
            exists=True, dir_okay=False, help="Serve HTTPS with this certificate (PEM, followed by its chain).",
        ),
    ] = None  # fmt: skip
    ssl_keyfile: Annotated[
        Path | None,
        Option(
            "--ssl-keyfile", "--ssl-key-file",
            exists=True, dir_okay=False, help="The certificate's key (default: in the certificate's file).",
        ),
    ] = None  # fmt: skip
    seed: Annotated[
        int | None,
        Option("--seed", "--random-seed", min=0, help="Seed of requests that have none (default: random for each)."),
    ] = None
    allow_origin: Annotated[
        list[str], Option(help="A web origin that may call the API, * for any; may be repeated.")
    ] = field(default_factory=list)
    allow_host: Annotated[
        list[str],
        Option(help="A host name that clients may use, *.DOMAIN for all in a domain, * for any; may be repeated."),
    ] = field(default_factory=list)
    trusted_proxy: Annotated[
        list[str],
        Option(help="An address or network whose X-Forwarded-For is trusted, * for any; may be repeated."),
    ] = field(default_factory=list)
    max_connections: Annotated[
        int | None, Option(min=1, help="Maximum connections (default: what the open-file limit allows, at most 4096).")
    ] = None
    idle_seconds: Annotated[float, Option(min=0.001, help="Seconds to keep an idle connection open.")] = 5.0
    parse_special_tokens: Annotated[
        bool, Option("--parse-special-tokens", help="Read special tokens in messages as control tokens, not as text.")
    ] = False
    reasoning_parser: Annotated[
        str,
        Option(
            help="Whose marks separate thoughts from answers, such as qwen3 or mistral; auto = those that the model "
            "shows, none = thoughts stay in the text."
        ),
    ] = "auto"
    fim_tokens: Annotated[
        str | None,
        Option(
            help="The model's format for filling gaps, as '<PRE>{prefix}<SUF>{suffix}<MID>' (default: as its tokens "
            "show)."
        ),
    ] = None
    per_request_spec_decode_metrics: Annotated[
        Literal["none", "summary", "detailed"],
        Option(help="summary: add vLLM's metrics.speculative_decoding to responses; detailed: with every round."),
    ] = "none"
    otlp_traces_endpoint: Annotated[
        str | None,
        Option(help="Send OpenTelemetry spans to this URL (default: $OTEL_EXPORTER_OTLP_ENDPOINT, else none)."),
    ] = None
    request_seconds: Annotated[float | None, Option(min=0.001, help="Seconds a request may wait and run.")] = None
    drain_seconds: Annotated[float, Option(min=0, help="Seconds requests may keep running after SIGTERM.")] = 30.0
    max_body_bytes: Annotated[int, Option(min=1, help="Maximum size of a request's body.")] = 8 << 20
    log_interval: Annotated[float, Option(min=0, help="Seconds between lines of statistics; 0 = none.")] = 10.0
    log_format: Annotated[Literal["text", "json"], Option(help="json: one object per line.")] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Option(help="The least important lines to log.")
    ] = "info"


@dataclass(frozen=True)
class CapacityOptions:
    """How much may run, wait and be cached at the same time."""

    PANEL: ClassVar[str] = "Capacity"
    max_running: Annotated[
        int,
        Option(
            "--max-running", "--max-num-seqs", "--max-running-requests", "--parallel",
            min=1, help="Sequences decoded together.",
        ),
    ] = 64  # fmt: skip
    max_waiting: Annotated[
        int,
        Option("--max-waiting", "--max-queued-requests", min=1, help="Sequences that may wait; more get 429."),
    ] = 512
    max_model_len: Annotated[
        int | None,
        Option(
            "--max-model-len", "--context-length",
            min=2, help="Maximum tokens of prompt and answer together (default: the model's context).",
        ),
    ] = None  # fmt: skip
    max_cached_tokens: Annotated[
        int | None,
        Option(
            "--max-cached-tokens", "--max-total-tokens",
            min=64, help="Maximum tokens in the KV cache (default: what memory allows).",
        ),
    ] = None  # fmt: skip
    prefix_tokens: Annotated[int, Option(min=0, help="Maximum tokens kept for shared prefixes.")] = 16384
    prefill_chunk: Annotated[
        int,
        Option("--prefill-chunk", "--chunked-prefill-size", min=1, help="Maximum prompt tokens read between rounds."),
    ] = 512


class LearnGroup(Protocol):
    """A group of options, a dataclass, that makes a server learn; the feature `learn` is its class."""

    def check(self, draft: DraftOptions) -> None:
        """Raise UsageError for options that do nothing or contradict each other, before heavy imports."""

    def opened(self) -> Learner | None:
        """The part of the server that learns; None if it doesn't learn."""


def serve(
    target: ChatTargetOptions,
    draft: DraftOptions,
    server: ServerOptions,
    capacity: CapacityOptions,
    learns: Annotated[LearnGroup | None, Feature("learn")],
    other: EnginePanel,
    given: GivenOptions,
) -> int:
    """Serve the OpenAI API, here or with another engine (--engine).

    Open the server's address in a browser for a page to try it. SIGTERM or Ctrl-C stops it after the running requests
    have been answered; a second one stops it immediately.

    Examples:
        eyas serve MODEL --draft-model DRAFTER
        eyas serve FILE.gguf --method ngram --port 8080
    """
    if other.engine != OWN_ENGINE:
        every = vars(server) | vars(capacity) | vars(target) | vars(draft) | (vars(learns) if learns else {})
        requested = {name: value for name, value in every.items() if name in given or name in ("host", "port")}
        key = None if server.api_key else os.environ.get(KEY_VARIABLE)
        return serve_elsewhere(other, target, draft, requested, (KEY_VARIABLE, key) if key else None)
    refuse_engine_options(other)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # nothing to finish until the server takes over
    adds_copies = draft.draft_model is not None and draft.method is None and _takes_defaults(draft)
    draft = _with_defaults(draft)
    if learns is not None:
        learns.check(draft)
    tree = check_engine(target, draft)  # bad options are reported before anything is imported or opened
    keep_freed_memory()  # before threads start: the engine gets its own
    keep_few_kernels()
    sys.setswitchinterval(0.0001)  # the engine needs the GIL after every kernel, even while answers are being sent
    try:
        from eyas.serve.app import ENDPOINTS, create_app
        from eyas.serve.observe.logs import Logs, log_listening, open_stderr
        from eyas.serve.observe.metrics import Metrics
        from eyas.serve.run import bind, run_server, tls_context
    except ImportError as error:
        raise UsageError(f"eyas serve needs the extra: pip install 'eyas[serve]' ({error.name} is missing)") from error
    from eyas.serve.engine_thread import EngineThread
    from eyas.serve.observe.observer import Observers
    from eyas.serve.observe.traces import traces_to
    from eyas.serve.playground.page import Gauges

    learner = None if learns is None else learns.opened()
    open_stderr(server.log_format, server.log_level)
    settings = _settings(target, server, capacity)
    tls_context(settings)
    gauges = Gauges()
    metrics = Metrics(settings.model_names[0], ENDPOINTS)
    logs = Logs(server.log_interval)
    traces = traces_to(server.otlp_traces_endpoint, settings.model_names[0])
    observer = Observers([each for each in (metrics, logs, gauges, learner, traces) if each is not None])
    listener = bind(server.host, server.port, settings.write_seconds)
    if learner is not None:
        metrics.add(learner.series(settings.model_names[0]))
    thread = EngineThread(
        lambda: _load(target, draft, capacity, learner, adds_copies),
        observer=observer,
        backlog=settings.backlog_chunks,
    )
    host, port = listener.getsockname()[:2]
    loading = "loading" + (", then measuring costs for --tree auto" if is_auto(tree) else "")
    scheme = "http" if server.ssl_certfile is None else "https"
    log_listening(settings.model_names[0], f"{scheme}://{host}:{port}{settings.root_path}", loading)
    code = 0
    try:
        app = create_app(thread, settings, observer, gauges, metrics, None if learner is None else learner.overview)
        run_server(app, thread, settings, listener)
    except KeyboardInterrupt:  # before the server handles it
        code = INTERRUPTED
    finally:
        logs.close()
        if traces is not None:
            traces.close()
        if learner is not None:
            learner.close()
    if thread.alive:  # shutting the libraries down under it would abort the process
        os._exit(code)
    return code


def _with_defaults(draft: DraftOptions) -> DraftOptions:
    """With a drafter and no tree, `--tree auto`: trees sized by measured cost. Without one, see `PREDICTION`."""
    if draft == DraftOptions():
        return replace(draft, method=PREDICTION, tree="auto")
    drafts = draft.draft_model is not None or needs_no_drafter(draft.method)
    return replace(draft, tree="auto") if drafts and _takes_defaults(draft) else draft


def _takes_defaults(draft: DraftOptions) -> bool:
    """Whether the trees are for the server to choose."""
    return draft.tree is None and draft.num_speculative_tokens is None


def _load(
    target: TargetPanel,
    draft: DraftOptions,
    capacity: CapacityOptions,
    learner: Learner | None = None,
    adds_copies: bool = False,
) -> Engine:
    """Load the engine. `adds_copies`: on a CPU a draft model that doesn't learn is combined with suffix decoding."""
    from eyas.serve.observe.logs import log_loaded
    from eyas.targets.loading import resolve_device
    from eyas.types import Limits

    # what people edit and complete is mostly copied
    if adds_copies and learner is None and resolve_device(target.device).type == "cpu":
        draft = replace(draft, method="+suffix")
    _check_context(target.model, capacity.max_model_len)
    limits = Limits(**{name: value for name, value in vars(capacity).items() if name != "max_model_len"})
    began = time.monotonic()
    around = None if learner is None or draft.drafter is None else learner.wrap(draft.drafter, target.model)
    engine = open_engine(target, draft, limits=limits, logged=True, around=around)
    if draft.method == PREDICTION and (told := drafter_advice(target.model)) is not None:
        LOADING.info(told)
    if learner is not None:
        assert engine.speculation is not None
        learner.start(engine.speculation.drafter)
    _, plus, lookup = (draft.method or "").partition("+")
    drafter = draft.method if draft.draft_model is None else f"{draft.draft_model}{plus}{lookup}"
    log_loaded(engine, drafter, tree_text(draft), time.monotonic() - began)
    # all that exists now stays: else a request of a million small lists makes the collector go through all of it
    gc.collect()
    gc.freeze()
    return engine


def _check_context(model: str, max_model_len: int | None) -> None:
    """Raise UsageError if `max_model_len` exceeds the model's context; only its configuration is read."""
    if max_model_len is None:
        return
    from eyas.targets.architecture import context_limit
    from eyas.targets.loading import read_config

    limit = context_limit(read_config(find_target(model)).get_text_config())
    if limit is not None and max_model_len > limit:
        raise UsageError(
            f"--max-model-len {max_model_len} is more than this model's context of {limit} tokens: "
            f"write at most {limit}, or leave it out"
        )


_PASSED_THROUGH = (
    "host max_body_bytes request_seconds drain_seconds parse_special_tokens max_connections idle_seconds ssl_certfile "
    "ssl_keyfile seed fim_tokens reasoning_parser per_request_spec_decode_metrics".split()
)
"""Options that become settings of the server unchanged."""


def _settings(target: TargetPanel, server: ServerOptions, capacity: CapacityOptions) -> ServeSettings:
    from pydantic import SecretStr

    from eyas.serve.context import ServeSettings

    path = Path(target.model)
    return ServeSettings(
        model_names=tuple(server.served_model_name) or tuple(dict.fromkeys((target.model, path.name or target.model))),
        api_keys=tuple(SecretStr(key) for key in server.api_key or [os.environ.get(KEY_VARIABLE, "")] if key),
        max_model_len=capacity.max_model_len,
        allowed_origins=tuple(server.allow_origin),
        allowed_hosts=tuple(map(_checked_host, server.allow_host)),
        trusted_proxies=tuple(map(_checked_proxy, server.trusted_proxy)),
        root_path=_checked_root_path(server.root_path),
        **{name: getattr(server, name) for name in _PASSED_THROUGH},
    )


def _checked_host(name: str) -> str:
    """The name, which may be `*.DOMAIN` or `*`. Raises UsageError for stars elsewhere, which would match nothing."""
    if name != "*" and (not name or "*" in name.removeprefix("*.") or name == "*."):
        raise UsageError(f"--allow-host {name}: write NAME, *.DOMAIN for all names in a domain, or * for any")
    return name


def _checked_proxy(address: str) -> str:
    """The address or network. Raises UsageError for anything else but `*`."""
    try:
        return address if address == "*" else str(ip_network(address))
    except ValueError as error:
        raise UsageError(f"--trusted-proxy {address}: write an address, a network such as 10.0.0.0/8, or *") from error


def _checked_root_path(path: str) -> str:
    """The path without trailing slashes. Raises UsageError for text that can't be the beginning of a URL's path."""
    stripped = path.rstrip("/")
    if stripped and (not stripped.startswith("/") or set(stripped) & set(" ?#%")):
        raise UsageError(f"--root-path {path}: write the beginning of a URL's path, such as /eyas")
    return stripped
