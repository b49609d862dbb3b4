import base64
import io
import itertools
import json
import math
import os
import re
import select
import shutil
import subprocess
import sys
import time
import zlib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import babble, gpt2_tensors, result
from test_climb import counted
from test_gpt_js import attention_weights

import prepare_data
from common import load, load_model, make_tokenizer, save_model
from lessons import bpe, gpt2, look
from model import GPT, GPTConfig

SHAPE = {"block_size": 16, "n_layer": 3, "n_head": 2, "n_embd": 16, "zero_init": False}


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
    assert str(path.as_posix()) in out
    page = path.read_text(encoding="utf-8")
    return page, json.loads(part(page, "facts"))


def part(page: str, name: str) -> str:
    """The content of a script of the page."""
    (content,) = re.findall(rf'<script [^>]*id="{name}">(.*?)</script>', page, flags=re.S)
    return content


def unpacked(page: str, name: str) -> bytes:
    return zlib.decompress(base64.b64decode(part(page, name)))


def log_softmax(model: GPT, ids: list[int]) -> torch.Tensor:
    """The log-probabilities of the token after ids, (V,)."""
    with torch.no_grad():
        return model(torch.tensor([ids]))[0][0, -1].log_softmax(dim=0)


# ----------------------------------------------------------------------------- what is in the page


def test_it_begins_with_the_validation_split_or_with_a_prompt(call, data):
    make_run("tiny")
    _, facts = written(call, "--tokens=100")
    assert facts["text"] == Path("tiny.txt").read_text()[4720:4821] and facts["start_token"] is None
    assert written(call, "--prompt=a ee")[1]["text"] == "a ee"
    shutil.move("data/tiny", "elsewhere")
    page, facts = written(call)
    assert facts["text"] == "" and facts["counting"] is None and unpacked(page, "counted") == b""


def test_documents_are_whole_and_their_start_token_is_not_in_the_text(call, data):
    make_run("list")
    _, facts = written(call, "--tokens=20", run="list")
    assert facts["start_token"] == 0 and facts["first"] == 0
    assert 10 < len(facts["text"]) <= 20 and facts["text"].endswith("\n") and facts["text"][0] != "\n"
    val = load("list").splits["val"][: len(facts["text"]) + 1]
    assert "\n" + facts["text"] == load("list").tokenizer.decode(val.tolist())
    assert written(call, "--prompt=emma\nava\n", run="list")[1]["text"] == "emma\nava\n"


def test_it_says_what_the_model_is(call, data):
    model = make_run("tiny")
    page, facts = written(call)
    assert "<title>A GPT trained on tiny, in this page</title>" in page
    about = f"It has {model.num_params():,} parameters in 3 layers of 2 heads. "
    about += "Its loss on the validation split is 1.2346 nats (1.78 bits) per token."
    assert facts["about"].startswith(about)
    assert "rounded to 8 bits, which changes the loss by +" in facts["about"] or "by -" in facts["about"]


def test_weights_are_rounded_if_that_changes_the_loss_by_less_than_a_thousandth(call, data):
    model = make_run("tiny")
    exact = look.validation_loss(model, load("tiny"))
    page, facts = written(call)
    assert facts["bits"] == 8
    change = float(re.search(r"by ([+-][\d.]+)\.$", facts["about"])[1])
    rounded, _ = load_model("out/tiny")
    look.round_weights(rounded)
    assert change == pytest.approx(look.validation_loss(rounded, load("tiny")) - exact, abs=6e-5) and abs(change) < 1e-3
    assert len(unpacked(page, "weights")) < 1.5 * model.num_params()
    page, facts = written(call, "--weights=float32")
    assert facts["bits"] == 32 and "rounded" not in facts["about"]
    assert len(unpacked(page, "weights")) == 4 * model.num_params()

    model = make_run("tiny")
    for p in model.parameters():
        p.data *= 5  # now small differences matter
    data = load("tiny")
    save_run("tiny", model)
    exact = look.validation_loss(model, data)
    page, facts = written(call)
    assert facts["bits"] == 32 and "rounded" not in facts["about"]
    weights = b"".join(W.numpy().tobytes() for W in look.page_weights(model).values())
    assert unpacked(page, "weights") == weights
    assert written(call, "--weights=int8")[1]["bits"] == 8
    look.round_weights(model)
    assert abs(look.validation_loss(model, data) - exact) > 1e-3


def test_the_training_text_is_in_the_page_as_far_as_it_is_counted(call, data):
    make_run("tiny")
    train = load("tiny").splits["train"]
    page, facts = written(call)
    assert unpacked(page, "counted") == train.astype(np.uint8).tobytes()
    assert facts["counting"] == {"bits_per_token": 8, "separator": None, "order": 8, "discount": 0.85} | {
        "counted": len(train),
        "of": len(train),
    }
    page, _ = written(call, "--counted=50")
    assert unpacked(page, "counted") == train[:50].astype(np.uint8).tobytes()
    page, facts = written(call, "--counted=0")
    assert unpacked(page, "counted") == b"" and facts["counting"] is None
    Path("wide.txt").write_text("".join(chr(200 + i) for i in range(300)) * 20, encoding="utf-8")
    prepare_data.prepare("wide.txt")
    make_run("wide")
    page, facts = written(call, run="wide")
    assert facts["counting"]["bits_per_token"] == 16
    assert np.array_equal(np.frombuffer(unpacked(page, "counted"), "<u2"), load("wide").splits["train"])


def test_text_never_becomes_html(call):
    text = "</script><script>alert(1)</script> &lt; & <!-- facts --> <b>\"'\t$& \\1\n"
    Path("nasty.txt").write_text(text * 40, encoding="utf-8")
    bpe.prepare("nasty.txt", "", 400, "")
    make_run("nasty_bpe400")
    page, facts = written(call, f"--prompt={text}", run="nasty_bpe400")
    assert facts["text"] == text
    tags = lambda page: re.findall(r"</?script|<b>|<!--", page)
    plain = tags(look.make_page("plain", {}, b"", b""))
    assert tags(page) == plain
    vocabulary = {"tokens": ["</script>", "<!-- weights -->", "<b>"]}
    page = look.make_page("</title><b>", vocabulary, b"", b"")
    assert tags(page) == plain and json.loads(part(page, "facts")) == vocabulary
    assert "<title>&lt;/title&gt;&lt;b&gt;" in page


def test_it_is_small_and_needs_no_network(call):
    chars = "\n" + "".join(map(chr, range(33, 97)))
    Path("large.txt").write_text("".join(chars[i * i % 65] for i in range(9000)) + chars, encoding="utf-8")
    prepare_data.prepare("large.txt")
    make_run("large", block_size=128, n_layer=4, n_head=4, n_embd=128)
    status, out, _ = call(look, "out/large", "--weights=int8")
    size = Path("out/large/look.html").stat().st_size
    assert status == 0 and size < 1_500_000
    assert float(result(out)["megabytes"]) == pytest.approx(size / 1e6, abs=1e-3)
    for name in ("look.html", "gpt.js", "text.js", "ngram.js"):
        source = (look.ASSETS / name).read_text(encoding="utf-8")
        for word in ("http", "src=", "href", "url(", "@import", "fetch(", "XMLHttpRequest", "import("):
            assert word not in source, (name, word)


def test_a_page_is_refused_for_all_that_it_contains(fails, data, monkeypatch):
    make_run("tiny")
    monkeypatch.setattr(look, "compress", lambda data: "A" * 700_000)  # as if the text were long
    assert "the page would have about 1 MB; if" in fails(look, "out/tiny", "--max_megabytes=1")
    assert not Path("out/tiny/look.html").exists()


@pytest.mark.usefixtures("gpt2_stand_in")
def test_gpt2_is_refused_with_its_size_unless_it_is_asked_for(call, fails):
    options = {**gpt2.GPT2_OPTIONS, "vocab_size": 50_257, "block_size": 24, "n_layer": 1, "n_head": 2, "n_embd": 160}
    model = GPT(GPTConfig(**options))
    model.load_state_dict(gpt2.rename(gpt2_tensors(L=1, C=160)))
    save_model(Path("out/gpt2/best.pt"), model, make_tokenizer({"kind": "gpt2"}), dataset="", start_token=50_256)
    error = fails(look, "out/gpt2")
    assert "the page would have about 45 MB; if you want that, use --max_megabytes=55, or --weights=int8" in error
    run = ["gpt2", "--weights=int8", "--prompt=The cat sat"]
    assert call(look, *run)[0] == 0  # of this width, 11 MB
    assert "about 11 MB" in fails(look, *run, "--max_megabytes=10")
    page = Path("out/gpt2/look.html").read_text(encoding="utf-8")
    facts = json.loads(part(page, "facts"))
    assert (
        facts["text"] == "The cat sat"
        and facts["start_token"] == 50_256
        and len(facts["tokenizer"]["tokens"]) == 50_257
    )
    assert (
        "<title>gpt2, in this page</title>" in page
        and facts["check"]["ids"][0] == 50_256
        and facts["config"]["activation"] == "gelu_tanh"
    )


def test_what_a_user_can_cause_gives_one_line(call, fails, data):
    assert "no run with a best.pt in out/; start python train.py" in fails(look)
    make_run("tiny")
    assert "the vocabulary lacks" in fails(look, "--prompt=Ω Ω")
    assert not Path("out/tiny/look.html").exists()
    assert "tiny.txt" in fails(look, "out/tiny", "--prompt=the cat", "--out_dir=tiny.txt")  # a file is no folder


def test_a_model_that_gpt_js_does_not_have_is_refused_with_the_option(data, fails, monkeypatch):
    make_run("tiny")
    for name, values in look.CHOICES.items():
        monkeypatch.setitem(look.CHOICES, name, values[:1])  # as if a fork had added the others
    assert "gpt.js has no position=rope; add it there" in fails(look, "out/tiny", "--prompt=a")


def test_all_options_of_a_model_are_known():
    known = {*look.NUMBERS, *look.IN_TRAINING, *look.CHOICES}
    assert known == {field.name for field in fields(GPTConfig)}
    for name, values in look.CHOICES.items():
        for value in values:
            GPTConfig(**{name: value})  # ConfigError for an unknown one


def test_the_page_can_be_written_elsewhere(call, data):
    make_run("tiny")
    assert call(look, "out/tiny", "--prompt=the cat", "--out_dir=elsewhere")[0] == 0
    assert Path("elsewhere/look.html").exists() and not Path("out/tiny/look.html").exists()


def test_a_dataset_that_no_longer_fits_is_left_out(call, data):
    make_run("tiny")
    Path("tiny.txt").write_text(babble(1200) + "é")
    prepare_data.prepare("tiny.txt")
    status, out, err = call(look, "tiny")
    assert status == 0 and "data/tiny has other tokens than the model, so the page has none of its text" in out, err
    facts = json.loads(part(Path("out/tiny/look.html").read_text(encoding="utf-8"), "facts"))
    assert facts["text"] == "" and facts["counting"] is None and facts["bits"] == 32


def test_predictions_that_are_not_numbers_are_an_error(call, fails, data):
    model = make_run("tiny")
    model.lm_head.weight.data.fill_(math.nan)
    save_run("tiny", model)
    assert "NaN" in fails(look, "out/tiny", "--tokens=20")


def test_predictions_are_made_from_the_document_alone(call, data):
    model = make_run("list")
    check = written(call, "--prompt=emma\nava\nliam", "--weights=float32", run="list")[1]["check"]
    encode, expected = load("list").tokenizer.encode, []
    for text in ("\nemma\n", "\nava\n", "\nliam"):
        ids = encode(text)
        expected += [log_softmax(model, ids[:i])[ids[i]].item() for i in range(1, len(ids))]
    assert check["ids"] == encode("\nemma\nava\nliam") and check["log_p"] == pytest.approx(expected, abs=1e-5)


# ----------------------------------------------------------------------------- the page in a browser

# All of the text has been read, the likely tokens after it are known, and the page shows it
READY = "model && next_logits && read === known.length && !scheduled"


class Browser:
    """A Chromium without a window, by its DevTools protocol: JSON messages through two pipes, which it takes for its
    files 3 and 4. One process answers all tests."""

    def __init__(self, program: str, profile: Path):
        theirs, self.questions = os.pipe()
        self.answers, theirs_out = os.pipe()
        become = f"import os, sys; os.dup2({theirs}, 3); os.dup2({theirs_out}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-c", become, program, "--headless", "--no-sandbox", "--disable-gpu"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(command, pass_fds=(theirs, theirs_out), stderr=subprocess.DEVNULL)
        os.close(theirs)
        os.close(theirs_out)
        self.n, self.session, self.buffer, self.messages = 0, {}, b"", []
        page = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def read(self) -> dict:
        """The next message: an answer, or an event."""
        while b"\0" not in self.buffer:
            assert select.select([self.answers], [], [], 60)[0], "the browser is silent"
            part = os.read(self.answers, 2**20)
            if not part:
                raise EOFError("the browser has ended")
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        self.messages.append(json.loads(message))
        return self.messages[-1]

    def ask(self, method: str, **params) -> dict:
        self.n += 1
        question = {"id": self.n, "method": method, "params": params} | self.session
        os.write(self.questions, json.dumps(question).encode() + b"\0")
        while (message := self.read()).get("id") != self.n:
            pass
        return message["result"]

    def open(self, path: Path | str, width: int = 1280, scheme: str = "light") -> None:
        """Show a file."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        for url in ("about:blank", Path(path).resolve().as_uri()):  # else the same file would stay
            self.messages.clear()
            self.ask("Page.navigate", url=url)
            while not self.events("Page.loadEventFired"):
                self.read()

    def run(self, script: str):
        """The value of its last expression."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until a script is true. No script may have had an error."""
        end = time.monotonic() + 60
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, condition
            time.sleep(0.02)
        assert not self.errors()

    def show(self, run: str, *size) -> None:
        """Show look.html of a run, and wait until all of its text has been read."""
        self.open(f"out/{run}/look.html", *size)
        self.wait(READY)

    def type(self, text: str, caret: int | None = None) -> None:
        """As if the field had this text now, with the caret at its end, or there."""
        caret = len(text) if caret is None else caret
        self.run(f"input.value = {json.dumps(text)}; input.setSelectionRange({caret}, {caret})")
        self.run("input.dispatchEvent(new Event('input')); wake()")
        self.wait(READY)

    def events(self, *methods: str) -> list[dict]:
        return [message for message in self.messages if message.get("method") in methods]

    def errors(self) -> list[dict]:
        return self.events("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Skips a test where there is no Chromium that shows files, and reports errors of a script."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if not found or os.name == "nt":
        pytest.skip("no Chromium here")
    folder = tmp_path_factory.mktemp("browser")
    broken = folder / "broken.html"
    broken.write_text("<p id=p></p><script>p.textContent = 6 * 7; no_such_function()</script>")
    try:
        browser = Browser(found, folder / "profile")
    except (EOFError, OSError):
        pytest.skip(f"{found} does not start")
    try:
        browser.open(broken)
        if browser.run("p.textContent") != "42" or not browser.errors():
            pytest.skip(f"{found} shows no file here")
        yield browser
    finally:
        os.close(browser.questions)
        os.close(browser.answers)
        browser.process.wait(60)  # without a pipe, it ends


@pytest.fixture
def tiny(call, data, browser) -> GPT:
    """The model of a page that the browser shows."""
    model = make_run("tiny")
    written(call, "--weights=float32")
    browser.show("tiny")
    return model


def bars(browser: Browser, model: str) -> list[tuple[str, float]]:
    """The tokens and percentages of a model's bars, as the sliders have changed them."""
    texts = browser.run(f"[...document.getElementById({json.dumps(model)}).children].map((cell) => cell.textContent)")
    return [(name, float(p.split("→")[-1].strip("< %"))) for name, p in zip(texts[::3], texts[2::3], strict=True)]


def surprises(browser: Browser, model: str = "GPT") -> list[float]:
    return browser.run(f"known.map((token) => token.surprise[{json.dumps(model)}] ?? null)")


def bits_of(model: GPT, ids: list[int]) -> list[float]:
    """The surprise of ids[1], ids[2] ... in a context that holds them all."""
    with torch.no_grad():
        log_p = model(torch.tensor([ids[:-1]]))[0][0].log_softmax(dim=1)
    return [-log_p[i, target].item() / math.log(2) for i, target in enumerate(ids[1:])]


def test_a_text_that_is_typed_has_the_surprise_that_python_computes(call, data, browser):
    for dataset in ("tiny", "list"):
        model = make_run(dataset)
        _, facts = written(call, "--weights=float32", run=dataset)
        browser.show(dataset)
        tokenizer = load(dataset).tokenizer
        start = [0] if dataset == "list" else []
        for text in ("a e", "a ea", "a eall", "a e", "ella"):  # from one to the next, as if by a keyboard
            text = text.replace(" ", "") if dataset == "list" else text
            browser.type(text)
            ids = start + tokenizer.encode(text)
            shown = surprises(browser)[1 - len(start) :]
            assert shown == pytest.approx(bits_of(model, ids), abs=1e-4)
            mean = browser.run("$('views').children[0].textContent")
            assert mean == f"GPT: {np.mean(shown):.2f} bits"
            shades = browser.run("tokens.map((token) => +token.span.style.getPropertyValue('--s'))")
            uniform = math.log2(facts["config"]["vocab_size"])
            assert shades[1 - len(start) :] == pytest.approx([min(x / uniform, 1) for x in shown], abs=1e-6)
            expected = log_softmax(model, ids).exp()
            rows = bars(browser, "GPT")
            assert (
                len(rows) == 11 and rows[-1][0] == "others" and sum(p for _, p in rows) == pytest.approx(100, abs=0.3)
            )
            assert [p for _, p in rows[:10]] == pytest.approx((100 * expected.topk(10).values).tolist(), abs=0.06)


def test_counting_stands_beside_it_and_a_mixture(call, data, browser):
    for dataset in ("tiny", "list"):
        model, dataset_ = make_run(dataset), load(dataset)
        written(call, "--weights=float32", run=dataset)
        browser.show(dataset)
        text = "the cat" if dataset == "tiny" else "emma"
        browser.type(text)
        start = [0] if dataset == "list" else []
        ids = start + dataset_.tokenizer.encode(text)
        after = counted(dataset_, 8, padded=True)
        q = np.array([after(dataset_.tokenizer.decode(ids[:i])) for i in range(1, len(ids) + 1)])
        by_counting, both = surprises(browser, "8-gram"), surprises(browser, "both")
        for i, target in enumerate(ids[1:]):
            p = log_softmax(model, ids[: i + 1]).exp()[target].item()
            assert by_counting[i + 1 - len(start)] == pytest.approx(-math.log2(q[i, target]), abs=1e-4)
            assert both[i + 1 - len(start)] == pytest.approx(-math.log2((q[i, target] + p) / 2), abs=1e-4)
        assert [p for _, p in bars(browser, "8-gram")[:10]] == pytest.approx(100 * np.sort(q[-1])[:-11:-1], abs=0.06)
        browser.run("document.querySelectorAll('#views button')[3].click()")
        assert browser.run("tokens.map((token) => token.span.className.includes('blue'))")[1:] == [
            g < c for g, c in zip(surprises(browser)[1:], by_counting[1:], strict=True)
        ]


def test_the_token_after_the_caret_or_below_the_mouse_is_explained(browser, tiny):
    text = "the cat sat"
    browser.type(text, caret=4)
    ids = load("tiny").tokenizer.encode(text)
    bits = bits_of(tiny, ids)
    heading = lambda: browser.run("heading.textContent")
    assert heading().startswith("Token 4: c had p = ") and f"{bits[3]:.2f} bits" in heading()
    assert [name for name, _ in bars(browser, "GPT") if "✓" in name] == ["✓ c"]
    weights = attention_weights(tiny, ids[:4])  # (3, 2, 4)
    shown = browser.run("tokens.map((token) => +token.span.style.getPropertyValue('--a'))")
    mean = weights.mean(dim=(0, 1))
    assert shown == pytest.approx([*(mean / mean.max()).tolist(), *[0] * 7], abs=1e-4)
    browser.run("document.querySelectorAll('#heads button')[4].click()")
    assert "weights of layer 2, head 2" in browser.run("looked.textContent")
    shown = browser.run("tokens.map((token) => +token.span.style.getPropertyValue('--a'))")
    assert shown[:4] == pytest.approx((weights[1, 1] / weights[1, 1].max()).tolist(), abs=1e-4)
    with torch.no_grad():
        x = tiny.transformer.ln_f(tiny.transformer.wte.weight[ids[3]])
        first = tiny.lm_head(x).softmax(dim=0)
    rows = browser.run("[...layers.rows].map((row) => [...row.cells].map((cell) => cell.textContent))")
    assert [row[0] for row in rows] == ["embedding", "block 1", "block 2", "block 3"]
    assert float(rows[0][1].strip("< %")) == pytest.approx(100 * first[ids[4]].item(), abs=0.06)
    assert float(rows[3][1].strip("< %")) == pytest.approx(100 * 2 ** -bits[3], abs=0.06)

    box = browser.run(
        "(({ x, y, width, height }) => [x + width / 2, y + height / 2])(tokens[8].span.getBoundingClientRect())"
    )
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    browser.wait(READY + " && heading.textContent.startsWith('Token 8: s')")
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
    browser.wait(READY + " && heading.textContent.startsWith('Token 4: c')")
    browser.run("back.click()")
    browser.wait(READY + " && heading.textContent.startsWith('Token 3: ␣')")
    browser.type(text, caret=0)
    assert "Token 0, t, is given" in heading()
    browser.type(text)
    assert heading() == "What comes next?"


def test_a_click_on_a_token_puts_it_there(browser, tiny):
    browser.type("the cat")
    name = browser.run("$('GPT').children[3].textContent")  # the second most likely one
    browser.run("$('GPT').children[3].click()")
    browser.wait(READY)
    assert browser.run("input.value") == "the cat" + name.replace("␣", " ").replace("↵", "\n")
    browser.type("the cat", caret=1)
    other = browser.run(
        "[...$('GPT').querySelectorAll('button')].find((button) => /^[a-z]$/.test(button.textContent)).textContent"
    )
    browser.run(f"[...$('GPT').querySelectorAll('button')].find((button) => button.textContent === '{other}').click()")
    browser.wait(READY)
    assert browser.run("input.value") == f"t{other}e cat" and browser.run("heading.textContent").startswith(
        "Token 2: e"
    )


def test_sliders_reshape_the_bars_and_say_the_options(browser, tiny):
    browser.type("the cat")
    browser.run("temperature.value = 0.5; top_k.value = 7; top_p.value = 0.9; temperature.oninput()")
    assert browser.run("options.textContent") == "--temperature=0.5 --top_k=7 --top_p=0.9"
    p = (2 * log_softmax(tiny, load("tiny").tokenizer.encode("the cat"))).softmax(dim=0)
    p = p.where(p >= p.topk(7).values[-1], 0)
    p = p / p.sum()
    p = p.where(torch.tensor([p[p > x].sum() for x in p]) < 0.9, 0)
    p = p / p.sum()
    assert 1 < (p > 0).sum() < 7
    shown = [percent for _, percent in bars(browser, "GPT")]
    assert shown[:7] == pytest.approx((100 * p.topk(7).values).tolist(), abs=0.06) and shown[-1] == 0


@pytest.mark.parametrize("dataset", ["tiny", "list"])
def test_it_continues_as_python_until_it_is_stopped(call, data, browser, dataset):
    """... where each document has its own context."""
    model = make_run(dataset)
    written(call, "--weights=float32", run=dataset)
    browser.show(dataset)
    tokenizer = load(dataset).tokenizer
    for text in ("", "a"):
        browser.type(text)
        browser.run("temperature.value = 0; speed.value = 10; $('play').click()")
        browser.wait("tokens.length > 60")
        browser.run("document.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape' }))")
        browser.wait(READY)
        start = [0] if dataset == "list" or not text else []
        first = start + tokenizer.encode(text)
        n = browser.run("known.length") - len(text)
        expected = model.generate(torch.tensor([first]), n, temperature=0)[0].tolist()
        if dataset == "list":
            expected, context = [*first], first
            for _ in range(n):
                token = log_softmax(model, context).argmax().item()
                expected.append(token)
                context = [0] if token == 0 else [*context, token]
                context = context[-8:] if len(context) > 16 else context
        found = browser.run("input.value")
        assert found == tokenizer.decode(expected[len(start) :])
        assert browser.run("$('play').textContent") == "▶ Continue"
        if dataset == "tiny":
            assert "longer than the context of 16 tokens" in browser.run("note.textContent")
        time.sleep(0.1)
        assert browser.run("input.value") == found  # it has stopped
        # Read as if it had been typed: only an empty text starts from a newline
        if text or dataset == "tiny":
            browser.type(found[:-1])
            document = found[:10].split("\n")[0] if dataset == "list" else found[:10]
            expected = bits_of(model, ([0] if dataset == "list" else []) + tokenizer.encode(document))
            shown = surprises(browser)[1 - (dataset == "list") : len(document)]
            assert shown == pytest.approx(expected, abs=1e-4)
            assert (surprises(browser)[0] is None) == (dataset == "tiny")


def test_it_writes_slower_or_faster(browser, tiny):
    counts = []
    for speed in (3, 6):  # 8 and 64 tokens per second
        browser.type("a")
        browser.run(f"speed.value = {speed}")
        browser.run("document.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', ctrlKey: true }))")
        time.sleep(1)
        browser.run("pause()")
        browser.wait(READY)
        counts.append(browser.run("known.length"))
    assert 2 < counts[0] < 15 and 2 * counts[0] < counts[1] < 90


def test_what_the_vocabulary_lacks_is_marked_and_the_model_does_not_see_it(browser, tiny):
    browser.type("tΩhe 🙂ca")
    assert browser.run("[...document.querySelectorAll('.unknown')].map((span) => span.textContent)") == ["Ω", "🙂"]
    assert "The model does not know Ω 🙂 and reads the text without it." in browser.run("note.textContent")
    assert surprises(browser)[1:] == pytest.approx(bits_of(tiny, load("tiny").tokenizer.encode("the ca")), abs=1e-4)
    browser.type("the ca")
    assert browser.run("note.textContent") == ""
    browser.type("Ω")
    assert browser.run("heading.textContent") == "What comes first?"


def test_a_long_text_is_cut_and_the_page_stays_awake(browser, tiny):
    browser.run(f"input.value = {json.dumps('the cat ' * 12_500)}; input.dispatchEvent(new Event('input'))")
    assert browser.run("[input.value.length, tokens.length]") == [10_000, 10_000]
    assert "Only the first 10,000 characters are here; 90,000 were cut" in browser.run("note.textContent")
    browser.wait("read > 200")
    assert not browser.run("read === known.length")
    browser.run(f"input.value = {json.dumps('a' * 9_999 + '🙂')}; edited()")  # its second half would be cut
    assert browser.run("input.value.length") == 9_999
    browser.type("a")
    assert browser.run("note.textContent") == ""


def test_it_stops_when_the_text_is_full(browser, tiny):
    browser.run(f"input.value = {json.dumps('the cat ' * 1250)}.slice(8); input.dispatchEvent(new Event('input'))")
    browser.run("read = known.length; next_logits = new Float32Array(config.vocab_size); speed.value = 10; play()")
    browser.wait("!playing")
    assert browser.run("input.value.length") == 10_000
    assert "The text has 10,000 characters, the most" in browser.run("note.textContent")


def test_after_a_while_in_a_hidden_tab_it_does_not_catch_up(browser, tiny):
    browser.type("a")
    browser.run("speed.value = 3; play(); since -= 600_000")  # ten minutes, 4,800 tokens
    time.sleep(0.5)
    browser.run("pause()")
    browser.wait(READY)
    assert browser.run("known.length") < 30


def test_documents_are_encoded_one_by_one(call, browser):
    lines = [f"    {'  ' * (i % 3)}line {i % 7} of it" for i in range(300)]
    Path("code.txt").write_text("\n".join(lines))
    bpe.prepare("code.txt", "lines", 280, "")
    model = make_run("code_bpe280")
    _, facts = written(call, "--weights=float32", run="code_bpe280")
    browser.show("code_bpe280")
    ids = facts["check"]["ids"]
    assert ids == load("code_bpe280").splits["val"][: len(ids)].tolist() and ids.count(ids[0]) > 1
    assert browser.run("ids")[: len(ids)] == ids
    first = ids[: ids.index(ids[0], 1) + 1][:16]  # up to the next separator, and within the context
    assert surprises(browser)[: len(first) - 1] == pytest.approx(bits_of(model, first), abs=1e-4)


def test_a_byte_order_mark_is_a_character_like_others(call, browser):
    Path("marks.txt").write_text("\ufeff" + "a\ufeffb " * 500, encoding="utf-8")
    prepare_data.prepare("marks.txt")
    make_run("marks")
    written(call, "--prompt=a\ufeffb", run="marks")
    browser.show("marks")
    assert browser.run("known.map((token) => token_name(token.id))") == ["a", "U+FEFF", "b"]
    browser.run("[...$('GPT').querySelectorAll('button')].find((button) => button.textContent === 'U+FEFF').click()")
    browser.wait(READY)
    assert browser.run("input.value") == "a\ufeffb\ufeff"


def test_a_gpt_js_that_computes_something_else_is_noticed(call, data, browser):
    make_run("tiny")
    page, _ = written(call)
    browser.show("tiny")
    assert {event["params"]["request"]["url"] for event in browser.events("Network.requestWillBeSent")} == {
        Path("out/tiny/look.html").resolve().as_uri()
    }
    difference = float(re.search(r"differ by at most ([\d.e-]+)\.", browser.run("$('check').textContent"))[1])
    assert difference < 1e-4
    for formula, wrong in (("Math.max(x, 0) * x", "Math.max(x, 0)"), ("/ std;", "/ NaN;")):
        other = page.replace(formula, wrong)
        assert other != page
        Path("out/tiny/look.html").write_text(other, encoding="utf-8")
        browser.open("out/tiny/look.html")
        while not browser.run("Boolean(model)"):  # NaN causes errors, so no browser.wait()
            time.sleep(0.02)
        assert "another model than model.py" in browser.run("note.textContent")


def test_bytes_of_a_character_are_shown_as_bytes(call, browser):
    Path("wide.txt").write_text("naïve 🙂\n" * 200, encoding="utf-8")
    bpe.prepare("wide.txt", "", 257, "")
    model = make_run("wide_bpe257")
    written(call, "--prompt=é🙂", "--weights=float32", run="wide_bpe257")
    browser.show("wide_bpe257")
    assert browser.run("known.map((token) => token_name(token.id))") == [
        r"\xc3",
        r"\xa9",
        r"\xf0",
        r"\x9f",
        r"\x99",
        r"\x82",
    ]
    browser.run("temperature.value = 0; speed.value = 10; play()")
    browser.wait("tokens.length > 30")
    browser.run("pause()")
    browser.wait(READY)
    ids = browser.run("ids")
    assert ids == model.generate(torch.tensor([ids[:6]]), len(ids) - 6, temperature=0)[0].tolist()
    assert browser.run("tokens.map((token) => token.text).join('') === input.value")
    buttons = browser.run(
        "[...$('GPT').querySelectorAll('button')].map((button) => [button.textContent, button.disabled])"
    )
    assert {disabled for text, disabled in buttons if text.startswith(r"\x")} == {True}


def test_it_fits_a_desk_and_a_phone_by_day_and_by_night(call, data, browser):
    make_run("tiny")
    written(call, "--tokens=100")
    for width, scheme in itertools.product((1280, 380), ("light", "dark")):
        browser.show("tiny", width, scheme)
        sizes = browser.run("[innerWidth, document.documentElement.scrollWidth - document.documentElement.clientWidth]")
        assert sizes == [width, 0]  # nothing sticks out
        assert browser.run("input.scrollHeight - $('tokens').scrollHeight") == 0
        png = base64.b64decode(browser.ask("Page.captureScreenshot")["data"])
        image = pytest.importorskip("matplotlib.image").imread(io.BytesIO(png))[..., :3]
        assert (image.mean() < 0.4) == (scheme == "dark") and image.std() > 0.05


MEASURE = """
const left = (span, what) => {
  const at = span.textContent.search(what), range = document.createRange();
  if (at < 0) return [];
  range.setStart(span.firstChild, at);
  range.setEnd(span.firstChild, at + 1);
  return [range.getBoundingClientRect().left];
};
const places = (span) => [...left(span, LETTER), ...left(span, /[0-9]/)];
const rows = [...layers.rows].map((row) => [...row.cells[2].children].flatMap(places));
const line = tokens.slice(0, 20).map(({ span }) => left(span, /./)[0]);
const box = text.getBoundingClientRect();
const isHidden = ({ left, right }) => left < box.left || right > box.right;
const hidden = tokens.filter(({ span }) => isHidden(span.getBoundingClientRect())).length;
[rows, line, hidden, input.scrollHeight - document.getElementById("tokens").scrollHeight];
"""


@pytest.mark.parametrize(
    ("words", "letters"),
    [("שלום.", "[\u0590-\u05ff]"), ("سلام.", "[\u0600-\u06ff]"), ("שָׁלוֹם hello.", "[\u0590-\u05ff]")],
    ids=["Hebrew", "Arabic", "mixed, with vowel signs"],
)
def test_a_text_from_right_to_left_is_in_order_and_each_blank_of_a_long_run_is_in_view(words, letters, call, browser):
    Path("right.txt").write_text(f"{words}   \n" * 60, encoding="utf-8")
    prepare_data.prepare("right.txt")
    make_run("right")
    written(call, f"--prompt={words}{' ' * 250}.", run="right")
    browser.show("right")
    rows, line, hidden, taller = browser.run(
        f"(() => {{ {MEASURE.replace('LETTER', f'/{letters}/').replace('[rows, line', 'return [rows, line')} }})()"
    )
    assert all(row == sorted(row) for row in rows)  # a token, its percentage, the next token ...
    assert max(map(len, rows)) > 3
    assert line[words.index(".")] < line[0]
    assert hidden == 0 and taller == 0  # the field and the colors below it break their lines alike
