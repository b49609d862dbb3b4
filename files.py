"""A file appears whole or not at all, from disk or from the network."""

import hashlib
import os
import re
import sys
import time
from pathlib import Path
from typing import IO

from console import UserError, progress

DATA = Path("data")  # the datasets; data/.* is left over from a script that was killed, and safe to delete

DOWNLOADS = DATA / "downloads"  # what came over the network, kept; safe to delete


class Missing(UserError):
    """The server answers, and does not have this file."""


NO_NETWORK = "give a copy with --file=, or use words or python, which need none"


def download(
    url: str, path: Path, sha256: str | None = None, retries: int = 3, backoff: float = 1.0, ways: str = NO_NETWORK
) -> None:
    """Fetch url into path, which appears only when it is whole and right.

    Streams into path.part; tries again after a pause that doubles (seconds: backoff, 2 backoff ...), and goes on where
    it broke off if the server allows ranges; checks length and SHA-256: the given one, or the one the server names.
    Raises UserError that names the ways out, Missing where the server has no such file."""
    import requests

    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as file:
        lock(file, f"another process is downloading {url}; wait for its end, and try again")
        for attempt in range(retries + 1):
            try:
                named = fetch_rest(url, part)
                break
            except requests.RequestException as error:
                status = error.response.status_code if error.response is not None else 0
                if attempt == retries or status in (400, 401, 403, 404, 410):
                    kind = Missing if status in (404, 410) else UserError
                    raise kind(f"cannot download {url} ({reason(error)}); put the file at {path}, {ways}") from error
                print(f"download stopped ({reason(error)}), trying again", file=sys.stderr)
                time.sleep(backoff * 2**attempt)
        try:
            check_sha256(part, sha256 or named, f"{url} changed or was damaged on the way; try again, {ways}")
        except UserError:
            part.unlink()
            raise
        os.replace(part, path)


def fetch_rest(url: str, part: Path) -> str | None:
    """One try: add to the file `part` what it lacks of url. Returns the SHA-256 that the Hugging Face hub names for
    its large files, in the answer that leads to them. Raises requests.RequestException."""
    import requests

    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with requests.get(url, headers=headers, stream=True, timeout=30) as response:
        if response.status_code == 416:  # the part is as long as the file or longer: begin anew
            part.unlink()
            raise requests.ConnectionError("the server has nothing to add to the part that was here")
        response.raise_for_status()
        have = have if response.status_code == 206 else 0  # 200: the server ignores ranges and sends all of it
        total = have + int(response.headers.get("Content-Length", 0))
        show = progress(f"downloading {part.stem}", total)
        with open(part, "ab" if have else "wb") as file:
            for block in response.iter_content(1 << 14):  # a block that breaks off is lost, so keep it small
                file.write(block)
                have += len(block)
                show(have)
    if "Content-Length" in response.headers and have != total:
        raise requests.ConnectionError(f"it broke off after {have} of {total} bytes")
    answers = [answer.headers.get("X-Linked-Etag", "") for answer in (*response.history, response)]
    named = max(answers).strip('"')  # the redirection has it
    return named if re.fullmatch("[0-9a-f]{64}", named) else None


def lock(file: IO, message: str) -> None:
    """Keep an open file to this process, or raise UserError. (Not on Windows, or on file systems without locks.)"""
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(message) from None
        except OSError:
            pass  # a file system without locks


def reason(error: BaseException) -> str:
    """The innermost cause in a line: requests wraps its errors three deep."""
    while error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]
    return " ".join(str(getattr(error, "reason", None) or error).split())[:200]


def check_sha256(path: Path, expected: str | None, advice: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if expected and found != expected:
        raise UserError(f"{path} has SHA-256 {found} instead of {expected}: {advice}")
