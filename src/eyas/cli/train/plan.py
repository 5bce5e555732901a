"""`eyas plan`: the bytes, hours and speedup to expect, from a model's config alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from typer import Option

from eyas.assets import named_target
from eyas.cli.common.aliases import ModelArgument
from eyas.cli.common.build import quiet
from eyas.cli.common.display import output
from eyas.cli.common.options import Final, States, Taps, parse_final, parse_taps
from eyas.errors import UsageError
from eyas.hub import find_model

if TYPE_CHECKING:
    from rich.table import Table

    from eyas.data.plan import Machine, StorageOption


@dataclass(frozen=True)
class PlannedTarget:
    """The target whose drafter is planned."""

    ALIASES: ClassVar = ModelArgument
    model: Annotated[str, Option("--model", "--model-path", help="A directory, config.json or Hub id.")] = field(
        kw_only=True
    )


def plan(
    target: PlannedTarget,
    samples: Annotated[int, Option(min=1, help="Chats.")],
    length: Annotated[int, Option(min=1, help="Tokens of a chat.")],
    taps: Taps = "auto",
    states: States = "fp8",
    final: Final = "answers",
    answer_share: Annotated[float, Option(min=0, max=1, help="Answer tokens, of all.")] = 0.5,
    epochs: Annotated[int, Option(min=1, help="Times training goes over the chats.")] = 1,
    unroll: Annotated[int, Option(min=1, help="Steps of the training-time test.")] = 7,
    draft_vocab: Annotated[int, Option(min=1, help="Tokens the drafter knows.")] = 32000,
    machine: Annotated[str | None, Option(help="A GPU such as H100 (default: this machine).")] = None,
    tflops: Annotated[float | None, Option(min=0.001, help="Sustained bf16 TFLOP/s of a device.")] = None,
    bandwidth: Annotated[float | None, Option(min=0.001, help="Sustained memory GB/s of a device.")] = None,
    devices: Annotated[int, Option(min=1, help="How many such devices.")] = 1,
    batch_size: Annotated[int, Option(min=1, help="Chats that a device answers together.")] = 32,
) -> None:
    """Estimate what a drafter costs in bytes and hours.

    Says what speedup to expect, too. Only the model's config is read.
    """
    model, boundaries = target.model, parse_taps(taps)
    kind, top = parse_final(final)
    if machine is not None and tflops is not None and bandwidth is not None:
        raise UsageError("--machine and --tflops with --bandwidth both say how fast it is: give one of them")
    find_model(named_target(model))
    quiet()
    from eyas.data import plan as plans
    from eyas.data.plan import model_size
    from eyas.data.store.layout import ShardLayout
    from eyas.targets.architecture import context_limit
    from eyas.targets.loading import read_config
    from eyas.targets.taps import choose_taps, why_taps
    from eyas.train.drafter.resolve import CHATS, LENGTH

    config = read_config(model)
    size = model_size(config)
    chosen = boundaries or choose_taps(config)
    if any(not 0 <= k <= size.layers + 1 for k in chosen):
        raise UsageError(f"--taps {taps}: the model's boundaries are 0 to {size.layers + 1}")
    if size.layers + 1 in chosen and kind != "all":
        raise UsageError(f"--taps {taps}: boundary {size.layers + 1} is the final state everywhere: use --final all")
    stored = tuple(k for k in chosen if k <= size.layers)
    layout = ShardLayout(hidden=size.hidden, vocab=size.vocab, taps=stored, states=states, final=kind, top=top)
    draft_vocab = min(draft_vocab, size.vocab)
    work = plans.Workload(samples, length, answer_share, epochs, unroll, draft_vocab)
    on = _machine(machine, tflops, bandwidth)
    console = output()
    console.print(f"{model}: {size.layers} layers, hidden {size.hidden}, {size.total / 1e9:.2f} B parameters")
    console.print(why_taps(config, chosen))
    ours = f"--states {states} --final {final}"
    console.print(_table(plans.storage(layout, work), ours))
    chosen_bytes = layout.data_bytes(work.size)
    console.print(f"your choice, {ours}: {_amount(chosen_bytes)}, {chosen_bytes / work.tokens:,.0f} bytes a token")

    capturing = plans.capture_hours(size, work, on, devices)
    training = plans.training_hours(size, len(chosen), work, on, devices)
    answering = plans.regeneration_hours(size, work, on, devices, batch_size)
    console.print(
        f"regeneration, {batch_size} chats at a time on a device, without a drafter: {_hours(answering)} (skip it only "
        "for chats that the target itself answered)"
    )
    console.print(f"capture: {_hours(capturing)}, writing {chosen_bytes / capturing / 3.6e12:.3g} GB/s")
    console.print(f"training from the store, {epochs} x all tokens, {unroll} steps: {_hours(training)}")
    console.print(f"training with the target in the loop: {_hours(training + epochs * capturing)}")
    rows = CHATS * min(LENGTH, context_limit(config.get_text_config()) or LENGTH)
    memory = plans.training_memory(size, len(chosen), work, rows)
    console.print(
        f"training memory of a device, micro-batches of {rows:,} tokens: {_amount(memory.from_store)} from the store, "
        f"{_amount(memory.in_loop)} with the target in the loop; {_amount(memory.activations)} of it shrink with "
        "drafter.batch_tokens"
    )
    gain = plans.speedup(size, len(chosen), draft_vocab)
    speed = plans.plain_speed(size, on)
    console.print(
        f"expected speedup at batch 1: {gain.low:.1f}x to {gain.high:.1f}x, an estimate: "
        f"plain decoding {_rate(speed)} tokens/s, speculative {_rate(speed * gain.low)} to {_rate(speed * gain.high)}"
    )
    console.print("Assumed:")
    for line in (
        f"{on.name}: {on.tflops:.3g} TFLOP/s and {on.bandwidth:.4g} GB/s sustained, x {devices}",
        f"{answer_share:.0%} of the tokens are answers; every chat has {length} tokens",
        f"an EAGLE-3 drafter of the target's widths, {draft_vocab} draft tokens: a pass costs {gain.draft_cost:.1%} of "
        f"the target's, {plans.DRAFT_PASSES} a round",
        f"accept length {plans.ACCEPT_LENGTHS[0]} to {plans.ACCEPT_LENGTHS[1]}: what EAGLE-3's authors report for "
        f"Llama-3.1-8B; {plans.EFFICIENCIES[0]} to {plans.EFFICIENCIES[1]} of it kept as speedup, as others measured",
    ):
        console.print(f"  {line}")


def _machine(name: str | None, tflops: float | None, bandwidth: float | None) -> Machine:
    from eyas.data.plan import Machine, known_machine, this_machine

    if tflops is not None and bandwidth is not None:
        return Machine("as stated", tflops, bandwidth)
    found = this_machine() if name is None else known_machine(name)
    return Machine(found.name, tflops or found.tflops, bandwidth or found.bandwidth)


def _table(rows: list[StorageOption], ours: str) -> Table:
    from rich.table import Table

    thousands = _thousands(rows[0].total)
    units = (f"{_PREFIXES[thousands]}B", f"{_PREFIXES[thousands]}iB")
    table = Table("layout", "bytes a token", *units, "of classic", box=None)
    for row in rows:
        name = f"{row.name} *" if row.name == ours else row.name
        amounts = (f"{row.total / 1000**thousands:.2f}", f"{row.total / 1024**thousands:.2f}")
        table.add_row(name, f"{row.per_token:,.0f}", *amounts, f"{row.of_classic:.2f}")
    return table


_PREFIXES = {2: "M", 3: "G", 4: "T"}


def _thousands(count: int) -> int:
    """The power of 1000 in which bytes are shown."""
    return 4 if count >= 1e12 else 3 if count >= 1e9 else 2


def _amount(count: int) -> str:
    thousands = _thousands(count)
    prefix = _PREFIXES[thousands]
    return f"{count / 1000**thousands:.2f} {prefix}B ({count / 1024**thousands:.2f} {prefix}iB)"


def _rate(speed: float) -> str:
    """Three digits, or all before the point."""
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _hours(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 60:,.1f} minutes"
