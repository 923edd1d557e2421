// The stops of the walk: what each shows, and the Python that makes the same numbers with the chapters' functions.

const chapter = (number, title, name, anchor) => ({ number, title, file: `ch${number}_${name}`, anchor });
const attention = (anchor) => chapter("01", "Attention", "attention", anchor);
const heads = (anchor) => chapter("02", "Multi-head attention", "multi_head_attention", anchor);
const model = (anchor) => chapter("04", "Encoder and decoder", "encoder_decoder", anchor);

// Lines of Python that several stops share. `s` is the state, with `source` and `written` as Python has them.
const written = (s) => `tgt = torch.tensor([[${s.written}]])  # (B, T): <s>, and what is written`;
const source = (s) => `src = ${s.source}  # (B, S)`;
const begin = (s) => [source(s), "memory = model.encode(src)  # (B, S, D)", written(s), "causal = subsequent_mask(tgt.size(1))  # (1, T, T)"];
const through = (side, count, call) => (count ? [`for below in model.${side}.layers[:${count}]:`, `    x = ${call}`] : []);
const encoder = (s) => [
  source(s),
  "x = model.src_embed(src)  # (B, S, D)",
  ...through("encoder", s.layer, "below(x)"),
  `layer = model.encoder.layers[${s.layer}]`,
  "attn = layer.self_attn",
  "normed = layer.sublayer[0].norm(x)",
];
const decoder = (s) => [
  ...begin(s),
  "x = model.tgt_embed(tgt)  # (B, T, D)",
  ...through("decoder", s.layer, "below(x, memory, None, causal)"),
  `layer = model.decoder.layers[${s.layer}]`,
];
const lookBack = "x = layer.sublayer[0](x, lambda x: layer.self_attn(x, x, x, causal))";
const lookAcross = "x = layer.sublayer[1](x, lambda x: layer.src_attn(x, memory, memory))";
/** One head's query, key and value, of `T` rows that ask and `S` rows that answer. */
const project = (s, T = "S", S = "S", answers = "normed") => [
  `query = split_heads(attn.project_query(normed), attn.h)[0, ${s.head}]  # (${T}, d_k)`,
  `key = split_heads(attn.project_key(${answers}), attn.h)[0, ${s.head}]  # (${S}, d_k)`,
  `value = split_heads(attn.project_value(${answers}), attn.h)[0, ${s.head}]  # (${S}, d_k)`,
];
const score = (shape) => `scores = query @ key.T / math.sqrt(query.size(-1))  # (${shape})`;
const mix = (mask = "") => `mix, weights = attention(query, key, value${mask})  # of one head`;
const think = (i, T) => [
  `normed = layer.sublayer[${i}].norm(x)`,
  `hidden = layer.feed_forward.expand(normed).relu()  # (B, ${T}, F)`,
  `out = layer.feed_forward.contract(hidden)  # (B, ${T}, D)`,
];
const LAST = ["logits = model.generator(vectors[0, -1])  # (V,)", "likeliest = logits.topk(12).indices"];

const HEAD = { layer: true, head: true };

/**
 * In the order of the walk. A stop shows tensors: those that another stop makes (`given`), those that it makes
 * itself, and those that are shown on demand (`folded`); each with what its Python calls them. Where a layer can be
 * picked, names are those within the layer of its side; `input` is what comes from the layer below. A name that ends
 * in .W is a matrix of weights.
 */
export const STOPS = [
  {
    id: "pieces",
    title: "Pieces and their numbers",
    say: "The text is cut into pieces. Each piece has a number, its id: the model reads nothing else.",
    picks: { step: true },
    chapter: chapter("07", "Multi30k", "multi30k", "subwords"),
    made: { "source.ids": "src.T", "target.ids": "tgt.T" },
    code: (s) => [source(s), written(s)],
  },
  {
    id: "embed",
    title: "Embedding and position",
    say: "Each id picks a row of a learned table. A pattern that depends on the place alone is added.",
    picks: { step: true },
    chapter: chapter("03", "Embeddings and positions", "embeddings_and_positions", "adding-them"),
    made: { "source.embedding": "embed(src)[0]", "source.position": "place.pe[: src.size(1)]", "source.embedded": "x[0]" },
    folded: { "target.embedding": "embed(tgt)[0]", "target.position": "place.pe[: tgt.size(1)]", "target.embedded": "y[0]" },
    code: (s) => [
      source(s),
      written(s),
      "embed, place = model.src_embed  # one table serves both languages",
      "x = place(embed(src))  # (B, S, D)",
      "y = place(embed(tgt))  # (B, T, D)",
    ],
  },
  {
    id: "qkv",
    title: "Query, key and value",
    say: "A head makes three short vectors for each place: a question, a label to be found by, and something to give.",
    side: "encoder",
    picks: HEAD,
    chapter: heads("query-key-and-value-are-roles"),
    given: { input: "x[0]" },
    made: { norm1: "normed[0]", "self.query": "query", "self.key": "key", "self.value": "value" },
    folded: Object.fromEntries(["query", "key", "value"].map((role) => [`self.${role}.W`, `attn.project_${role}.weight[own]`])),
    code: (s) => [...encoder(s), ...project(s), `own = slice(${s.head} * query.size(1), ${s.head + 1} * query.size(1))  # this head's rows`],
  },
  {
    id: "scores",
    title: "Scores",
    say: "Each query meets each key: multiply, add up, divide by √d_k. A high score means: this place has what I ask for.",
    side: "encoder",
    picks: HEAD,
    chapter: attention("why-divide-by-sqrt-d-k"),
    given: { "self.query": "query", "self.key": "key" },
    made: { "self.scores": "scores" },
    code: (s) => [...encoder(s), ...project(s).slice(0, 2), score("S, S")],
  },
  {
    id: "softmax",
    title: "Softmax: scores become shares",
    say: "Softmax turns each row of scores into shares between 0 and 1 that add up to 1.",
    side: "encoder",
    picks: HEAD,
    chapter: attention("all-five-questions-at-once"),
    given: { "self.scores": "scores" },
    made: { "self.weights": "weights" },
    code: (s) => [...encoder(s), ...project(s).slice(0, 2), score("S, S"), "weights = scores.softmax(dim=-1)  # (S, S)"],
  },
  {
    id: "mix",
    title: "Mix the values",
    say: "Each place takes from every place's value as much as its share says.",
    side: "encoder",
    picks: HEAD,
    chapter: attention("all-five-questions-at-once"),
    given: { "self.weights": "weights", "self.value": "value" },
    made: { "self.mix": "mix" },
    code: (s) => [...encoder(s), ...project(s), mix()],
  },
  {
    id: "residual",
    title: "Join the heads, add, norm",
    say: "One matrix joins what the heads found. The result is added to the input, and the sum is brought to one scale.",
    side: "encoder",
    picks: HEAD,
    chapter: model("the-model-on-one-screen"),
    given: { "self.mix": "mix", input: "x[0]" },
    made: { "self.out": "out[0]", residual1: "added[0]", norm2: "after[0]" },
    code: (s) => [
      ...encoder(s),
      ...project(s),
      mix(),
      "out = attn(normed, normed, normed)  # (B, S, D), of all heads",
      "added = x + out",
      "after = layer.sublayer[1].norm(added)",
    ],
  },
  {
    id: "feedforward",
    title: "Feed-forward",
    say: "Each place works alone on what it has: widen to F numbers, drop what is below 0, narrow again, add.",
    side: "encoder",
    picks: { layer: true },
    chapter: model("one-layer-opened"),
    given: { norm2: "normed[0]", residual1: "x[0]" },
    made: { "ff.hidden": "hidden[0]", "ff.out": "out[0]", residual2: "(x + out)[0]" },
    code: (s) => [...encoder(s), "x = x + attn(normed, normed, normed)", ...think(1, "S")],
  },
  {
    id: "causal",
    title: "The decoder looks back",
    say: "The decoder reads what is written so far. A mask hides what comes later: there the score is −∞ and the share is 0.",
    side: "decoder",
    picks: { ...HEAD, step: true },
    chapter: attention("masks-who-may-look-at-whom"),
    given: { input: "x[0]" },
    made: {
      ...{ "self.query": "query", "self.key": "key", "self.masked": "masked", "self.weights": "weights" },
      ...{ "self.mix": "mix", residual1: "(x + out)[0]" },
    },
    folded: { norm1: "normed[0]", "self.value": "value", "self.scores": "scores", "self.out": "out[0]" },
    code: (s) => [
      ...decoder(s),
      "attn = layer.self_attn",
      "normed = layer.sublayer[0].norm(x)",
      ...project(s, "T", "T"),
      score("T, T"),
      "masked = scores.masked_fill(~causal[0], -math.inf)",
      mix(", causal[0]"),
      "out = attn(normed, normed, normed, causal)  # (B, T, D), of all heads",
    ],
  },
  {
    id: "cross",
    title: "The decoder looks at the source",
    say: "Now the written side asks and the German side answers: queries from the decoder, keys and values from the memory. The last row leads to the next token.",
    side: "decoder",
    picks: { ...HEAD, step: true },
    chapter: heads("one-class-three-uses"),
    given: { residual1: "x[0]" },
    made: {
      ...{ memory: "memory[0]", "cross.query": "query", "cross.key": "key", "cross.scores": "scores" },
      ...{ "cross.weights": "weights", "cross.mix": "mix", residual2: "(x + out)[0]" },
    },
    folded: { norm2: "normed[0]", "cross.value": "value", "cross.out": "out[0]" },
    code: (s) => [
      ...decoder(s),
      lookBack,
      "attn = layer.src_attn",
      "normed = layer.sublayer[1].norm(x)",
      ...project(s, "T", "S", "memory"),
      score("T, S"),
      mix(),
      "out = attn(normed, memory, memory)  # (B, T, D), of all heads",
    ],
  },
  {
    id: "decoderff",
    title: "Feed-forward again",
    say: "The same step as in the encoder: each place works alone, and the result is added.",
    side: "decoder",
    picks: { layer: true, step: true },
    chapter: model("one-decoder-layer-opened"),
    given: { residual2: "x[0]" },
    made: { norm3: "normed[0]", "ff.hidden": "hidden[0]", "ff.out": "out[0]", residual3: "(x + out)[0]" },
    code: (s) => [...decoder(s), lookBack, lookAcross, ...think(2, "T")],
  },
  {
    id: "logits",
    title: "A score for every piece",
    say: "The last row, after a norm, meets one learned row for each of the V pieces. Each gets a score, its logit: here are the twelve highest.",
    side: "decoder",
    picks: { step: true },
    chapter: model("the-model-on-one-screen"),
    given: { input: "x[0]" },
    made: { "decoder.norm": "vectors[0]", logits: "logits[likeliest].unsqueeze(1)" },
    folded: { "logits.W": "model.generator.proj.weight[likeliest]" },
    code: (s) => [
      ...begin(s),
      "x = model.tgt_embed(tgt)  # (B, T, D)",
      "for layer in model.decoder.layers:",
      "    x = layer(x, memory, None, causal)",
      "vectors = model.decoder.norm(x)  # (B, T, D)",
      ...LAST,
    ],
  },
  {
    id: "choice",
    title: "Softmax, and the choice",
    say: "Softmax makes probabilities of all V logits. The likeliest piece is written, and the decoder reads on.",
    side: "decoder",
    picks: { step: true },
    chapter: chapter("06", "Training", "training", "greedy-decoding"),
    given: { logits: "logits[likeliest].unsqueeze(1)" },
    made: { probabilities: "probabilities[likeliest].unsqueeze(1)" },
    code: (s) => [
      ...begin(s),
      "vectors = model.decode(memory, None, tgt, causal)  # (B, T, D)",
      ...LAST,
      "probabilities = logits.softmax(dim=-1)  # (V,)",
      "print(trained.tokenizer.processor.id_to_piece(likeliest[0].item()))  # what is written",
    ],
  },
];

/** What a layer begins with: the output of the one below, or the embedded pieces. */
const inputOf = (side, n) => {
  if (n) return `${side}.${n - 1}.residual${side === "encoder" ? 2 : 3}`;
  return side === "encoder" ? "source.embedded" : "target.embedded";
};

/** The tensors that a stop shows for layer n of `layers`: {name, python, role}. */
export function tensorsOfStop({ side, picks, ...stop }, n, layers) {
  const whole = (name) => {
    if (name === "input") return inputOf(side, picks.layer ? n : layers);
    return picks.layer && name !== "memory" ? `${side}.${n}.${name}` : name;
  };
  return ["given", "made", "folded"].flatMap((role) =>
    Object.entries(stop[role] ?? {}).map(([name, python]) => ({ name: whole(name), python, role })),
  );
}

const IMPORTS = [
  ["scripts.ch01_attention", ["attention", "subsequent_mask"]],
  ["scripts.ch02_multi_head_attention", ["split_heads"]],
  ["scripts.ch07_multi30k", ["source_ids"]],
  ["scripts.core.models", ["DEFAULT_MODEL", "load_model"]],
];

/** A whole program: what it imports, the model, the stop's lines, and the `last` ones. */
export function program(lines, last) {
  const body = ["torch.set_grad_enabled(False)", "trained = load_model(DEFAULT_MODEL)", "model = trained.model", ...lines, ...last];
  const used = (name) => body.some((line) => new RegExp(`\\b${name}\\b`).test(line));
  const libraries = ["math", "torch"].filter(used).map((name) => `import ${name}`);
  const series = IMPORTS.map(([module, names]) => [module, names.filter(used)]).filter(([, names]) => names.length);
  const imports = series.map(([module, names]) => `from ${module} import ${names.join(", ")}`);
  return `${[...libraries, "", ...imports, "", ...body].join("\n")}\n`;
}
