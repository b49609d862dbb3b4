"""Open data/<dataset>/: the tokens of its splits, its tokenizer, its documents.

from dataset import load
data = load("words")        # prepare_data.py made it; words, names ... are prepared on first use
data.tokenizer.decode(data.train[:20].tolist())
"""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from console import UserError
from tokenizer import Tokenizer, make_tokenizer, start_ids

DATA = Path("data")
FORMAT = 1  # version of meta.json and the .bin files


@dataclass(eq=False)  # compared by identity: == of two arrays is an array
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
    # The id that starts each document: the separator, or <|endoftext|>. None: none does
    start_token: int | None = None

    def need(self, tokens: int, what: str) -> None:
        """Raise UserError if the training or validation split has fewer tokens. what: what needs them, such as an
        option."""
        for split, ids in (("train", self.train), ("val", self.val)):
            if len(ids) < tokens:
                few = f"the {split} split of {self.name} has {len(ids)} tokens, too few for {what}"
                raise UserError(f"{few} ({tokens} needed); use a longer text, or a smaller value of an option")

    def documents(self, split: str) -> list[list[int]]:
        """Return the documents of a split, without separators. Raises UserError if it has none."""
        if self.separator is None:
            advice = "use words, names, or your own text with --documents"
            raise UserError(f"{self.name} has no documents; {advice}")
        ids = getattr(self, split)
        separators = np.flatnonzero(ids == self.separator)
        # Cut before each separator: the first part is empty, the last one is a separator alone
        parts = np.split(ids, separators)
        return [part[1:].tolist() for part in parts[1:-1]]

    def texts(self, split: str) -> list[str]:
        """Return the documents of a split as texts. Raises UserError if it has none."""
        texts = []
        for ids in self.documents(split):
            texts.append(self.tokenizer.decode(ids))
        return texts

    @property
    def has_lines(self) -> bool:
        """Is each document one line? Then the separator is a newline."""
        return self.separator is not None and self.separator != self.tokenizer.end_id

    def hashes(self) -> dict[str, str]:
        """Return {split: SHA-256}. A run keeps them, to tell later whether the text is still the same."""
        return {split: entry["sha256"] for split, entry in self.splits.items()}

    def bits_per_byte(self, loss: float, split: str) -> float:
        """Convert a loss in nats per token to bits per byte of UTF-8 text, which can be compared
        across tokenizers; NaN if the text is unknown."""
        tokens = self.splits[split]["tokens"]
        n_bytes = self.splits[split]["bytes"]
        if n_bytes == 0:
            return math.nan
        return loss * tokens / (n_bytes * math.log(2))


def load(name: str) -> Dataset:
    """Open data/<name>; prepare it first if it is built in (and not fineweb). Raises UserError."""
    folder = DATA / name
    if not (folder / "meta.json").exists():
        from prepare_data import prepare_built_in  # here: most runs find their data

        prepare_built_in(name)
    meta = read_meta(folder / "meta.json")
    ids = {}
    for split, entry in meta["splits"].items():
        ids[split] = open_split(folder / f"{split}.bin", entry["tokens"], meta["dtype"])
    return Dataset(
        name=name,
        train=ids["train"],
        val=ids["val"],
        test=ids.get("test"),
        tokenizer=make_tokenizer(meta["tokenizer"]),
        vocab_size=meta["vocab_size"],
        separator=meta["separator"],
        splits=meta["splits"],
        start_token=meta["start_token"],
    )


def read_meta(path: Path) -> dict:
    """Read meta.json. Raises UserError if it is damaged, or of another version of the code."""
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        is_whole = meta.pop("sha256") == checksum(meta)
        is_ours = meta["format"] == FORMAT and "start_token" in meta
    except (ValueError, LookupError, TypeError, AttributeError):  # no JSON, or no dict
        is_whole = is_ours = False
    if not (is_whole and is_ours):
        advice = f"delete {path.parent}, and run prepare_data.py again"
        raise UserError(f"{path} is damaged, or of another version; {advice}")
    return meta


def open_split(path: Path, tokens: int, dtype: str) -> np.ndarray:
    """Map the ids in a file into memory, (tokens,). Raises UserError if the file has more or fewer."""
    little_endian = np.dtype(dtype).newbyteorder("<")
    n_bytes = tokens * little_endian.itemsize
    if not path.exists() or path.stat().st_size != n_bytes:
        advice = f"delete {path.parent}, and run prepare_data.py again"
        raise UserError(f"{path} does not have {n_bytes} bytes; {advice}")
    return np.memmap(path, dtype=little_endian, mode="r")


def start_context(data: Dataset, length: int, rng: np.random.Generator) -> list[int]:
    """Return `length` tokens to start a sample from: separators, or a part of the training split
    that ends with a newline, if it has one."""
    if length == 0 or data.separator is not None:
        return [data.separator] * length
    tokens = data.train[: 1 << 24]  # enough to choose from
    newline = start_ids(data.tokenizer)[-1]
    # Where such parts start. A token follows each, so that there is something to predict
    starts = np.flatnonzero(tokens[length - 1 : -1] == newline)
    at = rng.choice(starts) if len(starts) > 0 else rng.integers(len(tokens) - length)
    return tokens[at : at + length].tolist()


def checksum(meta: dict) -> str:
    """Return the SHA-256 of a dict of plain values: for meta.json, of all its other entries."""
    return hashlib.sha256(json.dumps(meta).encode()).hexdigest()
