"""``python -m octavo`` is the ``octavo`` command."""

import sys

from octavo.tools.cli import main

sys.exit(main())
