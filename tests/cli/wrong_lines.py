"""Over a hundred wrong command lines that cover every verb, and a program that runs them one after another.

The program reads lines as JSON from stdin and writes the result of each: exit code, output, and the heavy modules
imported so far. `{f}` stands for a folder with the files that `make_files` makes.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

HEAVY = ("torch", "transformers", "fastapi", "matplotlib", "scipy", "optuna")

_GENERATE = "generate {t} --prompt x"
_PAIR = f"{_GENERATE} --draft-model {{d}}"
_SERVE = "serve {t} --port 0"
_VERIFY = "verify {t} --draft-model {d} --prompt-file {f}/prompts.jsonl"
_EXPORT = "export {d} --to vllm -o {f}/out"
_PLAN = "plan {t} --samples 10 --length 10"
_PREPARE = "data prepare stdlib -o {f}/out"
_REGENERATE = "data regenerate {t} --chats {f}/chats.jsonl -o {f}/out.jsonl"
_CAPTURE = "data capture --model {t} --chats {f}/chats.jsonl -o {f}/out"
_BENCH = "bench {t} --draft-model {d} --prompt-file {f}/prompts.jsonl"
_TREES = "bench trees {t} --draft-model {d} --prompt-file {f}/prompts.jsonl"
_METHODS = "bench methods {t} --prompt-file {f}/prompts.jsonl"
_CHECKPOINTS = "bench checkpoints {f}/empty --prompt-file {f}/prompts.jsonl"
_ACCURACY = "bench accuracy {t} --method ngram"
_LOAD = "bench serve --prompt-file {f}/prompts.jsonl"

LINES: list[tuple[str, str]] = [
    # verbs and groups
    ("generat {t}", "No such command 'generat'"),
    (f"{_SERVE} --max-cached-tokens 1", "greater than or equal to 64"),
    (f"{_PAIR} --tree chain:100000", "length must be at most 1024"),
    ("chat ./mien", "there is no ./mien"),
    ("generate --no-such-option", "--no-such-option"),
    ("data prepar stdlib", "No such command 'prepar'"),
    ("bench chekpoints run", "No such command 'chekpoints'"),
    ("--no-such-option", "--no-such-option"),
    # learn
    ("learn run {f}/empty", "isn't a folder of `eyas serve --learn`"),
    ("learn run {f}/none --once", "start the server with it first"),
    ("learn status {f}/empty --json", "isn't a folder of"),
    ("learn promote {f}/empty 3", "isn't a folder of"),
    ("learn revert {f}/empty", "isn't a folder of"),
    ("learn pin {f}/empty --off", "isn't a folder of"),
    (f"{_SERVE} --learn-share 0.5", "say how to learn: give --learn DIR, too"),
    (f"{_SERVE} --learn {{f}}/empty", "--learn is about a drafter"),
    (f"{_SERVE} --learn {{f}}/empty --draft-model auto", "--learn trains one drafter"),
    (f"{_SERVE} --engine vllm --draft-model auto", "is for eyas's own engine"),
    (f"{_GENERATE} --draft-model auto --method eagle3", "takes what it finds"),
    (f"{_SERVE} --draft-model {{d}} --learn {{f}}/empty --learn-canary 0.9", "--learn-canary"),
    # generate
    ("generate --prompt x", "which target?"),
    ("generate {t}", "give either --prompt TEXT or --prompt-file FILE"),
    ("generate {t} Hi", "give the text to answer with --prompt"),
    ("generate ./mien --prompt x", "there is no ./mien"),
    ("generate {f}/prompts --prompt x", "did you mean {f}/prompts.jsonl"),
    ("generate {f}/empty --prompt x", "has no config.json"),
    ("generate {f}/prompts.jsonl --prompt x", "is a file: give a GGUF file"),
    ("generate ~/no-such-folder --prompt x", "there is no ~/no-such-folder"),
    ("generate a/b/c/d --prompt x", "there is no a/b/c/d"),
    ("generate {t} --model other --prompt x", "leave one out"),
    (f"{_GENERATE} --raw --prompt-file {{f}}/prompts.jsonl", "give either --prompt TEXT or --prompt-file FILE"),
    ("generate {t} --prompt-file {f}/none.jsonl", "does not exist"),
    ("generate {t} --prompt-file {f}/no_rows.jsonl", "has no rows"),
    (f"{_GENERATE} --temperature -1", "--temperature -1"),
    (f"{_GENERATE} --temperature warm", "Invalid value for '--temperature'"),
    (f"{_GENERATE} --top-p 2", "--top-p 2"),
    (f"{_GENERATE} --max-new-tokens 0", "--max-new-tokens"),
    (f"{_GENERATE} --batch-size none", "--batch-size"),
    (f"{_GENERATE} --dtype int8", "'int8' is not one of"),
    (f"{_GENERATE} --attention flash", "'flash' is not one of"),
    (f"{_GENERATE} --quantize int3", "--quantize"),
    (f"{_GENERATE} --quantize int8 --compile", "leave out --compile"),
    (f"{_GENERATE} --enforce-eager --device cpu", "leave out --enforce-eager"),
    (f"{_GENERATE} --enforce-eager --compile", "leave out --enforce-eager"),
    (f"{_GENERATE} --kernels triton --device cpu", "leave out --device cpu"),
    (f"{_GENERATE} --kernels triton --compile", "leave out --compile"),
    (f"{_GENERATE} --device toaster", "unknown device 'toaster'"),
    (f"{_GENERATE} --tensor-parallel-size 2", "--engine vllm"),
    (f"{_GENERATE} --tree chain:2", "--tree needs a drafter"),
    (f"{_GENERATE} --acceptance typical", "--acceptance needs a drafter"),
    (f"{_PAIR} --tree dynamic:5,6", "unknown tree 'dynamic:5,6'"),
    (f"{_PAIR} --tree chain:0", "length must be at least 1"),
    (f"{_PAIR} --tree static:oak", "unknown static tree 'oak'"),
    (f"{_PAIR} --tree auto:x", "unknown tree 'auto:x'"),
    (f"{_PAIR} --tree shared:4,4,0", "budget must be at least 1"),
    (f"{_PAIR} --tree chain:2 -n 2", "give one of them"),
    (f"{_PAIR} -n many", "write a number of at least 1, or auto"),
    (f"{_PAIR} --method oak", "unknown method 'oak'"),
    (f"{_PAIR} --method none", "would be ignored"),
    (f"{_PAIR} --acceptance kind", "unknown acceptance 'kind'"),
    (f"{_PAIR} --acceptance typical:2,1", "epsilon 2.0"),
    (f"{_PAIR} --acceptance rejection", "give --tree chain:K"),
    (f"{_PAIR} --acceptance rejection --tree dynamic:4,4,9", "give --tree chain:K"),
    (f"{_GENERATE} --method ngram -n 3 --acceptance rejection", "draws from distributions"),
    (f"{_GENERATE} --method draft_model", "needs a drafter"),
    (f"{_PAIR} --tree chain:2 --costs {{f}}/costs.json", "--costs are measured for --tree auto only"),
    (f"{_PAIR} --draft-weights none.bin", "holds no such file"),
    (f"{_GENERATE} --draft-model ../mien", "there is no ../mien"),
    (f"{_GENERATE} --speculative-config {{", "--speculative-config isn't valid JSON"),
    (f'{_GENERATE} --speculative-config {{"method":"mlp_speculator"}}', "eyas has no such method"),
    (f"{_GENERATE} --speculative-algorithm OAK", "--speculative-algorithm OAK"),
    # chat, demo
    ("chat {t} --min-p 3", "--min-p 3"),
    ("chat {t} --draft-model ./mien", "there is no ./mien"),
    ("demo --tree bush", "unknown tree 'bush'"),
    ("demo --dtype int8", "'int8' is not one of"),
    # serve
    ("serve", "which target?"),
    ("serve ./mien", "there is no ./mien"),
    (f"{_SERVE} --port 99999", "--port"),
    (f"{_SERVE} --log-format xml", "'xml' is not one of"),
    (f"{_SERVE} --draft-model {{d}} --tree bush", "unknown tree 'bush'"),
    (f"{_SERVE} --draft-model {{f}}/none", "there is no {f}/none"),
    (f"{_SERVE} --export-to {{f}}/out", "about other engines"),
    # verify, inspect, doctor, export
    ("verify {t} --draft-model {d}", "Missing option '--prompt-file'"),
    (f"{_VERIFY} --tree bush", "unknown tree 'bush'"),
    (f"{_VERIFY} --temperatures hot", "write numbers with commas"),
    (f"{_VERIFY} --batch-sizes 0", "at least 1"),
    ("verify {t} --draft-model ./mien --prompt-file {f}/prompts.jsonl", "there is no ./mien"),
    ("inspect ./mien", "there is no ./mien"),
    ("inspect {t} --model ./mien", "there is no ./mien"),
    ("inspect", "Missing argument 'MODEL'"),
    ("doctor {t} --draft-model ./mien", "there is no ./mien"),
    ("doctor {t} --draft-model {d} --fix {f}", "exists and isn't empty"),
    ("doctor {t} --draft-model {d} -n 0", "--num-speculative-tokens"),
    ("cache --clear penels", "the cache has no part penels: it has gguf,"),
    ("cache --unused-days 3", "--unused-days says what --clear removes: add --clear"),
    ("push ./mien me/mine", "'./mien' does not exist"),
    ("push {f}/empty me/mine", "{f}/empty has no config.json: give a drafter's folder"),
    ("push {f}/empty mine", "mine isn't a repository's id: write OWNER/NAME"),
    ("export ./mien --to vllm -o {f}/out", "there is no ./mien"),
    ("export {d} --to nobody -o {f}/out", "'nobody' is not one of"),
    (f"{_EXPORT} --model ./mien", "there is no ./mien"),
    (f"{_EXPORT} --taps a,b", "--taps 'a,b'"),
    (f"{_EXPORT} --target demo", "No such option: --target"),
    # plan, train, sweep
    ("plan ./mien --samples 10 --length 10", "there is no ./mien"),
    (f"{_PLAN} --taps low", "--taps low"),
    (f"{_PLAN} --final some", "--final some"),
    (f"{_PLAN} --states fp4", "'fp4' is not one of"),
    (f"{_PLAN} --anchors 3", "--anchors has no meaning for a drafter of kind eagle3"),
    (f"{_PLAN} --kind dspark --unroll 3", "--unroll has no meaning for a drafter of kind dspark"),
    ("train eagle33", "did you mean eagle3?"),
    ("pipeline {t} {f}/chats.jsonl -o {f}/out --workers 2", "--workers has no effect without --on"),
    ("train {f}/none.yaml", "there is no file {f}/none.yaml"),
    ("train eagle3 drafter", "must look like key=value"),
    ("train {f}/empty.yaml", "one section, `lm` or `drafter`"),
    ("sweep eagl3", "did you mean eagle3?"),
    ("sweep eagle3 serach=grid", "did you mean search?"),
    ("sweep eagle3 --on dask", "--on dask: write ray"),
    # data
    ("data prepare {f}/none.jsonl -o {f}/out", "there is no file or folder"),
    (f"{_PREPARE} --model ./mien", "there is no ./mien"),
    (f"{_PREPARE} --too-long burn", "'burn' is not one of"),
    (f"{_PREPARE} --near-duplicates 7", "--near-duplicates 7"),
    (f"{_REGENERATE} --on ray --endpoint http://x", "--on shares the work of engines"),
    (f"{_REGENERATE} --turns some", "'some' is not one of"),
    (f"{_REGENERATE} --endpoint http://x --batch-read {{f}}/chats.jsonl", "give one of them"),
    ("data synthesize --model {t} --chats 0 -o {f}/out.jsonl", "--chats"),
    ("data synthesize ./mien --chats 1 -o {f}/out.jsonl", "there is no ./mien"),
    ("data synthesize {t} --chats 1 --min-words 9 --max-words 5 -o {f}/out.jsonl", "there are none"),
    ("data synthesize {t} --chats 1 --near-duplicates 2 -o {f}/out.jsonl", "a similarity above 0 and at most 1"),
    ("data regenerate ./mien --chats {f}/chats.jsonl -o {f}/out.jsonl", "there is no ./mien"),
    ("data capture --model ./mien --chats {f}/chats.jsonl -o {f}/out", "there is no ./mien"),
    (f"{_CAPTURE} --engine sglang", "'sglang' is not one of"),
    (f"{_CAPTURE} --engine vllm --engine-command no-such-program", "there is no program 'no-such-program'"),
    (f"{_CAPTURE} --engine-option=--enforce-eager", "--engine-option would be ignored"),
    (f"{_CAPTURE} --on ray:head", "write ray, or ray:ADDRESS"),
    (f"{_CAPTURE} --workers 2", "--workers would be ignored without --on"),
    (f"{_CAPTURE} --on ray --dry-run", "leave out --on"),
    (f"{_CAPTURE} --final some", "--final some"),
    # bench
    (f"{_BENCH} --tree bush", "unknown tree 'bush'"),
    (f"{_BENCH} --output {{f}}/none/report.json", "there is no directory {f}/none"),
    (f"{_TREES} --chain 0", "--chain '0'"),
    (f"{_METHODS} --method oak", "unknown method 'oak'"),
    (f"{_METHODS} --tree bush", "unknown tree 'bush'"),
    (f"{_METHODS} --transformers --temperature 1", "--transformers measures greedy answers"),
    (f"{_CHECKPOINTS} --tree bush", "unknown tree 'bush'"),
    (f"{_ACCURACY} --task gsm9k={{f}}/prompts.jsonl", "write gsm8k=FILE or humaneval=FILE"),
    (f"{_ACCURACY} --task gsm8k={{f}}/prompts.jsonl", "prompts.jsonl:1: `question` is missing"),
    (f"{_ACCURACY} --task gsm8k={{f}}/prompts.jsonl --shots 5", "give --shots-file"),
    (f"{_ACCURACY} --task humaneval={{f}}/prompts.jsonl --execute", "nothing to execute"),
    (_LOAD, "say how requests arrive"),
    (f"{_LOAD} --concurrency 1", "no server to measure"),
    ("bench report {f}/empty -o {f}/none/report.html", "there is no directory {f}/none"),
]
"""(command line, part of its error message)."""


def make_files(folder: Path) -> None:
    """Make the files that the lines name, so that each line has only its intended error."""
    (folder / "empty").mkdir()
    (folder / "prompts.jsonl").write_text('{"prompt": "x"}\n', encoding="utf-8")
    (folder / "no_rows.jsonl").write_text("", encoding="utf-8")
    (folder / "empty.yaml").write_text("{}\n", encoding="utf-8")
    chat = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    (folder / "chats.jsonl").write_text(json.dumps(chat) + "\n", encoding="utf-8")


def main() -> None:
    """Run the lines from stdin in this process, which itself imports nothing heavy."""
    from typer import testing

    from eyas.cli.app import app

    testing._get_command = cache(testing._get_command)  # it builds all commands for every line
    for words in json.load(sys.stdin):
        result = testing.CliRunner().invoke(app, words)
        unhandled = result.exception is not None and not isinstance(result.exception, SystemExit)
        heavy = [name for name in HEAVY if name in sys.modules]
        found = {"code": result.exit_code, "stdout": result.stdout, "stderr": result.stderr, "heavy": heavy}
        print(json.dumps(found | {"unhandled": repr(result.exception) if unhandled else ""}), flush=True)


if __name__ == "__main__":
    main()
