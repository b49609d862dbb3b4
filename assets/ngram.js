// The n-gram model of ngram.py with Kneser-Ney smoothing, in plain JavaScript. tests/test_gpt_js.py compares the two.
"use strict";

// Tables of all n-grams would be larger than the text. So it keeps the text, and sorts its positions by the tokens
// before them. The positions after a context are then neighbors, and are counted when it is asked for.
class NGrams {
  // tokens: a typed array. separator: the token that starts each document, or null
  constructor(tokens, V, separator, n, discount) {
    Object.assign(this, { tokens, V, separator, n, discount });
    // before[k][i] is the k-th token before position i. Before a document, there are only separators: a b . c is read
    // as . . . c. Before the text, there are copies of its first token
    this.before = [tokens];
    for (let k = 1; k < n; k++) {
      const newer = this.before[k - 1];
      const column = tokens.map((_, i) => {
        const is_before_document = k > 1 && newer[i] === separator;
        return is_before_document ? separator : tokens[Math.max(i - k, 0)];
      });
      this.before.push(column);
    }
    // All positions except the first, sorted by before[1], those with equal ones by before[2], and so on. (Radix sort:
    // the least important column first, as each sort keeps the order of equals)
    this.sorted = Int32Array.from(tokens.subarray(1), (_, i) => i + 1);
    for (let k = n - 1; k > 0; k--) this.sort_by(this.before[k]);
    this.unigram = this.mix(new Float64Array(V).fill(1 / V), 0, 0, this.sorted.length);
  }

  // Counting sort, which keeps the order of positions with equal tokens
  sort_by(column) {
    const places = new Int32Array(this.V + 1);
    for (const i of this.sorted) places[column[i] + 1]++; // places[token + 1]: how many positions have this token
    for (let token = 0; token < this.V; token++) places[token + 1] += places[token]; // now: where the next ones begin
    const sorted = new Int32Array(this.sorted.length);
    for (const i of this.sorted) sorted[places[column[i]]++] = i;
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
      // At the start of a document, "...a", the contexts ".a" and "..a" tell no more than the longest one
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

  // Kneser-Ney smoothing: the probabilities after a context x of k tokens, from p, those after x' (x without its oldest
  // token). The positions after x are sorted[low] ... sorted[high - 1].
  //
  //     P(y after x) = (max(count(x y) - d, 0) + d followers(x) P(y after x')) / total(x)
  //
  // followers(x): how many different y there are. total(x): the sum of count(x y)
  mix(p, k, low, high) {
    const counts = new Float64Array(this.V); // count(x y)
    const is_longest = k === this.n - 1;
    const last_older = new Int32Array(this.V).fill(-1);
    for (let place = low; place < high; place++) {
      const i = this.sorted[place];
      const y = this.tokens[i];
      if (!is_longest) {
        // Count x y only once for each different token before it (a continuation count). Positions after x are sorted
        // by this token, so it is enough to compare it with the last one before x y
        const older = this.before[k + 1][i];
        if (older === last_older[y]) continue;
        last_older[y] = older;
      }
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
