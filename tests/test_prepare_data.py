"""Every source becomes a dataset, which load() opens or refuses."""

import bz2
import gc
import gzip
import hashlib
import json
import lzma
import math
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, Malicious, babble, finish, local_copy, posix, slashes, start
from test_tokenizer import HARD

import dataset
import prepare_data
from checkpoint import save_model
from console import UserError
from dataset import Dataset, load
from lessons.bpe import BPETokenizer
from model import GPT, GPTConfig
from sample import read_prompt
from tokenizer import make_tokenizer


def text_file(name: str, text: str) -> str:
    Path(name).write_bytes(text.encode())
    return name


# ----------------------------------------------------------------------------- datasets


def test_own_text_is_split_90_to_10_and_comes_back(call):
    text = HARD * 20 + babble(200)
    status, out, _ = call(prepare_data, text_file("my.txt", text))
    assert status == 0 and "data/my" in out and "first line: na" in out
    data, text = load("my"), text.replace("\r\n", "\n").replace("\r", "\n")
    cut = int(0.9 * len(text))
    assert data.tokenizer.decode(data.train) == text[:cut]
    assert data.tokenizer.decode(data.val) == text[cut:]
    assert data.test is None and data.separator is None
    assert data.splits["train"]["bytes"] == len(text[:cut].encode())
    assert data.splits["val"]["tokens"] == len(text) - cut


def test_pieces_change_nothing(call, monkeypatch):
    name = text_file("my.txt", HARD * 20 + babble(200))
    call(prepare_data, name, "--tokenizer=bpe", "--name=whole")
    monkeypatch.setattr(prepare_data, "CHUNK", 61)  # cuts characters of several bytes in two
    call(prepare_data, name, "--tokenizer=bpe", "--name=pieces")
    for split in ("train", "val"):
        assert (getattr(load("whole"), split) == getattr(load("pieces"), split)).all()
    assert load("whole").splits == load("pieces").splits


@pytest.mark.parametrize("kind", ["char", "bpe", "gpt2"])
def test_documents_are_encoded_one_by_one(call, request, kind):
    if kind == "gpt2":
        request.getfixturevalue("gpt2_vocabulary")
    lines = ["  two blanks", "ends with blanks  ", "crlf\r", "", "  ", "\u0301", "👩‍🚀", *map(str, range(9))]
    call(prepare_data, text_file("my.txt", "\n".join(lines)), "--documents=lines", f"--tokenizer={kind}", "--name=my")
    data = load("my")
    documents = [line.removesuffix("\r") for line in lines if line.strip()]  # blank lines are no documents
    random.Random(42).shuffle(documents)
    ids = [data.separator]
    for document in documents[: int(0.8 * len(documents))]:
        ids += [*data.tokenizer.encode(document), data.separator]
    assert data.train.tolist() == ids
    assert data.splits["train"]["bytes"] == len(data.tokenizer.decode(ids).encode())


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_text_in_the_tokens_of_another_dataset(call, fails, kind):
    """So that a model trained on the other dataset can be trained further on this text."""
    call(prepare_data, text_file("first.txt", babble(2000)), f"--tokenizer={kind}", "--name=first")
    text = babble(500, seed=1)
    assert call(prepare_data, text_file("second.txt", text), "--tokenizer=first")[0] == 0
    first, second = load("first"), load("second_first")
    assert first.tokenizer.to_dict() == second.tokenizer.to_dict()
    ids = [*second.train.tolist(), *second.val.tolist()]
    assert first.tokenizer.decode(ids) == text
    if kind == "char":
        error = fails(prepare_data, text_file("third.txt", text + "QXZ" * 100), "--tokenizer=first")
        assert (
            "lacks 'Q' (U+0051), 'X' (U+0058), 'Z' (U+005A); leave them out of the text, or use --tokenizer=bpe"
            in error
        )
        assert not Path("data/third_first").exists()


@pytest.mark.slow
def test_the_library_makes_words_and_python_without_a_network(monkeypatch, capsys):
    monkeypatch.setattr("requests.get", lambda *_, **__: pytest.fail("went to the network"))
    words, python = load("words"), load("python")
    decoded = words.tokenizer.decode(words.train).split("\n")[1:-1]
    assert all(re.fullmatch("[a-z]{2,15}", word) for word in decoded)
    assert len(set(decoded)) == len(decoded) > 8_000
    assert words.vocab_size == 27 and words.separator == 0
    assert python.separator is None and len(python.train) > 5e6 and 0.05 < len(python.val) / len(python.train) < 0.2
    assert set(python.tokenizer.chars) <= {"\n", *map(chr, range(32, 127))}
    assert capsys.readouterr().out.count("on first use") == 2


def test_every_tenth_file_of_the_library_is_validation_and_its_tests_and_packages_are_left_out(monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda _: "library")
    skipped = ("site-packages/a.py", "json/tests/a.py", "test/a.py", "a.txt")
    for name in (*(f"m{i:02}.py" for i in range(25)), *skipped):
        path = Path("library", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    text_file("library/m99.py", "caf\u00e9\n")  # printable ASCII only
    python = load("python")
    val = ["m09.py", "m19.py"]
    train = [f"m{i:02}.py" for i in range(25) if f"m{i:02}.py" not in val]
    assert python.tokenizer.decode(python.train) == "".join(f"{name}\n" for name in train)
    assert python.tokenizer.decode(python.val) == "".join(f"{name}\n" for name in val)


def test_bits_per_byte_are_of_the_split_itself():
    splits = {"train": {"tokens": 10, "bytes": 10}, "val": {"tokens": 5, "bytes": 20}}
    data = Dataset("any", *[None] * 4, 10, None, splits)
    assert data.bits_per_byte(math.log(2), "train") == 1 and data.bits_per_byte(math.log(2), "val") == 0.25


def test_a_folder_is_read_in_the_order_of_its_files(call):
    Path("notes/deep").mkdir(parents=True)
    files = {"b.txt": "second ", "a.txt": "first ", "deep/c.md": "third", ".hidden": "not this", "e.txt": ""}
    for name, text in files.items():
        Path("notes", name).write_text(text)
    call(prepare_data, "notes")
    data = load("notes")
    assert data.tokenizer.decode([*data.train, *data.val]) == "first \nsecond \nthird"


def test_hidden_folders_and_datasets_are_no_part_of_a_folder(call, fails):
    for name in ("notes/.git/objects/ab", "notes/.hidden", ".venv/lib", "notes/.b/c.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"\xff")
    text_file("notes/a.txt", "abc" * 20)
    for source in ("notes", ".", Path.cwd()):  # from the second time on, data/ has a dataset
        status, _, err = call(prepare_data, source, "--name=my")
        assert status == 0 and load("my").tokenizer.chars == ["a", "b", "c"], err
    Path("data/empty").mkdir()
    advice = "data/empty lies in data, where datasets are; move it, or give one of its files"
    assert advice in slashes(fails(prepare_data, "data/empty", "--name=other"))
    Path("empty").mkdir()
    assert "empty has too little text to split; give more (hidden files, binary ones" in fails(prepare_data, "empty")


def test_what_is_no_dataset_is_not_replaced(fails):
    Path("data/own").mkdir(parents=True)
    text_file("data/own/a.txt", "abc" * 20)
    text_file("data/plain", "abc" * 20)
    text_file("own.txt", "abc" * 20)
    for source, name in (("own.txt", "own"), ("data/plain", "plain")):
        why = f"data/{name} is not a dataset, so it is not replaced; choose another name, such as --name=my_{name}"
        assert why in slashes(fails(prepare_data, source))
    assert Path("data/own/a.txt").exists() and Path("data/plain").is_file()


def test_a_dataset_that_cannot_be_replaced_stays(call, monkeypatch):
    text_file("my.txt", "abc" * 20)
    call(prepare_data, "my.txt")
    rename, made = os.replace, Path("data/my/meta.json").read_bytes()

    def refuse(source, target):  # as a virus scanner of Windows does
        if Path(source).name == "new":
            raise PermissionError
        rename(source, target)

    monkeypatch.setattr("os.replace", refuse)
    text_file("my.txt", "abcd" * 20)
    assert call(prepare_data, "my.txt")[0] == 2
    assert Path("data/my/meta.json").read_bytes() == made and len(list(Path("data").glob("*my*"))) == 1


def test_a_million_blanks_are_no_trouble_for_bpe(call):
    """tiktoken's pattern gives up on a run of blanks that is longer than that."""
    text_file("my.txt", "a" + " " * 1_200_000 + "b\n" * 200)
    status, _, err = call(prepare_data, "my.txt", "--tokenizer=bpe", "--vocab_size=300")
    assert status == 0, err
    data = load("my_bpe300")
    same = data.tokenizer.decode([*data.train, *data.val]) == Path("my.txt").read_text()
    assert same  # a million characters, which nobody wants to see compared


def test_a_byte_order_mark_is_dropped_and_lines_end_as_on_unix(call):
    Path("my.txt").write_bytes(b"\xef\xbb\xbf" + b"a\r\nb\rc\n" * 9)
    call(prepare_data, "my.txt")
    data = load("my")
    assert data.tokenizer.decode([*data.train, *data.val]) == "a\nb\nc\n" * 9
    Path("list.txt").write_bytes(b"\xef\xbb\xbf" + b"a\r\nb\nc\n" * 9)
    call(prepare_data, "list.txt", "--documents=lines")
    assert load("list").tokenizer.chars == ["\n", "a", "b", "c"]


@pytest.mark.parametrize(("n", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_the_vocabulary_decides_the_width_of_the_ids(call, n, dtype):
    chars = [chr(i) for i in range(32, 70_000) if not 0xD800 <= i < 0xE000][:n]
    call(prepare_data, text_file("my.txt", "".join(chars)))
    data = load("my")
    assert data.train.dtype == dtype and data.train.itemsize == int(dtype[4:]) // 8
    assert data.tokenizer.decode([*data.train, *data.val]) == "".join(chars)


def test_documents_of_a_folder_are_the_lines_of_its_files(call):
    Path("notes").mkdir()
    for name, lines in (("a.txt", range(5)), ("b.txt", range(5, 12))):
        text_file(f"notes/{name}", "\n".join(map(str, lines)))  # without a newline at the end
    call(prepare_data, "notes", "--documents=lines")
    data = load("notes")
    decoded = data.tokenizer.decode([*data.train, *data.val, *data.test]).split()
    assert sorted(map(int, decoded)) == list(range(12))
    assert [data.splits[split]["documents"] for split in data.splits] == [9, 1, 2]


def test_memory_does_not_grow_with_the_text(call, monkeypatch):
    peaks = []
    monkeypatch.setattr(prepare_data, "CHUNK", 1 << 16)
    for n in (100, 1000):
        text_file("big.txt", babble(1000) * n)
        tracemalloc.start()
        assert call(prepare_data, "big.txt")[0] == 0
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert Path("big.txt").stat().st_size > 4e6
    assert peaks[1] < 1.2 * peaks[0], peaks


def test_the_names_are_those_of_the_lectures_and_split_as_there():
    text = prepare_data.NAMES.read_bytes()
    assert hashlib.sha256(text).hexdigest() == "0a30b5557f192f32ab962680889aac5f6fda0f4cecf40a6d0b5694f58ea8cc4d"
    prepare_data.prepare("names")
    names = text.decode().splitlines()
    random.Random(42).shuffle(names)
    data = load("names")
    assert data.texts("train") == names[:25626]
    assert data.texts("val") == names[25626:28829]
    assert data.texts("test") == names[28829:]


def test_without_the_file_of_the_names_one_line_says_so(fails, monkeypatch):
    monkeypatch.setattr(prepare_data, "NAMES", Path("gone/names.txt"))
    assert "no file gone/names.txt; copy it from the repository" in fails(prepare_data, "names")


def test_shakespeare_is_the_lectures_split():
    prepare_data.prepare("shakespeare", file=local_copy("shakespeare"))
    shakespeare = load("shakespeare")
    assert (len(shakespeare.train), len(shakespeare.val), shakespeare.vocab_size) == (1_003_854, 111_540, 65)


def test_a_text_without_blanks_is_cut_nevertheless(monkeypatch):
    monkeypatch.setattr(prepare_data, "CHUNK", 100)
    pieces = list(prepare_data.LongText([Path(text_file("my.txt", "x" * 6000))], 0, 6000))
    assert "".join(pieces) == "x" * 6000 and max(map(len, pieces)) <= 200


def test_a_text_is_cut_only_where_a_word_ends(monkeypatch):
    """Blanks between words can be one token, or a part of the next one."""
    monkeypatch.setattr(prepare_data, "CHUNK", 20)
    texts = ["ab", "\n\n", "c d\n\n", "\n  ef", "g" * 15 + "   hi\n" * 9, "\n", "j"]
    paths = [Path(text_file(f"{i}.txt", text)) for i, text in enumerate(texts)]
    pieces = list(prepare_data.LongText(paths, 1, 10**9))
    assert len(pieces) > 4
    assert not any(piece[-1].isspace() for piece in pieces[:-1])
    assert all(piece[0] in " \n" for piece in pieces[1:])


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (3, 4), (2, 20), (7, 7), (0, 0)])
def test_characters_of_a_text_in_pieces(monkeypatch, start, stop):
    monkeypatch.setattr(prepare_data, "CHUNK", 3)
    paths = [Path(text_file(f"{text}.txt", text)) for text in ("abc", "", "d", "efg hij")]
    assert "".join(prepare_data.LongText(paths, start, stop)) == "abc\nd\nefg hij"[start:stop]


def test_documents_are_shuffled_as_in_the_lectures(call):
    lines = [f"name{i}" for i in range(30)]
    call(prepare_data, text_file("my.txt", "\n".join(lines)), "--documents=lines")
    random.Random(42).shuffle(lines)
    data = load("my")
    for split, expected in (("train", lines[:24]), ("val", lines[24:27]), ("test", lines[27:])):
        assert [data.tokenizer.decode(ids) for ids in data.documents(split)] == expected
        assert data.tokenizer.decode(getattr(data, split)) == "\n" + "\n".join(expected) + "\n"
        assert len(data.documents(split)) == data.splits[split]["documents"]
    call(prepare_data, text_file("text.txt", babble(50)))
    with pytest.raises(UserError, match="text has no documents; use words, names, or your own text with --documents"):
        load("text").documents("train")


# ----------------------------------------------------------------------------- downloads and FineWeb


def test_without_a_network_the_way_out_is_named(fails, monkeypatch):
    monkeypatch.setitem(prepare_data.URLS, "shakespeare", "http://127.0.0.1:9/input.txt")
    monkeypatch.setattr("time.sleep", lambda _: None)
    error = fails(prepare_data, "shakespeare")
    for words in ("http://127.0.0.1:9/input.txt", "data/downloads/shakespeare.txt", "--file=", "names or python"):
        assert words in error


def test_a_source_is_downloaded_once_and_then_kept(server, monkeypatch, call):
    server.body = "\n".join(f"name{i}" for i in range(50)).encode()
    monkeypatch.setitem(prepare_data.URLS, "shakespeare", server.url)
    monkeypatch.setitem(prepare_data.SHA256, "shakespeare", hashlib.sha256(server.body).hexdigest())
    for options in ([], ["--tokenizer=bpe", "--vocab_size=270"]):
        assert call(prepare_data, "shakespeare", *options)[0] == 0
    assert len(server.log) == 1
    data = load("shakespeare")
    assert data.tokenizer.decode([*data.train, *data.val]) == server.body.decode()
    assert load("shakespeare_bpe270").vocab_size == 270


def shard(path: Path, ids: list[int], magic: int = 20240520, version: int = 1, count: int | None = None) -> None:
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, dtype="<u2").tobytes())


def test_fineweb_shards_become_a_dataset(call, gpt2_vocabulary):
    Path("copies").mkdir()
    text = [50256, *BPETokenizer().encode("Hello world"), 50256, *BPETokenizer().encode("naïve")]
    shard(Path("copies/fineweb_train_000001.bin"), text)
    shard(Path("copies/fineweb_train_000002.bin"), text[:3])
    shard(Path("copies/fineweb_val_000000.bin"), text[3:])
    status, _, err = call(prepare_data, "fineweb", "--file=copies", "--shards=2")
    assert status == 0, err
    data = load("fineweb")
    assert data.train.tolist() == text + text[:3] and data.val.tolist() == text[3:]
    assert data.splits["train"]["bytes"] == len("Hello worldnaïveHello world".encode())
    assert data.vocab_size == 50257 and data.separator is None


def test_fineweb_shards_are_downloaded(server, monkeypatch, call, gpt2_vocabulary):
    shard(Path("file"), [50256, 1, 2, 3])
    server.body = Path("file").read_bytes()
    server.headers["X-Linked-Etag"] = f'"{hashlib.sha256(server.body).hexdigest()}"'
    monkeypatch.setitem(prepare_data.URLS, "fineweb", server.url + "/")
    assert call(prepare_data, "fineweb")[0] == 0
    assert [path for path, _ in server.log] == ["/file/fineweb_train_000001.bin", "/file/fineweb_val_000000.bin"]
    assert load("fineweb").train.tolist() == [50256, 1, 2, 3]


def test_into_a_folder_of_the_user_nothing_is_downloaded(server, monkeypatch, fails, gpt2_vocabulary):
    monkeypatch.setitem(prepare_data.URLS, "fineweb", server.url + "/")
    Path("copies").mkdir()
    shard(Path("copies/fineweb_train_000001.bin"), [1, 2])
    error = slashes(fails(prepare_data, "fineweb", "--file=copies"))
    assert "no file or folder 'copies/fineweb_val_000000.bin'" in error
    assert server.log == []


@pytest.mark.parametrize(
    "wrong", [{"magic": 7}, {"version": 2}, {"count": 3}, {"count": 1}], ids=["magic", "version", "short", "long"]
)
def test_an_unrecognized_shard_is_refused(fails, gpt2_vocabulary, wrong):
    Path("copies").mkdir()
    shard(Path("copies/fineweb_train_000001.bin"), [1, 2], **wrong)
    shard(Path("copies/fineweb_val_000000.bin"), [1])
    error = fails(prepare_data, "fineweb", "--file=copies")
    assert "fineweb_train_000001.bin is no whole shard; delete it" in error
    assert not Path("data/fineweb").exists()


# ----------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["shakespear"], "did you mean shakespeare?"),
        (["nothing.txt"], "no file or folder 'nothing.txt'; see --help for the sources"),
        (["empty.txt"], "empty.txt has too little text"),
        (["latin1.txt"], "latin1.txt is not UTF-8 at byte 1048584"),
        (["ends.txt"], "ends.txt is not UTF-8 at byte 3"),
        (
            ["good.txt", "--tokenizer=bep"],
            "no dataset data/bep (did you mean bpe?), and no checkpoint bep; use char, bpe",
        ),
        (["good.txt", "--tokenizer=out/gone"], "no dataset data/out/gone, and no checkpoint out/gone; use char"),
        (
            ["good.txt", "--tokenizer=folder/"],
            "and no checkpoint folder/best.pt; use char, bpe, gpt2, a dataset, or a run",
        ),
        (["folder", "--documents=files"], "folder has 1 documents with text, too few to split; give 10 or more"),
        (["good.txt", "--tokenizer=bpe", "--vocab_size=100"], "vocab_size=100"),
        (["good.txt", "--vocab_size=300"], "--vocab_size has no effect here; leave it out"),
        (["good.txt", "--name=a/b"], "'a/b' cannot be the name of this dataset; choose one"),
        (["good.txt", "--name=words_bpe300"], "cannot be the name of this dataset"),
        (["good.txt", "--name=Words"], "cannot be the name of this dataset"),  # data/words on Windows and macOS
        (["names.txt"], "'names' cannot be the name of this dataset"),
        (["few.txt", "--documents=lines"], "few.txt has 3 documents with text"),
        (["words", "--documents=lines"], "--documents has no effect here"),
        (["words", "--shards=2"], "--shards has no effect here"),
        (["words", "--file=good.txt"], "--file has no effect here"),
        (["names", "--file=good.txt"], "--file has no effect here"),
        (["shakespeare", "--file=good.txt"], "SHA-256"),
        (["shakespeare", "--file=nothing.txt"], "no file or folder 'nothing.txt'; see"),
        (["fineweb", "--tokenizer=gpt2"], "--tokenizer has no effect here"),
        ([], "no file or folder ''; see --help for the sources"),
    ],
)
def test_bad_input_gets_one_line(fails, options, words):
    Path("folder").mkdir()
    for name, text in (("good.txt", babble(50)), ("names.txt", babble(50)), ("folder/a.txt", babble(50))):
        text_file(name, text)
    for name, text in (("empty.txt", ""), ("few.txt", "a\n\n  \nb\nc\n")):
        text_file(name, text)
    Path("ends.txt").write_bytes(b"caf\xe9\nb" + b"a\n" * 10)
    # the first MiB ends in the middle of a character
    Path("latin1.txt").write_bytes(b"abcd\n" + b"cd\xc3\xa9\nx\n\n" * 131_072 + b"a\n\n\xe9t\xe9\nb\n")
    assert words in slashes(fails(prepare_data, *options))
    assert not [path for path in Path().glob("data/*") if path.name != "downloads"]


def test_a_failed_preparation_leaves_the_dataset_that_was_there(call, fails):
    text_file("my.txt", babble(500))
    call(prepare_data, "my.txt")
    before = {path.name: path.read_bytes() for path in Path("data/my").iterdir()}
    Path("my.txt").write_bytes(babble(500).encode() + b"\xff")
    fails(prepare_data, "my.txt")
    assert {path.name: path.read_bytes() for path in Path("data/my").iterdir()} == before
    assert [path.name for path in Path("data").iterdir()] == ["my"]


def test_two_processes_may_prepare_one_dataset(call, monkeypatch):
    """Here the second one starts and ends while the first is at work."""
    text_file("my.txt", babble(500))
    write_text, others = prepare_data.write_text, [lambda: prepare_data.prepare("my.txt")]

    def interrupted(*arguments):
        if others:
            others.pop()()
        return write_text(*arguments)

    monkeypatch.setattr(prepare_data, "write_text", interrupted)
    status, _, err = call(prepare_data, "my.txt")
    assert status == 0 and not others, err
    assert [path.name for path in Path("data").iterdir()] == ["my"]


def wait_for(pattern: str) -> list[Path]:
    for _ in range(600):
        if found := list(Path().glob(pattern)):
            return found
        time.sleep(0.05)
    pytest.fail(f"no {pattern}")


@posix
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGKILL"])
def test_a_preparation_that_is_killed_leaves_no_dataset_and_harms_no_other(call, name):
    """After SIGKILL, its hidden folder stays."""
    text_file("my.txt", babble(500) * 9000)
    process = start("prepare_data.py", "my.txt")
    (written,) = wait_for("data/.my.*/new/train.bin")
    call(prepare_data, text_file("few.txt", babble(500)), "--name=my")
    assert written.exists() and process.poll() is None
    process.send_signal(getattr(signal, name))
    finish(process)
    assert written.exists() == (name == "SIGKILL")
    assert call(prepare_data, "few.txt", "--name=my")[0] == 0
    assert [path.name for path in Path("data").glob("[!.]*")] == ["my"]


@pytest.mark.parametrize("failing", [[2], [2, 3]], ids=["the move", "the move and the move back"])
def test_the_only_copy_of_a_dataset_is_never_deleted(call, monkeypatch, failing):
    """The old dataset is moved aside, the new one to its place, or else the old one back."""
    call(prepare_data, text_file("my.txt", babble(50)))
    made = Path("data/my/meta.json").read_bytes()
    attempts = []

    def move(source, target):
        attempts.append(source)
        if len(attempts) in failing:
            raise PermissionError
        os.replace(source, target)

    monkeypatch.setattr(prepare_data, "move", move)
    assert call(prepare_data, text_file("my.txt", babble(90)))[0] == 2
    (kept,) = Path("data").glob("*my*")
    assert (kept / "meta.json").read_bytes() == made


@posix
def test_a_dataset_that_is_a_link_stays_one(call, fails):
    text_file("my.txt", babble(50))
    Path("disk/my").mkdir(parents=True)  # empty at first
    Path("data").mkdir()
    Path("data/my").symlink_to("../disk/my")
    for text in (babble(50), babble(90, seed=1)):
        text_file("my.txt", text)
        status, _, err = call(prepare_data, "my.txt")
        assert status == 0 and Path("data/my").is_symlink(), err
        assert len(load("my").train) == int(0.9 * len(text)) and Path("disk/my/meta.json").exists()
        assert [path.name for path in Path("disk").iterdir()] == ["my"]
    Path("data/other").symlink_to("/no/such/disk")
    words = " is a link to /no/such/disk, which is not there; mount its disk, or delete the link"
    assert "data/other" + words in fails(prepare_data, "my.txt", "--name=other")
    os.rename("data", "d")
    Path("data").symlink_to("/no/such/disk")
    assert "data is a file, or a link that leads nowhere" in fails(prepare_data, "my.txt")


def test_an_unwritable_place_gets_one_line(fails):
    text_file("my.txt", babble(500))
    text_file("data", "a file, where the folder should be")
    assert "data" in fails(prepare_data, "my.txt")


@pytest.fixture
def prepared(call):
    call(prepare_data, text_file("my.txt", babble(500)))
    return Path("data/my")


def broken(words: str, name: str = "my") -> None:
    with pytest.raises(UserError) as caught:
        load(name)
    found = slashes(str(caught.value))
    assert re.search(words, found) and "; " in found and "prepare_data.py" in found
    del caught
    if os.name == "nt":  # Windows removes no file that is still mapped
        gc.collect()


def test_a_dataset_that_does_not_exist_says_what_to_run(prepared):
    broken("no dataset data/mx; run: python prepare_data.py YOUR_TEXT.txt --name=mx", "mx")
    broken(
        r"no dataset data/wordss \(did you mean words\?\); run: python prepare_data.py YOUR_TEXT.txt --name=wordss",
        "wordss",
    )
    broken("no dataset data/fineweb; run: python prepare_data.py fineweb", "fineweb")
    for name in ("fineweb_gpt2", "fineweb_bpe300"):  # it has GPT-2's tokens, and no other name
        broken(f"no dataset data/{name}.*; run: python prepare_data.py YOUR_TEXT.txt --name={name}", name)


def test_a_file_that_is_too_long_or_truncated_or_missing_is_named(prepared):
    with open(prepared / "val.bin", "ab") as file:
        file.write(bytes(2))
    broken("data/my/val.bin does not have [0-9]+ bytes; delete data/my, and run ")
    with open(prepared / "val.bin", "r+b") as file:
        file.truncate(10)
    broken("data/my/val.bin does not have [0-9]+ bytes; delete data/my, and run ")
    (prepared / "train.bin").unlink()
    broken("data/my/train.bin does not have ")


def test_another_version_is_refused(prepared, monkeypatch):
    monkeypatch.setattr(dataset, "FORMAT", 2)
    broken("data/my/meta.json is damaged, or of another version; delete data/my, and run prepare_data.py again")


def test_any_change_of_the_description_is_found(prepared):
    path = prepared / "meta.json"
    whole, rng = json.loads(path.read_text()), random.Random(0)
    for _ in range(30):
        meta = json.loads(json.dumps(whole))
        part = rng.choice([meta, meta["splits"], meta["splits"]["val"], meta["tokenizer"]])
        key = rng.choice([key for key in part if key != "sha256" or part is not meta])
        if rng.random() < 0.4:
            del part[key]
        else:
            part[key] = rng.choice([None, -1, "x", 10**30, [], {}, 0.5])
        path.write_text(json.dumps(meta))
        if meta != whole:
            broken("data/my/meta.json is damaged")
    for text in ("[]", "7", "null", '"x"', "{", "{}", "\udcff"):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        broken("data/my/meta.json is damaged")


def test_binary_files_of_a_folder_are_left_out_and_counted(call, fails):
    """... by a NUL byte near their start. A text that is no UTF-8 stays an error, also in a folder."""
    Path("mixed/deep").mkdir(parents=True)
    text_file("mixed/a.txt", "abc" * 20)
    binary = {"b.png": b"\x89PNG\r\n\0", "deep/c.pyc": b"\xcb\r\r\n\0", "d.npy": b"\x93NUMPY\1\0", "e.txt": b"a\0b\0"}
    for name, content in binary.items():
        Path("mixed", name).write_bytes(content)
    status, out, err = call(prepare_data, "mixed")
    assert status == 0 and load("mixed").tokenizer.chars == ["a", "b", "c"], err
    assert "note: left out as binary, UTF-16 or broken links: 4, such as mixed/b.png; files read: 1" in slashes(out)
    Path("mixed/f.txt").write_bytes("é".encode("latin1"))
    assert "f.txt is not UTF-8 at byte 0; save it as UTF-8, or leave it out" in fails(prepare_data, "mixed")


@posix
def test_linked_folders_are_read_once_each(call):
    for name, text in (("nas/books/a", "A" * 20), ("corpus/b", "B" * 20), ("corpus/z/c", "C" * 20)):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        text_file(f"{name}.txt", text)
    for link, target in (("books", "../nas/books"), ("books2", "../nas/books"), ("z/up", ".."), ("loop", "loop")):
        Path("corpus", link).symlink_to(target)
    Path("corpus/gone").symlink_to("/no/such/disk")
    Path("corpus/datasets").symlink_to("../data")  # is left out
    Path("data/other").mkdir(parents=True)
    text_file("data/other/d.txt", "D" * 20)
    out = call(prepare_data, "corpus")[1]
    data = load("corpus")
    assert data.tokenizer.decode([*data.train, *data.val]) == "\n".join(["B" * 20, "A" * 20, "C" * 20])
    assert "broken links: 2, such as corpus/gone; files read: 3" in out
    Path("links").mkdir()
    Path("links/corpus").symlink_to("../corpus")
    assert call(prepare_data, "links")[0] == 0 and len(load("links").train) == len(data.train)


def test_a_folder_that_cannot_be_read_is_an_error(fails, monkeypatch):
    Path("corpus/notes").mkdir(parents=True)
    text_file("corpus/a.txt", babble(50))
    scandir = os.scandir

    def refuse(path):  # for root, too, who may read everything
        if str(path).endswith("notes"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr("os.scandir", refuse)
    assert "corpus/notes: Permission denied; check path" in slashes(fails(prepare_data, "corpus"))


def zipped(text: bytes) -> bytes:
    with zipfile.ZipFile("made.zip", "w") as file:
        file.writestr("word/document.xml", text)  # not compressed: UTF-8 with NUL characters
    return Path("made.zip").read_bytes()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (gzip.compress, "is compressed; unpack it first"),
        (bz2.compress, "is compressed; unpack it first"),
        (lzma.compress, "is compressed; unpack it first"),
        (zipped, "is an archive, such as .zip, .docx or .epub; unpack it, or save its text as .txt"),
        (lambda text: b"%PDF-1.4\n" + text, "is a PDF; save its text as .txt"),
        (lambda text: b"{\\rtf1\\ansi " + text + b"}", "is a formatted document; save its text as .txt"),
    ],
    ids=["gzip", "bzip2", "xz", "zip", "pdf", "rtf"],
)
def test_files_that_are_no_text_are_named(fails, make, words):
    Path("mine.x").write_bytes(make(babble(200).encode()))
    assert f"mine.x {words}" in fails(prepare_data, "mine.x")


def test_the_recipes_for_json_and_csv_make_documents(call):
    texts = [f"Story {i}.\n\nIt was a {word}, and \u00e9t\u00e9." for i, word in enumerate(babble(12).split())]
    text_file("stories.jsonl", "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts))
    text_file("poems.csv", "\ufefftitle,text\r\n" + "".join(f'a,"{text}"\r\n' for text in texts))
    page = (ROOT / "docs" / "howto.md").read_text(encoding="utf-8")
    for name in ("stories.jsonl", "poems.csv"):
        (recipe,) = [code for code in re.findall(r"```py\n(.*?)```", page, flags=re.S) if name in code]
        exec(recipe, {})
    for options in (["stories", "--documents=files"], ["poems.txt", "--documents=***"]):
        assert f"python prepare_data.py {' '.join(options)}".replace("***", '"***"') in page.replace("\n", " ")
        assert call(prepare_data, *options)[0] == 0
        data = load(Path(options[0]).stem)
        found = [data.tokenizer.decode(ids) for split in data.splits for ids in data.documents(split)]
        assert sorted(found) == sorted(texts)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
def test_english_in_utf16_is_named(fails, encoding):
    """Without a byte order mark it is valid UTF-8, in which every second character is a NUL."""
    Path("wide.txt").write_bytes(babble(300).encode(encoding))
    error = fails(prepare_data, "wide.txt")
    assert "wide.txt has NUL characters, so it is not UTF-8; if it is UTF-16, save it as UTF-8" in error
    assert not Path("data").exists() or not list(Path("data").iterdir())


@posix
def test_a_pipe_is_no_file(fails):
    """It can be read once, and a text is read more than once."""
    os.mkfifo("pipe")
    for options in (["pipe"], ["shakespeare", "--file=pipe"], ["/dev/null", "--name=null"]):
        assert "no file or folder '" in fails(prepare_data, *options)


def test_several_files_and_paths_of_datasets_are_told_what_to_do(call, fails):
    for name in ("a.txt", "b.txt"):
        text_file(name, babble(50))
    advice = "one value too many: b.txt; "
    assert advice in fails(prepare_data, "a.txt", "b.txt")
    broken("./a.txt is a file, not a dataset; run: python prepare_data.py ./a.txt, then use --dataset=a$", "./a.txt")
    Path("notes").mkdir()
    broken("notes is a folder, not a dataset; run: python prepare_data.py notes, then use --dataset=notes$", "notes")
    call(prepare_data, "a.txt")
    with pytest.raises(UserError, match=r"data.a is not the name of a dataset; use --dataset=a$"):
        load("data/a")


@pytest.mark.parametrize("name", ["gpt2", "bpe", "char", "GPT2", "Char"])
def test_names_of_tokenizers_are_no_names_of_datasets(fails, name):
    text_file(f"{name}.txt", babble(50))
    assert f"{name!r} cannot be the name of this dataset; choose one" in fails(prepare_data, f"{name}.txt")
    assert f"{name!r} cannot be the name" in fails(prepare_data, f"{name}.txt", "--name=" + name)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("my novel", "my_novel"),
        ("(1) drafts, old", "_1_drafts_old"),
        ("e\u0301te\u0301", "\u00e9t\u00e9"),
        ("$HOME", "_HOME"),
    ],
)
def test_a_text_of_any_name_gets_a_name_that_works_and_commands_that_can_be_typed(call, fails, file, name):
    path = text_file(f"{file}.txt", babble(50))
    with pytest.raises(UserError) as caught:
        load(path)
    command, use = str(caught.value).split("; run: ")[1].split(", then use ")
    assert shlex.split(command) == ["python", "prepare_data.py", path] and use == f"--dataset={name}"
    assert f"such as --name={name}" in fails(prepare_data, path, f"--name={file}")
    assert call(prepare_data, path)[0] == 0 and len(load(name).train)
    broken(f"no dataset data/.*; run: python prepare_data.py YOUR_TEXT.txt --name={name}", file)


@pytest.mark.parametrize("kind", ["char", "bpe", "gpt2"])
def test_a_text_in_the_tokens_of_a_run(call, fails, request, kind):
    """Such as one that a friend gave, whose dataset is not here."""
    if kind == "gpt2":
        request.getfixturevalue("gpt2_vocabulary")
    prepare_data.prepare(text_file("first.txt", babble(300)), kind, 300, name="first")
    tokenizer, model = load("first").tokenizer, GPT(GPTConfig(vocab_size=3, n_layer=1, n_embd=8, n_head=1))
    save_model(Path("out/run/best.pt"), model, tokenizer)
    shutil.rmtree("data")
    text = babble(200, seed=1)
    for name, made in (("out/run", "second_run"), ("out/run/best.pt", "second_run"), ("out/run/", "second_run")):
        status, out, _ = call(prepare_data, text_file("second.txt", text), f"--tokenizer={name}")
        assert status == 0 and f"data/{made}: " in out
        data = load(made)
        assert data.tokenizer.to_dict() == tokenizer.to_dict()
        assert tokenizer.decode([*data.train.tolist(), *data.val.tolist()]) == text
    if kind == "char":
        error = fails(prepare_data, text_file("third.txt", text + "naïve €5" * 9), "--tokenizer=out/run")
        assert "lacks '5' (U+0035), 'v' (U+0076), 'ï' (U+00EF), '€' (U+20AC); leave them out" in error
        assert "--tokenizer=bpe" not in error  # which would not fit the run
    torch.save([1], "other.pt")
    assert "other.pt has no tokenizer; use a run of train.py" in fails(
        prepare_data, "second.txt", "--tokenizer=other.pt"
    )


def test_repeated_documents_are_counted(call):
    """A split of a list with repeated lines has the same ones in train and val: low losses there mean little."""
    text_file("ten.txt", "\n".join([f"name{i}" for i in range(40)] * 10))
    out = call(prepare_data, "ten.txt", "--documents=lines")[1]
    assert "note: 360 of 400 documents repeat another one; 40 of 40 in val are in train, too, where a" in out
    text_file("once.txt", "\n".join(f"name{i}" for i in range(400)))
    assert "note" not in call(prepare_data, "once.txt", "--documents=lines")[1]
    text_file("twice.txt", "\n".join([*(f"name{i}" for i in range(40)), "name0", "\n", " "]))
    out = call(prepare_data, "twice.txt", "--documents=lines")[1]
    data = load("twice")
    both = [ids for ids in data.documents("val") if ids in data.documents("train")]
    assert f"note: 1 of 41 documents repeat another one; {len(both)} of 4 in val are in train, too" in out


# ----------------------------------------------------------------------------- documents of several lines

STORIES = [f"Story {i}.\n\n  It was a {word},\nand it was happy." for i, word in enumerate(babble(30).split())]
KINDS = {
    "files": lambda: [text_file(f"many/{i:02}.txt", f"\n{story}\n\n") for i, story in enumerate(STORIES)],
    "<|endoftext|>": lambda: text_file("many/all.txt", "\n<|endoftext|>\n".join(STORIES)),
    "***": lambda: text_file("many/all.txt", "***\n" + " *** \n".join(f"{story}\n" for story in STORIES) + "***"),
    "blank": lambda: text_file("many/all.txt", "\n \n\n".join(story.replace("\n\n", "\n") for story in STORIES)),
}


@pytest.mark.parametrize("tokenizer", ["char", "bpe", "gpt2"])
@pytest.mark.parametrize("documents", KINDS)
def test_documents_may_have_several_lines(call, request, documents, tokenizer):
    """A song per file, stories between lines of one kind, poems between blank lines. One token, which no text has,
    starts and ends each."""
    if tokenizer == "gpt2":
        request.getfixturevalue("gpt2_vocabulary")
    Path("many").mkdir()
    KINDS[documents]()
    options = ("--vocab_size=300",) if tokenizer == "bpe" else ()
    status, _, err = call(
        prepare_data, "many", f"--documents={documents}", f"--tokenizer={tokenizer}", *options, "--name=my"
    )
    assert status == 0, err
    data = load("my")
    expected = [story.replace("\n\n", "\n") if documents == "blank" else story for story in STORIES]
    random.Random(42).shuffle(expected)
    found = [data.tokenizer.decode(ids) for split in data.splits for ids in data.documents(split)]
    assert found == expected
    assert data.separator == data.start_token == data.tokenizer.end_id and not data.has_lines
    assert data.tokenizer.decode([data.separator]) == "<|endoftext|>"
    for split, entry in data.splits.items():
        ids = getattr(data, split)
        assert ids[0] == ids[-1] == data.separator and np.count_nonzero(ids == data.separator) == entry["documents"] + 1
        assert entry["bytes"] == sum(len(data.tokenizer.decode(part).encode()) for part in data.documents(split))
    if tokenizer == "bpe":
        assert data.vocab_size <= 300
        assert (
            make_tokenizer(json.loads(json.dumps(data.tokenizer.to_dict()))).decode([data.separator]) == "<|endoftext|>"
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["all.txt", "--documents=line"], "all.txt has no line 'line' (did you mean lines?); give the line"),
        (["all.txt", "--documents=<|end|>"], "all.txt has no line '<|end|>'; give the line that separates"),
        (["all.txt", "--documents=inside"], "has no line 'inside'; give the"),
        (["all.txt", "--documents=files"], "all.txt has 1 documents with text, too few to split"),
        (["all.txt", "--documents=***"], "all.txt has 3 documents with text, too few to split"),
        (["words", "--documents=blank"], "--documents has no effect here"),
        (["all.txt", "--documents=blank"], "all.txt has no blank line; give the line that separates its documents"),
        (
            ["many.txt", "--documents=***", "--tokenizer=first"],
            "first has no token for the end of documents of several",
        ),
    ],
)
def test_documents_that_cannot_be_found_are_one_line(call, fails, options, words):
    text_file("all.txt", "a\n***\nb inside\ninside of it\n***\nc")
    text_file("many.txt", "\n***\n".join("abc" * 12))
    call(prepare_data, text_file("first.txt", "abc\n" * 30))
    assert words in fails(prepare_data, *options)


def test_a_separator_inside_of_a_line_separates_nothing(call):
    stories = [f"story {i}" for i in range(20)]
    call(prepare_data, text_file("my.txt", "\n%\n".join([*stories, "20 % of it"])), "--documents=%")
    assert sum(entry["documents"] for entry in load("my").splits.values()) == 21


# ----------------------------------------------------------------------------- a plain train.bin and val.bin


def plain_bins(folder: str = "bins", dtype: str = "<u2", **splits: list[int]) -> str:
    Path(folder).mkdir(exist_ok=True)
    for split, ids in splits.items():
        np.array(ids, dtype=dtype).tofile(f"{folder}/{split}.bin")
    return folder


def test_plain_bins_become_a_dataset_of_numbers(call):
    """As nanoGPT writes them. Its meta.pkl can run code, and is not opened."""
    ids = np.random.default_rng(0).integers(65, size=4000).tolist()
    plain_bins(train=ids[:3600], val=ids[3600:])
    Path("bins/meta.pkl").write_bytes(pickle.dumps(Malicious()))
    status, _, err = call(prepare_data, "bins", "--vocab_size=65")
    assert status == 0 and not Path("harmed").exists(), err
    data = load("bins")
    assert data.train.tolist() == ids[:3600] and data.val.tolist() == ids[3600:] and data.test is None
    assert (data.vocab_size, data.separator, data.start_token) == (65, None, None)
    assert data.tokenizer.decode([3, 17]) == "3 17 " and math.isnan(data.bits_per_byte(1.0, "val"))


def test_plain_bins_of_gpt2s_tokens_have_their_text(call, gpt2_vocabulary):
    encode = BPETokenizer().encode
    ids = [*encode("Hello naïve world"), 50256] * 20
    assert call(prepare_data, plain_bins(train=ids, val=ids[:30], test=ids[:7]), "--tokenizer=gpt2")[0] == 0
    data = load("bins_gpt2")
    assert data.train.tolist() == ids and data.test.tolist() == ids[:7]
    assert data.start_token == 50256 and data.separator is None  # as in FineWeb
    assert data.splits["train"]["bytes"] == 20 * len("Hello naïve world".encode())
    plain_bins(train=encode("no end") * 9, val=encode("no end"))
    assert call(prepare_data, "bins", "--tokenizer=gpt2")[0] == 0 and load("bins_gpt2").start_token is None


def test_plain_bins_of_a_large_vocabulary_are_uint32(call):
    plain_bins(dtype="<u4", train=[0, 70_000, 99_999], val=[1, 2])
    assert call(prepare_data, "bins", "--vocab_size=100000")[0] == 0
    assert load("bins").train.tolist() == [0, 70_000, 99_999]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "bins has train.bin and val.bin, which are token ids; add --tokenizer=gpt2 if"),
        (["--tokenizer=bpe"], "which are token ids; add --tokenizer=gpt2 if"),
        (
            ["--vocab_size=64"],
            "train.bin has the id 64, and ids of a vocabulary of 64 tokens must be uint16 (little-endian), below 64;",
        ),
        (
            ["--vocab_size=65"],
            "val.bin has 3 bytes, and ids of a vocabulary of 65 tokens must be uint16 (little-endian); copy",
        ),
        (["--vocab_size=65", "--documents=lines"], "--documents has no effect here"),
        (["--tokenizer=gpt2", "--vocab_size=65"], "--vocab_size has no effect here"),
        (["--tokenizer=nothing"], "no dataset data/nothing"),
    ],
)
def test_plain_bins_that_do_not_fit_are_one_line(fails, options, words):
    plain_bins(train=[*range(65)], val=[1, 2])
    Path("bins/val.bin").write_bytes(b"abc")
    assert words in slashes(fails(prepare_data, "bins", *options))
    assert not Path("data/bins").exists()


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "must"),
    [("<i8", 1500, "<u2"), ("<i4", 1500, "<u2"), ("<u4", 1500, "<u2"), ("<i8", 65_536, "<u2"), ("<i8", 70_000, "<u4")],
)
def test_ids_of_a_wider_type_are_refused(fails, dtype, vocab_size, must):
    """numpy's own type is int64: read as uint16, each id is the id and three zeros."""
    plain_bins(dtype=dtype, train=np.random.default_rng(0).integers(1500, size=20_000), val=[1])
    error = fails(prepare_data, "bins", f"--vocab_size={vocab_size}")
    assert f"train.bin looks like int32 or int64, and ids of a vocabulary of {vocab_size:,} tokens must be" in error
    assert f'; write ids.astype("{must}").tofile("train.bin"), or give the right --tokenizer' in error


def test_ids_of_the_right_type_are_not_refused(call):
    rng = np.random.default_rng(0)
    right = {
        "few": [5, 0, 0, 0, 300],
        "zeros": [0] * 1000,
        "others": [0, 5] * 500,
        "padded": [5] + [0] * 1000,
        "one": [769] * 1000,
        "all": rng.integers(65_536, size=500),
        "order": range(65_536),
    }
    for name, ids in right.items():
        status, _, err = call(prepare_data, plain_bins(name, train=ids, val=ids), "--vocab_size=65536")
        assert status == 0 and load(name).train.tolist() == list(ids), (name, err)
    assert call(prepare_data, plain_bins("ones", train=[0] * 99, val=[0]), "--vocab_size=1")[0] == 0


def test_a_folder_without_val_bin_says_so(fails):
    plain_bins(train=[1, 2])
    assert "bins has train.bin, but no val.bin; add it" in fails(prepare_data, "bins", "--vocab_size=5")


def test_nothing_is_encoded_for_a_dataset_without_a_tokenizer(call, fails):
    call(prepare_data, plain_bins(train=[1, 2, 3], val=[1]), "--vocab_size=5")
    error = fails(prepare_data, text_file("my.txt", babble(50)), "--tokenizer=bins")
    assert "the tokenizer of bins is unknown, so it encodes no text; use another" in error


# ----------------------------------------------------------------------------- prompts


def test_prompts_are_read_like_texts(fails):
    for content in (b"\xef\xbb\xbfa\r\nb\rc", b"a\nb\nc"):
        Path("prompt.txt").write_bytes(content)
        assert read_prompt("", "prompt.txt") == "a\nb\nc"
        assert read_prompt(content.decode(), "") == "a\nb\nc"
    assert read_prompt("", "") == ""
    Path("prompt.txt").write_bytes("a".encode("utf-16-le"))
    for content, words in (
        (b"a\0", "NUL characters"),
        (b"ab\xff", "not UTF-8 at byte 2"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"\n", "is empty"),
    ):
        Path("prompt.txt").write_bytes(content)
        with pytest.raises(UserError, match=words):
            read_prompt("", "prompt.txt")
    with pytest.raises(UserError, match="there are two texts"):
        read_prompt("a", "prompt.txt")
    with pytest.raises(UserError, match="no file gone"):
        read_prompt("", "gone.txt")


def test_a_dataset_is_not_replaced_by_its_own_ids(call, fails):
    call(prepare_data, text_file("my.txt", babble(50)))
    before = Path("data/my/meta.json").read_bytes()
    assert "my is a dataset already; use its name, --dataset=my" in fails(prepare_data, "data/my", "--vocab_size=50")
    assert Path("data/my/meta.json").read_bytes() == before
    text_file("data/plain.txt", babble(50))
    broken("data/plain.txt is a file, not a dataset; run: python prepare_data.py data/plain.txt", "data/plain.txt")


def test_an_empty_file_separates_nothing(fails):
    Path("many").mkdir()
    for i in range(12):
        text_file(f"many/{i}.txt", "" if i == 5 else f"song {i}\nla la\n")
    assert "many has no blank line" in fails(prepare_data, "many", "--documents=blank")
