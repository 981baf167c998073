"""The allocator: what a process of ours frees it has at once when it wants it again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource
from fedtide.fleets.this_machine import keep_freed

def step():
    held = [bytearray(3 << 20) for _ in range(8)]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed()
step()
before = faults()
for _ in range(5):
    step()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries cannot be told")
def test_memory_that_was_freed_is_not_asked_for_again():
    made = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    assert int(made.stdout) < 500  # pages; a step has 6,000
