"""``octavo serve`` as a person meets it: real processes, a real socket, a real client."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.served import Served, alive, served
from tests.fakes.tiny import make_tiny

LONG = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Served]:
    with served(str(tiny), "--served-model-name", "TINY") as running:
        running.wait_ready()
        yield running


def stats(url: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{url}/debug/audit").json()
    return answer


def wait_idle(url: str, limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        now = stats(url)
        if not (now["slots"]["running"] or now["waiting"] or now["pages"]["referenced"]):
            return
        time.sleep(0.02)
    raise AssertionError(f"still busy: {now}")


def test_the_start_tells_the_truth(server: Served) -> None:
    out = server.output
    assert "Device: cpu, float32" in out
    assert "CPU KV cache size: " in out
    assert "Maximum concurrency for 512 tokens per request: " in out
    assert "Weights: " in out
    assert "curl http://127.0.0.1:" in out
    assert {"octavo-engine", "octavo-front"} <= set(server.children())


def test_an_openai_client_streamed_and_not(server: Served) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY") as client:
        assert [m.id for m in client.models.list().data] == ["TINY"]
        ask = {"model": "TINY", "temperature": 0, "max_tokens": 12}
        messages = [{"role": "user", "content": "hi"}]
        plain = client.chat.completions.create(messages=messages, **ask)  # type: ignore[call-overload]
        with client.chat.completions.create(messages=messages, stream=True, **ask) as events:  # type: ignore[call-overload]
            text = "".join(e.choices[0].delta.content or "" for e in events)
    assert text == plain.choices[0].message.content
    assert plain.choices[0].finish_reason in ("length", "stop")
    wait_idle(server.url)


def test_hanging_up_in_mid_stream_frees_everything(server: Served) -> None:
    for _ in range(10):
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG) as answer:
            next(answer.iter_lines())
    wait_idle(server.url)


def test_a_bad_request_harms_nobody(server: Served) -> None:
    for body in ({"prompt": "x", "logit_bias": {"512": 5}}, {"prompt": [600]}, {"prompt": 7}):
        answer = httpx.post(f"{server.url}/v1/completions", json=body)
        assert answer.status_code == 400, answer.text
    assert httpx.get(f"{server.url}/health").status_code == 200
    good = httpx.post(f"{server.url}/v1/completions", json={"prompt": "hi", "max_tokens": 1})
    assert good.status_code == 200


def test_sigterm_lets_open_streams_end(tiny: Path) -> None:
    with served(str(tiny), "--shutdown-timeout", "30") as running:
        url = running.wait_ready()
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(running.process.pid, signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in "".join(rest)
        assert running.wait_exit() == 0


def test_a_killed_engine_ends_streams_with_an_error_and_the_server_with_1(tiny: Path) -> None:
    with served(str(tiny)) as running:
        url = running.wait_ready()
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(running.children()["octavo-engine"], signal.SIGKILL)
            rest = [line.removeprefix("data: ") for line in lines if line]
        assert rest[-1] == "[DONE]"
        assert json.loads(rest[-2])["error"]["code"] in (503, "engine_unavailable")
        assert running.wait_exit(10) == 1
        last = running.output.strip().splitlines()[-1]
        assert last.startswith("octavo: The engine process died (killed by SIGKILL)")


def test_children_die_with_a_killed_supervisor(tiny: Path) -> None:
    with served(str(tiny)) as running:
        running.wait_ready()
        children = running.children()
        os.kill(running.process.pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while any(alive(pid) for pid in children.values()) and time.monotonic() < end:
            time.sleep(0.02)
        assert not any(alive(pid) for pid in children.values())


def last_line_of_failure(*args: str) -> str:
    with served(*args) as running:
        assert running.wait_exit() != 0
        return running.output.strip().splitlines()[-1]


def test_a_taken_port_is_named(tiny: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        line = last_line_of_failure(str(tiny), "--port", str(port))
    assert line == (
        f"octavo: Cannot listen on 127.0.0.1:{port}: Address already in use; "
        "choose another --port or --host."
    )


def test_a_missing_tensor_is_named_in_the_last_line(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_tiny(tmp_path / "broken")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    line = last_line_of_failure(str(folder))
    assert "model.layers.1.mlp.up_proj.weight" in line
    assert line.startswith("octavo: ")


def test_code_in_a_model_folder_is_refused(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "evil")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "auto_map": {"AutoConfig": "evil.C"}})
    )
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')\n")
    assert "auto_map" in last_line_of_failure(str(folder))
    assert not (tmp_path / "pwned").exists()
