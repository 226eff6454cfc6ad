"""A fresh clone and an empty home: ``make serve``, then the same question asked four ways."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from benchmarks.check import ROOT, Check
from benchmarks.checks._serving import Server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PORT = 18000


def measure(check: Check) -> None:
    with tempfile.TemporaryDirectory(prefix="octavo-fresh-") as name:
        clone, home = Path(name) / "octavo", Path(name) / "home"
        home.mkdir()
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        env = {
            k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "OCTAVO_", "VIRTUAL"))
        }
        env["HOME"] = str(home)
        command = ["make", "serve", f"PORT={PORT}"]
        with Server(command, cwd=clone, env=env) as server:
            check.line("install_s", server.wait_s - server.ready_s, "<=", 300.0)
            check.line("ready_s", server.ready_s, "<=", 120.0)
            answers = [
                _curl(server.url, stream=False),
                _curl(server.url, stream=True),
                _openai(server.url, stream=False),
                _openai(server.url, stream=True),
            ]
    check.note(answers=answers)
    check.line("answers_with_paris_of_4", sum("Paris" in answer for answer in answers), "==", 4)


def _curl(url: str, *, stream: bool) -> str:
    body = json.dumps({"messages": QUESTION, "temperature": 0, "stream": stream})
    done = subprocess.run(
        ["curl", "-sSN", "-m", "120", f"{url}/v1/chat/completions",
         "-H", "Content-Type: application/json", "-d", body],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    if not stream:
        return str(json.loads(done.stdout)["choices"][0]["message"]["content"])
    events = [line[6:] for line in done.stdout.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    return "".join(delta.get("content") or "" for delta in deltas)


def _openai(url: str, *, stream: bool) -> str:
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key="EMPTY", timeout=120.0) as client:
        model = client.models.list().data[0].id
        if not stream:
            answer = client.chat.completions.create(
                model=model,
                messages=QUESTION,
                temperature=0,  # type: ignore[arg-type]
            )
            return answer.choices[0].message.content or ""
        chunks = client.chat.completions.create(
            model=model,
            messages=QUESTION,
            temperature=0,
            stream=True,  # type: ignore[arg-type]
        )
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
