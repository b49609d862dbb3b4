// What stands around the model in a page: its weights, the context that it reads, sampling, and the tokenizers of
// common.py. (range() and softmax() are in gpt.js.) tests/test_gpt_js.py compares them with Python.
"use strict";

// ---------------------------------------------------------------- weights

// The weights that pack() of lessons/look.py wrote into bytes, an ArrayBuffer. shapes: [name, rows, columns] of each
// tensor in turn; a vector has no columns. int8: a matrix has first a scale for each row, and then integers
function unpack(shapes, int8, bytes) {
  let at = 0;
  function take(type, n) {
    const end = at + n * type.BYTES_PER_ELEMENT;
    const part = new type(bytes.slice(at, end));
    at = end;
    return part;
  }
  const weights = {};
  for (const [name, rows, columns] of shapes) {
    if (!int8 || columns === undefined) {
      weights[name] = take(Float32Array, rows * (columns ?? 1));
      continue;
    }
    const scale = take(Float32Array, rows);
    const integers = take(Int8Array, rows * columns);
    weights[name] = new Float32Array(rows * columns);
    for (let n = 0; n < integers.length; n++) weights[name][n] = scale[Math.floor(n / columns)] * integers[n];
  }
  return weights;
}

// ---------------------------------------------------------------- context

// Where the context of each of the tokens ids starts. With a block_size of 4:
//
//     position      0 1 2 3 4 5 6 7 8 9
//     start         0 0 0 0 3 3 3 6 6 6
//
// When the context is full, the next one is its most recent half, as when sample.py generates the text from its
// beginning. And each document has its own context, as in training, from its start_token on (null: there is none).
function context_starts(ids, block_size, start_token) {
  const half = Math.max(Math.floor(block_size / 2), 1);
  let start = 0;
  return ids.map((token, i) => {
    if (token === start_token) start = i;
    if (i - start === block_size) start = i + 1 - half;
    return start;
  });
}

// ---------------------------------------------------------------- sampling

// The probabilities from which sample_token() of model.py draws: softmax(logits / temperature) of the top_k most likely
// tokens (0: all), and of them the smallest set with total probability top_p
function probabilities(logits, temperature, top_k, top_p) {
  if (temperature === 0) { // greedy decoding
    const p = new Float64Array(logits.length);
    p[argmax(logits)] = 1;
    return p;
  }
  const p = Float64Array.from(logits, (x) => x / temperature);
  if (top_k > 0) {
    const kth = p.slice().sort().at(-Math.min(top_k, p.length)); // the k-th largest
    for (let token = 0; token < p.length; token++) if (p[token] < kth) p[token] = -Infinity;
  }
  softmax(p);
  if (top_p === 1) return p;
  let mass_before = 0; // the total probability of all more likely tokens
  const likeliest_first = range(p.length).sort((a, b) => p[b] - p[a]);
  const kept = new Float64Array(p.length);
  for (const token of likeliest_first) {
    if (mass_before >= top_p) break;
    kept[token] = p[token];
    mass_before += p[token];
  }
  const total = kept.reduce((a, b) => a + b);
  return kept.map((x) => x / total);
}

// The first token whose cumulative probability exceeds u, a random number from 0 to 1
function draw_token(p, u) {
  let cumulative = 0;
  for (let token = 0; token < p.length; token++) {
    cumulative += p[token];
    if (cumulative > u) return token;
  }
  return argmax(p); // rounding left the sum below u
}

function argmax(x) {
  return x.reduce((best, _, i) => (x[i] > x[best] ? i : best), 0);
}

// ---------------------------------------------------------------- tokenizers
// encode(text) cuts a text into pairs [id, part], whose parts together are the text. The id of an unknown part is -1. A
// character of two tokens is in the part of the first: [195, "é"], [169, ""]. decode_bytes(id): the UTF-8 of a token.

class CharTokenizer {
  constructor({ chars }) {
    this.chars = chars;
    this.ids = new Map(chars.map((c, id) => [c, id]));
  }

  encode(text) {
    return Array.from(text, (c) => [this.ids.get(c) ?? -1, c]);
  }

  decode_bytes(id) {
    return new TextEncoder().encode(this.chars[id]);
  }
}

// A token is a string with a character for each byte, U+0000 to U+00FF, as arrays cannot be the keys of a Map
class BPETokenizer {
  constructor({ tokens, pattern }) {
    this.tokens = tokens;
    this.ids = new Map(tokens.map((token, id) => [token, id]));
    // In JavaScript, \s and \S mean other characters than in tiktoken
    const unicode = pattern.replaceAll("\\s", "\\p{White_Space}").replaceAll("\\S", "\\P{White_Space}");
    this.pattern = new RegExp(unicode, "gu");
  }

  encode(text) {
    const pairs = [];
    for (const word of text.match(this.pattern) ?? []) {
      const characters = Array.from(word);
      for (const token of this.merge(split_bytes(word))) {
        const n = Array.from(token).filter(is_first_byte).length; // how many characters begin in this token
        pairs.push([this.ids.get(token), characters.splice(0, n).join("")]);
      }
    }
    return pairs;
  }

  // Of all neighbors that would be a token together, join those with the lowest id, everywhere, until there are none
  merge(tokens) {
    while (true) {
      const joined = tokens.slice(1).map((token, i) => this.ids.get(tokens[i] + token) ?? Infinity);
      const lowest = joined.reduce((a, b) => Math.min(a, b), Infinity);
      if (lowest === Infinity) return tokens;
      const merged = [];
      for (const token of tokens) {
        if (merged.length > 0 && this.ids.get(merged.at(-1) + token) === lowest) merged.push(merged.pop() + token);
        else merged.push(token);
      }
      tokens = merged;
    }
  }

  decode_bytes(id) {
    return Uint8Array.from(this.tokens[id], (c) => c.charCodeAt(0));
  }
}

function split_bytes(text) {
  return Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte));
}

// In UTF-8, the other bytes of a character are 0x80 to 0xBF
function is_first_byte(c) {
  return c < "\x80" || c > "\xBF";
}

function make_tokenizer(fields) {
  return fields.kind === "char" ? new CharTokenizer(fields) : new BPETokenizer(fields);
}
