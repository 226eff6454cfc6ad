"""docs/scheduling.md names what there is: each option with its default, each number of /metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.config.options import DECLARATIONS
from tests.server.test_server_metrics import scrape

PAGE = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text()
SYMPTOMS, _, OPTIONS = PAGE.partition("## Options")
OPTIONS = OPTIONS.partition("## Fields")[0]
SCHEDULING = [entry for entry in DECLARATIONS.values() if entry.group == "Scheduling"]
NAME = re.compile(r"`((?:num|kv|cpu|request|inter|recomputed|computed|prefix)_\w+)`")


@pytest.mark.parametrize("option", SCHEDULING, ids=lambda option: option.name)
def test_each_option_has_its_row(option):
    (row,) = re.findall(rf"^\| `{option.flag}[ `].*$", OPTIONS, re.MULTILINE)
    default = row.split("|")[2].strip().strip("`").split(" ")[0]
    words = {"None": "none", "True": "on", "False": "off"}
    assert default == words.get(str(option.default), str(option.default).removesuffix(".0"))


@pytest.mark.anyio
async def test_each_number_is_in_the_metrics(serve):
    served = await serve()
    known = {re.sub(r"^octavo:|_bucket.*|\|.*", "", sample) for sample in await scrape(served)}
    named = set(NAME.findall(SYMPTOMS)) - {
        "queue_timeout",
        "request_timeout",
    }
    assert len(named) > 10
    assert named <= known
