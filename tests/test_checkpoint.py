import os
import pickle
from pathlib import Path

import pytest
import torch
from conftest import Malicious

from checkpoint import load_checkpoint
from console import UserError


@pytest.mark.parametrize(
    "content",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"no checkpoint at all" * 100),
        lambda path: path.write_bytes(pickle.dumps(Malicious())),
        lambda path: torch.save({"format": Malicious()}, path),
        lambda path: torch.save([1], path),
        lambda path: torch.save({"format": "another 7"}, path),
        lambda path: (torch.save({"format": torch.zeros(10_000)}, path), os.truncate(path, 20_000)),
    ],
)
def test_untrusted_checkpoint_is_rejected_and_not_executed(content):
    content(Path("foreign.pt"))
    with pytest.raises(ValueError, match=r"foreign.pt .*; use a best.pt"):
        load_checkpoint("foreign.pt")
    assert not Path("harmed").exists()


def test_a_missing_checkpoint_says_how_to_get_one():
    with pytest.raises(UserError, match=r"no checkpoint nothing.pt; use a run"):
        load_checkpoint("nothing.pt")


def test_a_checkpoint_of_another_version_says_which():
    for found in ("count2gpt 4", None, 7):
        torch.save({"format": found, "model_config": {}}, "old.pt")
        with pytest.raises(UserError, match=f"has the format {found!r} instead of 'count2gpt 8'; "):
            load_checkpoint("old.pt")
