"""Loads the compiled library of CPU kernels, and asks it about instruction sets. Must not handle tensors.

When the library is loaded, it registers its kernels with torch. It must therefore be loaded after torch, whose
functions it calls, and after the ops are declared. Where there is no library (_library.py), there are no instruction
sets.
"""

import ctypes
import platform

import torch  # the library takes its functions from the process

from fastcl._library import BUILT, LIBRARY


def _load() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        where = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}"
        raise ImportError(f"fastcl: the compiled part cannot be loaded: {error} ({where})") from None
    for name in ("compiled_isas", "usable_isas", "active_isa", "set_isa", "refusal"):
        getattr(library, f"fastcl_{name}").restype = ctypes.c_char_p
    wrong = library.fastcl_refusal()
    if wrong is not None:  # a wrong FASTCL_ISA is an error of the import, not of the first loss
        raise ImportError(wrong.decode())
    return library


_LIBRARY = _load() if BUILT else None


def _ask(name: str, *arguments: bytes) -> str:
    return str(getattr(_LIBRARY, f"fastcl_{name}")(*arguments).decode()) if _LIBRARY else ""


def compiled_isas() -> list[str]:
    return _ask("compiled_isas").split()


def usable_isas() -> list[str]:
    return _ask("usable_isas").split()


def active_isa() -> str:
    return _ask("active_isa") or "none"


def set_isa(name: str) -> str:
    """Takes a name of `usable_isas()` or "auto", and returns the previous choice in the same form."""
    return _ask("set_isa", name.encode()) or "auto"
