// Pictures of a translation: bars of candidates, the attention map, the map as a table.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; `text` sets its text. */
export function element(name, { text, ...attributes } = {}, ...children) {
  return fill(document.createElement(name), text, attributes, children);
}

/** The same for SVG. */
export function shape(name, { text, ...attributes } = {}, ...children) {
  return fill(document.createElementNS(SVG, name), text, attributes, children);
}

function fill(node, text, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  if (text !== undefined) node.textContent = text;
  node.append(...children);
  return node;
}

/** A label within a line of text: its direction, left or right, changes nothing around it. */
export const isolated = (label) => `\u2068${label}\u2069`;

/** 0.8312 as "83.1 %". */
export function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

/** Items of a list: each candidate with its share, and what is left for all others. */
export function candidateBars(choice, labelOf) {
  const rows = choice.candidates.map(({ token, logProb }) => ({
    label: labelOf(token),
    share: Math.exp(logProb),
    kind: token === choice.token ? "chosen" : "",
  }));
  if (!choice.candidates.some(({ token }) => token === choice.token)) {
    rows.push({ label: labelOf(choice.token), share: Math.exp(choice.logProb), kind: "chosen" });
  }
  const rest = 1 - rows.reduce((sum, { share }) => sum + share, 0);
  rows.push({ label: "all others", share: Math.max(0, rest), kind: "rest" });
  return rows.map(({ label, share, kind }) => {
    const bar = element("span", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${100 * share}%`;
    const said = kind === "chosen" ? element("span", { class: "unseen", text: " (chosen)" }) : "";
    const piece = element("span", { class: `piece ${kind}`, title: label, text: label }, said);
    const number = element("span", { class: "share", text: percent(share) });
    return element("li", { class: kind }, piece, element("span", {}, bar), number);
  });
}

/** The class of letters on a ground as strong as `share`, by which style.css keeps them legible. */
export function inkOn(share) {
  return share > 0.92 ? "strong full" : share > 0.62 ? "strong" : "";
}

const CELL = 30; // pixels
const FEW = 2500; // cells that get a number and a tooltip each

/** How wide the widest of the labels is, in pixels; the chosen row is bold. */
function wide(labels) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `bold 13px ${getComputedStyle(document.body).fontFamily}`; // as in style.css
  return Math.max(...labels.map((label) => pen.measureText(label).width), 30);
}

/**
 * The map of `weights`, a row of shares for each of `rows`, over `columns`; `chosen` is the row in focus.
 * A row that is clicked is told to `choose`.
 */
export function attentionMap(weights, rows, columns, chosen, choose) {
  const left = wide(rows) + 12;
  const slant = wide(columns) * Math.SQRT1_2;
  const top = slant + 16;
  const [width, height] = [columns.length * CELL, rows.length * CELL];
  const detailed = rows.length * columns.length <= FEW;
  const svg = shape("svg", {
    width: left + width + slant + 4,
    height: top + height + 2,
    role: "img",
    "aria-label": describe(weights, rows, columns),
  });
  svg.append(shape("rect", { class: "ground", x: left, y: top, width, height }));
  columns.forEach((label, s) => {
    const [x, y] = [left + (s + 0.6) * CELL, top - 6];
    svg.append(shape("text", { x, y, transform: `rotate(-45 ${x} ${y})`, text: isolated(label) }));
  });
  rows.forEach((label, t) => {
    const y = top + t * CELL;
    const name = t === chosen ? "row chosen" : "row";
    svg.append(shape("text", { class: name, x: left - 8, y: y + CELL / 2 + 4.5, text: isolated(label) }));
    weights[t].forEach((share, s) => {
      if (share < 0.005) return;
      const x = left + s * CELL;
      const cell = shape("rect", {
        class: "cell",
        x: x + 0.5,
        y: y + 0.5,
        width: CELL - 1,
        height: CELL - 1,
        "fill-opacity": share.toFixed(3),
      });
      svg.append(cell);
      if (detailed && share >= 0.095) {
        const name = `number ${inkOn(share)}`;
        const number = Math.min(share, 0.99).toFixed(share >= 0.95 ? 2 : 1).slice(1);
        svg.append(shape("text", { class: name, x: x + CELL / 2, y: y + CELL / 2 + 4, text: number }));
      }
    });
    const hit = shape("rect", { class: "hit", x: 0, y, width: left + width, height: CELL });
    if (detailed) hit.append(shape("title", { text: `${isolated(label)}: ${sharesInWords(weights[t], columns)}` }));
    hit.addEventListener("click", () => choose(t));
    svg.append(hit);
  });
  if (chosen >= 0 && chosen < rows.length) {
    const frame = { class: "frame", x: left, y: top + chosen * CELL, width, height: CELL };
    svg.append(shape("rect", frame));
  }
  return svg;
}

/** Where a row of weights lies, the three largest shares: "Hund 83.1 %, Ein 10.2 %, . 2.0 %". */
export function sharesInWords(shares, columns) {
  return Array.from(shares, (share, s) => [share, columns[s]])
    .sort((a, b) => b[0] - a[0])
    .slice(0, 3)
    .map(([share, label]) => `${isolated(label)} ${percent(share)}`)
    .join(", ");
}

/** The whole map in a sentence: what each row looks at most. */
function describe(weights, rows, columns) {
  const most = rows.map((label, t) => {
    const shares = Array.from(weights[t]);
    return `${isolated(label)} at ${isolated(columns[shares.indexOf(Math.max(...shares))])}`;
  });
  return `Attention map, ${rows.length} rows. Most attention: ${most.slice(0, 40).join("; ")}.`;
}

/** The same numbers as a table: `numbers`, a row for each of `rows`; `corner` says what the rows are. */
export function attentionTable(numbers, rows, columns, caption, lang, corner = "written", digits = 2) {
  const head = element("tr", {}, element("th", { scope: "col", text: corner }));
  head.append(...columns.map((text) => element("th", { scope: "col", lang, text })));
  const body = rows.map((label, t) => {
    const cells = Array.from(numbers[t], (number) => element("td", { text: number.toFixed(digits) }));
    return element("tr", {}, element("th", { scope: "row", text: label }), ...cells);
  });
  return element(
    "table",
    {},
    element("caption", { text: caption }),
    element("thead", {}, head),
    element("tbody", {}, ...body),
  );
}
