"""``octavo warm-cache``: compile every kernel that a start would, once, for an image or a host."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from octavo.config.facts import read_host_facts
from octavo.config.options import Options
from octavo.core.errors import StartupError
from octavo.tools.flags import Parser, add_options, options_of
from octavo.tools.local import ENGINE_GROUPS

EPILOG = """\
Give the flags of these groups that octavo serve will get: kernels depend on the model, its types
and the sizes of a step. Weights are neither read nor downloaded. TRITON_CACHE_DIR says where a
GPU's kernels are kept (default: ~/.triton/cache); what is there already is not compiled again."""


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "octavo warm-cache",
        "Fill the cache of compiled kernels.",
        EPILOG,
        usage="octavo warm-cache [MODEL] [flags]",
    )
    add_options(parser, ENGINE_GROUPS)
    options = options_of(parser.read(argv))
    _require_device(options)

    from octavo.engine.build import build_engine
    from octavo.engine.stagebar import StageBar
    from octavo.engine.startup import prepare

    if not options.load_format.startswith("dummy"):
        options = dataclasses.replace(options, load_format="dummy")
    config = prepare(options)
    with StageBar() as bar:
        loop, info = build_engine(config, bar.show)
    loop.close()
    print(f"{info.notes['kernels']}: compiled, in {_folder(config.device)}")
    return 0


def _require_device(options: Options) -> None:
    if options.device != "cpu" and not read_host_facts().gpus:
        raise StartupError(
            "Kernels are compiled for the GPU that they will run on, and no NVIDIA GPU is visible "
            "on this machine; --device cpu compiles those of its CPU."
        )


def _folder(device: str) -> Path:
    if device == "cpu":
        from octavo.ops.cpu.jit import default_cache_dir

        return default_cache_dir()
    from triton import knobs

    return Path(knobs.cache.dir)
