"""Do vLLM and llama.cpp on the CPU give eyas's answers and counts with an exported drafter?

    make engines [VLLM_PYTHON=VENV/bin/python] [LLAMA_SERVER=BINARY LLAMA_SOURCES=FOLDER] [MODEL=TARGET DRAFTER=FOLDER]

The drafter is SmolLM2's, or one in a folder. K is the length of its chains; a block drafter drafts whole blocks. All
engines compute in float32; a target in a GGUF file is dequantized for that. llama.cpp also runs the file itself, as its
users do.

How to install the engines: benchmarks/serving/peers.md. Engines that aren't named are skipped. Results go into a JSON
file, which keeps earlier results of other engines, and from there into docs/formats.md. Exits with 1 if a run isn't
as expected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import httpx
import torch

from benchmarks.engines import llama as llama_engine
from benchmarks.engines import vllm as vllm_engine
from benchmarks.engines.compare import COARSE_TIE, Answer, Result, compare
from benchmarks.engines.counts import Counts, fitting_chains, full_chains, overshooting_chains
from benchmarks.engines.reference import Chains, Gaps, Reference, make_prompts, references
from benchmarks.engines.table import MARKS, table
from benchmarks.engines.vllm import Job
from benchmarks.harness import described, script
from benchmarks.pages import insert
from eyas.assets import SMOLLM2
from eyas.drafters.checkpoint import open_checkpoint
from eyas.drafters.kinds import KINDS
from eyas.errors import EyasError, UsageError
from eyas.files import write_json, write_text
from eyas.hub import find_drafter, find_target
from eyas.interop.export.consumers import CONSUMERS
from eyas.interop.export.drafter import ServedTarget
from eyas.interop.export.export import export
from eyas.targets import load_tokenizer
from eyas.targets.loading import load_embedding_and_head, read_config, read_model

OFFLINE = "in process"
HTTP = "over HTTP (`eyas serve --engine`)"
ALONE = "over HTTP, given the folder alone"
PACKED = f"{HTTP}, on the target's own GGUF file, which it multiplies by activations in 8 bits"
MISFIT = (
    "vLLM takes SGLang's layer numbers, which count outputs, for boundaries: lossless, but drafted from the wrong taps"
)


class DrafterFolder(NamedTuple):
    """The drafter that is exported and run."""

    path: Path
    kind: str
    method: str
    """The engines' name for its kind."""

    @classmethod
    def at(cls, path: Path) -> tuple[DrafterFolder, list[int]]:
        """The drafter in a folder, and its chain lengths; a block drafter has one, the number of its guesses."""
        found = open_checkpoint(path)
        if found.kind.family is None:
            raise UsageError(f"{path} is a drafter of kind {found.kind.name}, which only eyas runs")
        guesses = found.config.guesses
        return cls(path, found.kind.name, found.kind.family.method), [3, 5] if guesses is None else [guesses]


class TargetFolder(NamedTuple):
    """The drafter's target."""

    path: Path
    """A folder; in float32 if the target is in a GGUF file."""
    file: Path | None
    """That GGUF file."""

    @classmethod
    def at(cls, name: str, folder: Path) -> TargetFolder:
        """The target of a name; a GGUF file is converted to transformers' format in `folder`."""
        found = find_target(name)
        file = found.gguf
        if file is None:
            return cls(Path(found.source), None)
        read_model(found, read_config(found), torch.float32).save_pretrained(folder)
        load_tokenizer(found).save_pretrained(folder)
        return cls(folder, file)


class Checks:
    """All runs of all engines, each compared as soon as it ends."""

    def __init__(
        self,
        model: str,
        drafter: DrafterFolder,
        prompts: Sequence[tuple[int, ...]],
        tokens: int,
        chains: Sequence[int],
        folder: Path,
    ) -> None:
        self._model = model
        self._drafter = drafter
        self._reference = references(model, str(drafter.path), prompts, tokens, chains)
        self._gap: Callable[[Reference, int, int], float] = Gaps(model).gap
        self._prompts = prompts
        self._tokens = tokens
        self._chains = chains
        self._folder = folder
        self._path, self._file = TargetFolder.at(model, folder / "target")
        loaded = load_embedding_and_head(self._path, dtype=torch.float32, device="cpu")
        self._target = ServedTarget(str(self._path), loaded, load_tokenizer(self._path))

    def vllm(self, python: Path) -> Iterator[Result]:
        """Run vLLM's own form and speculators', in process and over HTTP, and SGLang's once to see a misreading."""
        for chain in self._chains:
            job = self._job("vllm", chain)
            version, answers = vllm_engine.offline(python, job)
            yield self._compared("vLLM", version, "vllm", OFFLINE, chain, answers, self._full(chain))
            with vllm_engine.server(python, job) as running:
                version, answers = vllm_engine.over_http(running, job)
            yield self._compared("vLLM", version, "vllm", HTTP, chain, answers, self._full(chain))
        chain = self._chains[0]
        version, answers = vllm_engine.offline(python, self._job("speculators", chain))
        yield self._compared("vLLM", version, "speculators", OFFLINE, chain, answers, self._full(chain))
        named = json.loads((self._exported("speculators") / "config.json").read_text(encoding="utf-8"))
        chain = named["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        if chain in self._chains:
            job = self._job("speculators", chain)
            with vllm_engine.server_of_folder(python, job) as running:
                version, answers = vllm_engine.over_http(running, job)
            yield self._compared("vLLM", version, "speculators", ALONE, chain, answers, self._full(chain))
        if self._drafter.method != "eagle3":  # SGLang reads vLLM's form of the others
            return
        chain = self._chains[0]
        version, answers = vllm_engine.offline(python, self._job("sglang", chain))
        yield self._compared("vLLM", version, "sglang", OFFLINE, chain, answers, self._full(chain), misfit=MISFIT)

    def llama(self, built: llama_engine.Llama) -> Iterator[Result]:
        """Run eyas's GGUF file, and vLLM's form (SGLang's of DFlash 2) as read by llama.cpp's own converter."""
        target = llama_engine.converted(built.sources, self._path, self._folder / "target.gguf")
        ours = self._exported("gguf", torch.float32) / "drafter.gguf"
        options = ("--target-model-dir", str(self._path))
        read = "vllm" if KINDS[self._drafter.kind].family in CONSUMERS["vllm"].families else "sglang"
        theirs = llama_engine.converted(built.sources, self._exported(read), self._folder / "converted.gguf", *options)
        version = llama_engine.version_of(built)
        if not built.example.is_file():
            print(f"skipped llama.cpp in process: there is no {built.example.name} next to {built.server.name}")
        for chain in self._chains if built.example.is_file() else ():
            job = Job(target, ours, chain, self._tokens, self._prompts, self._drafter.method)
            answers = llama_engine.in_process(built.example, job, self._target.tokenizer)
            yield self._compared("llama.cpp", version, "gguf", OFFLINE, chain, answers, self._overshooting(chain))
        for form, drafter, way in (("gguf", ours, HTTP), (read, theirs, f"{HTTP}, as its own converter reads it")):
            for chain in self._chains:
                job = Job(target, drafter, chain, self._tokens, self._prompts)
                with llama_engine.server(built.server, job) as running:
                    answers = llama_engine.over_http(running, job)
                yield self._compared("llama.cpp", version, form, way, chain, answers, self._fitting(chain))
        if self._file is not None:
            yield from self._packed(built.server, version, ours)

    def _packed(self, binary: Path, version: str, drafter: Path) -> Iterator[Result]:
        """Run the target's own GGUF file, whose weights llama.cpp multiplies by 8-bit activations."""
        assert self._file is not None
        plain: Sequence[Answer] = ()
        for chain in (0, *self._chains):
            job = Job(self._file, drafter, chain, self._tokens, self._prompts)
            with llama_engine.server(binary, job) as running:
                answers = llama_engine.over_http(running, job)
            if not chain:
                plain = answers
                continue
            found = self._compared("llama.cpp", version, "gguf", PACKED, chain, answers, self._fitting(chain))
            coarse = tuple(replace(each, within=COARSE_TIE) for each in found.partings)
            own = sum(a.tokens == b.tokens for a, b in zip(answers, plain, strict=True))
            yield replace(found, partings=coarse, own=own)

    def _full(self, chain: int) -> Callable[[Reference], Counts]:
        return lambda reference: full_chains(reference.rounds[chain], chain)

    def _fitting(self, chain: int) -> Callable[[Reference], Counts]:
        return lambda reference: fitting_chains(reference.rounds[chain], chain)

    def _overshooting(self, chain: int) -> Callable[[Reference], Counts]:
        chains = Chains(self._model, str(self._drafter.path), chain)

        def count(reference: Reference) -> Counts:
            end = len(reference.answer) - 1 if reference.ended else None
            return overshooting_chains(partial(chains.accepted, reference), chain, self._tokens, end)

        return count

    def _exported(self, consumer: str, dtype: torch.dtype | None = None) -> Path:
        folder = self._folder / consumer
        if not folder.exists():
            export(self._drafter.path, consumer, folder, self._target, dtype=dtype)
        return folder

    def _job(self, form: str, chain: int) -> Job:
        method = self._drafter.method
        return Job(self._path, self._exported(form), chain, self._tokens, self._prompts, method)

    def _compared(
        self,
        engine: str,
        version: str,
        form: str,
        way: str,
        chain: int,
        answers: Sequence[Answer],
        count: Callable[[Reference], Counts],
        misfit: str = "",
    ) -> Result:
        run: dict[str, Any] = {"engine": engine, "version": version, "form": form, "way": way, "misfit": misfit}
        run |= {"date": str(date.today()), "kind": self._drafter.kind}
        return compare(run, answers, self._reference, chain, count, self._gap)


def write(output: Path, page: Path | None, results: Sequence[Result]) -> None:
    """Replace earlier results of the same engines and kind in the JSON file and the page's tables. Called after each
    run, so that nothing is lost if a later one fails."""
    engines = {(result.engine, result.kind) for result in results}
    rows = json.loads(output.read_text(encoding="utf-8"))["results"] if output.is_file() else []
    kept = [earlier for earlier in map(Result.from_dict, rows) if (earlier.engine, earlier.kind) not in engines]
    together = [*kept, *results]
    write_json(output, described({"results": [result.as_dict() for result in together]}))
    if page is not None:
        write_text(page, insert(page.read_text(encoding="utf-8"), MARKS, table(together)))


@script
def main(
    *,
    output: Annotated[Path, "the JSON file"],
    vllm: Annotated[
        Path | None, "the Python of an environment with vLLM for CPU; engines that aren't named are left out"
    ] = None,
    llama: Annotated[tuple[Path, Path] | None, "llama-server, and the sources it was built from"] = None,
    model: Annotated[str, "the target: a folder, a GGUF file or a name"] = SMOLLM2,
    drafter: Annotated[str, "its drafter"] = SMOLLM2,
    prompts: int = 40,
    tokens: Annotated[int, "longest answer"] = 64,
    chains: Annotated[Sequence[int] | None, "K (default: 3 and 5, or a block drafter's guesses)"] = None,
    page: Annotated[Path | None, "the page with the table"] = None,
) -> int:
    """Run the engines that are named; returns the exit code."""
    # paths aren't resolved: an environment's Python is a link and finds its environment by the link's location
    results = list[Result]()
    failed = list[str]()
    asked = make_prompts(load_tokenizer(model), prompts)
    exported, lengths = DrafterFolder.at(Path(find_drafter(drafter)).absolute())
    with TemporaryDirectory() as work:
        checks = Checks(model, exported, asked, tokens, chains or lengths, Path(work))
        runs: dict[str, Callable[[], Iterator[Result]]] = {}
        if vllm is not None:
            runs["vllm"] = lambda: checks.vllm(vllm.absolute())
        if llama is not None and KINDS[exported.kind].family in CONSUMERS["gguf"].families:
            runs["llama.cpp"] = lambda: checks.llama(llama_engine.Llama(*(path.absolute() for path in llama)))
        for name, run in runs.items():
            try:
                for result in run():
                    print(json.dumps(result.as_dict()), flush=True)
                    results.append(result)
                    write(output, page, results)
            except (EyasError, OSError, ValueError, LookupError, httpx.HTTPError) as error:  # the others still run
                failed.append(f"{name}: {type(error).__name__}: {error}")
    failed += [f"{r.engine}, {r.form}, {r.way}, K = {r.chain}" for r in results if not r.passed]
    print("\n".join(f"FAILED {each}" for each in failed))
    print(f"{sum(r.passed for r in results)} of {len(results)} runs as expected")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
