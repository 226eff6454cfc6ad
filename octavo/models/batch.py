"""Batch: everything a forward pass needs, as one argument. No globals, no request ids."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.ops.api import GroupMeta


@dataclass(slots=True)
class Overlay:
    """Inputs that do not come from the token table (vision, M-RoPE).

    ``embeddings`` [E, hidden] replace the embeddings of tokens ``index`` int64 [E];
    ``positions`` int64 [axes, T].
    """

    embeddings: Tensor
    index: Tensor
    positions: Tensor | None = None


@dataclass(slots=True)
class Wanted:
    """Tokens whose last hidden states are asked for, each the last one of its row.

    ``tokens`` int32 [W]; ``groups`` as those of the batch, with these tokens as the only queries,
    one a row (where keys and values go is not asked of them).
    """

    tokens: Tensor
    groups: tuple[GroupMeta, ...]


@dataclass(slots=True)
class Batch:
    """T tokens of R rows, rows one after the other. ``wanted`` None: every hidden state is.

    ``ids`` int64 [T]; ``positions`` int64 [T]. For layer group g, ``groups[g]`` says
    where tokens live and ``kv[g]`` [P, L_g, 2, K, page_size, D] holds them.
    """

    ids: Tensor
    positions: Tensor
    groups: tuple[GroupMeta, ...]
    kv: tuple[Tensor, ...]
    overlay: Overlay | None = None
    wanted: Wanted | None = None
