// The n-gram model of ngram.py with Kneser-Ney smoothing, in plain JavaScript. tests/test_gpt_js.py compares the two.
"use strict";

// Counts the n-grams of a text when it is asked for them: so it keeps the text, sorted by context, instead of counts
class NGrams {
  // tokens: a typed array. separator: the token that starts each document, or null
  constructor(tokens, V, separator, n, discount) {
    Object.assign(this, { tokens, V, separator, n, discount });
    // before[k][i] is the k-th token before position i. A document starts with separators, a text with its first token
    this.before = [tokens];
    for (let k = 1; k < n; k++) {
      const newer = this.before[k - 1];
      const column = tokens.map((_, i) => {
        return k > 1 && newer[i] === separator ? separator : tokens[Math.max(i - k, 0)];
      });
      this.before.push(column);
    }
    // All positions except the first, sorted by before[1], and then by before[2] ...
    this.sorted = Int32Array.from(tokens.subarray(1), (_, i) => i + 1);
    for (let k = n - 1; k > 0; k--) this.sort_by(this.before[k]);
    this.unigram = this.mix(new Float64Array(V).fill(1 / V), 0, 0, this.sorted.length);
  }

  // Counting sort, which keeps the order of positions with equal tokens
  sort_by(column) {
    const next = new Int32Array(this.V + 1);
    for (const i of this.sorted) next[column[i] + 1]++;
    for (let token = 0; token < this.V; token++) next[token + 1] += next[token];
    const sorted = new Int32Array(this.sorted.length);
    for (const i of this.sorted) sorted[next[column[i]]++] = i;
    this.sorted = sorted;
  }

  // The probability of each token after the tokens ids, which may be fewer than n - 1
  predict(ids) {
    const { separator, n, before, sorted } = this;
    let p = this.unigram;
    let low = 0, high = sorted.length; // sorted[low] ... sorted[high - 1] are the positions after the last k tokens
    let token = null;
    for (let k = 1; k < n; k++) {
      token = k > 1 && token === separator ? separator : ids[Math.max(ids.length - k, 0)];
      [low, high] = [this.find(before[k], token, low, high), this.find(before[k], token + 1, low, high)];
      if (low === high) break; // unseen, as are longer contexts
      // After the start of a document, the context without its oldest separator tells the same
      if (token === separator && k < n - 1) continue;
      p = this.mix(p, k, low, high);
    }
    return p;
  }

  // The first of the places low ... high whose token in a column is at least this token, or high
  find(column, token, low, high) {
    while (low < high) {
      const middle = (low + high) >> 1;
      if (column[this.sorted[middle]] < token) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // (max(count(x y) - d, 0) + d followers(x) P(y after x')) / count(x). The context x of k tokens stands before the
  // positions sorted[low] ... sorted[high - 1]. p: P(y after x'), where x' is x without its oldest token
  mix(p, k, low, high) {
    const counts = new Float64Array(this.V);
    const older = this.before[k + 1]; // undefined for the longest context, whose n-grams are counted one by one
    const seen_after = new Int32Array(this.V).fill(-1);
    for (let place = low; place < high; place++) {
      const i = this.sorted[place];
      const y = this.tokens[i];
      // Shorter n-grams are counted once for each different older token (continuation counts)
      if (older && seen_after[y] === older[i]) continue;
      seen_after[y] = older ? older[i] : -1;
      counts[y]++;
    }
    let total = 0, followers = 0;
    for (const count of counts) {
      total += count;
      if (count > 0) followers++;
    }
    if (total === 0) return p; // an empty text
    const d = this.discount;
    return p.map((p_y, y) => (Math.max(counts[y] - d, 0) + d * followers * p_y) / total);
  }
}
