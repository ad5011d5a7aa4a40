"""Freed memory stays with the process, unless the environment says otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")

SCRIPT = """
import resource
from pipedream.capture.compute_settings import keep_freed_memory

keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(12 << 20) for _ in range(4)]
    for block in blocks:
        block[:] = bytes(1) * len(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""
PAGES = 4 * (12 << 20) // 4096


def pages_fetched(script: str = SCRIPT, **environment: str) -> int:
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return int(done.stdout)


@pytest.mark.thorough
def test_before_training_freed_blocks_go_back_to_the_system_at_once() -> None:
    script = SCRIPT.replace("keep_freed_memory", "return_freed_memory")
    assert pages_fetched(script) > PAGES / 2
    # Then training begins: what it frees is kept again.
    both = script.replace("\n\ndef", "\nkeep_freed_memory()\n\ndef")
    both = both.replace("import return", "import keep_freed_memory, return")
    assert pages_fetched(both) < PAGES / 10


@pytest.mark.thorough
def test_freed_memory_is_used_again() -> None:
    assert pages_fetched() < PAGES / 10


@pytest.mark.thorough
def test_the_environment_has_the_last_word() -> None:
    assert pages_fetched(MALLOC_MMAP_THRESHOLD_="262144") > PAGES / 2
