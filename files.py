"""Files that appear whole or not at all, from this program or the network; safe tensors."""

import contextlib
import errno
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
        cause = error
        if isinstance(error, RuntimeError):
            # If the disk is full, torch.save raises a RuntimeError while it handles the OSError
            cause = error.__context__
        if not isinstance(cause, OSError):
            raise
        is_full = cause.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)  # disk, limit of a file, quota
        advice = "free some disk space" if is_full else "use a folder that you may write to"
        if os.path.exists(path):
            advice += "; the file from before is intact"
        raise UserError(f"cannot write {path}: {cause.strerror or cause}; {advice}") from error


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
        try:
            sha256 = fetch(url, part, advice, sha256)
        except OSError as error:  # no network, or a full disk
            raise UserError(f"cannot download {url} ({error}); put the file at {path}, {advice}") from error
        if sha256_of(part) != sha256:
            part.unlink()
            raise UserError(f"{url} does not have the SHA-256 {sha256}; try again, {advice}")
        move(part, path)


def fetch(url: str, part: Path, advice: str, sha256: str) -> str:
    """Download the missing part of a file, in at most four attempts. Returns the SHA-256 that it must
    have. Raises OSError if the last attempt fails, UserError if the SHA-256 is unknown."""
    for pause in (1, 2, 4, None):  # seconds before the next attempt
        try:
            with request_rest(url, part) as response:
                restart_if_needed(response, part)
                response.raise_for_status()
                sha256 = sha256 or announced_sha256(response)
                if not sha256:
                    raise UserError(f"{url} comes without a SHA-256 to verify it; {advice}")
                append_body(response, part)
            return sha256
        except OSError as error:  # all errors of requests are OSErrors
            if pause is None or is_final(error):
                raise
        time.sleep(pause)


def request_rest(url: str, part: Path):
    """Ask the server for the bytes of a file after those that `part` has. Returns its response."""
    import requests  # here: most scripts download nothing

    have = part.stat().st_size if part.exists() else 0
    # identity: without compression, as the bytes are counted
    headers = {"Accept-Encoding": "identity", "Range": f"bytes={have}-"}
    return requests.get(url, headers=headers, stream=True, timeout=30)


def restart_if_needed(response, part: Path) -> None:
    """Delete the part that was downloaded before, if the response does not continue it."""
    sends_whole_file = response.status_code == 200
    part_is_too_long = response.status_code == 416
    if sends_whole_file or part_is_too_long:
        part.unlink(missing_ok=True)


def announced_sha256(response) -> str:
    """Return the SHA-256 that the server announces, or "". Hugging Face's hub redirects to another
    server, and announces it in a header of the redirect."""
    redirects = response.history
    for answer in (*redirects, response):
        etag = answer.headers.get("X-Linked-Etag", "")
        if etag:
            return etag.strip('"')
    return ""


def append_body(response, part: Path) -> None:
    """Append the body of a response to a file, block by block."""
    with open(part, "ab") as file:
        n_bytes = file.tell() + int(response.headers.get("Content-Length", 0))
        show = progress(f"downloading {part.stem}", n_bytes)
        # If the connection breaks off, the incomplete block is lost
        for block in response.iter_content(1 << 14):
            file.write(block)
            show(file.tell())


def is_final(error: OSError) -> bool:
    """Did the server answer that it will never send the file, so that trying again is no use?"""
    response = getattr(error, "response", None)
    if response is None:  # it did not answer
        return False
    # Bad request, unauthorized, forbidden, not found, gone
    return response.status_code in (400, 401, 403, 404, 410)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    show = progress(f"SHA-256 of {path}", path.stat().st_size)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            show(file.tell())
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
