// The Transformer of chapters 1 to 4, written down once: ids in, probabilities out, every number in between kept.
//
// A trace maps a name ("encoder.0.self.scores") to {axes, shape, data, op, from, weight}: its axes in the series'
// letters, rows first (so heads stand after places: T H d_k), its numbers, and how they were made: from which
// tensors, by which operation, with which of the model's weights. stops.js explains every number with this.
//
// Sums are made in 64 bits and kept in 32. The model is pre-norm: x + f(norm(x)).

const EPS = 1e-5; // as in chapter 4's LayerNorm

/** The model's tensors by name, from the unpacked weights; `places` is walk.json's: [first byte, rows, columns, transposed]. */
export function tensorsOf(bytes, places) {
  const made = new Map(); // tied tensors are one
  const tensors = new Map();
  for (const [name, [start, rows, cols, transposed]] of Object.entries(places)) {
    if (!made.has(start)) {
      const stored = new Float32Array(bytes.buffer, bytes.byteOffset + start, rows * cols);
      const data = transposed ? new Float32Array(rows * cols) : stored;
      if (transposed) for (let i = 0; i < data.length; i++) data[i] = stored[(i % cols) * rows + Math.floor(i / cols)];
      made.set(start, { data, rows, cols });
    }
    tensors.set(name, made.get(start));
  }
  return tensors;
}

/** softmax of each row of `width` numbers; `done`, the first rows of the result, are kept. */
function softmax(x, width, done = []) {
  const y = new Float32Array(x.length);
  y.set(done);
  for (let start = done.length; start < x.length; start += width) {
    let most = -Infinity;
    for (let i = start; i < start + width; i++) most = Math.max(most, x[i]);
    let sum = 0;
    for (let i = start; i < start + width; i++) sum += y[i] = Math.exp(x[i] - most);
    for (let i = start; i < start + width; i++) y[i] /= sum;
  }
  return y;
}

const sumOf = (a, b) => a.map((x, i) => x + b[i]);

/** Mean and √(variance + ε) of `count` numbers from `start`. */
export function spread(x, start, count) {
  let [sum, squares] = [0, 0];
  for (let i = start; i < start + count; i++) sum += x[i];
  const mean = sum / count;
  for (let i = start; i < start + count; i++) squares += (x[i] - mean) ** 2;
  return { mean, deviation: Math.sqrt(squares / count + EPS) };
}

/** One reading of the model: computes tensors by name and puts them into the trace. */
class Pass {
  /** `sizes` of the axes by letter; `earlier` is the trace of a shorter target, whose rows are the same. */
  constructor(net, trace, sizes, earlier) {
    Object.assign(this, { net, trace, earlier, sizes: { ...net.sizes, ...sizes } });
  }

  put(name, axes, data, op, from, weight = null) {
    axes = axes.split(" ");
    this.trace.set(name, { axes, shape: axes.map((axis) => this.sizes[axis]), data, op, from, weight });
    return name;
  }

  data(name) {
    return this.trace.get(name).data;
  }

  /** Rows that an earlier trace has already: those before the new token. */
  done(name) {
    return this.earlier?.get(name)?.data ?? [];
  }

  embed(to, rows, ids, weights) {
    const { D } = this.sizes;
    const [table, places] = [0, 1].map((i) => this.net.tensors.get(`${weights}.${i}.${i ? "pe" : "lut.weight"}`).data);
    const vectors = new Float32Array(ids.length * D);
    ids.forEach((id, t) => {
      for (let d = 0; d < D; d++) vectors[t * D + d] = table[id * D + d] * Math.sqrt(D);
    });
    this.put(`${to}.ids`, rows, Float32Array.from(ids), "id", []);
    this.put(`${to}.embedding`, `${rows} D`, vectors, "lookup", [`${to}.ids`], `${weights}.0.lut`);
    this.put(`${to}.position`, `${rows} D`, places.slice(0, ids.length * D), "position", []);
    return this.add(`${to}.embedded`, `${to}.embedding`, `${to}.position`);
  }

  add(to, a, b) {
    return this.put(to, this.trace.get(a).axes.join(" "), sumOf(this.data(a), this.data(b)), "add", [a, b]);
  }

  norm(to, from, weight) {
    const x = this.data(from);
    const { D } = this.sizes;
    const [scale, shift] = ["weight", "bias"].map((part) => this.net.tensors.get(`${weight}.${part}`).data);
    const y = new Float32Array(x.length);
    for (let start = 0; start < x.length; start += D) {
      const { mean, deviation } = spread(x, start, D);
      for (let d = 0; d < D; d++) y[start + d] = ((x[start + d] - mean) / deviation) * scale[d] + shift[d];
    }
    return this.put(to, this.trace.get(from).axes.join(" "), y, "norm", [from], weight);
  }

  /** x·Wᵀ + b, and nothing below 0 if `relu`. A weight is read once for all rows. */
  linear(to, axes, from, weight, relu = false) {
    const x = this.data(from);
    const { data: W, rows: out, cols: width } = this.net.tensors.get(`${weight}.weight`);
    const bias = this.net.tensors.get(`${weight}.bias`).data;
    const y = new Float32Array((x.length / width) * out);
    const done = this.done(to);
    y.set(done);
    for (let o = 0; o < out; o++) {
      for (let row = done.length / out, at = row * width; at < x.length; row++, at += width) {
        let [a, b] = [bias[o], 0]; // two sums: a processor adds to both at once
        for (let i = 0, w = o * width; i < width; i += 2, w += 2) {
          a += x[at + i] * W[w];
          b += x[at + i + 1] * W[w + 1];
        }
        y[row * out + o] = relu ? Math.max(0, a + b) : a + b;
      }
    }
    return this.put(to, axes, y, relu ? "relu" : "linear", [from], weight);
  }

  /** Multi-head attention (chapter 2) of the rows of `x` (axis `T`) to those of `y` (axis `S`); gives the name of its output. */
  attend(to, x, T, y, S, weights, causal = false) {
    const { H, d_k: size, [T]: queries, [S]: keys } = this.sizes;
    const query = this.linear(`${to}.query`, `${T} H d_k`, x, `${weights}.project_query`);
    const key = this.linear(`${to}.key`, `${S} H d_k`, y, `${weights}.project_key`);
    const value = this.linear(`${to}.value`, `${S} H d_k`, y, `${weights}.project_value`);
    const [q, k, v] = [query, key, value].map((name) => this.data(name));
    let data = new Float32Array(queries * H * keys);
    for (let t = 0, i = 0; t < queries; t++) {
      for (let h = 0; h < H; h++) {
        for (let s = 0; s < keys; s++, i++) {
          let dot = 0;
          for (let d = 0; d < size; d++) dot += q[(t * H + h) * size + d] * k[(s * H + h) * size + d];
          data[i] = dot / Math.sqrt(size);
        }
      }
    }
    let scores = this.put(`${to}.scores`, `${T} H ${S}`, data, "dot", [query, key]);
    if (causal) {
      data = data.map((score, i) => (i % keys > Math.floor(i / (H * keys)) ? -Infinity : score));
      scores = this.put(`${to}.masked`, `${T} H ${S}`, data, "mask", [scores]);
    }
    const shares = softmax(data, keys);
    const share = this.put(`${to}.weights`, `${T} H ${S}`, shares, "softmax", [scores]);
    const mix = new Float32Array(queries * H * size);
    for (let t = 0; t < queries; t++) {
      for (let h = 0; h < H; h++) {
        for (let d = 0; d < size; d++) {
          let sum = 0;
          for (let s = 0; s < keys; s++) sum += shares[(t * H + h) * keys + s] * v[(s * H + h) * size + d];
          mix[(t * H + h) * size + d] = sum;
        }
      }
    }
    this.put(`${to}.mix`, `${T} H d_k`, mix, "mix", [share, value]);
    return this.linear(`${to}.out`, `${T} D`, `${to}.mix`, `${weights}.project_output`);
  }

  feedForward(to, from, T, weights) {
    const hidden = this.linear(`${to}.hidden`, `${T} F`, from, `${weights}.expand`, true);
    return this.linear(`${to}.out`, `${T} D`, hidden, `${weights}.contract`);
  }
}

export class Net {
  /** `config` is the living page's model.json, `tensors` from `tensorsOf`. */
  static from(config, tensors) {
    return Object.assign(new Net(), {
      config,
      tensors,
      sizes: {
        H: config.heads,
        d_k: config.d_k,
        D: config.heads * config.d_k,
        F: tensors.get("encoder.layers.0.feed_forward.expand.weight").rows,
        V: config.vocab,
      },
    });
  }

  /** Source ids, with </s>: the trace up to the memory. */
  encode(ids) {
    const pass = new Pass(this, new Map(), { S: ids.length });
    let x = pass.embed("source", "S", ids, "src_embed");
    for (let n = 0; n < this.config.layers; n++) {
      const [to, weights] = [`encoder.${n}`, `encoder.layers.${n}`];
      const asked = pass.norm(`${to}.norm1`, x, `${weights}.sublayer.0.norm`);
      x = pass.add(`${to}.residual1`, x, pass.attend(`${to}.self`, asked, "S", asked, "S", `${weights}.self_attn`));
      const seen = pass.norm(`${to}.norm2`, x, `${weights}.sublayer.1.norm`);
      x = pass.add(`${to}.residual2`, x, pass.feedForward(`${to}.ff`, seen, "S", `${weights}.feed_forward`));
    }
    pass.norm("memory", x, "encoder.norm");
    return pass.trace;
  }

  /**
   * `encoded` and all that the decoder makes of target ids, which begin with <s>: T rows, the row t saying what
   * comes after the ids up to t. If `earlier` is the trace of a beginning of these ids, its rows are taken over.
   */
  decode(encoded, ids, earlier = null) {
    const S = encoded.get("source.ids").data.length;
    const pass = new Pass(this, new Map(encoded), { S, T: ids.length }, earlier);
    let x = pass.embed("target", "T", ids, "tgt_embed");
    for (let n = 0; n < this.config.layers; n++) {
      const [to, weights] = [`decoder.${n}`, `decoder.layers.${n}`];
      const asked = pass.norm(`${to}.norm1`, x, `${weights}.sublayer.0.norm`);
      x = pass.add(`${to}.residual1`, x, pass.attend(`${to}.self`, asked, "T", asked, "T", `${weights}.self_attn`, true));
      const across = pass.norm(`${to}.norm2`, x, `${weights}.sublayer.1.norm`);
      x = pass.add(`${to}.residual2`, x, pass.attend(`${to}.cross`, across, "T", "memory", "S", `${weights}.src_attn`));
      const seen = pass.norm(`${to}.norm3`, x, `${weights}.sublayer.2.norm`);
      x = pass.add(`${to}.residual3`, x, pass.feedForward(`${to}.ff`, seen, "T", `${weights}.feed_forward`));
    }
    pass.norm("decoder.norm", x, "decoder.norm");
    pass.linear("logits", "T V", "decoder.norm", "generator.proj");
    const shares = softmax(pass.data("logits"), this.sizes.V, pass.done("probabilities"));
    pass.put("probabilities", "T V", shares, "softmax", ["logits"]);
    return pass.trace;
  }

  /** The likeliest token again and again, up to </s> or `limit` tokens: {ids, trace}; the trace has all steps. */
  greedy(sourceIds, limit) {
    const { bos, eos, vocab } = this.config;
    const encoded = this.encode(sourceIds);
    const ids = [bos];
    let trace = null;
    while (ids.length <= limit && ids.at(-1) !== eos) {
      trace = this.decode(encoded, ids, trace);
      const logits = trace.get("logits").data.subarray(-vocab);
      ids.push(logits.indexOf(logits.reduce((a, b) => Math.max(a, b))));
    }
    return { ids: ids.slice(1), trace };
  }
}
