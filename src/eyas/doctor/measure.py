"""Readings of a drafter, and how well each drafts: measured with teacher forcing, on answers of the target.

The drafter reads the target's true states along the target's own answers, and a chain is drafted from every position of
an answer. It is fed the true tokens, as it would be for as long as it is right, so the greedy acceptance of chains is
exact. A block drafter runs a block from each position instead, and is fed the true tokens where it reads any. The
*overlap* sum(min(p, q)) of the target's and the drafter's distributions is what sampling at temperature 1 accepts: a
smooth measure of the same quality, which distinguishes readings with far fewer tokens.

Two readings are measured on the same answer tokens, so their overlaps are compared token by token. A block of 16
neighboring tokens counts as one observation, because neighbors aren't independent. With the sum D_b of the
differences and the number n_b of tokens in each of B blocks:

    gain = sum D_b / sum n_b,   error^2 = B / (B - 1) * sum (D_b - gain * n_b)^2 / (sum n_b)^2,   z = gain / error

Of m readings that are tried, one wins if its z exceeds the normal quantile of 1 - 0.001 / m (so that for one sound
drafter in a thousand, some reading wins by chance), its gain is at least 0.001, and its greedy acceptance isn't lower.

Shapes: B answers, S positions (prompt and answer, right-padded), A taps, Ht target hidden, T most probable tokens,
J inputs of the head, K chain positions, M answer tokens, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, sqrt
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.block.network import BlockConfig, BlockNetwork
from eyas.drafters.checkpoint import Checkpoint
from eyas.drafters.config import DrafterConfig
from eyas.drafters.kind import Kind
from eyas.drafters.levels import HeadsNetwork
from eyas.drafters.loading import check_fit
from eyas.drafters.network import DraftNetwork
from eyas.errors import CheckpointError, RequestError
from eyas.targets import Target
from eyas.text.chats import Message
from eyas.text.template import encode_chat, encode_text
from eyas.train.loss.block import BlockAttention, blocks_at, read_context, run_blocks, sampled_anchors
from eyas.train.loss.cpu_linear import fast_linears
from eyas.train.loss.ttt import ChainRows, chain_rows, unrolled


@dataclass(frozen=True)
class Reading:
    """One interpretation of a drafter's files; readings of one drafter share unchanged tensors."""

    kind: Kind
    config: DrafterConfig
    tensors: Mapping[str, Tensor] = field(repr=False)
    """Native name -> tensor, including the vocabulary map."""
    taps: tuple[int, ...]
    """The target's boundaries whose states the drafter reads (aux hidden states)."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, target: Target) -> Reading:
        """The reading with which eyas loads the files. Raises CheckpointError, DrafterMismatchError."""
        config = checkpoint.config
        if not checkpoint.kind.trained:
            raise CheckpointError(
                f"{checkpoint.raw.path} is a {checkpoint.kind.name}, whose files are read in one way only: "
                "there is nothing to try"
            )
        check_fit(config, target, str(checkpoint.raw.path))
        tensors = checkpoint.network(target).state_dict()
        return cls(checkpoint.kind, config, tensors, config.taps_of(target.num_layers))

    def on(self, target: Target) -> Reading:
        """The same reading with its tensors on the target's device and in its dtype."""
        moved = {
            name: tensor.to(target.device, target.dtype if tensor.is_floating_point() else None)
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=moved)

    def network(self, target: Target) -> DraftNetwork:
        """The draft network of this reading; an embedding or head that isn't in the files is `target`'s."""
        return self.kind.blank(self.config).fill(self.tensors, target).to(target.device)

    def changed(
        self,
        config: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor | None] | None = None,
        taps: tuple[int, ...] | None = None,
    ) -> Reading:
        """The reading with other config fields, tensors (None removes one) or taps."""
        merged = {**self.tensors, **(tensors or {})}
        return replace(
            self,
            config=self.config.model_copy(update=dict(config or {})),
            tensors={name: tensor for name, tensor in merged.items() if tensor is not None},
            taps=self.taps if taps is None else taps,
        )


@dataclass(frozen=True)
class Change:
    """A change of a reading that may correct it; it also applies to the same files in another dtype."""

    aspect: str
    """The aspect that is read differently; the search changes each aspect at most once."""
    name: str
    """How the aspect is read instead, for the report."""
    repair: str
    """How to change the files to repair them, for the report."""
    apply: Callable[[Reading], Reading]
    written: bool = True
    """Whether a drafter's files can express the change."""


Aspect = Callable[[Reading, Target], Iterator[Change]]
"""A function that yields all changes of a reading in one aspect."""


LIKELIEST = 64
"""The number of most probable tokens that are kept of the target's distribution, all but about 1% of its mass."""

POSITIONS_AT_ONCE = 512
"""Positions whose logits over the whole vocabulary are in memory at once."""


@dataclass
class Transcript:
    """The target's own answers, with its states and probabilities from another pass with teacher forcing."""

    tokens: Tensor  # [B, S]
    lengths: Tensor  # [B]
    answers: Tensor  # [B, S] bool: tokens written by the target
    likely_ids: Tensor = field(repr=False)  # [B, S, T] the most probable tokens after each position
    likely: Tensor = field(repr=False)  # [B, S, T] float32: the target's probability of each, at temperature 1
    """The target's probabilities of `likely_ids`; both are 0 where no answer token follows."""
    _states: dict[int, Tensor] = field(repr=False, default_factory=dict)  # boundary -> [B, S, Ht]
    _source: Tensor | None = None  # [B, S] int64: the flat position whose states each position gets; None = its own

    @classmethod
    @torch.inference_mode()
    def of(
        cls,
        target: Target,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        boundaries: Collection[int],
    ) -> Transcript:
        """Run the target over all answers in one pass; the states at `boundaries` are kept."""
        rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        lengths = torch.tensor([len(row) for row in rows], device=target.device)
        tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64, device=target.device)
        written = torch.zeros_like(tokens, dtype=torch.bool)
        for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            tokens[index, : len(row)] = torch.tensor(row, device=target.device)
            written[index, len(prompt) : len(row)] = True
        kept = sorted(set(boundaries))
        trace = target.trace(tokens, lengths, kept)
        ids, likely = _likeliest(target, trace.final, written)
        states = {boundary: trace.taps[:, :, i] for i, boundary in enumerate(kept)}
        return cls(tokens, lengths, written, ids, likely, states)

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def answer_tokens(self) -> int:
        """The number of tokens in all answers."""
        return int(self.answers.sum())

    @property
    def most_common_share(self) -> float:
        """The share of the most common answer token, which is the acceptance of always guessing it."""
        return int(torch.bincount(self.tokens[self.answers]).max()) / self.answer_tokens

    def states(self, taps: Sequence[int]) -> Tensor:
        """The states [B, S, A, Ht] at these boundaries, as a drafter reads them at each position."""
        shown = torch.stack([self._states[tap] for tap in taps], dim=2)
        return shown if self._source is None else shown.flatten(0, 1)[self._source]

    def every(self, step: int) -> Transcript:
        """A transcript with one in `step` answers, cut to the longest of these."""
        width = int(self.lengths[::step].max())

        def cut(tensor: Tensor) -> Tensor:
            return tensor[::step, :width]

        states = {boundary: cut(tensor) for boundary, tensor in self._states.items()}
        return Transcript(
            cut(self.tokens), self.lengths[::step], cut(self.answers), cut(self.likely_ids), cut(self.likely), states
        )

    def with_other_states(self) -> Transcript:
        """The same tokens, but every position gets the states of another one, half of the text away."""
        batch, width = self.tokens.shape
        real = torch.arange(width, device=self.device) < self.lengths.unsqueeze(1)
        source = torch.arange(batch * width, device=self.device).view(batch, width)
        positions = source[real]
        source[real] = positions.roll(len(positions) // 2)
        return replace(self, _source=source)


def _likeliest(target: Target, final: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable tokens and their probabilities [B, S, T], where an answer token follows.

    final [B, S, Ht]; written [B, S] bool is true at answer tokens.
    """
    before = torch.nn.functional.pad(written[:, 1:], (0, 1))
    top = min(LIKELIEST, target.vocab_size)
    ids = torch.zeros(*written.shape, top, dtype=torch.int64, device=final.device)
    likely = torch.zeros(*written.shape, top, dtype=torch.float32, device=final.device)
    found = [
        target.head(states).float().softmax(-1).topk(top) for states in torch.split(final[before], POSITIONS_AT_ONCE)
    ]
    ids[before] = torch.cat([each.indices for each in found])
    likely[before] = torch.cat([each.values for each in found])
    return ids, likely


PROMPTS: tuple[str, ...] = (
    "Lena sells 14 jars of honey on Saturday and twice as many on Sunday. Each jar costs $6. "
    "How much money does she earn on both days?",
    "Complete the code I provided.\n\ndef count_words(text, minimum=1):\n"
    '    """Return a dictionary that maps each word of text to the number of times it occurs,\n'
    '    leaving out words that occur fewer than minimum times.\n    """\n',
    "A bus has 48 seats. A third of them are taken at the first stop and 9 more at the second. "
    "How many seats are still free?",
    "Complete the code I provided.\n\ndef read_lines(path, encoding='utf-8'):\n"
    '    """Read a text file and return the list of its lines without the line ends."""\n',
    "What does `shutil.copytree` do?",
    "Tom has 3 boxes with 12 pencils each. He gives 7 pencils away. How many are left?",
    "Write a short story about a lighthouse.",
    "Write a Python function that returns the prime numbers below n.",
    "What does `os.path.join` do?",
    "A train travels 60 miles in 1.5 hours. How far does it travel in 4 hours?",
    "List three ways to save water at home.",
    "Complete the code I provided.\n\ndef merge(first, second):\n"
    '    """Merge two sorted lists into one sorted list.\n    """\n',
    "Explain in two sentences why the sky is blue.",
    "Sara bakes 5 trays of 8 cookies and sells each cookie for $2. How much does she earn?",
    "What is the capital of France, and what is it known for?",
    "Explain what a hash table is to someone who has never programmed.",
    "A shop sells apples at $3 a kilo. How much do 4 kilos and a bag for $1 cost?",
    "Describe a walk through a market in the early morning.",
    "What does `json.dumps` do?",
    "Complete the code I provided.\n\ndef flatten(items):\n"
    '    """Return one list with the elements of a list of lists.\n    """\n',
    "Write a polite email that asks for a meeting next week.",
    "Anna reads 18 pages a day. How many pages does she read in two weeks?",
    "Translate 'good morning' into French, Spanish and German.",
    "Give me a simple recipe for pancakes.",
)
"""The prompts: short tasks of many kinds, written for the doctor; none is part of an evaluation set."""


def encode_prompts(tokenizer: Any, longest: int | None) -> list[tuple[int, ...]]:
    """The prompts of fewer than `longest` tokens, as chats if the tokenizer has a template, else as plain text.

    Raises RequestError if all are longer.
    """
    encoded = [_encode(tokenizer, text) for text in PROMPTS]
    fitting = [prompt for prompt in encoded if longest is None or len(prompt) < longest]
    if not fitting:
        raise RequestError(f"the target's context of {longest} tokens is too short for the doctor's prompts")
    return fitting


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    if getattr(tokenizer, "chat_template", None):
        return encode_chat(tokenizer, [Message(role="user", content=text)])
    return encode_text(tokenizer, text)


BLOCK = 16
"""Neighboring answer tokens that count as one observation."""
CHANCE = 0.001
"""Share of sound drafters for which some other reading may win by chance."""
MIN_GAIN = 0.001
"""Minimum gain in overlap that counts, however certain it is."""
_ANCHORS = 64
"""Maximum blocks per answer, since each runs all its slots through all layers."""
MIN_GAIN_FROM_TAPS = 0.02
"""Minimum gain in overlap from the target's states that shows that a drafter can use them."""


@dataclass(frozen=True)
class Measurement:
    """How well a reading drafts on a transcript, token by token, so that two readings can be compared in pairs."""

    accepted: tuple[float, ...]
    """Acceptance by chain position, counted like `Stats.accepted_by_position`."""
    right: Tensor  # [M] share of the chain positions whose first choice is the target's token
    overlap: Tensor  # [M] mean overlap over the chain positions
    blocks: Tensor  # [M] int64: the number of the block that a token is in

    @property
    def accept_length(self) -> float:
        """Tokens per target pass, including the bonus token."""
        return 1.0 + sum(self.accepted)


@torch.inference_mode()
def measure(reading: Reading, transcript: Transcript, target: Target, length: int) -> Measurement:
    """Draft a chain of `length` tokens from every position of the answers, and compare it with the target."""
    network = reading.network(target)
    states = transcript.states(reading.taps)
    right, overlap = [], []
    with fast_linears(transcript.device):
        if isinstance(network, BlockNetwork):
            rows, steps = _block_chains(network, transcript, states, length)
        else:
            rows, steps = _chains(network, transcript, states, length)
        truth = transcript.tokens.flatten()[rows.answers + 1]
        seen = _Likely(network, transcript, rows)
        for step, (read, logits) in enumerate(steps):
            guessed, share = seen.compare(read[rows.guesses[step].clamp(min=0)], logits)
            right.append(guessed == truth)
            overlap.append(share)
    there = rows.guesses[: len(right)] >= 0  # [K, M]; answers may be shorter than the chain
    hits = torch.stack(right) & there
    counted = there.sum(0)
    guessed_at_all = counted > 0  # all tokens, except where only some blocks are run
    return Measurement(
        accepted=_accepted(hits, there, rows, transcript),
        right=(hits.sum(0) / counted)[guessed_at_all],
        overlap=((torch.stack(overlap) * there).sum(0) / counted)[guessed_at_all],
        blocks=_blocks(transcript.answers, rows)[guessed_at_all],
    )


def comparable_length(config: DrafterConfig, length: int) -> int:
    """The longest chain up to `length` that all readings of a drafter guess; their blocks differ by two guesses."""
    if isinstance(config, BlockConfig):
        return min(length, max(1, config.block_size - 2))
    return length if config.guesses is None else min(length, config.guesses)


_Head = Callable[[Tensor], Tensor]
_Steps = Iterator[tuple[Tensor, _Head]]
"""For each step, the input of its head [., J], and the head."""


def _chains(network: DraftNetwork, transcript: Transcript, states: Tensor, length: int) -> tuple[ChainRows, _Steps]:
    """A chain from every position of the answers."""
    rows = chain_rows(transcript.answers, length)
    steps = enumerate(unrolled(network, transcript.tokens, states, rows))

    def head(step: int) -> _Head:
        return partial(network.logits_at, slot=step) if isinstance(network, HeadsNetwork) else network.logits

    return rows, ((normed, head(step)) for step, (_, normed) in steps)


def _block_chains(
    network: BlockNetwork, transcript: Transcript, states: Tensor, length: int
) -> tuple[ChainRows, _Steps]:
    """A block from every position of the answers, or from `_ANCHORS` of each."""
    begun = transcript.answers | F.pad(transcript.answers[:, 1:], (0, 1))  # with the token before each answer
    anchors = sampled_anchors(begun, _ANCHORS, (0,))
    steps = min(length, network.config.guesses)
    blocks = blocks_at(network.config, transcript.tokens, transcript.answers, anchors, steps)
    attention = BlockAttention(anchors, network.config.views)
    context = read_context(network, states, attention.store).flatten(0, 1)[anchors.rows]
    block = run_blocks(network, network.embed(blocks.masked), context, blocks, attention)
    joined = network.joined(block, blocks.before)
    return blocks.rows(), ((read, network.joined_logits) for read in joined.unbind(1))


class _Likely:
    """The target's most probable tokens at every answer token, as draft ids with probabilities."""

    def __init__(self, network: DraftNetwork, transcript: Transcript, rows: ChainRows) -> None:
        self._target_ids = ids = network.target_ids
        draft_ids = torch.full((network.config.vocab_size,), -1, dtype=torch.int64, device=ids.device)
        draft_ids[ids] = torch.arange(len(ids), device=ids.device)
        likely = draft_ids[transcript.likely_ids.flatten(0, 1)[rows.answers]]  # [M, T], -1 where it can't be drafted
        self._ids = likely.clamp(min=0)
        self._p = transcript.likely.flatten(0, 1)[rows.answers] * (likely >= 0)

    def compare(self, read: Tensor, head: _Head) -> tuple[Tensor, Tensor]:
        """First choices (target ids) and overlaps, both [M], for the input of the head [M, J] in a step."""
        ids = self._target_ids
        parts = zip(*(torch.split(each, POSITIONS_AT_ONCE) for each in (read, self._ids, self._p)), strict=True)
        choices, overlaps = [], []
        for states, likely, p in parts:
            logits = head(states).float()  # [., Vd]
            q = (logits.gather(1, likely) - logits.logsumexp(1, keepdim=True)).exp()
            choices.append(ids[logits.argmax(-1)])
            overlaps.append(torch.minimum(q, p).sum(1))
        return torch.cat(choices), torch.cat(overlaps)


def _accepted(hits: Tensor, there: Tensor, rows: ChainRows, transcript: Transcript) -> tuple[float, ...]:
    """The share of chains that are right up to each position, not counting chains cut off by the answer's end.

    hits, there [K, M] are indexed by the token that is guessed.
    """
    steps = len(hits)
    hit = torch.zeros(steps, transcript.answers.numel(), dtype=torch.bool, device=hits.device)  # by a chain's start
    known = torch.zeros_like(hit)
    for step in range(steps):
        start = (rows.answers - step)[there[step]]
        hit[step, start] = hits[step][there[step]]
        known[step, start] = True
    known = known & known[0]
    alive = hit.cumprod(0).bool() & known
    return tuple((alive.sum(1) / known.sum(1).clamp(min=1)).tolist())


def _blocks(answers: Tensor, rows: ChainRows) -> Tensor:
    """The block number of each answer token [M]; a block never spans two answers."""
    width = answers.shape[1]
    row = rows.answers // width
    index = answers.cumsum(1).flatten()[rows.answers + 1] - 1  # within the answer
    blocks = int(index.max()) // BLOCK + 1
    return row * blocks + index // BLOCK


@dataclass(frozen=True)
class Gain:
    """The gain of one reading over another."""

    mean: float
    """The mean difference in overlap, which is the acceptance of a draft token at temperature 1."""
    error: float
    """The standard error of `mean`."""
    greedy: float
    """The difference in the share of draft tokens that are right, given true tokens before them."""

    @property
    def z(self) -> float:
        """`mean` divided by its standard error."""
        if self.error:
            return self.mean / self.error
        return 0.0 if self.mean == 0 else inf if self.mean > 0 else -inf

    def convincing(self, tried: int, least: float = MIN_GAIN) -> bool:
        """Whether the gain of the best of `tried` readings is significant and at least `least`."""
        return self.z > needed_z(tried) and self.mean >= least and self.greedy >= 0


def needed_z(tried: int) -> float:
    """The z that the best of `tried` readings must exceed."""
    return NormalDist().inv_cdf(1 - CHANCE / max(1, tried))


def gain(other: Measurement, base: Measurement) -> Gain:
    """The gain of `other` over `base`, which were measured on the same tokens."""
    difference = (other.overlap - base.overlap).double()
    count = int(base.blocks.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64, device=difference.device).index_add_(0, base.blocks, difference)
    sizes = torch.bincount(base.blocks, minlength=count).double()
    mean = float(difference.mean())
    real = int((sizes > 0).sum())
    spread = float((sums - mean * sizes).square().sum())
    error = sqrt(real / (real - 1) * spread) / len(difference) if real > 1 else inf
    return Gain(mean, error, float((other.right - base.right).double().mean()))
