"""`eyas verify`: certify that speculation changes no token."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from eyas.cli.common.aliases import DRAFTER_OR_AUTO_HELP
from eyas.cli.common.build import check_tree, open_session, sampling_params
from eyas.cli.common.display import note, output
from eyas.cli.common.measuring import plain_numbers, read_temperatures
from eyas.cli.common.options import (
    Coupled,
    Dtype,
    Json,
    Limit,
    LoadedDrafterOptions,
    MaxNewTokens,
    PromptFile,
    SamplingOptions,
    TargetPanel,
    Trees,
)
from eyas.cli.common.verb import FAILURE
from eyas.errors import UsageError
from eyas.tables import show_table
from eyas.tree.spec import is_auto

if TYPE_CHECKING:
    from eyas.bench.offline.certificate import Certificate
    from eyas.drafters.base import Drafter


@dataclass(frozen=True)
class VerifyTargetOptions(TargetPanel):
    """The target, by default in the precision in which every token is guaranteed."""

    dtype: Annotated[
        Dtype,
        Option(
            help="In float32 every token is equal; in other precisions near-ties may differ. auto: as it is served."
        ),
    ] = "float32"


def verify(
    target: VerifyTargetOptions,
    files: LoadedDrafterOptions,
    prompt_file: PromptFile,
    draft_model: Annotated[str | None, Option(help=f"The drafter: {DRAFTER_OR_AUTO_HELP}.")] = None,
    method: Annotated[
        str | None,
        Option(help="ngram and suffix draft without files, mtp with the target's own; else the drafter's kind."),
    ] = None,
    tree: Trees = [],  # noqa: B006  # copied by typer
    temperatures: Annotated[str, Option(help="Comma-separated.")] = "0,0.7,1",
    batch_sizes: Annotated[str, Option(help="Comma-separated.")] = "1,4",
    max_new_tokens: MaxNewTokens = 64,
    seed: Annotated[int, Option(min=0, help="Seed of the sampled runs.")] = 0,
    limit: Limit = None,
    coupled: Coupled = None,
    modules: Annotated[
        bool, Option(help="Compare plain decoding with the model's own PyTorch modules, loaded separately.")
    ] = True,
    transformers: Annotated[bool, Option(help="Compare greedy answers with transformers.generate as well.")] = False,
    json: Json = False,
) -> int:
    """Check that speculation changes no token.

    Prompts are decoded with and without it at several temperatures, trees and batch sizes, and every token is compared.
    Plain decoding itself is compared with the model's own PyTorch modules.

    Examples:
        eyas verify MODEL --draft-model DRAFTER --prompt-file prompts.jsonl
        eyas verify FILE.gguf --method ngram --prompt-file prompts.jsonl --limit 4
    """
    heats = read_temperatures(temperatures, "--temperatures")
    sizes = plain_numbers(batch_sizes, "--batch-sizes")
    if not all(size >= 1 and size.is_integer() for size in sizes):
        raise UsageError(f"--batch-sizes {batch_sizes}: a batch holds a whole number of sequences, at least 1")
    for text in tree:
        check_tree(text)
    if transformers and not modules:
        raise UsageError(
            "--transformers needs the model's modules, which judge where two answers diverge: leave out --no-modules"
        )
    if transformers and target.kv_cache_dtype != "auto":
        raise UsageError("--transformers doesn't quantize keys and values: leave out --kv-cache-dtype")
    loading = target.of(target.model)
    drafts = files.of(draft_model, method)
    loading.check()
    drafts.check()
    from eyas.bench.offline.certificate import Certificate, CertificateGrid, Certifier, own_modules
    from eyas.bench.offline.external import TransformersBaseline
    from eyas.targets.parameters import weight_formats
    from eyas.text.prompts import read_prompts

    rows = read_prompts(prompt_file, limit)
    params = sampling_params(SamplingOptions(max_new_tokens=max_new_tokens, seed=seed))
    session = open_session(loading)
    drafter = session.drafter(drafts)
    own = own_modules(target.model, session.target) if modules else None
    baseline = TransformersBaseline(target.model, session.engine()) if transformers else None
    certifier = Certifier(
        session.target, session.tokenizer, drafter, params, coupled is not False, modules=own, baseline=baseline
    )
    cells = []
    for cell in certifier.cells(rows, CertificateGrid(heats, _trees(tree, drafter), [int(size) for size in sizes])):
        note(f"T={cell.temperature:g} {cell.tree} batch {cell.batch_size}: {cell.verdict}")
        cells.append(cell)
    weights = weight_formats(session.target.model)
    certificate = Certificate(target.model, draft_model or str(method), session.target.dtype, cells, weights)
    for error in certificate.errors:
        note(f"error: {error}")
    if json:
        typer.echo(jsonlib.dumps(certificate.as_dict()))
    else:
        _print(certificate)
    return 0 if certificate.equal and not certificate.errors else FAILURE


def _trees(given: Sequence[str], drafter: Drafter) -> Sequence[str]:
    """The given trees; if there are none, the drafter's own, and a chain if it can draft one.

    Raises UsageError for a tree that the drafter can't grow.
    """
    from eyas.engine.default_tree import default_shape, tree_for
    from eyas.tree import parse_tree

    own = default_shape(drafter)
    chain = f"chain:{min(4, drafter.max_depth or 4)}"
    trees = list(dict.fromkeys(given or ((own,) if own.startswith("lookahead:") else (chain, own))))
    for text in trees:
        if not is_auto(text):
            tree_for(drafter, parse_tree(text))
    return trees


def _print(certificate: Certificate) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    from eyas.bench.offline.certificate import promise

    tree = Column("tree", overflow="fold")  # a name is one word: at 80 columns it would be cut
    columns = ("T", tree, "batch", "rows", "tokens", "accept\nlength", "result")
    table = Table(*columns, title="Certificate", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for cell in certificate.cells:
        table.add_row(
            f"{cell.temperature:g}",
            cell.tree,
            str(cell.batch_size),
            str(cell.rows),
            str(cell.tokens),
            f"{cell.accept_length:.2f}",
            cell.verdict,
        )
    console = output()
    show_table(console, table)
    for cell in certificate.cells:
        for divergence in cell.divergences:
            where = f"row {divergence.row}, turn {divergence.turn}, position {divergence.position}"
            combination = f"T={cell.temperature:g} {cell.tree} batch {cell.batch_size}"
            console.print(f"{combination}: {where}: {divergence.describe()}")
    if certificate.weights is not None:
        console.print(f"Weights are multiplied in {certificate.weights}.")
    console.print(f"Compared with {' and '.join(certificate.compared_with)}. Promised in {promise(certificate.dtype)}.")
    ties = any(cell.divergences for cell in certificate.cells)
    console.print(("EQUAL BUT FOR NEAR-TIES" if ties else "EQUAL") if certificate.equal else "NOT EQUAL")
