"""Which files of this folder does a script load when it runs, and how many lines have they?

    python tests/carried.py train.py                 # a tiny run on prepared data
    python tests/carried.py sample.py --top_k=5      # with options of your own
    python tests/carried.py lessons/rnn.py

Whoever forks a script carries these files. They are what Python has imported at the end of a real run, so
an import inside of a function counts if the function was called. No test depends on the numbers.
"""

import contextlib
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORDS = f"--data={ROOT / 'data' / 'names.txt'}"
TINY_TRAINING = ["--n_layer=1", "--n_embd=16", "--max_iters=2", "--eval_tokens=500"]
OPTIONS = {
    "train.py": [*TINY_TRAINING, "--out_dir=out/second"],
    "sample.py": ["--max_new_tokens=20"],
    "bigram.py": [WORDS],
    "ngram.py": [WORDS, "--n=2"],
    "mlp.py": [WORDS, "--steps=100"],
    "attention.py": [WORDS, "--steps=2"],
    "lessons/rnn.py": ["--max_iters=20"],
}


def main() -> None:
    script, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        # Another process prepares the data, and trains a model for scripts that open one
        subprocess.run([sys.executable, ROOT / "train.py", *TINY_TRAINING], check=True, stdout=subprocess.DEVNULL)
        sys.argv = [script, *(options or OPTIONS.get(script, []))]
        sys.path.insert(0, str(ROOT))
        print("$ python", *sys.argv)
        with contextlib.suppress(SystemExit):
            runpy.run_path(str(ROOT / script), run_name="__main__")
        os.chdir(ROOT)
    files = {ROOT / script}
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "")
        if path.parent in (ROOT, ROOT / "lessons"):
            files.add(path)
    total = 0
    print()
    for path in sorted(files):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        total += lines
        print(f"{lines:6,} {path.relative_to(ROOT)}")
    print(f"{total:6,} lines in {len(files)} files")


if __name__ == "__main__":
    main()
