"""Memory that a process has freed: kept for its next step, unless the environment says otherwise."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from fedtide.fleets.this_machine import keep_freed_memory

keep_freed_memory()
for _ in range(3):
    torch.ones(2**23)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(2**23)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Counts pages that the system gives for 20 tensors of 32 MB, one after the other."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no thresholds")
def test_freed_memory_is_used_again_unless_the_environment_sets_thresholds():
    def pages(**environment: str) -> int:
        return int(subprocess.check_output([sys.executable, "-c", PROGRAM], env={**os.environ, **environment}))

    assert 4 * pages() <= pages(MALLOC_TRIM_THRESHOLD_=str(2**20))
