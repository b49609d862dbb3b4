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

DOWNLOADS = Path("data", "downloads")  # downloaded files, kept for the next time; safe to delete


def replace_file(path: Path, write: Callable, advice: str = "free some disk space") -> None:
    """Make or replace a file. If that fails, the old one stays as it is. Raises UserError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        move(temporary, path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else error.__context__  # of torch.save
        if not isinstance(cause, OSError):
            raise
        raise UserError(f"cannot write {path}: {cause.strerror or cause}; {advice}") from error


def move(source: Path, target: Path) -> None:
    """os.replace. Windows refuses it while a virus scanner has a file open: then again, for 5 s."""
    attempts = 50 if os.name == "nt" else 0
    for _ in range(attempts):
        with contextlib.suppress(PermissionError):
            return os.replace(source, target)
        time.sleep(0.1)
    os.replace(source, target)


def lock(file, message: str) -> None:
    """Lock an open file for this process. Raises UserError if another process has locked it."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(message) from None
    except (ImportError, OSError):
        pass  # Windows, or a file system without locks


def load_tensors(path: Path, advice: str):
    """Load tensors and plain values that torch.save wrote. Raises UserError for anything else."""
    import torch  # here: prepare_data.py and ngram.py need no torch

    try:
        if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip():
            raise zipfile.BadZipFile  # torch.load does not verify the checksums
        with warnings.catch_warnings(action="ignore"):  # about the pickle protocol of a foreign file
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an untrusted file can raise anything
        found = f"is damaged, or contains more than tensors and plain values ({type(error).__name__})"
        raise UserError(f"{path} {found}; {advice}") from error


def download(url: str, path: Path, advice: str, sha256: str = "") -> None:
    """Download url to path, if it has the given SHA-256, or that of the hub. Raises UserError."""
    import requests

    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as locked:
        lock(locked, f"another process is downloading {url}; wait for its end, and try again")
        for pause in (1, 2, 4, 0):  # seconds
            have = part.stat().st_size if part.exists() else 0
            headers = {"Accept-Encoding": "identity", "Range": f"bytes={have}-"}
            try:
                with requests.get(url, headers=headers, stream=True, timeout=30) as response, open(part, "ab") as file:
                    if response.status_code in (200, 416):  # it starts anew, or the part is too long
                        file.truncate(file.seek(0))
                    response.raise_for_status()
                    answers = (*response.history, response)  # of the hub, one has the header
                    sha256 = sha256 or max(a.headers.get("X-Linked-Etag", "") for a in answers).strip('"')
                    if not sha256:
                        raise UserError(f"{url} comes without a SHA-256 to verify it; {advice}")
                    rest = int(response.headers.get("Content-Length", 0))
                    show = progress(f"downloading {path.name}", file.tell() + rest)
                    for block in response.iter_content(1 << 14):  # a block that breaks off is lost
                        file.write(block)
                        show(file.tell())
                break
            except OSError as error:  # of requests, or a full disk
                status = getattr(getattr(error, "response", None), "status_code", None)
                if not pause or status in (400, 401, 403, 404, 410):
                    raise UserError(f"cannot download {url} ({error}); put the file at {path}, {advice}") from error
                time.sleep(pause)
        if sha256_of(part) != sha256:
            part.unlink()
            raise UserError(f"{url} does not have the SHA-256 {sha256}; try again, {advice}")
        move(part, path)


def sha256_of(path: Path) -> str:
    digest, show = hashlib.sha256(), progress(f"SHA-256 of {path}", path.stat().st_size)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            show(file.tell())
    return digest.hexdigest()
