// A matrix as a picture whose cells can be pressed, or walked with the arrow keys.

import { element } from "../living/draw.js";
import { shown } from "./cells.js";

const HEIGHT = 26; // of a row, pixels
const BAR = 260; // width of a column of shares, drawn as bars

const rgb = (hex) => {
  const digits = hex.trim().slice(1);
  const long = digits.length === 3 ? [...digits].map((one) => one + one).join("") : digits;
  return [0, 2, 4].map((i) => parseInt(long.slice(i, i + 2), 16));
};

/** How bright a colour looks, 0 to 1 (WCAG's relative luminance). */
function luminance(colour) {
  const [r, g, b] = colour.map((part) => (part / 255 <= 0.04045 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** The page's colours, by day or by night. */
function colours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ink", "soft", "paper", "panel", "accent", "warm", "makes"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`)]));
}

/** A matrix as a picture of one pixel a cell, and its colours, four bytes a cell; numbers beyond `top` are as strong as it. */
export function pixelsOf({ data, rows, cols, kind }, top = 1) {
  const { panel, accent, warm } = colours();
  const [ground, plus, minus] = [panel, accent, warm].map(rgb);
  const image = new ImageData(cols, rows);
  data.forEach((number, i) => {
    const strength = kind === "id" || number === -Infinity ? 0 : Math.min(1, Math.abs(number) / top);
    const to = number < 0 ? minus : plus;
    for (let part = 0; part < 3; part++) image.data[4 * i + part] = ground[part] + strength * (to[part] - ground[part]);
    image.data[4 * i + 3] = 255;
  });
  const pixels = element("canvas", { width: cols, height: rows, "aria-hidden": "true" });
  pixels.getContext("2d").putImageData(image, 0, 0);
  return { pixels, paints: image.data };
}

export class Heat {
  /** `view` as stops.js gives it; whoever presses a cell has `choose(row, column)` called. */
  constructor(view, number, choose) {
    Object.assign(this, { view, choose, place: [0, 0], chosen: false, areas: [] });
    const { name, title, shape, rows, cols, say, kind, folded } = view;
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.spoken = element("div", { role: "gridcell", id: `spoken-${number}`, "aria-selected": "true" });
    this.line = element("div", { role: "row", class: "unseen" }, this.spoken);
    const label = `${title}, ${rows} rows, ${cols} columns. Arrow keys move from cell to cell.`;
    this.grid = element(
      "div",
      {
        ...{ class: "grid", role: "grid", tabindex: 0, "aria-label": label, "aria-rowcount": rows },
        ...{ "aria-colcount": cols, "aria-activedescendant": `spoken-${number}` },
      },
      this.canvas,
      this.line,
    );
    this.under = element("output", { class: "under small", "aria-hidden": "true" });
    const size = element("span", { class: "shape", text: ` ${shape}` });
    const heading = [element("b", { text: title }), size];
    const body = [element("p", { class: "small", text: say }), this.grid, kind === "id" ? "" : this.legend()];
    this.figure = element("figure", { class: "heat" }, element("figcaption", {}, ...(folded ? [] : heading), this.under));
    if (folded) this.figure.append(element("details", {}, element("summary", {}, ...heading), ...body));
    else this.figure.append(...body);
    this.fold = this.figure.querySelector("details");
    this.fold?.addEventListener("toggle", () => this.draw());
    this.figure.dataset.tensor = name;
    this.listen();
    this.measure();
    this.speak();
  }

  /** The number that has the strongest colour: few numbers beyond it don't make all others pale. */
  get limit() {
    if (this.view.kind === "share") return 1;
    const sizes = Float32Array.from(this.view.data, Math.abs).filter(Number.isFinite).sort();
    return sizes[Math.floor((sizes.length - 1) * (sizes.length > 100 ? 0.99 : 1))] || 1;
  }

  legend() {
    this.top = this.limit;
    const share = this.view.kind === "share";
    const text = (number) => element("span", { text: String(Number(number.toPrecision(2))).replace("-", "−") });
    const stripe = element("i", { class: share ? "share" : "" });
    return element("p", { class: "legend small", "aria-hidden": "true" }, text(share ? 0 : -this.top), stripe, text(this.top));
  }

  /** How large everything is. */
  measure() {
    const { cols, rows, rowLabels, colLabels, kind } = this.view;
    const pen = this.canvas.getContext("2d");
    this.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    pen.font = this.font;
    const wide = (labels) => Math.max(0, ...labels.map((label) => pen.measureText(label).width));
    const numbers = Array.from(this.view.data.slice(0, 400), (number) => this.short(number));
    this.bars = cols === 1 && kind === "share";
    this.cell = this.bars ? BAR : cols <= 16 ? Math.max(38, Math.ceil(wide(numbers)) + 8) : cols <= 64 ? 16 : 2;
    this.numbers = cols <= 16;
    this.left = Math.ceil(wide(rowLabels)) + 10;
    this.slanted = this.cell >= 16 && colLabels.some((label) => !/^\d*$/.test(label));
    const slant = this.slanted ? wide(colLabels) * Math.SQRT1_2 : 0;
    this.head = cols === 1 ? 3 : Math.ceil(slant) + 18;
    this.width = this.left + cols * this.cell + Math.ceil(slant) + 4;
    this.height = this.head + rows * HEIGHT + 3;
  }

  short(number) {
    const whole = this.view.kind === "id" || number === -Infinity;
    return whole ? shown(number) : number.toFixed(2).replace("-", "−");
  }

  /** The picture, anew. Call it once the figure is in the page, and when the colours change. */
  draw() {
    if (this.fold && !this.fold.open) return; // when it is opened
    const { canvas, view, cell, left, head, width, height } = this;
    const zoom = window.devicePixelRatio || 1;
    [canvas.width, canvas.height] = [Math.ceil(width * zoom), Math.ceil(height * zoom)];
    [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
    const pen = canvas.getContext("2d");
    pen.scale(zoom, zoom);
    const colour = colours();
    pen.font = this.font;
    pen.textBaseline = "middle";
    this.labels(pen, colour);
    const { pixels, paints } = pixelsOf(view, this.bars ? Infinity : this.top);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(pixels, left, head, view.cols * cell, view.rows * HEIGHT);
    pen.fillStyle = colour.paper;
    for (let row = 1; row <= view.rows; row++) pen.fillRect(left, head + row * HEIGHT - 1, view.cols * cell, 1);
    for (let col = 1; cell > 6 && col <= view.cols; col++) pen.fillRect(left + col * cell - 1, head, 1, view.rows * HEIGHT);
    for (let i = 0; this.numbers && i < view.data.length; i++) {
      const [x, y] = [left + (i % view.cols) * cell, head + Math.floor(i / view.cols) * HEIGHT];
      const number = view.data[i];
      const long = number * (cell - 60);
      if (this.bars) {
        pen.fillStyle = colour.accent;
        pen.fillRect(x, y + 3, Math.max(1, long), HEIGHT - 7);
      }
      pen.textAlign = this.bars ? "left" : "center";
      pen.fillStyle = this.bars ? colour.ink : luminance(paints.slice(4 * i, 4 * i + 3)) > 0.18 ? "#000" : "#fff";
      pen.fillText(this.bars ? `${(100 * number).toFixed(1)} %` : this.short(number), this.bars ? x + long + 6 : x + cell / 2, y + HEIGHT / 2);
    }
    for (const { rows, cols, made } of this.areas) this.frame(pen, rows, cols, made ? colour.ink : colour.makes, made ? [] : [5, 3], 2);
    if (this.chosen) this.frame(pen, [this.place[0], this.place[0]], [this.place[1], this.place[1]], colour.ink, [], 3);
  }

  frame(pen, rows, cols, stroke, dash, thick) {
    pen.strokeStyle = stroke;
    pen.lineWidth = thick;
    pen.setLineDash(dash);
    const [x, y] = [this.left + cols[0] * this.cell, this.head + rows[0] * HEIGHT];
    pen.strokeRect(x - 1, y - 1, (cols[1] - cols[0] + 1) * this.cell + 1, (rows[1] - rows[0] + 1) * HEIGHT + 1);
    pen.setLineDash([]);
  }

  labels(pen, colour) {
    const { view, cell, left, head } = this;
    const { cols } = view;
    view.rowLabels.forEach((label, row) => {
      const here = this.chosen && row === this.place[0];
      pen.fillStyle = here ? colour.ink : colour.soft;
      pen.textAlign = "right";
      pen.fillText(label, left - 6, head + (row + 0.5) * HEIGHT);
    });
    const every = cell >= 20 || this.slanted ? 1 : cols <= 64 ? 4 : 32;
    view.colLabels.forEach((label, col) => {
      if (col % every || view.cols === 1) return;
      pen.fillStyle = this.chosen && col === this.place[1] ? colour.ink : colour.soft;
      pen.save();
      pen.translate(left + (col + 0.5) * cell, head - 9);
      if (this.slanted) pen.rotate(-Math.PI / 4);
      pen.textAlign = this.slanted ? "left" : "center";
      pen.fillText(label, 0, 0);
      pen.restore();
    });
  }

  /** Frame a cell (null: none) and areas: { rows, cols, made } each. */
  mark(place, areas) {
    this.chosen = Boolean(place);
    if (place && this.fold) this.fold.open = true;
    if (place) this.place = place;
    this.areas = areas;
    this.speak();
    this.draw();
    if (!place) return;
    const x = this.left + place[1] * this.cell;
    const { scrollLeft, clientWidth } = this.grid;
    if (x < scrollLeft + 20 || x + this.cell > scrollLeft + clientWidth) this.grid.scrollLeft = x - clientWidth / 2;
  }

  words([row, col]) {
    const { view } = this;
    const value = shown(view.data[row * view.cols + col]);
    const column = view.cols === 1 ? "" : `, ${this.slanted ? view.colLabels[col] : `column ${view.colLabels[col]}`}`;
    return `${view.rowLabels[row]}${column}: ${value}`;
  }

  /** What a screen reader finds at the place of the focus. */
  speak() {
    this.line.setAttribute("aria-rowindex", this.place[0] + 1);
    this.spoken.setAttribute("aria-colindex", this.place[1] + 1);
    this.spoken.textContent = this.words(this.place);
  }

  listen() {
    const { view, canvas, grid } = this;
    const under = (event) => {
      const { left, top } = canvas.getBoundingClientRect();
      const row = Math.floor((event.clientY - top - this.head) / HEIGHT);
      const col = Math.floor((event.clientX - left - this.left) / this.cell);
      return row >= 0 && row < view.rows && col >= 0 && col < view.cols ? [row, col] : null;
    };
    canvas.addEventListener("click", (event) => {
      const place = under(event);
      if (place) this.choose(...place);
    });
    canvas.addEventListener("pointermove", (event) => {
      const place = under(event);
      this.under.textContent = place ? this.words(place) : "";
    });
    canvas.addEventListener("pointerleave", () => (this.under.textContent = ""));
    grid.addEventListener("keydown", (event) => {
      if (event.altKey || event.metaKey) return; // the browser's own keys
      const [row, col] = this.place;
      const moves = { ArrowUp: [row - 1, col], ArrowDown: [row + 1, col], ArrowLeft: [row, col - 1], ArrowRight: [row, col + 1] };
      Object.assign(moves, { Home: [row, 0], End: [row, view.cols - 1], Enter: [row, col], " ": [row, col] });
      Object.assign(moves, { PageUp: [row, col - 32], PageDown: [row, col + 32] });
      const place = moves[event.key];
      if (!place) return;
      event.preventDefault();
      const within = (at, size) => Math.min(size - 1, Math.max(0, at));
      this.choose(within(place[0], view.rows), within(place[1], view.cols));
    });
  }
}
