"""Which files hold a checkpoint's tensors, and whether they are whole. Torch-free.

Everything here runs before memory is allocated: a half-downloaded checkpoint must not
cost a model load to find out.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.errors import StartupError
from octavo.weights.folder import read_json

LFS_MAGIC = b"version https://git-lfs"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_NUMBERED = re.compile(r"(.*-)(\d{5})-of-(\d{5})(\..+)")
_DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a safetensors file. ``dtype`` in the format's words (F32, BF16, …)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shards:
    """A checkpoint's weight files in order, and the index that names them, if any."""

    files: list[Path]
    promised: dict[str, str]  # tensor name to file name, as the index has it
    index: Path

    @property
    def total_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def find_shards(folder: Path, stem: str, suffix: str) -> Shards:
    """``STEM.SUFFIX`` alone, or else the files of its index; no files if there is neither.

    Without both, any files of that suffix will do, except Mistral's own second copy
    (consolidated*). Raises :class:`StartupError` naming the first file that is missing, or that is
    only a Git LFS pointer.
    """
    index = folder / f"{stem}{suffix}.index.json"
    single = folder / f"{stem}{suffix}"
    promised: dict[str, str] = {}
    if single.exists():
        files = [single]
    elif index.exists():
        promised = _weight_map(index)
        files = [folder / name for name in sorted(set(promised.values()))]
    else:
        found = sorted(folder.glob(f"*{suffix}"))
        plain = [path for path in found if not path.name.startswith("consolidated")]
        files = _complete_set(plain or found)
    _refuse_missing(files)
    return Shards(files, promised, index)


def read_entries(shards: Shards) -> dict[str, Entry]:
    """Every tensor of safetensors files, each file checked against its header.

    A tensor that the index promises must be where it says. Raises :class:`StartupError`
    naming the file, with expected and actual bytes.
    """
    entries: dict[str, Entry] = {}
    for file in shards.files:
        for name, entry in _read_file(file).items():
            if shards.promised.get(name, file.name) == file.name:
                entries[name] = entry
    for name, file_name in shards.promised.items():
        if name not in entries:
            raise StartupError(f"{shards.index}: tensor {name} is not in {file_name}.")
    return entries


def _refuse_missing(files: list[Path]) -> None:
    for number, file in enumerate(files, 1):
        if not file.is_file():
            raise StartupError(
                f"{file} is missing (file {number} of {len(files)}); download the model again."
            )
        _refuse_lfs_pointer(file)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name to file name."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise StartupError(f"{index}: weight_map must be an object of tensor and file names.")
    for name in names.values():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise StartupError(f"{index}: weight_map holds {name!r}, not a file of this folder.")
    return names


def _complete_set(files: list[Path]) -> list[Path]:
    """Add the files that the numbers of ``x-00001-of-00003`` promise."""
    wanted = set(files)
    for file in files:
        if match := _NUMBERED.fullmatch(file.name):
            stem, _, total, suffix = match.groups()
            numbers = range(1, int(total) + 1)
            wanted.update(file.with_name(f"{stem}{i:05d}-of-{total}{suffix}") for i in numbers)
    return sorted(wanted)


def _refuse_lfs_pointer(file: Path) -> None:
    with file.open("rb") as opened:
        head = opened.read(1024)
    if head.startswith(LFS_MAGIC):
        size = re.search(rb"^size (\d+)", head, re.MULTILINE)
        expected = f"{int(size[1])} bytes expected, " if size else ""
        raise StartupError(
            f"{file} is a Git LFS pointer, not the weights ({expected}"
            f"{file.stat().st_size} found); run git lfs pull."
        )


def _read_file(file: Path) -> dict[str, Entry]:
    actual = file.stat().st_size
    header, header_bytes = _read_header(file, actual)
    entries, end = {}, 0
    for name, info in header.items():
        if name != "__metadata__":
            entries[name], start, stop = _entry(file, name, info)
            if start != end:
                raise _broken(file, f"tensor {name} begins at {start}, not at {end}")
            end = stop
    expected = header_bytes + end
    if actual != expected:
        raise StartupError(
            f"{file} is {'cut off' if actual < expected else 'too long'}: "
            f"{expected} bytes expected, {actual} found; download it again."
        )
    return entries


def _read_header(file: Path, actual: int) -> tuple[dict[str, Any], int]:
    """The JSON object, sorted by where its tensors begin, and the bytes before the first."""
    with file.open("rb") as opened:
        prefix = opened.read(8)
        if len(prefix) < 8:
            raise StartupError(
                f"{file} is cut off: at least 8 bytes expected, {actual} found; download it again."
            )
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            raise _broken(file, f"its header would have {length} bytes, the file has {actual}")
        if 8 + length > actual:
            raise StartupError(
                f"{file} is cut off: more than {8 + length} bytes expected, {actual} found; "
                "download it again."
            )
        raw = opened.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _broken(file, f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise _broken(file, "its header is not a JSON object")
    return dict(sorted(header.items(), key=_begin)), 8 + length


def _begin(item: tuple[str, Any]) -> int:
    """Sort key; what is not a tensor's entry comes first and is judged later."""
    info = item[1]
    offsets = info.get("data_offsets") if isinstance(info, dict) else None
    first = offsets[0] if isinstance(offsets, list) and offsets else -1
    return first if isinstance(first, int) else -1


def _entry(file: Path, name: str, info: Any) -> tuple[Entry, int, int]:
    """(entry, begin, end) in the data section."""
    try:
        dtype, shape, (start, stop) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
        num_bytes = math.prod(shape) * _DTYPE_BYTES[dtype]
        sound = all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop))
    except (TypeError, ValueError, KeyError):
        sound = False
    if not sound or stop - start != num_bytes:
        raise _broken(file, f"its entry of tensor {name} is {json.dumps(info)[:200]}")
    return Entry(file, dtype, shape), start, stop


def _broken(file: Path, reason: str) -> StartupError:
    return StartupError(f"{file} is not a sound safetensors file: {reason}.")
