"""The page of lessons/look.py: what is in it, what is refused, that it starts, and computes what PyTorch computes."""

import base64
import json
import re
import shutil
import zlib
from dataclasses import fields
from pathlib import Path

import common
import prepare_data
from common import CharTokenizer, make_tokenizer, save_model
from lessons import bpe, look
from model import GPT, GPTConfig
from prepare_data import load

import numpy as np
import pytest
import torch
from conftest import ROOT, babble, result
from test_gpt_js import TEXT_ENCODER

SHAPE = {"block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 16, "zero_init": False}


def make_run(dataset: str, **options) -> GPT:
    """out/<dataset>/best.pt, as train.py writes it, with random weights."""
    data = load(dataset)
    model = GPT(GPTConfig(**SHAPE | {"vocab_size": data.tokenizer.vocab_size} | options))
    for p in model.parameters():
        p.data *= 3  # so that they predict something
    save_run(dataset, model)
    return model.eval()


def save_run(dataset: str, model: GPT) -> None:
    data = load(dataset)
    entries = {"dataset": dataset, "start_token": data.start_token, "val": 1.23456}
    save_model(Path("out", dataset, "best.pt"), model, data.tokenizer, **entries)


def written(call, *options: str, run: str = "tiny") -> tuple[str, dict]:
    """The page that lessons/look.py writes, and its facts."""
    status, out, err = call(look, f"out/{run}", *options)
    assert status == 0, err
    path = Path("out", run, "look.html")
    assert path.as_posix() in out
    page = path.read_text(encoding="utf-8")
    assert float(result(out)["megabytes"]) == pytest.approx(path.stat().st_size / 1e6, abs=0.006)
    return page, json.loads(part(page, "facts"))


def part(page: str, name: str) -> str:
    """The content of a script of the page."""
    (content,) = re.findall(rf'<script [^>]*id="{name}">(.*?)</script>', page, flags=re.S)
    return content


def unpacked(page: str) -> bytes:
    return zlib.decompress(base64.b64decode(part(page, "weights")))


def log_softmax(model: GPT, ids: list[int]) -> torch.Tensor:
    """The log-probabilities of the token after ids, (V,)."""
    with torch.no_grad():
        return model(torch.tensor([ids]))[0][0, -1].log_softmax(dim=0)


# ----------------------------------------------------------------------------- what is in the page


def test_it_begins_with_the_validation_split_or_with_a_prompt(call, data):
    make_run("tiny")
    page, facts = written(call)
    assert facts["text"] == Path("tiny.txt").read_text()[4720:5021] and facts["start_token"] is None
    assert "<title>A GPT trained on tiny, in this page</title>" in page
    assert "Its loss on the validation split is 1.2346 nats (1.78 bits) per token." in facts["about"]
    assert written(call, "--prompt=a ee")[1]["text"] == "a ee"
    shutil.move("data/tiny", "elsewhere")
    assert written(call)[1]["text"] == ""
    Path("tiny.txt").write_text(babble(1200) + "é")
    prepare_data.prepare("tiny.txt")  # it has other tokens than the model
    assert written(call)[1]["text"] == ""


def test_documents_are_whole_and_each_is_predicted_from_itself_alone(call, data, monkeypatch):
    monkeypatch.setattr(look, "TOKENS", 20)
    model = make_run("list")
    _, facts = written(call, run="list")
    assert facts["start_token"] == 0 and facts["first"] == 0
    assert 10 < len(facts["text"]) <= 20 and facts["text"].endswith("\n") and facts["text"][0] != "\n"
    _, facts = written(call, "--prompt=emma\nava\nliam", run="list")
    encode, expected = load("list").tokenizer.encode, []
    for text in ("\nemma\n", "\nava\n", "\nliam"):
        ids = encode(text)
        expected += [log_softmax(model, ids[:i])[ids[i]].item() for i in range(1, len(ids))]
    check = facts["check"]
    assert facts["text"] == "emma\nava\nliam" and check["ids"] == encode("\nemma\nava\nliam")
    assert check["log_p"] == pytest.approx(expected, abs=1e-5)


def test_weights_are_exact_or_rounded_to_a_quarter_of_the_size(call, data):
    model = make_run("tiny")
    page, facts = written(call)
    weights = b"".join(W.numpy().tobytes() for W in look.page_weights(model).values())
    assert unpacked(page) == weights and not facts["int8"] and "rounded" not in facts["about"]
    page, facts = written(call, "--int8")
    assert len(unpacked(page)) < 0.35 * len(weights)  # with a scale for each row, here of 16 weights
    assert facts["int8"] and "rounded to 8 bits" in facts["about"]
    ids = facts["check"]["ids"]
    look.round_weights(model)
    assert facts["check"]["log_p"][0] == pytest.approx(log_softmax(model, ids[:1])[ids[1]].item(), abs=1e-5)


def test_text_never_becomes_html(call):
    text = "</script><script>alert(1)</script> &lt; & <!-- facts --> <b>\"'\t$& \\1\n"
    Path("nasty.txt").write_text(text * 40, encoding="utf-8")
    prepare_data.prepare("nasty.txt")
    make_run("nasty")
    page, facts = written(call, f"--prompt={text}", run="nasty")
    assert facts["text"] == text
    tags = lambda page: re.findall(r"</?script|<b>|<!--", page)
    plain = tags(look.make_page("plain", {}, b"").decode())
    assert tags(page) == plain
    page = look.make_page("</title><b>", {"tokens": ["</script>", "<!-- weights -->", "<b>"]}, b"").decode()
    assert tags(page) == plain and "<title>&lt;/title&gt;&lt;b&gt;" in page


def test_it_needs_no_network():
    for name in ("look.html", "gpt.js", "text.js"):
        source = (look.ASSETS / name).read_text(encoding="utf-8")
        for word in ("http", "src=", "href", "url(", "@import", "fetch(", "XMLHttpRequest", "import("):
            assert word not in source, (name, word)


# ----------------------------------------------------------------------------- what is refused


def test_all_options_of_a_model_are_known_and_another_one_is_refused_by_name(data, fails, monkeypatch):
    assert {*look.NUMBERS, *look.IN_TRAINING, *look.CHOICES} == {field.name for field in fields(GPTConfig)}
    make_run("tiny")
    for name, values in look.CHOICES.items():
        for value in values:
            GPTConfig(**{name: value})  # ValueError for an unknown one
        monkeypatch.setitem(look.CHOICES, name, values[:1])  # as if a fork had added the others
    assert "gpt.js has no position=rope; add it there" in fails(look, "out/tiny", "--prompt=a")


class WordTokenizer(CharTokenizer):
    """A tokenizer of a fork."""

    def __init__(self, words):
        super().__init__(words)
        self.fields = {"kind": "word", "words": words}

    def encode(self, text):
        return [self.id_of[word] for word in re.findall(r"\n| ?[^ \n]+", text)]


def test_a_tokenizer_of_its_own_is_refused_by_name(data, fails, monkeypatch):
    model = make_run("tiny")
    tokenizer = WordTokenizer([str(i) for i in range(model.config.vocab_size)])
    save_model("out/words/best.pt", model, tokenizer, dataset="tiny")
    monkeypatch.setattr(common, "make_tokenizer", lambda fields: WordTokenizer(fields["words"]))
    assert "text.js has no tokenizer of kind word; add it there" in fails(look, "out/words")
    assert not Path("out/words/look.html").exists()


def test_an_untested_pattern_is_refused(data, fails):
    assert look.PATTERNS == (bpe.GPT2_PATTERN, bpe.PATTERN)
    tokenizer = bpe.bpe_tokenizer({bytes([i]): i for i in range(256)})
    tokenizer.fields["pattern"] = r"\S++|\s"  # JavaScript has no ++
    model = GPT(GPTConfig(vocab_size=256, **SHAPE))
    save_model("out/other/best.pt", model, tokenizer, dataset="")
    assert "not tested with this BPE pattern" in fails(look, "out/other")


@pytest.mark.usefixtures("gpt2_stand_in")
def test_gpt2_fits_into_a_page_with_8_bits(call, fails, monkeypatch):
    options = {"position": "learned", "activation": "gelu_tanh", "bias": True, "qk_norm": False, "tie_weights": True}
    model = GPT(GPTConfig(50_257, block_size=24, n_layer=1, n_head=2, n_embd=128, **options))
    save_model(Path("out/gpt2/best.pt"), model, make_tokenizer({"kind": "gpt2"}), dataset="", start_token=50_256)
    monkeypatch.setattr(look, "LARGEST", 30)
    assert "the page would have 35 MB, too much for a browser; try --int8" in fails(look, "gpt2")
    page, facts = written(call, "--int8", "--prompt=The cat sat", run="gpt2")
    assert facts["start_token"] == facts["check"]["ids"][0] == 50_256
    assert len(facts["tokenizer"]["tokens"]) == 50_257 and facts["config"]["activation"] == "gelu_tanh"
    assert "<title>gpt2, in this page</title>" in page


def test_what_a_user_can_cause_gives_one_line(fails, data):
    assert "there is no run in out/; start one: python train.py" in fails(look)
    model = make_run("tiny")
    assert "the vocabulary lacks" in fails(look, "--prompt=Ω Ω")
    model.lm_head.weight.data.fill_(torch.nan)
    save_run("tiny", model)
    assert "NaN" in fails(look, "out/tiny")
    assert not Path("out/tiny/look.html").exists()


# ----------------------------------------------------------------------------- the page starts
# What its script needs of a browser, in as few lines as it can be: elements that remember what is put into them.

BROWSER = (
    TEXT_ENCODER
    + """
class TextDecoder {
  decode(bytes) { return decodeURIComponent(escape(String.fromCharCode(...bytes))); }
}
class Element {
  constructor(tag) {
    const style = { setProperty(name, value) { this[name] = value; } };
    const classList = { add() {}, remove() {} };
    Object.assign(this, { tag, style, classList, children: [], textContent: "", value: "", selectionStart: 1e9 });
  }
  append(...parts) { this.children.push(...parts); }
  replaceChildren() { this.children = []; }
  remove() {}
  setSelectionRange() {}
  querySelectorAll(tag) { return this.children.filter((child) => child.tag === tag); }
  get previousElementSibling() { return new Element("output"); }
}
const elements = {}, frames = [];
const document = {
  getElementById: (id) => elements[id] ??= new Element("div"),
  createElement: (tag) => new Element(tag),
  querySelectorAll: () => [],
};
const window = {}, innerWidth = 1280, performance = Date, requestAnimationFrame = (work) => frames.push(work);
Object.assign(document.getElementById("facts"), { textContent: FACTS });
document.getElementById("speed").value = "10";
for (const id of ["temperature", "top_p"]) document.getElementById(id).value = "1";
document.getElementById("top_k").value = "51";
"""
)


@pytest.mark.parametrize("dataset", ["tiny", "list"])
def test_the_page_starts_and_colors_each_token_by_its_surprise(call, data, dataset):
    py_mini_racer = pytest.importorskip("py_mini_racer", reason="mini-racer, a JavaScript engine, is not installed")
    model = make_run(dataset, block_size=64)
    page, facts = written(call, "--prompt=a eall" if dataset == "tiny" else "--prompt=emma\nava", run=dataset)
    engine = py_mini_racer.MiniRacer()
    engine.eval(BROWSER.replace("FACTS", json.dumps(part(page, "facts"))))
    on_error, gpt_js, text_js, script = re.findall(r"<script>(.*?)</script>", page, flags=re.S)
    assert (ROOT / "assets" / "gpt.js").read_text(encoding="utf-8") == gpt_js
    begin, end = script.index("async function bytes_of"), script.index("// facts.check")
    weights = f"bytes_of = () => Uint8Array.from({list(unpacked(page))}).buffer;\n"  # there is no DecompressionStream
    for source in (on_error.replace("window.onerror", "var onerror"), gpt_js, text_js):
        engine.eval(source)
    engine.eval(script[:begin] + "const " + weights + script[end:])
    engine.eval("while (frames.length > 0) frames.shift()();")
    value = lambda expression: json.loads(engine.eval(f"JSON.stringify({expression})"))
    assert not any(value("document.getElementById('note').children.map((note) => note.textContent ?? note)"))
    assert "differ by at most" in value("document.getElementById('check').textContent")

    ids = facts["check"]["ids"]
    given = 0 if facts["start_token"] is None else 1
    surprises = value("known.map((token) => token.surprise)")[1 - given :]
    assert surprises == pytest.approx([-x / np.log(2) for x in facts["check"]["log_p"]], abs=1e-4)
    start = 0 if dataset == "tiny" else len(ids) - 1 - ids[::-1].index(0)  # of the last document
    p = log_softmax(model, ids[start:]).exp()
    shown = value("document.getElementById('bars').children.map((cell) => cell.textContent)")
    assert shown[2].startswith(f"{100 * p.max():.1f}") or shown[2].startswith(f"{100 * p.max():.2f}")
    engine.eval("temperature = document.getElementById('temperature'); temperature.value = '0'; play();")
    engine.eval("for (let i = 0; i < 100 && tokens.length < 20; i++) frames.shift()?.();")
    continued = value("ids")[start : start + 40]  # within the context
    expected = ids[start:]
    while len(expected) < len(continued) and expected[-1] != facts["start_token"]:
        expected.append(log_softmax(model, expected).argmax().item())
    assert continued[: len(expected)] == expected and len(expected) > len(ids) - start
