"""Downloads: verified by their SHA-256, resumed if they were interrupted, and renamed when they are whole."""

import time
from pathlib import Path

from console import UserError, progress
from files import lock, move, sha256_of


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
                # Bad request, unauthorized, forbidden, not found, gone: trying again is no use
                answer = getattr(error, "response", None)
                is_final = answer is not None and answer.status_code in (400, 401, 403, 404, 410)
                if pause is None or is_final:
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
