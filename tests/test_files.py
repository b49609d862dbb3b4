"""Files and folders that appear whole or not at all, from this program or the network."""

import contextlib
import errno
import hashlib
import os
from pathlib import Path

import pytest

import files
from console import UserError
from download import download
from files import replace_file

ADVICE = "or use words or python, which need no download"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """The seconds that a download would have waited."""
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    return waited


def test_a_download_that_breaks_off_is_resumed(server, pauses):
    server.breaks_after = [300_000, 200_000]
    download(server.url, Path("down/file"), ADVICE, sha256(server.body))
    assert Path("down/file").read_bytes() == server.body
    assert [asked for _, asked in server.log] == ["bytes=0-", "bytes=294912-", "bytes=491520-"]  # blocks of 16 KiB
    assert pauses == [1, 2]
    assert not Path("down/file.part").exists()


def test_a_server_that_ignores_ranges_sends_it_all_again(server):
    server.breaks_after, server.ranges = [300_000], False
    download(server.url, Path("file"), ADVICE, sha256(server.body))
    assert Path("file").read_bytes() == server.body


def test_a_part_that_is_too_long_is_thrown_away(server):
    Path("file.part").write_bytes(b"x" * 2_000_000)
    download(server.url, Path("file"), ADVICE, sha256(server.body))
    assert Path("file").read_bytes() == server.body


def test_an_interrupted_download_resumes_in_the_next_run(server):
    server.breaks_after = [100_000] * 4
    with pytest.raises(UserError, match=r"cannot download http://127.0.0.1:\d+/file \(.*; put the file at"):
        download(server.url, Path("file"), ADVICE, sha256(server.body))
    assert not Path("file").exists() and Path("file.part").stat().st_size == 4 * 98304
    download(server.url, Path("file"), ADVICE, sha256(server.body))
    assert Path("file").read_bytes() == server.body


@pytest.mark.parametrize(("status", "tries"), [(404, 1), (410, 1), (503, 4)])
def test_a_download_that_fails_is_tried_four_times_if_that_can_help(server, pauses, status, tries):
    server.status = status
    with pytest.raises(UserError, match=f"{status}.*words or python, which need no download"):
        download(server.url, Path("file"), ADVICE)
    assert pauses == [1, 2, 4][: tries - 1] and len(server.log) == tries and not Path("file").exists()


def test_a_download_that_nothing_verifies_is_refused(server):
    with pytest.raises(UserError, match="/file comes without a SHA-256 to verify it; or use words"):
        download(server.url, Path("file"), ADVICE)
    assert not Path("file").exists()


def test_a_wrong_checksum_is_refused_and_leaves_nothing(server):
    with pytest.raises(UserError, match="SHA-256"):
        download(server.url, Path("down/file"), ADVICE, "0" * 64)
    assert [path.name for path in Path("down").iterdir()] == ["file.lock"]


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such locks")
def test_two_processes_do_not_write_to_one_part(server):
    with open("file.lock", "w") as file:
        files.lock(file, "")
        with pytest.raises(UserError, match=r"another process is downloading http://127.0.0.1"):
            download(server.url, Path("file"), ADVICE, sha256(server.body))
    download(server.url, Path("file"), ADVICE, sha256(server.body))


def test_the_checksum_that_the_server_names_is_checked(server):
    server.redirects = {"/file": ("/elsewhere", sha256(b"other"))}
    with pytest.raises(UserError, match=f"does not have the SHA-256 {sha256(b'other')}; try again"):
        download(server.url, Path("file"), ADVICE)
    server.redirects = {"/file": ("/elsewhere", sha256(server.body))}
    download(server.url, Path("file"), ADVICE)
    assert Path("file").read_bytes() == server.body


def test_a_given_checksum_counts_more_than_the_one_that_the_server_names(server):
    server.headers["X-Linked-Etag"] = f'"{sha256(b"other")}"'
    download(server.url, Path("file"), ADVICE, sha256(server.body))
    assert Path("file").read_bytes() == server.body
    with pytest.raises(UserError, match="does not have the SHA-256 0000"):
        download(server.url, Path("other"), ADVICE, "0" * 64)


def test_a_server_is_asked_for_bytes_that_are_not_compressed(server, monkeypatch):
    """A download that breaks off resumes at a number of bytes."""
    asked, handler = [], server.RequestHandlerClass
    answer = handler.do_GET
    monkeypatch.setattr(handler, "do_GET", lambda self: (asked.append(self.headers["Accept-Encoding"]), answer(self)))
    download(server.url, Path("file"), ADVICE, sha256(server.body))
    assert asked == ["identity"]


def fail_half_way(file, error: Exception) -> None:
    file.write(b"half")
    raise error


def test_a_file_is_replaced_whole():
    for content in (b"old", b"new, and longer"):
        replace_file(Path("file"), lambda file, content=content: file.write(content))
        assert Path("file").read_bytes() == content and [path.name for path in Path().iterdir()] == ["file"]


def test_a_file_is_flushed_before_it_takes_its_name(monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (done.append(name), real(*args)))
    replace_file(Path("a.txt"), lambda file: file.write(b"whole"))
    assert done[:2] == ["fsync", "replace"] and Path("a.txt").read_bytes() == b"whole"


@pytest.mark.parametrize(("system", "refusals", "written"), [("nt", 3, True), ("nt", 50, True), ("posix", 1, False)])
def test_windows_waits_for_who_has_the_file_open(monkeypatch, system, refusals, written):
    """As a virus scanner does for a moment. On other systems, the first refusal is an error."""
    source, target, pauses = Path("new").absolute(), Path("old").absolute(), []
    source.write_text("new")
    replace, left = os.replace, iter(range(refusals))

    def refuse(*paths) -> None:
        if next(left, None) is not None:
            raise PermissionError
        replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", refuse)
        patch.setattr("time.sleep", pauses.append)
        patch.setattr("os.name", system)
        with contextlib.nullcontext() if written else pytest.raises(PermissionError):
            files.move(source, target)
    assert target.exists() == written and len(pauses) == (refusals if written else 0)


def test_a_full_disk_leaves_the_previous_file_and_gets_one_line():
    """Also if the writer raises an error of its own because of it, as torch.save() does."""
    Path("file").write_bytes(b"old")
    full = OSError(errno.ENOSPC, "No space left on device")

    def hide(file):
        try:
            fail_half_way(file, full)
        except OSError:
            raise RuntimeError("unexpected position")  # noqa: B904

    for write in (lambda file: fail_half_way(file, full), hide):
        with pytest.raises(UserError, match="cannot write file: No space left on device; free some disk space"):
            replace_file(Path("file"), write)
    assert Path("file").read_bytes() == b"old" and [path.name for path in Path().iterdir()] == ["file"]


def test_a_bug_in_the_writer_shows_its_traceback_and_leaves_the_previous_file():
    Path("file").write_bytes(b"old")
    for error in (RuntimeError("a bug"), KeyError("a bug")):
        with pytest.raises(type(error), match="a bug"):
            replace_file(Path("file"), lambda file, error=error: fail_half_way(file, error))
    assert Path("file").read_bytes() == b"old"


def test_files_are_verified_once_and_again_when_they_were_written_to(monkeypatch):
    folder = Path("data/my")
    folder.mkdir(parents=True)
    path = folder / "train.bin"
    path.write_bytes(b"abcdef")
    expected = {"train.bin": files.sha256_of(path)}
    read = []
    sha256_of = files.sha256_of
    monkeypatch.setattr(files, "sha256_of", lambda path: (read.append(path), sha256_of(path))[1])
    files.verify(folder, expected)
    files.verify(folder, expected)
    assert read == [path]
    os.utime(path)  # as if it had been copied
    files.verify(folder, expected)
    assert read == [path, path]
    path.write_bytes(b"abcdeg")  # of the same size
    with pytest.raises(UserError, match=r"train.bin is not as it was prepared \(its SHA-256 differs\); copy it again"):
        files.verify(folder, expected)
