"""Chat templates: where they are found, what they are given, how they may fail.

The dialect is Hugging Face's: Jinja with ``messages``, ``tools``, ``documents``,
``add_generation_prompt`` and the special tokens as variables. Whatever is wrong with a
template or with what it is given ends as :class:`InvalidRequest`, however busy the machine is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    StartupError,
)
from octavo.text.gguf_metadata import read_metadata
from octavo.text.gguf_tokenizer import special_texts
from octavo.text.messages import normalize_messages
from octavo.text.tokenizer import SPECIAL_NAMES, read_tokenizer_config

if TYPE_CHECKING:
    from jinja2 import Template, nodes

MAX_SECONDS = 1.0  # of the rendering thread's own time
MAX_CHARS = 2**24

NO_TEMPLATE = (
    "This model has no chat template; give one with --chat-template (a file or the template "
    "itself), or use the completions API."
)

# What chat_template_kwargs may not set: what the server decides, and what a template relies on.
RESERVED_NAMES = frozenset(
    (
        *("messages", "conversation", "tools", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize", "tokenizer_kwargs", "return_dict", "return_tensors"),
        *("return_assistant_tokens_mask", "padding", "truncation", "max_length"),
        *("add_special_tokens", "range", "dict", "namespace", "raise_exception", "strftime_now"),
        *("additional_special_tokens", *SPECIAL_NAMES),
    )
)

# Stands at the end of the last message to find that place again in the rendered text.
_END_MARK = "\ue0f1\ue0f2\ue0f1"


class ChatTemplate:
    """One model's template; rendering is safe to call from several threads.

    ``problem`` is a sentence if the template cannot be compiled; each rendering then
    raises it.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        tools_source: str | None = None,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        """``special_tokens``: bos_token and so on, by the names templates use. ``tools_source`` is
        used instead of ``source`` when there are tools."""
        self.source = source
        self.max_seconds = max_seconds
        self._special_tokens = dict(special_tokens or {})
        self._plain = _Compiled(source)
        self._with_tools = self._plain if tools_source is None else _Compiled(tools_source)
        self.problem = self._plain.problem or self._with_tools.problem

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        max_chars: int = MAX_CHARS,
    ) -> str:
        """The prompt text. Raises :class:`InvalidRequest`, or :class:`EngineUnavailable` where the
        machine is too busy to tell whether the template would end.

        ``continue_final_message`` ends the text where the last message's content ends, so
        that the model goes on with it; it excludes ``add_generation_prompt``.
        """
        compiled = self._with_tools if tools else self._plain
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        variables = _extra_variables(kwargs) | self._special_tokens
        normal = normalize_messages(
            messages, as_parts=compiled.takes_parts, wrap_strings=compiled.takes_only_parts
        )
        if continue_final_message:
            _mark_end(normal[-1], compiled.takes_only_parts)
        variables |= {
            "messages": normal,
            "tools": tools or None,
            "documents": variables.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        text = compiled.render(variables, self.max_seconds, max_chars)
        return _cut_at_mark(text) if continue_final_message else text


def _extra_variables(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    param = "chat_template_kwargs"
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise InvalidRequest(f"{param} must be an object, not {kwargs!r:.60}.", param=param)
    for name in kwargs:
        if not isinstance(name, str) or name.startswith("_") or name in RESERVED_NAMES:
            raise InvalidRequest(f"{param} may not set {name!r:.60}.", param=param)
    return dict(kwargs)


def _mark_end(message: dict[str, Any], takes_only_parts: bool) -> None:
    content = message["content"]
    if takes_only_parts and not content:
        message["content"] = [{"type": "text", "text": _END_MARK}]
    elif isinstance(content, str):
        message["content"] = content + _END_MARK
    else:
        content[-1]["text"] += _END_MARK


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_END_MARK)
    if end < 0:
        raise InvalidRequest(
            "The chat template does not show the last message, so it cannot be continued.",
            param="continue_final_message",
        )
    return text[:end].replace(_END_MARK, "")


class _Compiled:
    """A template and what its syntax tree tells about the content it takes."""

    def __init__(self, source: str) -> None:
        from octavo.text.sandbox import compile_template

        self.problem: str | None = None
        self.takes_parts = self.takes_only_parts = False
        self._template: Template | None = None
        try:
            self._template, tree = compile_template(source)
        except Exception as error:  # Jinja's own, RecursionError, SyntaxError of its output
            self.problem = f"The chat template is broken: {_one_line(error)}"
            return
        self.takes_parts = _loops_over_content(tree)
        self.takes_only_parts = self.takes_parts and not _tests_for_string(tree)

    def render(self, variables: Mapping[str, Any], max_seconds: float, max_chars: int) -> str:
        from octavo.text.sandbox import Budget, BudgetExceeded, render

        if self._template is None:
            raise InvalidRequest(self.problem or "")
        try:
            return render(self._template, variables, Budget(max_seconds, max_chars))
        except BudgetExceeded as error:
            if error.limit == "time":
                raise InvalidRequest(
                    f"The chat template did not end within {max_seconds:g} s of computing.",
                    param="messages",
                ) from None
            if error.limit == "wall":
                raise EngineUnavailable(
                    "The server is too busy to render the chat template; try again shortly.",
                    code="overloaded",
                ) from None
            raise ContextLengthExceeded(
                f"The chat template made more than the {max_chars} characters that can fit.",
                param="messages",
            ) from None
        except Exception as error:  # a template can raise anything
            raise InvalidRequest(
                f"The chat template failed: {_one_line(error)}", param="messages"
            ) from None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return (text if len(text) <= 300 else text[:297] + "...").rstrip(".") + "."


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether a ``for`` runs over a message's content (under whatever name)."""
    from jinja2 import nodes

    names = {"content"}
    assigned = [
        (node.target.name, node.node)
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name)
    ]
    for _ in assigned:  # an alias of an alias is found in a later pass
        names |= {name for name, value in assigned if _is_content(value, names)}
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    from jinja2 import nodes

    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def _tests_for_string(tree: nodes.Template) -> bool:
    from jinja2 import nodes

    return any(test.name == "string" for test in tree.find_all(nodes.Test))


def load_chat_template(source: Path, override: str | None = None) -> ChatTemplate | None:
    """The template of a model folder or GGUF file; None if it has none.

    ``override`` (``--chat-template``) is a file, or the template itself. A broken override is
    a :class:`StartupError`; a broken one of the model's is not, for completions work without.
    """
    source = Path(source)
    if source.is_dir():
        config = read_tokenizer_config(source)
        found = _folder_templates(source, config)
        specials = {name: config[name] for name in SPECIAL_NAMES if config.get(name)}
    else:
        metadata = read_metadata(source)
        found = _gguf_templates(metadata)
        specials = special_texts(metadata)
    if override is not None:
        found = {"default": _read_override(override)}
    if "default" not in found:
        return None
    template = ChatTemplate(
        found["default"], special_tokens=specials, tools_source=found.get("tool_use")
    )
    if override is not None and template.problem is not None:
        raise StartupError(f"--chat-template: {template.problem}")
    return template


def _read_override(override: str) -> str:
    if "{{" in override or "{%" in override or "\n" in override:
        return override
    try:
        return Path(override).expanduser().read_text("utf-8")
    except (OSError, ValueError) as error:
        raise StartupError(
            f"--chat-template is neither a readable file nor a template: {error}"
        ) from None


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name; a file of its own wins over chat_template.json and tokenizer_config.json."""
    found = _named(config.get("chat_template"))
    file = folder / "chat_template.json"
    try:
        if file.is_file():
            found |= _named(json.loads(file.read_text("utf-8")).get("chat_template"))
        if (folder / "chat_template.jinja").is_file():
            found = {"default": (folder / "chat_template.jinja").read_text("utf-8")}
        for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            found[extra.stem] = extra.read_text("utf-8")
    except (ValueError, AttributeError) as error:
        raise StartupError(f"Cannot read the chat template in {folder}: {error}") from None
    return found


def _named(value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("template"), str) and "name" in entry
    }


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    names = {"default": key, "tool_use": f"{key}.tool_use"}
    return {name: metadata[k] for name, k in names.items() if isinstance(metadata.get(k), str)}
