#!/usr/bin/env bash
# A tokenizer of letters in GGUF needs a merge, though it has none.
#
# Expected: GPT-2's tokenizer with 65 letters and an empty list of merges: each letter is a token.
# Seen: the gguf library writes such a file without a message, and leaves the list out; llama.cpp then does not load
# the model. With one merge whose result is no token, it loads, and a text has as many tokens as letters, also where
# it has the two letters of the merge. Also seen: the library has formulas for Q8_0 and Q4_0, but Q4_K and Q6_K it can
# only read; and in these four formats, rows of 48 numbers cannot be stored, as blocks have 32 or 256.
#
# Versions: xllamacpp 2026.10.11549 (llama.cpp for Python), gguf 0.19.0. Python 3.11, 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet gguf==0.19.0 xllamacpp==2026.10.11549 numpy==2.4.6
OMP_NUM_THREADS=1 venv/bin/python - <<'END'
import gguf
import numpy as np
import xllamacpp

LETTERS = [chr(ord("!") + i) for i in range(65)]
C = 32


def write(path, merges):
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(64)
    writer.add_embedding_length(C)
    writer.add_feed_forward_length(4 * C)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_layer_norm_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(LETTERS)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(LETTERS))
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    shapes = {"token_embd.weight": (65, C), "position_embd.weight": (64, C)}
    layers = {"attn_qkv": (3 * C, C), "attn_output": (C, C), "ffn_up": (4 * C, C), "ffn_down": (C, 4 * C)}
    for layer, (rows, columns) in layers.items():
        shapes[f"blk.0.{layer}.weight"] = (rows, columns)
        shapes[f"blk.0.{layer}.bias"] = (rows,)
    for norm in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        shapes[f"{norm}.weight"] = (C,)
        shapes[f"{norm}.bias"] = (C,)
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(path):
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = 64
    params.n_parallel = 1
    params.warmup = False
    params.cpuparams.n_threads = 1
    params.verbosity = -1
    return xllamacpp.Server(params)


write("none.gguf", [])
print("an empty list of merges: stored as", gguf.GGUFReader("none.gguf").get_field("tokenizer.ggml.merges"))
try:
    load("none.gguf")
except RuntimeError as error:
    print("llama.cpp:", error)
else:
    raise AssertionError("it loads")

write("one.gguf", ["! #"])  # "!#" is no token
server = load("one.gguf")
text = "!#HELLO!#"
answer = server.handle_completions(dict(prompt=text, n_predict=4, temperature=0))
print(f"one merge: {text!r} is {answer['usage']['prompt_tokens']} tokens for {len(text)} letters")
assert answer["usage"]["prompt_tokens"] == len(text)

for format in ("Q8_0", "Q4_0", "Q4_K", "Q6_K"):
    outcomes = []
    for columns in (48, 256):
        try:
            gguf.quants.quantize(np.ones((4, columns), dtype=np.float32), gguf.GGMLQuantizationType[format])
            outcomes.append("quantized")
        except (gguf.quants.QuantError, NotImplementedError) as error:
            outcomes.append(type(error).__name__)
    print(f"{format}: rows of 48 numbers: {outcomes[0]}, of 256: {outcomes[1]}")
    assert outcomes == ["QuantError", "NotImplementedError" if format.endswith("K") else "quantized"]
END
