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

import argparse
import base64
import codecs
import contextlib
import difflib
import functools
import hashlib
import heapq
import importlib.util
import io
import json
import math
import os
import random
import re
import sys
import sysconfig
import tempfile
import time
import unicodedata
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np

DATA = Path("data")  # the datasets; data/.* is left over from a script that was killed, and safe to delete
DOWNLOADS = DATA / "downloads"  # what came over the network, kept; safe to delete
FORMAT = 1  # of meta.json and the .bin files
CHUNK = 1 << 18  # characters or bytes in memory at a time; tiktoken cannot encode a run of a million blanks
BPE_CHARACTERS = 100_000_000  # BPE is trained on this much of the training split at most
COUNTED = 1 << 21  # tokens of a split at most that the lines in a picture of losses are about

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


class UserError(ValueError):
    """Something that the user can mend, in one line: "<what is wrong>; <what to do>"."""


# ----------------------------------------------------------------------------- tokenizers


class CharTokenizer:
    """One token a character. The vocabulary is the sorted list of the characters in the text."""

    def __init__(self, chars: Iterable[str]):
        self.chars = list(chars)
        self.vocab_size = len(self.chars)
        self.id_of = np.full(0x110000, -1, dtype=np.int32)  # code point -> token id, for the whole of Unicode
        self.id_of[[ord(c) for c in self.chars]] = np.arange(self.vocab_size)

    def encode_array(self, text: str) -> np.ndarray:
        """Token ids (n,), by one table look-up for the whole text and no loop over its characters.

        Raises UserError that lists the characters which the vocabulary lacks."""
        ids = self.id_of[code_points(text)]
        if ids.size and ids.min() < 0:
            unknown = ", ".join(ascii(c) for c in sorted(set(text) - set(self.chars))[:20])
            known = f"the vocabulary of {self.vocab_size} characters"
            raise UserError(f"{known} lacks {unknown}; leave that out, or prepare the data with --tokenizer=bpe")
        return ids

    def encode_documents(self, documents: list[str]) -> np.ndarray:
        """Token ids (n,) of each document and the newline after it."""
        return self.encode_array("\n".join(documents) + "\n")

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.chars[i] for i in ids)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode()

    def spec(self) -> dict:
        return {"kind": "char", "chars": self.chars}


def code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


# GPT-2 cuts a text into words before it merges bytes (Radford et al. 2019): no token spans two of them.
# L and N stand for Unicode's letters and numbers.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?[{L}]+| ?[{N}]+| ?[^\s{L}{N}]+|\s+(?!\S)|\s+"
GPT2_PATTERN = WORDS.replace("{L}", r"\p{L}").replace("{N}", r"\p{N}")


class BPETokenizer:
    """Byte-pair encoding by tiktoken: with ranks of our own (bytes -> id), or without any the encoding of GPT-2."""

    def __init__(self, ranks: dict[bytes, int] | None = None):
        import tiktoken  # here: characters need neither the package nor its download

        self.ranks = ranks
        if ranks is not None:
            self.encoding = tiktoken.Encoding("bpe", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
        else:
            import requests

            try:
                self.encoding = tiktoken.get_encoding("gpt2")
            except (requests.RequestException, ValueError) as error:  # ValueError: not the file that was asked for
                advice = "set TIKTOKEN_CACHE_DIR to a folder that has it, or use --tokenizer=char or bpe"
                raise UserError(f"cannot download the GPT-2 vocabulary ({reason(error)}); {advice}") from error
        self.vocab_size = self.encoding.n_vocab

    def encode_array(self, text: str) -> np.ndarray:
        """Token ids (n,). Nothing in a text is special: "<|endoftext|>" is cut up like any other."""
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def encode_documents(self, documents: list[str]) -> np.ndarray:
        """Token ids (n,) of each document and the newline after it; no token spans two documents."""
        newline = self.encode("\n")
        return np.concatenate([ids + newline for ids in self.encoding.encode_ordinary_batch(documents)])

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.encoding.decode_bytes(list(ids))

    def spec(self) -> dict:
        if self.ranks is None:
            return {"kind": "gpt2"}
        in_order = sorted(self.ranks, key=self.ranks.get)
        return {"kind": "bpe", "ranks": [base64.b64encode(token).decode() for token in in_order]}


def make_tokenizer(spec: dict) -> CharTokenizer | BPETokenizer:
    """The tokenizer that spec() described, in meta.json or in a checkpoint."""
    if spec["kind"] == "char":
        return CharTokenizer(spec["chars"])
    if spec["kind"] == "bpe":
        return BPETokenizer({base64.b64decode(token): rank for rank, token in enumerate(spec["ranks"])})
    return BPETokenizer()


def start_ids(tokenizer: CharTokenizer | BPETokenizer) -> list[int]:
    """What to start a text from: a newline, which also starts documents, or the first token where there is none."""
    try:
        return tokenizer.encode("\n")
    except UserError:
        return [0]


def split_words(text: str) -> list[str]:
    """Cut a text as GPT2_PATTERN does. The standard library's `re` has no \\p{L}, so the letters and the numbers that
    occur in the text are spelled out. (tiktoken differs: U+001C to U+001F, and letters newer than this Python.)"""

    def members(category: str, always: str) -> str:
        return always + "".join(re.escape(c) for c in set(text) if unicodedata.category(c)[0] == category)

    return re.findall(WORDS.replace("{L}", members("L", "a")).replace("{N}", members("N", "0")), text)


def train_bpe(text: str | Iterable[str], vocab_size: int) -> dict[bytes, int]:
    """Learn byte-pair encoding (Sennrich et al. 2016, on bytes as in GPT-2) from a text or from pieces of one.

    Start from the 256 bytes. Again and again, the pair of neighbours that occurs most often becomes a token of its own;
    a tie goes to the pair that is first in byte order. Returns the ranks, bytes -> id: vocab_size of them, or fewer
    where the text has no pairs left. Counts are kept up to date, so a merge costs the words that it touches and not
    the whole text. Raises UserError where vocab_size is below 256."""
    if vocab_size < 256:
        raise UserError(f"vocab_size={vocab_size} is too small: BPE starts from the 256 bytes; give 256 or more")
    occurrences = Counter(chain.from_iterable(map(split_words, [text] if isinstance(text, str) else text)))
    words = [list(word.encode()) for word in occurrences]  # each distinct word as token ids
    counts = list(occurrences.values())

    tokens = [bytes([i]) for i in range(256)]  # id -> bytes
    ranks = {token: i for i, token in enumerate(tokens)}  # bytes -> id
    pairs = Counter()  # (left id, right id) -> occurrences in the text
    where = defaultdict(set)  # (left id, right id) -> the words that have it
    for i, ids in enumerate(words):
        for pair in pairwise(ids):
            pairs[pair] += counts[i]
            where[pair].add(i)

    # the heap's smallest entry is the most frequent pair, and among equals the first in byte order
    def entry(pair: tuple[int, int]) -> tuple:
        return -pairs[pair], tokens[pair[0]], tokens[pair[1]], pair

    heap = [entry(pair) for pair in pairs]
    heapq.heapify(heap)
    while len(tokens) < vocab_size and heap:
        count, left, right, pair = heapq.heappop(heap)
        if count == 0 or -count != pairs[pair]:
            continue  # an old entry: the pair was counted again since
        new = ranks[left + right] = len(tokens)  # no two pairs make the same bytes: a string is merged alike everywhere
        tokens.append(left + right)
        changed = set()
        for i in where.pop(pair):
            for old in pairwise(words[i]):
                pairs[old] -= counts[i]
                changed.add(old)
            words[i] = merge(words[i], pair, new)
            for fresh in pairwise(words[i]):
                pairs[fresh] += counts[i]
                where[fresh].add(i)
                changed.add(fresh)
        for pair in changed:
            heapq.heappush(heap, entry(pair))
    return ranks


def merge(ids: list[int], pair: tuple[int, int], new: int) -> list[int]:
    """ids with every occurrence of the pair, from left to right, replaced by the new id."""
    out, i = [], 0
    while i < len(ids):
        found = tuple(ids[i : i + 2]) == pair
        out.append(new if found else ids[i])
        i += 2 if found else 1
    return out


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
            download(url, path, sha256)
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


def progress(what: str, total: int, unit: str = "MB") -> Callable[[int], None]:
    """A function to call with what is done so far (for MB, in bytes): on a terminal, after 2 s, it shows how long the
    rest will take."""
    began = shown = time.monotonic()
    scale = 1e6 if unit == "MB" else 1

    def show(done: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if sys.stderr.isatty() and now - began > 2 and (now - shown > 0.5 or done == total):
            shown, left = now, (now - began) * max(total - done, 0) / max(done, 1)
            line = f"\r{what}: {done / scale:,.0f} of {total / scale:,.0f} {unit}, {left:.0f} s left  "
            print(line, end="\n" if done == total else "", file=sys.stderr, flush=True)

    return show


class Missing(UserError):
    """The server answers, and does not have this file."""


NO_NETWORK = "give a copy with --file=, or use words or python, which need none"


def download(
    url: str, path: Path, sha256: str | None = None, retries: int = 3, backoff: float = 1.0, ways: str = NO_NETWORK
) -> None:
    """Fetch url into path, which appears only when it is whole and right.

    Streams into path.part; tries again after a pause that doubles (seconds: backoff, 2 backoff ...), and goes on where
    it broke off if the server allows ranges; checks length and SHA-256: the given one, or the one the server names.
    Raises UserError that names the ways out, Missing where the server has no such file."""
    import requests

    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as file:
        lock(file, f"another process is downloading {url}; wait for its end, and try again")
        for attempt in range(retries + 1):
            try:
                named = fetch_rest(url, part)
                break
            except requests.RequestException as error:
                status = error.response.status_code if error.response is not None else 0
                if attempt == retries or status in (400, 401, 403, 404, 410):
                    kind = Missing if status in (404, 410) else UserError
                    raise kind(f"cannot download {url} ({reason(error)}); put the file at {path}, {ways}") from error
                print(f"download stopped ({reason(error)}), trying again", file=sys.stderr)
                time.sleep(backoff * 2**attempt)
        try:
            check_sha256(part, sha256 or named, f"{url} changed or was damaged on the way; try again, {ways}")
        except UserError:
            part.unlink()
            raise
        os.replace(part, path)


def fetch_rest(url: str, part: Path) -> str | None:
    """One try: add to the file `part` what it lacks of url. Returns the SHA-256 that the Hugging Face hub names for
    its large files, in the answer that leads to them. Raises requests.RequestException."""
    import requests

    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with requests.get(url, headers=headers, stream=True, timeout=30) as response:
        if response.status_code == 416:  # the part is as long as the file or longer: begin anew
            part.unlink()
            raise requests.ConnectionError("the server has nothing to add to the part that was here")
        response.raise_for_status()
        have = have if response.status_code == 206 else 0  # 200: the server ignores ranges and sends all of it
        total = have + int(response.headers.get("Content-Length", 0))
        show = progress(f"downloading {part.stem}", total)
        with open(part, "ab" if have else "wb") as file:
            for block in response.iter_content(1 << 14):  # a block that breaks off is lost, so keep it small
                file.write(block)
                have += len(block)
                show(have)
    if "Content-Length" in response.headers and have != total:
        raise requests.ConnectionError(f"it broke off after {have} of {total} bytes")
    answers = [answer.headers.get("X-Linked-Etag", "") for answer in (*response.history, response)]
    named = max(answers).strip('"')  # the redirection has it
    return named if re.fullmatch("[0-9a-f]{64}", named) else None


def lock(file: IO, message: str) -> None:
    """Keep an open file to this process, or raise UserError. (Not on Windows, or on file systems without locks.)"""
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(message) from None
        except OSError:
            pass  # a file system without locks


def reason(error: BaseException) -> str:
    """The innermost cause in a line: requests wraps its errors three deep."""
    while error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]
    return " ".join(str(getattr(error, "reason", None) or error).split())[:200]


def check_sha256(path: Path, expected: str | None, advice: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if expected and found != expected:
        raise UserError(f"{path} has SHA-256 {found} instead of {expected}: {advice}")


def existing(name: str) -> Path:
    if not name or not Path(name).exists():
        what = f"one of {', '.join(SOURCES)}, a text file, or a folder of them"
        raise UserError(f"no file or folder {name or repr(name)}{nearest(name, SOURCES)}; give {what}")
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
            download(FINEWEB_URL + name, path)
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
        meta = {"format": FORMAT, "source": source, "tokenizer": made.spec(), "vocab_size": made.vocab_size}
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
            raise UserError(f"no dataset {folder}{nearest(Path(name).name, known)}; run: {command}")
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


def token_names(tokenizer: CharTokenizer | BPETokenizer, ids: Iterable[int], separator: int | None) -> list[str]:
    """How to show tokens one by one: blank ones in quotes, and the separator as a dot, as in the lectures."""
    texts = ["." if i == separator else tokenizer.decode([i]) for i in ids]
    return [text if text.isprintable() and text.strip() else repr(text) for text in texts]


def show_losses(data: Dataset, losses: dict[str, float]) -> None:
    """Print the loss on each split, in nats per token, beside that of a uniform guess."""
    print("\nloss    nats per token    perplexity    bits per byte")
    for name, loss in [("uniform", math.log(data.vocab_size)), *losses.items()]:
        bits = data.bits_per_byte(loss, "val" if name == "uniform" else name)
        perplexity = math.exp(loss) if loss < 700 else math.inf
        print(f"{name:7} {loss:14.4f} {perplexity:13.2f} {bits:16.4f}" + "  (ln V)" * (name == "uniform"))


def print_result(model: str, data: Dataset, params: int, losses: dict[str, float], **more) -> None:
    """The last line of a run, for people and for other programs: `result:` and pairs key=value. Losses are in nats per
    token; bpb is that on the validation split as bits per byte."""
    losses = losses | ({"bpb": data.bits_per_byte(losses["val"], "val")} if losses else {})
    result = {"model": model, "dataset": data.name, "params": params}
    result |= {name: f"{loss:.4f}" for name, loss in losses.items()} | more
    print("\nresult:", *(f"{key}={value}" for key, value in result.items()))


@functools.cache  # counted once, and not for each picture
def counted_losses(data: Dataset) -> dict[str, float]:
    """The lowest rungs of the ladder, to see where a curve stands: what a uniform guess costs on the validation split,
    and what counts of tokens and of pairs do, each plus one. Of the first COUNTED tokens, in nats per token."""
    V, losses = data.vocab_size, {"uniform": math.log(data.vocab_size)}
    train, val = (tokens[:COUNTED].astype(np.int64) for tokens in (data.train, data.val))
    for name, cells, cell in (
        ("tokens counted", V, lambda tokens: tokens[1:]),
        ("pairs counted", V * V, lambda tokens: tokens[:-1] * V + tokens[1:]),
    ):
        if cells <= COUNTED:  # else there is no table to fill
            N = np.bincount(cell(train), minlength=cells).reshape(-1, V) + 1
            P = N / N.sum(axis=1, keepdims=True)
            losses[name] = -np.log(P.ravel()[cell(val)]).mean()
    return losses


def draw_rungs(axes, data: Dataset) -> None:
    """A dotted line for each of counted_losses() across the axes of a loss curve, and their names in its legend."""
    for shade, (name, loss) in zip(("0.7", "0.4", "0"), counted_losses(data).items(), strict=False):
        axes.axhline(loss, color=shade, linestyle=":", label=f"{name} {loss:.2f}")
    axes.legend(loc="upper right")


def need_matplotlib() -> None:
    if not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs matplotlib, which is not installed; pip install matplotlib")


def save_picture(figure, path: Path) -> None:
    """Write a figure of matplotlib as a PNG of 256 colours, a third of the usual size, whole or not at all."""
    from PIL import Image  # matplotlib brings it

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture := io.BytesIO(), format="png")
    Image.open(picture).convert("RGB").quantize().save(path.with_suffix(".part"), format="png", optimize=True)
    os.replace(path.with_suffix(".part"), path)


# ----------------------------------------------------------------------------- the command line of every script


def run(main: Callable[[], None], *expected: type[Exception]) -> None:
    """Run a script's main(). What a user can cause, UserError or one of the expected exceptions, ends in one line on
    stderr and status 2; anything else is a bug, and shows its traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a console that cannot show a character prints "?" instead of dying
    try:
        main()
        sys.stdout.flush()
    except (UserError, *expected) as error:
        message = str(error)
    except BrokenPipeError:  # the reader left, as in `python sample.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except OSError as error:  # no permission, no space, a folder in place of a file ...
        if isinstance(error, (FileNotFoundError, ConnectionError, TimeoutError)):  # more likely a bug than a user
            raise
        message = f"{error.filename or 'writing'}: {error.strerror or error}; check path, permissions and free space"
    except KeyboardInterrupt:
        sys.exit(130)
    else:
        return
    print("error:", " ".join(message.splitlines()), file=sys.stderr)
    sys.exit(2)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the type of an option's value, str where none is said, as argparse.MetavarTypeHelpFormatter does."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return getattr(action.type, "__name__", "str").lower()


class OptionParser(argparse.ArgumentParser):
    """argparse with one-line errors that name the nearest option; --help begins with the script's docstring."""

    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=HelpFormatter, allow_abbrev=False)

    def parse_args(self, args=None, namespace=None):
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown option {unknown[0]}" + nearest(unknown[0].split("=")[0], self._option_string_actions))
        return options

    def error(self, message: str):
        raise UserError(f"{message}; python {self.prog} --help lists the options")


def number(kind: type, least: float = -math.inf, most: float = math.inf, above: float = -math.inf) -> Callable:
    """The type of an option, for argparse: a finite int or float within limits, of which `above` itself is outside."""
    words = f"at least {least:,}" if least > -math.inf else f"above {above:,}"
    words += f" and at most {most:,}" if most < math.inf else ""

    def parse(text: str) -> float:
        value = kind(text)
        if not (value < (2**63 if kind is int else math.inf) and least <= value <= most and value > above):
            raise argparse.ArgumentTypeError(f"{text} is out of range, it must be {words}")
        return value

    parse.__name__ = kind.__name__  # argparse says "invalid int value"
    return parse


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that is most like this one, as ", did you mean ...?"; or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""


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
    add("--shards", type=number(int, 1, 103), help="of fineweb: files of 100M training tokens, 1 to 103 (default: 1)")
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
            f"no --tokenizer={kind}{nearest(kind, kinds)}; choose {', '.join(kinds)}, or a prepared dataset"
        )
    prepare(**{name: value for name, value in vars(options).items() if value is not None})


if __name__ == "__main__":
    run(main)
