"""Answers held to a grammar: legal, and with speculation exactly those without, whatever else is asked for."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from functools import cache

import jsonschema
import pytest
import torch

from eyas.drafters.base import Drafter
from eyas.drafters.hybrid import HybridDrafter
from eyas.drafters.options import DrafterOptions
from eyas.drafters.prediction import PredictionDrafter
from eyas.drafters.weightless.ngram import NgramDrafter
from eyas.drafters.weightless.suffix import SuffixDrafter
from eyas.engine import Engine, Limits, Speculation
from eyas.errors import RequestError
from eyas.options import EngineOptions
from eyas.session import Session
from eyas.targets import Target
from eyas.tree import parse_tree
from eyas.types import Completion, GrammarSpec, Request, SamplingParams
from eyas.verify import TypicalWalk, compile_grammar, constraint
from eyas.verify.constraint import Constraint

from .. import pairs, tiny

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["clip", "coin"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 500},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,5}$"}, "maxItems": 2},
    },
    "required": ["kind", "count", "tags"],
    "additionalProperties": False,
}
TREE_SCHEMA = {
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    },
    "$ref": "#/$defs/node",
}
SPECS = {
    "schema": GrammarSpec("json_schema", json.dumps(SCHEMA)),
    "recursive": GrammarSpec("json_schema", json.dumps(TREE_SCHEMA)),
    "object": GrammarSpec("json_object"),
    "regex": GrammarSpec("regex", r"[0-9]{1,3}(\.[0-9]{1,3}){3}( +[a-z]+)*"),
    "choice": GrammarSpec("choice", json.dumps(["return a", "return b", "return", "a + b"])),
    "lark": GrammarSpec("lark", 'start: sum\nsum: term (("+" | "-") term)*\nterm: /[0-9]{1,4}/ | "(" sum ")"\n'),
}
SAMPLED = (
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=40, temperature=0.8, seed=3),
    SamplingParams(max_tokens=40, temperature=1.3, top_k=20, top_p=0.9, seed=4, repetition_penalty=1.2),
    SamplingParams(max_tokens=40, temperature=1.0, min_p=0.02, frequency_penalty=0.8, presence_penalty=0.2, seed=5),
    SamplingParams(max_tokens=40, min_tokens=12, logit_bias={9: -float("inf"), 50: 4.0}, seed=6),
)


@cache
def target(padding: int = 0) -> Target:
    """A model whose head may be larger than the tokenizer."""
    return tiny.as_loaded("llama", "float32", vocab_size=len(pairs.tokenizer()) + padding)


def engine(tree: str | None, batch: int = 4, padding: int = 0, rule: TypicalWalk | None = None) -> Engine:
    speculation = None
    if tree is not None:
        drafter = tiny.drafter("eagle3", vocab_size=target(padding).vocab_size, draft_vocab_size=200)
        speculation = Speculation(drafter, parse_tree(tree))
    return Engine(target(padding), pairs.tokenizer(), speculation, batch_size=batch, rule=rule)


def requests(specs: Sequence[GrammarSpec | None], params: Sequence[SamplingParams] = SAMPLED) -> list[Request]:
    found = []
    for i, spec in enumerate(specs):
        for j, each in enumerate(params):
            prompt = tuple(3 + (7 * i + 3 * j + k) % 90 for k in range(2 + (i + j) % 5))
            found.append(Request(prompt, each, f"{i}.{j}", grammar=spec))
    return found


def check_legal(done: Completion, spec: GrammarSpec) -> None:
    """A legal beginning, or the whole if it stopped."""
    end = pairs.tokenizer().eos_token_id
    followed = Constraint(compile_grammar(pairs.tokenizer(), spec), [end])
    assert followed.consume(done.token_ids) == len(done.token_ids)
    assert done.finish_reason in ("stop", "length")
    assert (done.finish_reason == "stop") == (done.token_ids[-1] == end)
    if done.finish_reason == "length":
        return
    if spec.kind.startswith("json"):
        schema = json.loads(spec.text) if spec.text else {"type": "object"}
        jsonschema.validate(json.loads(done.text), schema)
    elif spec.kind == "choice":
        assert done.text in json.loads(spec.text)
    elif spec.kind == "regex":
        assert re.fullmatch(spec.text, done.text)


@cache
def reference(padding: int = 0) -> list[Completion]:
    return engine(None, padding=padding).generate(requests([*SPECS.values(), None]))


def test_the_reference_is_legal_and_varied() -> None:
    asked = requests([*SPECS.values(), None])
    for request, done in zip(asked, reference(), strict=True):
        if request.grammar is not None:
            check_legal(done, request.grammar)
    held = [done for request, done in zip(asked, reference(), strict=True) if request.grammar is not None]
    assert {done.finish_reason for done in held} == {"stop", "length"}
    assert len({tuple(done.token_ids) for done in held}) > len(held) / 2
    kinds = {request.grammar.kind for request, done in zip(asked, held, strict=False) if done.finish_reason == "stop"}
    assert len(kinds) >= 4, kinds


def test_free_rows_are_as_if_alone() -> None:
    alone = engine(None).generate(requests([*[None] * len(SPECS), None])[-len(SAMPLED) :])
    assert [d.token_ids for d in alone] == [d.token_ids for d in reference()[-len(SAMPLED) :]]


@pytest.mark.parametrize(
    ("tree", "batch"),
    [
        *(pytest.param(*of, marks=pytest.mark.slow) for of in (("chain:4", 1), ("dynamic:4,3,8", 4))),
        ("shared:4,4,20", 3),
    ],
)
def test_equal_with_speculation(tree: str, batch: int) -> None:
    done = engine(tree, batch).generate(requests([*SPECS.values(), None]))
    assert [d.token_ids for d in done] == [d.token_ids for d in reference()]
    assert [d.finish_reason for d in done] == [d.finish_reason for d in reference()]


@pytest.mark.parametrize("tree", ["chain:4", "dynamic:4,3,8"])
def test_equal_with_a_drafter_that_is_often_right(tree: str) -> None:
    """Draft tokens of all depths are accepted, ends among them."""
    asked = requests([*SPECS.values(), None], SAMPLED[:2])
    expected = engine(None).generate(asked)
    sequences = [[*r.prompt, *d.token_ids] for r, d in zip(asked, expected, strict=True)]
    oracle = tiny.OracleDrafter(sequences, (1, 2, 4), vocab_size=target().vocab_size)
    speculation = Speculation(oracle, parse_tree(tree))
    done = Engine(target(), pairs.tokenizer(), speculation, batch_size=3).generate(asked)
    assert [d.token_ids for d in done] == [d.token_ids for d in expected]
    assert sum(d.stats.walked for d in done) > sum(d.stats.tokens for d in done) / 3
    assert any(d.finish_reason == "stop" and d.stats.accepted_histogram[-1] for d in done)


def test_equal_when_preempted() -> None:
    """A sequence that comes back stands where it stood, in its grammar as in its log-probabilities."""
    params = [each.model_copy(update={"logprobs": 1, "max_tokens": 90}) for each in SAMPLED[:4]]
    asked = requests([GrammarSpec("regex", "([a-z]{1,9} )*[a-z]{200}")], params)
    drafter = tiny.drafter("eagle3", vocab_size=target().vocab_size, draft_vocab_size=200)
    speculation = Speculation(drafter, parse_tree("dynamic:3,2,5"))
    limits = Limits(max_running=4, max_cached_tokens=240)
    tight = Engine(target(), pairs.tokenizer(), speculation, limits=limits)
    done = tight.generate(asked)
    plain = engine(None).generate(asked)
    assert tight.state().preempted_total > 0
    assert [d.token_ids for d in done] == [d.token_ids for d in plain]
    for mine, theirs in zip(done, plain, strict=True):
        assert mine.logprobs is not None
        assert theirs.logprobs is not None
        assert [each.token_id for each in mine.logprobs] == mine.token_ids
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


@pytest.mark.parametrize("padding", [pytest.param(1, marks=pytest.mark.slow), 50])
def test_a_head_larger_than_the_tokenizer(padding: int) -> None:
    asked = requests(list(SPECS.values()), SAMPLED[:2])
    plain = engine(None, padding=padding).generate(asked)
    for request, done in zip(asked, plain, strict=True):
        assert request.grammar is not None
        check_legal(done, request.grammar)
    fast = engine("dynamic:4,3,8", padding=padding).generate(asked)
    assert [d.token_ids for d in fast] == [d.token_ids for d in plain]


@pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="an accelerator runs them: its passes are rectangles")
def test_illegal_nodes_are_not_verified() -> None:
    """A grammar that allows one token: whatever is drafted beside it is pruned."""
    letters = "".join(chr(97 + i % 26) for i in range(30))
    request = Request((5, 6, 7), SamplingParams(max_tokens=30), grammar=GrammarSpec("choice", json.dumps([letters])))
    made = engine("dynamic:4,4,12", batch=1)
    tokens = []
    made.submit(request)
    while not made.idle:
        made.step()
        if made.outcome is not None:
            tokens.append(made.outcome.pass_tokens)
    assert max(tokens) < 13


def test_typical_acceptance_is_legal_too() -> None:
    asked = requests(list(SPECS.values()), SAMPLED[1:4])
    done_by = engine("dynamic:4,3,8", rule=TypicalWalk(0.3, 0.9)).generate(asked)
    for request, done in zip(asked, done_by, strict=True):
        assert request.grammar is not None
        check_legal(done, request.grammar)


def test_a_grammar_wins_over_bans() -> None:
    """What has to come is banned, and an end before the tokens that have to come first."""
    (token,) = pairs.tokenizer()("a", add_special_tokens=False)["input_ids"]
    banned = SamplingParams(logit_bias={token: -float("inf")}, min_tokens=9, temperature=1.0, top_k=3)
    (done,) = engine(None).generate([Request((5,), banned, grammar=GrammarSpec("regex", "a"))])
    assert done.token_ids == [token, pairs.tokenizer().eos_token_id]
    assert done.finish_reason == "stop"


@pytest.mark.parametrize("tree", [None, "dynamic:4,3,8"])
def test_limits_end_one_answer_with_an_error(tree: str | None) -> None:
    """What was emitted before is legal; the others go on, and the next to ask for the same begins anew."""
    bomb = GrammarSpec("regex", "(([ab]{1,100}){1,100}){1,100}é")
    good = requests([SPECS["schema"]], SAMPLED[:2])
    last = pairs.tokenizer()("é", add_special_tokens=False)["input_ids"][0]
    endless = SamplingParams(max_tokens=200, logit_bias={last: -float("inf")})
    asked = [good[0], Request((5, 6), endless, grammar=bomb), good[1]]
    done = engine(tree).generate(asked)
    assert engine(tree).generate(asked)[1].token_ids == done[1].token_ids
    assert [d.finish_reason for d in done] == [reference()[0].finish_reason, "error", reference()[1].finish_reason]
    assert [done[0].token_ids, done[2].token_ids] == [reference()[0].token_ids, reference()[1].token_ids]
    assert done[1].error is not None
    assert done[1].error.startswith("RequestError: the grammar can't be followed any further: lexer error")
    assert re.fullmatch("[ab]*", done[1].text)


def test_bad_grammars_are_refused_before_queueing() -> None:
    made = engine(None)
    with pytest.raises(RequestError, match="regex"):
        made.submit(Request((5,), grammar=GrammarSpec("regex", "(")))
    with pytest.raises(RequestError, match="ignore_eos"):
        made.check(Request((5,), SamplingParams(ignore_eos=True), grammar=GrammarSpec("json_object")))
    assert made.idle


def test_the_seed_still_counts() -> None:
    answers = engine(None).generate(
        [Request((5,), SamplingParams(temperature=1.5, seed=s, max_tokens=30), grammar=SPECS["lark"]) for s in range(6)]
    )
    assert len({tuple(each.token_ids) for each in answers}) > 3


@pytest.mark.parametrize("tree", [None, "dynamic:4,3,8"])
def test_rounds_go_on_without_a_row_whose_mask_takes_long(monkeypatch: pytest.MonkeyPatch, tree: str | None) -> None:
    asked = requests([SPECS["lark"], None], SAMPLED[:2])
    expected = engine(None).generate(asked)
    go = threading.Event()
    compute = Constraint.compute_in_background
    monkeypatch.setattr(constraint, "_SLOW_SECONDS", -1.0)
    monkeypatch.setattr(constraint, "_FAST_SECONDS", -1.0)  # and no mask is fast again
    monkeypatch.setattr(Constraint, "compute_in_background", lambda *given: (go.wait(60), compute(*given))[1])
    serving = engine(tree)
    indices = [serving.submit(request) for request in asked]
    done: dict[int, Completion] = {}

    def step() -> None:
        done.update((chunk.index, chunk.completion) for chunk in serving.step() if chunk.completion is not None)

    while not done.keys() >= set(indices[2:]):
        step()
    assert not done.keys() & set(indices[:2]), "their masks aren't ready"
    assert not go.is_set()
    serving.step()  # nobody can go on, and nobody is waited for
    go.set()
    while not serving.idle:
        step()
        serving.check_invariants()
    assert [done[index].token_ids for index in indices] == [one.token_ids for one in expected]
    assert all(done[index].stats.drafted_depth <= 4 for index in indices[:2]), "one round"


FORCED = GrammarSpec(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"return": {"enum": ["clip", "coin"]}, "number": {"type": "integer", "maximum": 500}},
            "required": ["return", "number"],
            "additionalProperties": False,
        }
    ),
    whitespace="",
)
"""Answers such as `{"return":"clip","number":74}`."""


@pytest.mark.parametrize("name", ["prediction", "suffix", "ngram", "eagle3+suffix"])
def test_what_a_grammar_forces_is_drafted(name: str) -> None:
    """At every temperature, and in no row without a grammar."""
    cpu = torch.device("cpu")
    lookup = {"prediction": PredictionDrafter, "ngram": NgramDrafter}.get(name, SuffixDrafter)(cpu)
    drafter: Drafter = lookup
    if name.startswith("eagle3"):
        network = tiny.drafter("eagle3", vocab_size=target().vocab_size, draft_vocab_size=200)
        drafter = HybridDrafter(network, lookup, cpu)
    asked = requests([FORCED, None])
    plain = engine(None).generate(asked)
    drafting = Engine(target(), pairs.tokenizer(), Speculation(drafter, parse_tree("chain:6")), batch_size=4)
    done = drafting.generate(asked)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    for request, one, without in zip(asked, done, plain, strict=True):
        if request.grammar is not None:
            assert one.stats.target_passes < without.stats.target_passes / 3
        elif name == "prediction":
            assert one.stats.walked == 0


def test_a_server_without_a_drafter_observes_what_follows_a_grammar() -> None:
    session = Session(target(), pairs.tokenizer())
    made = session.engine(session.drafter(DrafterOptions(None, "prediction")), EngineOptions("chain:8", batch_size=2))
    held, free = requests([FORCED, None], SAMPLED[:1])
    assert [made._core.runner.observes(one, 1) for one in (held, free)] == [True, False]


def test_a_long_forced_text_is_divided_in_parts() -> None:
    """So that a hostile grammar doesn't take all other requests' time."""
    words = "return " * 400
    followed = Constraint(compile_grammar(pairs.tokenizer(), GrammarSpec("choice", json.dumps([words]))), [])
    written = list[int]()
    while tokens := followed.forced():
        assert len(tokens) <= 256
        assert followed.consume(tokens) == len(tokens)
        written += tokens
    assert words.startswith(text := pairs.tokenizer().decode(written))
    assert len(text) > len(words) - 10


def test_nothing_is_forced_where_there_is_a_choice_or_after_the_end() -> None:
    end = pairs.tokenizer().eos_token_id
    followed = Constraint(compile_grammar(pairs.tokenizer(), FORCED), [end])
    text = ""
    while tokens := followed.forced():
        text += pairs.tokenizer().decode(tokens)
        assert followed.consume(tokens) == len(tokens)
    assert text == '{"return":"'  # a c follows, but it may begin a longer token
    assert followed.consume(pairs.tokenizer().encode('clip","number":3}', add_special_tokens=False)) > 0
    assert followed.consume([end]) == 1
    assert followed.forced() == []
