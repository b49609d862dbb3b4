"""A file appears whole or not at all, from disk or from the network.

Readers are strict in return: load_tensors() takes nothing but tensors and plain values, and runs no code of the file.
"""

import hashlib
import os
import re
import sys
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from console import UserError, progress

DOWNLOADS = Path("data", "downloads")  # downloaded files, kept for the next time; safe to delete


def replace_file(path: Path, write: Callable[[IO], object], advice: str = "free some disk space") -> None:
    """Make or replace a file by write(file), whole or not at all: write a temporary file, flush it to the disk, rename
    it, and flush the folder. Raises UserError if that fails; the previous file is then unchanged."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        if os.name == "posix":  # elsewhere a folder cannot be opened
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else error.__context__  # torch.save hides it behind a RuntimeError
        if not isinstance(cause, OSError):
            raise
        raise UserError(f"cannot write {path}: {cause.strerror or cause}; {advice}") from error


def lock(file: IO, message: str) -> None:
    """Lock an open file for this process, or raise UserError. (Not on Windows, or on file systems without locks.)"""
    if os.name != "posix":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(message) from None
    except OSError:
        pass  # a file system without locks


def load_tensors(path: Path, advice: str):
    """Load onto the CPU what torch.save wrote: tensors and plain values. Raises UserError for anything else."""
    import torch  # here: prepare_data.py and bigram.py need no torch

    try:
        if zipfile.is_zipfile(path):  # torch.load does not verify the checksums
            with zipfile.ZipFile(path) as file:
                if file.testzip():
                    raise zipfile.BadZipFile
        with warnings.catch_warnings(action="ignore"):  # about the pickle protocol of an untrusted file
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an untrusted file can raise anything
        found = f"is damaged, or contains more than tensors and plain values ({type(error).__name__})"
        raise UserError(f"{path} {found}; {advice}") from error


# ----------------------------------------------------------------------------- downloads


def download(url: str, path: Path, advice: str, sha256: str | None = None, tries: int = 4, pause: float = 1.0) -> None:
    """Download url to path, which appears only when it is complete and its checksum is right.

    Streams into path.part; if that fails, tries again after a pause (in seconds) that doubles, and resumes where it
    stopped if the server allows ranges. Checks the length and the SHA-256: the given one, or the one that the server
    names. Raises UserError."""
    import requests

    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as file:
        lock(file, f"another process is downloading {url}; wait for its end, and try again")
        for attempt in range(1, tries + 1):
            try:
                named = fetch_rest(url, part)
                break
            except requests.RequestException as error:
                status = error.response.status_code if error.response is not None else 0
                why = innermost_cause(error)
                if attempt == tries or status in (400, 401, 403, 404, 410):
                    raise UserError(f"cannot download {url} ({why}); put the file at {path}, {advice}") from error
                print(f"download stopped ({why}), trying again", file=sys.stderr)
                time.sleep(pause * 2 ** (attempt - 1))
        try:
            check_sha256(part, sha256 or named, f"{url} has changed, or was damaged in transfer; try again, {advice}")
        except UserError:
            part.unlink()
            raise
        os.replace(part, path)


def fetch_rest(url: str, part: Path) -> str | None:
    """Append to the file `part` the rest of url. Returns the SHA-256 that the Hugging Face hub sends along with its
    large files, if there is one. Raises requests.RequestException."""
    import requests

    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with requests.get(url, headers=headers, stream=True, timeout=30) as response:
        if response.status_code == 416:  # the part is as long as the file, or longer: start again
            part.unlink()
            raise requests.ConnectionError("the partial download was too long")
        response.raise_for_status()
        have = have if response.status_code == 206 else 0  # 200: the server ignores ranges and sends everything
        total = have + int(response.headers.get("Content-Length", 0))
        show = progress(f"downloading {part.stem}", total)
        with open(part, "ab" if have else "wb") as file:
            for block in response.iter_content(1 << 14):  # small, as a block that breaks off is lost
                file.write(block)
                have += len(block)
                show(have)
    if "Content-Length" in response.headers and have != total:
        raise requests.ConnectionError(f"it stopped after {have} of {total} bytes")
    tags = [answer.headers.get("X-Linked-Etag", "").strip('"') for answer in (*response.history, response)]
    return next((tag for tag in tags if re.fullmatch("[0-9a-f]{64}", tag)), None)


def innermost_cause(error: BaseException) -> str:
    """The cause of an error of requests, which wraps it three times, in one line."""
    while error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]
    return " ".join(str(getattr(error, "reason", None) or error).split())[:200]


def check_sha256(path: Path, expected: str | None, advice: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if expected and found != expected:
        raise UserError(f"{path} has SHA-256 {found} instead of {expected}: {advice}")
