"""Tile choices, measured once a card and committed: nothing is tuned at start."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Card:
    """What choices depend on. ``shared_bytes`` is the most shared memory a program may have."""

    name: str
    capability: int  # 90 for compute capability 9.0; 0 without a GPU
    multiprocessors: int
    shared_bytes: int

    @property
    def starts_early(self) -> bool:
        """Whether a kernel can start before its predecessor has ended (dependent launch)."""
        return self.capability >= 90

    @classmethod
    def of(cls, device: torch.device) -> Card:
        if device.type != "cuda":
            return cls("interpreter", 0, 3, 1 << 20)
        facts = torch.cuda.get_device_properties(device)
        shared = getattr(facts, "shared_memory_per_block_optin", 64 << 10)
        return cls(facts.name, facts.major * 10 + facts.minor, facts.multi_processor_count, shared)


@dataclass(frozen=True, slots=True)
class Tile:
    """One attention kernel's shape: query rows a unit, KV tokens a tile, warps, tiles loaded
    ahead, programs a multiprocessor, tiles a share at least, most registers a thread (0: any)."""

    rows: int
    tokens: int
    warps: int
    ahead: int
    programs: int
    least: int = 1
    registers: int = 0

    @property
    def stages(self) -> int:
        """Triton's stages: one to compute, and two a tile ahead, for its pages and for it."""
        return 2 * self.ahead + 1

    def fitted(
        self, head_dim: int, element_bytes: int, shared_bytes: int, fewest: int = 16
    ) -> Tile:
        """With fewer tiles ahead, then smaller ones (of ``fewest`` tokens at least), where keys and
        values would not fit."""
        tile = self
        while _tile_bytes(tile, head_dim, element_bytes) > shared_bytes:
            if tile.ahead > 1:
                tile = replace(tile, ahead=tile.ahead - 1)
            elif tile.tokens > fewest:
                tile = replace(tile, tokens=tile.tokens // 2)
            else:
                break
        return tile


def _tile_bytes(tile: Tile, head_dim: int, element_bytes: int) -> int:
    kv = 2 * tile.tokens * (tile.ahead + 1)
    return (kv + tile.rows) * head_dim * element_bytes


@dataclass(frozen=True, slots=True)
class VectorTile:
    """A product of a few rows: outputs a program, inputs that it asks for before it may start and
    at a time afterwards, warps, steps unrolled; for up to ``count`` rows (0: none)."""

    rows: int = 4
    first: int = 4096
    columns: int = 1024
    warps: int = 4
    unroll: int = 4
    count: int = 1


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Kernels over rows: elements a warp of a norm, features a program of an activation and of an
    embedding; (elements, warps) a program of a rotation, of few tokens and of many, and the same
    where it chooses scales of fp8."""

    norm: int = 1024
    activation: int = 1024
    embedding: int = 2048
    rope_few: tuple[int, int] = (512, 1)
    rope_many: tuple[int, int] = (2048, 2)
    scales_few: tuple[int, int] = (256, 1)
    scales_many: tuple[int, int] = (1024, 2)
    vector: VectorTile = VectorTile(count=0)

    def rope(self, num_tokens: int, in_fp8: bool) -> tuple[int, int]:
        few, many = self.rope_few, self.rope_many
        if in_fp8:
            few, many = self.scales_few, self.scales_many
        return few if num_tokens <= 256 else many


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Attention by largest head size, ascending: ``few`` queries a row; ``many``; ``split``: many,
    but too few units to fill the card."""

    few: dict[int, Tile]
    many: dict[int, Tile]
    split: dict[int, Tile]


@dataclass(frozen=True, slots=True)
class CardTiles:
    """All choices for cards of a capability. Tiles of ``fp8`` pages have 64 tokens at least: a
    quarter of them, that of one byte of each word, fills a tensor core."""

    capability: int
    plain: AttentionTiles
    fp8: AttentionTiles
    rows: RowTiles = RowTiles()


H200 = CardTiles(
    capability=90,
    plain=AttentionTiles(
        few={
            64: Tile(rows=16, tokens=32, warps=1, ahead=1, programs=8),
            128: Tile(rows=16, tokens=16, warps=1, ahead=1, programs=8),
            256: Tile(rows=16, tokens=32, warps=2, ahead=1, programs=4),
        },
        many={
            128: Tile(rows=128, tokens=64, warps=8, ahead=1, programs=64, registers=128),
            256: Tile(rows=128, tokens=64, warps=8, ahead=1, programs=1),
        },
        split={
            128: Tile(rows=128, tokens=64, warps=8, ahead=2, programs=1),
            256: Tile(rows=128, tokens=64, warps=8, ahead=1, programs=1),
        },
    ),
    fp8=AttentionTiles(
        few={
            128: Tile(rows=8, tokens=64, warps=1, ahead=1, programs=8),
            256: Tile(rows=8, tokens=64, warps=4, ahead=1, programs=3),
        },
        many={
            128: Tile(rows=128, tokens=64, warps=8, ahead=1, programs=64, registers=128),
            256: Tile(rows=128, tokens=64, warps=8, ahead=1, programs=1),
        },
        split={
            128: Tile(rows=128, tokens=64, warps=8, ahead=1, programs=1),
            256: Tile(rows=128, tokens=64, warps=8, ahead=1, programs=1),
        },
    ),
    rows=RowTiles(vector=VectorTile()),
)

AMPERE = CardTiles(
    capability=80,
    plain=AttentionTiles(
        few={
            128: Tile(rows=16, tokens=16, warps=1, ahead=1, programs=8),
            256: Tile(rows=16, tokens=32, warps=4, ahead=1, programs=3),
        },
        many={
            128: Tile(rows=128, tokens=64, warps=8, ahead=1, programs=64),
            256: Tile(rows=64, tokens=32, warps=4, ahead=1, programs=64),
        },
        split={
            128: Tile(rows=64, tokens=64, warps=4, ahead=1, programs=1),
            256: Tile(rows=64, tokens=32, warps=4, ahead=1, programs=1),
        },
    ),
    fp8=AttentionTiles(
        few={256: Tile(rows=16, tokens=64, warps=4, ahead=1, programs=3)},
        many={256: Tile(rows=64, tokens=64, warps=4, ahead=1, programs=64)},
        split={256: Tile(rows=64, tokens=64, warps=4, ahead=1, programs=1)},
    ),
)

_TABLES = (AMPERE, H200)  # ascending capability; AMPERE is sized to fit, not measured


def tiles_for(card: Card) -> CardTiles:
    """The table of the newest card that is not newer than this one."""
    older = [tiles for tiles in _TABLES if tiles.capability <= card.capability]
    return older[-1] if older else _TABLES[0]


def pick(table: dict[int, Tile], head_dim: int, group: int) -> Tile:
    """The entry of the nearest head size from above, with room for the heads of a group."""
    tile = next((table[size] for size in sorted(table) if size >= head_dim), table[max(table)])
    rows = tile.rows
    while rows < group:
        rows *= 2
    return replace(tile, rows=rows)
