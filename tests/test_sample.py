import base64
import io
import itertools
import os
import re
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import prepare_data
import sample
import train
from common import END, BPETokenizer, CharTokenizer, load_model, make_tokenizer, save_model
from model import GPT, GPTConfig

import pytest
import torch
from conftest import posix, start
from test_model import gpt

TOKENIZER = CharTokenizer("\n .acehmnot")
RULE = "-" * 20  # between long texts


@pytest.fixture(autouse=True)
def runs():
    """Two runs with random weights: tiny of one long text, and list of documents, a line each."""
    save_model("out/tiny/best.pt", gpt({"vocab_size": 11}), TOKENIZER, start_token=None)
    save_model("out/list/best.pt", gpt({"vocab_size": 11, "separator": 0}), TOKENIZER, start_token=0)


def written(call, *options: str) -> str:
    status, out, err = call(sample, "--max_new_tokens=60", *options)
    assert status == 0, err
    return out


def rows(run: str, ids: list[int], n: int = 1, temperature: float = 0.8) -> list[str]:
    """The 60 tokens that GPT.generate() adds to n equal prompts, as texts."""
    model, tokenizer = load_model(run)
    torch.manual_seed(1337)
    idx = model.generate(torch.tensor([ids] * n), 60, temperature=temperature)
    return [tokenizer.decode(row[len(ids) :]) for row in idx.tolist()]


# ----------------------------------------------------------------------------- samples


def test_a_run_is_opened_by_its_folder_its_name_or_its_file(call):
    for run, other in (("tiny", "list"), ("list", "tiny")):
        text = written(call, run)
        for name in (f"out/{run}", f"out/{run}/best.pt", f"--init_from={run}"):
            assert written(call, name) == text
        os.utime(f"out/{other}/best.pt", (0, 0))
        os.utime(f"out/{run}/best.pt")
        assert written(call) == text != written(call, other)  # by default, the newest run


@pytest.mark.parametrize("prompt", ["", "the cat", "the cat on the mat " * 9])  # the last one exceeds the context
def test_a_prompt_is_continued_as_the_model_does(call, prompt):
    """A long text without a prompt starts at a line, and a document with the token between documents."""
    ids = TOKENIZER.encode(prompt)
    (text,) = rows("tiny", ids or [0])
    assert written(call, "tiny", f"--prompt={prompt}") == f"{prompt}{text}\n" and "\n" in text
    (document,) = rows("list", [0, *ids])
    first, *rest = document.split("\n")
    assert rest and written(call, "list", f"--prompt={prompt}", "--num_samples=1") == f"{prompt}{first}\n"


def test_the_same_seed_writes_the_same_text(call):
    text, greedy = written(call, "tiny"), written(call, "tiny", "--temperature=0")
    assert text == written(call, "tiny") == written(call, "tiny", "--top_k=0") != written(call, "tiny", "--seed=2")
    assert greedy == written(call, "tiny", "--temperature=0", "--seed=2") != text
    assert greedy == written(call, "tiny", "--top_k=1") == written(call, "tiny", "--top_p=0.00001")


def test_a_long_text_appears_as_it_is_written(call, monkeypatch):
    flushed = []
    monkeypatch.setattr(sys.stdout, "flush", lambda: flushed.append(True))
    for n in (5, 20):
        flushed.clear()
        written(call, "tiny", "--prompt=the", f"--max_new_tokens={n}")
        assert len(flushed) >= n


def counted(monkeypatch) -> list[tuple[int, int]]:
    """A list of the rows and columns of the tokens that each call of GPT.stream() yields."""
    shapes, stream = [], GPT.stream

    def counting(model, idx, *arguments, **options):
        shapes.append((len(idx), 0))
        for tokens in stream(model, idx, *arguments, **options):
            shapes[-1] = (len(idx), shapes[-1][1] + 1)
            yield tokens

    monkeypatch.setattr(GPT, "stream", counting)
    return shapes


def test_several_samples_at_once_end_with_their_documents(call, monkeypatch):
    """Each is its row of the batch. As many tokens are computed as the longest has, with the separator at its end."""
    texts = ["th" + text.split("\n")[0] for text in rows("list", [0, *TOKENIZER.encode("th")], 7)]
    shapes = counted(monkeypatch)
    out = written(call, "list", "--prompt=th", "--num_samples=7")
    assert out.splitlines() == texts and len({len(text) for text in texts}) > 2
    assert shapes == [(7, max(map(len, texts)) - 2 + 1)]
    assert len(written(call, "list").splitlines()) == 20  # by default
    monkeypatch.setattr(sample, "MAX_NUMBERS", 1)  # one at a time, as large models need it
    shapes.clear()
    assert len(written(call, "list", "--num_samples=7").splitlines()) == 7
    assert [n for n, _ in shapes] == [1] * 7


def test_long_texts_have_a_rule_between_them_and_end_at_a_line_if_asked(call):
    texts = rows("tiny", TOKENIZER.encode("the"), 3)
    out = written(call, "tiny", "--prompt=the", "--num_samples=3")
    assert out == f"\n{RULE}\n".join(f"the{text}" for text in texts) + "\n"
    stopped = written(call, "tiny", "--prompt=the", "--num_samples=3", "--stop")
    assert stopped.splitlines() == ["the" + text.split("\n")[0] for text in texts]


def cycle(ids: list[int], vocab_size: int) -> GPT:
    """A model that repeats these tokens: after each, it predicts the next one."""
    options = {"n_layer": 1, "n_head": 1, "n_embd": vocab_size + vocab_size % 2, "position": "none"}
    model = GPT(GPTConfig(vocab_size=vocab_size, block_size=16, **options))
    torch.nn.init.eye_(model.transformer.wte.weight)  # blocks add nothing at first
    for token, following in itertools.pairwise([*ids, ids[0]]):
        model.lm_head.weight.data[following, token] = 100
    return model


def test_documents_of_several_lines_end_at_the_token_between_them(call):
    tokenizer = CharTokenizer(["\n", *"abcd", END])
    model = cycle([5, 1, 2, 0, 3, 4], tokenizer.vocab_size)
    model.config.separator = 5
    save_model("out/stories/best.pt", model, tokenizer, start_token=5)
    assert written(call, "stories", "--num_samples=2") == 2 * "ab\ncd\n"
    assert written(call, "stories", "--num_samples=1", "--prompt=b") == "b\ncd\n"
    model.config.separator = -1  # windows of one long text
    save_model("out/stories/best.pt", model, tokenizer, start_token=5)
    assert written(call, "stories", "--max_new_tokens=8") == f"ab\ncd{END}ab\n"


def test_a_character_of_several_tokens_is_printed_when_it_is_whole(call):
    """Each as soon as it can be. An incomplete one at the end is U+FFFD."""
    tokens = [base64.b64encode(bytes([i])).decode() for i in range(256)]
    tokenizer = make_tokenizer({"kind": "bpe", "pattern": "(?s:.)", "tokens": tokens})  # every byte is a token
    save_model("out/bytes/best.pt", cycle(list("a🐈é.".encode()), 256), tokenizer)

    class Pieces(io.StringIO):
        def write(self, text):
            pieces.append(text)
            return len(text)

    for n, expected in ((9, ["a", "🐈", "é", ".", "a"]), (6, ["a", "🐈", "\ufffd"]), (3, ["a", "\ufffd"])):
        pieces = []
        with redirect_stdout(Pieces()):
            sample.answer(load_model("bytes")[0], {}, tokenizer, ".", sample.Options(max_new_tokens=n))
        found = [piece for piece in pieces if piece.strip("\n")]
        assert found == [".", *expected], (n, pieces)
    assert written(call, "bytes", "--prompt=a🐈", "--max_new_tokens=3") == "a🐈é.\n"


def test_a_terminal_obeys_no_sample(call, monkeypatch):
    """Its tokens, and the prompt, may be control characters."""
    tokenizer = CharTokenizer("\n\x1b[2J" + "abcdef")
    save_model("out/escapes/best.pt", gpt({"vocab_size": 11}), tokenizer, start_token=None)
    options = ("escapes", "--prompt=\x1b[2J", "--num_samples=3")
    plain = written(call, *options)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert plain.count("\x1b") > 9 and written(call, *options) == plain.replace("\x1b", "\ufffd")
    # A sample that ends within a character: its bytes, after a control character, are printed last
    monkeypatch.setattr(sample, "text_of", lambda ids, *_: "\x1b\ufffd")
    assert "\x1b" not in written(call, "escapes", "--max_new_tokens=1")


def test_options_of_nanogpt_lead_to_those_here(fails):
    for option, ours in (("start=the", "prompt"), ("out_dir=out/tiny", "init_from")):
        assert f"unknown option --{option}; see --{ours}; " in fails(sample, f"--{option}")
    assert "unknown option --eval_iters=9; see --eval_tokens; " in fails(train, "--eval_iters=9")
    for script in (train, prepare_data):  # which have no --prompt
        assert "unknown option --start=the; write --name=value; " in fails(script, "--start=the")


def test_the_newest_run_may_have_been_stopped_before_its_first_evaluation(call, fails):
    for run, other in (("tiny", "list"), ("list", "tiny")):
        os.utime(f"out/{other}/best.pt", (0, 0))
        os.utime(f"out/{run}/best.pt")
        text = written(call)
        Path("out/stopped").mkdir(exist_ok=True)
        shutil.copy(f"out/{other}/best.pt", "out/stopped/last.pt")
        assert "use out/stopped/last.pt" in fails(sample)
        os.utime("out/stopped/last.pt", (0, 0))
        assert written(call) == text


def test_gpt2_is_opened_by_its_name_and_starts_with_its_end_of_text(call, gpt2_stand_in):
    """The checkpoint that lessons/gpt2.py writes."""
    model, tokenizer = gpt({"vocab_size": 50_257, "n_embd": 8, "n_head": 1}), BPETokenizer({"kind": "gpt2"})
    save_model("out/gpt2/best.pt", model, tokenizer, start_token=50_256)
    (text,) = rows("gpt2", [50_256, *tokenizer.encode("the cat")], temperature=0)
    assert written(call, "gpt2", "--prompt=the cat", "--temperature=0") == f"the cat{text}\n"


# ----------------------------------------------------------------------------- prompts from standard input, a pipe


def test_an_interactive_session_continues_after_an_error(call, monkeypatch):
    """Each line is a prompt, whose answer is the one of --prompt."""
    options = ["list", "--num_samples=1", "--temperature=0"]
    expected = [written(call, *options, f"--prompt={prompt}") for prompt in ("the", "cat")]
    prompts = b"\xef\xbb\xbfthe\r\ncaf\xe9\n\xe2\x82\xac\ncat"  # with a byte order mark; é as in Latin-1; €
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(prompts), "utf-8"))
    status, out, err = call(sample, *options, "--max_new_tokens=60", "--interactive")
    answers = out.split(20 * "-" + "\n")
    assert (status, answers) == (0, [expected[0], "", "", expected[1]]) and expected[0] != expected[1]
    not_utf8, unknown = re.findall(r"error: .*", err)
    assert "not UTF-8" in not_utf8 and ";" in not_utf8 and "'€'" in unknown and ";" in unknown


@posix
def test_a_reader_may_leave():
    """As in `python sample.py | head`."""
    process = start("sample.py", "tiny", "--prompt=the", "--max_new_tokens=1000000")
    assert process.stdout.read(3) == "the"
    process.stdout.close()
    assert process.wait(60) == 0
    said = process.stderr.read()
    assert said.startswith("tiny: ") and said.count("\n") == 1  # which model, and no error
    process.stderr.close()


# ----------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["tiny", "--prompt=mät €"], "lacks ['ä', '€']"),
        (["tiny", "--top_p=0"], "top_p=0.0 is out of range"),
        (["tiny", "--top_p=1.1"], "top_p=1.1 is out of range"),
        (["tiny", "--temperature=-0.1"], "--temperature=-0.1"),
        (["tiny", "--device=tpu"], "tpu"),
        (["nothing"], "python train.py"),
        (["gpt2"], "python lessons/gpt2.py"),
        (["empty"], "empty"),
        (["tiny", "empty"], "unknown option empty"),
        (["other.pt"], "lm_head.weight"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_gets_one_line(fails, options, words):
    Path("empty").mkdir()
    checkpoint = torch.load("out/tiny/best.pt", weights_only=True)
    del checkpoint["model"]["lm_head.weight"]
    torch.save(checkpoint, "other.pt")
    assert words in fails(sample, *options)


def test_without_any_run_the_way_to_one_is_named(fails):
    shutil.rmtree("out")
    assert "python train.py" in fails(sample)
