"""Files that appear whole or not at all, from this program or the network; safe tensors."""

import contextlib
import hashlib
import os
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

from console import UserError, progress

DATA = Path("data")  # datasets, each in a folder
DOWNLOADS = DATA / "downloads"  # downloaded files, kept for the next time; safe to delete


# ----------------------------------------------------------------------------- files of this program


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
        advice = "free some disk space, or use a folder that you may write to; a file from before is intact"
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


def lock(file, message: str) -> bool:
    """Lock an open file until it is closed. Returns whether that is possible on this system. Raises
    UserError if another process has locked it."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(message) from None
    except (ImportError, OSError):
        return False  # Windows, or a file system without locks
    return True


# ----------------------------------------------------------------------------- downloads


def download(url: str, path: Path, advice: str, sha256: str = "") -> None:
    """Download url to path, and check its SHA-256: sha256, or else the hash that the server
    announces. A download that was interrupted resumes. advice: what else the user can do, the end of
    each error message. Raises UserError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with open(path.with_name(path.name + ".lock"), "w") as locked:
        lock(locked, f"another process is downloading {url}; wait for its end, and try again")
        for pause in (1, 2, 4, None):  # seconds before the next attempt
            try:
                sha256 = fetch_rest(url, part, advice, sha256)
                break
            except OSError as error:  # no network, or a full disk; all errors of requests are OSErrors, too
                if pause is None:
                    what = f"cannot download {url} ({error})"
                    raise UserError(f"{what}; put the file at {path}, {advice}") from error
            time.sleep(pause)
        if sha256_of(part) != sha256:
            part.unlink()
            raise UserError(f"{url} does not have the SHA-256 {sha256}; try again, {advice}")
        move(part, path)


def fetch_rest(url: str, part: Path, advice: str, sha256: str) -> str:
    """Download the bytes of a file after those that `part` has. Returns the SHA-256 that the file must
    have. Raises OSError if the connection fails, UserError if the SHA-256 is unknown."""
    import requests  # here: most scripts download nothing

    have = 0
    if part.exists():
        have = part.stat().st_size
    # identity: without compression, as the bytes are counted
    headers = {"Accept-Encoding": "identity", "Range": f"bytes={have}-"}
    with requests.get(url, headers=headers, stream=True, timeout=30) as response:
        if response.status_code in (200, 416):  # the server sends the whole file, or the part is too long
            part.unlink(missing_ok=True)
        response.raise_for_status()
        # Hugging Face's hub redirects to another server, and announces the hash in a header of the redirect
        answers = [*response.history, response]
        for answer in answers:
            if not sha256:
                etag = answer.headers.get("X-Linked-Etag", "")
                sha256 = etag.strip('"')
        if not sha256:
            raise UserError(f"{url} comes without a SHA-256 to verify it; {advice}")
        length = response.headers.get("Content-Length", 0)
        with open(part, "ab") as file:
            whole = file.tell() + int(length)
            show = progress(f"downloading {part.stem}", whole)
            # If the connection breaks off, the incomplete block is lost
            for block in response.iter_content(1 << 14):
                file.write(block)
                show(file.tell())
    return sha256


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return digest.hexdigest()


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
