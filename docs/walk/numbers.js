// The walk without a page: a sentence's numbers, a stop's, one cell's. It runs where the model is (worker.js,
// node.mjs); what it gives can be sent to the page.

import { largest, limitFor } from "../living/decode.js";
import { unpack } from "../living/model.js";
import { brief, Tokenizer } from "../living/tokenizer.js";
import { quoted, reached, WAYS } from "./cells.js";
import { Net, tensorsOf } from "./forward.js";
import { program, STOPS, tensorsOfStop } from "./stops.js";

const LONGEST = 40; // tokens of a source, with </s>: more would be hard to look at
const LIKELIEST = 12; // tokens of the vocabulary that are shown
const OURS = ["Ein Mann trägt einen Korb.", "Ein Mann trägt einen Hut."]; // chapter 0's sentences

/** [title, a sentence] by the last part of a tensor's name; the parts 1, 2 and 3 of a layer say the same. */
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
  masked: ["masked scores", "The same scores, with −∞ where a place may not look."],
  weights: ["weights", "How much each row looks at each column: shares of 1."],
  mix: ["mix", "What each place gets: the values, mixed by its shares."],
  out: ["output", "What the step adds to its input."],
  residual1: ["sums", "Input plus output: a residual connection."],
  hidden: ["hidden", "F numbers for each place; what was below 0 is 0."],
  memory: ["memory", "What the encoder hands over: one row for each German piece."],
  norm: ["final rows", "The decoder's result, after one more norm. Its last row decides what comes next."],
  logits: ["logits", "A score for each piece, the twelve highest. Each may be any number."],
  probabilities: ["probabilities", "The logits as shares of 1, over all pieces."],
  W: ["learned matrix", "Learned in training, and the same for every sentence. A row makes one column."],
};
const KINDS = { ids: "id", scores: "score", masked: "score", logits: "score", weights: "share", probabilities: "share", W: "weight" };

const isWeight = (name) => name.endsWith(".W");
const lastPart = (name) => name.split(".").at(-1);
const aboutOf = (name) => ABOUT[lastPart(name)] ?? ABOUT[lastPart(name).replace(/\d$/, "1")];
const kindOf = (name) => KINDS[lastPart(name)] ?? "vector";
const titleOf = (name) => (isWeight(name) ? `learned matrix of ${titleOf(name.slice(0, -2))}` : aboutOf(name)[0]);
/** A row, a column in words: of a piece, or by its number. */
const rowInWords = (name, label) => (isWeight(name) && name !== "logits.W" ? `, row ${label}` : ` of ${quoted(label)}`);
const colInWords = (name, label) => (["vector", "weight"].includes(kindOf(name)) ? `, number ${label}` : ` at ${quoted(label)}`);

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
    const { layers, heads, vocab, parameters, examples } = net.config;
    this.about = { layers, heads, vocab, parameters, examples: [...new Set([...OURS, ...examples])] };
    Object.assign(this, { net, tokenizer, layers, home: new Map(), sentence: null });
    for (const stop of STOPS) {
      for (let n = 0; n < layers; n++) {
        for (const { name, role } of tensorsOfStop(stop, n, layers)) {
          const layer = name.startsWith(`${stop.side}.${n}.`) ? n : null; // the memory is every layer's
          if (role !== "given") this.home.set(name, { stop, layer }); // where it is made
        }
      }
    }
  }

  label(id) {
    return this.tokenizer.label(this.tokenizer.pieces[id]);
  }

  /** Translate a sentence, greedily, with every number kept. The same one again costs nothing. */
  read(sentence) {
    const { tokenizer, net } = this;
    const { eos, bos, unk, max_len } = net.config;
    if (this.sentence !== sentence) {
      const split = tokenizer.split(sentence);
      const kept = tokenizer.encode(sentence).slice(0, LONGEST - 1);
      const source = [...kept, eos];
      const { ids, trace } = net.greedy(source, limitFor(source.length, max_len));
      const labels = [...split.slice(0, kept.length).map((piece) => brief(tokenizer.label(piece))), "</s>"];
      const strange = labels.filter((_, i) => source[i] === unk).map((label) => label.replace(/^\+/, ""));
      Object.assign(this, { sentence, source, trace, labels, strange, target: [bos, ...ids], left: split.length - kept.length });
    }
    const written = this.target.slice(1);
    const notes = [
      ...(this.left ? [`The walk takes the first ${LONGEST - 1} pieces of a sentence; this one has ${this.left} more.`] : []),
      ...(this.strange.length ? [`The model has never met ${this.strange.map(quoted).join(", ")}: read as “unknown”.`] : []),
    ];
    return { sentence, srcPieces: this.labels, tgtPieces: written.map((id) => this.label(id)), text: tokenizer.decode(written), note: notes.join(" ") };
  }

  // --- Tensors as matrices ---

  /** The ids of the likeliest tokens at a step. */
  likeliest({ step }) {
    const { V } = this.net.sizes;
    return largest(this.trace.get("logits").data, LIKELIEST, step * V, (step + 1) * V).map(([id]) => id);
  }

  /** What stands along an axis. The decoder has read as many tokens as the step says. */
  labelsOf(axis, state) {
    if (axis === "S") return this.labels;
    if (axis === "T") return this.target.slice(0, state.step + 1).map((id) => this.label(id));
    if (axis === "V") return this.likeliest(state).map((id) => this.label(id));
    return Array.from({ length: this.net.sizes[axis] }, (_, i) => String(i));
  }

  /** What a state shows of a tensor: {title, letters, rows, cols, at(row, col)}; `whole(row, i)` knows no heads. */
  matrix(name, state) {
    const title = titleOf(name);
    if (isWeight(name)) {
      const { axes, weight } = this.trace.get(name.slice(0, -2));
      const { data, cols } = this.net.tensors.get(`${weight}.weight`);
      const own = this.labelsOf(axes.at(-1), state).map((_, i) => this.ownRow(axes, state, i));
      const rows = axes.at(-1) === "V" ? this.labelsOf("V", state) : own.map(String);
      return { title, letters: `${axes.at(-1)} × D`, rows, cols: this.labelsOf("D", state), at: (row, col) => data[own[row] * cols + col] };
    }
    const { axes, shape, data } = this.trace.get(name);
    const [first, last] = [axes[0], axes.at(-1)];
    const rows = this.labelsOf(last === "V" ? "V" : first, state);
    if (axes.length === 1) return { title, letters: first, rows, cols: ["id"], at: (row) => data[row] };
    const heads = axes[1] === "H" ? shape[1] : 1;
    const width = shape.at(-1);
    const whole = (row, i) => data[row * heads * width + i];
    if (last === "V") {
      const ids = this.likeliest(state);
      return { title, letters: "V", rows, cols: [lastPart(name)], at: (row) => whole(state.step, ids[row]), whole, vocabulary: true };
    }
    const start = heads > 1 ? state.head * width : 0;
    return { title, letters: `${first} × ${last}`, rows, cols: this.labelsOf(last, state), at: (row, col) => whole(row, start + col), whole, heads };
  }

  /** The row of a weight that makes column i of a matrix with these axes, or row i of the likeliest tokens. */
  ownRow(axes, state, i) {
    if (axes.at(-1) === "V") return this.likeliest(state)[i];
    return axes[1] === "H" ? state.head * this.net.sizes.d_k + i : i;
  }

  view({ name, python, role }, state) {
    const { title, letters, rows, cols, at, vocabulary } = this.matrix(name, state);
    const data = Float32Array.from({ length: rows.length * cols.length }, (_, i) => at(Math.floor(i / cols.length), i % cols.length));
    const sizes = cols.length > 1 ? `${rows.length} × ${cols.length}` : rows.length;
    const shape = vocabulary ? `${LIKELIEST} of V = ${this.net.sizes.V.toLocaleString("en")}` : `${letters} = ${sizes}`;
    const side = { source: ", German", target: ", English so far" }[name.split(".")[0]] ?? "";
    const words = { title: `${title}${side}`, letters, shape, kind: kindOf(name), say: aboutOf(name)[1], python, folded: role === "folded" };
    return { name, ...words, rows: rows.length, cols: cols.length, rowLabels: rows, colLabels: cols, data };
  }

  // --- Stops ---

  tensors(state) {
    return tensorsOfStop(STOPS.find(({ id }) => id === state.stop), state.layer, this.layers);
  }

  stop(state) {
    this.read(state.sentence);
    const { id, title, say, chapter } = STOPS.find(({ id }) => id === state.stop);
    const views = this.tensors(state).map((entry) => this.view(entry, state));
    return { id, title, say, views, code: this.code(state), chapter };
  }

  /** Python that makes this stop's numbers with the chapters' functions, and prints the chosen cell. */
  code(state) {
    this.read(state.sentence);
    const { code } = STOPS.find(({ id }) => id === state.stop);
    const source = this.left ? `[${this.source.join(", ")}]` : `source_ids(${JSON.stringify(state.sentence)}, trained.tokenizer)`;
    const written = this.target.slice(0, state.step + 1).join(", ");
    const { tensor, row, col } = state.cell ?? {};
    const chosen = this.tensors(state).filter(({ name }) => name === tensor);
    const last = chosen.map(({ python }) => `print(${python}[${row}, ${col}].item())  # the chosen number`);
    return program(code({ ...state, source: `torch.tensor([${source}])`, written }), last);
  }

  // --- Cells ---

  /** Cells of a tensor, rows and columns first and last (null: all), with the stop where they are made. */
  area(name, state, [rows, cols]) {
    const home = this.home.get(name);
    if (!home) return [];
    const matrix = this.matrix(name, state);
    const all = { rows: [0, matrix.rows.length - 1], cols: [0, matrix.cols.length - 1] };
    if (rows && rows[0] > all.rows[1]) return []; // a later step makes it
    const { stop, layer } = home;
    const elsewhere = layer !== null && layer !== state.layer;
    const of = rows && matrix.rows.length > 1 ? rowInWords(name, matrix.rows[rows[0]]) : "";
    const at = !rows && cols ? colInWords(name, matrix.cols[cols[0]]) : "";
    const title = `${matrix.title}${of}${at}${elsewhere ? `, layer ${layer + 1}` : ""}`;
    const place = { rows: rows ?? all.rows, cols: cols ?? all.cols };
    const cell = { row: place.rows[0], col: place.cols[0] };
    return [{ tensor: name, title, stop: stop.id, ...place, cell, ...(elsewhere ? { layer } : {}) }];
  }

  /** How the chosen cell came about, and what it makes. `parts`, `over` and `atLeast` are as in cells.js. */
  inspect(state) {
    this.read(state.sentence);
    const { tensor: name, row, col } = state.cell;
    const { rows, cols, at, title } = this.matrix(name, state);
    const value = at(row, col);
    const { op, from, weight, axes } = isWeight(name) ? { op: "learned", from: [], axes: [] } : this.trace.get(name);
    const vocabulary = axes.at(-1) === "V";
    const known = { name, op, weight, value, row, col, label: rows[row], net: this.net, inputs: from.map((one) => this.matrix(one, state)) };
    Object.assign(known, { t: vocabulary ? state.step : row, shownRow: vocabulary ? row : col });
    known.own = this.ownRow(axes, state, known.shownRow);
    const way = WAYS[op](known);
    const one = title.replace(/ies\b/, "y").replace(/s\b/, ""); // scores: a score
    const sources = op === "linear" || op === "relu" ? [...from, `${name}.W`] : from;
    return {
      ...{ tensor: name, row, col, value, title: `${one}${rowInWords(name, rows[row])}${cols.length > 1 ? colInWords(name, cols[col]) : ""}` },
      ...{ lines: way.lines, parts: way.parts, over: way.over ?? 1, atLeast: way.atLeast ?? null },
      madeFrom: sources.flatMap((source, i) => this.area(source, state, way.from(i))),
      makes: this.makes(name, state),
    };
  }

  /** Where a number goes: in each tensor made from it, the cells that it has a part in. */
  makes(name, state) {
    const { row, col } = state.cell;
    if (isWeight(name)) {
      const of = name.slice(0, -2);
      return this.area(of, state, reached("linear", 1, row, col, of === "logits"));
    }
    return [...this.trace].flatMap(([next, { op, from, axes }]) => {
      const vocabulary = axes.at(-1) === "V";
      const unused = name === "decoder.norm" && row !== state.step; // only the last row is asked for the next token
      if (!from.includes(name) || unused) return [];
      return this.area(next, state, reached(op, from.indexOf(name), row, col, vocabulary));
    });
  }
}

