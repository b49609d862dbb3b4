// The GPT of model.py once more, in plain JavaScript without a library, as lessons/look.py writes it into a page.
//
// Names and order are those of model.py, which says where the ideas are from. But here, tokens are read one by one, as
// in sample.py: x is a single row, a Float32Array of C numbers, and a token may attend to all tokens in the cache.
// Arrays are flat: in an array (n, m), element i, j is at i * m + j. A layer has one array y for its results.
// In comments: C channels (n_embd), nh heads, hd channels per head (C / nh), t the position of the token.
"use strict";
const range = (n) => [...Array(n).keys()]; // 0 ... n - 1

// An array (rows, columns) with f(i, j) in row i and column j
function table_of(rows, columns, f) {
  const table = new Float32Array(rows * columns);
  for (let n = 0; n < table.length; n++) table[n] = f(Math.floor(n / columns), n % columns);
  return table;
}

// Vector times matrix, y = x @ table, where row j of the table begins at table[start + j * stride]:
//
//     y[i] = sum of x[j] * table[start + j * stride + i] over all j
//
// Nearly all of the time is spent here. To be faster, it adds eight rows at once, and leaves out those whose x[j] is 0
// (after a ReLU, most of them).
const factors = new Float64Array(2 ** 16), begins = new Int32Array(2 ** 16); // for C up to 2^14
function multiply(y, x, table, start, stride) {
  let n = 0;
  for (let j = 0; j < x.length; j++) {
    if (x[j] === 0) continue;
    factors[n] = x[j];
    begins[n] = start + j * stride;
    n++;
  }
  factors.fill(0, n, n + 7); // the last eight may be fewer: fill them up
  begins.fill(start, n, n + 7);
  y.fill(0);
  for (let k = 0; k < n; k += 8) {
    const [x_0, x_1, x_2, x_3] = [factors[k], factors[k + 1], factors[k + 2], factors[k + 3]];
    const [x_4, x_5, x_6, x_7] = [factors[k + 4], factors[k + 5], factors[k + 6], factors[k + 7]];
    const [row_0, row_1, row_2, row_3] = [begins[k], begins[k + 1], begins[k + 2], begins[k + 3]];
    const [row_4, row_5, row_6, row_7] = [begins[k + 4], begins[k + 5], begins[k + 6], begins[k + 7]];
    for (let i = 0; i < y.length; i++) {
      y[i] += (x_0 * table[row_0 + i] + x_1 * table[row_1 + i] + x_2 * table[row_2 + i] + x_3 * table[row_3 + i])
        + (x_4 * table[row_4 + i] + x_5 * table[row_5 + i] + x_6 * table[row_6 + i] + x_7 * table[row_7 + i]);
    }
  }
}

// x += the row that begins at table[start]
function add(x, table, start = 0) {
  for (let c = 0; c < x.length; c++) x[c] += table[start + c];
}

// ---------------------------------------------------------------- the layers of a block

class Linear {
  constructor(weights, name, n_inputs) {
    const weight = weights[name + ".weight"]; // (outputs, inputs), as in PyTorch
    this.y = new Float32Array(weight.length / n_inputs); // the outputs of the last forward pass
    const n_outputs = this.y.length;
    this.columns = table_of(n_inputs, n_outputs, (j, i) => weight[i * n_inputs + j]); // transposed
    this.bias = weights[name + ".bias"]; // or undefined
  }
  forward(x) { // W x + bias
    multiply(this.y, x, this.columns, 0, this.y.length);
    if (this.bias) add(this.y, this.bias);
    return this.y;
  }
}

// layernorm: y = (x - mean) / std. rmsnorm: y = x / rms, as if the mean were 0. y may be x itself
function normalize(y, x, norm, eps) {
  let mean = 0, variance = 0;
  if (norm === "layernorm") for (let c = 0; c < x.length; c++) mean += x[c] / x.length;
  for (let c = 0; c < x.length; c++) variance += (x[c] - mean) ** 2 / x.length;
  const std = Math.sqrt(variance + eps);
  for (let c = 0; c < x.length; c++) y[c] = (x[c] - mean) / std;
}

class Norm {
  constructor(config, weights, name) {
    this.norm = config.norm;
    this.weight = weights[name + ".weight"];
    this.bias = weights[name + ".bias"];
    this.y = new Float32Array(config.n_embd);
  }
  forward(x) {
    normalize(this.y, x, this.norm, this.norm === "layernorm" ? 1e-5 : 1e-6);
    for (let c = 0; c < x.length; c++) this.y[c] *= this.weight[c];
    if (this.bias) add(this.y, this.bias);
    return this.y;
  }
}

// x becomes its softmax: exp(x) / sum of all exp(x)
function softmax(x) {
  let largest = -Infinity, sum = 0;
  for (let i = 0; i < x.length; i++) largest = Math.max(largest, x[i]);
  for (let i = 0; i < x.length; i++) x[i] = Math.exp(x[i] - largest);
  for (let i = 0; i < x.length; i++) sum += x[i];
  for (let i = 0; i < x.length; i++) x[i] /= sum;
}

class CausalSelfAttention {
  constructor(config, weights, name) {
    this.config = config;
    this.c_attn = new Linear(weights, name + ".c_attn", config.n_embd); // queries, keys and values of all heads
    this.c_proj = new Linear(weights, name + ".c_proj", config.n_embd);
    this.y = new Float32Array(config.n_embd);
    this.wei = new Float32Array(config.n_head * config.block_size); // (nh, block_size), the attention weights
  }

  // softmax(q k^T / sqrt(hd)) v in each head. kv: the cache of this layer. only_cache: store the token's key and value,
  // and compute nothing else
  forward(x, t, kv, rope, only_cache) {
    const { n_head: nh, n_kv_head: n_kv, block_size, qk_norm, norm } = this.config;
    const hd = x.length / nh, width = n_kv * hd;
    const qkv = this.c_attn.forward(x);
    for (let h = 0; h < nh + n_kv; h++) { // the heads of the queries, and then of the keys
      const head = qkv.subarray(h * hd, (h + 1) * hd); // a view: qkv itself is changed
      if (qk_norm) normalize(head, head, norm, norm === "layernorm" ? 1e-5 : 2 ** -23); // PyTorch's default eps
      if (rope) rotate(head, t, rope);
    }
    for (let c = 0; c < width; c++) kv.keys[c * block_size + t] = qkv[nh * hd + c];
    kv.values.set(qkv.subarray(nh * hd + width), t * width);
    if (only_cache) return null;

    for (let h = 0; h < nh; h++) {
      const q = qkv.subarray(h * hd, (h + 1) * hd);
      const wei = this.wei.subarray(h * block_size, h * block_size + t + 1);
      const kv_head = Math.floor(h * n_kv / nh); // which nh / n_kv heads share
      const c = kv_head * hd; // its first channel
      multiply(wei, q, kv.keys, c * block_size, block_size); // q k^T
      for (let s = 0; s < wei.length; s++) wei[s] /= Math.sqrt(hd);
      softmax(wei);
      multiply(this.y.subarray(h * hd, (h + 1) * hd), wei, kv.values, c, width); // wei v
    }
    return this.c_proj.forward(this.y);
  }
}

const ACTIVATIONS = {
  relu: (x) => Math.max(x, 0),
  gelu: (x) => x * normal_distribution(x),
  gelu_tanh: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  relu2: (x) => Math.max(x, 0) * x,
  swiglu: (x) => x / (1 + Math.exp(-x)), // of the gate, silu(x). The other half of the outputs is multiplied with it
};

// Phi(x), to within 1e-7 (Abramowitz, Stegun 1964, formula 26.2.17)
function normal_distribution(x) {
  const k = 1 / (1 + 0.2316419 * Math.abs(x));
  const sum = k * (0.31938153 + k * (-0.356563782 + k * (1.781477937 + k * (-1.821255978 + k * 1.330274429))));
  const tail = sum * Math.exp(-x * x / 2) / Math.sqrt(2 * Math.PI); // Phi(-|x|)
  return x < 0 ? tail : 1 - tail;
}

class MLP {
  constructor(config, weights, name) {
    this.c_fc = new Linear(weights, name + ".c_fc", config.n_embd);
    this.has_gate = config.activation === "swiglu";
    this.h = new Float32Array(this.has_gate ? this.c_fc.y.length / 2 : this.c_fc.y.length);
    this.c_proj = new Linear(weights, name + ".c_proj", this.h.length);
    this.activation = ACTIVATIONS[config.activation];
  }
  forward(x) {
    const outputs = this.c_fc.forward(x), width = this.h.length;
    for (let i = 0; i < width; i++) this.h[i] = this.activation(outputs[i]);
    if (this.has_gate) for (let i = 0; i < width; i++) this.h[i] *= outputs[width + i];
    return this.c_proj.forward(this.h);
  }
}

class Block {
  constructor(config, weights, name) {
    this.ln_1 = new Norm(config, weights, name + ".ln_1");
    this.attn = new CausalSelfAttention(config, weights, name + ".attn");
    this.ln_2 = new Norm(config, weights, name + ".ln_2");
    this.mlp = new MLP(config, weights, name + ".mlp");
  }
  forward(x, t, kv, rope, only_cache) { // changes x, the residual stream
    const y = this.attn.forward(this.ln_1.forward(x), t, kv, rope, only_cache);
    if (only_cache) return;
    add(x, y);
    add(x, this.mlp.forward(this.ln_2.forward(x)));
  }
}

// ---------------------------------------------------------------- the model

class KVCache {
  constructor({ n_layer, block_size, n_embd, n_head, n_kv_head }) {
    const size = block_size * n_embd / n_head * n_kv_head;
    this.ids = []; // the cached tokens
    // Keys are (width, block_size), values (block_size, width): so multiply() reads neighbors
    this.layers = range(n_layer).map(() => ({ keys: new Float32Array(size), values: new Float32Array(size) }));
  }
}

class GPT {
  // config: the fields of GPTConfig. weights: {name: Float32Array}, as in a state_dict
  constructor(config, weights) {
    this.config = config;
    this.wte = weights["transformer.wte.weight"]; // (V, C)
    this.w_prev = range(config.lookback).map((i) => weights[`transformer.w_prev.${i}.weight`]); // (V + 1, C) each
    this.wpe = weights["transformer.wpe.weight"]; // (block_size, C), or undefined
    this.rope = rope_tables(config);
    this.h = range(config.n_layer).map((i) => new Block(config, weights, `transformer.h.${i}`));
    this.ln_f = new Norm(config, weights, "transformer.ln_f");
    if (config.tie_weights) weights["lm_head.weight"] = this.wte;
    this.lm_head = new Linear(weights, "lm_head", config.n_embd);
    // The page shows the residual stream before each block, and after the last one
    this.residual = range(config.n_layer + 1).map(() => new Float32Array(config.n_embd));
  }

  // The logits after the tokens ids, at most block_size. Except for the last one, cached tokens are not computed again
  forward(ids, cache) {
    let n = 0;
    while (n < ids.length - 1 && ids[n] === cache.ids[n]) n++;
    cache.ids.length = n;
    for (const token of ids.slice(n, -1)) this.hidden_states(token, cache, true);
    return this.logits(this.hidden_states(ids.at(-1), cache));
  }

  // Append a token to the cache. Returns the input of the output layer, or nothing if it is only_cache
  hidden_states(token, cache, only_cache = false) {
    const { n_embd: C, n_layer, vocab_size, lookback } = this.config;
    const t = cache.ids.push(token) - 1;
    const x = this.residual[n_layer].fill(0); // all blocks change it: at the end, it is the stream after the last one
    add(x, this.wte, token * C);
    for (let i = 0; i < lookback; i++) { // previous-token embeddings, the farthest token first
      const earlier = t - lookback + i;
      const id = earlier < 0 ? vocab_size : cache.ids[earlier]; // vocab_size is "no token"
      add(x, this.w_prev[i], id * C);
    }
    if (this.wpe) add(x, this.wpe, t * C);
    for (const [i, block] of this.h.entries()) {
      this.residual[i].set(x);
      block.forward(x, t, cache.layers[i], this.rope, only_cache && i === n_layer - 1);
    }
    return only_cache ? null : this.ln_f.forward(x);
  }

  logits(x) {
    return this.lm_head.forward(x);
  }
}

// ---------------------------------------------------------------- position encodings

// cos and sin of the angle of each channel pair i at each position t, (block_size, hd / 2), or undefined
function rope_tables({ position, block_size, n_embd, n_head }) {
  if (position !== "rope") return undefined;
  const hd = n_embd / n_head;
  const table = (f) => table_of(block_size, hd / 2, (t, i) => f(t * 10000 ** (-2 * i / hd)));
  return { cos: table(Math.cos), sin: table(Math.sin) };
}

// Rotate each pair of channels i, i + hd / 2 of a query or key by its angle
function rotate(x, t, { cos, sin }) {
  const pairs = x.length / 2;
  for (let i = 0; i < pairs; i++) {
    const a = x[i], b = x[i + pairs];
    const cos_i = cos[t * pairs + i], sin_i = sin[t * pairs + i];
    x[i] = a * cos_i - b * sin_i;
    x[i + pairs] = b * cos_i + a * sin_i;
  }
}
