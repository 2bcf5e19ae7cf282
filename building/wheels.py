"""Builds the sdist and the wheels of all platforms on this machine, with zig's compiler, and checks each (check.py).

    python -m building.wheels [--only linux-aarch64,none] [--twice] [--output dist]

Every wheel is built from the unpacked sdist, so that the sdist must be complete. The same sources give the same bytes,
which --twice proves by a second build of each archive in another folder. The output folder then also holds SHA256SUMS,
which opens with the commit.
"""

import argparse
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from building.check import problems
from building.platforms import PLATFORMS

ROOT = Path(__file__).resolve().parent.parent
NAMES = [*PLATFORMS, "none"]
# 1980-01-01, the earliest date that a zip archive can hold; setuptools gives it to all files of a wheel.
EPOCH = "315532800"
SUMS = "SHA256SUMS"


def call_backend(function: str, source: Path, output: Path, platform: str = "") -> Path:
    """Calls a hook of the build backend, as a build front end does, and returns the archive that it made."""
    settings = {
        "FASTCL_PLATFORM": platform, "FASTCL_CUDA": "0", "FASTCL_WERROR": "1",
        "SOURCE_DATE_EPOCH": EPOCH, "PYTHONHASHSEED": "0",
    }  # fmt: skip
    code = f"from building import backend; print(backend.{function}({str(output)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env=os.environ | settings,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode != 0:
        raise SystemExit(f"{function} {platform} failed:\n{done.stdout[-4000:]}")
    return output / done.stdout.splitlines()[-1]


def build_sdist(output: Path) -> Path:
    sdist = call_backend("build_sdist", ROOT, output)
    repack(sdist)
    return sdist


def repack(sdist: Path) -> None:
    """Takes out of an sdist what differs between two checkouts: dates, owners, modes, the order of the files."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as archive, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as anew:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            plain = tarfile.TarInfo(member.name)
            plain.size, plain.type, plain.mtime = member.size, member.type, int(EPOCH)
            plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            anew.addfile(plain, archive.extractfile(member))
    sdist.write_bytes(gzip.compress(packed.getvalue(), mtime=int(EPOCH)))


def build(sdist: Path, platform: str, output: Path) -> Path:
    """The wheel of a platform, built from an sdist in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (source,) = Path(folder).iterdir()
        return call_backend("build_wheel", source, output, platform)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def commit() -> str:
    """The commit whose files are built, with -dirty behind it where some have changed since."""
    asked = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        return subprocess.run(asked, cwd=ROOT, text=True, capture_output=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or an unpacked sdist
        return "unknown"


def write_sums(folder: Path) -> None:
    """Writes the digests of a folder's archives in the form of sha256sum, which skips the line with the commit."""
    archives = sorted(folder.iterdir())
    lines = [f"# commit {commit()}", *(f"{digest(path)}  {path.name}" for path in archives)]
    (folder / SUMS).write_text("".join(f"{line}\n" for line in lines))


def same_again(archive: Path, make: Callable[[Path], Path]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        return digest(make(Path(folder))) == digest(archive)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NAMES), help="platforms, with commas between them")
    parser.add_argument("--twice", action="store_true", help="build each wheel again, and compare the bytes")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"--only: expected names of {', '.join(NAMES)}, got {', '.join(unknown)}")

    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    sdist = build_sdist(args.output.resolve())
    makers: list[Callable[[Path], Path]] = [build_sdist, *(partial(build, sdist, name) for name in names)]
    found = []
    for make in makers:
        archive = sdist if make is build_sdist else make(args.output.resolve())
        if archive.suffix == ".whl":
            found += [f"{archive.name}: {problem}" for problem in problems(archive)]
        if args.twice and not same_again(archive, make):
            found.append(f"{archive.name}: expected the same bytes from a second build")
        print(f"{archive.name}  {archive.stat().st_size / 1e6:.2f} MB", flush=True)
    write_sums(args.output)
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
