"""``octavo serve``: read the options, then hand over to the supervisor."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from octavo.tools.flags import Parser, add_options, options_of

FRONT_MODULE = "octavo.server.process"
EPILOG = """\
Each flag is also an environment variable (--max-num-seqs: OCTAVO_MAX_NUM_SEQS) and a key of the
YAML file given to --config (max-num-seqs: 64). A flag wins over a variable, a variable over the
file. Lists: repeat the flag, or separate the values with commas.
--log-level debug shows each value in force and where it comes from."""


def main(argv: Sequence[str]) -> int:
    started = time.time()
    parser = Parser(
        "octavo serve", "Serve a model over HTTP.", EPILOG, usage="octavo serve [MODEL] [flags]"
    )
    add_options(parser)
    options = options_of(parser.read(argv))

    from octavo.config.summary import render_summary
    from octavo.engine.startup import prepare
    from octavo.engine.supervisor import run_supervisor

    config = prepare(options)
    if config.log_level == "debug":
        print(render_summary(config), file=sys.stderr)
    return run_supervisor(config, FRONT_MODULE, started)
