"""Options in the words of other engines: what they mean, what is refused, and that the page lists all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from click.testing import Result
from typer.models import OptionInfo
from typer.testing import CliRunner

from eyas.cli.common.aliases import REFUSED, VLLM_KEYS, SpeculationAliases, option_name
from eyas.cli.common.options import DraftOptions, TargetPanel
from eyas.cli.common.verb import GivenOptions, OptionGroups, add_verb

from ...verbs import GROUPS, VERBS

Run = Callable[..., Result]
PAGE = (Path(__file__).parents[3] / "docs" / "options.md").read_text(encoding="utf-8")
FUNCTIONS = [*VERBS.values(), *chain.from_iterable(verbs.values() for _, verbs in GROUPS.values())]
PARALLEL, SERIAL = ({"parallel_drafting": parallel, "method": "eagle3"} for parallel in (True, False))
CONFIG = {"method": "eagle3", "model": "D", "num_speculative_tokens": 3}


def show(target: TargetPanel, draft: DraftOptions, given: GivenOptions) -> None:
    typer.echo(json.dumps([target.model, draft.draft_model, draft.method, draft.num_speculative_tokens, draft.tree]))
    typer.echo(" ".join(sorted(given)))


def run(*arguments: Any) -> Result:
    app = typer.Typer(rich_markup_mode=None)
    add_verb(app, "show", show)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("M",), ["M", None, None, None, None]),
        (("--model", "M"), ["M", None, None, None, None]),
        (("M", "--model-path", "M"), ["M", None, None, None, None]),
        (("M", "--speculative-config", json.dumps(CONFIG)), ["M", "D", "eagle3", "3", None]),
        (("M", "--speculative-config", '{"method": "eagle", "model": "D"}'), ["M", "D", "eagle1", None, None]),
        (("M", "--speculative-config", '{"draft_tensor_parallel_size": 1}'), ["M", None, None, None, None]),
        (("M", "--speculative-config", '{"parallel_drafting": true}'), ["M", None, "peagle", None, None]),
        (("M", "--speculative-config", json.dumps(PARALLEL)), ["M", None, "peagle", None, None]),
        (("M", "--speculative-config", json.dumps(SERIAL)), ["M", None, "eagle3", None, None]),
        (("M", "--speculative-config", json.dumps(CONFIG), "-n", 3), ["M", "D", "eagle3", "3", None]),
        (("M", "--speculative-algorithm", "EAGLE"), ["M", None, "eagle1", None, None]),
        (("M", "--speculative-algorithm", "STANDALONE"), ["M", None, "draft_model", None, None]),
        (("M", "--speculative-config", '{"method": "draft_model"}'), ["M", None, "draft_model", None, None]),
        (("M", "--speculative-config", '{"method": "suffix"}'), ["M", None, "suffix", None, None]),
        (("M", "--speculative-config", '{"method": "deepseek_mtp"}'), ["M", None, "mtp", None, None]),
        (("M", "--speculative-algorithm", "NGRAM"), ["M", None, "ngram", None, None]),
        (
            ("M", "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "D"),
            ["M", "D", "eagle3", None, None],
        ),
        (("M", "--speculative-num-steps", 5), ["M", None, None, None, "chain:5"]),
        (
            ("M", *"--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6".split()),
            ["M", None, None, None, "chain:5"],
        ),
        (
            ("M", *"--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16".split()),
            ["M", None, None, None, "dynamic:5,4,15"],
        ),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_what_aliases_mean(arguments: tuple[Any, ...], expected: list[Any]) -> None:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    values, given = result.stdout.splitlines()
    assert json.loads(values) == expected
    names = ("model", "draft_model", "method", "num_speculative_tokens", "tree")
    assert set(given.split()) & set(names) == {name for name, value in zip(names, expected, strict=True) if value}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "which target? Give MODEL or --model"),
        (("M", "--model", "N"), "the argument MODEL means --model M, and N was given as well"),
        (("M", "--speculative-config", json.dumps(CONFIG), "-n", 4), "--num-speculative-tokens 3, and 4 was given"),
        (
            ("M", "--speculative-config", json.dumps(CONFIG), "--speculative-algorithm", "EAGLE"),
            "--speculative-algorithm means --method eagle1, and eagle3 was given",
        ),
        (("M", "--tree", "chain:2", "--speculative-num-steps", 3), "--speculative-num-steps 3 means --tree chain:3"),
        (("M", "--speculative-config", "{"), "--speculative-config isn't valid JSON"),
        (("M", "--speculative-config", "[]"), 'must be a JSON object, such as {"method": "eagle3"'),
        (("M", "--speculative-config", '{"method": "mlp_speculator"}'), "eyas has no such method"),
        (("M", "--speculative-config", '{"method": 3}'), 'write "eagle", "eagle3" or "draft_model"'),
        (("M", "--speculative-config", '{"model": null}'), "neither a directory nor a Hub id"),
        (("M", "--speculative-config", '{"num_speculative_tokens": true}'), "a number of at least 1"),
        (("M", "--speculative-config", '{"num_speculative_tokens": 0}'), "a number of at least 1"),
        (("M", "--speculative-config", '{"parallel_drafting": 1}'), "neither true nor false"),
        (("M", "--speculative-config", json.dumps(PARALLEL | {"method": "suffix"})), "no drafter of method suffix"),
        (("M", "--speculative-config", '{"draft_tensor_parallel_size": 2}'), "drafters run on one device here"),
        (("M", "--speculative-config", '{"disable_by_batch_size": 8}'), "disable_by_batch_size: use --tree auto"),
        (("M", "--speculative-config", '{"swirl": 8}'), "swirl: has no counterpart, leave it out"),
        (("M", "--speculative-algorithm", "OAK"), "--speculative-algorithm OAK: eyas knows EAGLE, "),
        (("M", "--speculative-eagle-topk", 4), "--speculative-num-steps says how deep"),
        (("M", "--speculative-num-steps", 3, "--speculative-num-draft-tokens", 9), "a chain of 3 steps has 4 of them"),
        (("M", "--speculative-num-steps", 3, "--speculative-eagle-topk", 2), "needs --speculative-num-draft-tokens"),
        (("M", "--tensor-parallel-size", 2), "eyas serve --engine vllm --engine-option"),
        (("M", "--tp=2"), "No such option: --tp; a model runs on one device here"),
        (("M", "--trust-remote-code"), "no code of a checkpoint is run"),
        (("M", "--swirl"), "No such option: --swirl"),
        (("M", "--dtype", "int5"), "Invalid value for '--dtype': 'int5' is not one of"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value)),
)
def test_what_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stdout == ""


def spellings(function: Callable[..., Any]) -> list[list[str]]:
    """Every way to type each option of a verb, the first being its own."""
    found = []
    for parameter in OptionGroups(function).signature.parameters.values():
        (info,) = [each for each in get_args(parameter.annotation) if hasattr(each, "param_decls")]
        if isinstance(info, OptionInfo):
            names = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
            found.append([name.split("/")[0] for name in names] or [option_name(parameter.name)])
    return found


def table(heading: str) -> list[list[str]]:
    """The cells of the table with this first column, row by row."""
    rows = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_page_names_every_alias_and_only_options_that_exist() -> None:
    options = [each for function in FUNCTIONS for each in spellings(function)]
    own = {names[0] for names in options} - {option_name(name) for name in SpeculationAliases.__dataclass_fields__}
    others = {name for names in options for name in names if name.startswith("--")} - own
    assert {"--max-num-seqs", "--speculative-config", "--model-path"} <= others
    rows = table("eyas")
    assert set(re.findall(r"\*\*`(--[\w-]+)`\*\*", PAGE)) == others
    named = {name for row in rows for name in re.findall(r"`(--[\w-]+)", row[0])}
    assert named
    assert named <= own


def test_the_page_names_what_is_refused_and_the_keys_that_are_honored() -> None:
    refused = [name for row in table("option") for name in re.findall(r"`(--[\w-]+)`", row[0])]
    assert sorted(refused) == sorted(REFUSED)
    assert [row[0].strip("`") for row in table("key")] == list(VLLM_KEYS)


def test_refused_options_are_no_options_of_any_verb() -> None:
    options = {name for function in FUNCTIONS for names in spellings(function) for name in names}
    assert not options & set(REFUSED)
