"""What a compiled library asks of the system and offers to it, read from its file: ELF, Mach-O and PE alike (LIEF)."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Binary:
    """`needed`: libraries by the names under which they are looked for; `imports`, `exports`: functions, as in C;
    `searched`: folders written into the file in which libraries are looked for; `system`: the oldest system that it
    runs on, glibc for Linux and macOS for Mach-O, as numbers; `signed`: whether a Mach-O file has a signature."""

    kind: str  # the operating system: linux, macos, windows
    machine: str  # the processor: x86_64, aarch64
    needed: set[str]
    imports: set[str]
    exports: set[str]
    searched: list[str] = field(default_factory=list)
    system: tuple[int, ...] = ()
    signed: bool = False


MACHINES = {"AMD64": "x86_64", "X86_64": "x86_64", "AARCH64": "aarch64", "ARM64": "aarch64"}


def _elf(file: Any) -> Binary:
    glibc = [
        tuple(map(int, found[1].split(".")))
        for requirement in file.symbols_version_requirement
        for version in requirement.get_auxiliary_symbols()
        if (found := re.fullmatch(r"GLIBC_([\d.]+)", str(version.name)))
    ]
    rpaths = [
        f"{entry.tag.name} {entry.paths}" for entry in file.dynamic_entries if entry.tag.name in ("RPATH", "RUNPATH")
    ]
    return Binary(
        "linux",
        MACHINES.get(file.header.machine_type.name, file.header.machine_type.name),
        {str(name) for name in file.libraries},
        # Not `imported_symbols`: a function that was linked against a stand-in has no type, and LIEF omits it there.
        {str(symbol.name) for symbol in file.dynamic_symbols if symbol.shndx == 0 and symbol.name},
        {str(symbol.name) for symbol in file.exported_symbols},
        searched=rpaths,
        system=max(glibc, default=()),
    )


def _macho(file: Any) -> Binary:
    version = file.build_version
    return Binary(
        "macos",
        MACHINES.get(file.header.cpu_type.name, file.header.cpu_type.name),
        {str(library.name) for library in file.libraries if library.command.name != "ID_DYLIB"},
        {str(symbol.name).removeprefix("_") for symbol in file.imported_symbols},
        {str(symbol.name).removeprefix("_") for symbol in file.exported_symbols},
        searched=[str(rpath.path) for rpath in file.rpaths],
        system=tuple(version.minos)[:2] if version is not None else (),
        signed=file.has_code_signature,
    )


def _pe(file: Any) -> Binary:
    export = file.get_export() if file.has_exports else None
    return Binary(
        "windows",
        MACHINES.get(file.header.machine.name, file.header.machine.name),
        {str(library.name) for library in file.imports},
        {str(entry.name) for library in file.imports for entry in library.entries},
        {str(entry.name) for entry in export.entries} if export is not None else set(),
    )


def read(path: Path) -> Binary:
    import lief  # here, so that the checks of what was read need no LIEF

    lief.logging.disable()  # its messages are about parts of a file that no check reads
    file = lief.parse(str(path))
    if isinstance(file, lief.ELF.Binary):
        return _elf(file)
    if isinstance(file, lief.MachO.Binary):
        return _macho(file)
    if isinstance(file, lief.PE.Binary):
        return _pe(file)
    raise ValueError(f"{path}: expected a library of Linux, macOS or Windows")
