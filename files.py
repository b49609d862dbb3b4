"""Make a file appear whole or not at all, from this program or from the network. Load tensors without running code."""

import contextlib
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
    """Make or replace a file, whole or not at all. Raises UserError if that fails; the old one is then unchanged."""
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
        cause = error
        while cause and not isinstance(cause, OSError):  # torch.save hides it behind RuntimeErrors
            cause = cause.__context__
        if not cause:
            raise
        raise UserError(f"cannot write {path}: {cause.strerror or cause}; {advice}") from error


def replace_folder(new: Path, folder: Path) -> None:
    """Rename a new folder to replace another one, which is set aside first and comes back if that fails."""
    old = new.with_name("old")
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, old)
    try:
        os.rename(new, folder)
    finally:
        if old.exists() and not folder.exists():
            os.rename(old, folder)


def lock(file: IO, message: str) -> None:
    """Lock an open file for this process. Raises UserError if another process has locked it."""
    with contextlib.suppress(ImportError, OSError):  # Windows, or a file system without locks
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(message) from None


def load_tensors(path: Path, advice: str):
    """Load onto the CPU what torch.save wrote: tensors and plain values. Raises UserError for anything else."""
    import torch  # here: prepare_data.py and bigram.py need no torch

    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                if file.testzip():  # torch.load does not verify the checksums
                    raise zipfile.BadZipFile
        with warnings.catch_warnings(action="ignore"):  # about the pickle protocol of an untrusted file
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an untrusted file can raise anything
        found = f"is damaged, or contains more than tensors and plain values ({type(error).__name__})"
        raise UserError(f"{path} {found}; {advice}") from error


def download(url: str, path: Path, advice: str, sha256: str | None = None, tries: int = 4, pause: float = 1.0) -> None:
    """Download url to path, if its SHA-256 is the given one, or the one that the server names. A download that fails is
    resumed after a pause (in seconds) that doubles. Raises UserError."""
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as file:
        lock(file, f"another process is downloading {url}; wait for its end, and try again")
        named = fetch_rest(url, part, f"put the file at {path}, {advice}", tries, pause)
        try:
            check_sha256(part, sha256 or named, f"{url} has changed, or was damaged in transfer; try again, {advice}")
        except UserError:
            part.unlink()
            raise
        os.replace(part, path)


def fetch_rest(url: str, part: Path, advice: str, tries: int, pause: float) -> str | None:
    """Append the rest of url to `part`. Returns the SHA-256 that the Hugging Face hub sends with large files."""
    import requests

    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        with requests.get(url, headers=headers, stream=True, timeout=30) as response:
            response.raise_for_status()
            with open(part, "ab" if response.status_code == 206 else "wb") as file:  # 200: the whole file
                total = file.tell() + int(response.headers.get("Content-Length", 0))
                show = progress(f"downloading {part.stem}", total)
                for block in response.iter_content(1 << 14):  # small, as a block that breaks off is lost
                    file.write(block)
                    show(file.tell())
                if "Content-Length" in response.headers and file.tell() != total:
                    raise requests.ConnectionError(f"it stopped after {file.tell()} of {total} bytes")
    except requests.RequestException as error:
        status = getattr(error.response, "status_code", None)
        why = " ".join(str(error).split())[:200] or type(error).__name__
        if status == 416:  # the part is as long as the file, or longer: start again
            part.unlink()
        if tries == 1 or status in (400, 401, 403, 404, 410):
            raise UserError(f"cannot download {url} ({why}); {advice}") from error
        print(f"download stopped ({why}), trying again", file=sys.stderr)
        time.sleep(pause)
        return fetch_rest(url, part, advice, tries - 1, 2 * pause)
    tags = [answer.headers.get("X-Linked-Etag", "").strip('"') for answer in (*response.history, response)]
    return next((tag for tag in tags if re.fullmatch("[0-9a-f]{64}", tag)), None)


def check_sha256(path: Path, expected: str | None, advice: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if expected and found != expected:
        raise UserError(f"{path} has SHA-256 {found} instead of {expected}: {advice}")
