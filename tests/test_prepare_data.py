"""Every source becomes a dataset, whole or not at all."""

import hashlib
import http.server
import itertools
import math
import os
import pickle
import random
import re
import shutil
import threading
from pathlib import Path

import common
import prepare_data
import train
from common import END, UserError
from prepare_data import DOWNLOADS, Dataset, download, load

import numpy as np
import pytest
from conftest import NAMES, Malicious, babble, posix, shakespeare_txt


def write(name: str, content: str | bytes) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return name


def text_of(data: Dataset) -> str:
    """A text that is no list of documents."""
    return data.tokenizer.decode([*data.splits["train"].tolist(), *data.splits["val"].tolist()])


# ----------------------------------------------------------------------------- the built-in sources


def test_the_names_are_those_of_the_lectures_and_split_as_there(call):
    text = prepare_data.NAMES.read_bytes()
    assert hashlib.sha256(text).hexdigest() == "0a30b5557f192f32ab962680889aac5f6fda0f4cecf40a6d0b5694f58ea8cc4d"
    assert call(prepare_data, "names")[0] == 0
    names = text.decode().splitlines()
    random.Random(42).shuffle(names)
    data = load("names")
    assert len(names) == 32_033
    assert data.documents("train") == names[:25626]
    assert data.documents("val") == names[25626:28829]
    assert data.documents("test") == names[28829:]
    assert (data.tokenizer.vocab_size, data.separator, data.start_token) == (27, 0, 0)


def test_every_tenth_file_of_the_library_is_validation_and_its_tests_and_packages_are_left_out(call, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda _: "library")
    texts = [write(f"library/m{i:02}.py", f"m{i:02}\n") and f"m{i:02}\n" for i in range(25)]
    for name in ("site-packages/a.py", "json/tests/a.py", "test/a.py", "a.txt"):
        write(f"library/{name}", "left out\n")
    write("library/m99.py", "caf\u00e9\n")  # printable ASCII only
    assert call(prepare_data, "python")[0] == 0
    data = load("python")
    val = texts[9::10]
    assert data.tokenizer.decode(data.splits["val"]) == "".join(val) == "m09\nm19\n"
    assert data.tokenizer.decode(data.splits["train"]) == "".join(text for text in texts if text not in val)
    assert data.separator is None


@pytest.mark.slow
def test_the_library_of_this_python_is_a_large_text(call, monkeypatch):
    monkeypatch.setattr("requests.get", lambda *_, **__: pytest.fail("went to the network"))
    assert call(prepare_data, "python")[0] == 0
    python = load("python")
    n, n_val = len(python.splits["train"]), len(python.splits["val"])
    assert n > 5e6 and 0.05 < n_val / n < 0.2 and "\nimport " in text_of(python)
    assert set(python.tokenizer.chars) <= {"\n", *map(chr, range(32, 127))}


def test_shakespeare_is_the_lectures_split(call, monkeypatch):
    text = write(str(DOWNLOADS / "shakespeare.txt"), shakespeare_txt().read_bytes())
    assert hashlib.sha256(Path(text).read_bytes()).hexdigest() == prepare_data.SHAKESPEARE_SHA256
    monkeypatch.setattr("requests.get", lambda *_, **__: pytest.fail("went to the network"))
    assert call(prepare_data, "shakespeare")[0] == 0
    data = load("shakespeare")
    assert (len(data.splits["train"]), len(data.splits["val"]), data.tokenizer.vocab_size) == (1_003_854, 111_540, 65)
    assert text_of(data).startswith("First Citizen:\nBefore we proceed")


def test_built_in_sources_are_prepared_on_first_use_and_no_others(gpt2_stand_in, monkeypatch):
    write(str(DOWNLOADS / "shakespeare.txt"), babble(48))
    monkeypatch.setattr(prepare_data, "read_python", lambda: ["a = 1\n"] * 20)
    for name in ("names", "names_gpt2", "python", "python_gpt2", "shakespeare", "shakespeare_gpt2"):
        data = prepare_data.load(name)
        assert data.tokenizer.fields["kind"] == ("gpt2" if "gpt2" in name else "char")
    monkeypatch.setattr(prepare_data, "prepare", lambda *_: pytest.fail("prepared again"))
    assert prepare_data.load("names").documents("val") == load("names").documents("val")
    for name in ("fineweb", "mine", "names_bpe", "gpt2", "mine_gpt2"):
        with pytest.raises(UserError, match=f"; run: python prepare_data.py {name}"):
            prepare_data.load(name)


# ----------------------------------------------------------------------------- own texts


def test_own_text_is_split_90_to_10_and_comes_back(call):
    """Without its byte order mark, with the ends of lines of Unix, and with a newline at the end."""
    text = "naïve 👩‍🚀\n\n  \tcafe\u0301 中文\n" * 20 + babble(200)
    write("my.txt", b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode() + b"end")
    status, out, _ = call(prepare_data, "my.txt")
    assert status == 0 and "data/my" in out
    data = load("my")
    text += "end\n"
    cut = int(0.9 * len(text))
    assert data.tokenizer.decode(data.splits["train"]) == text[:cut]
    assert data.tokenizer.decode(data.splits["val"]) == text[cut:]
    assert list(data.splits) == ["train", "val"] and data.separator is None and data.start_token is None
    assert data.n_bytes == {"train": len(text[:cut].encode()), "val": len(text[cut:].encode())}


def test_a_folder_is_read_in_the_order_of_its_files_without_hidden_and_binary_ones(call, fails):
    for name, text in {"b.txt": "second", "a.txt": "\ufefffirst\r\n", "deep/c.md": "third", "d.txt": ""}.items():
        write(f"notes/{name}", text)
    write("notes/e.png", b"\x89PNG\r\n\0")
    write("notes/f.txt", babble(5).encode("utf-16"))
    for name in (".hidden", ".git/refs/main", "deep/.venv/lib/h.txt"):
        write(f"notes/{name}", b"\xff")
    status, out, _ = call(prepare_data, "notes")
    assert status == 0 and text_of(load("notes")) == "first\nsecond\nthird\n"
    assert "left out: 2 of 6 files, such as notes/e.png, are binary, UTF-16, " in out
    write("notes/deep/g.txt", b"caf\xe9")
    assert "notes/deep/g.txt is not UTF-8 at byte 3; " in fails(prepare_data, "notes")


NO_TEXT = {
    "a.zip": b"PK\3\4\x14\0letter.docx",
    "b.docx": b"PK\3\4 without a NUL",
    "c.gz": b"\x1f\x8b\x08",
    "d.pdf": b"%PDF-1.7\n%\xe2\xe3",
    "e.rtf": rb"{\rtf1\ansi Dear reader}",
    "f.doc": b"\xd0\xcf\x11\xe0\0",
    "g.txt": babble(5).encode("utf-16"),
    "h.txt": babble(5).encode("utf-32-be"),
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_what_is_no_plain_text_is_named(fails, call, name):
    write(f"notes/{name}", NO_TEXT[name])
    words = f"such as notes/{name}, are "
    said = fails(prepare_data, f"notes/{name}", "--name=my")
    assert words in said and "give plain text in UTF-8" in said
    assert words in fails(prepare_data, "notes")
    write("notes/z.txt", babble(200))
    status, out, _ = call(prepare_data, "notes")
    assert status == 0 and f"left out: 1 of 2 files, {words}" in out
    assert text_of(load("notes")) == babble(200)


def test_line_ends_of_windows_and_of_old_macs_are_newlines(call):
    write("my.txt", "one\rtwo\r\nthree\n" * 9)
    assert call(prepare_data, "my.txt")[0] == 0 and text_of(load("my")) == "one\ntwo\nthree\n" * 9


@posix
def test_links_to_files_are_read_and_others_are_counted(call):
    """Links to folders may lead anywhere, also back."""
    write("elsewhere/a.txt", "a\n" * 20)
    write("notes/b.txt", "b\n" * 20)
    for name, target in (("c.txt", "elsewhere/a.txt"), ("d", "elsewhere"), ("e", "notes"), ("f.txt", "nothing")):
        Path("notes", name).symlink_to(Path(target).absolute())
    Path("link").symlink_to("notes")
    status, out, _ = call(prepare_data, "link", "--name=notes")
    assert status == 0 and "left out: 3 of 5 files, such as link/d, are binary" in out
    assert text_of(load("notes")) == "b\n" * 20 + "a\n" * 20


@pytest.mark.parametrize("name", ["की", "के", "ภาษา", "e\u0301te\u0301", "my notes", "a.b"])
def test_a_dataset_has_the_name_of_its_file(call, name):
    call(prepare_data, write(f"{name}.txt", "the cat\n" * 20))
    assert os.listdir("data") == [name] and text_of(load(name)) == "the cat\n" * 20


def test_a_dataset_has_the_name_of_its_folder(call):
    for version in ("v1.2", "v1.3"):
        write(f"{version}/a.txt", babble(50))
        prepare_data.prepare(Path(version))
    assert sorted(os.listdir("data")) == ["v1.2", "v1.3"]


def test_a_dataset_of_another_source_is_not_replaced_without_a_word(call, fails):
    for folder in ("austen", "doyle"):
        write(f"{folder}/input.txt", f"{folder} {babble(50)}")
    for source, said in (("austen", False), ("austen", False), ("doyle", True), ("doyle", False)):
        status, out, _ = call(prepare_data, f"{source}/input.txt")
        assert (
            status == 0
            and (f"note: {Path('data/input')} was made from austen/input.txt, and is replaced" in out) == said
        )
        assert text_of(load("input")).startswith(source)
    for same in ("./doyle/input.txt", Path("doyle/input.txt").absolute()):
        assert "note" not in call(prepare_data, same)[1]
    write("data/input/meta.json", "{")  # a damaged one is replaced
    status, out, _ = call(prepare_data, "austen/input.txt")
    assert status == 0 and "note" not in out and text_of(load("input")).startswith("austen")


def test_documents_of_val_and_test_that_are_also_in_train_are_counted(call):
    lines = [f"line {i}" for i in range(40)]
    for repeated in (0, 25):
        call(prepare_data, write("my.txt", "\n".join(lines + lines[:repeated])), "--documents=lines")
        out = call(prepare_data, "my.txt", "--documents=lines")[1]
        data = load("my")
        train_lines = set(data.documents("train"))
        others = data.documents("val") + data.documents("test")
        again = sum(line in train_lines for line in others)
        assert (f"{again} of {len(others)} documents of val and test are in train, too" in out) == (repeated > 0)
        assert (again > 0) == (repeated > 0)


@pytest.mark.parametrize("tokenizer", ["char", "gpt2"])
@pytest.mark.parametrize(
    "text", [babble(300), "  \n\n a'll  b\n" * 40, "a    b\n" * 40, "中" * 90, "x" * 31 + " " * 70 + "\u00a0\x1c!\n"]
)
def test_a_long_text_is_encoded_in_pieces_to_the_same_tokens(monkeypatch, gpt2_stand_in, tokenizer, text):
    """Pieces end where a word ends. A word longer than a piece is cut: the same text, perhaps in other tokens."""
    small = prepare_data.PIECE.pattern.replace("1000000", "30")
    monkeypatch.setattr(prepare_data, "PIECE", re.compile(small, prepare_data.PIECE.flags))
    made = common.CharTokenizer(sorted(set(text)))
    if tokenizer == "gpt2":
        made = common.make_tokenizer({"kind": "gpt2"})
    pieces = list(prepare_data.encode([text], [], made))
    ids = list(itertools.chain(*pieces))
    assert max(map(len, pieces)) <= (30 if tokenizer == "char" else 120) and made.decode(ids) == text
    if tokenizer == "char" or "a" in text:
        assert ids == made.encode(text)


def test_a_long_preparation_says_how_far_it_is(call, monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(prepare_data, "perf_counter", lambda: next(seconds))
    write("my.txt", "\n".join(f"line {i}" for i in range(100)))
    out = call(prepare_data, "my.txt", "--documents=lines")[1]
    total = sum(map(len, load("my").documents("train")))
    counts = [int(n.replace(",", "")) for n in re.findall(rf"encoded ([\d,]+) of {total:,} characters", out)]
    assert 9 < len(counts) < 60 and counts == sorted(set(counts)) and counts[-1] <= total


@pytest.mark.parametrize(("n", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_the_vocabulary_decides_the_width_of_the_ids(call, n, dtype):
    chars = [chr(i) for i in range(10, 70_000) if i != 13 and not 0xD800 <= i < 0xE000][:n]
    call(prepare_data, write("my.txt", "".join(reversed(chars))))  # ends with a newline
    data = load("my")
    assert data.tokenizer.vocab_size == n and data.splits["train"].dtype == dtype
    assert text_of(data) == "".join(reversed(chars))


@pytest.mark.parametrize(("n", "advised"), [(1000, False), (1001, True)])
def test_a_large_vocabulary_is_advised_to_go_without_previous_token_embeddings(call, n, advised):
    out = call(prepare_data, write("my.txt", "\n".join(chr(300 + i) for i in range(n - 1))))[1]
    assert f"a vocabulary of {n:,} tokens" in out and ("--lookback=0" in out) == advised


@pytest.mark.parametrize("tokenizer", ["char", "gpt2"])
def test_lines_are_documents_which_are_shuffled_and_encoded_one_by_one(call, gpt2_stand_in, tokenizer):
    """As in the lectures: 80/10/10, after Random(42)."""
    lines = [f"name {i}" for i in range(27)]
    lines += ["  two blanks", "ends with blanks  ", "naïve\r"]
    write("my.txt", "\n \n".join(lines))  # blank lines are no documents
    assert call(prepare_data, "my.txt", "--documents=lines", f"--tokenizer={tokenizer}", "--name=my")[0] == 0
    lines[-1] = "naïve"
    random.Random(42).shuffle(lines)
    data = load("my")
    for split, expected in {"train": lines[:24], "val": lines[24:27], "test": lines[27:]}.items():
        ids = data.tokenizer.encode("\n")
        for line in expected:
            ids += [*data.tokenizer.encode(line), data.separator]
        assert data.splits[split].tolist() == ids and data.documents(split) == expected
        assert data.n_bytes[split] == len(data.tokenizer.decode(ids).encode())
    assert [data.start_token] == [data.separator] == data.tokenizer.encode("\n")


@pytest.mark.parametrize("tokenizer", ["char", "gpt2"])
@pytest.mark.parametrize("separator", ["***", END, "%", "lines."])
def test_documents_may_have_several_lines_between_lines_of_one_kind(call, gpt2_stand_in, separator, tokenizer):
    """One token, which is in no text, starts and ends each. Inside of a line, the separator separates nothing."""
    stories = [f"Story {i}.\n\n  It was {i}{separator} {separator}\nand so on." for i in range(30)]
    write("my.txt", f"{separator}\n" + f"\n{separator} \t\n".join(stories) + f"\n  {separator}")  # blanks around it
    options = (f"--documents={separator}", f"--tokenizer={tokenizer}", "--name=my")
    assert call(prepare_data, "my.txt", *options)[0] == 0
    random.Random(42).shuffle(stories)
    data = load("my")
    for split, expected in {"train": stories[:24], "val": stories[24:27], "test": stories[27:]}.items():
        ids = data.splits[split]
        assert data.documents(split) == expected
        assert ids[0] == ids[-1] == data.separator and np.count_nonzero(ids == data.separator) == len(expected) + 1
        assert data.n_bytes[split] == len("".join(expected).encode())
    assert data.separator == data.start_token == data.tokenizer.end_id
    assert data.tokenizer.decode([data.separator]) == END


def test_a_text_in_gpt2s_tokens_has_a_name_of_its_own(call, gpt2_stand_in):
    call(prepare_data, write("my.txt", babble(200)), "--tokenizer=gpt2")
    data = load("my_gpt2")
    assert data.tokenizer.vocab_size == 50_257 and text_of(data) == babble(200)
    assert data.n_bytes["train"] == len(data.tokenizer.decode(data.splits["train"]).encode())
    assert len(data.splits["train"]) < data.n_bytes["train"] and data.separator is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give"),
        (["."], "give"),
        (["--name=mine"], "'mine' cannot be its name; give a source"),
        (["nothing.txt"], "nothing.txt is no file, and no folder with files; "),
        (["empty"], "empty is no file, and no folder with files; "),
        (["empty.txt"], "empty.txt has too little text to split; "),
        (["utf16.txt"], "1 of 1 files, such as utf16.txt, are binary, UTF-16, "),
        (["latin1.txt"], "latin1.txt is not UTF-8 at byte 7; "),
        (["few.txt", "--documents=lines"], "there are 3 documents with text, too few to split; "),
        (["good.txt", "--documents=***"], "there are 1 documents with text, too few to split; "),
        (["good.txt", "--tokenizer=bpe"], "--tokenizer=bpe is unknown; choose from char, gpt2"),
        (["names.txt"], "'names' cannot be its name; "),
        (["good.txt", "--name=shakespeare"], "'shakespeare' cannot be its name; "),
        (["names", "--name=fineweb"], "'fineweb' cannot be its name; "),
    ],
)
def test_bad_input_gets_one_line(fails, options, words):
    Path("empty").mkdir()
    contents = {"empty.txt": "", "few.txt": "a\n\n  \nb\nc\n", "good.txt": babble(50), "names.txt": babble(50)}
    contents |= {"latin1.txt": b"ab\r\ncaf\xe9", "utf16.txt": babble(50).encode("utf-16-le")}
    for name, content in contents.items():
        write(name, content)
    assert words in fails(prepare_data, *options)
    assert not Path("data").exists()


# ----------------------------------------------------------------------------- whole or not at all


def test_what_is_no_dataset_is_not_replaced(fails):
    write("own.txt", babble(50))
    for name, path in (("own", "data/own/a.txt"), ("plain", "data/plain")):
        write(path, "mine")
        assert "is not a dataset of ours, so it is not replaced; " in fails(prepare_data, "own.txt", f"--name={name}")
        assert Path(path).read_text() == "mine"


def test_a_failed_preparation_leaves_the_dataset_that_was_there(call, fails, monkeypatch):
    call(prepare_data, write("my.txt", babble(500)))
    before = {path.name: path.read_bytes() for path in Path("data/my").iterdir()}

    def fail(_):
        assert Path("data/.my.new/val.bin").exists()
        raise OSError(28, "No space left on device")

    write("my.txt", babble(96).encode() + b"\xff")
    assert "not UTF-8" in fails(prepare_data, "my.txt")
    write("my.txt", babble(96))
    with monkeypatch.context() as patch:
        patch.setattr("json.dumps", fail)  # for the last file, when the others are written
        assert "No space left" in fails(prepare_data, "my.txt")
    assert {path.name: path.read_bytes() for path in Path("data/my").iterdir()} == before
    assert call(prepare_data, "my.txt")[0] == 0 and text_of(load("my")) == babble(96)


class Killed(BaseException):
    """The process ends at once."""


def is_killed(monkeypatch, moment: int) -> bool:
    """Prepare my.txt, and kill it before its change of files and folders that has this number, if there are so many."""
    left = [None] * moment

    def count(function, *arguments, **more):
        if not left:
            raise Killed
        left.pop()
        return function(*arguments, **more)

    with monkeypatch.context() as patch:
        changes = [(prepare_data, "open", open), (Path, "write_text", Path.write_text)]
        changes += [(os, name, getattr(os, name)) for name in ("mkdir", "rename", "replace", "unlink", "rmdir")]
        for owner, name, function in changes:
            patch.setattr(owner, name, lambda *a, function=function, **k: count(function, *a, **k), raising=False)
        try:
            prepare_data.prepare("my.txt")
        except Killed:
            return True
    return False


def test_whenever_a_preparation_is_killed_a_whole_dataset_is_left_and_the_next_one_succeeds(call, monkeypatch):
    """While the old and the new dataset change places, both are under hidden names."""
    left = []
    while True:
        prepare_data.prepare(write("my.txt", "old\n" * 50))
        write("my.txt", "new\n" * 99)
        if not is_killed(monkeypatch, moment=len(left)):
            break
        whole = [path.parent.relative_to("data") for path in Path("data").rglob("meta.json")]
        left.append(text_of(load("my" if Path("data/my").exists() else whole[0])))
        status, _, err = call(prepare_data, "my.txt")
        assert status == 0 and text_of(load("my")) == "new\n" * 99 and os.listdir("data") == ["my"], err
    assert left[0] == "old\n" * 50 and left[-1] == "new\n" * 99 and set(left) == {left[0], left[-1]} and len(left) > 6


# ----------------------------------------------------------------------------- what is read again


@pytest.mark.usefixtures("data")
def test_a_dataset_is_read_from_the_disk_and_has_the_documents_of_its_text():
    text, names = load("tiny"), load("list")
    assert all(isinstance(ids, np.memmap) for ids in text.splits.values())
    assert text.tokenizer.decode([*text.splits["train"], *text.splits["val"]]) == babble(1200)
    assert sum(text.n_bytes.values()) == len(babble(1200))
    documents = [*names.documents("train"), *names.documents("val"), *names.documents("test")]
    assert sorted(documents) == sorted(NAMES * 4) and documents != NAMES * 4
    with pytest.raises(UserError, match="tiny has no documents; "):
        text.documents("train")


def test_bits_per_byte_are_of_the_split_itself():
    splits = {"train": np.zeros(10), "val": np.zeros(5)}
    data = Dataset("any", splits, None, {"train": 10, "val": 20}, None, None, None)
    assert data.bits_per_byte(math.log(2), "train") == 1 and data.bits_per_byte(math.log(2), "val") == 0.25


def test_a_dataset_that_is_missing_says_how_to_make_it():
    with pytest.raises(UserError, match=r"data.fineweb .*; run: python prepare_data.py fineweb"):
        load("fineweb")
    Path("data/nano").mkdir(parents=True)  # as nanoGPT makes it: meta.pkl could run code, and is not opened
    for name in ("train.bin", "val.bin"):
        np.arange(9, dtype=np.uint16).tofile(f"data/nano/{name}")
    Path("data/nano/meta.pkl").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(UserError, match=r"data.nano .*nanoGPT.*; run: python prepare_data.py"):
        load("nano")
    assert not Path("harmed").exists()


@pytest.mark.usefixtures("data")
def test_a_damaged_dataset_gets_one_line(fails):
    damages = [("val.bin", b"abc"), ("val.bin", b"")]
    for text in ("", "{", "[]", "7", "{}", '{"tokenizer": 7}', '{"tokenizer": {"kind": "new"}}', "\0"):
        damages.append(("meta.json", text.encode()))
    for i, (name, content) in enumerate(damages):
        shutil.copytree("data/tiny", f"data/copy{i}")
        load(f"copy{i}")
        Path(f"data/copy{i}", name).write_bytes(content)
        with pytest.raises(UserError, match=rf"data.copy{i} is damaged, .*; prepare it again"):
            load(f"copy{i}")
    Path("data/tiny/val.bin").unlink()
    assert "data/tiny/val.bin" in fails(train, "--dataset=tiny") and not Path("out").exists()


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("dtype", ["<u4", ">u2", ">u4", "<i8", "u1", "<f2"])
def test_token_files_of_another_type_or_byte_order_get_one_line(fails, dtype):
    path = Path("data/tiny/val.bin")
    ids = np.fromfile(path, dtype="<u2")
    ids.astype("<u2").tofile(path)
    load("tiny")
    ids.astype(dtype).tofile(path)
    words = fails(train, "--dataset=tiny")
    assert "data/tiny is damaged, or of another version (" in words
    assert "val.bin has other tokens" in words or dtype == "u1"  # an odd number of bytes is no uint16 at all


# ----------------------------------------------------------------------------- downloads


CONTENT = bytes(range(256)) * 4000
HASH = hashlib.sha256(CONTENT).hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()


@pytest.fixture
def server(monkeypatch):
    """A server on this machine. It sends server.files, {path: content}, or redirects: {path: (to, announced hash)}."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            server.log.append(self.path)
            if self.path in server.redirects:
                to, sha256 = server.redirects[self.path]
                self.send_response(302)
                self.send_header("Location", to)
                self.send_header("X-Linked-Etag", f'"{sha256}"')
                self.send_header("Content-Length", "0")
                return self.end_headers()
            if self.path not in server.files:
                return self.send_error(404)
            self.send_response(200)
            self.send_header("Content-Length", str(len(server.files[self.path])))
            self.end_headers()
            self.wfile.write(server.files[self.path][: server.breaks_after])

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.redirects, server.log, server.breaks_after = {"/file": CONTENT}, {}, [], None
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_file_is_downloaded_once_and_verified(server):
    for _ in range(2):
        download(f"{server.url}/file", Path("down/file"), HASH)
        assert Path("down/file").read_bytes() == CONTENT and server.log == ["/file"]
    assert os.listdir("down") == ["file"]


@pytest.mark.parametrize(("given", "announced"), [("", HASH), (HASH, OTHER), (HASH, "")])
def test_the_hash_of_a_redirect_is_used_unless_one_is_given(server, given, announced):
    server.redirects = {"/moved": ("/file", announced)}
    download(f"{server.url}/moved", Path("file"), given)
    assert Path("file").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("path", "given", "breaks_after", "words"),
    [
        ("/file", OTHER, None, rf"/file does not have the SHA-256 .*{OTHER}"),
        ("/file", "", None, "/file does not have the SHA-256"),  # nobody announces one
        ("/moved", "", None, f"/moved does not have the SHA-256 .*{OTHER}"),
        ("/moved", OTHER, None, f"/moved does not have the SHA-256 .*{OTHER}"),
        ("/file", HASH, 300_000, r"cannot download .*/file \(.*; try again"),
        ("/gone", HASH, None, r"cannot download .*/gone \(.*404.*put the file at"),
    ],
)
def test_a_bad_download_is_refused_and_the_next_one_succeeds(server, path, given, breaks_after, words):
    server.redirects = {"/moved": ("/file", OTHER)}
    server.breaks_after = breaks_after
    with pytest.raises(UserError, match=words):
        download(server.url + path, Path("down/file"), given)
    assert not Path("down/file").exists()
    server.breaks_after = None
    download(f"{server.url}/file", Path("down/file"), HASH)
    assert Path("down/file").read_bytes() == CONTENT and os.listdir("down") == ["file"]


def test_shakespeare_is_downloaded_once(server, monkeypatch, call, fails):
    monkeypatch.setattr(prepare_data, "SHAKESPEARE", "http://127.0.0.1:9/input.txt")
    assert "cannot download http://127.0.0.1:9/input.txt" in fails(prepare_data, "shakespeare")
    server.files["/input.txt"] = babble(96).encode()
    monkeypatch.setattr(prepare_data, "SHAKESPEARE", f"{server.url}/input.txt")
    monkeypatch.setattr(prepare_data, "SHAKESPEARE_SHA256", hashlib.sha256(babble(96).encode()).hexdigest())
    for _ in range(2):
        assert call(prepare_data, "shakespeare")[0] == 0
    assert server.log == ["/input.txt"] and text_of(prepare_data.load("shakespeare")) == babble(96)


# ----------------------------------------------------------------------------- FineWeb


def shard(path: Path, ids: list[int]) -> None:
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(ids)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + np.array(ids, dtype="<u2").tobytes())


def test_fineweb_shards_are_downloaded_once_and_become_a_dataset(server, monkeypatch, call, gpt2_stand_in):
    encode = common.make_tokenizer({"kind": "gpt2"}).encode
    text = [50256, *encode("Hello world"), 50256, *encode("naïve")]
    for name, ids in {"train_000001": text, "train_000002": text[:3], "val_000000": text[3:]}.items():
        shard(Path(f"{name}.bin"), ids)
        content = Path(f"{name}.bin").read_bytes()
        server.files[f"/{name}"] = content
        server.redirects[f"/fineweb_{name}.bin"] = (f"/{name}", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(prepare_data, "FINEWEB", f"{server.url}/")
    for options, expected in ((["--shards=2"], text + text[:3]), ([], text)):
        status, _, err = call(prepare_data, "fineweb", *options)
        assert status == 0 and len(server.log) == 6, err
        data = load("fineweb")
        assert data.splits["train"].tolist() == expected and data.splits["val"].tolist() == text[3:]
        assert (data.separator, data.start_token, data.tokenizer.vocab_size) == (None, 50_256, 50_257)
        for split, ids in data.splits.items():
            assert data.n_bytes[split] == len(data.tokenizer.decode(ids).replace(END, "").encode())
        del data, ids  # Windows replaces no folder with a file that is still mapped
