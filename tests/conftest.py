"""What the tests share: an empty working folder each, the scripts as a user runs them, and small texts."""

import contextlib
import functools
import io
import itertools
import json
import os
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import common
import prepare_data
import train

import pytest
import tiktoken
import torch

torch.set_num_threads(1)  # the tests' tensors are too small to share out
# The tests mean the CPU: on a GPU, --device=auto would take that one. start() sees to other processes.
torch.accelerator.current_accelerator = lambda check_available=False: None
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["MPLBACKEND"] = "Agg"  # plots without windows
for card in (torch.cuda, torch.xpu, torch.mtia):  # torch.manual_seed() notes the stack for each, even if there is none
    card.manual_seed_all = lambda seed: None

NAMES = ["emma", "olivia", "ava", "isabella", "sophia", "mia", "amelia", "ella", "mila", "aria", "liam", "emil", "a"]

ROOT = Path(__file__).parents[1]
CLIMB = ("micrograd.py", "bigram.py", "ngram.py", "mlp.py", "attention.py")  # each imports nothing of ours
LIST = ROOT / "data" / "names.txt"
SHARED = ROOT.parent / "shared"  # local copies of the downloads, where someone has put them; never needed to pass


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Each test starts in an empty folder, from the same random numbers, and with no plot open."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture
def data():
    """data/tiny, a text, and data/list, documents."""
    Path("tiny.txt").write_text(babble(1200))
    Path("list.txt").write_text("\n".join(NAMES * 4))
    prepare_data.prepare("tiny.txt")
    prepare_data.prepare("list.txt", documents="lines")


@pytest.fixture
def long_data():
    """data/prose, a text, and data/many, documents: both long enough to measure something on them."""
    Path("prose.txt").write_text(babble(6000))
    Path("many.txt").write_text("\n".join(NAMES * 120))
    prepare_data.prepare("prose.txt")
    prepare_data.prepare("many.txt", documents="lines")


def shakespeare_txt() -> Path:
    """The text of shakespeare, where a script has downloaded it or someone has put it. Skips the test where there is
    none."""
    for path in (ROOT / prepare_data.DOWNLOADS / "shakespeare.txt", SHARED / "data" / "tinyshakespeare.txt"):
        if path.exists():
            return path
    pytest.skip("no local copy of shakespeare: python prepare_data.py shakespeare downloads it")


@pytest.fixture
def names() -> Path:
    """data/names, and the path of its text."""
    prepare_data.prepare("names")
    return prepare_data.NAMES


@pytest.fixture
def gpt2_vocabulary(monkeypatch):
    """Skips a test that needs the GPT-2 vocabulary on a machine that has no copy of it."""
    if not os.environ.get("TIKTOKEN_CACHE_DIR"):
        if not (SHARED / "tiktoken_cache").exists():
            pytest.skip("no local copy of the GPT-2 vocabulary: set TIKTOKEN_CACHE_DIR to a folder that has it")
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))


@functools.cache
def stand_in() -> tiktoken.Encoding:
    from lessons import bpe

    pairs = itertools.islice(itertools.product(range(256), repeat=2), 50_000)
    ranks = {bytes([i]): i for i in range(256)} | {bytes(pair): i for i, pair in enumerate(pairs, start=256)}
    more = {"pat_str": bpe.GPT2_PATTERN, "special_tokens": {"<|endoftext|>": 50_256}}
    return tiktoken.Encoding("gpt2", mergeable_ranks=ranks, **more)


@pytest.fixture
def gpt2_stand_in(monkeypatch):
    """A tokenizer in place of GPT-2's, for a machine that has no copy: as many tokens, bytes and pairs of bytes."""
    monkeypatch.setattr("tiktoken.get_encoding", lambda _: stand_in())


def gpt2_tensors(V: int = 50_257, T: int = 24, L: int = 2, C: int = 128) -> dict[str, torch.Tensor]:
    """Random weights as published: matrices of the blocks are (inputs, outputs), the masks are there."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"wte.weight": (V, C), "wpe.weight": (T, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
    for i in range(L):
        block = {"ln_1.weight": (C,), "ln_1.bias": (C,), "ln_2.weight": (C,), "ln_2.bias": (C,)}
        block |= {"attn.bias": (1, 1, T, T), "attn.c_attn.weight": (C, 3 * C), "attn.c_attn.bias": (3 * C,)}
        block |= {"attn.c_proj.weight": (C, C), "attn.c_proj.bias": (C,), "mlp.c_fc.weight": (C, 4 * C)}
        block |= {"mlp.c_fc.bias": (4 * C,), "mlp.c_proj.weight": (4 * C, C), "mlp.c_proj.bias": (C,)}
        shapes |= {f"h.{i}.{name}": shape for name, shape in block.items()}
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def safetensors(tensors: dict[str, torch.Tensor], spaces: int = 0, header: Callable | None = None) -> bytes:
    """The bytes of a file. `spaces` after the JSON move what follows; header(entries) may spoil them."""
    entries, parts, at = {}, [], 0
    for name, tensor in tensors.items():
        parts.append(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        offsets = [at, at := at + len(parts[-1])]
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    if header:
        header(entries)
    text = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode() + b" " * spaces
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def slashes(text: str) -> str:
    """What was printed, with the paths of Windows as on other systems."""
    return re.sub(r"(?<=\w)\\(?=\w)", "/", text) if os.name == "nt" else text


posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals, limits or processes")


def start(script: str, *options: str, **more) -> subprocess.Popen:
    """A script as a user starts it, on the CPU, and in the current folder: so PYTHONPATH tells a lesson its root."""
    device = ["--device=cpu"] if script in ("train.py", "sample.py") else []
    command = [sys.executable, ROOT / script, *device, *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", env=env, **more)


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def rung(script: str, *options: object) -> SimpleNamespace:
    """Run a script of the climb in this process, in the current folder: its names, and as `out` what it printed. Some
    of these scripts run from top to bottom, as a notebook, so that no test can import them. One disables gradients at
    its end, so they are enabled again; and a test in float64 gets what a user gets, float32."""
    printed = io.StringIO()
    dtype = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed), torch.enable_grad():
        patch.setattr(sys, "argv", [script, *map(str, options)])
        torch.set_default_dtype(torch.float32)
        try:
            names = runpy.run_path(str(ROOT / script), run_name="__main__")
        finally:
            torch.set_default_dtype(dtype)
    return SimpleNamespace(**names, out=printed.getvalue())


def refused(script: str, *options: object) -> str:
    """What rung() prints on stderr, if it ends with status 2."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), pytest.raises(SystemExit) as leaving:
        rung(script, *options)
    assert leaving.value.code == 2, printed.getvalue()
    return printed.getvalue()


@pytest.fixture(scope="session")
def words_txt(tmp_path_factory) -> Path:
    """A list of sixty names, so that a script needs little time."""
    path = tmp_path_factory.mktemp("words") / "words.txt"
    path.write_text("\n".join(LIST.read_text().split()[:60]) + "\n")
    return path


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a script's main() in this process: call(module, *options) -> (exit status, stdout, stderr)."""

    def run(module, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, options)])
        capsys.readouterr()
        status = 0
        try:
            common.run(module.main)
        except SystemExit as leaving:
            status = leaving.code
        return status, *map(slashes, capsys.readouterr())

    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest keeps its own Ctrl-C
    return run


@pytest.fixture
def fails(call):
    """fails(module, *options) -> the one line "error: <what is wrong>; <what to do>" with which it must end."""

    def run(module, *options: str) -> str:
        status, _, err = call(module, *options)
        assert status == 2, (status, err)
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, err
        assert err.endswith(lines[0] + "\n"), err
        assert ";" in lines[0], lines[0]
        return lines[0]

    return run


def result(out: str) -> dict[str, str]:
    """The key=value pairs of the line `result: ...`, which must be the last one."""
    assert out.splitlines()[-1].startswith("result: "), out
    return dict(pair.split("=", 1) for pair in out.splitlines()[-1].split()[1:])


def loss_of(model_, dataset, split: str, n_tokens: int = 0, batch_size: int = 8) -> float:
    """The mean loss over a split, in windows that never span two documents. n_tokens: on so many tokens; 0: on all."""
    n_tokens = n_tokens or len(dataset.splits[split])
    config = SimpleNamespace(block_size=model_.config.block_size, batch_size=batch_size, eval_tokens=n_tokens)
    training = model_.training
    loss = train.evaluate(model_, dataset, split, config, contextlib.nullcontext())
    model_.train(training)
    return loss


class Malicious:
    """A pickle of this makes a folder when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("harmed",)


@pytest.fixture
def double():
    """A test in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def babble(words: int, seed: int = 0) -> str:
    """A text that a small model can learn a little of: a few words in random order, in lines."""
    rng = random.Random(seed)
    vocabulary = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "slept", "until", "noon"]
    return "".join(rng.choice(vocabulary) + (".\n" if i % 8 == 7 else " ") for i in range(words))
