"""Files that appear whole or not at all, their locks and checksums; tensors that run no code."""

import contextlib
import errno
import hashlib
import json
import os
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

from console import UserError

DATA = Path("data")  # datasets, each in a folder
DOWNLOADS = DATA / "downloads"  # downloaded files, kept for the next time; safe to delete


def replace_file(path: Path, write: Callable) -> None:
    """Make or replace a file with the output of write(file), and make its folder if it is missing. If
    that fails, the old file stays as it is. Raises UserError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            write(file)
            # The content must be on the disk before the name is, or a power cut leaves an empty file
            file.flush()
            os.fsync(file.fileno())
        move(temporary, path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):  # there may be none
            temporary.unlink()
        # If the disk is full, torch.save raises a RuntimeError while it handles the OSError
        if isinstance(error, RuntimeError):
            error = error.__context__
        if not isinstance(error, OSError):
            raise
        reason = error.strerror or error
        is_full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)  # disk, limit of a file, quota
        advice = "free some disk space" if is_full else "use a folder that you may write to"
        if os.path.exists(path):
            advice = f"{advice}; the file from before is intact"
        raise UserError(f"cannot write {path}: {reason}; {advice}") from error


def move(source: Path, target: Path) -> None:
    """Rename a file or folder, and replace the target if it is a file."""
    # Windows refuses while a virus scanner has a file open: there, try for 5 s
    attempts = 50 if os.name == "nt" else 0
    for _ in range(attempts):
        with contextlib.suppress(PermissionError):
            return os.replace(source, target)
        time.sleep(0.1)
    os.replace(source, target)


def lock(file, message: str) -> None:
    """Lock an open file until it is closed, if this system can. Raises UserError(message) if another process has
    locked it."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(message) from None
    except (ImportError, OSError):
        return  # Windows, or a file system without locks


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return digest.hexdigest()


def verify(folder: Path, expected: dict[str, str]) -> None:
    """Check the SHA-256 of files in a folder, {name: SHA-256}; skip it if the sizes, times and inodes of the files are
    those in verified.json, which the last check has written. Raises UserError if one differs."""
    stamps = {}
    for name, sha256 in expected.items():
        status = (folder / name).stat()
        stamps[name] = [sha256, status.st_size, status.st_mtime_ns, status.st_ino]
    text = json.dumps(stamps)
    verified = folder / "verified.json"
    with contextlib.suppress(OSError):  # there is none yet
        if verified.read_bytes() == text.encode():
            return
    for name, sha256 in expected.items():
        path = folder / name
        if sha256_of(path) != sha256:
            advice = f"copy it again, or delete {folder} and run prepare_data.py again"
            raise UserError(f"{path} is not as it was prepared (its SHA-256 differs); {advice}")
    with contextlib.suppress(OSError):  # a folder that is read-only is verified at each start
        verified.write_text(text, encoding="utf-8")


# ----------------------------------------------------------------------------- tensors


def load_tensors(path: Path, advice: str):
    """Load tensors and plain values that torch.save wrote. Raises UserError for anything else."""
    import torch  # here: prepare_data.py and ngram.py need no torch

    try:
        # torch.load does not verify the checksums of the archive
        if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip():
            raise zipfile.BadZipFile
        with warnings.catch_warnings(action="ignore"):  # about the pickle protocol of an unrecognized file
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an untrusted file can raise anything
        what = f"{path} is damaged, or contains more than tensors and plain values ({type(error).__name__})"
        raise UserError(f"{what}; {advice}") from error
