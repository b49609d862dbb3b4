"""Turn a text into data/<dataset>/, the tokens that the training scripts open with dataset.load(name).

    python prepare_data.py words                      # no download: words from the Python library
    python prepare_data.py shakespeare                # tiny Shakespeare, one token per character
    python prepare_data.py my.txt --tokenizer=bpe     # your own text, with BPE trained on it

Read micrograd.py or bigram.py next. The splits are raw little-endian token ids (train.bin ...);
meta.json has the tokenizer. In a list, a newline token starts and ends each document, \\n emma \\n;
if documents have several lines, <|endoftext|> does.
"""

import hashlib
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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from console import NonNegative, PathStr, Positive, UserError, did_you_mean, option, parse, progress, run
from download import download
from files import DATA, DOWNLOADS, load_tensors, move, sha256_of
from tokenizer import END, CharTokenizer, Tokenizer, make_tokenizer

CHUNK = 1 << 18  # characters or tokens at a time; tiktoken cannot encode a million blanks
BEGINNING = 1 << 13  # first bytes of a file: a NUL among them means that it is not text
BPE_SIZE = 1024  # default vocabulary of --tokenizer=bpe
TOKENIZERS = ("char", "bpe", "gpt2")  # a dataset may not have these names
SOURCES = ("words", "python", "names", "shakespeare", "fineweb")
LISTS = ("words", "names")  # sources with one document per line
NAMES = Path(__file__).with_name("data") / "names.txt"
URLS = {
    "shakespeare": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "fineweb": "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/",
}
SHA256 = {
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
}
NO_NETWORK = "give a copy with --file=, or use words, names or python, which need no download"


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


def prepare(source, tokenizer="char", vocab_size=0, file="", name="", documents="none", shards=1) -> None:
    """Make data/<dataset>, whole or not at all. Parameters as in Options. Raises UserError."""
    bpe_size = vocab_size or BPE_SIZE
    name = choose_name(name, source, tokenizer, bpe_size)
    DATA.mkdir(exist_ok=True)
    folder = (DATA / name).resolve()  # data/<dataset> can be a link to another disk
    if not folder.parent.is_dir():
        raise UserError(f"{DATA / name} is a link to {folder}, which is not there; mount its disk, or delete the link")
    # The dataset is made in a hidden folder, and then moved: nobody reads a dataset that is half done. If this
    # process is killed, the hidden folder stays. It is safe to delete
    hidden = tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}.", ignore_cleanup_errors=True)
    with hidden:
        new = Path(hidden.name, "new")
        new.mkdir()
        if source == "fineweb":
            ids, made = open_fineweb(Path(file or DOWNLOADS), shards)
            write_ids(new, source, ids, made)
        elif has_ids(source):
            ids, made = open_ids(Path(source), tokenizer, vocab_size)
            write_ids(new, source, ids, made)
        else:
            if source in LISTS:
                documents = "lines"
            splits = open_source(source, file, documents)
            between = {"none": "", "lines": "\n"}.get(documents, END)
            made = tokenizer_for(splits, between, tokenizer, bpe_size)
            write_text(new, source, splits, between, made, tokenizer)
        move_into_place(new, folder)
    print_dataset(name, made)


def write_text(folder: Path, source: str, splits: dict, between: str, tokenizer: Tokenizer, kind: str) -> None:
    """Encode a text, and write the dataset into a folder. between: what starts and ends each document. kind:
    the option --tokenizer. Raises UserError if characters are not in the vocabulary."""
    advice = "leave them out of the text"
    # A model in a run needs the tokens of that run: BPE trained on this text does not fit it
    if not Path(kind).exists():
        advice += ", or use --tokenizer=bpe"
    dtype = dtype_of_ids(tokenizer.vocab_size)
    separators = separators_of(tokenizer, between, kind)
    # As text, a newline is one byte, and END is nothing
    separator_bytes = 1 if between == "\n" else 0
    entries = {}
    for split, pieces in splits.items():
        path = folder / f"{split}.bin"
        with open(path, "wb") as file:
            file.write(np.array(separators, dtype=dtype).tobytes())
            n_tokens = len(separators)
            n_bytes = separator_bytes
            for piece in pieces:
                ids = tokenizer.encode(piece, advice)
                n_bytes += len(piece.encode()) + separator_bytes
                ids += separators
                file.write(np.array(ids, dtype=dtype).tobytes())
                n_tokens += len(ids)
        entries[split] = {"tokens": n_tokens, "bytes": n_bytes, "sha256": sha256_of(path)}
        if between:
            entries[split]["documents"] = len(pieces)
    write_meta(folder, source, tokenizer, entries, *separators)


def separators_of(tokenizer: Tokenizer, between: str, kind: str) -> list[int]:
    """Return the token that starts and ends each document, in a list that is empty without documents. Raises
    UserError if the tokenizer, which the option `kind` names, has no such token."""
    if between != END:
        return tokenizer.encode(between, "use another --tokenizer")
    separator = tokenizer.end_id
    if separator is None:
        raise UserError(f"{kind} has no token for the end of documents of several lines; use another --tokenizer")
    return [separator]


def write_meta(folder: Path, source: str, tokenizer: Tokenizer, splits: dict, separator: int | None = None) -> None:
    """Write meta.json, which describes the splits, such as train.bin."""
    dtype = dtype_of_ids(tokenizer.vocab_size)
    start_token = separator
    end = tokenizer.end_id
    if separator is None and end is not None:
        # A document starts after each END, so a sample that starts with it is a new document
        beginning = np.fromfile(folder / "train.bin", dtype=dtype, count=1 << 24)
        start_token = end if end in beginning else None
    meta = {
        "format": 1,  # dataset.load() refuses any other number
        "source": source,
        "tokenizer": tokenizer.to_dict(),
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype.name,
        "separator": separator,  # documents are split at it
        "splits": splits,
        "start_token": start_token,  # samples start with it
    }
    meta["sha256"] = checksum(meta)  # of all other entries
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def dtype_of_ids(vocab_size: int) -> np.dtype:
    """Return the type of the ids in .bin files: little-endian, two bytes if these suffice."""
    return np.dtype("<u2" if vocab_size <= 65_536 else "<u4")


def move_into_place(new: Path, folder: Path) -> None:
    """Move a new folder to its place. The old folder is moved aside, and back if the move fails."""
    # Beside the hidden folder, which is removed in any case, while the old folder may be the only copy
    aside = Path(f"{new.parent}.old")
    try:
        if folder.exists():
            move(folder, aside)
        move(new, folder)
    finally:
        if aside.exists() and not folder.exists():
            move(aside, folder)
    shutil.rmtree(aside, ignore_errors=True)


def print_dataset(name: str, tokenizer: Tokenizer) -> None:
    meta = read_meta(name)
    print(f"{DATA / name}: a vocabulary of {tokenizer.vocab_size:,} tokens, stored as {meta['dtype']}")
    for split, entry in meta["splits"].items():
        line = f"  {split:5}"
        for unit, n in entry.items():
            if unit != "sha256":
                line += f" {n:>14,} {unit}"
        print(line)
    dtype = dtype_of_ids(tokenizer.vocab_size)
    ids = np.fromfile(DATA / name / "train.bin", dtype=dtype, count=100)
    lines = tokenizer.decode(ids.tolist()).replace(END, "\n").strip("\n").split("\n")
    print("  first line:", lines[0])


def read_meta(name: str) -> dict:
    """Read the meta.json of a dataset. Raises UserError if it is damaged. (dataset.py has its own function: it
    imports this file if data are missing, and imports go one way.)"""
    path = DATA / name / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        is_whole = meta.pop("sha256") == checksum(meta)
    except (ValueError, LookupError, TypeError, AttributeError):  # no JSON, or no dict
        is_whole = False
    if not is_whole:
        raise UserError(f"{path} is damaged; delete {path.parent}, and run prepare_data.py again")
    return meta


def checksum(meta: dict) -> str:
    """The SHA-256 of a dict of plain values."""
    return hashlib.sha256(json.dumps(meta).encode()).hexdigest()


# ----------------------------------------------------------------------------- sources of text


def open_source(source: str, file: str, documents: str) -> dict:
    """Open a source: for each split ("train", "val", and "test" if there is one) its documents, or the pieces of one
    long text. To add a source, write a function like open_words() for documents, or open_python()
    for one long text, call it here, and put its name into SOURCES, and into LISTS if each document
    is a line. A file to download needs only entries in SOURCES, URLS and SHA256."""
    if source == "words":
        return open_words()
    if source == "names":
        return open_names()
    if source == "python":
        return open_python()
    paths = [fetch_source(source, file)] if source in URLS else files_of(Path(source))
    if documents != "none":
        texts = find_documents(paths, documents, source)
        return split_documents(texts, source)
    # The first 90 % of the characters are the training split
    n = sum(map(len, read_files(paths)))
    cut = int(0.9 * n)
    if cut == 0:
        skipped = "hidden files, binary ones and those in data/ are skipped"
        raise UserError(f"{source} has too little text to split; give more ({skipped})")
    return {"train": LongText(paths, 0, cut), "val": LongText(paths, cut, n)}


def open_words() -> dict:
    """Open a list of the lower-case words in Python's library, each once. Needs no download."""
    text = "\n".join(read_library())
    words = re.findall(r"\b[a-z]{2,15}\b", text)
    return split_documents(sorted(set(words)), "words")


def open_names() -> dict:
    """Open the names of the makemore lectures, which are in the repository."""
    if not NAMES.is_file():
        raise UserError(f"no file {NAMES}; copy it from the repository")
    return split_documents(find_documents([NAMES], "lines", "names"), "names")


def open_python() -> dict:
    """Open the source code of Python's library, about 10 MB. Every tenth file is validation. Needs
    no download."""
    texts = read_library()
    val = "".join(texts[9::10])
    del texts[9::10]
    train = "".join(texts)
    return {"train": [train], "val": [val]}


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


def existing(name: str) -> Path:
    """Return the path of a file or folder. Raises UserError if there is none, or if it is a pipe, as a text
    is read more than once."""
    path = Path(name)
    if not name or not (path.is_file() or path.is_dir()):
        raise UserError(f"no file or folder {name!r}{did_you_mean(name, SOURCES)}; see --help for the sources")
    return path


def fetch_source(source: str, file: str) -> Path:
    """Return the file of a source to download: the user's copy, or else a download, which is kept. Raises
    UserError if its SHA-256 differs from SHA256."""
    path = existing(file) if file else DOWNLOADS / f"{source}.txt"
    if not path.exists():
        download(URLS[source], path, NO_NETWORK, SHA256[source])
    if sha256_of(path) != SHA256[source]:
        raise UserError(f"{path} does not have the SHA-256 of {source}; delete it, or leave out --file")
    return path


def files_of(source: Path) -> list[Path]:
    """Return a file as a list; for a folder, the files in it and in its folders, sorted, without hidden files,
    data/, and binary files, whose number is printed. Links to folders are followed, and each folder is read
    once. Raises OSError if a folder cannot be read."""
    if not source.is_dir():
        return [source]

    def fail(error: OSError) -> None:
        raise error

    paths = []
    left_out = []
    known = {DATA.resolve()}
    for name, folders, files in os.walk(source, followlinks=True, onerror=fail):
        folder = Path(name)
        real = folder.resolve()
        if real in known:
            folders.clear()
            continue
        known.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            path = folder / name
            if name.startswith("."):
                continue
            if path.is_file() and b"\0" not in beginning_of(path):
                paths.append(path)
            else:
                left_out.append(path)
    if left_out:
        example = min(left_out)
        what = "left out as binary, UTF-16 or broken links"
        print(f"note: {what}: {len(left_out):,}, such as {example}; files read: {len(paths):,}")
    return sorted(paths)


def find_documents(paths: list[Path], documents: str, source: str) -> list[str]:
    """Return the documents of files: their lines, the files, or the text between certain lines, perhaps with
    blanks around them. documents: as the option. Raises UserError if there is no such line."""
    line = "" if documents == "blank" else documents.strip()
    blanks = r"[ \t]*"
    # Around "", blanks + blanks would be slow: a long run of blanks can be divided in many ways
    separator = blanks + re.escape(line) + blanks if line else blanks
    texts = []
    n_separators = 0
    for path in paths:
        text = "".join(read_file(path))
        if documents == "lines":
            parts = text.split("\n")
        elif documents == "files":
            parts = [text]
        else:
            parts = re.split(f"^{separator}$", text.strip("\n"), flags=re.MULTILINE)
            if text:
                n_separators += len(parts) - 1
        texts += [part.strip("\n") for part in parts]
    if n_separators == 0 and documents not in ("lines", "files"):
        missing = f"line {line!r}" if line else "blank line"
        similar = did_you_mean(line, ("lines", "files", "blank", "none"))
        raise UserError(f"{source} has no {missing}{similar}; give the line that separates its documents")
    return texts


def split_documents(documents: list[str], source: str) -> dict:
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
    repeated = n - len(set(documents))
    if repeated > 0:
        known = set(train)
        again = sum(text in known for text in val)
        what = f"{repeated:,} of {n:,} documents repeat another one"
        print(f"note: {what}; {again:,} of {len(val):,} in val are in train, too, where a model can memorize them")
    return {"train": train, "val": val, "test": documents[n2:]}


# ----------------------------------------------------------------------------- text files


@dataclass
class LongText:
    """Characters start to stop of the text of files. As they may be more than the memory can hold, a loop over
    them reads the files, and gives one piece after the other. A piece ends where a word ends."""

    paths: list[Path]
    start: int
    stop: int

    def __iter__(self) -> Iterator[str]:
        at = 0  # characters read so far: text, below, is the characters at to at + len(text)
        rest = ""  # characters of the next piece, whose last word may not be complete
        for text in read_files(self.paths):
            start = max(self.start - at, 0)
            stop = max(self.stop - at, 0)
            rest += text[start:stop]
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
    last = "\n"  # the last character so far
    for path in paths:
        newline = "" if last == "\n" else "\n"
        for text in read_file(path):
            yield newline + text
            newline = ""
            last = text[-1]


def read_file(path: Path) -> Iterator[str]:
    """Yield the text of a file, at most CHUNK characters at a time, without a byte order mark, and
    with \\n at the end of each line. Raises UserError if it is not UTF-8."""
    beginning = beginning_of(path)
    for first_bytes, what in NO_TEXT.items():
        if beginning.startswith(first_bytes):
            raise UserError(f"{path} {what}")
    show = progress(f"reading {path}", path.stat().st_size)
    with open(path, encoding="utf-8-sig") as file:
        try:
            while text := file.read(CHUNK):
                show(file.buffer.tell())
                # English letters in UTF-16 are one NUL byte and one byte as in UTF-8: no error of UTF-8
                if "\0" in text:
                    raise UserError(f"{path} has NUL characters, so it is not UTF-8; if it is UTF-16, save it as UTF-8")
                yield text
        except UnicodeDecodeError as error:
            # error.start counts from the beginning of error.object, the last bytes that were read
            byte = file.buffer.tell() - len(error.object) + error.start
            raise UserError(f"{path} is not UTF-8 at byte {byte}; save it as UTF-8, or leave it out") from error


def beginning_of(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(BEGINNING)


# ----------------------------------------------------------------------------- the tokenizer


def tokenizer_for(splits: dict, between: str, kind: str, vocab_size: int) -> Tokenizer:
    """Make a tokenizer for a text (char, bpe), or open one (gpt2, a dataset or a run). between: what starts and
    ends each document. kind: as the option --tokenizer. vocab_size: for bpe. Raises UserError."""
    if kind == "char":
        return char_tokenizer(splits, between)
    if kind == "bpe":
        return bpe_tokenizer(splits["train"], between, vocab_size)
    from lessons.bpe import NumberTokenizer  # here: the root imports no lesson at its top

    tokenizer = open_tokenizer(kind)
    if isinstance(tokenizer, NumberTokenizer):
        raise UserError(f"the tokenizer of {kind} is unknown, so it encodes no text; use another --tokenizer")
    return tokenizer


def char_tokenizer(splits: dict, between: str) -> CharTokenizer:
    """Make a tokenizer with one token per character of the text, and one for what is between documents."""
    chars = set()
    for pieces in splits.values():
        for piece in pieces:
            chars.update(piece)
    if between == END:
        return CharTokenizer([*sorted(chars), END])
    chars.update(between)
    return CharTokenizer(sorted(chars))


def bpe_tokenizer(train: Iterable[str], between: str, vocab_size: int) -> Tokenizer:
    """Train BPE on the training split. END is one of the vocab_size tokens, if it is between documents."""
    from lessons.bpe import BPETokenizer, train_bpe  # here: the root imports no lesson at its top

    if between:
        # A newline ends each document, so that no token spans two of them
        train = "".join(f"{document}\n" for document in train)
    if between != END:
        return BPETokenizer(train_bpe(train, vocab_size))
    if vocab_size < 257:
        raise UserError(f"vocab_size={vocab_size} has no room for 256 bytes and {END}; use 257 or more")
    ranks = train_bpe(train, vocab_size - 1)
    # No text becomes this token: bpe.PATTERN cuts <|endoftext|> into <|, endoftext and |>
    ranks[END.encode()] = len(ranks)
    return BPETokenizer(ranks)


def open_tokenizer(name: str) -> Tokenizer:
    """Open the tokenizer of GPT-2, a dataset, a run or a checkpoint. Raises UserError."""
    if name == "gpt2":
        from lessons.bpe import BPETokenizer  # here: the root imports no lesson at its top

        return BPETokenizer()
    if (DATA / name / "meta.json").exists() or parse_name(name):
        if not (DATA / name / "meta.json").exists():
            prepare_built_in(name)
        return make_tokenizer(read_meta(name)["tokenizer"])
    path = Path(name)
    exported = path / "tokenizer_config.json"  # by gpt2.save_gpt2()
    if exported.is_file():
        fields = json.loads(exported.read_text(encoding="utf-8"))
        if "count2gpt" in fields:
            return make_tokenizer(fields["count2gpt"])
    if path.is_dir():
        path = path / "best.pt"
    if not path.is_file():
        similar = did_you_mean(name, [*TOKENIZERS, *prepared_names()])
        advice = "use char, bpe, gpt2, a dataset, or a run such as out/my"
        raise UserError(f"no dataset {DATA / name}{similar}, and no checkpoint {path}; {advice}")
    advice = "use a run of train.py, such as --tokenizer=out/my"
    checkpoint = load_tensors(path, advice)
    if not isinstance(checkpoint, dict) or "tokenizer" not in checkpoint:
        raise UserError(f"{path} has no tokenizer; {advice}")
    return make_tokenizer(checkpoint["tokenizer"])


# ----------------------------------------------------------------------------- sources of tokens


Ids = dict[str, list[np.ndarray]]  # "train", "val", "test": the token ids (n,) of one file or several


def write_ids(folder: Path, source: str, ids: Ids, tokenizer: Tokenizer) -> None:
    """Write a dataset of token ids, and count the bytes of their text."""
    token_bytes = bytes_of_tokens(tokenizer)
    entries = {}
    for split, arrays in ids.items():
        path = folder / f"{split}.bin"
        n_bytes = 0
        with open(path, "wb") as file:
            for array in arrays:
                n_pieces = len(array) // CHUNK + 1
                for piece in np.array_split(array, n_pieces):
                    file.write(piece.tobytes())
                    n_bytes += int(token_bytes[piece].sum())
        n_tokens = sum(map(len, arrays))
        entries[split] = {"tokens": n_tokens, "bytes": n_bytes, "sha256": sha256_of(path)}
    write_meta(folder, source, tokenizer, entries)


def bytes_of_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """Return how many bytes of text each token stands for, (V,): 0 for END, or if unknown."""
    from lessons.bpe import NumberTokenizer  # here: the root imports no lesson at its top

    n_bytes = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    if isinstance(tokenizer, NumberTokenizer):
        return n_bytes
    end = tokenizer.end_id
    for i in range(tokenizer.vocab_size):
        if i != end:
            n_bytes[i] = len(tokenizer.decode_bytes([i]))
    return n_bytes


def open_fineweb(folder: Path, shards: int) -> tuple[Ids, Tokenizer]:
    """Open FineWeb (Penedo et al. 2024) in GPT-2's tokens, 100M per shard. folder: the user's
    shards, or DOWNLOADS, where missing shards are downloaded."""
    from lessons.bpe import BPETokenizer  # here: the root imports no lesson at its top

    train = []
    for i in range(1, shards + 1):
        train.append(open_shard(folder, f"fineweb_train_{i:06d}.bin"))
    val = open_shard(folder, "fineweb_val_000000.bin")
    return {"train": train, "val": [val]}, BPETokenizer()


def open_shard(folder: Path, name: str) -> np.ndarray:
    """Open the token ids of a shard, (n,). Raises UserError if it is missing or damaged."""
    path = folder / name
    if folder == DOWNLOADS and not path.exists():
        download(URLS["fineweb"] + name, path, NO_NETWORK)
    header = np.fromfile(existing(str(path)), dtype="<i4", count=3).tolist()
    # The header, 1,024 bytes, starts with a magic number, a version and the number of tokens
    n_tokens = (path.stat().st_size - 1024) / 2
    if header != [20240520, 1, n_tokens]:
        raise UserError(f"{path} is no whole shard; delete it, and try again")
    return np.memmap(path, dtype="<u2", mode="r", offset=1024)


def has_ids(source: str) -> bool:
    """Is the source a folder with token ids instead of text?"""
    return source not in SOURCES and Path(source, "train.bin").is_file()


def open_ids(folder: Path, kind: str, vocab_size: int) -> tuple[Ids, Tokenizer]:
    """Open a folder with train.bin, val.bin, and perhaps test.bin: raw token ids as nanoGPT writes
    them (uint16; uint32 if the vocabulary is larger than 65,536). kind: the tokenizer that made
    them. For char, the default, it is unknown, and the tokens are the numbers below vocab_size."""
    from lessons.bpe import NumberTokenizer  # here: the root imports no lesson at its top

    if (folder / "meta.json").exists():
        name = shlex.quote(folder.resolve().name)
        raise UserError(f"{folder} is a dataset already; use its name, --dataset={name}")
    if not (folder / "val.bin").is_file():
        raise UserError(f"{folder} has train.bin, but no val.bin; add it")
    if kind == "bpe" or (kind == "char" and vocab_size == 0):
        advice = "add --tokenizer=gpt2 if that made them, or --vocab_size= to take them as numbers, or prepare the text"
        raise UserError(f"{folder} has train.bin and val.bin, which are token ids; {advice}")
    tokenizer = NumberTokenizer(vocab_size) if kind == "char" else open_tokenizer(kind)
    ids = {}
    for split in ("train", "val", "test"):
        path = folder / f"{split}.bin"
        if path.is_file():
            ids[split] = [open_array(path, tokenizer.vocab_size)]
    return ids, tokenizer


def open_array(path: Path, vocab_size: int) -> np.ndarray:
    """Open a file of raw ids, (n,). Raises UserError if it has other ids than 0 to vocab_size - 1."""
    dtype = dtype_of_ids(vocab_size)
    advice = f'write ids.astype("{dtype.str}").tofile("{path.name}"), or give the right --tokenizer or --vocab_size'
    must = f"ids of a vocabulary of {vocab_size:,} tokens must be {dtype.name} (little-endian)"
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise UserError(f"{path} has {size:,} bytes, and {must}; copy it again, or {advice}")
    ids = np.memmap(path, dtype=dtype, mode="r")
    largest = ids.max()
    if largest >= vocab_size:
        raise UserError(f"{path} has the id {largest:,}, and {must}, below {vocab_size:,}; {advice}")
    # A number of int32 or int64 looks like an id and one zero or three. (A few ids, or zeros alone, say too little)
    beginning = ids[:CHUNK]
    has_numbers = np.count_nonzero(beginning) > len(beginning) / 8
    zeros_between = not beginning[1::2].any()
    if len(ids) >= 64 and has_numbers and zeros_between:
        raise UserError(f"{path} looks like int32 or int64, and {must}; {advice}")
    return ids


# ----------------------------------------------------------------------------- names of datasets


def choose_name(name: str, source: str, tokenizer: str, bpe_size: int) -> str:
    """Return the name of a dataset: the given name, or else a name from its source and tokenizer:
    words, words_bpe1024, words_gpt2, words_my. Raises UserError if the name or the source cannot be used."""
    stem = source
    if source not in SOURCES:
        path = existing(source).resolve()
        is_inside = DATA.resolve() in (path, *path.parents)
        if is_inside and path.is_dir() and not has_ids(source):
            raise UserError(f"{source} lies in {DATA}, where datasets are; move it, or give one of its files")
        stem = path.stem
    name = name or to_name(stem + name_suffix(tokenizer, bpe_size))
    # In lower case, as data/Words and data/words are one folder on Windows and macOS
    lower = name.lower()
    built_in = parse_name(lower)
    means_another = built_in not in (None, (source, tokenizer, bpe_size))
    possible = to_name(name)
    if means_another or lower in TOKENIZERS or possible != name:
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
    source, _, suffix = name.partition("_")
    if name in SOURCES:
        return name, "char", BPE_SIZE
    if source not in SOURCES or source == "fineweb":  # its tokens are GPT-2's, and no others
        return None
    if suffix == "gpt2":
        return source, "gpt2", BPE_SIZE
    match = re.fullmatch(r"bpe([1-9]\d*)", suffix)
    return (source, "bpe", int(match[1])) if match else None


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
    if name == "fineweb":
        return f"no dataset {DATA / name}; run: python prepare_data.py fineweb"
    similar = did_you_mean(path.name, [*SOURCES, *prepared_names()])
    made = to_name(path.name)
    return f"no dataset {DATA / name}{similar}; run: python prepare_data.py YOUR_TEXT.txt --name={made}"


def prepared_names() -> list[str]:
    """Return the names of all datasets in data/."""
    return [path.parent.name for path in DATA.glob("*/meta.json")]


# ----------------------------------------------------------------------------- the script


def refuse_unused(options: Options) -> None:
    """Raise UserError if an option was given that has no effect on this source and tokenizer."""
    source = options.source
    tokenizer = options.tokenizer
    are_ids = has_ids(source)
    useful = {
        "documents": source not in SOURCES and not are_ids,
        "file": source in URLS,
        "tokenizer": source != "fineweb",
        "vocab_size": tokenizer == "bpe" or (are_ids and tokenizer == "char"),
        "shards": source == "fineweb",
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
