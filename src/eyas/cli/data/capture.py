"""`eyas data capture`: the target's hidden states for all chats, stored once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from typer import Option

from eyas.cli.common.aliases import TARGET_HELP, option_name
from eyas.cli.common.cluster import ClusterOptions
from eyas.cli.common.display import counting, next_step, note
from eyas.cli.common.options import (
    Device,
    Dtype,
    EngineArguments,
    EngineCommand,
    Final,
    States,
    Taps,
    parse_final,
    parse_taps,
    readable,
)
from eyas.cli.common.verb import note_if_interrupted
from eyas.cli.data.other_engine import other_engine
from eyas.errors import UsageError
from eyas.hub import find_files
from eyas.options import TargetOptions
from eyas.urls import AnyPath, UrlPath, located

if TYPE_CHECKING:
    from eyas.data.capture.capture import Capture, CaptureConfig
    from eyas.data.other_engine import OtherEngine, StateServer
    from eyas.data.store.manifest import Manifest
    from eyas.work import Cluster, MakeWorker


def capture(
    cluster: ClusterOptions,
    engines: StateEngineOptions,
    model: Annotated[str, Option(help=f"The target: {TARGET_HELP}.")],
    chats: Annotated[Path, Option(help="A chat folder (`eyas data prepare`) or a .jsonl file of chats; or its URL.")],
    output: Annotated[Path, Option("--output", "-o", file_okay=False, help="The store's folder, or its URL.")],
    taps: Taps = "auto",
    states: States = "fp8",
    final: Final = "answers",
    max_length: Annotated[
        int | None,
        Option(min=3, help="Cut rows to this many tokens (default: whole chats, up to the target's context)."),
    ] = None,
    batch_tokens: Annotated[
        int | None,
        Option(min=1, help="Tokens per target pass, padding included (default: 8192; 1024 on a CPU)."),
    ] = None,
    shard_mib: Annotated[
        float | None, Option(min=0.001, help="Maximum MiB per shard (default: a sixteenth of the data, at most 512).")
    ] = None,
    held_out_share: Annotated[float, Option(min=0, max=1, help="Share of a .jsonl file for validation.")] = 0.02,
    dtype: Annotated[Dtype, Option(help="The target's dtype; auto: the checkpoint's.")] = "auto",
    device: Device = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Report bytes and duration, and stop.")] = False,
) -> None:
    """Run the target over all chats and store its hidden states.

    If interrupted, the same command resumes. With `torchrun --nproc-per-node N -m eyas data capture ...` N processes
    share the work; with --on ray, the machines of a cluster do. With --engine vllm, vLLM servers run the target;
    --device is then where eyas normalizes and encodes the states they write (default: cpu).

    Examples:
        eyas data capture --model MODEL --chats ANSWERS --output STORE
        eyas data capture --model MODEL --chats ANSWERS --output STORE --dry-run
    """
    store = located(output)
    shared = cluster.check()
    if shared and isinstance(store, UrlPath) and store.one_process:
        raise UsageError(f"{store} is seen by one process alone: give a folder or a URL that all machines see")
    chats = readable(chats)
    if shared and dry_run:
        raise UsageError("--dry-run measures this machine: leave out --on")
    kind, top = parse_final(final)
    boundaries = parse_taps(taps)
    TargetOptions(model, device=device).check()
    engines.check(model, shared=shared)
    elsewhere = engines.engine != "eyas"
    if elsewhere:
        engines.check_target(model)
    from eyas.data.capture.capture import CaptureConfig

    if batch_tokens is None and (shared or elsewhere):
        batch_tokens = 8192  # this process's device doesn't compute
    shard_bytes = None if shard_mib is None else int(shard_mib * 2**20)
    config = CaptureConfig(
        taps=boundaries,
        states=states,
        final=kind,
        top=top,
        batch_tokens=batch_tokens,
        shard_bytes=shard_bytes,
        engine=engines.engine,
    )
    if shared:
        from eyas.data.capture.workers import CaptureWorkerMaker

        with cluster.connected() as machines:
            # on this process's CPU: the workers compute
            prepared = _prepare(model, chats, store, config, max_length, held_out_share, dtype, "cpu")
            _announce(prepared)
            folder = prepared.folder.absolute()
            settings = prepared.settings
            make: MakeWorker = CaptureWorkerMaker(model, dtype, device, folder, settings)
            if elsewhere:
                make = engines.server(model, device, prepared).worker(folder, settings)
            _run_on(machines, cluster.workers, model, prepared, make)
        return
    prepared = _prepare(model, chats, store, config, max_length, held_out_share, dtype, "cpu" if elsewhere else device)
    first = _process()[0] == 0
    if first:
        _announce(prepared)
    server = engines.server(model, device, prepared) if elsewhere else None
    with ExitStack() as stack:
        if dry_run:
            prepared.check_disk()
        else:
            stack.enter_context(note_if_interrupted(f"finished shards are kept in {store}; the one in progress is not"))
            stack.enter_context(prepared.begun())
        if server is not None and prepared.own_shards():
            prepared.source = connected = stack.enter_context(server.states(prepared.settings))
            prepared.engine_version = connected.version()
        if first and prepared.own_shards():
            note(_duration(prepared))
        if not dry_run:
            _run(model, prepared, first, prepared.run)


def _run_on(cluster: Cluster, workers: int | None, model: str, prepared: Capture, make: MakeWorker) -> None:
    from eyas.data.capture.workers import capture_on

    with (
        note_if_interrupted(f"finished shards are kept in {prepared.folder}; those in progress are not"),
        prepared.begun(),
    ):
        _run(model, prepared, True, lambda advance: capture_on(cluster, prepared, make, workers, advance))


def _run(model: str, prepared: Capture, shown: bool, make: Callable[[Callable[[int], None]], Manifest | None]) -> None:
    """Call `make` for the missing shards, with a function that counts their tokens, and report progress."""
    total = sum(plan.size.tokens for plan in prepared.own_shards())
    done = 0
    began = time.monotonic()
    with counting(hidden=not shown) as show:

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            show("tokens", done, total, f", {done / (time.monotonic() - began):,.0f} tokens/s")

        manifest = make(advance)
    if manifest is not None:
        note(f"{prepared.folder} is complete: {len(manifest.shards)} shards, {prepared.total_bytes:,} bytes")
        run = prepared.folder.parent / "eagle3" if isinstance(prepared.folder, Path) else "eagle3"
        settings = {"target": model, "store": prepared.folder, "output": run}
        next_step("train", "eagle3", *(f"drafter.{name}={value}" for name, value in settings.items()))
    elif shown:
        note(f"this process is done; the manifest is written once all {len(prepared.plans)} shards are there")


def _announce(prepared: Capture) -> None:
    from eyas.data.store import classic_bytes

    settings = prepared.settings
    sizes = settings.splits.values()
    tokens = sum(split.tokens for split in sizes)
    for reason in prepared.reasons[:5]:
        note(f"dropped: {reason}")
    for name, split in settings.splits.items():
        note(
            f"{name}: {split.rows:,} rows, {split.tokens:,} tokens, {split.taught:,} taught, {split.dropped:,} dropped"
        )
    if prepared.cut:
        note(f"{prepared.cut:,} chats have more than {settings.longest:,} tokens (--max-length): the rest isn't stored")
    note(prepared.why_taps)
    total = prepared.total_bytes
    classic = classic_bytes(tokens, settings.layout.hidden)
    note(
        f"{total:,} bytes in {len(prepared.plans)} shards, {total / tokens:,.0f} a token: "
        f"{total / classic:.2f} of the classic layout"
    )


def _duration(prepared: Capture) -> str:
    speed = prepared.speed()
    left = prepared.own_shards()
    seconds = sum(plan.size.tokens for plan in left) / speed
    done = "" if len(left) == len(prepared.plans) else f" for {len(left)} of {len(prepared.plans)} shards"
    return f"about {seconds / 60:,.1f} minutes{done} at {speed:,.0f} tokens/s, writing not counted"


def _prepare(
    model: str,
    chats: Path,
    output: AnyPath,
    config: CaptureConfig,
    longest: int | None,
    share: float,
    dtype: str,
    device: str | None,
) -> Capture:
    import torch

    from eyas.cli.common.build import hide_progress_bars
    from eyas.data.capture.capture import Capture
    from eyas.data.capture.shard import read_rows
    from eyas.targets import load_target, load_tokenizer
    from eyas.targets.loading import resolve_dtype

    hide_progress_bars()
    rank, world, local = _process()
    on = f"cuda:{local}" if device is None and world > 1 and torch.cuda.is_available() else device
    # this process's device, which may be slow in the checkpoint's dtype, isn't the other engine's
    given = dtype if config.engine == "eyas" else resolve_dtype(dtype, model, torch.device("cuda"))
    target = load_target(model, dtype=given, device=on)
    found = read_rows(load_tokenizer(model), chats, share, longest, target.vocab_size, target.max_length)
    name = Path(model).name if Path(model).exists() else model
    return Capture(target, found, config, output, name=name, chats=chats.name, rank=rank, world=world)


def _process() -> tuple[int, int, int]:
    """(rank, number of processes, rank on this machine), from the variables that torchrun sets."""
    rank, world, local = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return rank, max(1, world), local


@dataclass(frozen=True)
class StateEngineOptions:
    """Which engine runs the target, and how another one is started."""

    PANEL: ClassVar[str] = "Another engine"
    engine: Annotated[
        Literal["eyas", "vllm"],
        Option(help="vllm: a vLLM server that writes its hidden states; with --on, one per worker."),
    ] = "eyas"
    engine_command: EngineCommand = None
    engine_option: EngineArguments = field(default_factory=list)

    def check(self, model: str, *, shared: bool) -> None:
        """Raise UsageError for options that would be ignored, or if vLLM isn't here or lacks the connector.

        `shared`: with --on, when vLLM may be on other machines only.
        """
        from eyas.interop.serving.hidden_states import connector_refusal, installed_connector

        if self.engine == "eyas":
            given = [name for name in ("engine_command", "engine_option") if getattr(self, name)]
            if given:
                raise UsageError(f"{', '.join(map(option_name, given))} would be ignored: give --engine vllm, too")
            return
        if "WORLD_SIZE" in os.environ:
            raise UsageError("--engine vllm takes the GPUs for one server: leave out torchrun, or use --on ray")
        if shared:
            return
        self.program.check(model)
        found = installed_connector()
        if self.engine_command is None and found is not None and not found[1]:
            raise UsageError(connector_refusal(found[0]))

    def check_target(self, model: str) -> None:
        """Raise UsageError for a target that the server can't read."""
        adapter = find_files(model).adapter
        if adapter is not None:
            raise UsageError(
                f"--engine vllm runs whole models, but there is a {adapter}: merge it, and give the result"
            )

    @property
    def program(self) -> OtherEngine:
        """The other engine's program: its name, its command if one was given, and the options added to it."""
        return other_engine(self.engine, self.engine_command, self.engine_option)

    def server(self, model: str, device: str | None, prepared: Capture) -> StateServer:
        """The server for a capture. Raises UsageError for rows that don't fit its context."""
        longest = max(len(row.tokens) for rows in prepared.rows.values() for row in rows)
        context = prepared.context
        if context is not None and longest >= context:
            raise UsageError(
                f"a row has {longest:,} tokens, as many as the target's context, and vLLM adds one: give --max-length "
                f"{context - 1}, or leave out --engine"
            )
        return self.program.state_server(model, device or "cpu", longest)
