// The stops of the walk: which tensors each shows, the Python that makes the same numbers, and for any of them
// how it came about. It runs where the model is (worker.js, node.mjs); the page gets plain objects.

import { largest, limitFor } from "../living/decode.js";
import { unpack } from "../living/model.js";
import { Tokenizer } from "../living/tokenizer.js";
import { Net, spread, tensorsOf } from "./forward.js";

const LONGEST = 40; // tokens of a source, with </s>: more would be hard to look at
const LIKELIEST = 12; // tokens of the vocabulary that are shown
const TERMS = 4; // terms of a sum that are written out
const OURS = ["Ein Mann trägt einen Korb.", "Ein Mann trägt einen Hut."]; // chapter 0's sentences

const chapter = (number, title, name, anchor) => ({ number, title, file: `ch${number}_${name}`, anchor });
const sections = ["all-five-questions-at-once", "why-divide-by-sqrt-d-k", "masks-who-may-look-at-whom"];
const [FIVE, WHY, MASKS] = sections.map((anchor) => chapter("01", "Attention", "attention", anchor));
const HEADS = chapter("02", "Multi-head attention", "multi_head_attention", "query-key-and-value-are-roles");
const USES = chapter("02", "Multi-head attention", "multi_head_attention", "one-class-three-uses");
const [LAYER, OPENED, DECODING] = ["the-model-on-one-screen", "one-layer-opened", "one-decoder-layer-opened"].map((anchor) =>
  chapter("04", "Encoder and decoder", "encoder_decoder", anchor),
);

// A layer's input: the output of the one below, or the embedded pieces.
const below = (side, n) => (n ? `${side}.${n - 1}.residual${side === "encoder" ? 2 : 3}` : `${side === "encoder" ? "source" : "target"}.embedded`);

const SOURCE = ({ source }) => [`src = ${source}  # (B, S)`];
const MEMORY = (s) => [...SOURCE(s), "memory = model.encode(src)  # (B, S, D)", `tgt = torch.tensor([[${s.written}]])  # (B, T): <s>, and what is written`];
const LAYERS = (n) => (n ? [`for below in model.encoder.layers[:${n}]:`, "    x = below(x)"] : []);
const OPEN = (s) => [
  ...SOURCE(s),
  "x = model.src_embed(src)  # (B, S, D)",
  ...LAYERS(s.layer),
  `layer = model.encoder.layers[${s.layer}]`,
  "attn = layer.self_attn",
  "normed = layer.sublayer[0].norm(x)",
];
const PROJECT = (keys, head) => [
  `query = split_heads(attn.project_query(normed), attn.h)[0, ${head}]  # (${keys === "memory" ? "T" : "S"}, d_k)`,
  `key = split_heads(attn.project_key(${keys}), attn.h)[0, ${head}]  # (S, d_k)`,
  `value = split_heads(attn.project_value(${keys}), attn.h)[0, ${head}]`,
];
const SCORE = "scores = query @ key.T / math.sqrt(query.size(-1))";
const MIX = (mask = "") => `mix, weights = attention(query, key, value${mask})  # of one head`;
const DECODER = (s) => [
  ...MEMORY(s),
  "causal = subsequent_mask(tgt.size(1))  # (1, T, T)",
  "x = model.tgt_embed(tgt)  # (B, T, D)",
  ...(s.layer ? [`for below in model.decoder.layers[:${s.layer}]:`, "    x = below(x, memory, None, causal)"] : []),
  `layer = model.decoder.layers[${s.layer}]`,
];
const ACROSS = ["x = layer.sublayer[0](x, lambda x: layer.self_attn(x, x, x, causal))"];
const THINK = (i) => [
  `normed = layer.sublayer[${i}].norm(x)`,
  "hidden = layer.feed_forward.expand(normed).relu()  # (B, T, F)",
  "out = layer.feed_forward.contract(hidden)  # (B, T, D)",
];
const END = (s) => [
  ...MEMORY(s),
  "vectors = model.decode(memory, None, tgt, subsequent_mask(tgt.size(1)))  # (B, T, D)",
  "logits = model.generator(vectors[0, -1])  # (V,)",
  `likeliest = logits.topk(${LIKELIEST}).indices`,
];

const ENCODER = { layer: true, head: true, step: false };
const BOTH = { layer: true, head: true, step: true };

/**
 * In the order of the walk. `tensors(n, N)` lists what a stop shows for layer n of N: [name, the same in its Python
 * `code`, "given" if another stop makes it, "folded" if it is shown on demand]. A name that ends in .W is a matrix of weights.
 */
export const STOPS = [
  {
    ...{ id: "pieces", title: "Pieces and their numbers", place: "source-embed", side: null, picks: { step: true } },
    say: "The text is cut into pieces. Each piece has a number, its id: the model reads nothing else.",
    chapter: chapter("07", "Multi30k", "multi30k", "subwords"),
    tensors: () => [["source.ids", "src.T"], ["target.ids", "tgt.T"]],
    code: (s) => [...SOURCE(s), `tgt = torch.tensor([[${s.written}]])  # (B, T): <s>, and what is written`],
  },
  {
    ...{ id: "embed", title: "Embedding and position", place: "source-embed", side: null, picks: { step: true } },
    say: "Each id picks a row of a learned table. A pattern that depends on the place alone is added.",
    chapter: chapter("03", "Embeddings and positions", "embeddings_and_positions", "adding-them"),
    tensors: () => [
      ...[["source.embedding", "embed(src)[0]"], ["source.position", "place.pe[: src.size(1)]"], ["source.embedded", "x[0]"]],
      ...[["target.embedding", "embed(tgt)[0]", "folded"], ["target.position", "place.pe[: tgt.size(1)]", "folded"]],
      ["target.embedded", "y[0]", "folded"],
    ],
    code: (s) => [
      ...SOURCE(s),
      `tgt = torch.tensor([[${s.written}]])  # (B, T): <s>, and what is written`,
      "embed, place = model.src_embed  # the same table for both languages",
      "x = place(embed(src))  # (B, S, D)",
      "y = place(embed(tgt))  # (B, T, D)",
    ],
  },
  {
    ...{ id: "qkv", title: "Query, key and value", place: "enc-attention", side: "encoder", picks: ENCODER, chapter: HEADS },
    say: "A head makes three short vectors for each place: a question, a label to be found by, and something to give.",
    tensors: (n) => [
      ...[[below("encoder", n), "x[0]", "given"], [`encoder.${n}.norm1`, "normed[0]"], [`encoder.${n}.self.query`, "query"]],
      ...[[`encoder.${n}.self.key`, "key"], [`encoder.${n}.self.value`, "value"]],
      ...["query", "key", "value"].map((role) => [`encoder.${n}.self.${role}.W`, `attn.project_${role}.weight[own]`, "folded"]),
    ],
    code: (s) => [...OPEN(s), ...PROJECT("normed", s.head), `own = slice(${s.head} * query.size(1), ${s.head + 1} * query.size(1))  # this head's rows`],
  },
  {
    ...{ id: "scores", title: "Scores", place: "enc-attention", side: "encoder", picks: ENCODER, chapter: WHY },
    say: "Each query meets each key: multiply, add up, divide by √d_k. A high score means: this place has what I ask for.",
    tensors: (n) => [[`encoder.${n}.self.query`, "query", "given"], [`encoder.${n}.self.key`, "key", "given"], [`encoder.${n}.self.scores`, "scores"]],
    code: (s) => [...OPEN(s), ...PROJECT("normed", s.head).slice(0, 2), `${SCORE}  # (S, S)`],
  },
  {
    ...{ id: "softmax", title: "Softmax: scores become shares", place: "enc-attention", side: "encoder", picks: ENCODER, chapter: FIVE },
    say: "Softmax turns each row of scores into shares between 0 and 1 that add up to 1.",
    tensors: (n) => [[`encoder.${n}.self.scores`, "scores", "given"], [`encoder.${n}.self.weights`, "weights"]],
    code: (s) => [...OPEN(s), ...PROJECT("normed", s.head).slice(0, 2), `${SCORE}  # (S, S)`, "weights = scores.softmax(dim=-1)  # each row adds up to 1"],
  },
  {
    ...{ id: "mix", title: "Mix the values", place: "enc-attention", side: "encoder", picks: ENCODER, chapter: FIVE },
    say: "Each place takes from every place's value as much as its share says.",
    tensors: (n) => [[`encoder.${n}.self.weights`, "weights", "given"], [`encoder.${n}.self.value`, "value", "given"], [`encoder.${n}.self.mix`, "mix"]],
    code: (s) => [...OPEN(s), ...PROJECT("normed", s.head), MIX()],
  },
  {
    ...{ id: "residual", title: "Join the heads, add, norm", place: "enc-norm", side: "encoder", picks: ENCODER, chapter: LAYER },
    say: "One matrix joins what the heads found. The result is added to the input, and the sum is brought to one scale.",
    tensors: (n) => [
      ...[[`encoder.${n}.self.mix`, "mix", "given"], [`encoder.${n}.self.out`, "out[0]"], [below("encoder", n), "x[0]", "given"]],
      ...[[`encoder.${n}.residual1`, "added[0]"], [`encoder.${n}.norm2`, "after[0]"]],
    ],
    code: (s) => [
      ...[...OPEN(s), ...PROJECT("normed", s.head), MIX()],
      "out = attn(normed, normed, normed)  # (B, S, D), of all heads",
      ...["added = x + out", "after = layer.sublayer[1].norm(added)"],
    ],
  },
  {
    ...{ id: "feedforward", title: "Feed-forward", place: "enc-ff", side: "encoder", picks: { layer: true }, chapter: OPENED },
    say: "Each place works alone on what it has: widen to F numbers, drop what is below 0, narrow again, add.",
    tensors: (n, N) => [
      ...[[`encoder.${n}.norm2`, "normed[0]", "given"], [`encoder.${n}.ff.hidden`, "hidden[0]"], [`encoder.${n}.ff.out`, "out[0]"]],
      ...[[`encoder.${n}.residual1`, "x[0]", "given"], [`encoder.${n}.residual2`, "(x + out)[0]"]],
      ...(n === N - 1 ? [["memory", "model.encoder.norm(x + out)[0]"]] : []),
    ],
    code: (s) => [...OPEN(s), "x = x + attn(normed, normed, normed)", ...THINK(1).map((line) => line.replace("T, ", "S, "))],
  },
  {
    ...{ id: "causal", title: "The decoder looks back", place: "dec-self", side: "decoder", picks: BOTH, chapter: MASKS },
    say: "The decoder reads what is written so far. A mask hides what comes later: there the score is −∞ and the share is 0.",
    tensors: (n) => [
      ...[[below("decoder", n), "x[0]", "given"], [`decoder.${n}.norm1`, "normed[0]", "folded"], [`decoder.${n}.self.query`, "query"]],
      ...[[`decoder.${n}.self.key`, "key"], [`decoder.${n}.self.value`, "value", "folded"], [`decoder.${n}.self.scores`, "scores", "folded"]],
      ...[[`decoder.${n}.self.masked`, "masked"], [`decoder.${n}.self.weights`, "weights"], [`decoder.${n}.self.mix`, "mix"]],
      ...[[`decoder.${n}.self.out`, "out[0]", "folded"], [`decoder.${n}.residual1`, "(x + out)[0]"]],
    ],
    code: (s) => [
      ...[...DECODER(s), "attn = layer.self_attn", "normed = layer.sublayer[0].norm(x)"],
      ...PROJECT("normed", s.head).map((line) => line.replace("(S, ", "(T, ")),
      ...[`${SCORE}  # (T, T)`, "masked = scores.masked_fill(~causal[0], -math.inf)", MIX(", causal[0]")],
      "out = attn(normed, normed, normed, causal)  # (B, T, D), of all heads",
    ],
  },
  {
    ...{ id: "cross", title: "The decoder looks at the source", place: "dec-cross", side: "decoder", picks: BOTH, chapter: USES },
    say: "Now the written side asks and the German side answers: queries from the decoder, keys and values from the memory.",
    tensors: (n) => [
      ...[["memory", "memory[0]", "given"], [`decoder.${n}.residual1`, "x[0]", "given"], [`decoder.${n}.norm2`, "normed[0]", "folded"]],
      ...[[`decoder.${n}.cross.query`, "query"], [`decoder.${n}.cross.key`, "key"], [`decoder.${n}.cross.value`, "value", "folded"]],
      ...[[`decoder.${n}.cross.scores`, "scores"], [`decoder.${n}.cross.weights`, "weights"], [`decoder.${n}.cross.mix`, "mix"]],
      ...[[`decoder.${n}.cross.out`, "out[0]", "folded"], [`decoder.${n}.residual2`, "(x + out)[0]"]],
    ],
    code: (s) => [
      ...[...DECODER(s), ...ACROSS, "attn = layer.src_attn", "normed = layer.sublayer[1].norm(x)", ...PROJECT("memory", s.head)],
      ...[`${SCORE}  # (T, S)`, MIX(), "out = attn(normed, memory, memory)  # (B, T, D), of all heads"],
    ],
  },
  {
    ...{ id: "decoderff", title: "Feed-forward again", place: "dec-ff", side: "decoder", picks: { layer: true, step: true }, chapter: DECODING },
    say: "The same step as in the encoder: each place works alone, and the result is added.",
    tensors: (n) => [
      ...[[`decoder.${n}.residual2`, "x[0]", "given"], [`decoder.${n}.norm3`, "normed[0]"], [`decoder.${n}.ff.hidden`, "hidden[0]"]],
      ...[[`decoder.${n}.ff.out`, "out[0]"], [`decoder.${n}.residual3`, "(x + out)[0]"]],
    ],
    code: (s) => [...DECODER(s), ...ACROSS, "x = layer.sublayer[1](x, lambda x: layer.src_attn(x, memory, memory))", ...THINK(2)],
  },
  {
    ...{ id: "logits", title: "A score for every piece", place: "generator", side: "decoder", picks: { step: true }, chapter: LAYER },
    say: "The last row, after a norm, meets one learned row for each of the V pieces. Each gets a score, its logit: here are the twelve highest.",
    tensors: (n, N) => [
      ...[[`decoder.${N - 1}.residual3`, "x[0]", "given"], ["decoder.norm", "vectors[0]"]],
      ...[["logits", "logits[likeliest].unsqueeze(1)"], ["logits.W", "model.generator.proj.weight[likeliest]", "folded"]],
    ],
    code: (s) => [
      ...[...MEMORY(s), "causal = subsequent_mask(tgt.size(1))  # (1, T, T)", "x = model.tgt_embed(tgt)  # (B, T, D)"],
      ...["for layer in model.decoder.layers:", "    x = layer(x, memory, None, causal)", "vectors = model.decoder.norm(x)"],
      ...END(s).slice(-2),
    ],
  },
  {
    ...{ id: "choice", title: "Softmax, and the choice", place: "softmax", side: "decoder", picks: { step: true } },
    say: "Softmax makes probabilities of all V logits. The likeliest piece is written, and the decoder reads on.",
    chapter: chapter("06", "Training", "training", "greedy-decoding"),
    tensors: () => [["logits", "logits[likeliest].unsqueeze(1)", "given"], ["probabilities", "probabilities[likeliest].unsqueeze(1)"]],
    code: (s) => [...END(s), "probabilities = logits.softmax(dim=-1)  # (V,)", "written = trained.tokenizer.processor.id_to_piece(likeliest[0].item())"],
  },
];

const IMPORTS = {
  math: "import math",
  torch: "import torch",
  attention: "from scripts.ch01_attention import attention",
  subsequent_mask: "from scripts.ch01_attention import subsequent_mask",
  split_heads: "from scripts.ch02_multi_head_attention import split_heads",
  source_ids: "from scripts.ch07_multi30k import source_ids",
};

/** [title, a sentence] by the last part of a tensor's name. */
const ABOUT = {
  ids: ["ids", "The number of each piece in the list of all pieces."],
  embedding: ["embedding", "The piece's row of the learned table, times √D."],
  position: ["position", "Waves of many lengths: a pattern for each place. Nothing here is learned."],
  embedded: ["embedding + position", "The two added: what the first layer gets."],
  norm1: ["normed rows", "Each row brought to one scale: mean 0, spread 1, then a learned scale and shift."],
  query: ["query", "What each place asks."],
  key: ["key", "What each place can be found by."],
  value: ["value", "What each place has to give."],
  scores: ["scores", "How well each query (row) fits each key (column)."],
  masked: ["scores, masked", "The same scores, with −∞ where a place may not look."],
  weights: ["weights", "How much each row looks at each column: shares of 1."],
  mix: ["mix", "What each place takes home: the values, mixed by its shares."],
  out: ["output", "What the step adds to its input."],
  residual1: ["sums", "Input plus output: a residual connection."],
  hidden: ["hidden", "F numbers for each place; what was below 0 is 0."],
  memory: ["memory", "What the encoder hands over: one row for each German piece."],
  norm: ["normed rows, after the last layer", "The decoder's result. Its last row decides what comes next."],
  logits: ["logits", "A score for each piece, the twelve highest. Each may be any number."],
  probabilities: ["probabilities", "The logits as shares of 1, over all pieces."],
  W: ["learned matrix", "Learned in training, and the same for every sentence. A row makes one column."],
};
const KIND = { ids: "id", scores: "score", masked: "score", logits: "score", weights: "share", probabilities: "share", W: "weight" };
const lastPart = (name) => name.split(".").at(-1);
const aboutOf = (name) => ABOUT[lastPart(name)] ?? ABOUT[lastPart(name).replace(/\d$/, "1")];

const POWERS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** A number as the page shows it: 0.377, −12.5, 4.1·10⁻⁵, −∞. */
export function shown(x) {
  const size = Math.abs(x);
  if (x === -Infinity) return "−∞";
  if (Number.isInteger(x) && size < 1e6) return String(x).replace("-", "−");
  const [digits, power] = x.toExponential(1).split("e");
  const small = () => `${digits}·10${power < 0 ? "⁻" : ""}${[...power.slice(1)].map((digit) => POWERS[digit]).join("")}`;
  return (size >= 100 ? x.toFixed(1) : size >= 0.001 ? x.toFixed(3) : small()).replace("-", "−");
}
const quoted = (piece) => `“${piece}”`;
const factor = (x) => (x < 0 ? `(${shown(x)})` : shown(x));

/** "a + b + … (29 more: c) = sum": the largest terms first. `terms` are {text, value}. */
function sumText(terms, sum) {
  const order = [...terms].sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const few = terms.length <= TERMS + 1 ? order : order.slice(0, TERMS);
  const rest = order.slice(few.length);
  const written = few.map(({ text }) => text).join(" + ");
  const more = rest.length ? ` + … (${rest.length} more: ${shown(rest.reduce((a, b) => a + b.value, 0))})` : "";
  return `${written}${more} = ${shown(sum)}`;
}
const total = (numbers) => numbers.reduce((a, b) => a + b, 0);

/** Load the model as the living page has it; `bytesOf(name)` gives a file's bytes. */
export async function openWalk(bytesOf) {
  const names = ["model.json", "tokenizer.json", "weights.bin"];
  const [config, tables, packed] = await Promise.all(names.map((name) => bytesOf(`../living/${name}`)));
  const [model, data] = [config, tables].map((bytes) => JSON.parse(new TextDecoder().decode(bytes)));
  const weights = unpack(packed, model.weights.size, model.weights.parts);
  return new Walk(Net.from(model, tensorsOf(weights, model.weights.places)), new Tokenizer(data));
}

export class Walk {
  constructor(net, tokenizer) {
    const { layers, heads, d_k, vocab, max_len, parameters, examples } = net.config;
    this.about = { layers, heads, dK: d_k, vocab, maxLen: max_len, parameters, examples: [...new Set([...OURS, ...examples])] };
    Object.assign(this, { net, tokenizer, layers, heads, made: new Map(), sentence: null });
    for (const { id, tensors } of STOPS) {
      for (let n = 0; n < layers; n++) {
        for (const [name, , role] of tensors(n, layers)) {
          // A tensor's own stop is the one that makes it, not one that begins with it.
          if (!this.made.has(name) || (role !== "given" && this.made.get(name).role === "given")) this.made.set(name, { id, layer: n, role });
        }
      }
    }
  }

  label(id) {
    return this.tokenizer.label(this.tokenizer.pieces[id]);
  }

  /** Translate a sentence, greedily, with every number kept. The same one again costs nothing. */
  read(sentence) {
    if (this.sentence !== sentence) {
      const { tokenizer, net } = this;
      const { eos, bos, max_len } = net.config;
      const pieces = tokenizer.split(sentence);
      const kept = tokenizer.encode(sentence).slice(0, LONGEST - 1);
      this.ids = [...kept, eos];
      const { ids, trace } = net.greedy(this.ids, limitFor(this.ids.length, max_len));
      this.labels = [...pieces.slice(0, kept.length).map((piece) => tokenizer.label(piece)), "</s>"];
      Object.assign(this, { sentence, trace, target: [bos, ...ids], cut: pieces.length > kept.length, whole: pieces.length });
    }
    const written = this.target.slice(1);
    const note = this.cut ? `The sentence has ${this.whole} pieces; the walk takes the first ${this.ids.length - 1}.` : "";
    return { sentence, srcPieces: this.labels, tgtPieces: written.map((id) => this.label(id)), text: this.tokenizer.decode(written), note };
  }

  // --- Tensors as matrices ---

  /** The ids of the likeliest tokens at a step. */
  likeliest({ step }) {
    const { vocab } = this.net.config;
    return largest(this.trace.get("logits").data, LIKELIEST, step * vocab, (step + 1) * vocab).map(([id]) => id);
  }

  /** How many of an axis are shown, and their labels. */
  axis(letter, state) {
    if (letter === "S") return this.labels;
    if (letter === "T") return this.target.slice(0, state.step + 1).map((id) => this.label(id));
    if (letter === "V") return this.likeliest(state).map((id) => this.label(id));
    return Array.from({ length: this.net.sizes[letter] }, (_, i) => String(i));
  }

  /** A weight's rows: those of the head, of the likeliest tokens, or all. */
  weight(name, state) {
    const { weight, axes } = this.trace.get(name);
    const { data, rows, cols } = this.net.tensors.get(`${weight}.weight`);
    const own = Array.from({ length: axes[1] === "H" ? this.net.sizes.d_k : rows }, (_, i) => (axes[1] === "H" ? state.head * this.net.sizes.d_k + i : i));
    return { data, cols, rows: axes.at(-1) === "V" ? this.likeliest(state) : own };
  }

  /** The matrix of a tensor that a state shows: {letters, rows, cols, at(row, col)}. */
  matrix(name, state) {
    if (name.endsWith(".W")) {
      const of = name.slice(0, -2);
      const { data, cols, rows } = this.weight(of, state);
      const out = this.trace.get(of).axes.at(-1);
      const labels = out === "V" ? this.axis("V", state) : rows.map(String);
      return { letters: `${out} × D`, rows: labels, cols: this.axis("D", state).slice(0, cols), at: (row, col) => data[rows[row] * cols + col] };
    }
    const { axes, shape, data } = this.trace.get(name);
    const letters = [axes[0], axes.at(-1)];
    const width = shape.at(-1);
    if (letters[1] === "V") {
      const ids = this.likeliest(state);
      return { letters: "V", rows: this.axis("V", state), cols: [lastPart(name)], at: (row) => data[state.step * width + ids[row]] };
    }
    if (axes.length === 1) return { letters: axes[0], rows: this.axis(axes[0], state), cols: ["id"], at: (row) => data[row] };
    const [rows, cols] = letters.map((letter) => this.axis(letter, state));
    const [H, h] = axes[1] === "H" ? [shape[1], state.head] : [1, 0];
    return { letters: letters.join(" × "), rows, cols, at: (row, col) => data[(row * H + h) * width + col] };
  }

  view([name, python, role], state) {
    const { letters, rows, cols, at } = this.matrix(name, state);
    const data = new Float32Array(rows.length * cols.length);
    for (let i = 0; i < data.length; i++) data[i] = at(Math.floor(i / cols.length), i % cols.length);
    const [title, say] = aboutOf(name);
    const kind = KIND[lastPart(name)] ?? "vector";
    const whole = name.endsWith(".W") ? `${title} of ${aboutOf(name.slice(0, -2))[0]}` : title;
    return { name, title: whole, letters, rows: rows.length, cols: cols.length, rowLabels: rows, colLabels: cols, data, kind, say, python, folded: role === "folded" };
  }

  // --- Stops ---

  stopOf(state) {
    return STOPS.find(({ id }) => id === state.stop) ?? STOPS[0];
  }

  stop(state) {
    this.read(state.sentence);
    const { id, title, say, chapter, tensors } = this.stopOf(state);
    const views = tensors(state.layer, this.layers).map((entry) => this.view(entry, state));
    const found = { id, title, say, views, code: this.code(state), chapter };
    if (id === "choice") found.choice = { piece: this.label(this.target[state.step + 1]), probability: views.at(-1).data[0] };
    return found;
  }

  /** Python that makes this stop's numbers with the chapters' functions, and prints the chosen cell. */
  code(state) {
    this.read(state.sentence);
    const { code, tensors } = this.stopOf(state);
    const source = this.cut ? `torch.tensor([[${this.ids.join(", ")}]])` : `torch.tensor([source_ids(${JSON.stringify(state.sentence)}, trained.tokenizer)])`;
    const lines = code({ ...state, source, written: this.target.slice(0, state.step + 1).join(", ") });
    const shownCell = state.cell && tensors(state.layer, this.layers).find(([name]) => name === state.cell.tensor);
    if (shownCell) lines.push(`print((${shownCell[1]})[${state.cell.row}, ${state.cell.col}].item())  # the chosen number`);
    const used = lines.join("\n");
    const imports = Object.entries(IMPORTS).filter(([name]) => new RegExp(`\\b${name}\\b`).test(used) || name === "torch");
    return [
      ...imports.map(([, line]) => line),
      "from scripts.core.models import DEFAULT_MODEL, load_model",
      "",
      "torch.set_grad_enabled(False)",
      "trained = load_model(DEFAULT_MODEL)",
      "model = trained.model",
      ...lines,
      "",
    ].join("\n");
  }

  // --- Cells ---

  /** Cells of another tensor: rows and columns, first and last, or null for all; where it is shown. */
  area(name, state, rows, cols) {
    if (!this.made.has(name)) return null;
    const { rows: rowLabels, cols: colLabels } = this.matrix(name, state);
    const [last, lastCol] = [rowLabels.length - 1, colLabels.length - 1];
    const place = { rows: rows ?? [0, last], cols: cols ?? [0, lastCol] };
    if (place.rows[0] > last || place.rows[0] < 0) return null; // a later step makes it
    const { id, layer } = this.made.get(name);
    const elsewhere = layer !== state.layer && STOPS.find((stop) => stop.id === id).picks.layer;
    const row = rows && rows[0] === rows[1] && rowLabels.length > 1 ? ` ${this.rowOf(name, rowLabels[rows[0]])}` : "";
    const column = !rows && cols ? this.colOf(name, colLabels[cols[0]]) : "";
    const title = `${this.titleOf(name)}${row}${column}${elsewhere ? `, layer ${layer + 1}` : ""}`;
    const found = { tensor: name, title, stop: id, ...place, cell: { row: place.rows[0], col: place.cols[0] } };
    return elsewhere ? { ...found, layer } : found;
  }

  /** A row in words: of a piece, or by its number. */
  rowOf(name, label) {
    return name.endsWith(".W") && name !== "logits.W" ? `row ${label}` : `of ${quoted(label)}`;
  }

  colOf(name, label) {
    return KIND[lastPart(name)] && !name.endsWith(".W") ? ` at ${quoted(label)}` : `, number ${label}`;
  }

  titleOf(name) {
    if (name.endsWith(".W")) return `learned matrix of ${this.titleOf(name.slice(0, -2))}`;
    return aboutOf(name)[0];
  }

  /** How a cell came about: see the parts of `ways`. */
  inspect(state) {
    this.read(state.sentence);
    const { tensor, row, col } = state.cell;
    const { rows, cols, at } = this.matrix(tensor, state);
    const value = at(row, col);
    const learned = tensor.endsWith(".W");
    const way = learned ? this.learned(tensor, state, row) : this.ways(tensor, state, row, col);
    const name = this.titleOf(tensor).replace(/ies\b/, "y").replace(/s\b/, ""); // of one number
    const where = cols.length === 1 ? "" : this.colOf(tensor, cols[col]);
    return {
      ...{ tensor, row, col, value, title: `${name} ${this.rowOf(tensor, rows[row])}${where}` },
      ...{ lines: way.lines, parts: way.parts, over: way.over ?? 1, atLeast: way.atLeast ?? null },
      madeFrom: way.from.filter(Boolean),
      makes: learned ? way.makes.filter(Boolean) : this.makes(tensor, state, row, col),
    };
  }

  /** A weight: nothing made it but training. */
  learned(name, state, row) {
    const of = name.slice(0, -2);
    const isLogit = this.trace.get(of).axes.at(-1) === "V";
    const line = { say: "Learned in training. Before training it was a random number.", math: "" };
    return { lines: [line], parts: [this.matrix(name, state).at(row, state.cell.col)], from: [], makes: [isLogit ? this.area(of, state, [row, row]) : this.area(of, state, null, [row, row])] };
  }

  /**
   * The arithmetic behind one number: `lines` of words and formulas, the areas it comes `from`, and `parts`, so
   * that the parts' sum, divided by `over` and raised to `atLeast`, is the number.
   */
  ways(name, state, row, col) {
    const { op, from, weight } = this.trace.get(name);
    const value = this.matrix(name, state).at(row, col);
    const { D } = this.net.sizes;
    const [first, second] = from.map((one) => this.matrix(one, state));
    const same = (one) => this.area(one, state, [row, row], [col, col]);
    const wholeRow = (one, at = row) => this.area(one, state, [at, at]);
    if (op === "id") {
      const label = this.matrix(name, state).rows[row];
      const read = row === 0 && name === "target.ids" ? "Every text begins with <s>." : `“${label}” is number ${value} in the list of ${this.net.sizes.V} pieces.`;
      return { lines: [{ say: read, math: "" }], parts: [value], from: [] };
    }
    if (op === "lookup") {
      const stored = value / Math.sqrt(D);
      return {
        lines: [{ say: `Row ${first.at(row, 0)} of the learned table, number ${col}, times √D.`, math: `${shown(stored)} · √${D} = ${shown(value)}` }],
        ...{ parts: [this.net.tensors.get(`${weight}.weight`).data[first.at(row, 0) * D + col] * Math.sqrt(D)], from: [this.area(from[0], state, [row, row])] },
      };
    }
    if (op === "position") {
      const [wave, even] = [Math.floor(col / 2), col % 2 === 0];
      const angle = row / 10000 ** ((2 * wave) / D);
      const part = even ? Math.sin(angle) : Math.cos(angle);
      const power = `${2 * wave}/${D}`;
      return { lines: [{ say: `Place ${row}, counted from 0, on wave ${wave}. Nothing is learned here.`, math: `${even ? "sin" : "cos"}(${row} ÷ 10000^(${power})) = ${shown(value)}` }], parts: [part], from: [] };
    }
    if (op === "add") {
      const parts = [first.at(row, col), second.at(row, col)];
      return { lines: [{ say: "The two numbers at the same place are added.", math: `${shown(parts[0])} + ${factor(parts[1])} = ${shown(value)}` }], parts, from: from.map(same) };
    }
    if (op === "norm") {
      const { data } = this.trace.get(from[0]);
      const { mean, deviation } = spread(data, row * D, D);
      const [scale, shift] = ["weight", "bias"].map((part) => this.net.tensors.get(`${weight}.${part}`).data[col]);
      const x = first.at(row, col);
      const normed = (x - mean) / deviation;
      return {
        lines: [
          { say: `The ${D} numbers of this row have the mean μ and the spread σ.`, math: `μ = ${shown(mean)}, σ = ${shown(deviation)}` },
          { say: "Subtract the mean, divide by the spread.", math: `(${shown(x)} − ${factor(mean)}) ÷ ${shown(deviation)} = ${shown(normed)}` },
          { say: "Then a learned scale and a learned shift.", math: `${shown(normed)} · ${factor(scale)} + ${factor(shift)} = ${shown(value)}` },
        ],
        ...{ parts: [normed * scale, shift], from: [wholeRow(from[0])] },
      };
    }
    if (op === "linear" || op === "relu") {
      const { data: W, cols: width, rows: own } = this.weight(name, state);
      const { axes, data } = this.trace.get(from[0]);
      const isLogit = lastPart(name) === "logits";
      const t = isLogit ? state.step : row;
      const out = isLogit ? own[row] : own[col];
      const terms = Array.from({ length: width }, (_, i) => {
        const [x, w] = [data[t * width + i], W[out * width + i]];
        return { text: `${factor(x)} · ${factor(w)}`, value: x * w };
      });
      const bias = this.net.tensors.get(`${weight}.bias`).data[out];
      const sum = total(terms.map((term) => term.value));
      const heads = axes[1] === "H" ? `, all ${this.heads} heads together,` : "";
      const lines = [
        { say: `This row of “${this.titleOf(from[0])}”${heads} has ${width} numbers. Each is multiplied by a learned number, and all are added up.`, math: sumText(terms, sum) },
        { say: "Then a learned number is added, the bias.", math: `${shown(sum)} + ${factor(bias)} = ${shown(sum + bias)}` },
      ];
      if (op === "relu") lines.push({ say: "What is below 0 becomes 0.", math: `max(0, ${shown(sum + bias)}) = ${shown(value)}` });
      const shownW = this.area(`${name}.W`, state, isLogit ? [row, row] : [col, col]);
      return { lines, parts: [...terms.map((term) => term.value), bias], atLeast: op === "relu" ? 0 : null, from: [wholeRow(from[0], t), shownW] };
    }
    if (op === "dot") {
      const size = this.net.sizes.d_k;
      const terms = Array.from({ length: size }, (_, d) => {
        const [q, k] = [first.at(row, d), second.at(col, d)];
        return { text: `${factor(q)} · ${factor(k)}`, value: q * k };
      });
      const sum = total(terms.map((term) => term.value));
      return {
        lines: [
          { say: `The ${size} numbers of the query of “${first.rows[row]}” times those of the key of “${second.rows[col]}”, added up.`, math: `q · k = ${sumText(terms, sum)}` },
          { say: `Divided by √d_k, so that scores don't grow with the size of the vectors.`, math: `${shown(sum)} ÷ √${size} = ${shown(value)}` },
        ],
        ...{ parts: terms.map((term) => term.value), over: Math.sqrt(size), from: [wholeRow(from[0]), wholeRow(from[1], col)] },
      };
    }
    if (op === "mask") {
      const say = value === -Infinity ? `“${first.cols[col]}” comes later than “${first.rows[row]}”: hidden.` : "Not later: the score stays as it is.";
      return { lines: [{ say, math: value === -Infinity ? "−∞" : `= ${shown(value)}` }], parts: [value], from: [same(from[0])] };
    }
    if (op === "softmax") {
      const isChoice = lastPart(name) === "probabilities";
      const { data, shape } = this.trace.get(from[0]);
      const width = shape.at(-1);
      const scores = isChoice ? data.subarray(state.step * width, (state.step + 1) * width) : first.cols.map((_, i) => first.at(row, i));
      const own = isChoice ? first.at(row, 0) : first.at(row, col);
      const most = scores.reduce((a, b) => Math.max(a, b));
      const powers = Array.from(scores, (score) => Math.exp(score - most));
      const sum = total(powers);
      return {
        lines: [
          { say: `The largest score of the row is ${shown(most)}. It is subtracted first: the shares stay the same, and no power gets too large.`, math: `e^(${shown(own)} − ${factor(most)}) = ${shown(Math.exp(own - most))}` },
          { say: `The same for all ${powers.length} of the row, added up.`, math: sumText(powers.map((power) => ({ text: shown(power), value: power })), sum) },
          { say: "Its part of the whole.", math: `${shown(Math.exp(own - most))} ÷ ${shown(sum)} = ${shown(value)}` },
        ],
        ...{ parts: [Math.exp(own - most)], over: sum, from: [isChoice ? this.area(from[0], state, null) : wholeRow(from[0])] },
      };
    }
    const terms = first.cols.map((label, s) => {
      const [share, given] = [first.at(row, s), second.at(s, col)];
      return { text: `${shown(share)} · ${factor(given)} [${label}]`, value: share * given };
    });
    return {
      lines: [{ say: "Each place's value times its share, added up.", math: sumText(terms, value) }],
      ...{ parts: terms.map((term) => term.value), from: [wholeRow(from[0]), this.area(from[1], state, null, [col, col])] },
    };
  }

  /** Where a number goes: in each tensor made from it, the cells that it has a part in. */
  makes(name, state, row, col) {
    const found = [];
    for (const [next, { op, from, axes }] of this.trace) {
      const place = from.indexOf(name);
      if (place < 0) continue;
      const isVocabulary = axes.at(-1) === "V";
      if (isVocabulary && name === "decoder.norm" && row !== state.step) continue;
      const mine = [row, row];
      if (op === "add" || op === "mask") found.push(this.area(next, state, mine, [col, col]));
      else if (isVocabulary) found.push(this.area(next, state, null));
      else if (op === "dot" && place) found.push(this.area(next, state, null, mine));
      else if (op === "mix" && place) found.push(this.area(next, state, null, [col, col]));
      else found.push(this.area(next, state, mine));
    }
    return found.filter(Boolean);
  }
}
