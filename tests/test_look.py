import base64
import html
import html.parser
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
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import NAMES, babble, gpt2_tensors, result, safetensors

import look
import prepare_data
import sample
from checkpoint import load_model, save_model
from dataset import load
from mlp import contexts
from model import GPT, GPTConfig
from ngram import NGrams, count_ngrams, next_tokens

SHAPE = {"block_size": 16, "n_layer": 3, "n_head": 2, "n_embd": 16, "zero_init": False}


def make_run(dataset: str, **options) -> GPT:
    """out/<dataset>/best.pt, as train.py writes it, with random weights."""
    data = load(dataset)
    config = GPTConfig(**SHAPE | {"vocab_size": data.vocab_size, "start_token": data.start_token} | options)
    model = GPT(config)
    for p in model.parameters():
        p.data *= 3  # so that they predict something
    more = {"config": {"dataset": dataset}, "start_token": data.start_token}
    save_model(Path("out", dataset, "best.pt"), model, data.tokenizer, **more)
    return model.eval()


class Reader(html.parser.HTMLParser):
    """The text of the tokens, their shades, and all tags of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.texts, self.shades = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "span" and (style := dict(attrs).get("style")):
            self.shades.append(float(style.removeprefix("--s:")))
            self.texts.append("")

    def handle_data(self, text):
        if self.tags and self.tags[-1][0] == "span" and self.texts:
            self.texts[-1] += text

    def handle_endtag(self, tag):
        self.tags.append((f"/{tag}", {}))


def written(call, *options: str, run: str = "tiny") -> tuple[str, dict]:
    """The page that look.py writes, and its numbers."""
    status, out, err = call(look, f"--init_from=out/{run}", "--device=cpu", *options)
    assert status == 0, err
    path = Path("out", run, "look.html")
    assert str(path.as_posix()) in out
    page = path.read_text(encoding="utf-8")
    (numbers,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.S)
    return page, json.loads(numbers)


def log_softmax(model: GPT, ids: list[int]) -> torch.Tensor:
    """The log-probabilities of the token after ids, (V,)."""
    with torch.no_grad():
        return model(torch.tensor([ids]))[0][0, -1].log_softmax(dim=0)


# ----------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("dataset", ["tiny", "list"])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_predictions_are_those_of_the_model_in_that_context(call, data, dataset, position):
    model = make_run(dataset, position=position)
    _, page = written(call, "--tokens=60", run=dataset)
    ids, starts = page["ids"], page["starts"]
    assert ids == load(dataset).val[: len(ids)].tolist() and 25 < len(ids) <= 61
    for i in range(len(ids) - 1):
        expected = log_softmax(model, ids[starts[i] : i + 1])
        tokens, log_p = page["top"][i]
        assert log_p == pytest.approx(expected[tokens].tolist(), abs=2e-4)
        assert log_p == sorted(log_p, reverse=True)
        assert page["bits"]["GPT"][i] == pytest.approx(-expected[ids[i + 1]].item() / math.log(2), abs=2e-4)


def test_a_context_is_the_document_or_at_least_half_a_block():
    config = GPTConfig(**SHAPE | {"start_token": 0})
    assert look.context_starts([1] * 40, GPTConfig(**SHAPE)) == [0] * 16 + [9] * 9 + [18] * 9 + [27] * 6
    small = GPTConfig(**SHAPE | {"block_size": 4})
    assert look.context_starts([1] * 10, small) == [0, 0, 0, 0, 3, 3, 3, 6, 6, 6]  # the docstring's example
    ids = [0, *[1] * 11] * 5
    for i, start in enumerate(look.context_starts(ids, config)):
        assert i + 1 - start <= 16 and start <= i - i % 12  # the whole document
    starts = look.context_starts([0] + [1] * 40, config)  # longer than a block
    assert starts == look.context_starts([1] * 41, GPTConfig(**SHAPE))


def test_other_tokens_have_the_rest_of_the_probability_at_each_temperature(call):
    Path("wide.txt").write_text("".join(chr(200 + i) for i in range(80)) * 20, encoding="utf-8")
    prepare_data.prepare("wide.txt")
    model = make_run("wide")
    _, page = written(call, "--tokens=20", run="wide")
    for i, ((_, log_p), others) in enumerate(zip(page["top"], page["others"], strict=True)):
        assert len(log_p) == 50 and len(others) == 20
        logits = log_softmax(model, page["ids"][page["starts"][i] : i + 1])
        for temperature, log_sum in zip(np.arange(1, 21) / 10, others, strict=True):
            expected = (logits / temperature).softmax(dim=0).sort(descending=True).values[50:].sum().item()
            rest = math.exp(log_sum)
            rest /= rest + sum(math.exp(x / temperature) for x in log_p)
            assert rest == pytest.approx(expected, rel=0.02, abs=1e-6)


@pytest.mark.parametrize("dataset", ["tiny", "list"])
def test_attention_is_that_of_the_model(call, data, dataset):
    model = make_run(dataset)
    _, page = written(call, "--tokens=30", run=dataset)
    ids, starts = page["ids"], page["starts"]
    weights = (np.frombuffer(base64.b64decode(page["attention"]), dtype=np.uint8) / 255) ** 2
    for i in range(len(ids) - 1):
        n = i + 1 - starts[i]
        row, weights = weights[: 6 * n].reshape(3, 2, n), weights[6 * n :]
        expected = sample.attention_weights(model, torch.tensor([ids[starts[i] : i + 1]]))[:, 0, :, -1]
        assert np.abs(row - expected.numpy()).max() < 0.005
        assert np.abs(row.sum(axis=2) - 1).max() < 0.02
        if dataset == "list":
            document = max(j for j in range(i + 1) if ids[j] == model.config.start_token)
            assert (row[:, :, : document - starts[i]] == 0).all()
    assert len(weights) == 0


def test_the_lens_starts_at_the_embedding_and_ends_with_the_prediction(call, data):
    model = make_run("tiny")
    _, page = written(call, "--tokens=40")
    for i, layers in enumerate(page["layers"]):
        assert len(layers) == 4
        token = page["ids"][i]
        with torch.no_grad():
            x = model.transformer.ln_f(model.transformer.wte.weight[token])
            first = model.logits(x).softmax(dim=0)
        (tokens, p), of_target = layers[0]
        assert p == pytest.approx(first[tokens].tolist(), abs=2e-4) and p == sorted(p, reverse=True)
        assert of_target == pytest.approx(first[page["ids"][i + 1]].item(), abs=2e-4)
        (tokens, p), of_target = layers[-1]
        likely, log_p = page["top"][i]
        assert tokens == likely[:3] and p == pytest.approx(np.exp(log_p[:3]), abs=2e-4)
        assert of_target == pytest.approx(2 ** -page["bits"]["GPT"][i], abs=2e-4)
    assert any(layers[1] != layers[2] for layers in page["layers"])


@pytest.mark.parametrize("dataset", ["tiny", "list"])
def test_counting_is_the_8_gram_model_of_the_training_split(call, data, dataset):
    model, dataset_ = make_run(dataset), load(dataset)
    _, page = written(call, "--tokens=30", run=dataset)
    ids, V = page["ids"], dataset_.vocab_size
    table = NGrams(*count_ngrams(dataset_.train, 8, dataset_.separator), V, dataset_.separator)
    X, _ = contexts(np.array(ids), np.arange(1, len(ids)), 7, dataset_.separator)
    q = next_tokens(partial(table.kneser_ney, discount=0.85), X.numpy(), V)
    assert list(page["compared"]) == ["8-gram", "both"] and list(page["bits"]) == ["GPT", "8-gram", "both"]
    for i, target in enumerate(ids[1:]):
        p = log_softmax(model, ids[page["starts"][i] : i + 1]).exp().numpy()
        for name, expected in (("8-gram", q[i]), ("both", (p + q[i]) / 2)):
            tokens, shown = page["compared"][name][i]
            assert len(tokens) == 10 and shown == pytest.approx(expected[tokens], abs=2e-4)
            assert shown == pytest.approx(np.sort(expected)[: -len(shown) - 1 : -1], abs=2e-4)
            assert page["bits"][name][i] == pytest.approx(-np.log2(expected[target]), abs=2e-4)


# ----------------------------------------------------------------------------- the text


def test_a_prompt_needs_no_dataset_and_starts_a_document(call, data):
    make_run("tiny")
    model = make_run("list")
    shutil.move("data/tiny", "elsewhere")
    page, numbers = written(call, "--prompt=a ee")
    assert Reader(page).texts == ["a", " ", "e", "e"]  # the first one is given
    assert numbers["compared"] == {} and list(numbers["bits"]) == ["GPT"] and "4 heads" not in page
    Path("two.txt").write_text("emma\nava\n")
    page, numbers = written(call, "--prompt_file=two.txt", run="list")
    assert Reader(page).texts == ["↵\n", *"emma", "↵\n", *"ava", "↵\n"]
    assert numbers["ids"][0] == model.config.start_token and "8-gram" in numbers["compared"]
    assert "9 tokens of your text" in page.split("</title>")[0]
    assert len(written(call, "--prompt_file=two.txt", "--tokens=3", run="list")[1]["ids"]) == 4


def test_whole_documents_are_shown_and_the_result_is_their_mean(call, data):
    make_run("list")
    page, numbers = written(call, "--tokens=20", run="list")
    texts = Reader(page).texts
    assert texts[0] == texts[-1] == "↵\n" and 10 < len(texts) <= 21
    out = call(look, "--init_from=out/list", "--tokens=20")[1]
    assert float(result(out)["bits"]) == pytest.approx(np.mean(numbers["bits"]["GPT"]), abs=1e-4)
    assert int(result(out)["tokens"]) == len(texts) - 1 == len(numbers["top"])


def test_without_javascript_the_colors_and_the_mean_are_there(call, data):
    make_run("tiny")
    page, numbers = written(call, "--tokens=100")
    reader, bits = Reader(page), numbers["bits"]["GPT"]
    uniform = math.log2(len(numbers["names"]))
    assert reader.shades == [0.0, *(pytest.approx(min(x / uniform, 1), abs=0.006) for x in bits)]
    assert len({*reader.shades}) > 5
    assert "".join(reader.texts).replace("↵", "") == Path("tiny.txt").read_text()[4720:4821]
    assert f"<b>{np.mean(bits):.2f} bits</b>" in page and f"{uniform:.1f} bits" in page
    assert "<noscript>" in page and '<main id="details" hidden>' in page


def test_text_never_becomes_html(call):
    text = "</script><script>alert(1)</script> &lt; & <!-- numbers --> <b>\"'\t$& \\1\n"
    Path("nasty.txt").write_text(text * 40, encoding="utf-8")
    prepare_data.prepare("nasty.txt", "bpe", 400)
    make_run("nasty_bpe400")
    page, numbers = written(call, f"--prompt={text}", run="nasty_bpe400")
    reader = Reader(page)
    shown = text.replace("\t", r"\t").replace("\n", "↵\n")
    assert "".join(reader.texts) == shown
    title = f"</title><b>{text}"
    names = ["</script>", "&amp;", "<!-- numbers -->", "<b>"]  # one token each
    page = look.make_page(title, names, numbers | {"bits": {"GPT": [1, 2, 3]}, "names": names})
    nasty = Reader(page)
    assert nasty.texts == names
    others = lambda page: [tag for tag, _ in page.tags if tag.strip("/") != "span"]
    assert others(nasty) == others(reader)
    assert json.loads(re.search(r'id="data">(.*?)</script>', page, flags=re.S)[1])["names"] == names
    assert html.escape(title) in page


def test_bytes_of_a_character_are_shown_as_bytes(call):
    Path("wide.txt").write_text("naïve 🙂\n" * 200, encoding="utf-8")
    prepare_data.prepare("wide.txt", "bpe", 257)
    make_run("wide_bpe257")
    page, _ = written(call, "--prompt=é🙂", run="wide_bpe257")
    assert Reader(page).texts == [r"\xc3", r"\xa9", r"\xf0", r"\x9f", r"\x99", r"\x82"]


@pytest.mark.usefixtures("gpt2_stand_in")
def test_gpt2_reads_a_prompt(call, fails):
    weights = Path("data/downloads/gpt2/model.safetensors")
    weights.parent.mkdir(parents=True)
    weights.write_bytes(safetensors(gpt2_tensors(L=1, C=16)))
    assert "gpt2 was not trained on a dataset; give a text with --prompt=" in fails(look, "--init_from=gpt2")
    status, _, err = call(look, "--init_from=gpt2", "--prompt=The cat sat")
    assert status == 0, err
    page = Path("out/gpt2/look.html").read_text(encoding="utf-8")
    texts = Reader(page).texts
    assert texts[0] == "<|endoftext|>" and "".join(texts[1:]) == "The cat sat"
    model, _ = load_model("gpt2")
    numbers = json.loads(re.search(r'id="data">(.*?)</script>', page, flags=re.S)[1])
    assert numbers["compared"] == {} and len(numbers["top"][0][0]) == 50 and numbers["ids"][0] == 50_256
    expected = log_softmax(model, numbers["ids"][:-1])
    assert numbers["top"][-1][1] == pytest.approx(expected.topk(50).values.tolist(), abs=1e-3)


def test_the_page_is_small_and_needs_no_network(call):
    chars = "\n" + "".join(map(chr, range(33, 97)))
    Path("large.txt").write_text("".join(chars[i * i % 65] for i in range(9000)) + chars, encoding="utf-8")
    prepare_data.prepare("large.txt")
    make_run("large", block_size=128, n_layer=4, n_head=4, n_embd=128)
    page, numbers = written(call, run="large")
    assert len(numbers["top"]) == 300 and len(page.encode()) < 2_000_000
    template = look.PAGE.read_text(encoding="utf-8")
    for word in ("http", "//", "src=", "href", "url(", "@import", "fetch", "import("):
        found = [line for line in template.splitlines() if word in re.sub(r"(^|  )// .*", "", line)]
        assert not found, (word, found)


def test_what_a_user_can_cause_gives_one_line(call, fails, data):
    assert "no run of train.py" in fails(look)
    make_run("tiny")
    Path("one.txt").write_text("a")
    run = "--init_from=out/tiny"
    Path("empty.txt").write_text("")
    assert "no file gone.txt; check" in fails(look, run, "--prompt_file=gone.txt")
    assert "empty.txt is empty; " in fails(look, run, "--prompt_file=empty.txt")
    assert "--prompt and --prompt_file; give one" in fails(look, run, "--prompt=a", "--prompt_file=one.txt")
    assert "give a longer text" in fails(look, run, "--prompt_file=one.txt")
    assert "the vocabulary lacks" in fails(look, run, "--prompt=Ω Ω")
    Path("tiny.txt").write_text(babble(1200).upper())
    prepare_data.prepare("tiny.txt")
    assert "has other tokens than" in fails(look, run)
    assert not Path("out/tiny/look.html").exists()
    error = fails(look, run, "--prompt=the cat", "--out_dir=tiny.txt")  # a file is no folder
    assert error.startswith("error: cannot write tiny.txt")


def test_the_page_can_be_written_elsewhere(call, data):
    make_run("tiny")
    assert call(look, "--init_from=out/tiny", "--prompt=the cat", "--out_dir=elsewhere")[0] == 0
    assert Path("elsewhere/look.html").exists() and not Path("out/tiny/look.html").exists()


def test_a_dataset_that_has_changed_since_the_run_is_remarked_if_the_text_is_from_it(call, data):
    model = make_run("list")
    dataset = load("list")
    entries = {"config": {"dataset": "list"}, "start_token": dataset.start_token, "text": dataset.hashes()}
    save_model(Path("out/list/best.pt"), model, dataset.tokenizer, **entries)
    note = "note: list has changed since this run: its val split may have lines that the model was trained on\n"
    assert "note" not in call(look, "--init_from=out/list")[1]
    Path("list.txt").write_text("\n".join(NAMES * 5))
    prepare_data.prepare("list.txt", documents="lines")
    assert note in call(look, "--init_from=out/list")[1]
    assert "note" not in call(look, "--init_from=out/list", "--prompt=emma")[1]


def test_predictions_that_are_not_numbers_are_an_error(call, fails, data):
    model = make_run("tiny")
    model.lm_head.weight.data.fill_(math.nan)
    dataset = load("tiny")
    save_model(Path("out/tiny/best.pt"), model, dataset.tokenizer, config={"dataset": "tiny"}, start_token=None)
    assert "NaN" in fails(look, "--init_from=out/tiny", "--tokens=20")


# ----------------------------------------------------------------------------- the page in a browser


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
        for domain in ("Page", "Runtime", "Log"):
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

    def open(self, path: Path | str, token: int, width: int = 1280, scheme: str = "light") -> None:
        """Show a file, and choose a token."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        for url in ("about:blank", f"{Path(path).resolve().as_uri()}#{token}"):  # else the same file would stay
            self.messages.clear()
            self.ask("Page.navigate", url=url)
            while not self.events("Page.loadEventFired"):
                self.read()

    def run(self, script: str):
        """The value of its last expression."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def page(self) -> str:
        """The page as its scripts have changed it; they must have had no errors."""
        page = self.run("document.documentElement.outerHTML")
        assert not self.errors()
        return page

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
        browser.open(broken, 0)
        if browser.run("p.textContent") != "42" or not browser.errors():
            pytest.skip(f"{found} shows no file here")
        yield browser
    finally:
        os.close(browser.questions)
        os.close(browser.answers)
        browser.process.wait(60)  # without a pipe, it ends


def bars(page: str, model: str) -> list[tuple[str, float]]:
    """The tokens and percentages of a model's bars."""
    box = re.search(rf'<div class="bars mono" id="{model}">(.*?)</div>', page, flags=re.S)[1]
    rows = re.findall(r"<span[^>]*>([^<]*)</span><i[^>]*></i><span[^>]*>(?:&lt; )?([\d.]+) %</span>", box)
    assert len(rows) == box.count("<i")
    return rows


def distribution(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """What sample_token() draws from: (V,)."""
    p = (logits / temperature).softmax(dim=0)
    p = p.where(p >= p.topk(top_k).values[-1], 0)
    p = p / p.sum()
    before = torch.tensor([p[p > x].sum() for x in p])
    p = p.where(before < top_p, 0)
    return p / p.sum()


def test_a_browser_shows_the_token_of_the_address_and_the_sliders_reshape_its_bars(call, data, browser):
    model = make_run("tiny")
    _, numbers = written(call, "--tokens=60")
    browser.open("out/tiny/look.html", 17)
    shown = browser.page()
    assert "Token 17: " in shown and f"{numbers['bits']['GPT'][16]:.2f} bits" in shown
    logits = log_softmax(model, numbers["ids"][numbers["starts"][16] : 17])
    for (_, percent), token in zip(bars(shown, "GPT")[:10], numbers["top"][16][0], strict=False):
        assert float(percent) == pytest.approx(100 * logits[token].exp().item(), abs=0.06)
    true = numbers["names"][numbers["ids"][17]].replace("\n", "").replace(" ", "␣")
    for name in ("GPT", "8-gram", "both"):
        rows = bars(shown, name)
        assert 11 <= len(rows) <= 12 and rows[-1][0] == "all others"
        assert sum(float(x) for _, x in rows) == pytest.approx(100, abs=0.3)
        assert [token for token, _ in rows if "✓" in token] == [f"✓ {true}"]
    assert shown.count("<svg") == 1 + 3 * 2 + 1  # the last one is in the script
    assert shown.count("<td>embedding") == shown.count("<td>block 3") == 1
    assert shown.count('class="from"') == 1 and 'class="chosen"' in shown

    change = "temperature.value = 0.5; top_k.value = 7; top_p.value = 0.9; temperature.oninput();"
    change += 'document.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));'
    change += "heads.children[2].click(); document.querySelectorAll('#views button')[3].click();"
    browser.run(change)
    shown = browser.page()
    assert "Token 18: " in shown and "--temperature=0.5 --top_k=7 --top_p=0.9" in shown
    assert "layer 1, head 2; the highest" in re.sub(r"\s+", " ", shown) and 'class="blue"' in shown
    logits = log_softmax(model, numbers["ids"][numbers["starts"][17] : 18])
    expected = distribution(logits, 0.5, 7, 0.9)
    for (_, percent), token in zip(bars(shown, "GPT")[:10], numbers["top"][17][0][:10], strict=True):
        assert float(percent) == pytest.approx(100 * expected[token].item(), abs=0.06)
    assert 0 < (expected > 0).sum() < 7


def test_it_fits_a_desk_and_a_phone_by_day_and_by_night(call, data, browser):
    make_run("tiny")
    written(call, "--tokens=100")
    for width, scheme in itertools.product((1280, 390), ("light", "dark")):
        browser.open("out/tiny/look.html", 17, width, scheme)
        assert browser.page()
        sizes = browser.run("[innerWidth, document.documentElement.scrollWidth - document.documentElement.clientWidth]")
        assert sizes == [width, 0]  # nothing sticks out
        png = base64.b64decode(browser.ask("Page.captureScreenshot")["data"])
        image = pytest.importorskip("matplotlib.image").imread(io.BytesIO(png))[..., :3]
        assert (image.mean() < 0.4) == (scheme == "dark") and image.std() > 0.05


def test_a_true_token_that_is_not_among_the_likely_ones_has_its_bar(call, browser):
    Path("wide.txt").write_text("".join(chr(200 + i) for i in range(80)) * 20, encoding="utf-8")
    prepare_data.prepare("wide.txt")
    model = make_run("wide")
    _, numbers = written(call, "--tokens=60", run="wide")
    likely = [tokens for tokens, _ in numbers["top"]]
    chosen = next(i + 1 for i, tokens in enumerate(likely) if numbers["ids"][i + 1] not in tokens)
    browser.open("out/wide/look.html", chosen)
    shown = browser.page()
    logits = log_softmax(model, numbers["ids"][numbers["starts"][chosen - 1] : chosen])
    ((token, percent),) = [row for row in bars(shown, "GPT") if "✓" in row[0]]
    assert token == f"✓ {numbers['names'][numbers['ids'][chosen]]}"
    assert float(percent) == pytest.approx(100 * logits[numbers["ids"][chosen]].exp().item(), abs=0.06)


MEASURE = """
const left = (span, what) => {
  const at = span.textContent.search(what), range = document.createRange();
  if (at < 0) return [];
  range.setStart(span.firstChild, at);
  range.setEnd(span.firstChild, at + 1);
  return [range.getBoundingClientRect().left];
};
const row = [...layers.rows[0].cells[2].children].flatMap((span) => [...left(span, LETTER), ...left(span, /[0-9]/)]);
const line = [...text.children].slice(0, 20).map((span) => left(span, /./)[0]);
const box = text.getBoundingClientRect();
const isHidden = ({ left, right }) => left < box.left || right > box.right;
const hidden = [...text.children].filter((span) => isHidden(span.getBoundingClientRect())).length;
[row, line, hidden];
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
    browser.open("out/right/look.html", 3)
    row, line, hidden = browser.run(MEASURE.replace("LETTER", f"/{letters}/"))
    assert not browser.errors()
    assert len(row) > 3 and row == sorted(row)  # a token, its percentage, the next token ...
    assert line[words.index(".")] < line[0]
    assert hidden == 0


def test_a_prompt_needs_no_dataset_that_still_fits(call, fails, data):
    make_run("tiny")
    Path("tiny.txt").write_text(babble(1200) + "é")
    prepare_data.prepare("tiny.txt")
    status, out, err = call(look, "--init_from=out/tiny", "--prompt=the cat")
    assert status == 0 and "has other tokens than out/tiny/best.pt, so no n-gram model is shown" in out, err
    assert "prepare it again from the text of the training, or give a text with" in fails(look, "--init_from=out/tiny")
