"""Turn a text into data/<dataset>/: token ids in train.bin, val.bin ..., and meta.json, which has the tokenizer.

python prepare_data.py names                       # also python: no download; shakespeare, fineweb: downloads
python prepare_data.py my.txt --tokenizer=gpt2     # your own text, UTF-8, or a folder of texts
python prepare_data.py poems.txt --documents=---   # documents that a line of --- separates; or --documents=lines
"""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal

from common import END, WORLD_SIZE, BPETokenizer, CharTokenizer, UserError, make_tokenizer, parse, run

import numpy as np

NAMES = Path(__file__).parent / "data" / "names.txt"
DOWNLOADS = Path("data", "downloads")
SOURCES = ("names", "python", "shakespeare", "fineweb")
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
NO_TEXT = (b"%PDF-", b"{\\rtf", b"PK\3\4", b"\x1f\x8b")  # beginnings of files: PDF, RTF, zip (also .docx, .odt), gzip
FINEWEB = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/"
# Pieces of a text, up to a million characters: each ends where a word ends, if it can, so that cuts change no token
PIECE = re.compile(r".{1,1000000}(?:\Z|(?<=\S)(?=[ \n]))|.{1,1000000}", re.DOTALL)


@dataclass
class Options:
    source: str = ""  # names, python, shakespeare, fineweb, or your own file or folder
    tokenizer: Literal["char", "gpt2"] = "char"  # lessons/bpe.py trains others
    documents: str = ""  # documents of your own text: lines, or the line between them; by default one long text
    name: str = ""  # name of the dataset, a folder in data/; by default from source and tokenizer
    shards: int = 1  # number of fineweb files, 100 million training tokens each


def prepare(source, tokenizer="char", documents="", name="", shards=1):
    """Make data/<name>/, whole or not at all: read a text, split it, make tokens, write them. Raises UserError."""
    suffix = "" if tokenizer == "char" else f"_{tokenizer}"
    name = name or name_of(source) + suffix
    if not source or not name or (name in SOURCES and name != source):
        raise UserError(f"{name!r} cannot be its name; give a source: python prepare_data.py my.txt --name=mine")
    if source == "fineweb":
        encoder = make_tokenizer({"kind": "gpt2"})
        ids, n_bytes = read_fineweb(shards, encoder)
        write_dataset(name, ids, n_bytes, encoder, None, encoder.end_id, source)
        return
    if source in SOURCES and documents:
        raise UserError("--documents is for your own text; leave it out")
    documents = "lines" if source == "names" else documents
    splits = read_splits(source, documents)
    encoder = make_tokenizer({"kind": "gpt2"}) if tokenizer == "gpt2" else char_tokenizer(splits, documents)
    write_text(name, splits, documents, encoder, source)


def name_of(source):
    """What the dataset of a source is called: as its file, without the ending, or as its folder."""
    path = Path(source)
    return path.name if path.is_dir() else path.stem


def read_splits(source, documents):
    """{"train": [...], "val": [...]}, and "test" for documents: the documents of each split, or one long text."""
    if source == "python":
        texts = read_python()
        val = "".join(texts[9::10])  # every tenth file
        del texts[9::10]
        return {"train": ["".join(texts)], "val": [val]}
    path = Path(source)
    if source == "names":
        path = NAMES
    elif source == "shakespeare":
        path = DOWNLOADS / "shakespeare.txt"
        download(SHAKESPEARE, path, SHAKESPEARE_SHA256)
    text = read_text(path)
    if documents:
        return split_documents(text, documents)
    n = int(0.9 * len(text))
    if n == 0:
        raise UserError(f"{source} has too little text to split; give more")
    return {"train": [text[:n]], "val": [text[n:]]}


def read_python():
    """The .py files of Python's library that have printable ASCII only, without tests and packages, sorted."""
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(root).parts):
            text = path.read_text(encoding="utf-8", errors="replace")
            if re.fullmatch(r"[\n -~]+", text):
                texts.append(text)
    return texts


def read_text(source):
    """The text of a file, or of all files in a folder that are not hidden. Says which are no text. Raises UserError."""
    paths = [source]
    if not source.is_file():
        found = sorted(source.rglob("*"))
        files = [path for path in found if path.is_symlink() or not path.is_dir()]
        paths = [path for path in files if "/." not in f"/{path.relative_to(source).as_posix()}"]
    if not paths:
        raise UserError(f"{source} is no file, and no folder with files; give one, or one of {', '.join(SOURCES)}")
    text = ""
    left_out = []
    for path in paths:
        content = path.read_bytes() if path.is_file() else b"\0"  # a link to a folder, or to nothing, is left out
        if b"\0" in content or content.startswith(NO_TEXT):
            left_out.append(path)
            continue
        try:
            text += content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8, or leave it out") from None
        if not text.endswith("\n"):
            text += "\n"
    if left_out:
        what = "are binary, UTF-16, PDF, archives, of a word processor, or links to folders"
        line = f"{len(left_out):,} of {len(paths):,} files, such as {left_out[0]}, {what}"
        if left_out == paths:
            raise UserError(f"{line}; give plain text in UTF-8")
        print(f"left out: {line}")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def download(url, path, sha256=""):
    """Download a file, unless it is there: to a temporary name, then check its SHA-256, then rename it. Without
    sha256, the server must announce it, as Hugging Face does in a header of its redirect. Raises UserError."""
    if path.exists():
        return
    import requests  # here: only downloads need it

    print(f"downloading {url}")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    digest = hashlib.sha256()
    try:
        with requests.get(url, stream=True, timeout=30) as response, open(part, "wb") as file:
            response.raise_for_status()
            for answer in [*response.history, response]:
                sha256 = sha256 or answer.headers.get("X-Linked-Etag", "").strip('"')
            for block in response.iter_content(1 << 20):
                file.write(block)
                digest.update(block)
    except OSError as error:
        raise UserError(f"cannot download {url} ({error}); try again, or put the file at {path}") from error
    if digest.hexdigest() != sha256:
        raise UserError(f"{url} does not have the SHA-256 that it should have, {sha256 or 'not announced'}; try again")
    os.replace(part, path)


def read_fineweb(shards, tokenizer):
    """FineWeb (Penedo et al. 2024) in GPT-2's tokens: a file has a header of 1,024 bytes, then the ids, as uint16."""
    tokens = [tokenizer.encoding.decode_single_token_bytes(i) for i in range(tokenizer.vocab_size - 1)]
    bytes_of = np.array([*map(len, tokens), 0])  # the last token, END, is no text
    splits = {"train": [], "val": []}
    n_bytes = {"train": 0, "val": 0}
    for i in range(shards + 1):
        split = "val" if i == 0 else "train"
        path = DOWNLOADS / f"fineweb_{split}_{i:06d}.bin"
        download(FINEWEB + path.name, path)
        ids = np.memmap(path, dtype="<u2", mode="r", offset=1024)
        splits[split].append(ids)
        n_bytes[split] += int(bytes_of[ids].sum())
    return splits, n_bytes


def split_documents(text, documents):
    """Shuffle the documents that have text, and split them 80/10/10, as the makemore lectures do."""
    if documents == "lines":
        parts = text.split("\n")
    else:
        parts = re.split(rf"^[ \t]*{re.escape(documents)}[ \t]*$", text, flags=re.MULTILINE)
    texts = [part.strip("\n") for part in parts if part.strip()]
    n = len(texts)
    if n < 10:
        raise UserError(f"there are {n} documents with text, too few to split; give 10 or more, or another separator")
    random.Random(42).shuffle(texts)
    n1 = int(0.8 * n)
    n2 = int(0.9 * n)
    known = set(texts[:n1])
    again = sum(text in known for text in texts[n1:])
    if again:
        print(f"{again:,} of {n - n1:,} documents of val and test are in train, too, where a model can memorize them")
    return {"train": texts[:n1], "val": texts[n1:n2], "test": texts[n2:]}


def char_tokenizer(splits, documents):
    """One token per character, and one to stand between documents: a newline, or END if they have several lines."""
    chars = {"\n"} if documents == "lines" else set()
    for texts in splits.values():
        chars.update(*texts)
    tokens = sorted(chars)
    if documents not in ("", "lines"):
        tokens.append(END)
    return CharTokenizer(tokens)


def write_text(name, splits, documents, tokenizer, source=""):
    """Encode the splits, and write the dataset. A separator starts and ends each document: a newline, or END."""
    separator = []  # a long text has none
    if documents == "lines":
        separator = tokenizer.encode("\n")
    elif documents:
        separator = [tokenizer.end_id]
    ids = {}
    n_bytes = {}
    for split, texts in splits.items():
        ids[split] = encode(texts, separator, tokenizer)
        n_bytes[split] = sum(len(text.encode()) for text in texts)
        if documents == "lines":
            n_bytes[split] += len(texts) + 1  # the newlines; END is no text
    start_token = separator[0] if documents else None
    write_dataset(name, ids, n_bytes, tokenizer, start_token, start_token, source)


def encode(texts, separator, tokenizer):
    """Yield the tokens of texts, piece by piece, as a list of all tokens would need 8 bytes for each."""
    total = sum(map(len, texts))
    done = 0
    line_due = perf_counter() + 5
    yield separator
    for text in texts:
        for piece in PIECE.findall(text):
            yield tokenizer.encode(piece)
            done += len(piece)
            if perf_counter() > line_due:
                print(f"encoded {done:,} of {total:,} characters", flush=True)
                line_due = perf_counter() + 5
        yield separator


def note_replacement(folder, source):
    """Say whether the dataset in a folder is of another source. Raises UserError if it is something else."""
    meta = folder / "meta.json"
    if not meta.exists():
        raise UserError(f"{folder} is not a dataset of ours, so it is not replaced; use another --name")
    with contextlib.suppress(ValueError, LookupError, TypeError):  # damaged, or of another version: nothing to keep
        old = json.loads(meta.read_text(encoding="utf-8"))["source"]
        if old and Path(old).resolve() != Path(source).resolve():
            print(f"note: {folder} was made from {old}, and is replaced; to keep both, use another --name")


def write_dataset(name, ids, n_bytes, tokenizer, separator, start_token, source):
    """Write data/<name>/. ids: the token ids of each split, in pieces (n,). n_bytes: of the text of each split."""
    folder = Path("data", name)
    if folder.exists():
        note_replacement(folder, source)
    new = Path("data", f".{name}.new")  # becomes the dataset when it is complete
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    digest = hashlib.sha256()
    n_tokens = {}
    for split, pieces in ids.items():
        n_tokens[split] = 0
        with open(new / f"{split}.bin", "wb") as file:
            for piece in pieces:
                content = np.asarray(piece, dtype).tobytes()
                file.write(content)
                digest.update(content)
                n_tokens[split] += len(piece)
    meta = {"source": str(source), "hash": digest.hexdigest(), "tokenizer": tokenizer.fields, "dtype": dtype}
    meta.update(n_tokens=n_tokens, n_bytes=n_bytes, separator=separator, start_token=start_token)
    (new / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    if folder.exists():
        folder.rename(new / "old")
    new.rename(folder)
    shutil.rmtree(folder / "old", ignore_errors=True)
    print(f"{folder}: a vocabulary of {tokenizer.vocab_size:,} tokens; bytes of text: {n_bytes}")
    if tokenizer.vocab_size > 1000:
        print("with so many tokens, a short training gets a lower loss without previous-token embeddings: --lookback=0")


@dataclass(eq=False)
class Dataset:
    """A text that prepare_data.py has prepared, as token ids."""

    name: str
    splits: dict  # "train", "val", and "test" if there are documents: token ids (n,), read from the disk as needed
    tokenizer: CharTokenizer | BPETokenizer
    n_bytes: dict  # bytes of UTF-8 text in each split
    hash: str  # SHA-256 of the tokens, which a run keeps, to tell whether its data have changed
    separator: int | None  # the token that starts and ends each document; None for one long text
    start_token: int | None  # the token that samples start with: the separator, or END in a text that has it

    def documents(self, split):
        """The documents of a split, as texts. Raises UserError if it is one long text."""
        if self.separator is None:
            raise UserError(f"{self.name} has no documents; use names, or your own text with --documents=lines")
        ids = self.splits[split]
        parts = np.split(ids, np.flatnonzero(ids == self.separator))  # cut before each separator
        return [self.tokenizer.decode(part[1:].tolist()) for part in parts[1:-1]]

    def bits_per_byte(self, loss, split):
        """A loss in nats per token as bits per byte of UTF-8 text, which can be compared across tokenizers."""
        return loss * len(self.splits[split]) / (self.n_bytes[split] * np.log(2))


def load(name):
    """Open data/<name>, which is prepared first if it is missing and needs no large download. Raises UserError."""
    folder = Path("data", name)
    if not (folder / "meta.json").exists():
        source = name.removesuffix("_gpt2")
        if source not in SOURCES[:3] or WORLD_SIZE > 1:  # several processes would write the same files at once
            advice = f"run: python prepare_data.py {name}, or with your text"
            raise UserError(f"{folder} has no meta.json (nanoGPT's lack it, too); {advice}")
        prepare(source, "char" if source == name else "gpt2")
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        tokenizer = make_tokenizer(meta["tokenizer"])
        splits = {}
        for split, n in meta["n_tokens"].items():
            ids = np.memmap(folder / f"{split}.bin", meta["dtype"], mode="r")
            if len(ids) != n or ids[:1000].max() >= tokenizer.vocab_size:
                raise ValueError(f"{split}.bin has other tokens than meta.json says")
            splits[split] = ids
        entries = [meta[key] for key in ("n_bytes", "hash", "separator", "start_token")]
        return Dataset(name, splits, tokenizer, *entries)
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{folder} is damaged, or of another version ({error!r}); prepare it again") from error


def main():
    prepare(**vars(parse(Options, __doc__, "source")))


if __name__ == "__main__":
    run(main)
