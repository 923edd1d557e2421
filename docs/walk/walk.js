// The walk: what is shown is a function of the state, and the state is the page's address.

import { at, giveUp, keep, listen, mark, refill, say } from "../living/common.js";
import { attentionTable, element, isolated, percent } from "../living/draw.js";
import { Heat, pixelsOf } from "./heat.js";
import { drawPlan } from "./plan.js";
import { shown } from "./cells.js";
import { STOPS } from "./stops.js";
import { TOUR } from "./tour.js";

const page = { about: null, words: null, stop: null, heats: [], turn: 0, shown: "", tour: null };
const narrow = matchMedia("(max-width: 72rem)"); // as in style.css: one column
let state = null;

// --- The worker ---

const worker = new Worker("worker.js", { type: "module" });
const waiting = new Map();
let asked = 0;

/** What worker.js answers to a call. */
function ask(call, ...args) {
  return new Promise((done, fail) => {
    waiting.set(++asked, [done, fail]);
    worker.postMessage({ id: asked, call, args });
  });
}

worker.addEventListener("message", ({ data }) => {
  if ("heard" in data) {
    page.heard = (page.heard ?? 0) + data.heard;
    say(`Loading the model, ${(page.heard / 1e6).toFixed(0)} MB …`);
    return;
  }
  const [done, fail] = waiting.get(data.id);
  waiting.delete(data.id);
  if ("error" in data) fail(new Error(data.error));
  else done(data.value);
});
worker.addEventListener("error", (event) => giveUp(event.message ?? "the worker didn't start"));

// --- The state, and the address ---

/** The address of a state; numbers in it count from 1, as on the page. */
export function address({ sentence, step, stop, layer, head, cell, tour }) {
  const parts = new URLSearchParams({ sentence, token: step + 1, stop, layer: layer + 1, head: head + 1 });
  if (cell) parts.set("cell", `${cell.tensor},${cell.row + 1},${cell.col + 1}`);
  if (tour) parts.set("tour", tour);
  return `#${parts}`;
}

/** The state that an address names; what it leaves out, or gets wrong, is as at the beginning. */
export function stateOf(hash, sentence) {
  const parts = new URLSearchParams(hash.slice(1));
  const number = (name) => Math.max(1, Math.floor(Number(parts.get(name))) || 1);
  const cell = /^(.+),([1-9]\d*),([1-9]\d*)$/.exec(parts.get("cell") ?? "");
  return {
    sentence: parts.get("sentence")?.trim() || sentence,
    step: number("token") - 1,
    stop: STOPS.some(({ id }) => id === parts.get("stop")) ? parts.get("stop") : STOPS[0].id,
    layer: number("layer") - 1,
    head: number("head") - 1,
    cell: cell && { tensor: cell[1], row: cell[2] - 1, col: cell[3] - 1 },
    tour: TOUR[parts.get("tour") - 1] ? number("tour") : null,
  };
}

/** Take the state of an address; the cell that it names will be brought into view. */
function arriveAt(named) {
  state = named;
  page.bring = Boolean(named.cell) && !(named.tour && narrow.matches);
}

/** Change the state; `quiet` leaves no step behind for the browser's Back. */
function go(changes, quiet = false) {
  const elsewhere = ["sentence", "step", "stop", "layer", "head"].some((name) => name in changes);
  state = { ...state, ...(elsewhere ? { cell: null } : {}), ...changes };
  history[quiet ? "replaceState" : "pushState"](null, "", address(state));
  return render().catch(giveUp);
}

/** The tour's stop `number`, from 1; null ends the tour. The focus stays on what can be seen and pressed. */
async function visit(number) {
  if (narrow.matches) at("tour").scrollIntoView({ block: "nearest" });
  else page.bring = true;
  await go(number ? { ...TOUR[number - 1].state, tour: number } : { tour: null });
  if (!number) at("title").focus({ preventScroll: true });
  else if (!at("tour").contains(document.activeElement) || number === 1) at("tour-next").focus();
}

// --- Showing ---

async function render() {
  const turn = ++page.turn;
  const stale = () => turn !== page.turn;
  mark("busy");
  const words = page.words?.sentence === state.sentence ? page.words : await ask("read", state.sentence);
  if (stale()) return;
  page.words = words;
  const within = (number, size) => Math.min(number, size - 1);
  const { layers, heads } = page.about;
  const { layer, head, step } = state;
  Object.assign(state, { layer: within(layer, layers), head: within(head, heads), step: within(step, words.tgtPieces.length) });
  const { sentence, stop } = state;
  const key = JSON.stringify([sentence, stop, state.layer, state.head, state.step]);
  if (page.shown !== key) {
    const found = await ask("stop", state);
    if (stale()) return;
    page.stop = found;
    page.shown = key;
    showStop();
    arrive();
  }
  state.cell = known(state.cell) ?? strongest(page.stop.views);
  const cell = await ask("inspect", state);
  if (stale()) return;
  showWords();
  showPlan();
  showCell(cell);
  showTour();
  mark("ready");
  await showHeads(stale);
}

/** In the picker of heads, each with its weights as a small picture, if the stop shows weights. */
async function showHeads(stale) {
  const heads = [...at("pickers").querySelectorAll("[name=head]")];
  const [first] = heads;
  if (!first || first.parentElement.querySelector("canvas")) return;
  const weights = page.stop.views.find(({ name }) => name.endsWith(".weights"));
  if (!weights) return;
  const views = await ask("heads", state, weights.name);
  if (!stale()) heads.forEach((input, i) => input.after(pixelsOf(views[i]).pixels));
}

/** A new stop is seen from its beginning. */
function arrive() {
  const { top } = at("stage").getBoundingClientRect();
  if (top < 0 || (page.toTitle && top > innerHeight / 2)) at("stage").scrollIntoView();
  if (page.toTitle) at("title").focus({ preventScroll: true });
  page.toTitle = false;
}

/** The cell, if the stop shows it. */
function known(cell) {
  const view = page.stop.views.find(({ name }) => name === cell?.tensor);
  return view && cell.row < view.rows && cell.col < view.cols ? cell : null;
}

/** The cell to begin with: the largest of the last matrix; in the decoder, of the shares' last row, if there are any. */
function strongest(views) {
  const plain = views.filter(({ folded }) => !folded);
  const shares = page.stop.id in { causal: 1, cross: 1 } && plain.find(({ kind }) => kind === "share");
  const { name, data, cols, letters } = shares || plain.at(-1);
  let best = letters.startsWith("T") ? data.length - cols : 0;
  for (let i = best; i < data.length; i++) {
    if (Number.isFinite(data[i]) && Math.abs(data[i]) > Math.abs(data[best])) best = i;
  }
  return { tensor: name, row: Math.floor(best / cols), col: best % cols };
}

/** The sentence, and the tokens that were written. */
function showWords() {
  const { sentence, tgtPieces, note } = page.words;
  if (document.activeElement !== at("text")) at("text").value = sentence;
  const items = tgtPieces.map((label, step) => {
    const item = element("span", { role: "option", "aria-selected": String(step === state.step), text: label });
    item.tabIndex = step === state.step ? 0 : -1;
    return item;
  });
  refill(at("tokens"), items);
  at("note").textContent = note ?? "";
  at("note").hidden = !note;
}

function showPlan() {
  const number = STOPS.findIndex(({ id }) => id === state.stop);
  const to = (i) => address({ ...state, stop: STOPS[i].id, cell: null, tour: null });
  for (const link of at("plan").querySelectorAll("a")) {
    const i = STOPS.findIndex(({ id }) => id === link.dataset.stop);
    link.setAttribute("href", to(i));
    if (i === number) link.setAttribute("aria-current", "step");
    else link.removeAttribute("aria-current");
  }
  at("plan").querySelector("summary").textContent = `Map: stop ${number + 1} of ${STOPS.length}`;
  at("plan").querySelector(".written").textContent = `“${isolated(page.words.tgtPieces[state.step])}”`;
  for (const [id, i, before, after] of [["previous", number - 1, "← ", ""], ["next", (number + 1) % STOPS.length, "", " →"]]) {
    at(id).hidden = !STOPS[i];
    if (!STOPS[i]) continue;
    at(id).href = to(i);
    at(id).textContent = `${before}${i + 1} · ${STOPS[i].title}${after}`;
  }
}

/** The stop's text, matrices, code and chapter. */
function showStop() {
  const { id, title, say: about, views, chapter } = page.stop;
  const number = STOPS.findIndex((stop) => stop.id === id);
  at("title").textContent = `${number + 1} · ${title}`;
  at("about").textContent = about;
  document.title = `${title} · See it think`;
  const picks = STOPS[number].picks ?? {};
  const { layers, heads } = page.about;
  at("pickers").replaceChildren(...[["layer", layers], ["head", heads]].filter(([name]) => picks[name]).map(picker));
  page.heats = views.map((view, i) => new Heat(view, i, (row, col) => choose({ tensor: view.name, row, col })));
  at("views").replaceChildren(...page.heats.map(({ figure }) => figure));
  const anchor = chapter.anchor ? `#${chapter.anchor}` : "";
  const link = element("a", { href: `../notebooks/${chapter.file}.html${anchor}`, text: `Chapter ${Number(chapter.number)}` });
  at("chapter").replaceChildren(link, ` builds this${chapter.title ? `: ${chapter.title}` : ""}.`);
}

/** One of `count` layers or heads to choose: radio buttons. */
function picker([name, count]) {
  const choices = Array.from({ length: count }, (_, i) => {
    const input = element("input", { type: "radio", name, value: i });
    input.checked = i === state[name];
    input.addEventListener("change", () => go({ [name]: i }, true));
    return element("label", {}, input, element("span", { text: i + 1 }));
  });
  return element("fieldset", { class: "pick" }, element("legend", { text: name === "layer" ? "Layer" : "Head" }), ...choices);
}

/** A cell was pressed: frame it at once; its formula follows. */
function choose(cell) {
  at("cell").open = true;
  page.heats.forEach((heat) => heat.view.name === cell.tensor && heat.mark([cell.row, cell.col], []));
  go({ cell }, true);
}

/** The chosen cell: its formula, what made it, what it makes. */
function showCell(cell) {
  const areas = [...cell.madeFrom.map((one) => ({ ...one, made: true })), ...cell.makes.map((one) => ({ ...one, made: false }))];
  for (const heat of page.heats) {
    const own = heat.view.name === cell.tensor;
    heat.mark(own ? [cell.row, cell.col] : null, areas.filter(({ tensor }) => tensor === heat.view.name));
    if (own && page.bring) heat.figure.scrollIntoView({ block: "nearest" });
  }
  page.bring = false;
  at("cell-title").textContent = `${cell.title} = ${shown(cell.value)}`;
  const line = ({ say, math }) => [element("p", { text: say }), ...(math ? [element("p", { class: "math", text: math })] : [])];
  at("moves").parentElement.scrollTop = 0;
  at("cell-lines").replaceChildren(...cell.lines.flatMap(line));
  const links = [[true, "Made from"], [false, "It makes"]].map(([made, words]) => {
    const some = areas.filter((one) => one.made === made);
    const label = element("span", { class: made ? "solid" : "dashed", text: words });
    return some.length ? element("p", { class: "links" }, label, ...some.map(areaLink)) : "";
  });
  at("cell-links").replaceChildren(...links);
  showTable();
  showCode().catch(giveUp);
}

/** A button that goes to the numbers of an area: on this stage, or at the stop that makes them. */
function areaLink({ tensor, title, stop, layer, cell }) {
  const here = page.stop.views.some(({ name }) => name === tensor);
  const number = STOPS.findIndex(({ id }) => id === stop) + 1;
  const button = element("button", { type: "button", text: here ? title : `${title} (stop ${number})` });
  const place = here ? {} : { stop, layer: layer ?? state.layer };
  button.addEventListener("click", () => {
    page.bring = true;
    go({ ...place, cell: { tensor, ...cell } });
  });
  return button;
}

/** The matrix of the chosen cell as a table, if that is open. */
function showTable() {
  const box = at("table").querySelector(".scroll");
  const view = page.stop.views.find(({ name }) => name === state.cell?.tensor);
  if (!at("table").open || !view) return box.replaceChildren();
  const { data, rows, cols, rowLabels, colLabels, title, letters, kind } = view;
  const numbers = Array.from({ length: rows }, (_, row) => data.slice(row * cols, (row + 1) * cols));
  box.replaceChildren(attentionTable(numbers, rowLabels, colLabels, `${title}, ${letters}`, null, "", kind === "id" ? 0 : 3));
}

/** Python that makes the stop's numbers and prints the chosen one, if that is open. */
async function showCode() {
  if (at("code").open) at("code").querySelector("pre").textContent = await ask("code", state);
  at("code").querySelector("button").textContent = "Copy";
}

/** The tour's text; its buttons press cells. */
function showTour() {
  const stop = TOUR[state.tour - 1];
  at("tour").hidden = !stop;
  at("ask").hidden = Boolean(stop); // the tour has a sentence of its own
  at("ways").hidden = Boolean(stop);
  if (!stop) return;
  at("tour-place").textContent = `Tour, ${state.tour} of ${TOUR.length}`;
  at("tour-title").textContent = stop.title;
  const viewOf = (name) => page.stop.views.find((view) => view.name.endsWith(name));
  const numberAt = (name, row, col) => viewOf(name).data[row * viewOf(name).cols + col];
  const labelAt = (name, row) => viewOf(name).rowLabels[row];
  const press = (text, name, row, col) => {
    const view = viewOf(name);
    const button = element("button", { type: "button", class: "press", text: `${text} ${shown(numberAt(name, row, col))}` });
    button.addEventListener("click", () => {
      page.bring = true;
      choose({ tensor: view.name, row, col });
    });
    return button;
  };
  const goes = (text, changes) => {
    const button = element("button", { type: "button", text });
    button.addEventListener("click", () => go(changes));
    return button;
  };
  const parts = stop.text({ words: page.words, labelAt, numberAt, press, go: goes, percent, shown });
  at("tour-text").replaceChildren(...parts.map((part) => element("p", {}, ...part)));
  at("tour-back").disabled = state.tour === 1;
  at("tour-leave").hidden = state.tour === TOUR.length;
  at("tour-next").textContent = state.tour === TOUR.length ? "End of the tour" : "Next";
}

// --- What the reader does ---

function setUp() {
  drawPlan(at("plan"));
  if (narrow.matches) at("plan").open = at("cell").open = false;
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const sentence = at("text").value.trim();
    if (sentence) go({ sentence, step: 0, tour: null });
  });
  at("examples").addEventListener("click", (event) => {
    if (!event.target.matches("button")) return;
    at("text").value = event.target.textContent;
    at("ask").requestSubmit();
  });
  listen(at("tokens"), (step) => go({ step }, true));
  at("tour-back").addEventListener("click", () => visit(state.tour - 1));
  at("tour-next").addEventListener("click", () => visit(state.tour < TOUR.length ? state.tour + 1 : null));
  at("tour-leave").addEventListener("click", () => visit(null));
  at("tour-start").addEventListener("click", () => visit(1));
  at("moves").addEventListener("click", ({ target }) => {
    const [rows, cols] = target.dataset.by?.split(" ").map(Number) ?? [];
    const { tensor, row, col } = state.cell;
    const cell = { tensor, row: row + rows, col: col + cols };
    if (cell.row >= 0 && cell.col >= 0 && known(cell)) choose(cell);
  });
  at("table").addEventListener("toggle", showTable);
  at("code").addEventListener("toggle", () => showCode().catch(giveUp));
  for (const id of ["previous", "next"]) at(id).addEventListener("click", () => (page.toTitle = true));
  at("plan").addEventListener("click", ({ target }) => (page.toTitle = narrow.matches && Boolean(target.closest("a"))));
  const copy = at("code").querySelector("button");
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(at("code").querySelector("pre").textContent);
    copy.textContent = "Copied";
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    page.shown = ""; // all pictures anew
    render().catch(giveUp);
  });
  addEventListener("hashchange", () => {
    arriveAt(stateOf(location.hash, state.sentence));
    render().catch(giveUp);
  });
}

async function start() {
  mark("loading");
  say("Loading the model …");
  try {
    page.about = await ask("open");
  } catch (error) {
    giveUp(error);
    return;
  }
  const { examples, parameters, layers, heads, vocab } = page.about;
  at("examples").replaceChildren(...examples.slice(0, 4).map((text) => element("button", { type: "button", lang: "de", text })));
  at("facts").textContent = `It has ${(parameters / 1e6).toFixed(1)} million parameters: ${layers} + ${layers} layers, ${heads} heads, ${vocab.toLocaleString("en")} tokens.`;
  at("progress").hidden = true;
  say("");
  setUp();
  arriveAt(stateOf(location.hash, examples[0]));
  if (location.hash.length < 2) Object.assign(state, TOUR[0].state, { tour: 1 }); // the first visit
  await go({}, true);
  await keep();
}

start();
