"""octavo chat: what a person types, and what they get."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pytest

from octavo.config.load import ARGUMENT, load_options
from octavo.core.errors import InvalidRequest, ServerError
from octavo.tools import cli
from octavo.tools.chat import Chat, converse
from octavo.tools.talk import Message, ModelTalker, ServerTalker
from tests.fakes.scripted_server import scripted_server
from tests.fakes.tiny import make_tiny


@pytest.fixture(autouse=True)
def no_octavo_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OCTAVO_")]:
        monkeypatch.delenv(name)


class FakeTalker:
    """Says how many messages it was given; "stop" is interrupted, "bad" is refused."""

    name = "fake"
    num_tokens = 3

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []
        self.ended = 0

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        self.asked.append(list(messages))
        try:
            if messages[-1]["content"] == "bad":
                raise InvalidRequest("Too long.")
            yield "I have "
            if messages[-1]["content"] == "stop":
                raise KeyboardInterrupt
            yield f"{len(messages)}."
        finally:
            self.ended += 1

    def close(self) -> None: ...


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """What ``input`` returns or raises, in order; then the end of the input."""
    left = list(lines)

    def read(prompt: str) -> str:
        line = left.pop(0) if left else EOFError
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)


def conversation(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> FakeTalker:
    talker = FakeTalker()
    typed(monkeypatch, *lines)
    converse(Chat(talker, "Be brief."))
    return talker


def test_a_conversation_grows_and_is_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talker = conversation(
        monkeypatch,
        "one",
        "",
        "two",
        "/reset",
        "three",
        "/system",
        "four",
        "/nonsense",
        "/quit",
        "no",
    )
    assert [len(messages) for messages in talker.asked] == [2, 4, 2, 1]
    assert talker.asked[1][:3] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "I have 2."},
    ]
    assert talker.asked[3] == [{"role": "user", "content": "four"}]
    out = capsys.readouterr().out
    assert out.startswith("I have 2.\nI have 4.\n")
    assert "/save FILE" in out


def test_an_interrupt_ends_the_answer_and_keeps_what_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talker = conversation(monkeypatch, "stop", KeyboardInterrupt, "go on")
    assert talker.asked[1][1:3] == [
        {"role": "user", "content": "stop"},
        {"role": "assistant", "content": "I have "},
    ]
    assert talker.ended == 2


def test_a_refusal_takes_the_question_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talker = conversation(monkeypatch, "bad", "good")
    assert [len(messages) for messages in talker.asked] == [2, 2]
    assert capsys.readouterr().err == "Too long.\n"


def test_stats_and_save(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "chat.json"
    conversation(
        monkeypatch, "/stats", "hello", "/stats", "again", f"/save {path}", "/save", "/save /no/x"
    )
    captured = capsys.readouterr()
    assert captured.err.count("3 tokens in") == 1
    assert [m["role"] for m in json.loads(path.read_text())] == [
        "system",
        *["user", "assistant"] * 2,
    ]
    assert "Saved 5 messages" in captured.out
    assert "needs the name of a file" in captured.out
    assert "Cannot write /no/x" in captured.out


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_server("--ttft", "0.01", "--itl", "0.01") as address:
        yield address


def ask(monkeypatch: pytest.MonkeyPatch, piped: str, *argv: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    return cli.main(["chat", *argv])


def test_a_question_to_a_server(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(monkeypatch, "", "--url", url, "-q", "hi", "--max-tokens", "3", "--stats") == 0
    captured = capsys.readouterr()
    assert captured.out == "tick tick tick \n"
    assert captured.err.startswith("[3 tokens in ")
    assert ask(monkeypatch, "a text", "--url", url, "--max-tokens", "2") == 0
    assert capsys.readouterr().out == "tick tick \n"


def test_a_server_that_fails_says_why() -> None:
    with scripted_server("--fail-every", "1", "--fail-status", "429") as busy:
        talker = ServerTalker(busy, {})
        assert talker.name == "scripted"
        with pytest.raises(Exception, match="scripted failure"):
            list(talker.answer([{"role": "user", "content": "x"}]))


@pytest.mark.parametrize("end", [b"", b"data: {\n\n", b"data: 5\n\n", b"XY\r\n"])
def test_a_server_that_goes_in_the_middle_of_an_answer(end: bytes) -> None:
    """Cut off, cut inside an event, no event, no chunk."""
    event = b'data: {"choices": [{"delta": {"content": "Hel"}}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = [event, end] if end.startswith(b"data") else [event]
    raw = head + b"".join(f"{len(c):x}\r\n".encode() + c + b"\r\n" for c in chunks)
    raw += b"" if end.startswith(b"data") else end
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as client:
                client.recv(65536)
                client.sendall(raw)

        thread = threading.Thread(target=serve)
        thread.start()
        talker = ServerTalker(f"http://127.0.0.1:{listener.getsockname()[1]}", {}, "m")
        answer = talker.answer([{"role": "user", "content": "x"}])
        assert next(answer) == "Hel"
        with pytest.raises(ServerError, match="broke off") as caught:
            list(answer)
        assert "\n" not in str(caught.value)
        thread.join()


def test_without_a_server_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(monkeypatch, "", "--url", "http://127.0.0.1:9", "-q", "x") == 1
    err = capsys.readouterr().err
    assert "octavo serve" in err
    assert "octavo chat MODEL" in err


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--url", "nowhere", "-q", "x"], "must be http://HOST:PORT"),
        (["--dtype", "float32", "-q", "x"], "--dtype is for a model in this process"),
        (["--local", "--url", "http://x", "-q", "x"], "are for a server"),
        (["--temperature", "hot"], "not 'hot'"),
        ([], "The question is empty."),
    ],
)
def test_a_mistake_is_one_sentence(
    argv: list[str],
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ask(monkeypatch, "", *argv) == 2
    err = capsys.readouterr().err
    assert part in err
    assert err.count("\n") == 1


def test_a_model_in_this_process_answers_and_can_be_stopped(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny")
    given = {"model": str(tiny), "kv_cache_tokens": 2048, "ops_backend": "reference"}
    options = load_options(given, {}, ARGUMENT)
    talker = ModelTalker(options, {"max_tokens": 40, "temperature": 0, "ignore_eos": True})
    try:
        question = [{"role": "user", "content": "Hello"}]
        whole = "".join(talker.answer(question))
        assert whole
        assert talker.num_tokens == 40
        stopped = talker.answer(question)
        first = next(stopped)
        stopped.close()
        assert whole.startswith(first)
        assert talker.num_tokens < 40
        assert "".join(talker.answer(question)) == whole
    finally:
        talker.close()
