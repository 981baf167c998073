"""The C library's allocator, told to keep what is freed: training frees and wants the same memory in every step.

Where it gives memory back and takes it again the system clears every page anew, which costs more than small layers do.
"""

from __future__ import annotations

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Names of settings in malloc.h of the GNU C library."""

KEPT = 2**26
"""Bytes that may lie free at the end of the heap: as many as the library comes to by itself, in the end."""

FROM_HEAP = 2**25
"""Bytes below which a block comes from the heap: the largest threshold that the library takes."""


def keep_freed() -> None:
    """Let this process keep up to `KEPT` bytes that it has freed, where its C library can be told so.

    For processes that train and are ours: the setting is of the whole process.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(TRIM_THRESHOLD, KEPT)
            mallopt(MMAP_THRESHOLD, FROM_HEAP)
