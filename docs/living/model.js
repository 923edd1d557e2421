// The model in ONNX Runtime, as two graphs (chapter 14): one reads the source, one takes a step.
//
// The runtime is handed in (`ort`), so that the page and the tests in Node use the same code.

/** All 16-bit floats: entry i is the float16 with bit pattern i (IEEE 754: 1 sign, 5 exponent, 10 fraction). */
function everyHalf() {
  return Float32Array.from({ length: 2 ** 16 }, (_, bits) => {
    const sign = bits >> 15 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = (bits & 1023) / 1024;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? (1 + fraction) * 2 ** (exponent - 15) : fraction * 2 ** -14);
  });
}

/**
 * The weights as the graphs want them, from the packed file. The model ships in float16; every number
 * that fits in 16 bits without loss travels in 16 bits, and becomes a float32 only here.
 *
 * `parts` lists [first byte in the result, how many numbers or bytes, "half" or "bytes"] in order.
 */
export function unpack(packed, size, parts) {
  const table = everyHalf();
  const weights = new ArrayBuffer(size);
  let at = packed.byteOffset;
  for (const [start, count, kind] of parts) {
    if (kind === "half") {
      const halves = new Uint16Array(packed.buffer, at, count);
      const numbers = new Float32Array(weights, start, count);
      for (let i = 0; i < count; i++) numbers[i] = table[halves[i]];
      at += 2 * count;
    } else {
      new Uint8Array(weights, start, count).set(new Uint8Array(packed.buffer, at, count));
      at += count;
    }
    at += -at & 3; // the next part begins at a multiple of four bytes
  }
  return new Uint8Array(weights);
}

export class Model {
  constructor(ort, config, encoder, decoder) {
    Object.assign(this, { ort, config, encoder, decoder });
  }

  /** `files` holds the bytes of encoder.onnx, decoder_step.onnx and weights.bin by name, `config` is model.json. */
  static async load(ort, config, files) {
    const weights = unpack(files["weights.bin"], config.weights.size, config.weights.parts);
    const sessions = [];
    for (const name of ["encoder.onnx", "decoder_step.onnx"]) {
      const options = {
        executionProviders: ["wasm"],
        graphOptimizationLevel: "basic", // more would take longer than it saves on a few sentences
        externalData: [{ path: "weights.bin", data: weights }],
      };
      sessions.push(await ort.InferenceSession.create(files[name], options));
    }
    return new Model(ort, config, ...sessions);
  }

  /** Read a source, ids with </s>: a decoding that has written nothing yet. */
  async read(ids) {
    const { Tensor } = this.ort;
    const src = new Tensor("int64", BigInt64Array.from(ids, BigInt), [1, ids.length]);
    const src_mask = new Tensor("bool", new Uint8Array(ids.length).fill(1), [1, 1, ids.length]);
    const { cross } = await this.encoder.run({ src, src_mask });
    return new Decoding(this, cross, ids.length);
  }
}

/** A tensor of shape (layers, 2, R, …) with the rows numbered `rows` of its third dimension. */
function pickRows(Tensor, tensor, rows) {
  const [layers, two, R, ...rest] = tensor.dims;
  const size = rest.reduce((product, n) => product * n, 1);
  const picked = new Float32Array(layers * two * rows.length * size);
  for (let block = 0; block < layers * two; block++) {
    rows.forEach((row, i) => {
      const start = (block * R + row) * size;
      picked.set(tensor.data.subarray(start, start + size), (block * rows.length + i) * size);
    });
  }
  return new Tensor("float32", picked, [layers, two, rows.length, ...rest]);
}

/** A decoding in progress: R prefixes of one source, and what the decoder remembers of them (the KV cache). */
class Decoding {
  constructor(model, cross, sourceLength) {
    const { layers, heads, d_k } = model.config;
    const { Tensor } = model.ort;
    this.model = model;
    this.Tensor = Tensor;
    this.source = cross; // (layers, 2, 1, heads, S, d_k)
    this.cross = cross; // (layers, 2, R, heads, S, d_k)
    this.sourceLength = sourceLength;
    this.past = new Tensor("float32", new Float32Array(0), [layers, 2, 1, heads, 0, d_k]);
    this.position = 0;
  }

  /**
   * Continue each prefix by one of `tokens`. Gives the logits of what comes next, all R rows in one
   * array, and for each row the cross-attention: `weights`, layers · heads · S numbers.
   */
  async step(tokens) {
    const { Tensor, sourceLength: S } = this;
    const { layers, heads, vocab } = this.model.config;
    const R = tokens.length;
    if (this.cross.dims[2] !== R) {
      this.cross = pickRows(Tensor, this.source, new Array(R).fill(0));
    }
    const found = await this.model.decoder.run({
      tokens: new Tensor("int64", BigInt64Array.from(tokens, BigInt), [R, 1]),
      position: new Tensor("int64", BigInt64Array.of(BigInt(this.position)), [1]),
      past: this.past,
      cross: this.cross,
      src_mask: new Tensor("bool", new Uint8Array(R * S).fill(1), [R, 1, S]),
    });
    this.past = found.present;
    this.position += 1;
    // (layers, R, heads, S) to one array for each row
    const seen = found.attention.data;
    const attention = tokens.map((_, row) => {
      const weights = new Float32Array(layers * heads * S);
      for (let layer = 0; layer < layers; layer++) {
        const start = (layer * R + row) * heads * S;
        weights.set(seen.subarray(start, start + heads * S), layer * heads * S);
      }
      return weights;
    });
    return { logits: found.logits.data, vocab, attention };
  }

  /** Let the prefixes be those numbered `origin`; one may appear several times. */
  follow(origin) {
    this.past = pickRows(this.Tensor, this.past, origin);
  }
}

/** The weights of a step by layer and head (from 0), or their mean if either is null: S numbers. */
export function attentionOf(weights, { layers, heads }, layer, head) {
  const S = weights.length / (layers * heads);
  const mean = new Float32Array(S);
  let count = 0;
  for (let n = 0; n < layers; n++) {
    for (let h = 0; h < heads; h++) {
      if ((layer !== null && n !== layer) || (head !== null && h !== head)) continue;
      count++;
      for (let s = 0; s < S; s++) mean[s] += weights[(n * heads + h) * S + s];
    }
  }
  return mean.map((sum) => sum / count);
}
