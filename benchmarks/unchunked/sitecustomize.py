"""On the path of the server that W6 must miss its line with: prompts are computed whole, whatever
they hold up. There is no option for that."""

from octavo.core import pacing

if not pacing.TOKENS_BESIDE:
    raise RuntimeError("nothing bounds prompts beside answers")
pacing.TOKENS_BESIDE = 2**30
