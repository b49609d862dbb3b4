"""Turn a text into data/<dataset>/, the tokens that the training scripts read with load(dataset).

    python prepare_data.py words                      # no download: words from the Python library
    python prepare_data.py shakespeare                # tiny Shakespeare, one token per character
    python prepare_data.py my.txt --tokenizer=bpe     # your own text, with BPE trained on it

Read micrograd.py or bigram.py next. The splits are raw little-endian token ids (train.bin ...);
meta.json has the tokenizer. In a list, a newline token starts and ends each document, \\n emma \\n;
if documents have several lines, <|endoftext|> does.
"""

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import sysconfig
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bpe import train_bpe
from console import NonNegative, PathStr, Positive, UserError, did_you_mean, option, parse, progress, run
from dataset import DATA, FORMAT, Dataset, checksum, load, read_meta
from files import DOWNLOADS, download, load_tensors, lock, move, sha256_of
from tokenizer import (
    END,
    BPETokenizer,
    CharTokenizer,
    NumberTokenizer,
    Tokenizer,
    end_id,
    make_tokenizer,
)

CHUNK = 1 << 18  # characters or tokens at a time; tiktoken cannot encode a million blanks
BEGINNING = 1 << 13  # first bytes of a file: a NUL among them means that it is not text
BPE_SIZE = 1024  # default vocabulary of --tokenizer=bpe
TOKENIZERS = ("char", "bpe", "gpt2")  # a dataset may not have these names
SOURCES = ("words", "python", "names", "shakespeare", "fineweb")
LISTS = ("words", "names")  # sources with one document per line
URLS = {
    "names": "https://raw.githubusercontent.com/karpathy/makemore/master/names.txt",
    "shakespeare": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "fineweb": "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/",
}
SHA256 = {
    "names": "0a30b5557f192f32ab962680889aac5f6fda0f4cecf40a6d0b5694f58ea8cc4d",
    "shakespeare": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
}
COMPRESSED = "is compressed; unpack it first"
DOCUMENT = "is a formatted document; save its text as .txt"
NO_TEXT = {  # first bytes of a file
    b"\x1f\x8b": COMPRESSED,  # gzip
    b"BZh9": COMPRESSED,  # bzip2
    b"\xfd7zXZ": COMPRESSED,  # xz
    b"\x28\xb5\x2f\xfd": COMPRESSED,  # zstd
    b"PK\3\4": "is an archive, such as .zip, .docx or .epub; unpack it, or save its text as .txt",
    b"%PDF-": "is a PDF; save its text as .txt",
    b"{\\rtf": DOCUMENT,
    b"\xd0\xcf\x11\xe0": DOCUMENT,  # .doc
    b"PAR1\x15": "is a Parquet table; save its text as .txt",
    b"\x93NUMPY": "is a NumPy array; for token ids, give a folder with train.bin and val.bin",
}
NO_NETWORK = "give a copy with --file=, or use words or python, which need no download"


@dataclass
class Options:
    source: PathStr = option("", "words, python, names, shakespeare, fineweb, or your own file or folder")
    tokenizer: PathStr = option(
        "char", "char, bpe (trained here), gpt2, or a dataset or run (out/my) whose tokenizer to use"
    )
    vocab_size: NonNegative = option(
        0, "number of tokens of --tokenizer=bpe (0: 1024), or of your own train.bin and val.bin"
    )
    file: PathStr = option("", "local copy to use instead of the download; for fineweb a folder of shards")
    name: str = option("", "name of the dataset, a folder in data/; by default, from source and tokenizer")
    documents: str = option(
        "none", "documents of your own text: none, lines, files, blank (lines between), or the line between them: ***"
    )
    shards: Positive = option(1, "number of fineweb files, 100M training tokens each")


# ----------------------------------------------------------------------------- prepare a dataset

# A text, as a source gives it: for each split ("train", "val", and "test" if there is one) a
# function that returns a list of its documents, or the pieces of one long text. It is a function,
# because a text is read several times, and one long text may be larger than the memory.
Text = dict[str, Callable[[], Iterable[str]]]

# The tokens of a split, in pieces: some token ids, and the number of bytes of text they stand for.
Pieces = Iterator[tuple[Iterable[int], int]]


@dataclass
class Encoded:
    """A text in tokens, which are not written yet."""

    tokenizer: Tokenizer
    # The id between documents. None: there are no documents, or where they end is unknown
    separator: int | None = None
    # The tokens of "train", "val" and perhaps "test". A piece is encoded when it is asked for
    splits: dict[str, Pieces] = field(default_factory=dict)
    # Number of documents in each split; empty without a separator
    n_documents: dict[str, int] = field(default_factory=dict)


def prepare(source, tokenizer="char", vocab_size=0, file="", name="", documents="none", shards=1) -> None:
    """Make data/<dataset>, whole or not at all. Parameters as in Options. Raises UserError."""
    bpe_size = vocab_size or BPE_SIZE
    name = choose_name(name, source, tokenizer, bpe_size)
    is_text = source != "fineweb" and not has_tokens(source)
    for path in (DATA, DATA / name):
        if path.is_symlink() and not path.exists():
            advice = "mount its disk, or delete the link"
            raise UserError(f"{path} is a link to {path.readlink()}, which is not there; {advice}")
    DATA.mkdir(exist_ok=True)
    folder = (DATA / name).resolve()  # data/<dataset> can be a link to another disk
    replaced = find_replaced(folder, source)
    # The dataset is made in a hidden folder, and then moved: nobody reads a dataset that is half done
    with hidden_folder(folder.parent, name) as draft:
        if is_text:
            if source in LISTS:
                documents = "lines"
            text = open_source(source, file, documents)
            made = tokenizer_for(text, documents, tokenizer, bpe_size)
            separator = find_separator(made, documents, tokenizer)
            encoded = encode_text(text, made, separator, tokenizer)
        elif source == "fineweb":
            encoded = open_fineweb(Path(file or DOWNLOADS), shards)
        else:
            encoded = open_tokens(Path(source), tokenizer, vocab_size)
        write_dataset(draft / "new", source, encoded)
        move_into_place(draft / "new", folder, aside=draft / "old")
    if replaced:
        print(f"note: replaces {DATA / name}, which was made from {replaced}")
    print_dataset(load(name))
    if is_text and isinstance(made, BPETokenizer):
        print_decomposed(text)


def choose_name(name: str, source: str, tokenizer: str, bpe_size: int) -> str:
    """Return the name of a dataset: the given name, or else a name from its source and tokenizer:
    words, words_bpe1024, words_gpt2, words_my. Raises UserError if the name or the source cannot be used."""
    stem = source
    if source not in SOURCES:
        path = existing(source).resolve()
        is_inside = DATA.resolve() in (path, *path.parents)
        if is_inside and path.is_dir() and not has_tokens(source):
            raise UserError(f"{source} lies in {DATA}, where datasets are; move it, or give one of its files")
        stem = path.stem
    name = name or to_name(stem + name_suffix(tokenizer, bpe_size))
    # In lower case, as data/Words and data/words are one folder on Windows and macOS
    built_in = parse_name(name.lower())
    means_another = built_in is not None and built_in != (source, tokenizer, bpe_size)
    is_tokenizer = name.lower() in TOKENIZERS
    possible = to_name(name)
    if means_another or is_tokenizer or possible != name:
        example = f"my_{name}" if possible == name else possible
        raise UserError(f"{name!r} cannot be the name of this dataset; choose one, such as --name={example}")
    folder = DATA / name
    is_dataset = (folder / "meta.json").exists()
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_dataset and not is_empty:
        what = f"{folder} is not a dataset, so it is not replaced"
        raise UserError(f"{what}; choose another name, such as --name=my_{name}")
    return name


def to_name(text: str) -> str:
    """Return a name that a dataset can have: my_novel for "my novel"."""
    text = unicodedata.normalize("NFC", text)
    return re.sub(r"^\W+|[^\w.-]+", "_", text)


def find_replaced(folder: Path, source: str) -> str:
    """Return the source of the dataset in a folder, or "" if there is none, or if the source is the same."""
    try:
        before = read_meta(folder / "meta.json")["source"]
    except (FileNotFoundError, UserError):  # UserError: it is damaged
        return ""
    is_same = Path(before).resolve() == Path(source).resolve()  # also for words, names ...
    return "" if is_same else before


@contextlib.contextmanager
def hidden_folder(parent: Path, name: str) -> Iterator[Path]:
    """Make a folder to prepare a dataset in, parent/.name.xxxxxxxx/draft, and remove it at the end. As long
    as the process lives, the file `lock` beside it is locked. What killed processes left is removed."""
    for draft in parent.glob(f".{name}.????????/draft"):
        if not (draft / "old").exists():  # else the process was killed while it moved the only copy
            remove_if_dead(draft.parent)
    hidden = tempfile.TemporaryDirectory(dir=parent, prefix=f".{name}.", ignore_cleanup_errors=True)
    with hidden as folder, open(Path(folder, "lock"), "w") as locked:
        lock(locked, f"{folder} is in use; try again")
        draft = Path(folder, "draft")  # made after the lock: see the loop above
        draft.mkdir()
        yield draft


def remove_if_dead(folder: Path) -> None:
    """Remove the hidden folder of another process, unless that process is alive."""
    path = folder / "lock"
    with contextlib.suppress(UserError, OSError):  # it is alive, or another process removes the folder, too
        with open(path, "a") as file:
            is_locked = lock(file, "")
        # Windows has no such lock, and does not remove a file that is open. On file systems without locks, nobody
        # knows, and the folder stays
        if is_locked or os.name == "nt":
            path.unlink()
            shutil.rmtree(folder)


def name_suffix(tokenizer: str, bpe_size: int) -> str:
    """Return what a --tokenizer adds to the name of a dataset."""
    if tokenizer == "char":
        return ""
    if tokenizer == "bpe":
        return f"_bpe{bpe_size}"
    # gpt2, the name of a dataset, or a run: out/my and out/my/best.pt both add _my
    path = Path(tokenizer).resolve()
    if path.suffix == ".pt":
        path = path.parent
    return f"_{path.name}"


def parse_name(name: str) -> tuple[str, str, int] | None:
    """Return source, tokenizer and vocab_size of a built-in dataset such as words_bpe1024; None for
    any other name."""
    source, underscore, suffix = name.partition("_")
    if source not in SOURCES:
        return None
    if not underscore:
        return source, "char", BPE_SIZE
    if source == "fineweb":  # its tokens are GPT-2's, and no others
        return None
    if suffix == "gpt2":
        return source, "gpt2", BPE_SIZE
    match = re.fullmatch(r"bpe([1-9]\d*)", suffix)
    return (source, "bpe", int(match[1])) if match else None


def existing(name: str) -> Path:
    """Return the path of a file or folder. Raises UserError if there is none."""
    path = Path(name)
    if not name or not path.exists():
        raise UserError(f"no file or folder {name!r}{did_you_mean(name, SOURCES)}; see --help for the sources")
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{name} is a pipe or a device, and a text is read more than once; save it as a file")
    return path


# ----------------------------------------------------------------------------- sources of text


def open_source(source: str, file: str, documents: str) -> Text:
    """Open a source. To add a source, write a function like open_words() for documents, or open_python()
    for one long text, call it here, and put its name into SOURCES, and into LISTS if each document
    is a line. A file to download needs only entries in SOURCES, URLS and SHA256."""
    if source == "words":
        return open_words()
    if source == "python":
        return open_python()
    if source in URLS:
        path = fetch_source(source, file)
        return open_files([path], documents, source)
    paths = files_of(Path(source))
    print_if_tables(paths)
    return open_files(paths, documents, source)


def open_words() -> Text:
    """Open a list of the lower-case words in Python's library, each once. Needs no download."""
    text = "\n".join(read_library())
    words = re.findall(r"\b[a-z]{2,15}\b", text)
    return split_documents(sorted(set(words)), "words")


def open_python() -> Text:
    """Open the source code of Python's library, about 10 MB. Every tenth file is validation. Needs
    no download."""
    texts = read_library()
    train = "".join(text for i, text in enumerate(texts) if i % 10 != 9)
    val = "".join(texts[9::10])
    return {"train": lambda: [train], "val": lambda: [val]}


def read_library() -> list[str]:
    """Read the .py files of Python's library that have printable ASCII only, without tests and
    packages, in the order of their paths."""
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if skipped.intersection(parts):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if re.fullmatch(r"[\n -~]+", text):
            texts.append(text)
    return texts


def fetch_source(source: str, file: str) -> Path:
    """Return the file of names or shakespeare: the user's copy, or else a download, which is kept.
    Raises UserError if its SHA-256 differs from SHA256."""
    path = existing(file) if file else DOWNLOADS / f"{source}.txt"
    if not path.exists():
        download(URLS[source], path, NO_NETWORK, SHA256[source])
    if sha256_of(path) != SHA256[source]:
        raise UserError(f"{path} does not have the SHA-256 of {source}; delete it, or leave out --file")
    return path


def files_of(source: Path) -> list[Path]:
    """Return a file as a list; for a folder, the files in it and in its folders, sorted, without
    hidden files, files in data/, and binary files. Prints how many binary files there are."""
    if not source.is_dir():
        return [source]
    paths = []
    left_out = []
    for path in sorted(walk(source)):
        if path.is_file() and b"\0" not in beginning_of(path):
            paths.append(path)
        elif path.is_file() or path.is_symlink():
            left_out.append(path)
    if left_out:
        some = ", ".join(map(str, left_out[:3]))
        if len(left_out) > 3:
            some += " ..."
        what = "left out as binary, UTF-16 or broken links"
        print(f"note: {what}: {len(left_out):,} ({some}); files read: {len(paths):,}")
    return paths


def walk(source: Path) -> Iterator[Path]:
    """Yield the files in a folder and in its folders, hidden ones and data/ excepted. Links to folders
    are followed, and each folder is read once. Raises OSError if a folder cannot be read."""

    def fail(error: OSError) -> None:
        raise error

    data = DATA.resolve()
    known = set()
    for folder, folders, files in os.walk(source, followlinks=True, onerror=fail):
        real = Path(folder).resolve()
        if real in known or data in (real, *real.parents):
            folders.clear()
            continue
        known.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            if not name.startswith("."):
                yield Path(folder, name)


def beginning_of(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(BEGINNING)


def print_if_tables(paths: list[Path]) -> None:
    """Print a note if at least half of the files are tables: a model would also learn their commas and
    braces."""
    tables = list(filter(is_table, paths))
    if tables and 2 * len(tables) >= len(paths):
        print(f"note: {tables[0]} looks like JSON or CSV; to train on its texts alone, see docs/howto.md")


def is_table(path: Path) -> bool:
    """Has a file the name of JSON or a table, or does it begin like JSON: { "text":"""
    if path.suffix.lower() in (".json", ".jsonl", ".csv", ".tsv"):
        return True
    text = beginning_of(path).decode("utf-8-sig", errors="replace")
    return re.match(r'\s*(\[\s*)?\{\s*"[^"\n]*"\s*:', text) is not None


def open_files(paths: list[Path], documents: str, source: str) -> Text:
    """Open the text of files: as documents, or as one long text, of which the first 90 % of the
    characters are the training split."""
    if documents != "none":
        texts = find_documents(paths, documents, source)
        return split_documents(texts, source)
    print_repeated_files(paths)
    n = sum(map(len, read_text(paths)))
    cut = int(0.9 * n)
    if cut == 0:
        skipped = "hidden files, binary ones and those in data/ are skipped"
        raise UserError(f"{source} has too little text to split; give more ({skipped})")
    return {"train": lambda: read_text(paths, 0, cut), "val": lambda: read_text(paths, cut, n)}


def print_repeated_files(paths: list[Path]) -> None:
    """Print how many files repeat another one."""
    sizes = {path: path.stat().st_size for path in paths}
    counts = Counter(sizes.values())
    hashes = []
    for path, size in sizes.items():
        if size > 0 and counts[size] > 1:  # only files of one size can be equal
            hashes.append(sha256_of(path))
    repeated = len(hashes) - len(set(hashes))
    if repeated > 0:
        what = f"{repeated:,} of {len(paths):,} files repeat another one"
        print(f"note: {what}; parts of val can be in train, too, which makes the val loss lower")


# ----------------------------------------------------------------------------- documents


def find_documents(paths: list[Path], documents: str, source: str) -> list[str]:
    """Return the documents of files: their lines, the files, or the text between certain lines.
    documents: as the option."""
    if documents == "files" and len(paths) < 2:
        raise UserError(f"{source} has one text file or none; give a folder of them, or --documents=lines")
    if not documents.strip():
        raise UserError("--documents is empty; use lines, files, blank, or the line that separates them")
    texts = ("".join(read_text([path])) for path in paths)  # one at a time in memory
    if documents == "lines":
        lines = []
        for text in texts:
            lines += text.split("\n")
        return lines
    if documents == "files":
        return [text.strip("\n") for text in texts]
    line = "" if documents == "blank" else documents.strip()
    return split_at_lines(texts, line, source)


def split_at_lines(texts: Iterable[str], line: str, source: str) -> list[str]:
    """Split texts at each line that is `line`, perhaps with blanks around it; "": at blank lines.
    Prints how often `line` is inside of longer lines. Raises UserError if nothing is split."""
    blanks = r"[ \t]*"
    # Around "", blanks + blanks would be slow: a long run of blanks can be divided in many ways
    separator = blanks + re.escape(line) + blanks if line else blanks
    documents = []
    n_separators = 0
    n_inside = 0  # in longer lines
    for text in filter(None, texts):
        parts = re.split(f"^{separator}$", text.strip("\n"), flags=re.MULTILINE)
        n_separators += len(parts) - 1
        for part in parts:
            documents.append(part.strip("\n"))
            if line:
                n_inside += part.count(line)
    if n_separators == 0:
        missing = f"line {line!r}" if line else "blank line"
        hint = did_you_mean(line, ("lines", "files", "blank", "none"))
        if n_inside:
            hint = f" (but it is inside of lines, {n_inside:,} times)"
        raise UserError(f"{source} has no {missing}{hint}; give the line that separates its documents")
    if n_inside:
        print(f"note: {n_inside:,} more {line!r} are inside of longer lines; documents are not split there")
    return documents


def split_documents(documents: list[str], source: str) -> Text:
    """Shuffle the documents that have text, and split them 80/10/10 as the makemore lectures do.
    Prints how many documents repeat another one."""
    documents = [text for text in documents if text.strip(" \t\v\f\n")]
    n = len(documents)
    if n < 10:
        raise UserError(f"{source} has {n} documents with text, too few to split; give 10 or more")
    random.Random(42).shuffle(documents)
    n1 = int(0.8 * n)
    n2 = int(0.9 * n)
    train = documents[:n1]
    val = documents[n1:n2]
    test = documents[n2:]
    print_repeated(documents, train, val)
    return {"train": lambda: train, "val": lambda: val, "test": lambda: test}


def print_repeated(documents: list[str], train: list[str], val: list[str]) -> None:
    """Print how many documents repeat another one. A model can memorize documents of val that are
    also in train, so the loss on val says less about new documents."""
    n = len(documents)
    repeated = n - len(set(documents))
    if repeated == 0:
        return
    note = f"note: {repeated:,} of {n:,} documents repeat another one"
    known = set(train)
    again = sum(text in known for text in val)
    if again:
        note += f"; {again:,} of {len(val):,} in val are in train, too, which makes the val loss lower"
    print(note)


# ----------------------------------------------------------------------------- text files


def read_text(paths: list[Path], start: int = 0, stop: int = 1 << 62) -> Iterator[str]:
    """Yield characters start to stop of the text of files, in pieces that end where a word ends."""
    at = 0  # characters read so far: text, below, is the characters at to at + len(text)
    rest = ""  # characters to yield, whose last word may not be complete
    for text in read_files(paths):
        rest += text[max(start - at, 0) : max(stop - at, 0)]
        at += len(text)
        end = last_word_end(rest)
        if end:
            yield rest[:end]
            rest = rest[end:]
    yield rest


def last_word_end(text: str) -> int:
    """Return the end of the last word that is followed by a blank or a newline, or 0 if there is none.
    No token spans that position, so a cut there changes no token."""
    match = re.match(r".*\S(?=[ \n])", text, re.DOTALL)
    if match:
        return match.end()
    # Without such a word, a long text is cut at its end
    return len(text) if len(text) >= CHUNK else 0


def read_files(paths: list[Path]) -> Iterator[str]:
    """Yield the text of files, one after the other. A newline is added to a file that does not end
    with one, if more text follows."""
    advice = ", or move it out of the folder" if len(paths) > 1 else ""
    last = "\n"  # the last character so far
    for path in paths:
        newline = "" if last == "\n" else "\n"
        for text in read_file(path, advice):
            yield newline + text
            newline = ""
            last = text[-1]


def read_file(path: Path, advice: str) -> Iterator[str]:
    """Yield the text of a file, at most CHUNK characters at a time, without a byte order mark, and
    with \\n at the end of each line. Raises UserError if it is not UTF-8. advice: the end of the message."""
    beginning = beginning_of(path)
    for first_bytes, what in NO_TEXT.items():
        if beginning.startswith(first_bytes):
            raise UserError(f"{path} {what}{advice}")
    show = progress(f"reading {path}", path.stat().st_size)
    with open(path, encoding="utf-8-sig") as file:
        try:
            while text := file.read(CHUNK):
                show(file.buffer.tell())
                refuse_nul(text, path)
                yield text
        except UnicodeDecodeError as error:
            # error.start counts from the beginning of error.object, the last bytes that were read
            byte = file.buffer.tell() - len(error.object) + error.start
            raise UserError(f"{path} is not UTF-8 at byte {byte}; save it as UTF-8{advice}") from error


def refuse_nul(text: str, path: Path | str) -> None:
    """Raise UserError if there are NUL characters. English letters in UTF-16 are one NUL byte and
    one byte as in UTF-8, so a program that expects UTF-8 finds no error."""
    n = text.count("\0")
    if n:
        what = f"{path} has {n:,} NUL characters or more, so it is no UTF-8 text"
        raise UserError(f"{what}; if it is UTF-16, save it as UTF-8")


# ----------------------------------------------------------------------------- the tokenizer


def tokenizer_for(text: Text, documents: str, kind: str, vocab_size: int) -> Tokenizer:
    """Make a tokenizer for a text (char, bpe), or open one (gpt2, a dataset or a run). kind: as the
    option --tokenizer. vocab_size: for bpe. Raises UserError."""
    if kind == "char":
        return char_tokenizer(text, documents)
    if kind == "bpe":
        return bpe_tokenizer(text, documents, vocab_size)
    tokenizer = open_tokenizer(kind)
    if isinstance(tokenizer, NumberTokenizer):
        raise UserError(f"the tokenizer of {kind} is unknown, so it encodes no text; use another --tokenizer")
    return tokenizer


def has_several_lines(documents: str) -> bool:
    """Can a document have several lines? Then the separator is END instead of a newline."""
    return documents not in ("none", "lines")


def char_tokenizer(text: Text, documents: str) -> CharTokenizer:
    """Make a tokenizer with one token per character of the text, and one for the separator."""
    chars = set()
    for read in text.values():
        for piece in read():
            chars.update(piece)
    if documents == "lines":
        chars.add("\n")
    vocabulary = sorted(chars)
    if has_several_lines(documents):
        vocabulary.append(END)
    return CharTokenizer(vocabulary)


def bpe_tokenizer(text: Text, documents: str, vocab_size: int) -> BPETokenizer:
    """Train BPE on the training split. The separator is one of the vocab_size tokens."""
    train = text["train"]()
    if documents != "none":
        # A newline ends each document, so that no token spans two of them
        train = "".join(f"{document}\n" for document in train)
    if not has_several_lines(documents):
        return BPETokenizer(train_bpe(train, vocab_size))
    if vocab_size < 257:
        raise UserError(f"vocab_size={vocab_size} has no room for 256 bytes and {END}; use 257 or more")
    ranks = train_bpe(train, vocab_size - 1)
    # No text becomes this token: tokenizer.PATTERN cuts <|endoftext|> into <|, endoftext and |>
    ranks[END.encode()] = len(ranks)
    return BPETokenizer(ranks)


def open_tokenizer(name: str) -> Tokenizer:
    """Open the tokenizer of GPT-2, a dataset, a run or a checkpoint. Raises UserError."""
    if name == "gpt2":
        return BPETokenizer()
    if (DATA / name / "meta.json").exists() or parse_name(name):
        return load(name).tokenizer
    path = Path(name)
    is_path = path.is_dir() or "/" in path.as_posix()
    exported = path / "tokenizer_config.json"  # by gpt2.save_gpt2()
    if exported.is_file():
        fields = json.loads(exported.read_text(encoding="utf-8"))
        if "count2gpt" in fields:
            return make_tokenizer(fields["count2gpt"])
    if path.is_dir():
        path = path / "best.pt"
    advice = "use a run of train.py, such as --tokenizer=out/my"
    if path.is_file():
        return tokenizer_of_run(path, advice)
    if is_path:
        raise UserError(f"no checkpoint {path}, and no dataset {name}; {advice}, or the name of a dataset")
    prepared = prepared_names()
    similar = did_you_mean(name, [*TOKENIZERS, *prepared])
    raise UserError(f"no dataset {DATA / name}{similar}; use char, bpe, gpt2, a dataset, or a run such as out/my")


def tokenizer_of_run(path: Path, advice: str) -> Tokenizer:
    """Open the tokenizer in a checkpoint. Raises UserError, whose message ends with the advice."""
    checkpoint = load_tensors(path, advice)
    if not isinstance(checkpoint, dict) or "tokenizer" not in checkpoint:
        raise UserError(f"{path} has no tokenizer; {advice}")
    return make_tokenizer(checkpoint["tokenizer"])


def find_separator(tokenizer: Tokenizer, documents: str, kind: str) -> int | None:
    """Return the id that starts and ends each document, or None without documents. kind: the
    tokenizer's name for the error. Raises UserError if the tokenizer has no such token."""
    if documents == "none":
        return None
    if not has_several_lines(documents):
        return tokenizer.encode("\n", "use another --tokenizer")[0]
    separator = end_id(tokenizer)  # END's id
    if separator is None:
        raise UserError(f"{kind} has no token for the end of documents of several lines; use another --tokenizer")
    return separator


# ----------------------------------------------------------------------------- from text to tokens


def encode_text(text: Text, tokenizer: Tokenizer, separator: int | None, kind: str) -> Encoded:
    """Encode the splits of a text. kind: as the option --tokenizer. Characters that are not in the
    vocabulary raise UserError, when their piece is asked for."""
    advice = "leave them out of the text"
    # A model in a run needs the tokens of that run: BPE trained on this text does not fit it
    if not Path(kind).exists():
        advice += ", or use --tokenizer=bpe"
    encoded = Encoded(tokenizer, separator)
    for split, read in text.items():
        pieces = read()
        if separator is None:
            encoded.splits[split] = encode_pieces(pieces, tokenizer, advice)
        else:
            encoded.splits[split] = encode_documents(pieces, tokenizer, separator, advice)
            encoded.n_documents[split] = len(pieces)
    return encoded


def encode_pieces(pieces: Iterable[str], tokenizer: Tokenizer, advice: str) -> Pieces:
    for piece in pieces:
        ids = tokenizer.encode(piece, advice)
        # Count the bytes of the tokens, as a tokenizer may write é in another form than the piece
        yield ids, len(tokenizer.decode_bytes(ids))


def encode_documents(documents: Iterable[str], tokenizer: Tokenizer, separator: int, advice: str) -> Pieces:
    """Yield a separator, and then each document with a separator after it."""
    # As text, a newline is one byte, and END is nothing
    separator_bytes = 0 if separator == end_id(tokenizer) else 1
    yield [separator], separator_bytes
    for ids, n_bytes in encode_pieces(documents, tokenizer, advice):
        yield [*ids, separator], n_bytes + separator_bytes


def print_decomposed(text: Text) -> None:
    """Print how many accents are characters of their own, as in e and U+0301 instead of é: for
    BPE, that is another text, though it looks the same."""
    n = 0
    for read in text.values():
        for piece in read():
            if not piece.isascii():
                n += count_decomposed(piece)
    if n > 0:
        advice = "prompts must be so, too; unicodedata.normalize('NFC', text) joins them"
        print(f"note: {n:,} accents are characters of their own (e and U+0301 in place of é); {advice}")


def count_decomposed(text: str) -> int:
    """Count the characters that joining each letter with its accents would save."""
    n = 0
    for word in text.split():
        joined = unicodedata.normalize("NFC", word)
        # NFC makes some words longer, in Hindi for example: these are not subtracted
        n += max(0, len(word) - len(joined))
    return n


# ----------------------------------------------------------------------------- sources of tokens


def open_fineweb(folder: Path, shards: int) -> Encoded:
    """Open FineWeb (Penedo et al. 2024) in GPT-2's tokens, 100M per shard. folder: the user's
    shards, or DOWNLOADS, where missing shards are downloaded."""
    tokenizer = BPETokenizer()
    token_bytes = bytes_of_tokens(tokenizer)
    train = [f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1)]
    val = ["fineweb_val_000000.bin"]
    splits = {
        "train": read_shards(folder, train, token_bytes),
        "val": read_shards(folder, val, token_bytes),
    }
    return Encoded(tokenizer, splits=splits)


def read_shards(folder: Path, names: list[str], token_bytes: np.ndarray) -> Pieces:
    """Yield the tokens of shards, one after the other. token_bytes (V,): see bytes_of_tokens()."""
    for name in names:
        path = folder / name
        if folder == DOWNLOADS and not path.exists():
            download(URLS["fineweb"] + name, path, NO_NETWORK)
        shard = open_shard(path)
        for ids in cut_ids(shard):
            yield ids, int(token_bytes[ids].sum())


def open_shard(path: Path) -> np.ndarray:
    """Open the token ids of a shard, (n,). Raises UserError if it is missing or damaged."""
    header = np.fromfile(existing(str(path)), dtype="<i4", count=3).tolist()
    # The header, 1,024 bytes, starts with a magic number, a version and the number of tokens
    n_tokens = (path.stat().st_size - 1024) / 2
    if header != [20240520, 1, n_tokens]:
        raise UserError(f"{path} is no whole shard; delete it, and try again")
    return np.memmap(path, dtype="<u2", mode="r", offset=1024)


def has_tokens(source: str) -> bool:
    """Is the source a folder with token ids instead of text, or such a file?"""
    if source in SOURCES:
        return False
    arrays = ("train.npy", "val.npy")  # the right content in the wrong format
    has_arrays = all(Path(source, name).is_file() for name in arrays)
    return Path(source).name in ("train.bin", "val.bin") or Path(source, "train.bin").is_file() or has_arrays


def open_tokens(folder: Path, kind: str, vocab_size: int) -> Encoded:
    """Open a folder with train.bin, val.bin, and perhaps test.bin: raw token ids as nanoGPT writes
    them (uint16; uint32 if the vocabulary is larger than 65,536). kind: the tokenizer that made
    them. For char, the default, it is unknown, and the tokens are the numbers below vocab_size."""
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; give its folder, {folder.parent}, with train.bin and val.bin")
    if (folder / "meta.json").exists():
        name = shlex.quote(folder.resolve().name)
        raise UserError(f"{folder} is a dataset already; use its name, --dataset={name}")
    missing = [name for name in ("train.bin", "val.bin") if not (folder / name).is_file()]
    if missing:
        what = f"{folder} has token ids, but no {' and no '.join(missing)}"
        raise UserError(f"{what}; {how_to_write(dtype_of_ids(vocab_size), missing[0])}")
    is_unnamed = kind == "char"
    if kind == "bpe" or (is_unnamed and vocab_size == 0):
        advice = "add --tokenizer=gpt2 if that made them, or --vocab_size= to take them as numbers, or prepare the text"
        raise UserError(f"{folder} has train.bin and val.bin, which are token ids; {advice}")
    tokenizer = NumberTokenizer(vocab_size) if is_unnamed else open_tokenizer(kind)
    token_bytes = bytes_of_tokens(tokenizer)
    encoded = Encoded(tokenizer)
    for split in ("train", "val", "test"):
        path = folder / f"{split}.bin"
        if path.is_file():
            encoded.splits[split] = read_ids(path, token_bytes)
    return encoded


def read_ids(path: Path, token_bytes: np.ndarray) -> Pieces:
    """Yield the tokens in a file of raw ids. token_bytes (V,): see bytes_of_tokens(). Raises
    UserError if an id is V or larger, or if the file looks like one of another type."""
    vocab_size = len(token_bytes)
    dtype = dtype_of_ids(vocab_size)
    how = how_to_write(dtype, path.name)
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        what = f"{path} has {size:,} bytes, not a multiple of the {dtype.itemsize} of an id ({dtype.name})"
        raise UserError(f"{what}; copy it again, or {how}")
    tokens = np.memmap(path, dtype=dtype, mode="r")
    must = f"ids of a vocabulary of {vocab_size:,} tokens must be {dtype.name} (little-endian)"
    is_npy = beginning_of(path).startswith(b"\x93NUMPY")
    other = ".npy" if is_npy else other_type(tokens[:CHUNK])
    if other:
        raise UserError(f"{path} looks like {other}, and {must}; {how}")
    for ids in cut_ids(tokens):
        largest = ids.max()
        if largest >= vocab_size:
            advice = f"{how}; if it is of that type, give the right --tokenizer or --vocab_size"
            raise UserError(f"{path} has the id {largest:,}, and {must}, below {vocab_size:,}; {advice}")
        yield ids, int(token_bytes[ids].sum())


def how_to_write(dtype: np.dtype, name: str) -> str:
    return f'write ids.astype("{dtype.str}").tofile("{name}")'


def other_type(ids: np.ndarray) -> str:
    """Return the type that ids (n,) were written in if it is not the type that they are read in, or
    else "". A few ids say too little."""
    itemsize = ids.dtype.itemsize
    if len(ids) < 64:
        return ""
    for size in (8, 4):
        # An int64 below 65,536 is four uint16: the number, 0, 0, 0
        n = size // itemsize
        whole = len(ids) // n * n
        groups = ids[:whole].reshape(-1, n)  # (n_numbers, n)
        numbers = groups[:, 0]
        rest = groups[:, 1:]
        has_numbers = np.count_nonzero(numbers) > len(numbers) / 2
        if n > 1 and has_numbers and not rest.any():
            return f"int{8 * size}"
    # The high byte of an id varies less than its low byte. (If ids are drawn at random from all 65,536, both vary
    # equally, so the limit is a little higher)
    high = np.unique(ids >> 8 * (itemsize - 1))
    low = np.unique(ids & 255)
    return f"big-endian {ids.dtype.name}" if len(high) > 1.25 * len(low) + 4 else ""


def cut_ids(ids: np.ndarray) -> list[np.ndarray]:
    """Cut ids (n,) into pieces of at most CHUNK ids."""
    return np.array_split(ids, len(ids) // CHUNK + 1)


def bytes_of_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """Return how many bytes of text each token stands for, (V,): 0 for END, or if unknown."""
    n_bytes = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    if isinstance(tokenizer, NumberTokenizer):
        return n_bytes
    end = end_id(tokenizer)
    for i in range(tokenizer.vocab_size):
        if i != end:
            n_bytes[i] = len(tokenizer.decode_bytes([i]))
    return n_bytes


# ----------------------------------------------------------------------------- write a dataset


def write_dataset(folder: Path, source: str, encoded: Encoded) -> None:
    """Make a folder with the splits, such as train.bin, and meta.json, which describes them."""
    folder.mkdir()
    vocab_size = encoded.tokenizer.vocab_size
    dtype = dtype_of_ids(vocab_size)
    splits = {}
    for split, pieces in encoded.splits.items():
        splits[split] = write_tokens(folder / f"{split}.bin", pieces, dtype)
        if split in encoded.n_documents:
            splits[split]["documents"] = encoded.n_documents[split]
    start_token = encoded.separator
    if start_token is None:
        start_token = find_start_token(folder / "train.bin", dtype, encoded.tokenizer)
    meta = {
        "format": FORMAT,
        "source": source,
        "tokenizer": encoded.tokenizer.to_dict(),
        "vocab_size": vocab_size,
        "dtype": dtype.name,
        "separator": encoded.separator,  # documents are split at it
        "splits": splits,
        "start_token": start_token,  # samples start with it
    }
    meta["sha256"] = checksum(meta)
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def dtype_of_ids(vocab_size: int) -> np.dtype:
    """Return the type of the ids in .bin files: little-endian, two bytes if these suffice."""
    return np.dtype("<u2" if vocab_size <= 65_536 else "<u4")


def write_tokens(path: Path, pieces: Pieces, dtype: np.dtype) -> dict:
    """Write the tokens of a split. Returns the split's entry in meta.json."""
    tokens = 0
    n_bytes = 0
    with open(path, "wb") as file:
        for ids, size in pieces:
            file.write(np.asarray(ids, dtype=dtype).tobytes())
            tokens += len(ids)
            n_bytes += size
    return {"tokens": tokens, "bytes": n_bytes, "sha256": sha256_of(path)}


def find_start_token(path: Path, dtype: np.dtype, tokenizer: Tokenizer) -> int | None:
    """Return END if it occurs among the first tokens of a file, or else None. A document starts
    after each END, so a sample that starts with it is a new document."""
    end = end_id(tokenizer)
    if end is None:
        return None
    beginning = np.fromfile(path, dtype=dtype, count=1 << 24)
    return end if end in beginning else None


def move_into_place(new: Path, folder: Path, aside: Path) -> None:
    """Move a new folder to its place. The old folder is moved aside, and back if the move fails."""
    if folder.exists():
        move(folder, aside)
    try:
        move(new, folder)
    finally:
        if aside.exists() and not folder.exists():
            move(aside, folder)


def print_dataset(data: Dataset) -> None:
    print(f"{DATA / data.name}: a vocabulary of {data.vocab_size:,} tokens, stored as {data.train.dtype.name}")
    for split, entry in data.splits.items():
        counts = [f"{n:>14,} {unit}" for unit, n in entry.items() if unit != "sha256"]
        print(f"  {split:5}", *counts)
    beginning = data.tokenizer.decode(data.train[:100].tolist())
    lines = beginning.replace(END, "\n").strip("\n").split("\n")
    print("  first line:", lines[0])


# ----------------------------------------------------------------------------- datasets by name


def prepare_built_in(name: str) -> None:
    """Prepare a built-in dataset on its first use, except fineweb, whose download is large. Raises
    UserError."""
    built_in = parse_name(name)
    if built_in is None or name == "fineweb":
        raise UserError(no_dataset(name))
    print(f"preparing {name}, on first use")
    source, tokenizer, vocab_size = built_in
    prepare(source, tokenizer, vocab_size)


def no_dataset(name: str) -> str:
    """Return an error: there is no dataset of that name, and what to do."""
    path = Path(name)
    if (path / "meta.json").exists():
        return f"{name} is not the name of a dataset; use --dataset={shlex.quote(path.name)}"
    if name and path.exists():
        kind = "folder" if path.is_dir() else "file"
        command = f"python prepare_data.py {shlex.quote(name)}"
        made = to_name(path.resolve().stem)
        return f"{name} is a {kind}, not a dataset; run: {command}, then use --dataset={made}"
    prepared = prepared_names()
    known = ["bpe", "gpt2", *SOURCES, *prepared]
    others = [other for other in known if other != name]
    similar = did_you_mean(path.name, others)
    command = name if name == "fineweb" else f"YOUR_TEXT.txt --name={to_name(path.name)}"
    return f"no dataset {DATA / name}{similar}; run: python prepare_data.py {command}"


def prepared_names() -> list[str]:
    """Return the names of all datasets in data/."""
    return [path.parent.name for path in DATA.glob("*/meta.json")]


# ----------------------------------------------------------------------------- the script


def refuse_unused(options: Options) -> None:
    """Raise UserError if an option was given that has no effect on this source and tokenizer."""
    tokens = has_tokens(options.source)
    useful = {
        "documents": options.source not in SOURCES and not tokens,
        "file": options.source in URLS,
        "tokenizer": options.source != "fineweb",
        "vocab_size": options.tokenizer == "bpe" or (tokens and options.tokenizer == "char"),
        "shards": options.source == "fineweb",
    }
    for name, is_useful in useful.items():
        is_given = getattr(options, name) != getattr(Options, name)
        if is_given and not is_useful:
            raise UserError(f"--{name} has no effect here; leave it out, or see --help")


def main() -> None:
    options = parse(Options, __doc__, argument="source")
    refuse_unused(options)
    for name in ("SIGTERM", "SIGHUP", "SIGBREAK"):  # the last one is Ctrl-Break on Windows
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)  # as Ctrl-C: the hidden folder is removed
    prepare(**vars(options))


if __name__ == "__main__":
    run(main)
