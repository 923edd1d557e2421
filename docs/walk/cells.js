// The arithmetic behind one number: for each operation of forward.js, in words and in this number's own figures.

import { isolated } from "../living/draw.js";
import { spread } from "./forward.js";

const TERMS = 4; // terms of a sum that are written out
const POWERS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** A number as the page shows it: 0.377, −12.500, 4.1·10⁻⁵, −∞. */
export function shown(x) {
  const size = Math.abs(x);
  if (size === Infinity) return "−∞";
  if (Number.isInteger(x)) return String(x).replace("-", "−");
  const [digits, power] = x.toExponential(1).split("e");
  const small = () => `${digits}·10${power < 0 ? "⁻" : ""}${[...power.slice(1)].map((digit) => POWERS[digit]).join("")}`;
  return (size >= 100 ? x.toFixed(1) : size >= 0.001 ? x.toFixed(3) : small()).replace("-", "−");
}
const counted = (n) => n.toLocaleString("en");
export const quoted = (piece) => `“${isolated(piece)}”`;
const factor = (x) => (x < 0 ? `(${shown(x)})` : shown(x));
const total = (numbers) => numbers.reduce((a, b) => a + b, 0);

/** "a + b + … (29 more: c) = sum": the largest first. `terms` are {text, value}. */
function sumText(terms, sum) {
  const order = [...terms].sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const few = order.slice(0, terms.length > TERMS + 1 ? TERMS : terms.length);
  const rest = order.slice(few.length).map(({ value }) => value);
  const more = rest.length ? ` + … (${counted(rest.length)} more: ${shown(total(rest))})` : "";
  return `${few.map(({ text }) => text).join(" + ")}${more} = ${shown(sum)}`;
}
const product = (a, b, name = "") => ({ text: `${factor(a)} · ${factor(b)}${name}`, value: a * b });
const values = (terms) => terms.map(({ value }) => value);

/**
 * By operation: a function of what is known about the number to {lines, parts, over, atLeast, from}. `lines` are
 * {say, math}. `from` says which cells of each tensor it was made from: a function of the tensor's number to
 * [rows, columns], each [first, last] or null for all. The sum of `parts`, divided by `over` (1) and raised to
 * `atLeast`, is the number.
 *
 * Known: `value`, its `row` and `col`, `t` its row in the whole tensor, `inputs` (matrices with rows, cols and at),
 * the `net`, the `weight` that was used and `own`, the row of that weight.
 */
export const WAYS = {
  id: ({ value, row, label, name, net }) => {
    let say = `${quoted(label)} is number ${value} in the list of ${counted(net.sizes.V)} pieces.`;
    if (name === "target.ids" && row === 0) say = `Every text begins with ${label}, number ${value} in the list.`;
    if (value === net.config.unk) say = `The list of ${counted(net.sizes.V)} pieces doesn't have ${quoted(label)}. Number ${value} stands for all that is unknown.`;
    return { lines: [{ say, math: "" }], parts: [value] };
  },
  lookup: ({ value, row, col, inputs: [ids], net, weight }) => {
    const { D } = net.sizes;
    const stored = net.tensors.get(`${weight}.weight`).data[ids.at(row, 0) * D + col];
    const say = `Row ${ids.at(row, 0)} of the learned table has ${D} numbers. This is number ${col}, times √D.`;
    return { lines: [{ say, math: `${shown(stored)} · √${D} = ${shown(value)}` }], parts: [stored * Math.sqrt(D)], from: () => [[row, row], null] };
  },
  position: ({ value, row, col, net }) => {
    const wave = Math.floor(col / 2);
    const [name, wavy] = col % 2 ? ["cos", Math.cos] : ["sin", Math.sin];
    const say = `Place ${row}, counted from 0, on wave ${wave}. Nothing is learned here.`;
    const math = `${name}(${row} ÷ 10000^(${2 * wave}/${net.sizes.D})) = ${shown(value)}`;
    return { lines: [{ say, math }], parts: [wavy(row / 10000 ** ((2 * wave) / net.sizes.D))] };
  },
  add: ({ value, row, col, inputs }) => {
    const parts = inputs.map((input) => input.at(row, col));
    const [one, other] = inputs.map(({ title }) => `“${title}”`);
    const math = `${shown(parts[0])} + ${factor(parts[1])} = ${shown(value)}`;
    return { lines: [{ say: `The number of ${one} and the number of ${other} at the same place are added.`, math }], parts, from: () => [[row, row], [col, col]] };
  },
  norm: ({ value, row, col, inputs: [x], net, weight }) => {
    const { D } = net.sizes;
    const { mean, deviation } = spread(Array.from({ length: D }, (_, d) => x.at(row, d)), 0, D);
    const [scale, shift] = ["weight", "bias"].map((part) => net.tensors.get(`${weight}.${part}`).data[col]);
    const normed = (x.at(row, col) - mean) / deviation;
    const lines = [
      { say: `The ${D} numbers of this row have the mean μ and the spread σ.`, math: `μ = ${shown(mean)}, σ = ${shown(deviation)}` },
      { say: "Subtract the mean, divide by the spread.", math: `(${shown(x.at(row, col))} − ${factor(mean)}) ÷ ${shown(deviation)} = ${shown(normed)}` },
      { say: "Then a learned scale and a learned shift.", math: `${shown(normed)} · ${factor(scale)} + ${factor(shift)} = ${shown(value)}` },
    ];
    return { lines, parts: [normed * scale, shift], from: () => [[row, row], null] };
  },
  linear: ({ value, t, own, shownRow, inputs: [x], net, weight, op }) => {
    const { data, cols } = net.tensors.get(`${weight}.weight`);
    const terms = Array.from({ length: cols }, (_, i) => product(x.whole(t, i), data[own * cols + i], ` [${i}]`));
    const bias = net.tensors.get(`${weight}.bias`).data[own];
    const sum = total(values(terms));
    const together = x.heads > 1 ? `, all ${x.heads} heads together,` : "";
    const lines = [
      { say: `This row of “${x.title}”${together} has ${cols} numbers. Each is multiplied by a learned number, and all are added up. The largest come first; [ ] says which.`, math: sumText(terms, sum) },
      { say: "Then a learned number is added, the bias.", math: `${shown(sum)} + ${factor(bias)} = ${shown(sum + bias)}` },
    ];
    if (op === "relu") lines.push({ say: "What is below 0 becomes 0.", math: `max(0, ${shown(sum + bias)}) = ${shown(value)}` });
    return { lines, parts: [...values(terms), bias], atLeast: op === "relu" ? 0 : null, from: (i) => [i ? [shownRow, shownRow] : [t, t], null] };
  },
  dot: ({ value, row, col, inputs: [query, key], net }) => {
    const { d_k } = net.sizes;
    const terms = Array.from({ length: d_k }, (_, d) => product(query.at(row, d), key.at(col, d), ` [${d}]`));
    const sum = total(values(terms));
    const lines = [
      { say: `The query of ${quoted(query.rows[row])} and the key of ${quoted(key.rows[col])} have ${d_k} numbers each. They are multiplied one by one, and added up. The largest products come first; [ ] says which of the ${d_k}.`, math: `q · k = ${sumText(terms, sum)}` },
      { say: `Divided by √d_k. Longer vectors make larger sums, and with large scores softmax would give nearly all to one piece.`, math: `${shown(sum)} ÷ √${d_k} = ${shown(value)}` },
    ];
    return { lines, parts: values(terms), over: Math.sqrt(d_k), from: (i) => [i ? [col, col] : [row, row], null] };
  },
  mask: ({ value, row, col, inputs: [scores] }) => {
    const hidden = value === -Infinity;
    const [asks, asked] = [quoted(scores.rows[row]), quoted(scores.cols[col])];
    const say = hidden ? `${asked} comes later than ${asks}: hidden.` : "Not later: the score stays as it is.";
    return { lines: [{ say, math: hidden ? "−∞" : `= ${shown(value)}` }], parts: [value], from: () => [[row, row], [col, col]] };
  },
  softmax: ({ value, row, col, t, inputs: [x], net }) => {
    const scores = x.vocabulary ? Array.from({ length: net.sizes.V }, (_, i) => x.whole(t, i)) : x.cols.map((_, s) => x.at(row, s));
    const most = scores.reduce((a, b) => Math.max(a, b));
    const powers = scores.map((score) => Math.exp(score - most));
    const [sum, own] = [total(powers), x.at(row, col)];
    const lines = [
      { say: `The largest score of the row is ${shown(most)}. It is subtracted first: the shares stay the same, and no power gets too large.`, math: `e^(${shown(own)} − ${factor(most)}) = ${shown(Math.exp(own - most))}` },
      { say: `The same for all ${counted(powers.length)} of the row, added up.`, math: sumText(powers.map((power) => ({ text: shown(power), value: power })), sum) },
      { say: "Its part of the whole.", math: `${shown(Math.exp(own - most))} ÷ ${shown(sum)} = ${shown(value)}` },
    ];
    return { lines, parts: [Math.exp(own - most)], over: sum, from: () => [x.vocabulary ? null : [row, row], null] };
  },
  mix: ({ value, row, col, inputs: [shares, given] }) => {
    const terms = shares.cols.map((label, s) => product(shares.at(row, s), given.at(s, col), ` [${label}]`));
    const line = { say: "The value of each place is multiplied by its share, and all are added up.", math: sumText(terms, value) };
    return { lines: [line], parts: values(terms), from: (i) => (i ? [null, [col, col]] : [[row, row], null]) };
  },
  learned: ({ value }) => ({ lines: [{ say: "Learned in training. Before that it was a random number.", math: "" }], parts: [value] }),
};
WAYS.relu = WAYS.linear;

/** The cells of a tensor made by `op` in which a cell of its input number `i` has a part: [rows, columns]. */
export function reached(op, i, row, col, vocabulary) {
  if (op === "add" || op === "mask") return [[row, row], [col, col]];
  if (vocabulary) return [i ? [row, row] : null, null];
  if (i === 0) return [[row, row], null];
  if (op === "mix") return [null, [col, col]]; // a value
  return [null, [row, row]]; // a key, or a row of weights
}
