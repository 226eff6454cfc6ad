"""``octavo chat``: a conversation in the terminal, with a server or a model in this process."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from octavo.config.folders import user_cache
from octavo.config.kinds import count, real
from octavo.config.load import OptionError
from octavo.core.errors import OctavoError, StartupError
from octavo.tools.flags import Parser, add_options, options_of
from octavo.tools.local import ENGINE_GROUPS
from octavo.tools.talk import Message, ModelTalker, ServerTalker, Talker
from octavo.tools.values import value_of

DEFAULT_URL = "http://127.0.0.1:8000"
HISTORY_LINES = 1000
EPILOG = f"""\
Without MODEL it talks to the server at {DEFAULT_URL}. With MODEL, or with --local, the model runs
in this process and takes the flags of octavo serve; with --url, MODEL is the name to ask there for.
With -q, or with text piped in, it answers once and exits; the question stands before the text."""
HELP = """\
/reset         forget the conversation
/system TEXT   set the system message (no text: none) and start anew
/save FILE     write the conversation to FILE, as JSON messages
/stats         show tokens a second after each answer, or stop showing them
/quit          leave, as Ctrl-D does; Ctrl-C stops an answer"""


def main(argv: Sequence[str]) -> int:
    args = _parser().read(argv)
    question = _question(args.question)
    with closing(_talker(args)) as talker:
        chat = Chat(talker, args.system, show_stats=args.stats)
        if question is not None:
            chat.say(question)
        else:
            print(f"Talking to {talker.name}. /help lists the commands.")
            with _history():
                converse(chat)
    return 0


class Chat:
    """The conversation so far, and one turn of it."""

    def __init__(self, talker: Talker, system: str | None, *, show_stats: bool = False) -> None:
        self._talker = talker
        self._system = system
        self._show_stats = show_stats
        self.messages: list[Message] = []
        self._reset()

    def say(self, text: str) -> None:
        """Ask, and print the answer as it comes. What interrupts it is raised, and the
        conversation keeps what has come; of nothing, not even the question."""
        pieces: list[str] = []
        start = time.perf_counter()
        question = {"role": "user", "content": text}
        with closing(self._talker.answer([*self.messages, question])) as answer:
            try:
                for piece in answer:
                    pieces.append(piece)
                    print(piece, end="", flush=True)
            finally:
                if pieces:
                    print(flush=True)
                    reply = {"role": "assistant", "content": "".join(pieces)}
                    self.messages += [question, reply]
        if self._show_stats:
            self._print_stats(time.perf_counter() - start)

    def obey(self, line: str) -> bool:
        """Carry out a command; False if it is the last one."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/quit", "/exit", "/bye"):
            return False
        if name == "/reset":
            self._reset()
        elif name == "/system":
            self._system = rest or None
            self._reset()
        elif name == "/save":
            self._save(rest)
        elif name == "/stats":
            self._show_stats = not self._show_stats
        else:
            print(HELP)
        return True

    def _reset(self) -> None:
        self.messages.clear()
        if self._system:
            self.messages.append({"role": "system", "content": self._system})

    def _save(self, path: str) -> None:
        if not path:
            print("/save needs the name of a file.")
            return
        text = json.dumps(self.messages, indent=1, ensure_ascii=False) + "\n"
        try:
            Path(path).expanduser().write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"Cannot write {path}: {error.strerror}.")
        else:
            print(f"Saved {len(self.messages)} messages to {path}.")

    def _print_stats(self, seconds: float) -> None:
        tokens = self._talker.num_tokens
        rate = f"{tokens / seconds:.1f} tok/s" if seconds > 0 else ""
        print(f"[{tokens} tokens in {seconds:.1f} s: {rate}]", file=sys.stderr)


def converse(chat: Chat) -> None:
    """Read lines and answer them until /quit or the end of the input."""
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # as a shell does: forget the line
            print()
            continue
        try:
            if line.startswith("/"):
                if not chat.obey(line):
                    return
            elif line:
                chat.say(line)
        except KeyboardInterrupt:  # the answer ends, the conversation goes on
            continue
        except (OctavoError, StartupError) as error:
            print(f"{error}", file=sys.stderr)


def _parser() -> Parser:
    parser = Parser(
        "octavo chat",
        "Talk to a server, or to a model in this process.",
        EPILOG,
        usage="octavo chat [MODEL] [flags]",
    )
    add = parser.add_argument_group("Chat").add_argument
    add("--url", metavar="URL", help=f"the server (default: {DEFAULT_URL})")
    add("--api-key", metavar="KEY", help="key to send to the server")
    add("--local", action="store_true", help="run the model in this process, without a server")
    add("-q", "--question", metavar="TEXT", help="answer TEXT and exit")
    add("--system", metavar="TEXT", help="system message")
    add("--temperature", type=value_of(real(0)), metavar="X", help="default: the model's")
    add("--top-p", type=value_of(real(0, 1, above_low=True)), metavar="X", help="the same")
    add("--max-tokens", type=value_of(count(1)), metavar="N", help="most tokens of an answer")
    add("--stats", action="store_true", help="show tokens a second after each answer")
    add_options(parser, ENGINE_GROUPS)
    return parser


def _talker(args: argparse.Namespace) -> Talker:
    options = options_of(args)
    given = {name for name, source in options.sources.items() if source.startswith("flag ")}
    names = ("temperature", "top_p", "max_tokens")
    sampling = {name: vars(args)[name] for name in names if vars(args)[name] is not None}
    if args.local or ("model" in given and args.url is None):
        if args.url is not None or args.api_key is not None:
            raise OptionError("--url and --api-key are for a server; leave out --local and MODEL.")
        return ModelTalker(options, sampling)
    if others := sorted(given - {"model"}):
        flag = "--" + others[0].replace("_", "-")
        raise OptionError(f"{flag} is for a model in this process: give MODEL, or --local.")
    model = options.model if "model" in given else None
    return ServerTalker(args.url or DEFAULT_URL, sampling, model, args.api_key)


def _question(asked: str | None) -> str | None:
    """What to answer once; None for a conversation."""
    piped = None if sys.stdin.isatty() else sys.stdin.read().strip()
    parts = [part for part in (asked, piped) if part]
    if parts:
        return "\n\n".join(parts)
    if asked is not None or piped is not None:
        raise OptionError("The question is empty.")
    return None


@contextmanager
def _history() -> Iterator[None]:
    """Lines of earlier conversations on the arrow keys, where readline exists."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = user_cache() / "chat_history"
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
