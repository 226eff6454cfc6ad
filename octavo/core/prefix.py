"""Prefix cache keys: a SHA-256 chain over typed, length-delimited fields.

A page's key covers every token up to the page's end and whatever else its contents depend
on, so equal keys mean equal contents. SHA-256 because a collision would show one
user another one's text.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256

from octavo.core.pages import NULL_PAGE, CacheLayout, PagePool

_ROOT, _PAGE = b"R", b"P"  # the two types of key
_NONE, _TEXT = b"-", b"t"


def root_hash(cache_salt: str | None = None, adapter: str | None = None) -> bytes:
    """Parent of a first page. Requests share pages only under equal salt and adapter."""
    return sha256(_ROOT + _field(cache_salt) + _field(adapter)).digest()


def chain(parent: bytes, ids: Sequence[int]) -> bytes:
    """Key of a page that holds ``ids`` (int32) after the page known by ``parent``."""
    return sha256(
        struct.pack(f"<cII{len(ids)}i", _PAGE, len(parent), len(ids), *ids) + parent
    ).digest()


def prompt_hashes(ids: Sequence[int], page_size: int, root: bytes) -> tuple[bytes, ...]:
    """Keys of the full pages of ``ids``."""
    hashes = []
    parent = root
    for start in range(0, len(ids) - page_size + 1, page_size):
        parent = chain(parent, ids[start : start + page_size])
        hashes.append(parent)
    return tuple(hashes)


def group_key(page_hash: bytes, group: int) -> bytes:
    """Index key of a page of one layer group: groups keep different data of the same tokens."""
    return page_hash if group == 0 else page_hash + group.to_bytes(2, "little")


def longest_hit(pool: PagePool, hashes: Sequence[bytes]) -> list[list[int]]:
    """Table entries, for each layer group, of the longest prefix whose pages are all cached.

    A window group needs only the pages that the next token sees; entries before them are
    the null page. All groups' lists are equally long.
    """
    found: list[list[int]] = []
    length = len(hashes)
    for group, window in enumerate(pool.layout.windows):
        pages = _cached_pages(pool, hashes[:length], group, all_of_them=not window)
        found.append(pages)
        length = len(pages) if not window else length
    if any(pool.layout.windows):
        return _visible_hits(found, pool.layout, length)
    return [pages[:length] for pages in found]


def _visible_hits(found: list[list[int]], layout: CacheLayout, length: int) -> list[list[int]]:
    """The longest prefix of at most ``length`` pages, and of it what the next token sees."""
    page_size = layout.page_size
    windows = [-(-(window - 1) // page_size) if window else 0 for window in layout.windows]
    shorter = True
    while shorter:  # each group may shorten the hit of the others
        shorter = False
        for pages, window in zip(found, windows, strict=True):
            if window and (tail := _visible_hit(pages, length, window)) < length:
                length, shorter = tail, True
    return [
        [NULL_PAGE] * (length - window) + pages[max(0, length - window) : length]
        if window
        else pages[:length]
        for pages, window in zip(found, windows, strict=True)
    ]


def _cached_pages(
    pool: PagePool, hashes: Sequence[bytes], group: int, all_of_them: bool
) -> list[int]:
    """Cached pages by index; up to the first one missing, or with null pages for missing ones."""
    pages = []
    for page_hash in hashes:
        page = pool.lookup(group_key(page_hash, group))
        if page is None:
            if all_of_them:
                break
            page = NULL_PAGE
        pages.append(page)
    return pages


def _visible_hit(pages: Sequence[int], length: int, window: int) -> int:
    """Largest n ≤ ``length`` such that the last ``window`` of the first n pages are there."""
    end = length
    for index in range(length - 1, -1, -1):
        if pages[index] == NULL_PAGE:
            end = index
        elif end - index == window:
            return end
    return end


def _field(value: str | None) -> bytes:
    if value is None:
        return _NONE
    data = value.encode()
    return _TEXT + struct.pack("<I", len(data)) + data
