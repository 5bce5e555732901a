"""`eyas bench accuracy`: scores on GSM8K and HumanEval, and whether speculation changes an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from eyas.cli.bench.bench import (
    BASELINE,
    MeasuredEndpointOptions,
    check_endpoints,
    endpoint_sides,
    open_endpoints,
)
from eyas.cli.common.build import check_drafter, check_method, check_target, check_tree, open_target, sampling_params
from eyas.cli.common.display import note, output, row_bar, show_table
from eyas.cli.common.measuring import check_output, engines_for, write_report
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
from eyas.cli.common.verb import FAILURE, Given
from eyas.drafters.methods import WITHOUT_DRAFTER
from eyas.errors import UsageError

if TYPE_CHECKING:
    from eyas.bench.accuracy.sandbox import Sandbox
    from eyas.bench.accuracy.tasks import AccuracyTask
    from eyas.drafters.base import Drafter
    from eyas.engine import Engine
    from eyas.targets import Target

_MATHS, _CODE = "gsm8k", "humaneval"


@dataclass(frozen=True)
class AnswerOptions(SamplingOptions):
    """How answers are sampled; long enough for a worked solution."""

    max_new_tokens: MaxNewTokens = 512


def accuracy(
    target: MaybeTargetOptions,
    files: LoadedDrafterOptions,
    sampling: AnswerOptions,
    servers: MeasuredEndpointOptions,
    given: Given,
    task: Annotated[list[str], Option(help="gsm8k=FILE or humaneval=FILE, JSON Lines; may be repeated.")],
    draft_model: Annotated[str | None, Option(help="The drafter: a directory or Hub id.")] = None,
    method: Annotated[
        list[str], Option(help="ngram drafts without a drafter's files; else the drafter's kind; may be repeated.")
    ] = [],  # noqa: B006  # typer copies defaults
    tree: Trees = [],  # noqa: B006
    coupled: Coupled = None,
    shots: Annotated[int, Option(min=0, help="Examples ahead of every question of gsm8k.")] = 0,
    shots_file: Annotated[
        Path | None,
        Option(exists=True, dir_okay=False, help="A file whose first rows are the examples: GSM8K's train split."),
    ] = None,
    raw: Annotated[bool, Option("--raw", help="Ask without the chat template, as texts to continue.")] = False,
    execute: Annotated[
        bool, Option("--execute", help="Run the code of humaneval's answers, in a sandbox with limits.")
    ] = False,
    limit: Limit = None,
    batch_size: BatchSize = 1,
    json: Json = False,
    output_: ReportFile = None,
) -> int:
    """Score tasks with right answers, with and without speculation.

    Every problem is answered plainly and by every method, with the same seed: scores, equal answers, and where answers
    differ the target's verdict on whether rounding explains it. With --endpoint servers are compared by their texts.
    """
    methods = _methods(draft_model, method)
    if not methods and (tree or coupled is not None):
        raise UsageError("--tree and --coupled are about drafting: give --draft-model or --method")
    check_endpoints(servers, target.model, given)
    params = sampling_params(sampling)
    check_output(output_)
    for text in tree:
        check_tree(text)
    sides = endpoint_sides(servers)
    sandbox = _sandbox(execute, task)
    tasks = _tasks(task, limit, shots, shots_file, sandbox)
    if target.model is not None:
        check_target(target.model, target)
    if draft_model is not None:
        check_drafter(draft_model, files)
    elif files != LoadedDrafterOptions():
        raise UsageError("how a drafter is loaded is about a drafter: give --draft-model")
    from eyas.bench.accuracy.compare import (
        DEFINITIONS,
        AnswerProblems,
        accuracy_report,
        accuracy_table,
        describe_difference,
        engine_answers,
        measure_accuracy,
        server_answers,
        verdict,
    )
    from eyas.bench.machine import describe_machine
    from eyas.bench.offline.runner import PLAIN
    from eyas.drafters.loading import open_drafter
    from eyas.engine import Engine
    from eyas.targets import load_tokenizer
    from eyas.text.template import has_chat_template

    engines: dict[str, Engine] = {}
    loaded = None if target.model is None else open_target(target.model, target)
    named = servers.tokenizer or target.model
    tokenizer = None if named is None else load_tokenizer(named)
    if loaded is not None:
        own = tokenizer if servers.tokenizer is None else load_tokenizer(str(target.model))
        drafters = {
            name: open_drafter(
                source,
                loaded,
                weights=files.draft_weights if source is not None else None,
                ignore_config_keys=files.ignore_config_key,
                method=kind,
                tokenizer=own,
                model=target.model,
                window=files.draft_window if source is not None else None,
                quantize=files.draft_quantize if source is not None else None,
            )
            for name, (source, kind) in methods.items()
        }
        engines = {PLAIN: Engine(loaded, own, batch_size=batch_size)}
        engines |= _drafting(loaded, own, drafters, tree, coupled is not False, batch_size)
    baseline = PLAIN if engines else BASELINE if BASELINE in sides else None
    chat = not raw and (tokenizer is None or has_chat_template(tokenizer))
    answering: dict[str, AnswerProblems] = {name: engine_answers(one, params) for name, one in engines.items()}
    results = []
    with ExitStack() as stack:
        opened = stack.enter_context(open_endpoints(servers, sides, params, tokenizer))
        answering |= {name: server_answers(server, batch_size) for name, server in opened.items()}
        total = sum(len(one.rows) for one in tasks) * len(answering)
        advance = stack.enter_context(row_bar(total))
        for one in tasks:
            judge = engines.get(PLAIN)
            results += measure_accuracy(one, answering, baseline, params, judge=judge, chat=chat, advance=advance)
    settings: dict[str, Any] = {
        "model": target.model,
        "dtype": None if loaded is None else str(loaded.dtype).removeprefix("torch."),
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
        console = output()
        title = "Servers" if loaded is None else f"{target.model}, {settings['dtype']}"
        show_table(console, accuracy_table(content["lines"], title))
        for each in results:
            for difference in each.differences:
                console.print(describe_difference(each, difference))
        for line in DEFINITIONS:
            console.print(line)
        console.print(verdict(results))
    for error in content["errors"]:
        note(f"error: {error}")
    return 0 if content["equal"] and not content["errors"] else FAILURE


def _methods(draft_model: str | None, methods: Sequence[str]) -> dict[str, tuple[str | None, str | None]]:
    """Name -> its drafter's files and its method. Raises UsageError for methods that don't go with the drafter."""
    if "none" in methods:
        raise UsageError("--method none: plain decoding is what all methods are compared with; leave it out")
    found: dict[str, tuple[str | None, str | None]] = {}
    for name in methods:
        source = None if name in WITHOUT_DRAFTER else draft_model
        check_method(name, source)
        found[name] = source, name
    if draft_model is not None and not any(source for source, _ in found.values()):
        if found:
            raise UsageError(f"--draft-model {draft_model} is for none of the methods: name its kind, or leave out all")
        found[draft_model] = draft_model, None
    return found


def _sandbox(execute: bool, tasks: Sequence[str]) -> Sandbox | None:
    if not execute:
        return None
    if not any(text.startswith(f"{_CODE}=") for text in tasks):
        raise UsageError(f"--execute is about code: give --task {_CODE}=FILE, or leave it out")
    from eyas.bench.accuracy.sandbox import Sandbox

    sandbox = Sandbox()
    note(f"note: {sandbox.describe()}")
    return sandbox


def _tasks(
    texts: Sequence[str], limit: int | None, shots: int, shots_file: Path | None, sandbox: Sandbox | None
) -> list[AccuracyTask]:
    """The tasks that `NAME=FILE` texts name. Raises UsageError and DataError."""
    from eyas.bench.accuracy.tasks import FunctionWriting, GradeSchoolMaths

    if shots and shots_file is None:
        raise UsageError(f"--shots {shots} needs examples: give --shots-file, such as GSM8K's train split")
    if shots_file is not None and not shots:
        raise UsageError("--shots-file would be ignored: say how many of its rows are examples, such as --shots 5")
    paths: dict[str, Path] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if name not in (_MATHS, _CODE) or not path:
            raise UsageError(f"--task {text}: write {_MATHS}=FILE or {_CODE}=FILE")
        if name in paths:
            raise UsageError(f"--task {name} is given twice: give each task one file")
        paths[name] = Path(path)
    if shots and _MATHS not in paths:
        raise UsageError(f"--shots is about {_MATHS}: give --task {_MATHS}=FILE, or leave it out")
    return [
        GradeSchoolMaths(path, limit, shots, shots_file) if name == _MATHS else FunctionWriting(path, limit, sandbox)
        for name, path in paths.items()
    ]


def _drafting(
    target: Target,
    tokenizer: Any,
    drafters: Mapping[str, Drafter],
    trees: Sequence[str],
    coupled: bool,
    batch_size: int,
) -> dict[str, Engine]:
    """The engines that speculate, named by their method, and by their tree where there are several."""

    made = engines_for(target, tokenizer, drafters, trees, coupled, batch_size)
    return {f"{name} {tree}" if len(trees) > 1 else name: one for (name, tree), one in made.items()}
