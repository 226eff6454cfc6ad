"""What the supervisor says."""

from __future__ import annotations

import json
import shlex

import pytest

from octavo.engine.supervisor import example_call


@pytest.mark.parametrize(
    ("chats", "path", "field"),
    [(True, "/v1/chat/completions", "messages"), (False, "/v1/completions", "prompt")],
)
def test_the_example_is_one_that_the_model_answers(chats: bool, path: str, field: str) -> None:
    """A base model has no chat template, so the shown call must not be a chat."""
    program, url, *rest = shlex.split(example_call("http://x:1", chats=chats))
    assert (program, url) == ("curl", f"http://x:1{path}")
    assert field in json.loads(rest[rest.index("-d") + 1])
