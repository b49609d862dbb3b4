import numpy as np
import pytest
import torch
from conftest import babble, result
from test_train import data  # noqa: F401

import baselines
import mlp
import ngram
import prepare_data


@pytest.mark.parametrize("name", ["tiny", "list"])
def test_the_loss_of_counting_is_that_of_ngram_py(name, call):
    dataset = prepare_data.load(name)
    at = np.arange(1, len(dataset.val))
    options = {
        "bigram, add 1": ["--n=2"],
        "Kneser-Ney 4-gram": ["--n=4", "--smoothing=kneser-ney", "--discount=0.85"],
        "Kneser-Ney 8-gram": ["--n=8", "--smoothing=kneser-ney", "--discount=0.85"],
    }
    models = baselines.make(dataset, train_mlp=False, seed=0)
    assert list(models) == list(options)
    for model, keys in options.items():
        log_p = baselines.log_probabilities(models[model], dataset.val, at, dataset.separator)
        assert log_p.exp().sum(dim=1).numpy() == pytest.approx(1, abs=1e-5)
        loss = -log_p[torch.arange(len(at)), torch.from_numpy(dataset.val[at].astype(np.int64))].mean().item()
        printed = result(call(ngram, f"--dataset={name}", "--num_samples=0", *keys)[1])
        if name == "list" or "bigram" in model:  # a text starts with n - 1 copies of its first token, here with 8
            assert loss == pytest.approx(float(printed["val"]), abs=1e-4)
        else:
            assert loss == pytest.approx(float(printed["val"]), abs=0.02)


def test_the_network_is_that_of_mlp_py(call):
    options = ["--block_size=8", "--n_embd=48", "--n_layer=2", "--n_hidden=190", "--backward=manual"]
    printed = result(call(mlp, "--dataset=list", "--max_iters=100", "--num_samples=0", "--seed=3", *options)[1])
    dataset = prepare_data.load("list")
    network = baselines.trained_mlp(dataset, 100, seed=3)
    at = np.arange(1, len(dataset.val))
    log_p = baselines.log_probabilities(network, dataset.val, at, dataset.separator)
    loss = -log_p[torch.arange(len(at)), torch.from_numpy(dataset.val[at].astype(np.int64))].mean().item()
    assert loss == pytest.approx(float(printed["val"]), abs=1e-4)


def test_samples_have_the_frequencies_of_the_model():
    dataset = prepare_data.load("list")
    bigram = baselines.ngram_baseline(dataset, 2, alpha=1.0)
    drawn = baselines.sample(bigram, dataset.separator, 20_000, 2, np.random.default_rng(0))
    first = bigram(np.full((1, baselines.CONTEXT), dataset.separator))[0]
    assert np.bincount(drawn[:, 0], minlength=dataset.vocab_size) / 20_000 == pytest.approx(first, abs=0.015)
    token = first.argmax()
    second = bigram(np.full((1, baselines.CONTEXT), token))[0]
    after = drawn[drawn[:, 0] == token, 1]
    assert np.bincount(after, minlength=dataset.vocab_size) / len(after) == pytest.approx(second, abs=0.03)


def test_a_higher_order_copies_more():
    """An 8-gram model of a short text can hardly do anything else."""
    from pathlib import Path

    from memorization import longest_copies

    Path("more.txt").write_text(babble(2000, seed=1))
    prepare_data.prepare("more.txt")
    dataset, means = prepare_data.load("more"), []
    for n in (2, 4, 8):
        model = baselines.ngram_baseline(dataset, n, discount=0.85)
        rows = baselines.sample(model, 0, 50, 60, np.random.default_rng(0))
        means.append(longest_copies(dataset.train, list(rows)).mean())
    assert means[0] < means[1] < means[2]
