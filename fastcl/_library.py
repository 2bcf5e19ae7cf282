"""Where the compiled library of CPU kernels is. Loads nothing, so that a missing one is told before torch is loaded.

A wheel for any platform has no library. In its place lies a text file that says so, and everything runs in chunked
PyTorch (fallback.py). Sources that have neither file were not built.
"""

import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_NAMES = {"win32": "fastcl_cpu.dll", "darwin": "libfastcl_cpu.dylib"}
LIBRARY = os.path.join(_FOLDER, _NAMES.get(sys.platform, "libfastcl_cpu.so"))
BUILT = os.path.exists(LIBRARY)


def check_compiled() -> None:
    """ImportError where Python found the sources without a compiled part beside them.

    The compiled part of another installation does not count, since it may have been built from other sources.
    """
    if not BUILT and not os.path.exists(os.path.join(_FOLDER, "without_kernels.txt")):
        raise ImportError(
            f"fastcl: {_FOLDER} holds the sources without the compiled part, {os.path.basename(LIBRARY)}; "
            f"run `pip install -e .` in {os.path.dirname(_FOLDER)}, or start Python outside that folder to use an "
            "installed fastcl"
        )
