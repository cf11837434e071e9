"""Is a weights file whole? Told from its headers and indexes, not from the tensors: a 10 GB shard is judged in milliseconds."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path


def missing(name: str) -> str:
    return f"{name} is missing"


def unreadable(path: Path, name: str) -> str:
    """Why the file cannot be a whole one; "" where it looks whole. Reads headers and indexes, not the tensors."""
    try:
        size = path.stat().st_size
        if size == 0:
            return f"{name} is empty"
        whole = _whole_safetensors(path, size) if name.endswith(".safetensors") else _whole_zip(path)
    except FileNotFoundError:
        return missing(name)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return "" if whole else f"{name} is torn"


def _whole_zip(path: Path) -> bool:
    """torch.save writes a zip: its end record comes last, and an entry has its own header where the index says."""
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as raw:
            entries = archive.infolist()
            for entry in entries[:: len(entries) // 16 + 1]:  # a shard has hundreds; a parallel file system is slow to seek
                raw.seek(entry.header_offset)
                if raw.read(4) != b"PK\x03\x04":
                    return False
            return bool(entries)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error):
        return False


def _whole_safetensors(path: Path, size: int) -> bool:
    """Eight bytes of header length, a JSON header, then the tensors up to exactly the last data offset."""
    with open(path, "rb") as raw:
        (length,) = struct.unpack("<Q", raw.read(8).ljust(8, b"\xff"))
        if length > size - 8:
            return False
        try:
            header = json.loads(raw.read(length))
            ends = [item["data_offsets"][1] for key, item in header.items() if key != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return False
    return size == 8 + length + max(ends, default=0)
