"""Before any test module: Triton decides while it is imported whether kernels are interpreted."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
