"""Arrays of whole numbers as short text: base64 of zlib of little-endian int64.

Input: an int64 array. Output: text, and back. Does not: know what the numbers mean; callers take differences first
where that makes the text shorter.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np


def pack(values: np.ndarray) -> str:
    """The array as text."""
    return base64.b64encode(zlib.compress(values.astype("<i8").tobytes(), 6)).decode("ascii")


def unpack(text: str) -> np.ndarray:
    """The array in a `pack` text, int64."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<i8").astype(np.int64)
