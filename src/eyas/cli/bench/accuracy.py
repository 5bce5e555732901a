"""`eyas bench accuracy`: scores on GSM8K and HumanEval, and whether speculation changes an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from eyas.cli.bench.endpoints import BASELINE, MeasuredEndpointOptions, check_endpoints, endpoint_sides, open_endpoints
from eyas.cli.common.aliases import DRAFTER_HELP
from eyas.cli.common.build import check_tree, open_session, sampling_params
from eyas.cli.common.display import note, output, row_bar
from eyas.cli.common.measuring import check_output, write_report
from eyas.cli.common.options import (
    BatchSize,
    Coupled,
    Json,
    Limit,
    LoadedDrafterOptions,
    MaxNewTokens,
    MaybeTargetOptions,
    ReportFile,
    SamplingOptions,
    Trees,
)
from eyas.cli.common.verb import FAILURE, GivenOptions
from eyas.drafters.options import check_source, needs_no_drafter
from eyas.errors import UsageError
from eyas.options import EngineOptions
from eyas.plugins import feature
from eyas.tables import show_table

if TYPE_CHECKING:
    from eyas.bench.accuracy.compare import AnswerProblems, MethodAccuracy
    from eyas.bench.accuracy.tasks import AccuracyTask, Sandbox
    from eyas.drafters.options import DrafterOptions
    from eyas.engine import Engine
    from eyas.session import Session

_MATH, _CODE = "gsm8k", "humaneval"


@dataclass(frozen=True)
class AnswerOptions(SamplingOptions):
    """How answers are sampled; long enough for a worked solution."""

    max_new_tokens: MaxNewTokens = 512


def accuracy(
    target: MaybeTargetOptions,
    files: LoadedDrafterOptions,
    sampling: AnswerOptions,
    servers: MeasuredEndpointOptions,
    given: GivenOptions,
    task: Annotated[list[str], Option(help="gsm8k=FILE or humaneval=FILE, JSON Lines; may be repeated.")],
    draft_model: Annotated[str | None, Option(help=f"The drafter: {DRAFTER_HELP}.")] = None,
    method: Annotated[
        list[str], Option(help="ngram drafts without a drafter's files; else the drafter's kind; may be repeated.")
    ] = [],  # noqa: B006  # typer copies defaults
    tree: Trees = [],  # noqa: B006
    coupled: Coupled = None,
    shots: Annotated[int, Option(min=0, help="Examples before every question of gsm8k.")] = 0,
    shots_file: Annotated[
        Path | None,
        Option(exists=True, dir_okay=False, help="A file whose first rows are the examples: GSM8K's train split."),
    ] = None,
    raw: Annotated[bool, Option("--raw", help="Ask without the chat template, as texts to continue.")] = False,
    execute: Annotated[
        bool, Option("--execute", help="Run the code of humaneval's answers, in a sandbox with limits (experimental).")
    ] = False,
    limit: Limit = None,
    batch_size: BatchSize = 1,
    json: Json = False,
    output_: ReportFile = None,
) -> int:
    """Score right answers, with and without speculation.

    Every problem is answered by plain decoding and by every method, with the same seed. Reported are scores, equal
    answers and, where answers differ, the target's verdict on whether rounding explains it. With --endpoint, servers
    are compared by their texts.

    Examples:
        eyas bench accuracy MODEL --draft-model DRAFTER --task gsm8k=gsm8k.jsonl
        eyas bench accuracy FILE.gguf --method ngram --task gsm8k=gsm8k.jsonl --limit 50
    """
    drafters = _drafters(draft_model, method, files)
    if not drafters and (tree or coupled is not None):
        raise UsageError("--tree and --coupled are about drafting: give --draft-model or --method")
    check_endpoints(servers, target.model, given)
    params = sampling_params(sampling)
    check_output(output_)
    for text in tree:
        check_tree(text)
    sides = endpoint_sides(servers)
    sandbox = _sandbox(execute, task)
    tasks = _tasks(task, limit, shots, shots_file, sandbox)
    loading = None if target.model is None else target.of(target.model)
    if loading is not None:
        loading.check()
    for each in drafters.values():
        each.check()
    from eyas.bench.accuracy.compare import accuracy_report, engine_answers, measure_accuracy, server_answers
    from eyas.bench.machine import describe_machine
    from eyas.bench.offline.runner import PLAIN
    from eyas.targets import load_tokenizer
    from eyas.text.template import has_chat_template

    session = None if loading is None else open_session(loading)
    shared = EngineOptions(coupled=coupled is not False, batch_size=batch_size)
    engines = {} if session is None else _engines(session, drafters, tree, shared)
    own = None if session is None else session.tokenizer
    tokenizer = own if servers.tokenizer is None else load_tokenizer(servers.tokenizer)
    baseline = PLAIN if engines else BASELINE if BASELINE in sides else None
    chat = not raw and (tokenizer is None or has_chat_template(tokenizer))
    answering: dict[str, AnswerProblems] = {name: engine_answers(one, params) for name, one in engines.items()}
    results = []
    with ExitStack() as stack:
        opened = stack.enter_context(open_endpoints(servers, sides, params, tokenizer))
        answering |= {name: server_answers(server, batch_size) for name, server in opened.items()}
        advance = stack.enter_context(row_bar(sum(len(one.rows) for one in tasks) * len(answering)))
        for one in tasks:
            judge = engines.get(PLAIN)
            results += measure_accuracy(one, answering, baseline, params, judge=judge, chat=chat, advance=advance)
    settings: dict[str, Any] = {
        "model": target.model,
        **({} if session is None else session.target.precision),
        "draft_model": draft_model,
        "methods": list(answering),
        "baseline": baseline,
        "servers": {name: side.settings() for name, side in sides.items()},
        "chat_template": chat,
        "batch_size": batch_size,
        "limit": limit,
        "sandbox": None if sandbox is None else sandbox.describe(),
        "sampling": params.model_dump(mode="json"),
    }
    content = accuracy_report(describe_machine(), settings, tasks, results, params.max_tokens, baseline)
    write_report(content, json, output_)
    if not json:
        _show(content, results, "Servers" if session is None else f"{target.model}, {settings['weights']}")
    for error in content["errors"]:
        note(f"error: {error}")
    return 0 if content["equal"] and not content["errors"] else FAILURE


def _show(content: Mapping[str, Any], results: Sequence[MethodAccuracy], title: str) -> None:
    """Print the table, every answer that differs, the definitions of the figures, and the verdict."""
    from eyas.bench.accuracy.compare import DEFINITIONS, accuracy_table, describe_difference, verdict

    console = output()
    show_table(console, accuracy_table(content["lines"], title))
    for each in results:
        for difference in each.differences:
            console.print(describe_difference(each, difference))
    for line in (*DEFINITIONS, verdict(results)):
        console.print(line)


def _drafters(
    draft_model: str | None, methods: Sequence[str], files: LoadedDrafterOptions
) -> dict[str, DrafterOptions]:
    """Name -> the options of what drafts. Raises UsageError for methods that don't go with the drafter."""
    if "none" in methods:
        raise UsageError("--method none: plain decoding is what all methods are compared with; leave it out")
    if draft_model is None and files != LoadedDrafterOptions():
        raise UsageError("how a drafter is loaded is about a drafter: give --draft-model")
    read = files.of(draft_model)
    found: dict[str, DrafterOptions] = {}
    for name in methods:
        found[name] = read.of(None if needs_no_drafter(name) else draft_model, name)
        check_source(name, found[name].source)
    if draft_model is not None and not any(one.source for one in found.values()):
        if found:
            raise UsageError(f"--draft-model {draft_model} is for none of the methods: name its kind, or leave out all")
        found[draft_model] = read
    return found


def _sandbox(execute: bool, tasks: Sequence[str]) -> Sandbox | None:
    if not execute:
        return None
    if not any(text.startswith(f"{_CODE}=") for text in tasks):
        raise UsageError(f"--execute is about code: give --task {_CODE}=FILE, or leave it out")
    sandbox: Sandbox = feature("sandbox", "--execute")()
    note(f"note: {sandbox.describe()}")
    return sandbox


def _tasks(
    texts: Sequence[str], limit: int | None, shots: int, shots_file: Path | None, sandbox: Sandbox | None
) -> list[AccuracyTask]:
    """The tasks that `NAME=FILE` texts name. Raises UsageError and DataError."""
    from eyas.bench.accuracy.tasks import FunctionWriting, GradeSchoolMath

    if shots and shots_file is None:
        raise UsageError(f"--shots {shots} needs examples: give --shots-file, such as GSM8K's train split")
    if shots_file is not None and not shots:
        raise UsageError("--shots-file would be ignored: say how many of its rows are examples, such as --shots 5")
    paths: dict[str, Path] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if name not in (_MATH, _CODE) or not path:
            raise UsageError(f"--task {text}: write {_MATH}=FILE or {_CODE}=FILE")
        if name in paths:
            raise UsageError(f"--task {name} is given twice: give each task one file")
        paths[name] = Path(path)
    if shots and _MATH not in paths:
        raise UsageError(f"--shots is about {_MATH}: give --task {_MATH}=FILE, or leave it out")
    return [
        GradeSchoolMath(path, limit, shots, shots_file) if name == _MATH else FunctionWriting(path, limit, sandbox)
        for name, path in paths.items()
    ]


def _engines(
    session: Session, drafters: Mapping[str, DrafterOptions], trees: Sequence[str], options: EngineOptions
) -> dict[str, Engine]:
    """Plain decoding, and every drafter by its name; with several trees, by its tree as well.

    Without `trees`, every round drafts the drafter's own shape: `auto` may draft nothing, and hide a difference.
    """
    from eyas.bench.offline.methods import engines_for
    from eyas.bench.offline.runner import PLAIN
    from eyas.engine.default_tree import default_shape

    made: dict[tuple[str, str], Engine] = {}
    for name, one in drafters.items():
        drafter = session.drafter(one)
        made |= engines_for(session, {name: drafter}, trees or [default_shape(drafter)], options)
    named = {f"{name} {tree}" if len(trees) > 1 else name: one for (name, tree), one in made.items()}
    return {PLAIN: session.engine(None, options)} | named
