"""Where Octavo keeps what it may make or fetch again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def user_cache() -> Path:
    """``$XDG_CACHE_HOME/octavo`` or ``~/.cache/octavo``; for a user without a home, as in some
    containers, a folder of their own among the temporary ones."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "octavo"
    try:
        home = Path.home()
    except RuntimeError:  # the user has no entry and no HOME
        home = Path()
    if len(home.parts) > 1 and home.is_dir():  # "" and the root are none
        return home / ".cache" / "octavo"
    return Path(tempfile.gettempdir()) / f"octavo-{os.getuid()}"
