"""Turn a text into data/<dataset>/, the tokens that the training scripts read with load(dataset).

    python prepare_data.py words                            # no download: words from the Python library
    python prepare_data.py shakespeare                      # tiny Shakespeare, one token per character
    python prepare_data.py my.txt --tokenizer=bpe           # your own text, with BPE trained on it

Read micrograd.py or bigram.py next. The splits are raw little-endian token ids (train.bin ...);
meta.json has the tokenizer. In a list, a newline token starts and ends each document, \\n emma \\n.
"""

import hashlib
import json
import math
import random
import re
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from console import PathStr, Positive, UserError, did_you_mean, parse, progress, run
from files import DOWNLOADS, download, move, sha256_of
from tokenizer import BPETokenizer, CharTokenizer, Tokenizer, make_tokenizer, start_ids, train_bpe

DATA = Path("data")  # data/.* is left over from a script that was killed, and safe to delete
FORMAT = 1  # of meta.json and the .bin files
CHUNK = 1 << 18  # characters or tokens at a time; tiktoken cannot encode a million blanks
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
    source: PathStr = ""  # words, python, names, shakespeare, fineweb, or your own file or folder
    tokenizer: PathStr = "char"  # char, bpe (trained here), gpt2, or the dataset whose tokenizer to use
    vocab_size: Positive = 1024  # number of tokens for --tokenizer=bpe
    file: PathStr = ""  # local copy to use instead of the download; for fineweb a folder of shards
    name: str = ""  # name of the dataset, a folder in data/; by default, of source and tokenizer
    documents: Literal["none", "lines"] = "none"  # lines: each line of your own text is a document
    shards: Positive = 1  # number of fineweb files, 100M training tokens each


def open_source(source: str, file: str, is_list: bool) -> dict[str, Callable]:
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
        paths = [p for p in sorted(path.rglob("*")) if "/." not in f"/{p.relative_to(path).as_posix()}"]
        paths = [p for p in paths if p.is_file() and DATA.resolve() not in p.resolve().parents]
    if is_list:
        lines = (line for p in paths for line in "".join(read_text([p])).split("\n"))
        return split_documents(lines, source)
    n = sum(map(len, read_text(paths)))
    cut = int(0.9 * n)  # the first 90 % of the characters train, the rest is validation
    if cut == 0:
        raise UserError(f"{source} has too little text to split; give more (hidden files are skipped)")
    return {"train": lambda: read_text(paths, 0, cut), "val": lambda: read_text(paths, cut, n)}


def existing(name: str) -> Path:
    if not name or not Path(name).exists():
        raise UserError(f"no file or folder {name!r}{did_you_mean(name, SOURCES)}; see --help for the sources")
    return Path(name)


def split_documents(lines: Iterable[str], source: str) -> dict[str, Callable]:
    """Shuffle the lines that have text, and split them 80/10/10 as the makemore lectures do."""
    documents = [line + "\n" for line in lines if line.strip(" \t\v\f")]
    n = len(documents)
    if n < 10:
        raise UserError(f"{source} has {n} lines with text, too few to split; give 10 or more")
    random.Random(42).shuffle(documents)
    ends = {"train": (0, int(0.8 * n)), "val": (int(0.8 * n), int(0.9 * n)), "test": (int(0.9 * n), n)}
    return {split: documents[start:stop].copy for split, (start, stop) in ends.items()}


def read_text(paths: list[Path], start: int = 0, stop: int = 1 << 62) -> Iterator[str]:
    """Yield characters start to stop of the text of files, in pieces. GPT-2's pattern ends a word
    before a blank or a newline, so a cut there changes no token. A byte order mark goes."""
    at, rest = 0, ""
    for path in paths:
        show = progress(f"reading {path}", path.stat().st_size)
        with open(path, encoding="utf-8-sig") as file:
            try:
                while piece := file.read(CHUNK):
                    show(file.buffer.tell())
                    rest += piece[max(start - at, 0) : max(stop - at, 0)]
                    at += len(piece)
                    if words := re.match(rf".*\S(?=[ \n])|.{{{CHUNK},}}", rest, re.DOTALL):
                        yield words[0]
                        rest = rest[words.end() :]
            except UnicodeDecodeError as error:  # error.object ends where the file has been read to
                byte = file.buffer.tell() - len(error.object) + error.start
                raise UserError(f"{path} is not UTF-8 at byte {byte}; save it as UTF-8") from error
    yield rest


def prepare(source, tokenizer="char", vocab_size=1024, file="", name="", documents="none", shards=1) -> None:
    """Make data/<dataset>, whole or not at all. Parameters as in Options. Raises UserError."""
    stem = source if source in SOURCES else existing(source).resolve().stem
    name = name or stem + {"char": "", "bpe": f"_bpe{vocab_size}"}.get(tokenizer, f"_{tokenizer}")
    folder = DATA / name
    built_in = parse_name(name.lower()) not in (None, (source, tokenizer, vocab_size))
    foreign = folder.exists() and not (folder / "meta.json").exists()
    if built_in or foreign or not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(f"{name!r} cannot be the name of this dataset; choose one, such as --name=my_text")
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DATA, prefix=f".{name}.", ignore_cleanup_errors=True) as temporary:
        new = Path(temporary, "new")
        new.mkdir()
        if source == "fineweb":
            made, separator, encoded = open_fineweb(Path(file or DOWNLOADS), shards)
        else:
            is_list = source in ("words", "names") or documents == "lines"
            text = open_source(source, file, is_list)
            made, separator, encoded = encode_text(text, is_list, tokenizer, vocab_size)
        dtype = "uint16" if made.vocab_size <= 65_536 else "uint32"
        splits = {}
        for split, pieces in encoded.items():
            splits[split] = write_tokens(new / f"{split}.bin", pieces, dtype)
            if separator is not None:
                splits[split]["documents"] = len(text[split]())
        meta = {"format": FORMAT, "source": source, "tokenizer": made.to_dict()}
        meta |= {"vocab_size": made.vocab_size, "dtype": dtype, "separator": separator, "splits": splits}
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
    print("  first line:", data.tokenizer.decode(data.train[:100].tolist()).strip("\n").split("\n")[0])


def encode_text(text: dict[str, Callable], is_list: bool, kind: str, vocab_size: int) -> tuple:
    """The tokenizer, the separator, and per split an iterator of (ids, bytes of text)."""
    if kind == "char":
        chars = {char for read in text.values() for piece in read() for char in set(piece)}
        tokenizer = CharTokenizer(sorted(chars))
    elif kind == "bpe":
        train = text["train"]()
        tokenizer = BPETokenizer(train_bpe("".join(train) if is_list else train, vocab_size))
    else:
        tokenizer = BPETokenizer() if kind == "gpt2" else load(kind).tokenizer
    separator = tokenizer.encode("\n")[0] if is_list else None

    def encode(pieces: Iterable[str]) -> Iterator[tuple[list[int], int]]:
        if is_list:
            yield [separator], 1
        for piece in pieces:
            ids = [*tokenizer.encode(piece[:-1]), separator] if is_list else tokenizer.encode(piece)
            yield ids, len(piece.encode())

    return tokenizer, separator, {split: encode(read()) for split, read in text.items()}


def open_fineweb(folder: Path, shards: int) -> tuple:
    """FineWeb (Penedo et al. 2024), GPT-2 tokens in shards of 100M: as from encode_text."""
    tokenizer = BPETokenizer()
    tokens = [tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size - 1)]
    n_bytes = np.array([*map(len, tokens), 0])  # <|endoftext|> is no text

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
    delimiter: int | None = None  # the id that starts each document: the separator, or <|endoftext|>

    def need(self, tokens: int, what: str) -> None:
        """Raise UserError if the training or validation split has fewer tokens than that."""
        for split, ids in (("train", self.train), ("val", self.val)):
            if len(ids) < tokens:
                few = f"the {split} split of {self.name} has {len(ids)} tokens, too few for {what}"
                raise UserError(f"{few} ({tokens} needed); use a smaller value, or a longer text")

    def documents(self, split: str) -> list[list[int]]:
        """The documents of a split, without separators. Raises UserError for one long text."""
        if self.separator is None:
            advice = "use words, names, or your own text with --documents=lines"
            raise UserError(f"{self.name} has no documents; {advice}")
        ids = getattr(self, split)
        parts = np.split(ids, np.flatnonzero(ids == self.separator))
        return [part[1:].tolist() for part in parts[1:-1]]  # each starts with the separator

    def bits_per_byte(self, loss: float, split: str) -> float:
        """A loss in nats per token, in bits per byte of UTF-8 text, for any tokenizer."""
        return loss * self.splits[split]["tokens"] / (self.splits[split]["bytes"] * math.log(2))


def parse_name(name: str) -> tuple[str, str, int] | None:
    """Source, tokenizer and vocab_size of a built-in dataset, or None."""
    match = re.fullmatch(rf"(?!fineweb_)({'|'.join(SOURCES)})(_gpt2|_bpe([1-9]\d*))?", name)
    kind = {None: "char", "_gpt2": "gpt2"}
    return match and (match[1], kind.get(match[2], "bpe"), int(match[3] or 1024))


def load(name: str) -> Dataset:
    """Open data/<name>; prepare it first if it is built in (and not fineweb). Raises UserError."""
    path = DATA / name / "meta.json"
    built_in = parse_name(name)
    if not path.exists() and (not built_in or name == "fineweb"):
        known = {"bpe", "gpt2", *SOURCES, *(p.parent.name for p in DATA.glob("*/meta.json"))}
        similar = did_you_mean(Path(name).name, known - {name})
        command = "fineweb" if built_in else f"YOUR_TEXT.txt --name={Path(name).name}"
        raise UserError(f"no dataset {path.parent}{similar}; run: python prepare_data.py {command}")
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
    fields["delimiter"] = meta["vocab_size"] - 1 if meta["source"] == "fineweb" else meta["separator"]
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
    useful = {"documents": options.source not in SOURCES, "file": options.source in URLS}
    useful |= {"tokenizer": options.source != "fineweb", "vocab_size": options.tokenizer == "bpe"}
    for name in useful:
        if not useful[name] and getattr(options, name) != getattr(Options, name):
            raise UserError(f"--{name} has no effect here; leave it out, or see --help")
    prepare(**vars(options))


if __name__ == "__main__":
    run(main)
