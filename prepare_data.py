"""Text -> tokens on disk: six sources, three tokenizers, and the way back.

    python prepare_data.py words                            # no download: words from the Python library
    python prepare_data.py shakespeare                      # tiny Shakespeare, a token a character
    python prepare_data.py my.txt --tokenizer=bpe           # your own text, with BPE trained on it

It makes data/<dataset>/: train.bin, val.bin (and test.bin where the text is a list of documents), raw little-endian
token ids, and meta.json, which holds the tokenizer whole. Every other script reads them with load(dataset).
Nothing comes before this file; micrograd.py or bigram.py is next.

A source that is a list of documents (words, names, your own text with --documents=lines) becomes one stream

    \\n emma \\n olivia \\n ava \\n

in which the newline token, the separator, starts and ends each document.
"""

import codecs
import contextlib
import functools
import hashlib
import io
import json
import math
import os
import random
import re
import sys
import sysconfig
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np

from console import OptionParser, UserError, did_you_mean, in_range, progress, run
from files import DOWNLOADS, check_sha256, download
from tokenizer import BPETokenizer, CharTokenizer, code_points, make_tokenizer, start_ids, train_bpe

DATA = Path("data")  # the datasets; data/.* is left over from a script that was killed, and safe to delete
NO_NETWORK = "give a copy with --file=, or use words or python, which need none"
FORMAT = 1  # of meta.json and the .bin files
CHUNK = 1 << 18  # characters or bytes in memory at a time; tiktoken cannot encode a run of a million blanks
BPE_CHARACTERS = 100_000_000  # BPE is trained on this much of the training split at most

SOURCES = ("words", "python", "names", "shakespeare", "fineweb")
URLS = {  # source: address, SHA-256
    "names": (
        "https://raw.githubusercontent.com/karpathy/makemore/master/names.txt",
        "0a30b5557f192f32ab962680889aac5f6fda0f4cecf40a6d0b5694f58ea8cc4d",
    ),
    "shakespeare": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
}
FINEWEB_URL = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/"


# ----------------------------------------------------------------------------- tokenizers


# ----------------------------------------------------------------------------- texts


@dataclass
class Text:
    """For each split a function that reads it from the start: in pieces, or (documents) in lists of documents."""

    splits: dict[str, Callable[[], Iterator]]
    documents: bool

    def pieces(self, split: str) -> Iterator[str]:
        pieces = self.splits[split]()
        return ("\n".join(batch) + "\n" for batch in pieces) if self.documents else pieces


def open_source(source: str, file: Path | None, documents: str) -> Text:
    """The text of a source; `file` is a local copy in place of a download."""
    if source == "words":
        words = "\n".join(library_words()).encode()
        return shuffled_lines(lambda: io.BytesIO(words), source)
    if source == "python":
        texts = library_texts()
        train = [text for i, text in enumerate(texts) if i % 10 != 9]
        return Text({"train": lambda: iter(train), "val": lambda: iter(texts[9::10])}, documents=False)
    if source in URLS:
        url, sha256 = URLS[source]
        path = existing(str(file)) if file else DOWNLOADS / f"{source}.txt"
        if not path.exists():
            download(url, path, NO_NETWORK, sha256)
        check_sha256(path, sha256, f"it is not {source}; delete it, or prepare it as your own text with --name=")
        return shuffled_lines(functools.partial(open, path, "rb"), source) if source == "names" else text_of([path])
    path = existing(source)
    paths = [path]
    if path.is_dir():
        paths = [p for p in sorted(path.rglob("*")) if p.is_file() and "/." not in f"/{p.relative_to(path).as_posix()}"]
        paths = [p for p in paths if not p.resolve().is_relative_to(DATA.resolve())]
    if not any(p.stat().st_size for p in paths):
        raise UserError(f"{path} is empty; give a text file, or a folder with some that are not hidden or in {DATA}/")
    if documents == "none":
        return text_of(paths)
    if path.is_dir():
        raise UserError(f"{path} is a folder, and --documents=lines takes one file, a document a line; join its files")
    return shuffled_lines(functools.partial(open, path, "rb"), str(path))


def text_of(paths: list[Path]) -> Text:
    """The files as one text without documents: the first 90 % of its characters train, the rest is validation."""
    cut = int(0.9 * sum(map(len, read_text(paths))))
    if cut == 0:
        raise UserError(f"{paths[0]} is too short to be split; give a longer text")
    train, val = lambda: characters(read_text(paths), 0, cut), lambda: characters(read_text(paths), cut, None)
    return Text({"train": train, "val": val}, documents=False)


def read_text(paths: list[Path]) -> Iterator[str]:
    """The files one after the other in pieces of about CHUNK bytes, exactly as they are but for a byte order mark.

    Raises UserError with the file and the byte offset where the text is not UTF-8."""
    show, done = progress("reading", sum(path.stat().st_size for path in paths)), 0
    for path in paths:
        decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
        with open(path, "rb") as file:
            while True:
                block = file.read(CHUNK)
                held = len(decoder.getstate()[0])  # bytes of a character that the block before cut in two
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise not_utf8(path, offset - held + error.start) from error
                yield text.removeprefix("\ufeff" if offset == 0 else "")
                if not block:
                    break
                offset += len(block)
                show(done + offset)
        done += offset


def not_utf8(path: Path | str, at: int) -> UserError:
    return UserError(f"{path} is not UTF-8 at byte {at}; save it as UTF-8, or leave it out")


def characters(pieces: Iterable[str], start: int, stop: int | None) -> Iterator[str]:
    """The characters start ... stop of a text that comes in pieces."""
    at = 0
    for piece in pieces:
        yield piece[max(start - at, 0) : None if stop is None else max(stop - at, 0)]
        at += len(piece)
        if stop is not None and at >= stop:
            return


def whole_words(pieces: Iterable[str]) -> Iterator[str]:
    """The same text in pieces that end where GPT2_PATTERN begins a new word whatever comes next, so that piece by piece
    encoding gives the tokens of the whole: after a character that is no white space, before a blank or a newline.
    CHUNK characters without such a place are a piece, too."""
    rest = ""
    for piece in pieces:
        rest += piece
        cut = len(rest) - 1
        while cut > 0 and (rest[cut] not in " \n" or rest[cut - 1].isspace()):
            cut -= 1
        cut = cut if cut > 0 else len(rest) * (len(rest) >= CHUNK)
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
    yield rest


def shuffled_lines(open_file: Callable[[], BinaryIO], name: str) -> Text:
    """The lines of a file as documents, without blank ones, shuffled and split 80/10/10 as in the makemore lectures.
    Memory holds where each line starts, and 10,000 lines at a time."""
    starts, at = array("q"), 0
    with open_file() as file:
        for line in file:
            if line.strip():
                starts.append(at)
            at += len(line)
    n = len(starts)
    if n < 10:
        raise UserError(f"{name} has {n} lines with text, too few to split 80/10/10; give 10, or leave out --documents")
    random.Random(42).shuffle(starts)

    def document(file: BinaryIO, at: int) -> str:
        file.seek(at)
        line = file.readline().removesuffix(b"\n").removesuffix(b"\r")
        try:
            return line.decode("utf-8-sig" if at == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(name, at + error.start) from error

    def read(first: int, last: int) -> Iterator[list[str]]:
        with open_file() as file:
            for i in range(first, last, 10_000):
                yield [document(file, at) for at in starts[i : min(i + 10_000, last)]]

    n1, n2 = int(0.8 * n), int(0.9 * n)
    splits = {"train": lambda: read(0, n1), "val": lambda: read(n1, n2), "test": lambda: read(n2, n)}
    return Text(splits, documents=True)


def library_texts() -> list[str]:
    """The Python standard library's .py files on this machine: no tests, no installed packages, printable ASCII."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    paths = sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    texts = [text for text in texts if re.fullmatch(r"[\n -~]+", text)]
    if len(texts) < 10:
        raise UserError(f"no .py files of the standard library in {root}; use another Python, or a text of your own")
    return texts


def library_words() -> list[str]:
    """The distinct words in those files: 2 to 15 lower-case letters that stand alone, in alphabetical order."""
    word = re.compile(r"(?<![A-Za-z0-9_])[a-z]{2,15}(?![A-Za-z0-9_])")
    return sorted(set(chain.from_iterable(map(word.findall, library_texts()))))


# ----------------------------------------------------------------------------- downloads


def existing(name: str) -> Path:
    if not name or not Path(name).exists():
        what = f"one of {', '.join(SOURCES)}, a text file, or a folder of them"
        raise UserError(f"no file or folder {name or repr(name)}{did_you_mean(name, SOURCES)}; give {what}")
    return Path(name)


# ----------------------------------------------------------------------------- FineWeb, which comes as tokens


def write_fineweb(folder: Path, copies: Path | None, shards: int) -> tuple:
    """FineWeb (Penedo et al. 2024) in shards of 100M GPT-2 tokens, from a folder of copies or downloaded; each of its
    documents begins with <|endoftext|>, GPT-2's last id. Returns what write_text returns."""
    tokenizer = BPETokenizer()
    end_of_text = tokenizer.vocab_size - 1
    lengths = np.array([len(tokenizer.decode_bytes([i])) for i in range(end_of_text)] + [0])  # bytes of text a token

    def shard(name: str) -> np.ndarray:
        path = (copies or DOWNLOADS) / name
        if not copies and not path.exists():
            print(f"downloading {FINEWEB_URL}{name}", file=sys.stderr)
            download(FINEWEB_URL + name, path, NO_NETWORK)
        return read_shard(existing(str(path)))

    def pieces(tokens: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
        for at in range(0, len(tokens), CHUNK):
            ids = np.array(tokens[at : at + CHUNK])
            if ids.max() > end_of_text:
                past = f"the id {ids.max()}, past GPT-2's {end_of_text}"
                raise UserError(f"{tokens.filename} has {past}; delete it and try again")
            yield ids, int(lengths[ids].sum())

    train = [shard(f"fineweb_train_{i:06d}.bin") for i in range(1, shards + 1)]
    val = [shard("fineweb_val_000000.bin")]
    splits = {
        "train": write_tokens(folder / "train.bin", chain.from_iterable(map(pieces, train)), "uint16"),
        "val": write_tokens(folder / "val.bin", chain.from_iterable(map(pieces, val)), "uint16"),
    }
    return tokenizer, None, splits


def read_shard(path: Path) -> np.ndarray:
    """The tokens of a shard, a memory map (n,) uint16, after a look at its header: 256 int32, of which the first three
    are a magic number, the version, and the number of tokens."""
    header = np.fromfile(path, dtype="<i4", count=256)
    if len(header) < 256 or header[0] != 20240520 or header[1] != 1 or header[2] < 1:
        wrong = f"it begins with {header[:3].tolist()} instead of 20240520, 1 and a number of tokens"
        raise UserError(f"{path} is no shard of GPT-2 tokens: {wrong}; delete it and try again")
    size, expected = path.stat().st_size, 1024 + 2 * int(header[2])
    if size != expected:
        wrong = f"{size} bytes instead of {expected} for {header[2]} tokens"
        raise UserError(f"{path} has {wrong}; delete it and try again")
    return np.memmap(path, dtype="<u2", mode="r", offset=1024)


# ----------------------------------------------------------------------------- writing a dataset


def prepare(
    source: str,
    tokenizer: str = "char",
    vocab_size: int = 1024,
    file: Path | None = None,
    name: str | None = None,
    documents: str = "none",
    shards: int = 1,
) -> None:
    """Make data/<dataset>, whole or not at all, and print what is in it. See main() for the parameters."""
    if not name:
        stem = source if source in SOURCES else existing(source).resolve().stem
        suffix = {"char": "", "bpe": f"_bpe{vocab_size}"}.get(tokenizer, f"_{tokenizer}")
        name = stem if source == "fineweb" else stem + suffix
    if parse_name(name) not in (None, (source, tokenizer, vocab_size)):
        raise UserError(f"{name} is the name of a built-in dataset; give yours another one, such as --name=my_{name}")
    if not re.fullmatch(r"\w[\w.-]*", name) or name == DOWNLOADS.name:
        raise UserError(f"{name!r} cannot name a dataset; give letters, digits, '_', '.' or '-' with --name=")

    folder = DATA / name
    if folder.exists() and not (folder / "meta.json").exists():
        raise UserError(f"{folder} is not a dataset, and would be replaced; choose another --name=")
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DATA, prefix=f".{name}.", ignore_cleanup_errors=True) as temporary:
        new, old = Path(temporary, "new"), Path(temporary, "old")
        new.mkdir()
        if source == "fineweb":
            made, separator, splits = write_fineweb(new, file, shards)
        else:
            made, separator, splits = write_text(new, open_source(source, file, documents), tokenizer, vocab_size)
        meta = {"format": FORMAT, "source": source, "tokenizer": made.to_dict(), "vocab_size": made.vocab_size}
        meta |= {"dtype": token_dtype(made.vocab_size), "separator": separator, "splits": splits}
        meta["sha256"] = hashlib.sha256(json.dumps(meta).encode()).hexdigest()
        (new / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        with contextlib.suppress(FileNotFoundError):  # a folder cannot be replaced in one step: set the old one aside
            os.rename(folder, old)
        try:
            os.rename(new, folder)
        finally:
            if old.exists() and not folder.exists():
                os.rename(old, folder)
    describe(name)


def write_text(folder: Path, text: Text, kind: str, vocab_size: int) -> tuple:
    """Tokenize a text into folder/<split>.bin. Returns the tokenizer, the separator, and what meta.json says of each
    split."""
    if kind == "char":
        seen = np.zeros(0x110000, dtype=bool)
        for piece in chain.from_iterable(map(text.pieces, text.splits)):
            seen[code_points(piece)] = True
        tokenizer = CharTokenizer(map(chr, np.flatnonzero(seen)))
    elif kind == "bpe":
        sample = whole_words(characters(text.pieces("train"), 0, BPE_CHARACTERS))
        tokenizer = BPETokenizer(train_bpe(sample, vocab_size))
        if tokenizer.vocab_size < vocab_size:
            print(f"BPE ends with {tokenizer.vocab_size} tokens: the text has no pairs left")
    else:
        tokenizer = BPETokenizer() if kind == "gpt2" else load(kind).tokenizer
    separator = tokenizer.encode("\n")[0] if text.documents else None

    documents = Counter()

    def encoded(split: str) -> Iterator[tuple[np.ndarray, int]]:
        if text.documents:
            yield np.array([separator]), 1
            for batch in text.splits[split]():
                documents[split] += len(batch)
                yield tokenizer.encode_documents(batch), sum(len(document.encode()) + 1 for document in batch)
        else:
            whole = isinstance(tokenizer, CharTokenizer)  # no token spans two characters
            for piece in text.pieces(split) if whole else whole_words(text.pieces(split)):
                yield tokenizer.encode_array(piece), len(piece.encode())

    dtype = token_dtype(tokenizer.vocab_size)
    splits = {split: write_tokens(folder / f"{split}.bin", encoded(split), dtype) for split in text.splits}
    for split, count in documents.items():
        splits[split]["documents"] = count
    return tokenizer, separator, splits


def token_dtype(vocab_size: int) -> str:
    """uint16 holds the ids 0 ... 65,535."""
    return "uint16" if vocab_size <= 65_536 else "uint32"


def write_tokens(path: Path, pieces: Iterable[tuple[np.ndarray, int]], dtype: str) -> dict:
    """Write pieces (ids, bytes of their text) one after the other. Returns tokens, bytes and SHA-256 of the whole."""
    digest, tokens, n_bytes = hashlib.sha256(), 0, 0
    with open(path, "wb") as file:
        for ids, size in pieces:
            raw = ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
            file.write(raw)
            digest.update(raw)
            tokens, n_bytes = tokens + len(ids), n_bytes + size
    return {"tokens": tokens, "bytes": n_bytes, "sha256": digest.hexdigest()}


# ----------------------------------------------------------------------------- reading a dataset


@dataclass(eq=False)  # compared by identity, so that functions of it can be cached
class Dataset:
    """A prepared text. train, val and test are memory maps (n,) of token ids; test is None where there is none."""

    name: str
    train: np.ndarray
    val: np.ndarray
    test: np.ndarray | None
    tokenizer: CharTokenizer | BPETokenizer
    vocab_size: int
    separator: int | None  # the id that starts and ends each document; None for one long text
    splits: dict[str, dict]  # of each split: tokens, bytes, sha256, and documents where there are any
    delimiter: int | None = None  # the id before each text: the separator, or FineWeb's <|endoftext|>

    def need(self, tokens: int, what: str) -> None:
        """Raises UserError if the training or validation split has fewer tokens than that."""
        for split in ("train", "val"):
            if (n := len(getattr(self, split))) < tokens:
                few = f"the {split} split of {self.name} has {n} tokens, too few for {what}"
                raise UserError(f"{few}; choose a smaller one, or a longer text")

    def bits_per_byte(self, loss: float, split: str) -> float:
        """A loss in nats per token as bits per byte of UTF-8 text, which compares across tokenizers."""
        return loss * self.splits[split]["tokens"] / (self.splits[split]["bytes"] * math.log(2))


def parse_name(name: str) -> tuple[str, str, int] | None:
    """Source, tokenizer and vocab_size of a built-in dataset, such as shakespeare_bpe512; None for other names."""
    match = re.fullmatch(r"(fineweb)|(words|python|names|shakespeare)(_gpt2|_bpe([1-9]\d*))?", name)
    if not match:
        return None
    kind = "gpt2" if match[3] == "_gpt2" else "bpe" if match[3] else "char"
    return match[1] or match[2], kind, int(match[4] or 1024)


def load(name: str) -> Dataset:
    """Open data/<name>; a built-in source (other than fineweb, which is large) is prepared on first use.

    Raises UserError, with the command to run, where files are missing, cut short, foreign or of another version."""
    folder, built_in = DATA / name, parse_name(name)
    command = f"python prepare_data.py YOUR_TEXT.txt --name={Path(name).name}"
    if built_in:
        source, kind, vocab_size = built_in
        options = {"char": "", "gpt2": " --tokenizer=gpt2", "bpe": f" --tokenizer=bpe --vocab_size={vocab_size}"}[kind]
        command = f"python prepare_data.py {source}{options}"
    if not (folder / "meta.json").exists():
        if not built_in or source == "fineweb":
            known = {*SOURCES, *(path.parent.name for path in DATA.glob("[!.]*/meta.json"))} - {name}
            raise UserError(f"no dataset {folder}{did_you_mean(Path(name).name, known)}; run: {command}")
        print(f"preparing {name}, on first use")
        prepare(source, kind, vocab_size)

    again = f"make it again: {command}"
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if meta["format"] != FORMAT:
            version = f"format {meta['format']!r}, and this version reads {FORMAT}"
            raise UserError(f"{folder / 'meta.json'} has {version}; {again}")
        if meta.pop("sha256", None) not in (None, hashlib.sha256(json.dumps(meta).encode()).hexdigest()):
            raise KeyError("another sha256 than when it was made")
        rest = {key: meta[key] for key in ("vocab_size", "separator", "splits")}
        _ = meta["splits"]["train"], meta["splits"]["val"]  # both are there
        rest["delimiter"] = meta["vocab_size"] - 1 if meta["source"] == "fineweb" else meta["separator"]
        tokenizer = make_tokenizer(meta["tokenizer"])
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError, KeyError) as error:
        raise UserError(f"{folder / 'meta.json'} is damaged ({error!r}); {again}") from error
    splits = dict.fromkeys(("train", "val", "test"))
    for split, entry in meta["splits"].items():
        path, dtype = folder / f"{split}.bin", np.dtype(meta["dtype"]).newbyteorder("<")
        size, expected = path.stat().st_size if path.exists() else 0, entry["tokens"] * dtype.itemsize
        if size != expected:
            raise UserError(f"{path} has {size} bytes instead of {expected}; {again}")
        splits[split] = np.memmap(path, dtype=dtype, mode="r")
        if size < 100e6 and splits[split].max() >= meta["vocab_size"]:
            top = f"the id {splits[split].max()}, past the vocabulary of {meta['vocab_size']}"
            raise UserError(f"{path} has {top}; {again}")
    return Dataset(name, **splits, tokenizer=tokenizer, **rest)


def start_context(data: Dataset, length: int, rng: np.random.Generator) -> list[int]:
    """As many tokens to start a text from: separators, or in a text without documents some that end with a line."""
    if length == 0 or data.separator is not None:
        return [data.separator] * length
    line_ends = np.flatnonzero(data.train[length - 1 : -1] == start_ids(data.tokenizer)[-1])
    at = rng.choice(line_ends) if len(line_ends) else rng.integers(len(data.train) - length)
    return data.train[at : at + length].tolist()


def describe(name: str) -> None:
    """Print what a dataset holds: vocabulary, splits, and its first line decoded back."""
    data = load(name)
    print(f"{DATA / name}: a vocabulary of {data.vocab_size:,} tokens, stored as {data.train.dtype}")
    for split, entry in data.splits.items():
        documents = f" {entry['documents']:>12,} documents" if "documents" in entry else ""
        print(f"  {split:5} {entry['tokens']:>14,} tokens {entry['bytes']:>14,} bytes{documents}")
    line = data.tokenizer.decode(data.train[:400].tolist()).strip("\n").split("\n")[0]
    print(f"  first line: {line[:100]}")


# ----------------------------------------------------------------------------- what several scripts print and draw


# ----------------------------------------------------------------------------- the command line of every script


# ----------------------------------------------------------------------------- main


def main() -> None:
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", help=f"{', '.join(SOURCES)}, or your own UTF-8 text: a file or a folder of files")
    tokens = "bpe is trained here; DATASET: with another one's, to train its model further (default: char)"
    add("--tokenizer", metavar="{char,bpe,gpt2,DATASET}", help=tokens)
    add("--vocab_size", type=int, help="tokens of --tokenizer=bpe (default: 1024)")
    add("--file", type=Path, help="a local copy in place of the download; for fineweb a folder of shards")
    add("--name", help="the dataset's folder below data/ (default: made from source and tokenizer)")
    add("--documents", choices=("none", "lines"), help="of your own text: lines: each is a document (default: none)")
    add("--shards", type=in_range(int, 1, 103), help="of fineweb: files of 100M training tokens, 1 to 103 (default: 1)")
    options = parser.parse_args()
    for name, useful, where in (
        ("documents", options.source not in SOURCES, "your own text"),
        ("file", options.source in (*URLS, "fineweb"), "a source that is downloaded"),
        ("vocab_size", options.tokenizer == "bpe", "--tokenizer=bpe"),
        ("shards", options.source == "fineweb", "fineweb"),
        ("tokenizer", options.source != "fineweb", "sources other than fineweb, which is GPT-2 tokens already"),
    ):
        if getattr(options, name) is not None and not useful:
            parser.error(f"--{name} is for {where}")
    kind, kinds = options.tokenizer, ("char", "bpe", "gpt2")
    if kind and kind not in kinds and not parse_name(kind) and not (DATA / kind / "meta.json").exists():
        raise UserError(
            f"no --tokenizer={kind}{did_you_mean(kind, kinds)}; choose {', '.join(kinds)}, or a prepared dataset"
        )
    prepare(**{name: value for name, value in vars(options).items() if value is not None})


if __name__ == "__main__":
    run(main)
