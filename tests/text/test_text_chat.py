"""Chat templates: found where models keep them, given one clean form, unable to do harm."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    StartupError,
)
from octavo.text import sandbox
from octavo.text.chat import RESERVED_NAMES, ChatTemplate, load_chat_template
from tests.fakes.bytetok import CHAT_TEMPLATE, write_byte_tokenizer

HI = [{"role": "user", "content": "hi"}]
PARTS = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
LOOPING = (
    "{% for m in messages %}{{ m.role }}:"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}({{ part.text }}){% endfor %}{% endif %}"
    "{% endfor %}"
)


def template(source: str = CHAT_TEMPLATE, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, **options)


# --- where templates are found


def test_no_template(tmp_path: Path) -> None:
    assert load_chat_template(write_byte_tokenizer(tmp_path, chat_template=False)) is None


def test_string_in_tokenizer_config(tmp_path: Path) -> None:
    found = load_chat_template(write_byte_tokenizer(tmp_path))
    assert found is not None
    assert found.source == CHAT_TEMPLATE
    assert found.render(HI) == "<s>[user]hi[assistant]"


def test_named_list_uses_tool_use_when_there_are_tools(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path)
    named = [{"name": n, "template": n.upper()} for n in ("rag", "default", "tool_use")]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    found = load_chat_template(folder)
    assert found is not None
    assert found.render(HI) == "DEFAULT"
    assert found.render(HI, tools=[{"type": "function"}]) == "TOOL_USE"


@pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.json"])
def test_file_beside_the_weights(tmp_path: Path, file: str) -> None:
    folder = write_byte_tokenizer(tmp_path, chat_template=False)
    source = "FILE{{ bos_token }}"
    content = json.dumps({"chat_template": source}) if file.endswith("json") else source
    (folder / file).write_text(content)
    found = load_chat_template(folder)
    assert found is not None
    assert found.render(HI) == "FILE<s>"


def test_override_is_a_file_or_the_template_itself(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path / "model")
    (tmp_path / "mine.jinja").write_text("FILE")
    for override, text in ((str(tmp_path / "mine.jinja"), "FILE"), ("{{ bos_token }}!", "<s>!")):
        found = load_chat_template(folder, override)
        assert found is not None
        assert found.render(HI) == text


@pytest.mark.parametrize("override", ["no/such/file.jinja", "{% for %}"])
def test_bad_override_stops_the_start(tmp_path: Path, override: str) -> None:
    with pytest.raises(StartupError, match="--chat-template"):
        load_chat_template(write_byte_tokenizer(tmp_path), override)


def test_broken_template_of_a_model_is_told_at_each_chat(tmp_path: Path) -> None:
    found = load_chat_template(write_byte_tokenizer(tmp_path, chat_template="{% for %}"))
    assert found is not None
    assert found.problem is not None
    with pytest.raises(InvalidRequest, match="template is broken"):
        found.render(HI)


# --- content


@pytest.mark.parametrize("content", [PARTS, ["A", "B"], "A\nB"])
def test_parts_are_joined_for_a_template_that_wants_a_string(content: Any) -> None:
    text = template().render([{"role": "user", "content": content}])
    assert text == "<s>[user]A\nB[assistant]"


@pytest.mark.parametrize(
    "source",
    [
        LOOPING,
        "{% for m in messages %}{% set c = m.content %}{% set d = c %}{{ m.role }}:"
        "{% if d is string %}{{ d }}{% else %}{% for p in d %}({{ p.text }}){% endfor %}{% endif %}"
        "{% endfor %}",
        "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
        "{% for p in content|list %}({{ p.text }}){% endfor %}{% endif %}{% endmacro %}"
        "{% for m in messages %}{{ m.role }}:{{ show(m.content) }}{% endfor %}",
    ],
)
def test_parts_stay_a_list_for_a_template_that_loops(source: str) -> None:
    assert template(source).render([{"role": "user", "content": PARTS}]) == "user:(A)(B)"
    assert template(source).render(HI) == "user:hi"


def test_string_becomes_a_part_where_only_parts_are_expected() -> None:
    source = "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}"
    assert template(source).render(HI) == "(hi)"
    assert template(source).render([{"role": "user", "content": ""}]) == ""


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, LOOPING])
def test_image_part_is_named(source: str) -> None:
    messages = [{"role": "user", "content": [PARTS[0], IMAGE]}]
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content\[1\].*image_url") as caught:
        template(source).render(messages)
    assert caught.value.param == "messages[0].content[1]"


@pytest.mark.parametrize("extra", [{}, {"content": None}, {"content": ""}, {"content": []}])
@pytest.mark.parametrize("source", [CHAT_TEMPLATE, LOOPING])
def test_null_missing_and_empty_content_render_the_same(source: str, extra: Any) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "sqrt", "arguments": '{"x": 101}'},
    }
    history = [
        {"role": "user", "content": "sqrt 101"},
        {"role": "assistant", **extra, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "10.05"},
    ]
    expected = {
        CHAT_TEMPLATE: "<s>[user]sqrt 101[assistant]"
        '<call>{"name": "sqrt", "arguments": {"x": 101}}</call>[tool]10.05[assistant]',
        LOOPING: "user:sqrt 101assistant:tool:10.05",
    }
    assert template(source).render(history) == expected[source]
    assert call["function"]["arguments"] == '{"x": 101}'  # the caller's own is not changed


@pytest.mark.parametrize("arguments", [None, "", " ", "{}", {}])
def test_call_without_arguments(arguments: Any) -> None:
    call = {"function": {"name": "now", "arguments": arguments}}
    text = template().render([{"role": "assistant", "tool_calls": [call]}])
    assert '{"name": "now", "arguments": {}}' in text


@pytest.mark.parametrize("key", ["tool_calls", "name", "function_call", "reasoning_content"])
def test_null_field_is_as_missing(key: str) -> None:
    source = "{% for m in messages %}{{ m.keys() | list }}{% endfor %}"
    message = {"role": "assistant", "content": "x"}
    assert template(source).render([message | {key: None}]) == template(source).render([message])


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([*HI, {"content": "x"}], "messages[1].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "a", "tool_calls": 1}], "messages[0].tool_calls"),
        ([{"role": "a", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "a", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_bad_message_is_named(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template().render(messages)
    assert caught.value.param == param
    assert param in caught.value.message


# --- continuing the last message

TRIMMING = CHAT_TEMPLATE.replace("m.content", "m.content | trim")


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, TRIMMING])
@pytest.mark.parametrize("content", ["hi", "", "a hi hi", [{"type": "text", "text": "hi"}]])
def test_continue_final_message(source: str, content: Any) -> None:
    messages = [*HI, {"role": "assistant", "content": content}]
    text = template(source + "<end>").render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    shown = content if isinstance(content, str) else "hi"
    assert text == f"<s>[user]hi[assistant]{shown}"


def test_continue_final_message_of_parts() -> None:
    messages = [{"role": "assistant", "content": PARTS}]
    text = template(LOOPING).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text == "assistant:(A)(B"


@pytest.mark.parametrize(
    ("source", "add", "word"),
    [(CHAT_TEMPLATE, True, "exclude"), ("{{ messages[0].content }}", False, "last message")],
)
def test_what_cannot_be_continued(source: str, add: bool, word: str) -> None:
    messages = [*HI, {"role": "assistant", "content": "x"}]
    with pytest.raises(InvalidRequest, match=word):
        template(source).render(messages, add_generation_prompt=add, continue_final_message=True)


# --- variables from the client


def test_kwargs_reach_the_template() -> None:
    source = "{{ enable_thinking }}{{ documents | length }}"
    assert template(source).render(HI, kwargs={"enable_thinking": 1, "documents": [2]}) == "11"


@pytest.mark.parametrize("name", [*sorted(RESERVED_NAMES), "_tick", "__class__", 5])
def test_kwargs_cannot_override_internal_names(name: Any) -> None:
    assert {"tokenize", "tools", "messages", "add_generation_prompt"} < RESERVED_NAMES
    with pytest.raises(InvalidRequest, match=f"may not set '?{name}") as caught:
        template().render(HI, kwargs={name: True})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("kwargs", ["x", [1], 5])
def test_kwargs_must_be_an_object(kwargs: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be an object"):
        template().render(HI, kwargs=kwargs)


def test_kwarg_named_self_is_harmless() -> None:
    assert template("{{ self }}x").render(HI, kwargs={"self": 1, "args": 2}).endswith("x")


# --- hostile and broken templates


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ nothing.here }}",
        "{{ 1 / 0 }}",
        "{% include '/etc/passwd' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ tools | tojson(indent=messages) }}{{ undefined_filter | nope }}",
        "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
    ],
)
def test_failing_template_is_one_sentence_to_the_caller(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template(source).render(HI)
    assert caught.value.message.startswith("The chat template")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if 0 %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) recursive %}"
        "{{ loop(range(99999)) if loop.depth < 3 }}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ caller() if n }}{% endmacro %}{% for i in range(99999) %}"
        "{% for j in range(99999) %}{% call f() %}{% endcall %}{% endfor %}{% endfor %}",
    ],
)
def test_endless_work_without_output_ends(source: str) -> None:
    start = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"did not end within 0\.1 s"):
        template(source, max_seconds=0.1).render(HI)
    assert time.monotonic() - start < 30  # not a measurement: it ends at all


DOUBLING = (
    "{%% set ns = namespace(x='ab') %%}{%% for i in range(80) %%}%s{%% endfor %%}{{ ns.x%s }}"
)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(999) %}xxxxxxxx{% endfor %}{% endfor %}",
        DOUBLING % ("{% set ns.x = ns.x ~ ns.x %}", ""),
        DOUBLING % ("{% set ns.x = ns.x + ns.x %}", ""),
        DOUBLING % ("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}", ""),
        DOUBLING % ("{% set ns.x = [ns.x, ns.x] %}", ""),
        DOUBLING % ("{% set ns.x = [ns.x, ns.x] %}", " | tojson"),
        DOUBLING % ("{% set ns.x = [ns.x, ns.x] %}", " | string"),
        DOUBLING % ("{% set ns.x = {'a': ns.x, 'b': ns.x} %}", ".values()"),
        "{{ 'x' * 10**10 }}",
        "{{ [0] * 10**10 }}",
        "{{ 10 ** 100000000 }}",
        "{{ 2 ** 999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ '{x:999999999}'.format_map({'x': 1}) }}",
        "{{ 'x'.ljust(999999999) }}",
        "{{ 'x' | center(999999999) }}",
        "{{ 'x\n' | indent(999999999) }}",
        "{{ [1] | batch(999999999, 'x') | list }}",
        "{{ [1] | slice(999999999) | list }}",
        "{{ 1.5 | round(999999999, 'ceil') }}",
        "{{ [1] | tojson(indent=999999999) }}",
        "{{ ('a' * 9999).replace('', 'b' * 9999) }}",
        "{{ ('a' * 9999) | replace('a', 'b' * 9999) }}",
        "{{ range(99999) | join('b' * 9999) }}",
        "{{ ('b' * 9999).join(range(9999) | map('string')) }}",
        "{{ ('x' * 5000).replace('x', 'y' * 9000) }}",
        "{{ ('\t' * 5000).expandtabs(90000) }}",
        "{{ ('{0}' * 999).format('x' * 5000) }}",
        "{{ ('{0:>999}' * 3000).format(1) }}{{ ('%(a)999d' * 900) % {'a': 1} }}",
        "{{ '%(a)9999d' % {'a': 1} }}",
        "{{ ('x\n' * 999) | indent('  ' * 999) }}",
        "{{ [[[[1]]]] | tojson(indent=9000) }}",
        "{{ [1] | tojson(separators=(',' * 9000, ':')) }}",
        "{% set b = 7 ** 64 %}{% set c = b ** 64 %}{{ (c ** 64) ** 64 }}",
        "{% set b = 7 ** 3000 %}{{ (b * b) * (b * b) > 1 }}",
        "{{ ('f' * 9999) | int(base=16) > 1 }}",
        DOUBLING % ("{% set ns.x = (ns.x, ns.x) %}", " is string"),
        "{% set ns = namespace(l=[]) %}{% set big = 'x' * 9000 %}{% for i in range(9999) %}"
        "{% set ns.l = ns.l + [big[1:]] %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% set big = 'x' * 9000 %}{% for i in range(9999) %}"
        "{% set ns.l = ns.l + [big.upper()] %}{% endfor %}",
        "{% for i in range(9999) %}{% set x = range(9999) | list %}{% endfor %}",
    ],
)
def test_output_that_grows_without_end_is_cut_short(source: str) -> None:
    with pytest.raises(ContextLengthExceeded, match="10000 characters"):
        template(source, max_seconds=20.0).render(HI, max_chars=10_000)


TWINS = (
    "{% set ns = namespace(a=[], b=[]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)


@pytest.mark.parametrize(
    "use",
    [
        "{{ ns.a == ns.b }}",
        "{{ ns.a in [ns.b] }}",
        "{{ ns.a is eq(ns.b) }}",
        "{{ [ns.a, ns.b] | map('list') | sort }}",
        "{{ [ns.a, 1] | select('equalto', ns.b) | list }}",
        "{{ [ns.a, ns.b] | reverse | max }}",
    ],
)
def test_nested_values_are_measured_before_python_walks_them(use: str) -> None:
    with pytest.raises(ContextLengthExceeded):
        template(TWINS + use, max_seconds=20.0).render(HI, max_chars=10_000)


@pytest.mark.parametrize(
    "source",
    [
        "{{ (1).to_bytes(500000000, 'big') }}",
        "{{ ('x' * 5000).translate({120: 'y' * 5000}) }}",
        "{{ ('x' * 5000).encode().replace('x'.encode(), ('y' * 5000).encode()) }}",
        "{{ '%500000000d'.encode() % 1 }}",
        "{{ [[1]] | sum(start=[]) }}",
        "{{ messages.copy() }}",
        "{{ messages[0].items().mapping.keys() }}",
    ],
)
def test_a_template_has_few_methods(source: str) -> None:
    with pytest.raises(InvalidRequest, match="template failed"):
        template(source).render(HI)


def test_a_busy_machine_is_not_the_callers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds pass on the clock, none of them in this thread; then a minute does."""
    times = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr(sandbox.time, "monotonic", lambda: next(times, 20.0))
    assert template("{% for i in range(9) %}{{ i }}{% endfor %}").render(HI) == "012345678"
    times = iter([0.0, 60.0])
    monkeypatch.setattr(sandbox.time, "monotonic", lambda: next(times, 60.0))
    with pytest.raises(EngineUnavailable, match="too busy") as caught:
        template("{% for i in range(9) %}{{ i }}{% endfor %}").render(HI)
    assert caught.value.status == 503


def test_long_content_fits_or_is_refused_by_size() -> None:
    big = [{"role": "user", "content": "a " * 1000}]
    assert len(template().render(big, max_chars=2100)) > 2000
    with pytest.raises(ContextLengthExceeded):
        template().render(big, max_chars=1999)


# --- the dialect


DIALECT = (
    "{%- for m in messages %}\n"
    "    {% if loop.index0 == 1 %}\n"
    "        {% continue %}\n"
    "    {% endif %}\n"
    "{{ m.role ~ ':' ~ loop.length }}{% generation %}{{ m['content'] }}{% endgeneration %}\n\n"
    "{% endfor %}\n"
    "{% macro tag(x) %}<{{ x | upper }}>{{ caller() }}{% endmacro %}\n"
    "{% call tag('a') %}b{% endcall %}\n"
    "{% set ns = namespace(n=0) %}{% for m in messages if m.role != 'b' %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ ns['n'] }}\n"
    "{{ {'é': '<a>', 'n': none} | tojson }} {{ [1, {}] | tojson(indent=2) }}\n"
    "{{ ['x', 'y'] | join('+') }}{{ '**%s %d**' % ('b', 1700000000) }}{{ '{:>3}'.format(7) }}\n"
    "{{ messages | map(attribute='role') | join(', ') }}{{ 'a-b'.replace('-', '') * 2 }}\n"
    "{{ strftime_now('%Y') | length }}{{ dict(a=1).a }}{{ tools is none }}{{ nothing }}\n"
)


def test_rendering_equals_transformers(smollm2: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    found = load_chat_template(smollm2)
    assert found is not None
    chats = [
        HI,
        [{"role": "system", "content": "Be  brief."}, *HI],
        [*HI, {"role": "assistant", "content": "你好\n"}, *HI],
        [{"role": role, "content": role.upper()} for role in ("a", "b", "c")],
    ]
    for source in (found.source, DIALECT):
        for chat in chats:
            for add in (True, False):
                expected, _ = render_jinja_template(
                    [chat], chat_template=source, add_generation_prompt=add
                )
                assert ChatTemplate(source).render(chat, add_generation_prompt=add) == expected[0]
