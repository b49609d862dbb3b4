"""Turn a text into data/<dataset>/, the tokens that the training scripts read with load(dataset).

    python prepare_data.py words                            # no download: words from the Python library
    python prepare_data.py shakespeare                      # tiny Shakespeare, one token per character
    python prepare_data.py my.txt --tokenizer=bpe           # your own text, with BPE trained on it

A dataset is train.bin, val.bin (test.bin for a list), which are raw little-endian token ids, and meta.json with the
tokenizer (tokenizer.py). A list of documents (words, names, --documents=lines) becomes one sequence: the newline token,
the separator, starts and ends each document, as in \\n emma \\n ava \\n. Read micrograd.py or bigram.py next.
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

import numpy as np

from console import OptionParser, UserError, did_you_mean, in_range, progress, run
from files import DOWNLOADS, check_sha256, download, replace_folder
from tokenizer import BPETokenizer, CharTokenizer, Tokenizer, code_points, make_tokenizer, start_ids, train_bpe

DATA = Path("data")  # the datasets; data/.* is left over from a script that was killed, and safe to delete
FORMAT = 1  # of meta.json and the .bin files
CHUNK = 1 << 18  # characters or tokens in memory at a time; tiktoken cannot encode a run of a million blanks
BPE_CHARACTERS = 100_000_000  # BPE is trained on at most this much of the training split
TOKENIZERS = ("char", "bpe", "gpt2")
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


def open_source(source: str, file: Path | None, is_list: bool) -> dict[str, Callable]:
    """Open a source, or its local copy `file`. Returns per split a function that reads the text of it, in pieces."""
    if source in ("words", "python"):  # from Python's standard library: no tests, no packages, printable ASCII only
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        paths = sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
        texts = [text for text in texts if re.fullmatch(r"[\n -~]+", text)]
        if len(texts) < 10:
            raise UserError(f"no .py files of the standard library in {root}; use another Python, or your own text")
        if source == "python":
            return {"train": lambda: (t for i, t in enumerate(texts) if i % 10 != 9), "val": lambda: texts[9::10]}
        words = {word for text in texts for word in re.findall(r"\b[a-z]{2,15}\b", text)}
        return split_documents(sorted(words), source)
    path = Path(source)
    if source in URLS:
        path = existing(str(file)) if file else DOWNLOADS / f"{source}.txt"
        if not path.exists():
            download(URLS[source], path, NO_NETWORK, SHA256[source])
        advice = "leave out --file, or prepare it as your own text" if file else "delete it"
        check_sha256(path, SHA256[source], f"it is not {source}; {advice}")
    paths = [path]
    if path.is_dir():
        paths = [p for p in sorted(path.rglob("*")) if p.is_file() and "/." not in f"/{p.relative_to(path).as_posix()}"]
        paths = [p for p in paths if not p.resolve().is_relative_to(DATA.resolve())]
    if is_list:
        if sum(p.stat().st_size for p in paths) > 1e9:
            raise UserError(f"{source} has more than 1 GB, too much to be shuffled; split it, or leave out --documents")
        return split_documents([line for p in paths for line in "".join(read_text([p])).split("\n")], source)
    n = sum(map(len, read_text(paths)))
    cut = int(0.9 * n)  # the first 90 % of the characters train, the rest is validation
    if cut == 0:
        raise UserError(f"{source} has too little text to split; give more (hidden files are skipped)")
    return {"train": lambda: characters(read_text(paths), 0, cut), "val": lambda: characters(read_text(paths), cut, n)}


def existing(name: str) -> Path:
    if not name or not Path(name).exists():
        raise UserError(f"no file or folder {name!r}{did_you_mean(name, SOURCES)}; give one, or {', '.join(SOURCES)}")
    return Path(name)


def split_documents(lines: list[str], name: str) -> dict[str, Callable]:
    """Shuffle the lines that have text, and split them 80/10/10 as the makemore lectures do."""
    documents = [line.removesuffix("\r") for line in lines if line.strip(" \t\r\v\f")]
    n = len(documents)
    if n < 10:
        raise UserError(f"{name} has {n} lines with text, too few to split 80/10/10; give 10, or leave out --documents")
    random.Random(42).shuffle(documents)

    def pieces(start: int, stop: int) -> Iterator[str]:
        for i in range(start, stop, 10_000):  # documents per piece, each followed by a newline
            yield "\n".join(documents[i : min(i + 10_000, stop)]) + "\n"

    cut1, cut2 = int(0.8 * n), int(0.9 * n)
    return {"train": lambda: pieces(0, cut1), "val": lambda: pieces(cut1, cut2), "test": lambda: pieces(cut2, n)}


def read_text(paths: list[Path]) -> Iterator[str]:
    """Yield the text of files in pieces of CHUNK characters: line ends stay, and a byte order mark is dropped."""
    show, done = progress("reading", sum(path.stat().st_size for path in paths)), 0
    for path in paths:
        with open(path, encoding="utf-8-sig", newline="") as file:
            try:
                while piece := file.read(CHUNK):
                    yield piece
                    show(done + file.buffer.tell())
            except UnicodeDecodeError as error:  # error.object ends where the file has been read to
                at = file.buffer.tell() - len(error.object) + error.start
                raise UserError(f"{path} is not UTF-8 at byte {at}; save it as UTF-8, or leave it out") from error
            done += file.buffer.tell()


def characters(pieces: Iterable[str], start: int, stop: int) -> Iterator[str]:
    """Yield text[start:stop] of a text that comes in pieces."""
    for piece in pieces:
        yield piece[max(start, 0) : stop]
        start, stop = start - len(piece), stop - len(piece)  # from the end of this piece
        if stop <= 0:
            return


def whole_words(pieces: Iterable[str]) -> Iterator[str]:
    """Cut a text where GPT2_PATTERN starts a word, which keeps its tokens, or after CHUNK characters without one."""
    rest = ""
    for piece in pieces:
        rest += piece
        words = re.match(rf".*\S(?=[ \n])|.{{{CHUNK},}}", rest, re.DOTALL)
        if words:
            yield words[0]
            rest = rest[words.end() :]
    yield rest


def prepare(
    source: str, tokenizer="char", vocab_size=1024, file: Path | None = None, name="", documents="none", shards=1
) -> None:
    """Make data/<dataset>, whole or not at all, and print a summary of it. main() describes the parameters."""
    if tokenizer not in TOKENIZERS and not parse_name(tokenizer) and not (DATA / tokenizer / "meta.json").exists():
        similar = did_you_mean(tokenizer, TOKENIZERS)
        raise UserError(f"unknown tokenizer {tokenizer}{similar}; choose char, bpe, gpt2, or the name of a dataset")
    stem = source if source in SOURCES else existing(source).resolve().stem
    name = name or stem + {"char": "", "bpe": f"_bpe{vocab_size}"}.get(tokenizer, f"_{tokenizer}")
    folder = DATA / name
    if parse_name(name) not in (None, (source, tokenizer, vocab_size)):
        raise UserError(f"{name} is the name of a built-in dataset; give yours another one, such as --name=my_{name}")
    if not re.fullmatch(r"\w[\w.-]*", name) or name == DOWNLOADS.name:
        raise UserError(f"{name!r} cannot name a dataset; give letters, digits, '_', '.' or '-' with --name=")
    if folder.exists() and not (folder / "meta.json").exists():
        raise UserError(f"{folder} is not a dataset, and would be replaced; choose another --name=")
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DATA, prefix=f".{name}.", ignore_cleanup_errors=True) as temporary:
        new = Path(temporary, "new")
        new.mkdir()
        if source == "fineweb":
            made, separator, encoded = open_fineweb(file, shards)
        else:
            is_list = source in ("words", "names") or documents == "lines"
            text = open_source(source, file, is_list)
            made, separator, encoded = encode_text(text, is_list, tokenizer, vocab_size)
        dtype = "uint16" if made.vocab_size <= 65_536 else "uint32"
        splits = {split: write_tokens(new / f"{split}.bin", pieces, dtype) for split, pieces in encoded.items()}
        if separator is not None:
            for split in splits:
                splits[split]["documents"] = sum(piece.count("\n") for piece in text[split]())
        meta = {"format": FORMAT, "source": source, "tokenizer": made.to_dict(), "vocab_size": made.vocab_size}
        meta |= {"dtype": dtype, "separator": separator, "splits": splits}
        meta["sha256"] = hashlib.sha256(json.dumps(meta).encode()).hexdigest()
        (new / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        replace_folder(new, folder)
    data = load(name)
    print(f"{folder}: a vocabulary of {data.vocab_size:,} tokens, stored as {data.train.dtype}")
    for split, entry in data.splits.items():
        print(f"  {split:5}", *(f"{n:>14,} {unit}" for unit, n in entry.items() if unit != "sha256"))
    print("  first line:", data.tokenizer.decode(data.train[:400].tolist()).strip("\n").split("\n")[0][:100])


def encode_text(text: dict[str, Callable], is_list: bool, kind: str, vocab_size: int) -> tuple:
    """Encode a text. Returns the tokenizer, the separator, and per split an iterator of pieces (ids, bytes of text)."""
    if kind == "char":
        seen = np.zeros(0x110000, dtype=bool)  # one flag per character of Unicode, as a set would be slower
        for piece in (piece for read in text.values() for piece in read()):
            seen[code_points(piece)] = True
        tokenizer = CharTokenizer(map(chr, np.flatnonzero(seen)))
    elif kind == "bpe":
        sample = characters(text["train"](), 0, BPE_CHARACTERS)
        tokenizer = BPETokenizer(train_bpe(whole_words(sample), vocab_size))
        if tokenizer.vocab_size < vocab_size:
            print(f"BPE stopped at {tokenizer.vocab_size} tokens: nothing left to merge")
    else:
        tokenizer = BPETokenizer() if kind == "gpt2" else load(kind).tokenizer
    separator = tokenizer.encode("\n")[0] if is_list else None

    def encode(pieces: Iterable[str]) -> Iterator[tuple[np.ndarray, int]]:
        if is_list:
            yield np.array([separator]), 1
        for piece in pieces if is_list else whole_words(pieces):
            ids = tokenizer.encode_documents(piece.split("\n")[:-1]) if is_list else tokenizer.encode_array(piece)
            yield ids, len(piece.encode())

    return tokenizer, separator, {split: encode(read()) for split, read in text.items()}


def open_fineweb(copies: Path | None, shards: int) -> tuple:
    """Open FineWeb (Penedo et al. 2024), GPT-2 tokens in shards of 100M. Returns the same as encode_text."""
    tokenizer = BPETokenizer()
    n_bytes = np.array([len(tokenizer.decode_bytes([i])) for i in range(tokenizer.vocab_size - 1)] + [0])

    def pieces(names: list[str]) -> Iterator[tuple[np.ndarray, int]]:
        for name in names:
            path = (copies or DOWNLOADS) / name
            if not copies and not path.exists():
                download(URLS["fineweb"] + name, path, NO_NETWORK)
            header = np.fromfile(existing(str(path)), dtype="<i4", count=256)[:3].tolist()
            expected = [20240520, 1, (path.stat().st_size - 1024) / 2]  # magic number, version, number of tokens
            if header != expected or not header[2]:
                raise UserError(f"{path} has {header} instead of {expected}: no whole shard; delete it and try again")
            shard = np.memmap(path, dtype="<u2", mode="r", offset=1024)
            for ids in np.array_split(shard, len(shard) // CHUNK + 1):
                if ids.max() >= tokenizer.vocab_size:
                    raise UserError(f"{path} has the id {ids.max()}, past GPT-2's; delete it and try again")
                yield ids, int(n_bytes[ids].sum())

    train = [f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1)]
    return tokenizer, None, {"train": pieces(train), "val": pieces(["fineweb_val_000000.bin"])}


def write_tokens(path: Path, pieces: Iterable[tuple[np.ndarray, int]], dtype: str) -> dict:
    """Write pieces (ids, bytes of text). Returns an entry of meta.json's splits."""
    tokens, n_bytes, digest = 0, 0, hashlib.sha256()
    with open(path, "wb") as file:
        for ids, size in pieces:
            raw = ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
            file.write(raw)
            digest.update(raw)
            tokens += len(ids)
            n_bytes += size
    return {"tokens": tokens, "bytes": n_bytes, "sha256": digest.hexdigest()}


@dataclass(eq=False)  # compared by identity, so that functions of it can be cached
class Dataset:
    """A prepared text. train, val and test are memory maps (n,) of token ids; test is None if there is none."""

    name: str
    train: np.ndarray
    val: np.ndarray
    test: np.ndarray | None
    tokenizer: Tokenizer
    vocab_size: int
    separator: int | None  # the id that starts and ends each document; None for one long text
    splits: dict[str, dict]  # per split: tokens, bytes, sha256, and documents if there are any
    delimiter: int | None = None  # the id that starts each document: the separator, or FineWeb's <|endoftext|>

    def need(self, tokens: int, what: str) -> None:
        """Raise UserError if the training or validation split has fewer tokens than that."""
        for split, ids in (("train", self.train), ("val", self.val)):
            if len(ids) < tokens:
                few = f"the {split} split of {self.name} has {len(ids)} tokens, too few for {what} ({tokens} needed)"
                raise UserError(f"{few}; use a smaller value, or a longer text")

    def bits_per_byte(self, loss: float, split: str) -> float:
        """Convert a loss in nats per token to bits per byte of UTF-8 text, which compares across tokenizers."""
        return loss * self.splits[split]["tokens"] / (self.splits[split]["bytes"] * math.log(2))


def parse_name(name: str) -> tuple[str, str, int] | None:
    """Return source, tokenizer and vocab_size of a built-in dataset, such as shakespeare_bpe512. None: another name."""
    match = re.fullmatch(rf"(?!fineweb_)({'|'.join(SOURCES)})(_gpt2|_bpe([1-9]\d*))?", name)
    return match and (match[1], {None: "char", "_gpt2": "gpt2"}.get(match[2], "bpe"), int(match[3] or 1024))


def load(name: str) -> Dataset:
    """Open data/<name>; prepare it first if built in (and not fineweb). Raises UserError with the command to run."""
    path, built_in = DATA / name / "meta.json", parse_name(name)
    source, kind, vocab_size = built_in or ("YOUR_TEXT.txt", None, None)
    options = {"char": "", "gpt2": " --tokenizer=gpt2", "bpe": f" --tokenizer=bpe --vocab_size={vocab_size}"}
    command = f"python prepare_data.py {source}" + options.get(kind, f" --name={Path(name).name}")
    if not path.exists():
        if not built_in or name == "fineweb":
            known = {*SOURCES, *(path.parent.name for path in DATA.glob("[!.]*/meta.json"))} - {name}
            raise UserError(f"no dataset {path.parent}{did_you_mean(Path(name).name, known)}; run: {command}")
        print(f"preparing {name}, on first use")
        prepare(*built_in)
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        if meta["format"] != FORMAT:
            raise UserError(f"{path} has format {meta['format']!r}, and this version reads {FORMAT}; run: {command}")
        if meta.pop("sha256", None) not in (None, hashlib.sha256(json.dumps(meta).encode()).hexdigest()):
            raise KeyError("checksum mismatch")
        fields = {"test": None} | {key: meta[key] for key in ("vocab_size", "separator", "splits")}
        fields["delimiter"] = meta["vocab_size"] - 1 if meta["source"] == "fineweb" else meta["separator"]
        fields["tokenizer"] = make_tokenizer(meta["tokenizer"])
        for split, entry in meta["splits"].items():
            file, dtype = path.with_name(f"{split}.bin"), np.dtype(meta["dtype"]).newbyteorder("<")
            size, expected = file.stat().st_size if file.exists() else 0, entry["tokens"] * dtype.itemsize
            if size != expected:
                raise UserError(f"{file} has {size} bytes instead of {expected}; run: {command}")
            fields[split] = np.memmap(file, dtype=dtype, mode="r")
            if size < 100e6 and fields[split].max() >= meta["vocab_size"]:
                raise UserError(f"{file} has the id {fields[split].max()}, past the vocabulary; run: {command}")
        return Dataset(name, **fields)
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged ({error!r}); run: {command}") from error


def start_context(data: Dataset, length: int, rng: np.random.Generator) -> list[int]:
    """Return `length` tokens to start a sample from: separators, or in one long text some that end with a newline."""
    if length == 0 or data.separator is not None:
        return [data.separator] * length
    tokens = data.train[: 1 << 24]  # enough to choose from
    line_ends = np.flatnonzero(tokens[length - 1 : -1] == start_ids(data.tokenizer)[-1])
    at = rng.choice(line_ends) if len(line_ends) else rng.integers(len(tokens) - length)
    return tokens[at : at + length].tolist()


def main() -> None:
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", help=f"{', '.join(SOURCES)}, or your own UTF-8 text: a file or a folder of files")
    add("--tokenizer", help="char, bpe (trained here), gpt2, or the dataset whose tokenizer to use (default: char)")
    add("--vocab_size", type=int, help="number of tokens for --tokenizer=bpe (default: 1024)")
    add("--file", type=Path, help="local copy to use instead of the download; for fineweb a folder of shards")
    add("--name", help="name of the dataset, a folder in data/ (default: made from source and tokenizer)")
    add("--documents", choices=("none", "lines"), help="lines: one document per line; none: one text (default: none)")
    add("--shards", type=in_range(int, 1, 103), help="number of fineweb files, 100M training tokens each (default: 1)")
    options = parser.parse_args()
    for name, useful, where in (
        ("documents", options.source not in SOURCES, "your own text"),
        ("file", options.source in URLS, "a source that is downloaded"),
        ("vocab_size", options.tokenizer == "bpe", "--tokenizer=bpe"),
        ("shards", options.source == "fineweb", "fineweb"),
        ("tokenizer", options.source != "fineweb", "sources other than fineweb, which is GPT-2 tokens already"),
    ):
        if getattr(options, name) is not None and not useful:
            parser.error(f"--{name} is for {where}")
    prepare(**{name: value for name, value in vars(options).items() if value is not None})


if __name__ == "__main__":
    run(main)
