"""Turn a text into data/<dataset>/, the tokens that the training scripts read with load(dataset).

    python prepare_data.py words                            # no download: words from the Python library
    python prepare_data.py shakespeare                      # tiny Shakespeare, one token per character
    python prepare_data.py my.txt --tokenizer=bpe           # your own text, with BPE trained on it

Read micrograd.py or bigram.py next. The splits are raw little-endian token ids (train.bin ...);
meta.json has the tokenizer. In a list, a newline token starts and ends each document, \\n emma \\n;
where documents have several lines, <|endoftext|> does.
"""

import hashlib
import json
import math
import random
import re
import sysconfig
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from console import NonNegative, PathStr, Positive, UserError, did_you_mean, option, parse, progress, run
from files import DOWNLOADS, download, load_tensors, move, sha256_of
from tokenizer import (
    END,
    BPETokenizer,
    CharTokenizer,
    NumberTokenizer,
    Tokenizer,
    end_id,
    make_tokenizer,
    start_ids,
    train_bpe,
)

DATA = Path("data")  # data/.* is left over from a script that was killed, and safe to delete
FORMAT = 1  # of meta.json and the .bin files
CHUNK = 1 << 18  # characters or tokens at a time; tiktoken cannot encode a million blanks
BEGINNING = 1 << 13  # bytes of a file: a NUL among them means that it is no text
TOKENIZERS = ("char", "bpe", "gpt2")  # a dataset may not have these names
SOURCES = ("words", "python", "names", "shakespeare", "fineweb")
URLS = {
    "names": "https://raw.githubusercontent.com/karpathy/makemore/master/names.txt",
    "shakespeare": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "fineweb": "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/",
}
SHA256 = {
    "names": "0a30b5557f192f32ab962680889aac5f6fda0f4cecf40a6d0b5694f58ea8cc4d",
    "shakespeare": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
}
NO_NETWORK = "give a copy with --file=, or use words or python, which need no download"
checksum = lambda meta: hashlib.sha256(json.dumps(meta).encode()).hexdigest()


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
    name: str = option("", "name of the dataset, a folder in data/; by default, of source and tokenizer")
    documents: str = option(
        "none", "of your own text: none, lines, files, blank (lines between them), or such a line: ***"
    )
    shards: Positive = option(1, "number of fineweb files, 100M training tokens each")


def open_source(source: str, file: str, documents: str) -> dict[str, Callable]:
    """Per split, a function that returns its documents, or the pieces of its text."""
    if source in ("words", "python"):  # no tests, no packages, printable ASCII only
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        paths = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)]
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(paths)]
        texts = [text for text in texts if re.fullmatch(r"[\n -~]+", text)]
        if source == "words":
            words = re.findall(r"\b[a-z]{2,15}\b", "\n".join(texts))
            return split_documents(sorted(set(words)), source)
        train = "".join(text for i, text in enumerate(texts) if i % 10 != 9)
        return {"train": lambda: [train], "val": lambda: ["".join(texts[9::10])]}
    path = Path(source)
    if source in URLS:
        path = existing(file) if file else DOWNLOADS / f"{source}.txt"
        if not path.exists():
            download(URLS[source], path, NO_NETWORK, SHA256[source])
        if sha256_of(path) != SHA256[source]:
            raise UserError(f"{path} does not have the SHA-256 of {source}; delete it, or leave out --file")
    paths = [path]
    if path.is_dir():
        paths = files_of(path)
    if documents != "none":
        return split_documents(find_documents(paths, documents, source), source)
    n = sum(map(len, read_text(paths)))
    cut = int(0.9 * n)  # the first 90 % of the characters train, the rest is validation
    if cut == 0:
        skipped = "hidden files, binary ones and those in data/ are skipped"
        raise UserError(f"{source} has too little text to split; give more ({skipped})")
    return {"train": lambda: read_text(paths, 0, cut), "val": lambda: read_text(paths, cut, n)}


def existing(name: str) -> Path:
    path = Path(name)
    if not name or not path.exists():
        raise UserError(f"no file or folder {name!r}{did_you_mean(name, SOURCES)}; see --help for the sources")
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{name} is a pipe or a device, and a text is read more than once; save it as a file")
    return path


def files_of(folder: Path) -> list[Path]:
    """The files in a folder and its folders, by name, without hidden ones and those in data/, and
    without binary files. Prints how many of the latter there are."""
    paths, binary = [], []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or not path.is_file() or DATA.resolve() in path.resolve().parents:
            continue
        with open(path, "rb") as file:
            is_binary = b"\0" in file.read(BEGINNING)
        if is_binary:
            binary.append(path)
        else:
            paths.append(path)
    if binary:
        some = ", ".join(map(str, binary[:3])) + (" ..." if len(binary) > 3 else "")
        print(f"note: left out as binary or UTF-16: {len(binary):,} ({some}); files read: {len(paths):,}")
    return paths


def find_documents(paths: list[Path], documents: str, source: str) -> Iterator[str]:
    """The documents of files: their lines, the files, or what stands between lines of one kind."""
    if documents == "files" and len(paths) < 2:
        raise UserError(f"{source} has one text file or none; give a folder of them, or --documents=lines")
    if not documents.strip():
        raise UserError("--documents is empty; use lines, files, blank, or the line that separates them")
    texts = ("".join(read_text([path])) for path in paths)
    if documents == "lines":
        return (line for text in texts for line in text.split("\n"))
    if documents == "files":
        return (text.strip("\n") for text in texts)
    line = "" if documents == "blank" else documents.strip()
    # The whole line is the separator, perhaps with blanks around it.
    alone = rf"^[ \t]*{re.escape(line)}[ \t]*$" if line else r"^[ \t]*$"
    found, inside, n_texts = [], 0, 0
    for text in filter(None, texts):
        n_texts += 1
        parts = re.split(alone, text.strip("\n"), flags=re.M)
        found += [part.strip("\n") for part in parts]
        if line:
            inside += sum(part.count(line) for part in parts)
    if len(found) == n_texts:  # one part of each: nothing was split
        similar = did_you_mean(line, ("lines", "files", "blank", "none"))
        hint = f" (but it is inside of lines, {inside:,} times)" if inside else similar
        missing = f"line {line!r}" if line else "blank line"
        raise UserError(f"{source} has no {missing}{hint}; give the line that separates its documents")
    if inside:
        print(f"note: {inside:,} more {line!r} are inside of longer lines; documents are not split there")
    return iter(found)


def split_documents(documents: Iterable[str], source: str) -> dict[str, Callable]:
    """Shuffle the documents that have text, and split them 80/10/10 as the makemore lectures do.
    Prints how many of them are there twice."""
    documents = [text for text in documents if text.strip(" \t\v\f\n")]
    n = len(documents)
    if n < 10:
        raise UserError(f"{source} has {n} documents with text, too few to split; give 10 or more")
    random.Random(42).shuffle(documents)
    ends = {"train": (0, int(0.8 * n)), "val": (int(0.8 * n), int(0.9 * n)), "test": (int(0.9 * n), n)}
    splits = {split: documents[start:stop] for split, (start, stop) in ends.items()}
    repeated = n - len(set(documents))
    if repeated:
        known = set(splits["train"])
        again = sum(text in known for text in splits["val"])
        note = f"note: {repeated:,} of {n:,} documents repeat another one"
        if again:
            note += f"; {again:,} of {len(splits['val']):,} in val are in train, too, which makes the val loss lower"
        print(note)
    return {split: texts.copy for split, texts in splits.items()}  # functions, to be called


def read_text(paths: list[Path], start: int = 0, stop: int = 1 << 62) -> Iterator[str]:
    """Yield characters start to stop of the text of files, in pieces. A file that does not end with
    a newline gets one if another file follows. GPT-2's pattern ends a word before a blank or a
    newline, so a cut there changes no token. A byte order mark is removed."""
    at, rest, last = 0, "", "\n"  # characters read, those to yield, the last one
    for path in paths:
        show = progress(f"reading {path}", path.stat().st_size)
        missing_newline = "" if last == "\n" else "\n"  # at the end of the file before
        with open(path, encoding="utf-8-sig") as file:
            try:
                while piece := file.read(CHUNK):
                    show(file.buffer.tell())
                    refuse_nul(piece, path)
                    piece = missing_newline + piece
                    missing_newline = ""
                    last = piece[-1]
                    rest += piece[max(start - at, 0) : max(stop - at, 0)]
                    at += len(piece)
                    if words := re.match(rf".*\S(?=[ \n])|.{{{CHUNK},}}", rest, re.DOTALL):
                        yield words[0]
                        rest = rest[words.end() :]
            except UnicodeDecodeError as error:  # error.object ends where the file has been read to
                byte = file.buffer.tell() - len(error.object) + error.start
                advice = "save it as UTF-8" + (", or move it out of the folder" if len(paths) > 1 else "")
                raise UserError(f"{path} is not UTF-8 at byte {byte}; {advice}") from error
    yield rest


def refuse_nul(text: str, path: Path) -> None:
    """Raise UserError if there are NUL characters. English letters in UTF-16 are one NUL byte and one
    byte as in UTF-8, so a program that expects UTF-8 finds no error."""
    if n := text.count("\0"):
        found = f"{path} has {n:,} NUL characters or more, so it is no UTF-8 text"
        raise UserError(f"{found}; if it is UTF-16, save it as UTF-8")


def clean(text: str) -> str:
    """A text as read_text() gives it: without a byte order mark, and with \\n at the end of a line."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def read_prompt(prompt: str, file: PathStr) -> str:
    """The text of --prompt or --prompt_file, read like one to train on. Raises UserError."""
    if not file:
        return clean(prompt)
    if prompt:
        raise UserError("there are two texts, --prompt and --prompt_file; give one")
    try:
        text = Path(file).read_bytes().decode()
    except FileNotFoundError:
        raise UserError(f"no file {file}; check --prompt_file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    refuse_nul(text, file)
    if not clean(text).strip("\n"):
        raise UserError(f"{file} is empty; write a text into it")
    return clean(text)


def prepare(source, tokenizer="char", vocab_size=0, file="", name="", documents="none", shards=1) -> None:
    """Make data/<dataset>, whole or not at all. Parameters as in Options. Raises UserError."""
    stem = source if source in SOURCES else existing(source).resolve().stem
    bpe_size = vocab_size or 1024
    if not name:  # words, words_bpe1024, words_gpt2, words_my
        suffix = {"char": "", "bpe": f"_bpe{bpe_size}"}.get(tokenizer, f"_{stem_of(tokenizer)}")
        name = stem + suffix
    folder = DATA / name
    built_in = parse_name(name.lower())
    another = built_in is not None and built_in != (source, tokenizer, bpe_size)
    taken = another or name.lower() in TOKENIZERS
    foreign = folder.exists() and not (folder / "meta.json").exists()
    if taken or foreign or not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(f"{name!r} cannot be the name of this dataset; choose one, such as --name=my_text")
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DATA, prefix=f".{name}.", ignore_cleanup_errors=True) as temporary:
        new = Path(temporary, "new")
        new.mkdir()
        text = None
        if source == "fineweb":
            made, separator, encoded = open_fineweb(Path(file or DOWNLOADS), shards)
        elif has_tokens(source):
            made, separator, encoded = open_tokens(Path(source), tokenizer, vocab_size)
        else:
            documents = "lines" if source in ("words", "names") else documents
            text = open_source(source, file, documents)
            made, separator, encoded = encode_text(text, documents, tokenizer, bpe_size)
        dtype = "uint16" if made.vocab_size <= 65_536 else "uint32"
        splits = {}
        for split, pieces in encoded.items():
            splits[split] = write_tokens(new / f"{split}.bin", pieces, dtype)
            if separator is not None:
                splits[split]["documents"] = len(text[split]())
        meta = {"format": FORMAT, "source": source, "tokenizer": made.to_dict()}
        meta |= {"vocab_size": made.vocab_size, "dtype": dtype, "separator": separator, "splits": splits}
        # separator: where documents are split; start_token: where samples start, also if only tokens are known
        meta["start_token"] = find_delimiter(new / "train.bin", dtype, made) if text is None else separator
        meta["sha256"] = checksum(meta)
        (new / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        old = Path(temporary, "old")
        if folder.exists():
            move(folder, old)
        try:
            move(new, folder)
        finally:
            if old.exists() and not folder.exists():
                move(old, folder)
    data = load(name)
    print(f"{folder}: a vocabulary of {data.vocab_size:,} tokens, stored as {dtype}")
    for split, entry in data.splits.items():
        print(f"  {split:5}", *(f"{n:>14,} {unit}" for unit, n in entry.items() if unit != "sha256"))
    beginning = data.tokenizer.decode(data.train[:100].tolist()).replace(END, "\n")
    print("  first line:", beginning.strip("\n").split("\n")[0])
    if text and isinstance(data.tokenizer, BPETokenizer):
        print_decomposed(text)


def stem_of(tokenizer: str) -> str:
    """What a --tokenizer= adds to the name of a dataset: gpt2, or the name of a dataset or run."""
    path = Path(tokenizer).resolve()
    return path.parent.name if path.suffix == ".pt" else path.name


def print_decomposed(text: dict[str, Callable]) -> None:
    """Print how many accents are characters of their own, as in e and U+0301 in place of é: for BPE,
    that is another text, though it looks the same."""
    words = (word for read in text.values() for piece in read() if not piece.isascii() for word in piece.split())
    n = sum(max(0, len(word) - len(unicodedata.normalize("NFC", word))) for word in words)
    if n > 0:
        advice = "prompts must be so, too; unicodedata.normalize('NFC', text) joins them"
        print(f"note: {n:,} accents are characters of their own (e and U+0301 in place of é); {advice}")


def encode_text(text: dict[str, Callable], documents: str, kind: str, vocab_size: int) -> tuple:
    """The tokenizer, the separator, and per split an iterator of (ids, bytes of text). documents: as
    the option. The pieces of a text are whole documents if there are any."""
    has_documents = documents != "none"
    several_lines = documents not in ("none", "lines")  # then END is the separator, else a newline
    if kind == "char":
        chars = {char for read in text.values() for piece in read() for char in set(piece)}
        if documents == "lines":
            chars.add("\n")
        chars = sorted(chars)
        if several_lines:
            chars.append(END)
        tokenizer = CharTokenizer(chars)
    elif kind == "bpe":
        train = text["train"]()
        if has_documents:
            train = "".join(f"{document}\n" for document in train)
        if several_lines and vocab_size < 257:
            raise UserError(f"vocab_size={vocab_size} has no room for 256 bytes and {END}; use 257 or more")
        ranks = train_bpe(train, vocab_size - 1 if several_lines else vocab_size)
        if several_lines:  # PATTERN cuts that text into <|, endoftext and |>, so none becomes this token
            ranks[END.encode()] = len(ranks)
        tokenizer = BPETokenizer(ranks)
    else:
        tokenizer = open_tokenizer(kind)
        if isinstance(tokenizer, NumberTokenizer):
            raise UserError(f"the tokenizer of {kind} is unknown, so it encodes no text; use another --tokenizer")
    separator = None
    if several_lines:
        separator = end_id(tokenizer)
    elif has_documents:
        separator = tokenizer.encode("\n", "use another --tokenizer")[0]
    if several_lines and separator is None:
        raise UserError(f"{kind} has no token for the end of documents of several lines; use another --tokenizer")
    advice = "leave them out of the text"
    advice += "" if Path(kind).exists() else ", or use --tokenizer=bpe"  # which does not fit a run

    def encode(pieces: Iterable[str]) -> Iterator[tuple[list[int], int]]:
        if not has_documents:
            for piece in pieces:
                ids = tokenizer.encode(piece, advice)
                yield ids, len(tokenizer.decode_bytes(ids))  # not of the piece: é may be in another form
            return
        separator_bytes = 0 if several_lines else 1  # END is no text
        yield [separator], separator_bytes
        for piece in pieces:
            ids = tokenizer.encode(piece, advice)
            yield [*ids, separator], len(tokenizer.decode_bytes(ids)) + separator_bytes

    return tokenizer, separator, {split: encode(read()) for split, read in text.items()}


def open_tokenizer(name: str) -> Tokenizer:
    """GPT-2's tokenizer, that of a dataset, or that of a run or checkpoint. Raises UserError."""
    if name == "gpt2":
        return BPETokenizer()
    if (DATA / name / "meta.json").exists() or parse_name(name):
        return load(name).tokenizer
    path = Path(name, "best.pt") if Path(name).is_dir() else Path(name)
    advice = "use a run of train.py, such as --tokenizer=out/my"
    if path.is_file():
        checkpoint = load_tensors(path, advice)
        if not isinstance(checkpoint, dict) or "tokenizer" not in checkpoint:
            raise UserError(f"{path} has no tokenizer; {advice}")
        return make_tokenizer(checkpoint["tokenizer"])
    if "/" in Path(name).as_posix() or Path(name).is_dir():  # a path, not the name of a dataset
        raise UserError(f"no checkpoint {path}, and no dataset {name}; {advice}, or the name of a dataset")
    similar = did_you_mean(name, {*TOKENIZERS, *(meta.parent.name for meta in DATA.glob("*/meta.json"))})
    raise UserError(f"no dataset {DATA / name}{similar}; use char, bpe, gpt2, a dataset, or a run such as out/my")


def bytes_of_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """How many bytes of text each token stands for, (V,): 0 for END, or if the text is unknown."""
    if isinstance(tokenizer, NumberTokenizer):
        return np.zeros(tokenizer.vocab_size, dtype=np.int64)
    end = end_id(tokenizer)
    return np.array([0 if i == end else len(tokenizer.decode_bytes([i])) for i in range(tokenizer.vocab_size)])


def find_delimiter(path: Path, dtype: str, tokenizer: Tokenizer) -> int | None:
    """END, if it occurs among the first tokens of a file: it stands between documents, so a sample
    that starts with it starts a document."""
    end = end_id(tokenizer)
    beginning = np.fromfile(path, dtype=np.dtype(dtype).newbyteorder("<"), count=1 << 24)
    return end if end is not None and (beginning == end).any() else None


def has_tokens(source: str) -> bool:
    """Is the source a folder with token ids in train.bin and val.bin?"""
    return source not in SOURCES and all(Path(source, f"{split}.bin").is_file() for split in ("train", "val"))


def open_tokens(folder: Path, kind: str, vocab_size: int) -> tuple:
    """A folder with train.bin and val.bin, raw token ids as nanoGPT writes them (uint16; uint32 if
    the vocabulary is larger than 65,536): as from encode_text."""
    if (folder / "meta.json").exists():
        raise UserError(f"{folder} is a dataset already; use its name, --dataset={folder.resolve().name}")
    if kind == "bpe" or (kind == "char" and not vocab_size):  # char: no tokenizer is named
        advice = "add --tokenizer=gpt2 if that made them, or --vocab_size= to take them as numbers, or prepare the text"
        raise UserError(f"{folder} has train.bin and val.bin, which are token ids; {advice}")
    tokenizer = NumberTokenizer(vocab_size) if kind == "char" else open_tokenizer(kind)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 65_536 else "<u4")
    n_bytes = bytes_of_tokens(tokenizer)

    def pieces(path: Path) -> Iterator[tuple[np.ndarray, int]]:
        size = path.stat().st_size
        if size == 0 or size % dtype.itemsize:
            what = f"{path} has {size:,} bytes, not a multiple of the {dtype.itemsize} of an id ({dtype.name})"
            raise UserError(f"{what}; copy it again")
        tokens = np.memmap(path, dtype=dtype, mode="r")
        for ids in np.array_split(tokens, len(tokens) // CHUNK + 1):
            if ids.max() >= tokenizer.vocab_size:
                what = f"{path} has the token {ids.max():,}, and the vocabulary ends at {tokenizer.vocab_size - 1:,}"
                raise UserError(f"{what}; give a larger --vocab_size, or the right --tokenizer")
            yield ids, int(n_bytes[ids].sum())

    splits = [split for split in ("train", "val", "test") if (folder / f"{split}.bin").is_file()]
    return tokenizer, None, {split: pieces(folder / f"{split}.bin") for split in splits}


def open_fineweb(folder: Path, shards: int) -> tuple:
    """FineWeb (Penedo et al. 2024), GPT-2 tokens in shards of 100M: as from encode_text."""
    tokenizer = BPETokenizer()
    n_bytes = bytes_of_tokens(tokenizer)

    def pieces(names: list[str]) -> Iterator[tuple[np.ndarray, int]]:
        for name in names:
            path = folder / name
            if folder == DOWNLOADS and not path.exists():
                download(URLS["fineweb"] + name, path, NO_NETWORK)
            header = np.fromfile(existing(str(path)), dtype="<i4", count=3).tolist()
            if header != [20240520, 1, (path.stat().st_size - 1024) / 2]:  # magic, version, tokens
                raise UserError(f"{path} is no whole shard; delete it, and try again")
            shard = np.memmap(path, dtype="<u2", mode="r", offset=1024)
            for ids in np.array_split(shard, len(shard) // CHUNK + 1):
                yield ids, int(n_bytes[ids].sum())

    train = [f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1)]
    return tokenizer, None, {"train": pieces(train), "val": pieces(["fineweb_val_000000.bin"])}


def write_tokens(path: Path, pieces: Iterable[tuple], dtype: str) -> dict:
    """Write pieces (ids, bytes of text). Returns an entry of meta.json's splits."""
    tokens, n_bytes = 0, 0
    with open(path, "wb") as file:
        for ids, size in pieces:
            file.write(np.asarray(ids, dtype=np.dtype(dtype).newbyteorder("<")).tobytes())
            tokens += len(ids)
            n_bytes += size
    return {"tokens": tokens, "bytes": n_bytes, "sha256": sha256_of(path)}


@dataclass(eq=False)  # compared by identity, so that functions of it can be cached
class Dataset:
    """A prepared text. train, val and test are memory maps (n,) of token ids; test can be None."""

    name: str
    train: np.ndarray
    val: np.ndarray
    test: np.ndarray | None
    tokenizer: Tokenizer
    vocab_size: int
    separator: int | None  # the id that starts and ends each document; None for one long text
    splits: dict[str, dict]  # per split: tokens, bytes, sha256, and documents if there are any
    start_token: int | None = None  # the id that starts each document: the separator, or <|endoftext|>

    def need(self, tokens: int, what: str) -> None:
        """Raise UserError if the training or validation split has fewer tokens than that. what: what needs them; if it
        is an option, such as --block_size=64, the advice is to use a smaller value."""
        for split, ids in (("train", self.train), ("val", self.val)):
            if len(ids) < tokens:
                few = f"the {split} split of {self.name} has {len(ids)} tokens, too few for {what}"
                smaller = "a smaller value, or " if what.startswith("--") else ""
                raise UserError(f"{few} ({tokens} needed); use {smaller}a longer text")

    def documents(self, split: str) -> list[list[int]]:
        """The documents of a split, without separators. Raises UserError for one long text."""
        if self.separator is None:
            advice = "use words, names, or your own text with --documents"
            raise UserError(f"{self.name} has no documents; {advice}")
        ids = getattr(self, split)
        parts = np.split(ids, np.flatnonzero(ids == self.separator))
        return [part[1:].tolist() for part in parts[1:-1]]  # each starts with the separator

    @property
    def has_lines(self) -> bool:
        """Is each document one line? Then the separator is a newline."""
        return self.separator is not None and self.separator != end_id(self.tokenizer)

    def verify(self) -> None:
        """Compare the files with the SHA-256 in meta.json. Raises UserError if one differs."""
        for split, entry in self.splits.items():
            path = DATA / self.name / f"{split}.bin"
            if sha256_of(path) != entry["sha256"]:
                advice = f"copy it again, or delete {path.parent} and run prepare_data.py again"
                raise UserError(f"{path} is not as it was prepared (its SHA-256 differs); {advice}")

    def bits_per_byte(self, loss: float, split: str) -> float:
        """A loss in nats per token, in bits per byte of UTF-8 text, for any tokenizer; NaN if the
        text is unknown."""
        if self.splits[split]["bytes"] == 0:
            return math.nan
        return loss * self.splits[split]["tokens"] / (self.splits[split]["bytes"] * math.log(2))


def parse_name(name: str) -> tuple[str, str, int] | None:
    """Source, tokenizer and vocab_size of a built-in dataset, or None."""
    match = re.fullmatch(rf"(?!fineweb_)({'|'.join(SOURCES)})(_gpt2|_bpe([1-9]\d*))?", name)
    kind = {None: "char", "_gpt2": "gpt2"}
    return match and (match[1], kind.get(match[2], "bpe"), int(match[3] or 1024))


def no_dataset(name: str) -> str:
    """What to do if there is no dataset of that name, in one line."""
    path = Path(name)
    if (path / "meta.json").exists():
        return f"{name} is not the name of a dataset; use --dataset={path.name}"
    if name and path.exists():
        kind, stem = "folder" if path.is_dir() else "file", path.resolve().stem
        return f"{name} is a {kind}, not a dataset; run: python prepare_data.py {name}, then use --dataset={stem}"
    known = {"bpe", "gpt2", *SOURCES, *(p.parent.name for p in DATA.glob("*/meta.json"))}
    similar = did_you_mean(path.name, known - {name})
    command = name if name == "fineweb" else f"YOUR_TEXT.txt --name={path.name}"
    return f"no dataset {DATA / name}{similar}; run: python prepare_data.py {command}"


def load(name: str) -> Dataset:
    """Open data/<name>; prepare it first if it is built in (and not fineweb). Raises UserError."""
    path = DATA / name / "meta.json"
    built_in = parse_name(name)
    if not path.exists() and (not built_in or name == "fineweb"):
        raise UserError(no_dataset(name))
    if not path.exists():
        print(f"preparing {name}, on first use")
        prepare(*built_in)
    advice = f"delete {path.parent}, and run prepare_data.py again"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        sha256 = meta.pop("sha256")
    except (ValueError, LookupError, TypeError, AttributeError):
        sha256 = meta = None
    if sha256 != checksum(meta) or meta["format"] != FORMAT:
        raise UserError(f"{path} is damaged, or of another version; {advice}")
    dtype = np.dtype(meta["dtype"]).newbyteorder("<")
    fields = {"test": None} | {key: meta[key] for key in ("vocab_size", "separator", "splits")}
    for split, entry in meta["splits"].items():
        file = path.with_name(f"{split}.bin")
        n_bytes = entry["tokens"] * dtype.itemsize
        if not file.exists() or file.stat().st_size != n_bytes:
            raise UserError(f"{file} does not have {n_bytes} bytes; {advice}")
        fields[split] = np.memmap(file, dtype=dtype, mode="r")
    # in files of before, which have no start_token
    default = meta["vocab_size"] - 1 if meta["source"] == "fineweb" else meta["separator"]
    fields["start_token"] = meta.get("start_token", default)
    return Dataset(name, tokenizer=make_tokenizer(meta["tokenizer"]), **fields)


def start_context(data: Dataset, length: int, rng: np.random.Generator) -> list[int]:
    """`length` tokens to start a sample from: separators, or some that end with a newline."""
    if length == 0 or data.separator is not None:
        return [data.separator] * length
    tokens = data.train[: 1 << 24]  # enough to choose from
    line_ends = np.flatnonzero(tokens[length - 1 : -1] == start_ids(data.tokenizer)[-1])
    at = rng.choice(line_ends) if len(line_ends) else rng.integers(len(tokens) - length)
    return tokens[at : at + length].tolist()


def main() -> None:
    options = parse(Options, __doc__, argument="source")
    tokens = has_tokens(options.source)
    useful = {"documents": options.source not in SOURCES and not tokens, "file": options.source in URLS}
    useful["tokenizer"] = options.source != "fineweb"
    useful["vocab_size"] = options.tokenizer == "bpe" or (tokens and options.tokenizer == "char")
    for name in useful:
        if not useful[name] and getattr(options, name) != getattr(Options, name):
            raise UserError(f"--{name} has no effect here; leave it out, or see --help")
    prepare(**vars(options))


if __name__ == "__main__":
    run(main)
