from pathlib import Path

import numpy as np
import pytest
from conftest import result
from test_train import SHORT, data, no_plots  # noqa: F401

import evaluate
import memorization
import prepare_data
import train
from memorization import longest_copies, sort_suffixes, up_to_separator


def test_suffixes_are_sorted_as_texts_are():
    rng = np.random.default_rng(0)
    for V, N in ((1, 9), (2, 200), (3, 50), (200, 500), (50_000, 300)):
        tokens = rng.integers(V, size=N).astype(np.uint16)
        tokens[N // 2 :] = tokens[: N - N // 2]  # a long repetition
        expected = sorted(range(N), key=lambda i: tokens[i:].tolist())
        assert sort_suffixes(tokens, N).tolist() == expected


def test_the_longest_copy_is_that_of_trying_all_runs():
    rng = np.random.default_rng(1)
    for _ in range(200):
        V = int(rng.integers(1, 4))
        train_ = rng.integers(V, size=rng.integers(1, 60)).astype(np.uint16)
        samples = [rng.integers(V + 1, size=rng.integers(12)) for _ in range(rng.integers(1, 5))]
        text = bytes(train_.tolist())
        runs = [[bytes(s.tolist())[i:j] for i in range(len(s)) for j in range(i, len(s) + 1)] for s in samples]
        expected = [max((len(run) for run in of_one if run in text), default=0) for of_one in runs]
        assert longest_copies(train_, samples).tolist() == expected


def test_no_copy_reaches_past_the_end_of_the_text_or_of_a_sample():
    text = np.array([1, 2, 3, 1, 2])
    samples = [np.array(sample, dtype=int) for sample in ([1, 2, 1, 2], [1, 2, 3], [3, 1, 2, 3], [7], [])]
    assert longest_copies(text, samples).tolist() == [2, 3, 3, 0, 0]


def test_long_documents_are_compared_as_far_as_samples_go():
    """A sample that is cut where a longer document goes on is that document."""
    line = "".join("abcdefg"[i * i % 7] for i in range(150))
    Path("lines.txt").write_text("\n".join([line] * 9 + ["ab"]))
    prepare_data.prepare("lines.txt", documents="lines")
    dataset = prepare_data.load("lines")
    sample = next(tuple(ids[:30]) for ids in dataset.documents("train") if len(ids) > 30)
    assert memorization.compare({"it": [sample]}, dataset, "val", 30) == {"it": 1.0}
    assert memorization.compare({"it": [sample]}, dataset, "val", 31) == {"it": 0.0}


def test_only_the_beginning_of_a_large_text_is_searched(monkeypatch, capsys):
    dataset = prepare_data.load("tiny")
    monkeypatch.setattr("baselines.MAX_TRAIN", 50)
    samples = {"start": [tuple(dataset.train[:40])], "later": [tuple(dataset.train[60:90])]}
    copied = memorization.compare(samples, dataset, "val", 40)
    assert copied["start"] == 1.0 > copied["later"] and "in the first 50 tokens of train" in capsys.readouterr().out


def test_samples_end_at_separators():
    rows = np.array([[4, 5, 0, 6], [0, 1, 2, 3], [1, 2, 3, 4]])
    assert up_to_separator(rows, 0) == [(4, 5), (), (1, 2, 3, 4)]
    assert up_to_separator(rows, None) == [tuple(row) for row in rows.tolist()]


def test_the_table_says_where_samples_are_found(capsys):
    dataset = prepare_data.load("list")
    documents = {split: list(map(tuple, dataset.documents(split))) for split in ("train", "val")}
    new = (3, 3, 3, 3)
    copied = memorization.compare({"it": [*documents["train"][:3], documents["val"][0], new, new]}, dataset, "val", 99)
    in_train = (3 + (documents["val"][0] in documents["train"])) / 6
    assert copied["it"] == pytest.approx(in_train)
    heading, row = capsys.readouterr().out.splitlines()[1:3]
    assert heading.split()[-6:] == ["in", "train", "in", "val", "in", "neither"]
    assert row.split()[-1] == "33.3%" and row.split()[3] == str(max(map(len, documents["train"][:3])))
    text = prepare_data.load("tiny")
    samples = {"real": [tuple(text.train[5:25])], "half": [(*text.train[:10], *[99] * 10)]}
    assert memorization.compare(samples, text, "val", 20) == {"real": 1.0, "half": 0.5}


@pytest.mark.parametrize("name", ["list", "tiny"])
def test_the_script_searches_for_samples_of_all_models(name, call):
    call(train, *SHORT, f"--dataset={name}", f"--out_dir=out/{name}")
    status, out, err = call(evaluate, "--num_samples=20", "--dtype=float32")
    assert status == 0, err
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("copies"))
    names = [line[: len("Kneser-Ney 4-gram")].strip() for line in lines[start + 1 : start + 6]]
    assert names == ["val split (real)", "bigram, add 1", "Kneser-Ney 4-gram", "Kneser-Ney 8-gram", "GPT"]
    copied, of_gpt = float(result(out)["copied"]), lines[start + 5].split()
    if name == "list":  # the fraction of samples that are training documents
        assert "in train" in lines[start] and f"{copied:.1%}" == of_gpt[4]
    else:  # the mean length of the longest run, of a sample of block_size=16 tokens
        assert "in train" not in lines[start] and 16 * copied == pytest.approx(float(of_gpt[2]), abs=0.051)
        assert float(of_gpt[2]) >= 1
    again = call(evaluate, "--num_samples=20", "--dtype=float32")[1]
    assert again == out
