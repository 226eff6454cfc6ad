"""Before anything heavy is loaded: find the model, read its numbers, resolve every "auto".

Free of torch, so that the supervisor and a front can use it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.config.facts import read_host_facts
from octavo.config.load import ARGUMENT, OptionError, load_options
from octavo.config.options import DECLARATIONS, Options
from octavo.config.resolve import Config, resolve
from octavo.core.errors import InvalidRequest, StartupError
from octavo.core.sampling import SamplingParams
from octavo.core.validation import Limits
from octavo.engine.client import EngineInfo
from octavo.text.chat import load_chat_template
from octavo.text.front import TextFront
from octavo.text.tokenizer import load_tokenizer
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.folder import read_generation_config
from octavo.weights.locate import locate


def load_config(model: str | None, options: Mapping[str, Any]) -> Config:
    """Configuration of the Python API: keyword arguments, then environment, then defaults."""
    for name in options:
        if name in DECLARATIONS and DECLARATIONS[name].group == "Server":
            raise OptionError(f"{name} is an option of the server; there is none here.")
    return prepare(load_options({"model": model, **options}, os.environ, ARGUMENT))


def prepare(options: Options) -> Config:
    """Bring the model onto this machine if it is not there, and resolve the options for it.

    In the result ``model`` is a path on this machine. Raises :class:`StartupError`.
    """
    if options.trace_file is not None:
        _check_writable("--trace-file", Path(options.trace_file))
    if options.revision and options.model and Path(options.model).exists():
        raise OptionError("--revision is for a model on the hub; this one is on this machine.")
    located = locate(
        options.model,
        revision=options.revision,
        cache_dir=options.download_dir,
        weights=not options.load_format.startswith("dummy"),
    )
    names = options.served_model_name or (located.name,)
    options = dataclasses.replace(
        options, model=str(located.path), served_model_name=names, tokenizer=_tokenizer(options)
    )
    checkpoint = read_checkpoint(options)
    return resolve(options, read_host_facts(), checkpoint.spec)


def _check_writable(flag: str, path: Path) -> None:
    """Now, not after a download. Leaves no file that was not there."""
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise StartupError(f"{flag}: cannot write {path}: {error.strerror}.") from None
    if not existed:
        path.unlink()


def _tokenizer(options: Options) -> str | None:
    if options.tokenizer is None:
        return None
    return str(locate(options.tokenizer, cache_dir=options.download_dir, weights=False).path)


def read_checkpoint(options: Options) -> Checkpoint:
    """The model's numbers; its tensors wait until someone asks."""
    device = "cpu" if options.device == "auto" else options.device
    return open_checkpoint(
        Path(options.model or ""), options.load_format, options.hf_overrides, options.seed, device
    )


def build_text(config: Config) -> TextFront:
    """Tokenizer and chat template of the model, for contexts of the configured length."""
    source = Path(config.tokenizer or config.model or "")
    return TextFront(
        load_tokenizer(source),
        load_chat_template(source, config.chat_template),
        max_model_len=config.max_model_len,
    )


def request_limits(
    config: Config, text: TextFront | None, info: EngineInfo | None = None
) -> Limits:
    """What a request may ask for; stop ids are the union of checkpoint and tokenizer."""
    spec = read_checkpoint(config).spec
    eos = (
        set(spec.eos_ids)
        | _stop_ids(config)
        | set(text.tokenizer.eos_ids if text is not None else ())
    )
    return Limits(
        vocab_size=spec.vocab_size,
        max_model_len=info.max_model_len if info else config.max_model_len,
        page_size=config.block_size,
        eos_ids=tuple(sorted(eos)),
        max_n=config.max_n,
        max_logprobs=config.max_logprobs,
        max_sequences=config.max_choices,
        clamp_max_tokens=config.clamp_max_tokens,
        prefix_caching=config.enable_prefix_caching,
        has_priorities=config.scheduling_policy != "fcfs",
        request_timeout=config.request_timeout,
        queue_timeout=config.queue_timeout,
    )


SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
OVERRIDABLE = (*SAMPLING_DEFAULTS, "eos_token_id")


def generation_defaults(config: Config) -> dict[str, Any]:
    """The generation config in force: the model's, a folder's, or none, with what overrides it.

    Raises :class:`StartupError` for a folder without one and for a name that has no meaning here.
    """
    if config.generation_config == "vllm":
        found: Mapping[str, Any] = {}
    elif config.generation_config == "auto":
        found = read_checkpoint(config).generation_config
    else:
        folder = Path(config.generation_config)
        if not (folder / "generation_config.json").is_file():
            raise StartupError(f"--generation-config: {folder} has no generation_config.json.")
        found = read_generation_config(folder)
    overrides = config.override_generation_config or {}
    unknown = [name for name in overrides if name not in OVERRIDABLE]
    if unknown:
        raise StartupError(
            f"--override-generation-config: {unknown[0]} is not one of {', '.join(OVERRIDABLE)}."
        )
    return {**found, **overrides}


def sampling_defaults(config: Config) -> dict[str, Any]:
    """Values for the parameters that a request leaves out.

    A length is not among them: how long an answer may be is the caller's business.
    """
    found = generation_defaults(config)
    defaults = {name: found[name] for name in SAMPLING_DEFAULTS if found.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequest as error:
        raise StartupError(f"The generation config is not usable: {error.message}") from None
    return defaults


def _stop_ids(config: Config) -> set[int]:
    """EOS ids of the generation config; the checkpoint's own count whatever overrides it."""
    given = generation_defaults(config).get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(token, int) for token in ids):
        raise StartupError(f"The generation config's eos_token_id must be ids, not {given!r}.")
    return set(ids)
