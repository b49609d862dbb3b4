import copy
import gc
import io
import itertools
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from conftest import ROOT, babble, finish, gpt2_tensors, loss_of, posix, result, safetensors, start
from test_model import SMALL, batch, config, every_combination, shaken  # noqa: F401
from test_prepare_data import shard
from test_train import SHORT

import prepare_data
import sample
import train
from checkpoint import load_checkpoint, load_model, save_model
from console import UserError
from dataset import load
from lessons import layers
from lessons.bpe import BPETokenizer, train_bpe
from lessons.layers import BFloat16Linear, BlockLinear, Int8Linear, replace_layers, speed_up
from lessons.peft import attach
from model import GPT, GPTConfig
from runtime import check_compiler
from sample import KVCache

EMOJI = "the cat 🐈 sat on the mat 🧶\n" * 200


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with out/<run>/best.pt for characters, documents and BPE, and without any dataset. The model with BPE is
    untrained."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("signal.signal", lambda *_: None)
        Path("tiny.txt").write_text(babble(1200))
        Path("list.txt").write_text("\n".join(babble(2, seed=i) for i in range(300)))
        prepare_data.prepare("tiny.txt")
        prepare_data.prepare("list.txt", documents="lines")
        patch.setattr("folder.draw_losses", lambda *_: None)
        longer = [*SHORT, "--max_iters=30", "--eval_interval=30", "--n_embd=32"]
        for dataset in ("tiny", "list"):
            patch.setattr("sys.argv", ["train.py", *longer, f"--dataset={dataset}", f"--out_dir=out/{dataset}"])
            train.main()
        gc.collect()  # Windows removes no file that is still mapped
        shutil.rmtree("data")
        tokenizer = BPETokenizer(train_bpe(EMOJI, 260))
        save_model(
            Path("out/emoji/best.pt"), GPT(GPTConfig(**SMALL | {"vocab_size": 260})), tokenizer, start_token=None
        )
    return folder


@pytest.fixture(autouse=True)
def in_runs(runs, monkeypatch):
    monkeypatch.chdir(runs)


def written(call, *options: str, run: str = "tiny") -> str:
    status, out, err = call(sample, f"--init_from=out/{run}", "--max_new_tokens=60", *options)
    assert status == 0, err
    return out


def test_a_new_user_samples_from_the_newest_run_of_train_py():
    Path("out/tiny/best.pt").touch()
    Path("out/finetune").mkdir()  # newer, but without a log: a model of lessons/finetune.py or lessons/rlhf.py
    shutil.copy("out/list/best.pt", "out/finetune/best.pt")
    done = finish(start("sample.py", "--prompt=the cat", "--max_new_tokens=30"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the cat") and len(done.stdout) == len("the cat") + 30 + 1
    shutil.rmtree("out/finetune")
    assert "out/tiny/best.pt" in done.stderr
    assert result(done.stderr)["tokens"] == "30" and float(result(done.stderr)["tokens_per_second"]) > 0
    assert not Path("data").exists()


def test_the_same_seed_writes_the_same_text(call):
    text, greedy = written(call), written(call, "--temperature=0")
    assert text == written(call) == written(call, "--top_k=0") != written(call, "--seed=2")
    assert greedy == written(call, "--temperature=0", "--seed=2")
    assert greedy == written(call, "--top_k=1") == written(call, "--top_p=0.00001")


def test_without_a_prompt_a_sample_starts_from_a_newline(call):
    """This model knows no documents, so it has no token that starts each of them."""
    model, tokenizer = load_model("out/tiny")
    newline = torch.tensor([tokenizer.encode("\n")])
    generator = torch.Generator().manual_seed(1337)
    rows = sample.generate(model, newline, 60, temperature=0.8, generator=generator)
    assert written(call) == tokenizer.decode(rows[0, 1:].tolist()) + "\n"


def noted(monkeypatch, place, name: str) -> list[torch.Tensor]:
    """A list of the prompts with which this function is called."""
    prompts, function = [], getattr(place, name)

    def note(model, idx, *arguments, **options):
        prompts.append(idx)
        return function(model, idx, *arguments, **options)

    monkeypatch.setattr(place, name, note)
    return prompts


def test_many_samples_of_a_large_vocabulary_are_not_drawn_at_once(call, monkeypatch):
    """The logits of one row outweigh the keys and values of a small model."""
    prompts = noted(monkeypatch, sample, "stream")
    model, _ = load_model("out/tiny")
    row = sum(part.nbytes for pair in KVCache(model, 1).kv for part in pair) + 5 * 4 * model.config.vocab_size
    monkeypatch.setattr(sample, "MAX_MEMORY", 3 * row)
    assert len(written(call, "--num_samples=7", "--max_new_tokens=2").split("-" * 20)) == 7
    assert [len(idx) for idx in prompts] == [3, 3, 1]


def test_a_model_of_fineweb_starts_where_its_documents_do(call, tmp_path, monkeypatch, gpt2_stand_in):
    """With <|endoftext|>, though windows of training start anywhere; in train.py's sample, too."""
    monkeypatch.chdir(tmp_path)
    Path("copies").mkdir()
    for name in ("fineweb_train_000001", "fineweb_val_000000"):
        shard(Path(f"copies/{name}.bin"), [50256, 5, 6, 7] * 20)
    assert call(prepare_data, "fineweb", "--file=copies")[0] == 0
    data = load("fineweb")
    assert (data.separator, data.start_token) == (None, 50256)
    prompts = [noted(monkeypatch, GPT, "generate"), noted(monkeypatch, sample, "stream")]
    out = call(train, *SHORT, "--dataset=fineweb", "--out_dir=out/web", "--max_iters=1", "--n_embd=4")[1]
    assert "<|endoftext|>" not in out.split("result:")[0].split("\n\n")[1][:13]
    call(sample, "--max_new_tokens=2")
    assert [[idx.tolist() for idx in of_one] for of_one in prompts] == [[[[50256]]], [[[50256]]]]


def test_documents_begin_with_the_separator_and_stop_there(call):
    names = written(call, "--num_samples=12", "--stop", run="list").splitlines()
    assert len(names) == 12
    model, tokenizer = load_model("out/list")
    text = tokenizer.decode(model.generate(torch.tensor([tokenizer.encode("\nth")]), 60, temperature=0)[0].tolist())
    assert written(call, "--prompt=th", "--temperature=0", "--stop", run="list") == text[1:].split("\n")[0] + "\n"


def test_samples_are_written_as_many_at_once_as_memory_allows(call, monkeypatch):
    """Three rows of a batch, of which the first stops early: each printed text is the text of its row."""
    model, tokenizer = load_model("out/tiny")
    ids = torch.tensor([tokenizer.encode("the")] * 3)
    rows = sample.generate(model, ids, 60, temperature=0.8, generator=torch.Generator().manual_seed(1337)).tolist()
    texts = [tokenizer.decode(row)[3:].split("\n")[0] for row in rows]
    assert len({len(text) for text in texts}) > 1
    options = ["--num_samples=3", "--prompt=the", "--stop"]
    assert written(call, *options) == "".join(f"the{text}\n" for text in texts)
    monkeypatch.setattr(sample, "MAX_MEMORY", 1)  # one at a time, as large models need it
    assert written(call, *options, "--temperature=0") == 3 * written(call, *options[1:], "--temperature=0")


def test_samples_stop_when_all_have_ended(call, monkeypatch):
    """As many tokens are computed as the longest sample has, with the newline at its end; the tokens of all count."""
    columns, stream = [], sample.stream

    def counted(*arguments, **options):
        for column in stream(*arguments, **options):
            columns.append(column)
            yield column

    monkeypatch.setattr(sample, "stream", counted)
    _, out, err = call(sample, "--init_from=out/list", "--num_samples=3", "--stop")
    lengths = [len(text) + 1 for text in out.splitlines()]
    assert len(columns) == max(lengths) < 500 and len(set(lengths)) > 1
    assert result(err)["tokens"] == f"{sum(lengths)}"


@pytest.mark.slow
def test_compiled_samples_are_the_same(call):
    try:
        check_compiler(torch.device("cpu"))
    except UserError as error:
        pytest.skip(str(error))
    options = ["--num_samples=2", "--prompt=the mat"]
    assert written(call, *options, "--compile") == written(call, *options)


def test_a_machine_that_cannot_compile_is_told_how_to_go_on(fails, monkeypatch):
    """test_train.py has such a machine; here it is only asked whether sample.py checks."""

    def no_compiler(device):
        raise UserError(f"torch.compile fails on {device}; use --compile=false")

    monkeypatch.setattr(sample, "check_compiler", no_compiler)
    assert "torch.compile fails on cpu" in fails(sample, "--init_from=out/tiny", "--device=cpu", "--compile")


def test_the_attention_of_the_text_is_drawn(call, figures, monkeypatch):
    monkeypatch.setattr(sample, "PLOTTED", 14)
    out = written(call, "--prompt=the cat", "--plot", "--num_samples=2", "--max_new_tokens=30")
    ((figure, path),) = figures
    assert path == Path("out/tiny/attention.png") and path.read_bytes().startswith(b"\x89PNG")
    path.unlink()
    model, tokenizer = load_model("out/tiny")
    T = 14
    ids = tokenizer.encode(out[:T])  # the first of the two texts, from its prompt on
    weights = sample.attention_weights(model, torch.tensor([ids]))[:, 0].flatten(0, 1).numpy()  # (n_layer nh, T, T)
    grid = figure.axes[0].get_gridspec()
    assert (grid.nrows, grid.ncols) == (model.config.n_layer, model.config.n_head)
    assert len(figure.axes) == len(weights)
    for axes, expected in zip(figure.axes, weights, strict=True):
        assert axes.images[0].get_array().data == pytest.approx(expected, abs=1e-6)
        names = [label.get_text() for label in axes.get_xticklabels()]
        assert names == [c if c.strip() else repr(c) for c in out[:T]]
    assert figure.axes[-1].get_title() == f"layer {model.config.n_layer}, head {model.config.n_head}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_and_cache_have_the_dtype_that_was_asked_for(call, monkeypatch, dtype):
    seen, layer = set(), KVCache.layer

    def noted_layer(self, i):
        def noted_store(*new):
            seen.update(x.dtype for x in (*self.kv[i], *new))
            return layer(self, i)(*new)

        return noted_store

    monkeypatch.setattr(KVCache, "layer", noted_layer)
    options = ["--prompt=the", f"--dtype={dtype}", "--max_new_tokens=20"]
    assert len(written(call, *options)) == 3 + 20 + 1
    assert seen == {getattr(torch, dtype)}
    assert len(written(call, *options, "--int8")) == 3 + 20 + 1


def test_a_document_is_drawn_with_a_dot_where_it_starts(call, figures):
    """As many tokens as the model sees at once; in bfloat16, which NumPy lacks."""
    written(call, "--plot", "--dtype=bfloat16", run="list")
    labels = figures[0][0].axes[0].get_yticklabels()
    assert len(labels) == load_model("out/list")[0].config.block_size == 16 and labels[0].get_text() == "."


def test_characters_of_several_tokens_come_out_whole():
    tokenizer = BPETokenizer(train_bpe("", 256))  # every byte a token
    tokens = tokenizer.encode("a🐈é🧶\nb")

    def pieces(n: int, stop: bool) -> list[str]:
        text = sample.Sample(tokenizer, stop)
        return [piece for piece in (*map(text.add, tokens[:n]), text.end()) if piece]

    assert pieces(99, False) == ["a", "🐈", "é", "🧶", "\n", "b"]
    assert "".join(pieces(3, False)) == "a\ufffd"
    assert pieces(99, True) == ["a", "🐈", "é", "🧶"]


def keyboard(text: bytes) -> io.TextIOWrapper:
    """What takes the place of standard input."""
    return io.TextIOWrapper(io.BytesIO(text), encoding="utf-8", newline="")


def test_an_interactive_session_answers_each_line_until_it_ends(call, monkeypatch):
    monkeypatch.setattr("sys.stdin", keyboard("the\n€\ncat\n".encode()))
    status, out, err = call(sample, "--init_from=out/list", "--interactive", "--stop", "--temperature=0")
    assert status == 2, err
    model, tokenizer = load_model("out/list")
    answers = []
    for prompt in ("the", "cat"):
        ids = torch.tensor([tokenizer.encode(f"\n{prompt}")])
        text = tokenizer.decode(model.generate(ids, 60, temperature=0)[0].tolist())
        answers.append(text[1:].split("\n")[0])
    rule = "-" * 20  # between them, the answer to the second prompt is empty
    assert out == f"{answers[0]}\n{rule}\n{rule}\n{answers[1]}\n"
    assert "error: the vocabulary lacks '€' (U+20AC)" in err and err.count("result:") == 2
    assert err.endswith("error: 1 of 3 prompts failed; see their errors above\n")


@pytest.mark.slow
def test_prompts_come_through_a_pipe_as_a_user_starts_it(call, monkeypatch):
    options, prompts = ["--init_from=out/list", "--interactive", "--stop", "--temperature=0"], "the\n€\ncat\n"
    process = start("sample.py", *options, stdin=subprocess.PIPE)
    out, _ = process.communicate(prompts, timeout=60)
    monkeypatch.setattr("sys.stdin", keyboard(prompts.encode()))
    assert (process.returncode, out) == call(sample, *options)[:2]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_ctrl_c_ends_an_answer_in_a_terminal_and_else_the_program(call, monkeypatch, is_terminal):
    stream, prompts = sample.stream, keyboard(b"the\ncat\n")

    def interrupted(*arguments, **options):
        yield next(stream(*arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(sample, "stream", interrupted)
    monkeypatch.setattr(prompts, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stdin", prompts)
    status, out, err = call(sample, "--init_from=out/tiny", "--interactive")
    assert status == (0 if is_terminal else 130), err
    assert ("the" in out, "cat" in out, out.count("> ")) == ((True, True, 3) if is_terminal else (True, False, 0))


@pytest.mark.slow
@posix
def test_a_terminal_has_long_lines_arrow_keys_and_ctrl_c():
    """Ctrl-C ends an answer; at the prompt, it ends the program."""
    # A shell lets background processes ignore Ctrl-C
    spawn = "import os, pty, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    spawn += "sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    options = ["--device=cpu", "--init_from=out/tiny", "--interactive", "--max_new_tokens=1000000"]
    command = [sys.executable, "-c", spawn, sys.executable, ROOT / "sample.py", *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    stuck = threading.Timer(60, process.kill)  # then reading ends
    stuck.start()

    def read_until(end: bytes) -> bytes:
        out = b""
        while not out.endswith(end):
            byte = process.stdout.read(1)
            assert byte, out
            out += byte
        return out

    read_until(b"> ")
    process.stdin.write(b"the cat " * 700 + b"\n")
    read_until(b"the prompt has 5600 tokens")
    process.stdin.write(b"\x03")
    read_until(b"> ")
    process.stdin.write(b"te\x1b[Dh\n")  # with the left arrow
    read_until(b"\r\nthe")
    process.stdin.write(b"\x03")
    read_until(b"> ")
    # Enter, because Ctrl-C right after the prompt may come before Python waits for a key
    process.stdin.write(b"\x03\n")
    assert process.wait(60) == 130
    stuck.cancel()
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize("line", [b"caf\xe9\n", b"\xff\xfe\n"])
def test_a_prompt_that_is_no_text_has_unknown_characters(call, monkeypatch, line):
    monkeypatch.setattr("sys.stdin", keyboard(line))
    status, _, err = call(sample, "--init_from=out/tiny", "--interactive", "--device=cpu")
    assert status == 2 and "(U+FFFD)" in err and "error: 1 of 1 prompts failed" in err


def test_a_terminal_gets_no_control_characters_of_a_text(call, monkeypatch):
    options = ["--prompt=a\x1b[31mb", "--num_samples=2"]
    assert written(call, *options, run="emoji").count("a\x1b[31mb") == 2
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    out = written(call, *options, run="emoji")
    assert out.count("a\\x1b[31mb") == 2 and "\x1b" not in out


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (torch.nan, []),
        (torch.nan, ["--num_samples=3"]),
        (torch.nan, ["--top_p=0.5"]),
        (torch.nan, ["--dtype=float16"]),
        (torch.inf, ["--temperature=0"]),
        (torch.inf, ["--top_k=2"]),
        (torch.inf, ["--int8"]),
    ],
)
def test_a_weight_that_is_no_number_gets_one_line(fails, value, options):
    checkpoint = torch.load("out/tiny/best.pt", weights_only=True)
    checkpoint["model"]["transformer.h.0.mlp.c_proj.weight"][0, 0] = value
    torch.save(checkpoint, "broken.pt")
    error = fails(sample, "--init_from=broken.pt", "--device=cpu", *options)
    dtype, advice = ("float32", "use another checkpoint")
    if "--dtype=float16" in options:
        dtype, advice = ("float16", "use --dtype=float32")
    assert error == f"error: the model predicts NaN or infinity in torch.{dtype}; {advice}"


# ----------------------------------------------------------------------------- the KV cache


@every_combination
@torch.no_grad()
def test_logits_with_the_cache_are_those_without(keys, double):
    """A prompt in one pass, then single tokens, several at once, and single ones again."""
    model = shaken(GPTConfig(**SMALL | keys)).eval()
    idx, cache = batch(model.config), KVCache(model, 3)
    memory = [part.data_ptr() for kv in cache.kv for part in kv]
    parts = [model.hidden_states(part, cache) for part in idx.split([5, 1, 1, 4, 2, 1, 2], dim=1)]
    assert torch.allclose(model.logits(torch.cat(parts, dim=1)), model(idx)[0], atol=1e-9)
    assert [part.data_ptr() for kv in cache.kv for part in kv] == memory and cache.length == 16


@every_combination
@torch.no_grad()
def test_logits_of_sixteen_bit_weights_are_close(keys):
    """bfloat16 has 8 significant bits. In the second pass, several tokens are masked."""
    model = shaken(GPTConfig(**SMALL | keys)).eval()
    idx = batch(model.config)
    expected = model(idx)[0][:, -1]
    rounded = copy.deepcopy(model).bfloat16()
    cache = KVCache(rounded, 3)
    sample.next_logits(rounded, cache, idx[:, :9])
    logits = sample.next_logits(rounded, cache, idx[:, 9:])
    assert logits.dtype == torch.bfloat16
    assert (logits - expected).norm() < 0.05 * expected.norm()


@every_combination
def test_the_cache_changes_no_token(keys, double, monkeypatch):
    """For prompts shorter and longer than block_size; also in the pass to be compiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model = shaken(GPTConfig(**SMALL | keys)).eval()
    for B, length, new, sampling in ((3, 1, 24, {"temperature": 0}), (1, 20, 12, {"top_k": 20, "top_p": 0.95})):
        idx = torch.randint(65, (B, length))
        plain = model.generate(idx, new, generator=torch.Generator().manual_seed(1), **sampling)
        for compile in (False, True):
            options = sampling | {"generator": torch.Generator().manual_seed(1), "compile": compile}
            assert torch.equal(sample.generate(model, idx, new, **options), plain)
        assert torch.equal(plain[:, :length], idx) and plain.shape == (B, length + new)


def test_a_text_continues_from_an_overwritten_token(double):
    model = shaken(GPTConfig(**SMALL)).eval()
    idx, written = torch.tensor([[3], [5]]), []
    with torch.inference_mode():
        for token in sample.stream(model, idx, 15, temperature=0):
            assert torch.equal(token, model.generate(torch.cat([idx, *written], dim=1), 1, temperature=0)[:, -1:])
            token[0] = len(written) % 7
            written.append(token)
    assert len(written) == 15


@pytest.mark.parametrize("block_size", [1, 2, 7])
def test_the_cache_changes_no_token_of_a_short_context(config, block_size, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    config.block_size = block_size
    model = shaken(config).double()
    idx = torch.randint(65, (2, 3))
    plain = model.generate(idx, 16, temperature=0)
    for compile in (False, True):
        assert torch.equal(sample.generate(model, idx, 16, temperature=0, compile=compile), plain)


def test_a_prompt_without_a_token_is_refused():
    with pytest.raises(ValueError, match="idx has no token; give at least one per row"):
        sample.generate(GPT(GPTConfig(**SMALL)), torch.zeros(2, 0, dtype=torch.long), 1)


def test_a_token_costs_two_passes_at_most(monkeypatch):
    model, seen, caches = shaken(GPTConfig(**SMALL)), [], []
    model.transformer.wte.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    cache = KVCache
    monkeypatch.setattr(
        sample, "KVCache", lambda *args, **options: caches.append(cache(*args, **options)) or caches[-1]
    )
    idx = torch.zeros(1, 10, dtype=torch.long)
    sample.generate(model, idx, 7)
    assert seen == [10, 1, 1, 1, 1, 1, 1]
    seen.clear()
    sample.generate(model, idx, 200)
    assert max(seen) == 10 and sum(seen) <= 10 + 2 * 200
    assert len(caches) == 2  # one for each call
    seen.clear()
    model.generate(idx, 7)
    assert seen == [10, 11, 12, 13, 14, 15, 16]


def test_the_shapes_of_a_compiled_pass_stay_the_same(monkeypatch):
    calls, caches, cache = [], [], KVCache

    def compiled(function, **_):
        def recorded(new):
            calls.append((new.shape, new.stride(), caches[0].next_position.item()))
            return function(new)

        return recorded

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(
        sample, "KVCache", lambda *args, **options: caches.append(cache(*args, **options)) or caches[-1]
    )
    model = shaken(GPTConfig(**SMALL))
    sample.generate(model, torch.zeros(2, 10, dtype=torch.long), 10, compile=True)
    positions = [10, 11, 12, 13, 14, 15, 8, 9]  # a full context keeps its last 8 tokens
    assert [call[-1] for call in calls] == positions
    assert {call[:-1] for call in calls} == {((2, 1), (1, 1))}


@pytest.mark.parametrize("compile", [False, True])
def test_memory_of_the_cache_that_was_not_written_is_not_read(compile, monkeypatch):
    """Not even times zero, as NaN times zero is NaN. Here, all memory is NaN before it is written."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, shape: self.new_full(shape, torch.nan))
    model = shaken(GPTConfig(**SMALL))
    assert all(tensor.isnan().all() for pair in KVCache(model, 1).kv for tensor in pair)
    for rows in (1, 3):  # several rows: the prompt is computed once, and stored in each
        idx = torch.arange(5).repeat(rows, 1)
        expected = model.generate(idx, 30, temperature=0)
        assert torch.equal(sample.generate(model, idx, 30, temperature=0, compile=compile), expected)


def test_a_pass_is_not_compiled_again_for_each_token(monkeypatch):
    compile, graphs = torch.compile, []

    def backend(graph, inputs):  # runs the traced code as it is, and needs no C++ compiler
        graphs.append(graph)
        return graph.forward

    def traced(function, dynamic, **_):
        return compile(function, backend=backend, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", traced)
    model = shaken(GPTConfig(**SMALL | {"n_layer": 1, "lookback": 2})).eval()
    prompted = attach(copy.deepcopy(model), "prompt", 3)
    for net, T in ((model, 3), (prompted, 1)):  # a soft prompt makes the first pass longer
        torch.compiler.reset()
        graphs.clear()
        idx, counts, tokens = torch.zeros(2, T, dtype=torch.long), [], []
        for token in sample.stream(net, idx, 24, compile=True, temperature=0):
            tokens.append(token)
            counts.append(len(graphs))
        assert torch.equal(torch.cat([idx, *tokens], dim=1), net.generate(idx, 24, temperature=0))
        assert counts[3] == counts[-1] > 0


@pytest.mark.parametrize("length", [1, 40])
def test_a_prompt_is_computed_once_for_all_rows(config, length, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model, seen = shaken(config), []
    idx = torch.randint(65, (1, length)).expand(3, -1)
    plain = model.generate(idx, 20, generator=torch.Generator().manual_seed(1))
    assert len(plain.unique(dim=0)) == 3
    model.transformer.wte.register_forward_hook(lambda _, args, __: seen.append(tuple(args[0].shape)))
    model.lm_head.register_forward_hook(lambda _, args, __: seen.append((len(args[0]), None)))
    for compile in (False, True):
        seen.clear()
        generator = torch.Generator().manual_seed(1)
        assert torch.equal(sample.generate(model, idx, 20, generator=generator, compile=compile), plain)
        first = 3 if length == 1 else 1
        assert seen[:2] == [(first, min(length, 16)), (first, None)] and {rows for rows, _ in seen[2:]} == {3}


@torch.no_grad()
def test_attention_weights_are_rows_that_sum_to_one(config):  # noqa: F811
    for position in ("alibi", config.position):
        config.position, idx = position, batch(config, 2)
        model = shaken(config).eval()
        expected = model(idx)[0]
        weights = sample.attention_weights(model, idx)
        assert weights.shape == (2, 2, 4, 16, 16)
        assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-6)
        assert weights.triu(1).eq(0).all() and weights.diagonal(dim1=-2, dim2=-1).gt(0).all()
        assert model.config.flash and torch.equal(model(idx)[0], expected)  # nothing is left behind
        assert not model.transformer.h[0].attn.attn_dropout._forward_pre_hooks


# ----------------------------------------------------------------------------- faster layers


needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="needs MKL")


@needs_mkl
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_outputs", [700, 704])
@torch.no_grad()
def test_a_large_layer_computes_the_same(n_outputs, bias):
    """Also if the last block lacks rows."""
    model = torch.nn.Sequential(torch.nn.Linear(512, n_outputs, bias=bias))
    original = copy.deepcopy(model)
    speed_up(model)
    assert type(model[0]) is BlockLinear
    for shape in ((1, 1), (2, 1), (1, 8), (3, 16), (49, 1)):
        x = torch.randn(*shape, 512)
        assert torch.allclose(model(x), original(x), atol=1e-5)


@needs_mkl
@every_combination
@torch.no_grad()
def test_faster_layers_change_logits_by_rounding_alone(keys, monkeypatch):
    """For several tokens at once, and one by one."""
    monkeypatch.setattr(layers, "LARGE_MATRIX", 1)
    model = shaken(GPTConfig(**SMALL | keys)).eval()
    fast, idx = copy.deepcopy(model), batch(model.config)
    speed_up(fast)
    cache, expected = KVCache(fast, len(idx)), model(idx)[0]
    one_by_one = torch.cat([fast.logits(fast.hidden_states(new, cache)) for new in idx.split(1, dim=1)], dim=1)
    for logits in (one_by_one, fast(idx)[0]):
        assert torch.allclose(logits, expected, atol=1e-4 * expected.std().item(), rtol=1e-4)


@every_combination
@pytest.mark.parametrize("B", [1, 2])
@torch.no_grad()
def test_bfloat16_matrices_change_logits_little(keys, monkeypatch, B):
    if B > 1 and not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        pytest.skip("needs a oneDNN that multiplies bfloat16 on this processor")
    monkeypatch.setattr(layers, "LARGE_MATRIX", 1)
    model = shaken(GPTConfig(**SMALL | keys)).eval()
    fast, idx = copy.deepcopy(model), batch(model.config)[:B]
    speed_up(fast, torch.bfloat16, n_samples=B)
    rounded = [name for name, part in fast.named_modules() if type(part) is BFloat16Linear]
    exact = [name for name, part in model.named_modules() if type(part) is torch.nn.Linear]
    assert rounded == [name for name in exact if name != "lm_head"]
    assert {fast.get_submodule(name).is_reordered for name in rounded} == {B > 1}
    cache, expected = KVCache(fast, B), model(idx)[0]
    assert {part.dtype for pair in cache.kv for part in pair} == {torch.float32}
    one_by_one = torch.cat([fast.logits(fast.hidden_states(new, cache)) for new in idx.split(1, dim=1)], dim=1)
    for logits in (one_by_one, fast(idx)[0]):
        assert logits.dtype == torch.float32
        assert 0 < (logits - expected).square().mean().sqrt() < 0.02 * expected.std()
    weights, close = sample.attention_weights(model, idx), sample.attention_weights(fast, idx)  # as for a plot
    assert 0 < (close - weights).abs().max() < 0.05


@torch.no_grad()
def test_a_single_row_in_bfloat16_is_computed_without_onednn(monkeypatch):
    layer = BFloat16Linear(torch.nn.Linear(64, 32))
    linear, seen = torch.nn.functional.linear, []

    def watched(x, *args):
        seen.append((len(x), torch.backends.mkldnn.enabled))
        return linear(x, *args)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    for enabled in (True, False):
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", enabled)
        for rows in (1, 2):
            layer(torch.ones(rows, 64))
            assert torch.backends.mkldnn.enabled == enabled
            with pytest.raises(RuntimeError):
                layer(torch.ones(rows, 63))
            assert torch.backends.mkldnn.enabled == enabled
    assert seen == [(1, False)] * 2 + [(2, True)] * 2 + [(1, False)] * 2 + [(2, False)] * 2


def test_only_large_linear_layers_are_made_faster():
    """The output layer is large here, and so are two layers that are left alone. The embedding keeps the weights that
    it shares with it."""

    class Other(torch.nn.Linear):
        """A derived class, which may compute something else."""

    model = shaken(GPTConfig(**SMALL | {"vocab_size": 32_000, "tie_weights": True}))
    model.other = Other(512, 512)
    model.elsewhere = torch.nn.Linear(512, 512, device="meta")  # not on the CPU
    embedding = model.transformer.wte.weight.clone()
    before = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    speed_up(model)
    changed = [name for name, layer in before.items() if model.get_submodule(name) is not layer]
    assert changed == (["lm_head"] if torch.backends.mkl.is_available() else [])
    assert torch.equal(model.transformer.wte.weight, embedding)


@torch.no_grad()
def test_a_model_in_float64_is_left_as_it_is():
    model = torch.nn.Sequential(torch.nn.Linear(512, 700)).double()
    layer = model[0]
    speed_up(model)
    assert model[0] is layer and model(torch.ones(1, 512).double()).dtype == torch.float64


def test_without_mkl_a_model_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: False)
    model = torch.nn.Sequential(torch.nn.Linear(512, 700))
    layer = model[0]
    speed_up(model)
    assert model[0] is layer


@pytest.fixture
def chosen(monkeypatch) -> list:
    """What speed_up() was called with, on processors with bfloat16 units, for matrices that count as large."""
    calls = []
    monkeypatch.setattr(layers, "speed_up", lambda model, dtype=torch.float32, n=None: calls.append((dtype, n)))
    monkeypatch.setattr(layers, "LARGE_MATRIX", 1)
    monkeypatch.setattr(layers, "has_bfloat16_units", lambda: True)
    return calls


@pytest.mark.parametrize("units", [True, False])
def test_the_fastest_layers_are_chosen(call, monkeypatch, chosen, units):
    monkeypatch.setattr(layers, "has_bfloat16_units", lambda: units)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    int8, exact, auto = torch.int8, torch.float32, torch.bfloat16 if units else torch.float32
    for options, n, dtype in (
        ([], 1, auto),
        ([], 3, auto),
        (["--dtype=float32"], 3, exact),
        (["--int8"], 5, int8),
        (["--int8"], 6, auto if units else int8),
        (["--int8"], 31, auto if units else int8),
        (["--int8"], 32, auto),
        (["--int8", "--dtype=float32"], 31, int8),
        (["--int8", "--dtype=float32"], 32, exact),
        (["--int8", "--compile"], 40, int8),
    ):
        status, _, err = call(sample, "--init_from=out/tiny", "--max_new_tokens=1", f"--num_samples={n}", *options)
        assert (status, chosen.pop()) == (0, (dtype, n if dtype == torch.bfloat16 else None))
        assert ("--dtype=float32 is exact" in err) == (dtype == torch.bfloat16)
        assert ("going on without it" in err) == ("--int8" in options and dtype != int8)


def test_layers_are_chosen_for_the_samples_of_a_batch(call, monkeypatch, chosen):
    monkeypatch.setattr(sample, "MAX_MEMORY", 1)
    call(sample, "--init_from=out/tiny", "--max_new_tokens=1", "--num_samples=40", "--int8")
    call(sample, "--init_from=out/tiny", "--max_new_tokens=1", "--num_samples=40")
    assert chosen == [(torch.int8, None), (torch.bfloat16, 1)]


def test_a_model_with_small_matrices_is_not_rounded(call, monkeypatch, chosen):
    monkeypatch.setattr(layers, "LARGE_MATRIX", 2**17)
    call(sample, "--init_from=out/tiny", "--max_new_tokens=1")
    model = GPT(GPTConfig(vocab_size=50_304, n_embd=64, n_head=4, n_layer=1))
    replace_layers(model, n_samples=1, int8=False, exact=False)
    model = GPT(GPTConfig(vocab_size=65, n_embd=384, n_head=6, n_layer=1))
    replace_layers(model, n_samples=1, int8=False, exact=False)
    replace_layers(model.to("meta"), n_samples=1, int8=False, exact=False)
    assert chosen == [(torch.float32, None)] * 2 + [(torch.bfloat16, 1), (torch.float32, None)]
    replace_layers(model, n_samples=40, int8=True, exact=False)  # the limits were measured on CPUs
    assert chosen[-1] == (torch.int8, None)


@pytest.mark.parametrize(("n_in", "kernel"), [(64, True), (20, False)])
@torch.no_grad()
def test_int8_weights_are_rounded_to_a_step_of_their_row(n_in, kernel):
    layer = torch.nn.Linear(n_in, 30)
    layer.weight *= torch.logspace(-3, 2, 30)[:, None]
    layer.weight[7] = 0
    rounded = Int8Linear(layer)
    largest = layer.weight.abs().amax(dim=1)
    step = rounded.scale.float()[:, None]
    assert torch.allclose(step[:, 0], largest / 127, rtol=2**-8) and rounded.weight.dtype == torch.int8
    assert ((rounded.weight * step - layer.weight).abs() <= step / 2 * (1 + 1e-5)).all()
    assert (rounded.scale > 0).all()  # dividing a row of zeros by 0 gives NaN
    for rows in (1, 2, 9, 49):
        x = torch.randn(rows, 1, n_in)
        exact = torch.nn.functional.linear(x, rounded.weight * step, layer.bias)
        rounding = (1 + 2**-8) ** 2 - 1 if kernel and rows < 49 else 2**-20  # x, then the output, to bfloat16
        bound = rounding * (torch.nn.functional.linear(x.abs(), (rounded.weight * step).abs()) + 1e-6)
        assert ((rounded(x) - exact).abs() <= bound).all()


@every_combination
@torch.no_grad()
def test_the_logits_of_int8_weights_differ_by_a_few_percent(keys):
    """By less than 4 % of their standard deviation (root mean square); the largest in these combinations was 2.9 %."""
    model = shaken(GPTConfig(**SMALL | keys)).eval()
    int8, idx = copy.deepcopy(model), batch(model.config)
    speed_up(int8, torch.int8)
    assert {type(part) for part in int8.modules()} & {torch.nn.Linear, Int8Linear} == {Int8Linear}
    cache, expected = KVCache(int8, len(idx)), model(idx)[0]
    one_by_one = torch.cat([int8.logits(int8.hidden_states(new, cache)) for new in idx.split(1, dim=1)], dim=1)
    for logits in (one_by_one, int8(idx)[0]):
        assert 0 < (logits - expected).square().mean().sqrt() < 0.04 * expected.std()


def test_int8_weights_cost_less_than_a_thousandth_of_the_loss(runs):
    shutil.copy("list.txt", "again.txt")
    prepare_data.prepare("again.txt", documents="lines", name="list")
    model, data = load_model("out/list")[0], load("list")
    exact = loss_of(model, data, "val")
    speed_up(model, torch.int8)
    rounded = loss_of(model, data, "val")
    del data
    gc.collect()
    shutil.rmtree("data")
    assert exact != rounded and abs(rounded / exact - 1) < 0.001


# ----------------------------------------------------------------------------- the script


def test_the_script_samples_with_int8_weights(call):
    model, tokenizer = load_model("out/tiny")
    ids = torch.tensor([tokenizer.encode("the mat")])
    speed_up(model, torch.int8)
    expected = tokenizer.decode(sample.generate(model, ids, 60, temperature=0)[0].tolist())
    assert written(call, "--prompt=the mat", "--temperature=0", "--int8") == expected + "\n"


def test_bpe_models_write_any_prompt(call):
    assert written(call, "--prompt=日本 🐈", run="emoji").startswith("日本 🐈")


def test_a_prompt_may_be_longer_than_the_context(call):
    status, out, err = call(sample, "--init_from=out/tiny", f"--prompt={babble(50)}", "--max_new_tokens=5")
    assert status == 0 and out.startswith(babble(50)) and len(out) == len(babble(50)) + 6
    assert "the model sees only the last 16" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt=mät €"], "lacks 'ä' (U+00E4), '€' (U+20AC); leave them out of the prompt"),
        (["--temperature=-0.1"], "--temperature=-0.1 is out of range; use at least 0"),
        (["--top_p=0"], "top_p=0.0 is out of range"),
        (["--device=tpu"], "there is no device tpu here"),
        (["--init_from=nothing.pt"], "no checkpoint nothing.pt"),
        (["--init_from=latin1.txt"], "latin1.txt"),
        (["--init_from=out"], "no checkpoint out"),
        (["--init_from=half.pt"], "does not match its own config"),
    ],
)
def test_bad_input_gets_one_line(fails, options, words):
    Path("latin1.txt").write_bytes(b"ab\xe9")
    checkpoint = torch.load("out/tiny/best.pt", weights_only=True)
    del checkpoint["model"]["lm_head.weight"]
    torch.save(checkpoint, "half.pt")
    assert words in fails(sample, "--init_from=out/tiny", *options)


def test_without_any_run_the_way_to_one_is_named(fails, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no run of train.py with a best.pt in out/; start python train.py" in fails(sample)


def test_gpt2_writes_too(call, fails, tmp_path, monkeypatch, gpt2_stand_in):
    monkeypatch.chdir(tmp_path)
    Path("model.safetensors").write_bytes(safetensors(gpt2_tensors(T=16, L=1, C=16)))
    options = ["--init_from=model.safetensors", "--prompt=the cat", "--temperature=0", "--max_new_tokens=20"]
    status, out, err = call(sample, *options)
    assert status == 0 and "model.safetensors: " in err, err
    tokenizer = BPETokenizer()
    ids = torch.tensor([[50256, *tokenizer.encode("the cat")]])
    new = load_model("model.safetensors")[0].generate(ids, 20, temperature=0)[0, ids.shape[1] :]
    assert out.encode() == b"the cat" + tokenizer.decode(new.tolist()).encode() + b"\n"
    assert call(sample, "--init_from=model.safetensors", "--max_new_tokens=3")[0] == 0
    assert call(sample, "--init_from=model.safetensors", "--max_new_tokens=3", "--plot")[0] == 0
    assert Path("out/model/attention.png").exists()
    assert "no checkpoint gpt4" in fails(sample, "--init_from=gpt4")


# ----------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("line", [b"the\n", b"the\r\n", b"\xef\xbb\xbfthe\n"])
def test_prompts_are_read_like_texts(call, monkeypatch, line):
    """With Windows' line ends, and with a byte order mark, from the keyboard and from a file."""
    options = ["--init_from=out/list", "--temperature=0", "--stop"]
    expected = call(sample, *options, "--prompt=the")[1]
    monkeypatch.setattr("sys.stdin", keyboard(line))
    status, out, err = call(sample, *options, "--interactive")
    assert status == 0 and out == expected, err
    Path("prompt.txt").write_bytes(line)  # the newline at its end is the editor's
    assert call(sample, *options, "--prompt_file=prompt.txt")[1] == expected


def test_a_prompt_has_one_source(fails):
    Path("prompt.txt").write_text("the")
    assert "there are two texts" in fails(sample, "--init_from=out/tiny", "--prompt=a", "--prompt_file=prompt.txt")
    assert "--interactive reads prompts from the keyboard" in fails(sample, "--interactive", "--prompt=a")
    assert "no file gone.txt; check --prompt_file" in fails(sample, "--prompt_file=gone.txt")


def only_continuation(ids: list[int], vocab_size: int) -> GPT:
    """A model of this text, which repeats: after each token, it predicts the next one."""
    model = GPT(
        GPTConfig(vocab_size=vocab_size, block_size=16, n_layer=1, n_head=1, n_embd=vocab_size, position="none")
    )
    torch.nn.init.eye_(model.transformer.wte.weight)  # blocks add nothing at first
    for token, following in itertools.pairwise([*ids, ids[0]]):
        model.lm_head.weight.data[following, token] = 10
    return model


def test_documents_of_several_lines_are_written_to_their_end(call):
    """A sample starts with the token between documents, and with --stop it ends there, not at the end of a line."""
    Path("stories.txt").write_text("\n***\n".join(["ab\ncd"] * 40))
    prepare_data.prepare("stories.txt", name="stories", documents="***")
    status, _, err = call(train, *SHORT, "--dataset=stories", "--out_dir=out/stories", "--max_iters=1")
    assert status == 0, err
    checkpoint, data = load_checkpoint("out/stories/best.pt"), load("stories")
    model = only_continuation(data.train[:6].tolist(), data.vocab_size)
    save_model(Path("out/stories/best.pt"), model, data.tokenizer, start_token=checkpoint["start_token"])
    del data
    gc.collect()
    shutil.rmtree("data")
    _, out, err = call(sample, "--init_from=out/stories", "--stop", "--prompt=b")
    assert out == "b\ncd\n" and result(err)["tokens"] == "4"  # with the token at the end
    assert written(call, "--stop", "--num_samples=3", run="stories").split("-" * 20 + "\n") == ["ab\ncd\n"] * 3
    assert "cd<|endoftext|>ab\ncd" in written(call, run="stories")
