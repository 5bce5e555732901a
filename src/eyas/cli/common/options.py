"""Every option that more than one verb takes, declared once: single options and, as dataclasses, groups of them.

Alternative names of an option come from vLLM, SGLang or llama.cpp; `docs/options.md` lists all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from typer import Option

from eyas import options
from eyas.cli.common.aliases import DRAFTER_OR_AUTO_HELP, ModelArgument, SpeculationAliases
from eyas.drafters.options import DrafterOptions
from eyas.errors import UsageError
from eyas.urls import fetch

if TYPE_CHECKING:
    from eyas.data.store.layout import FinalKind
    from eyas.types import Limits
    from eyas.verify import WalkRule

_PROMPT_FILE = Option(
    exists=True,
    dir_okay=False,
    help="JSON Lines or Parquet; a row has prompt (with raw: true no chat template), messages, turns or token_ids.",
)
PromptFile = Annotated[Path, _PROMPT_FILE]
MaybePromptFile = Annotated[Path | None, _PROMPT_FILE]
PromptFiles = Annotated[
    list[Path], Option(exists=True, dir_okay=False, help="JSON Lines or Parquet as for eyas generate; may be repeated.")
]
Limit = Annotated[int | None, Option(min=1, help="Take only the first N rows of a file.")]
BatchSize = Annotated[int, Option(min=1, help="Sequences decoded together.")]
MaxNewTokens = Annotated[int, Option(min=1, help="Maximum tokens per answer.")]
Trees = Annotated[
    list[str],
    Option(
        "--tree",
        help="chain:K, static:NAME, dynamic:DEPTH,TOPK,NODES, shared:DEPTH,WIDTH,BUDGET or auto; may be repeated.",
    ),
]
Coupled = Annotated[
    bool | None, Option("--coupled/--no-coupled", help="Rank draft tokens with the sampler's own noise (default: yes).")
]
EngineCommand = Annotated[
    str | None, Option(help="The engine's program, such as ENV/bin/vllm serve (default: the installed one).")
]
EngineArguments = Annotated[
    list[str], Option(help="An option to append to its command, such as --enforce-eager; may be repeated.")
]


def recipe_names(folder: str = "") -> Callable[[str], list[str]]:
    """Shell completion for the names of recipes; if no name matches, the shell offers files."""

    def names(incomplete: str) -> list[str]:
        from eyas.recipes import known_recipes

        return [name for name in known_recipes(folder) if name.startswith(incomplete)]

    return names


def as_arguments(group: Any) -> list[str]:
    """The options of a group that aren't at their defaults, as words of a command line; without the model."""
    words = []
    for each in fields(group):
        value = getattr(group, each.name)
        default = each.default
        if default is MISSING:
            default = None if each.default_factory is MISSING else each.default_factory()
        if value == default or each.name == "model":
            continue
        name = each.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            for one in value if isinstance(value, list) else [value]:
                words += [f"--{name}", str(one)]
    return words


Json = Annotated[bool, Option("--json", help="Write JSON to standard output.", rich_help_panel="Output")]


Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Annotated[str | None, Option(help="cpu, cuda or cuda:N (default: cuda if available).")]


@dataclass(frozen=True)
class RuntimeOptions:
    """Precision, device and kernels of the target."""

    PANEL: ClassVar[str] = "Target"
    dtype: Annotated[Dtype, Option(help="auto: the checkpoint's own.")] = "auto"
    device: Device = None
    attention: Annotated[
        Literal["sdpa", "eager"] | None, Option(help="Attention kernels; flash kernels can't mask a tree.")
    ] = None
    compile: Annotated[bool, Option("--compile", help="Compile the target with torch.compile.")] = False
    enforce_eager: Annotated[
        bool, Option("--enforce-eager", "--disable-cuda-graph", help="Run a GPU's passes without CUDA graphs.")
    ] = False
    quantize: Annotated[
        Literal["int8", "int4"] | None,
        Option(help="Quantize the target's weights to 8 or 4 bits, on a CPU or with --kernels."),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "int8"], Option(help="int8: a KV cache in 8 bits, on a CPU; auto: in the model's dtype.")
    ] = "auto"
    keep_panels: Annotated[
        bool,
        Option("--keep-panels", help="Cache 4-bit and 8-bit weights in this machine's layout; later starts map them."),
    ] = False
    kernels: Annotated[
        Literal["triton"] | None,
        Option(help="triton: a GPU's passes by eyas's own kernels, whose bits don't depend on drafts and batches."),
    ] = None

    def of(self, model: str) -> options.TargetOptions:
        """The options of the target `model`."""
        return options.TargetOptions(
            model,
            self.dtype,
            self.device,
            self.attention,
            self.compile,
            self.enforce_eager,
            self.quantize,
            kv_cache_dtype=self.kv_cache_dtype,
            keep_panels=self.keep_panels,
            kernels=self.kernels,
        )


@dataclass(frozen=True)
class TargetPanel(RuntimeOptions):
    """Which target, and how it is run."""

    ALIASES: ClassVar[type[ModelArgument]] = ModelArgument
    model: Annotated[str, Option("--model", "--model-path", help="The same as MODEL.")] = field(kw_only=True)


@dataclass(frozen=True)
class ChatTargetOptions(TargetPanel):
    """The target of verbs that answer chats, and how it reads them."""

    chat_template: Annotated[
        Path | None,
        Option(
            "--chat-template", "--chat-template-file",
            exists=True, dir_okay=False, help="A Jinja file to use instead of the model's own chat template.",
        ),
    ] = None  # fmt: skip

    def of(self, model: str) -> options.TargetOptions:
        """The options of the target `model`, its template included."""
        return replace(super().of(model), chat_template=self.chat_template)


@dataclass(frozen=True)
class MaybeTargetOptions(RuntimeOptions):
    """The target, for verbs that can do without one."""

    ALIASES: ClassVar[type[ModelArgument]] = ModelArgument
    model: Annotated[
        str | None,
        Option("--model", "--model-path", help="The same as MODEL; needed unless --endpoint is given."),
    ] = None


@dataclass(frozen=True)
class DrafterFileOptions:
    """How a drafter's directory is read."""

    PANEL: ClassVar[str] = "Speculation"
    draft_weights: Annotated[
        str | None, Option(help="Weight file in the drafter directory (a pickle is read only if named here).")
    ] = None
    ignore_config_key: Annotated[
        list[str], Option(help="A key of the drafter's config.json to ignore; may be repeated.")
    ] = field(default_factory=list)

    def of(self, source: str | None, method: str | None = None) -> DrafterOptions:
        """These options for the drafter at `source`."""
        return DrafterOptions(source, method, self.draft_weights, tuple(self.ignore_config_key))


@dataclass(frozen=True)
class LoadedDrafterOptions(DrafterFileOptions):
    """How a drafter's directory is read, and how the drafter runs."""

    draft_window: Annotated[
        str | None,
        Option(
            metavar="W|auto|off",
            help="Limit a drafter's attention to the first 4 pairs and the last W; auto: to its trained length "
            "(default: what its config.json says).",
        ),
    ] = None
    draft_quantize: Annotated[
        Literal["int8", "int4", "off"] | None,
        Option(help="Quantize the drafter's weights, on a CPU (default: int4 where eyas's kernels are fastest)."),
    ] = None

    def of(self, source: str | None, method: str | None = None) -> DrafterOptions:
        """These options for the drafter at `source`, including how it runs."""
        return replace(super().of(source, method), window=self.draft_window, quantize=self.draft_quantize)


@dataclass(frozen=True)
class DraftOptions(LoadedDrafterOptions):
    """Whether and how to speculate."""

    ALIASES: ClassVar[type[SpeculationAliases]] = SpeculationAliases
    draft_model: Annotated[
        str | None,
        Option("--draft-model", "--speculative-draft-model-path", help=f"The drafter: {DRAFTER_OR_AUTO_HELP}."),
    ] = None
    method: Annotated[
        str | None,
        Option(
            help="ngram, suffix, lookahead: draft without a drafter; mtp: with the target's own module; else the kind "
            "that the drafter must be, such as eagle3 or draft_model (default: any); eagle3+suffix or +suffix: both in "
            "one tree; none: plain decoding."
        ),
    ] = None
    num_speculative_tokens: Annotated[
        str | None,
        Option("--num-speculative-tokens", "-n", help="N: a chain of N draft tokens; auto: the same as --tree auto."),
    ] = None
    tree: Annotated[
        str | None,
        Option(
            help="chain:K, static:NAME, dynamic:DEPTH,TOPK,NODES or shared:DEPTH,WIDTH,BUDGET (lookahead:W,N,G for "
            "that method); auto or auto:chain: as large as pays off, by measured costs. Default: what the drafter's "
            "files name, else auto on a CPU, and the method's own on a GPU."
        ),
    ] = None
    costs: Annotated[
        Path | None,
        Option(
            dir_okay=False,
            help="For auto: the file of measured costs (default: one for each pair, in the user's cache).",
        ),
    ] = None
    coupled: Coupled = None
    acceptance: Annotated[
        str | None,
        Option(
            help="typical[:EPSILON,DELTA]: LOSSY, accepts what the target finds plausible; rejection: by p/q, same "
            "distribution, other draws; synthetic:LENGTH: LOSSY, that many tokens per pass whatever the target says, "
            "to benchmark speed."
        ),
    ] = None

    @property
    def drafter(self) -> DrafterOptions | None:
        """The options of the drafter, or of a method that needs none; None for plain decoding."""
        drafts = self.method != "none" and (self.draft_model is not None or self.method is not None)
        return self.of(self.draft_model, self.method) if drafts else None

    def engine(
        self,
        tree: str | None,
        batch_size: int | None = None,
        limits: Limits | None = None,
        rule: WalkRule | None = None,
    ) -> options.EngineOptions:
        """The options of the engine; `tree` as `tree_text` reads it, `rule` as `walk_rule` does."""
        coupled = self.coupled is not False
        return options.EngineOptions(tree, coupled, rule, batch_size, limits, self.costs)


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen; greedy by default."""

    PANEL: ClassVar[str] = "Sampling"
    max_new_tokens: MaxNewTokens = 256
    temperature: Annotated[float, Option(help="0 = greedy.")] = 0.0
    top_p: Annotated[float, Option(help="1 = off.")] = 1.0
    top_k: Annotated[int, Option(help="0 = off.")] = 0
    min_p: Annotated[float, Option(help="0 = off.")] = 0.0
    seed: Annotated[int, Option(help="The same seed gives the same output, with or without speculation.")] = 0
    repetition_penalty: Annotated[float, Option(help="1 = off.")] = 1.0
    presence_penalty: Annotated[float, Option(help="0 = off.")] = 0.0
    frequency_penalty: Annotated[float, Option(help="0 = off.")] = 0.0
    min_tokens: Annotated[int, Option(help="No stop token before this many tokens.")] = 0
    stop_token_id: Annotated[list[int], Option(help="Another token id that ends an answer; may be repeated.")] = field(
        default_factory=list
    )
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Don't stop at the model's own end tokens.")] = False


@dataclass(frozen=True)
class MeasureOptions:
    """On which prompts to measure, and how often."""

    PANEL: ClassVar[str] = "Measuring"
    prompt_file: PromptFiles = field(kw_only=True)
    repeats: Annotated[int, Option(min=1, help="Runs of every prompt with every method; the median counts.")] = 3
    warmup: Annotated[int, Option(min=0, help="Uncounted runs of a file's first prompt with every method.")] = 1
    batch_size: BatchSize = 1
    limit: Limit = None
    by_category: Annotated[
        bool, Option("--by-category", help="Report each `category` separately; --limit then applies to each.")
    ] = False


Minutes = Annotated[
    float | None,
    Option(
        min=0.01,
        help="A budget: fewer repeats, then fewer prompts, then fewer checkpoints are measured.",
        rich_help_panel="Measuring",
    ),
]
ReportFile = Annotated[
    Path | None,
    Option("--output", "-o", dir_okay=False, help="Write the report to this file, as JSON.", rich_help_panel="Output"),
]
Taps = Annotated[str, Option(help="Boundaries such as 2,16,29; auto: chosen by the target's architecture.")]
States = Annotated[Literal["fp8", "bf16", "float32"], Option(help="How states are stored.")]
Final = Annotated[
    str, Option(help="Final states to store: answers, all, or top:K (the target's K best tokens instead).")
]


def readable(path: Path) -> Path:
    """A file or folder to read; a URL is downloaded first. Raises UsageError or DataError if there is none."""
    found = fetch(path)
    if not found.exists():
        raise UsageError(f"--chats {path} does not exist: give a chat folder or a .jsonl file, or the URL of one")
    return found


def parse_taps(text: str) -> tuple[int, ...] | None:
    """Comma-separated boundaries; None for `auto`. Raises UsageError."""
    if text == "auto":
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--taps {text}: write auto, or boundaries such as 2,16,29") from None


def parse_final(text: str) -> tuple[FinalKind, int | None]:
    """`answers`, `all`, or `top:K`: the kind and its K. Raises UsageError."""
    kind, _, count = text.partition(":")
    if kind == "top" and count.isdecimal() and int(count) > 0:
        return "top", int(count)
    if text == "answers" or text == "all":
        return ("all" if text == "all" else "answers"), None
    raise UsageError(f"--final {text}: write answers, all, or top:K such as top:64")
