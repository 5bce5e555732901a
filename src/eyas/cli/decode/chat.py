"""`eyas chat`: a conversation whose cache is kept between turns."""

from __future__ import annotations

import hashlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from typer import Option

from eyas.cli.common.answers import StreamedText, note_cut, note_stats
from eyas.cli.common.build import open_engine, sampling_params
from eyas.cli.common.display import note
from eyas.cli.common.options import ChatTargetOptions, DraftOptions, SamplingOptions
from eyas.cli.common.verb import FAILURE
from eyas.drafters.options import PREDICTION
from eyas.errors import EyasError, UsageError

if TYPE_CHECKING:
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent

    from eyas.engine import Engine
    from eyas.text.chats import Message
    from eyas.types import Completion, SamplingParams

HELP = """\
/help          show this
/reset         start over; the system message stays (also /clear)
/system TEXT   set the system message; without TEXT, show it
/save FILE     append the conversation to FILE as a line of JSON
/stats         statistics of all answers since the start
/exit          leave (also /quit, /bye, Ctrl-D)
Ctrl-C stops an answer; the text so far stays in the conversation.
A pasted text is one message. To write several lines: Alt-Enter, or \"""text\""".
A space before a slash makes it text."""
_QUOTES = '"""'
_SAME = {"/?": "/help", "/clear": "/reset", "/quit": "/exit", "/bye": "/exit"}


def chat(
    target: ChatTargetOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, Option(help="System message.")] = None,
) -> int:
    """Chat with the target. /help lists commands; Ctrl-C stops an answer; Ctrl-D or /exit leaves.

    Examples:
        eyas chat smollm2 --draft-model smollm2
        eyas chat FILE.gguf --method suffix --max-new-tokens 1024
    """
    from eyas.text.template import NO_TOKENIZER, has_chat_template
    from eyas.types import Request

    params = sampling_params(sampling)
    if draft.method == PREDICTION:
        raise UsageError(f"a chat has no predictions: leave out method {PREDICTION}, or write suffix")
    engine = open_engine(target, draft, batch_size=1)
    if engine.tokenizer is None:
        raise UsageError(NO_TOKENIZER)
    if not has_chat_template(engine.tokenizer):
        raise UsageError(f"the tokenizer of {target.model} has no chat template: use eyas generate")
    engine.check(Request((0,), params))
    drafter = None if engine.speculation is None else draft.draft_model or draft.method
    note(f"chat with {target.model}" + ("" if drafter is None else f", drafted by {drafter}"))
    note("/help lists commands; Ctrl-C stops an answer; Ctrl-D or /exit leaves")
    return ChatSession(engine, params, system).run()


class ChatSession:
    """A conversation at the terminal: what was said, and all answers since the start."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        from eyas.text.dialogue import Conversation

        self._engine = engine
        self._params = params
        self._system = system
        self._conversation = Conversation(engine)
        self._said: list[Message] = []
        self._answers: list[Completion] = []
        self._code = 0

    def run(self) -> int:
        """Answer lines and run commands until the input ends; returns the exit code: whether any line failed."""
        for line in _lines():
            try:
                if not _is_command(line):
                    with _interruptible() as interrupts:
                        self._answer(line.strip(), lambda: bool(interrupts))
                elif not self._run_command(*line.split(maxsplit=1)):
                    break
            except EyasError as error:
                note(f"error: {error}")
                self._code = FAILURE
        return self._code

    def _answer(self, text: str, stop: Callable[[], bool]) -> None:
        """Write the answer as it is decoded, until `stop()` is true; a stopped answer is kept."""
        from eyas.errors import RequestError
        from eyas.text.chats import Message
        from eyas.text.template import encode_chat
        from eyas.types import Request

        said = [*self._said, Message(role="user", content=text)]
        try:
            request = Request(encode_chat(self._engine.tokenizer, self._opened(said)), self._params, chat=True)
            self._engine.check(request)
        except RequestError as error:
            raise RequestError(f"{error} (/reset starts over)") from error
        shown = self._screen(request.prompt)
        for chunk in self._conversation.turn(request, stop):
            shown.add(chunk)
        assert chunk.completion is not None
        done = chunk.completion
        if done.text or done.finish_reason != "cancelled":  # else nothing was answered yet
            thought = shown.thought or None  # the chat template decides whether the next turn shows it
            self._said = [*said, Message(role="assistant", content=shown.answer, reasoning_content=thought)]
        self._answers.append(done)
        if done.finish_reason == "cancelled":
            note("(stopped)")
        note_cut([done], self._params.max_tokens)
        note_stats([done])

    def _screen(self, prompt: tuple[int, ...]) -> StreamedText:
        """What writes the answer to a prompt."""
        from eyas.text.reasoning import ThoughtSplitter, begins_inside, reasoning_marks

        tokenizer = self._engine.tokenizer
        speculating = self._engine.speculation is not None
        marks = reasoning_marks(tokenizer)
        if marks is None:
            return StreamedText(tokenizer, speculating=speculating)
        splitter = ThoughtSplitter(marks, inside=begins_inside(marks, tokenizer, prompt))
        specials = marks.special_tokens(tokenizer)
        return StreamedText(tokenizer, speculating=speculating, splitter=splitter, visible_specials=specials)

    def _opened(self, said: list[Message]) -> list[Message]:
        from eyas.text.chats import Message

        return [*([] if self._system is None else [Message(role="system", content=self._system)]), *said]

    def _run_command(self, command: str, argument: str = "") -> bool:
        """Run a command; returns whether the conversation continues. Raises UsageError for an unknown command."""
        argument = argument.strip()
        match _SAME.get(command, command):
            case "/help":
                note(HELP)
            case "/reset":
                self._said = []
                note("(a new conversation)")
            case "/system" if argument:
                self._system = argument
                note("(the system message is set)")
            case "/system":
                note("(no system message: /system TEXT sets one)" if self._system is None else self._system)
            case "/save":
                self._save(argument)
            case "/stats":
                note_stats(self._answers)
            case "/exit":
                return False
            case _:
                raise UsageError(f"there is no command {command}: /help lists them; a space before it makes it text")
        return True

    def _save(self, name: str) -> None:
        from eyas.text.chats import Chat

        if not name or not self._said:
            raise UsageError(
                "nothing has been said yet" if name else "/save where? /save FILE, such as /save chats.jsonl"
            )
        messages = tuple(self._opened(self._said))
        own = hashlib.sha256(repr(messages).encode()).hexdigest()[:16]
        try:
            with Path(name).expanduser().open("a", encoding="utf-8") as file:
                file.write(Chat(id=own, messages=messages).model_dump_json() + "\n")
        except OSError as error:
            raise UsageError(f"can't write {name}: {error.strerror}") from error
        note(f"(appended to {name}, a file that eyas data prepare reads)")


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """While the block runs, Ctrl-C only adds to the list; the third one raises, in case a pass never ends.

    If the input isn't a terminal, Ctrl-C ends the program as usual.
    """
    seen: list[int] = []
    if not sys.stdin.isatty():
        yield seen
        return

    def interrupt(number: int, _: FrameType | None) -> None:
        seen.append(number)
        if len(seen) == 3:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _is_command(text: str) -> bool:
    """Whether it is for the chat rather than for the model; a pasted text may well begin with a slash."""
    return text.startswith("/") and ("\n" not in text or text.startswith("/system "))


def _lines() -> Iterator[str]:
    """Messages and commands of standard input that aren't empty: lines, or texts between triple quotes.

    At a terminal a prompt sign is shown and the text can be edited, and a pasted text is one message however many lines
    it has; there, two Ctrl-C in a row end the input.
    """
    read = _reader()
    interrupted = False
    while True:
        try:
            line = read("> ")
            if line.lstrip().startswith(_QUOTES) and "\n" not in line:  # else it was pasted as a whole
                while not line.rstrip().endswith(_QUOTES) or len(line.strip()) < 2 * len(_QUOTES):
                    line += "\n" + read("... ")
                line = line.strip()[len(_QUOTES) : -len(_QUOTES)]
        except EOFError:
            return
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            if interrupted:
                return
            interrupted = True
            note("(Ctrl-C again, Ctrl-D or /exit leaves)")
            continue
        interrupted = False
        if line.strip():
            yield line


def _reader() -> Callable[[str], str]:
    """What shows a sign and reads a line without its end; it raises EOFError if there is none."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _read
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(key_bindings=keys, prompt_continuation="  ")
    return session.prompt


def _read(sign: str) -> str:
    if sys.stdin.isatty():
        sys.stderr.write(sign)
        sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
