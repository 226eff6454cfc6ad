"""``octavo version``: what a bug report needs, without importing any of it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata

from octavo.config.facts import read_host_facts
from octavo.tools.flags import Parser
from octavo.version import __version__

PACKAGES = ("torch", "numpy", "numba", "tokenizers", "fastapi", "uvicorn")


def main(argv: Sequence[str]) -> int:
    Parser("octavo version", "Print the versions of Octavo and of what it runs on.").read(argv)
    facts = read_host_facts()
    print(f"octavo {__version__}")
    print(f"python {platform.python_version()} on {platform.platform()}")
    for package in PACKAGES:
        print(f"{package} {installed_version(package) or 'is not installed'}")
    gpus = ", ".join(gpu.name for gpu in facts.gpus) or "none"
    print(f"cpu {facts.cpu_name}, {facts.cpu_count} cores; gpu {gpus}")
    return 0


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
