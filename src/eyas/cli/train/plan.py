"""`eyas plan`: the bytes, hours and speedup to expect, from a model's config alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from typer import Option

from eyas.cli.common.aliases import ModelArgument, in_options
from eyas.cli.common.build import hide_progress_bars
from eyas.cli.common.display import note, output
from eyas.cli.common.options import Final, States, Taps, parse_final, parse_taps
from eyas.errors import UsageError
from eyas.hub import find_config
from eyas.tables import show_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from eyas.plan.costs import ModelSize, StorageOption
    from eyas.plan.devices import Cluster, Machine
    from eyas.plan.drafters import DrafterPlan


@dataclass(frozen=True)
class PlannedTarget:
    """The target whose drafter is planned."""

    ALIASES: ClassVar[type[ModelArgument]] = ModelArgument
    model: Annotated[str, Option("--model", "--model-path", help="A directory, config.json or Hub id.")] = field(
        kw_only=True
    )


def _kinds(begun: str) -> list[str]:
    """The kinds that eyas plans itself and whose names begin so, for shell completion."""
    return [name for name in ("eagle3", "peagle", "dflash", "jetspec", "dspark", "dflash2") if name.startswith(begun)]


@dataclass(frozen=True)
class PlannedDrafterOptions:
    """The drafter that is planned; options that its kind doesn't have are refused."""

    kind: Annotated[
        str,
        Option(
            help="eagle3, peagle, or a block drafter: dflash, jetspec, dspark, dflash2, or another package's.",
            autocompletion=_kinds,
        ),
    ] = "eagle3"
    unroll: Annotated[int | None, Option(min=1, help="eagle3, peagle: unrolled steps (default: 7, 8).")] = None
    draft_vocab: Annotated[int | None, Option(min=1, help="eagle3, peagle: draft vocabulary (default: 32000).")] = None
    draft_layers: Annotated[int | None, Option(min=1, help="Block drafters, peagle: layers (default: 5, 4).")] = None
    block_size: Annotated[int | None, Option(min=2, help="Block drafters: block size (default: 8; dspark 7).")] = None
    anchors: Annotated[int | None, Option(min=1, help="Block drafters: maximum blocks per chat (default: 512).")] = None

    def check(self) -> None:
        """Refuse options of the other kinds. Raises UsageError."""
        is_block = self.kind not in ("eagle3", "peagle")
        unknown = ("unroll", "draft_vocab") if is_block else ("block_size", "anchors")
        for name in (*unknown, *(("draft_layers",) if self.kind == "eagle3" else ())):
            if getattr(self, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(
                    f"{option} has no meaning for a drafter of kind {self.kind}: leave it out, or change --kind"
                )


@dataclass(frozen=True)
class MachineOptions:
    """The hardware, and what it costs."""

    machine: Annotated[str | None, Option(help="A GPU such as H100 (default: this machine).")] = None
    tflops: Annotated[float | None, Option(min=0.001, help="Sustained bf16 TFLOP/s per device.")] = None
    bandwidth: Annotated[float | None, Option(min=0.001, help="Sustained memory GB/s per device.")] = None
    devices: Annotated[int | None, Option(min=1, help="Number of devices (default: 1).")] = None
    machines: Annotated[
        str | None,
        Option(metavar="[NODESx]GPUSxNAME", help="A cluster, such as 8xH100 or 4x8xH100: each step's hours and price."),
    ] = None
    price: Annotated[
        float | None, Option(min=0, help="With --machines: dollars per GPU hour (default: a rough figure).")
    ] = None

    def check(self) -> None:
        """Raise UsageError for options that contradict each other or would be ignored."""
        if self.machine is not None and self.tflops is not None and self.bandwidth is not None:
            raise UsageError("--machine and --tflops with --bandwidth both say how fast it is: give one of them")
        if self.machines is not None and (self.machine is not None or self.devices is not None):
            raise UsageError("--machines says which devices and how many: leave out --machine and --devices")
        if self.price is not None and self.machines is None:
            raise UsageError("--price would be ignored: it is the hourly price of a GPU of --machines")


def plan(
    target: PlannedTarget,
    samples: Annotated[int, Option(min=1, help="Chats.")],
    length: Annotated[int, Option(min=1, help="Tokens per chat.")],
    drafter: PlannedDrafterOptions,
    hardware: MachineOptions,
    taps: Taps = "auto",
    states: States = "fp8",
    final: Final = "answers",
    answer_share: Annotated[float, Option(min=0, max=1, help="Share of answer tokens.")] = 0.5,
    epochs: Annotated[int, Option(min=1, help="Training epochs over the chats.")] = 1,
    batch_size: Annotated[int, Option(min=1, help="Chats that a device answers together.")] = 32,
) -> None:
    """Estimate what a drafter costs in bytes and hours.

    Estimates the speedup, too. Only the model's config is read.

    Examples:
        eyas plan MODEL --samples 100000 --length 2048
        eyas plan MODEL --samples 100000 --length 2048 --kind dflash --machines 8xH100
    """
    model = target.model
    boundaries = parse_taps(taps)
    final_kind, top = parse_final(final)
    drafter.check()
    hardware.check()
    files = find_config(model)
    hide_progress_bars()
    from eyas.data.store.layout import ShardLayout
    from eyas.plan.costs import Workload, model_size, storage
    from eyas.plan.devices import cluster_of
    from eyas.plan.drafters import PlannedDrafter
    from eyas.targets.loading import read_config

    planned = PlannedDrafter(**vars(drafter))
    config = read_config(files)
    size = model_size(config)
    chosen = boundaries or planned.boundaries(config, size)
    if any(not 0 <= k <= size.layers + 1 for k in chosen):
        raise UsageError(f"--taps {taps}: the model's boundaries are 0 to {size.layers + 1}")
    if size.layers + 1 in chosen and final_kind != "all":
        raise UsageError(f"--taps {taps}: boundary {size.layers + 1} is the final state everywhere: use --final all")
    stored = tuple(k for k in chosen if k <= size.layers)
    layout = ShardLayout(hidden=size.hidden, vocab=size.vocab, taps=stored, states=states, final=final_kind, top=top)
    work = planned.work(size, Workload(samples, length, answer_share, epochs))
    cluster = None if hardware.machines is None else cluster_of(hardware.machines)
    on = _machine(hardware, None if cluster is None else cluster.device)
    count = cluster.devices if cluster is not None else hardware.devices or 1
    costs = planned.plan(size, len(chosen), work)
    console = output()
    console.print(f"{model}: {_about_size(size)}")
    console.print(in_options(planned.why(config, chosen, given=boundaries is not None)))
    ours = f"--states {states} --final {final}"
    stored_bytes = layout.data_bytes(work.size)
    show_table(console, _table(storage(layout, work), ours))
    console.print(f"your choice, {ours}: {_amount(stored_bytes)}, {stored_bytes / work.tokens:,.0f} bytes per token")
    hours = _show_hours(console, costs, on, count, batch_size, stored_bytes)
    if cluster is not None:
        show_table(console, _prices(cluster, hours, epochs, hardware.price))
    _show_memory(console, costs, count, config)
    _show_speedup(console, costs, on, model)
    console.print("Assumed:")
    for line in (
        f"{on.name}: {on.tflops:.3g} TFLOP/s and {on.bandwidth:.4g} GB/s sustained, x {count}",
        *([] if cluster is None else _about(cluster, hardware.price)),
        f"{answer_share:.0%} of the tokens are answers; every chat has {length} tokens",
        *costs.assumed(),
    ):
        console.print(f"  {line}")


def _about_size(size: ModelSize) -> str:
    """A model's size in numbers; for a recurrent one, also the size of a sequence's states."""
    text = f"{size.layers} layers, hidden {size.hidden}, {size.total / 1e9:.2f} B parameters"
    if not size.states:
        return text
    tokens = round(size.states / (4 * size.attending * size.key)) if size.attending else 0
    like = f", as much as the keys and values of {tokens:,} tokens" if tokens else ""
    return f"{text}; a sequence that decodes has recurrent states of {_amount(size.states)}{like}, twice in a pass"


class _Hours(NamedTuple):
    """Hours of regeneration, capture, and training from the store."""

    answering: float
    capturing: float
    training: float


def _show_hours(
    console: Console, costs: DrafterPlan, on: Machine, count: int, batch_size: int, stored_bytes: int
) -> _Hours:
    from eyas.plan.costs import capture_hours, regeneration_hours

    size, work = costs.target, costs.work
    hours = _Hours(
        regeneration_hours(size, work, on, count, batch_size),
        capture_hours(size, work, on, count),
        costs.training_hours(on, count),
    )
    console.print(
        f"regeneration, {batch_size} chats at a time on a device, without a drafter: {_hours(hours.answering)} (skip "
        "it only for chats that the target itself answered)"
    )
    console.print(f"capture: {_hours(hours.capturing)}, writing {stored_bytes / hours.capturing / 3.6e12:.3g} GB/s")
    console.print(f"training from the store, {work.epochs} x all {costs.what}: {_hours(hours.training)}")
    online = hours.training + work.epochs * hours.capturing
    console.print(f"training with the target in the loop: {_hours(online)}")
    return hours


def _show_memory(console: Console, costs: DrafterPlan, count: int, config: Any) -> None:
    from eyas.targets.architecture import context_limit
    from eyas.train.drafter.settings import CHATS, LENGTH

    longest = min(LENGTH, context_limit(config.get_text_config()) or LENGTH)
    memory = costs.training_memory(CHATS, longest)
    console.print(
        f"training memory of a device, micro-batches of {CHATS * longest:,} tokens: "
        f"{_amount(memory.from_store)} from the store, {_amount(memory.in_loop)} with the target in the loop"
        + (f", {_amount(memory.sharded(count))} with drafter.loop.parallel=fsdp" if count > 1 else "")
        + f"; {_amount(memory.activations)} of it shrinks with drafter.batch_tokens"
    )


def _show_speedup(console: Console, costs: DrafterPlan, on: Machine, model: str) -> None:
    from eyas.plan.costs import plain_speed

    gain = costs.speedup()
    speed = plain_speed(costs.target, on)
    if gain is None:
        console.print(
            f"no speedup is estimated, because no accept lengths are published; plain decoding {_rate(speed)} tokens/s"
        )
    else:
        console.print(
            f"expected speedup at batch 1: {gain.low:.1f}x to {gain.high:.1f}x, an estimate: plain decoding "
            f"{_rate(speed)} tokens/s, speculative {_rate(speed * gain.low)} to {_rate(speed * gain.high)}"
        )
    if gain is not None and gain.low < 1:
        console.print("below 1x drafting doesn't pay: eyas serve then decodes plainly; more chats help most")
    console.print(
        "free: --method ngram and --method suffix need no chats and no training, and are fast where answers repeat "
        f"what was said. Try them first: eyas bench methods {model} --prompt-file PROMPTS.jsonl"
    )


def _machine(options: MachineOptions, planned: Machine | None) -> Machine:
    """The device as planned or stated, else with published figures, else as measured here."""
    from eyas.plan.devices import Machine, known_machine, this_machine
    from eyas.runtime import busy, machine_load

    name = options.machine
    tflops = options.tflops
    bandwidth = options.bandwidth
    if planned is None and tflops is not None and bandwidth is not None:
        return Machine("as stated", tflops, bandwidth)
    found = planned or (this_machine() if name is None else known_machine(name))
    if planned is None and name is None and (warning := busy(machine_load())) is not None:
        note(f"warning: {warning}")
    return Machine(found.name, tflops or found.tflops, bandwidth or found.bandwidth)


def _table(rows: list[StorageOption], ours: str) -> Table:
    from rich.table import Table

    thousands = _thousands(rows[0].total)
    units = (f"{_PREFIXES[thousands]}B", f"{_PREFIXES[thousands]}iB")
    rows = [row._replace(name=in_options(row.name)) for row in rows]
    table = Table("layout", "bytes per token", *units, "of classic", box=None)
    for row in rows:
        name = f"{row.name} *" if row.name == ours else row.name
        amounts = (f"{row.total / 1000**thousands:.2f}", f"{row.total / 1024**thousands:.2f}")
        table.add_row(name, f"{row.per_token:,.0f}", *amounts, f"{row.of_classic:.2f}")
    return table


def _prices(cluster: Cluster, hours: _Hours, epochs: int, price: float | None) -> Table:
    """Hours, GPU hours and dollars of each step."""
    from rich.table import Table

    from eyas.plan.devices import PRICES

    paid = PRICES[cluster.device.name] if price is None else price
    steps = {
        "regeneration": hours.answering,
        "capture": hours.capturing,
        "training from the store": hours.training,
        "all three, one after the other": sum(hours),
        "training in the loop": hours.training + epochs * hours.capturing,
    }
    table = Table(f"on {cluster.described}", "time", "GPU hours", "dollars", box=None)
    for step, each in steps.items():
        table.add_row(step, _hours(each), f"{each * cluster.devices:,.1f}", f"{each * cluster.devices * paid:,.2f}")
    return table


def _about(cluster: Cluster, price: float | None) -> tuple[str, str, str]:
    """The assumptions behind a cluster's figures, in words."""
    from eyas.plan.devices import PRICES

    paid = f"${PRICES[cluster.device.name] if price is None else price:.2f} an hour per {cluster.device.name}"
    source = "--price" if price is not None else "a rough figure: give yours with --price"
    return (
        f"{paid}: {source}; disks and traffic aren't counted",
        f"{cluster.devices} GPUs do as much as one in {cluster.devices} times the hours: starting workers, loading the "
        "target on each, and exchanging gradients between machines aren't counted",
        "capture: eyas's own pass (torchrun, or --on ray), whose hours these are, or vLLM's servers (--engine vllm), "
        f"whose hidden-states connector writes the states; eyas reads and encodes them. {_connector()}",
    )


def _connector() -> str:
    """Which versions of vLLM have the connector, and whether the installed one does."""
    from eyas.interop.serving.hidden_states import SINCE, installed_connector

    found = installed_connector()
    if found is None:
        return f"vLLM has it since {SINCE}, and isn't installed here"
    return f"vLLM has it since {SINCE}; {found[0]}, installed here, {'does' if found[1] else 'does not'}"


_PREFIXES = {2: "M", 3: "G", 4: "T"}


def _thousands(count: int) -> int:
    """The power of 1000 used to show a number of bytes."""
    return 4 if count >= 1e12 else 3 if count >= 1e9 else 2


def _amount(count: int) -> str:
    thousands = _thousands(count)
    prefix = _PREFIXES[thousands]
    return f"{count / 1000**thousands:.2f} {prefix}B ({count / 1024**thousands:.2f} {prefix}iB)"


def _rate(speed: float) -> str:
    """Three significant digits, or all before the decimal point."""
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _hours(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 60:,.1f} minutes"
