// The page: loads the model, asks it, and shows what it says while it says it.

import { at, bytesOf, giveUp, keep, listen, mark, refill, say } from "./common.js";
import { beamSearch, greedy, limitFor, score } from "./decode.js";
import { attentionMap, attentionTable, candidateBars, element, inkOn, isolated, sharesInWords } from "./draw.js";
import { attentionOf, Model } from "./model.js";
import { brief, Tokenizer } from "./tokenizer.js";

const wait = (ms) => new Promise((done) => setTimeout(done, ms));

/** What the page knows. `shown` is the text in view, `focus` the token of it that is looked at. */
const page = {
  model: null,
  tokenizer: null,
  asked: 0, // how many translations were asked for
  done: 0, // how many have ended
  running: null, // the translation in progress: { stopped, stop, stopping }
  limit: 0, // tokens after which a text is cut
  sentence: "", // what is translated
  source: [], // labels of its tokens
  texts: [], // all that can be chosen from, the best first
  shown: null,
  focus: 0,
  alpha: 0,
};

class Stopped extends Error {}

// --- Loading ---

const parsed = (bytes) => JSON.parse(new TextDecoder().decode(bytes));

/** Everything that translates: the runtime, the model, the tokenizer. */
async function load() {
  const runtime = import("./ort/ort.wasm.bundle.min.mjs");
  const config = parsed(await bytesOf("model.json", () => {}));
  introduce(config);
  const total = Object.values(config.files).reduce((sum, size) => sum + size, 0);
  say(`Loading the model, ${(total / 1e6).toFixed(0)} MB …`); // once: a screen reader says all of it
  let heard = 0;
  const listen = (size) => (at("progress").value = (heard += size) / total);
  const names = Object.keys(config.files);
  const found = await Promise.all(names.map((name) => bytesOf(name, listen)));
  const files = Object.fromEntries(names.map((name, i) => [name, found[i]]));

  const ort = await runtime;
  ort.env.wasm.numThreads = 1; // more would need headers that a plain static server doesn't send
  ort.env.wasm.wasmBinary = files["ort/ort-wasm-simd-threaded.wasm"];
  say("Preparing the model …");
  page.tokenizer = new Tokenizer(parsed(files["tokenizer.json"]));
  page.model = await Model.load(ort, config, files);
  ort.env.wasm.wasmBinary = undefined;
}

/** A language by its code, such as "de"; what is no code ("Ido", "Tlon") is a name already. */
function languageOf(text) {
  const names = new Intl.DisplayNames("en", { type: "language", fallback: "none" });
  const name = /^[a-z]{2,3}$/.test(text) && names.of(text);
  return { name: name || text, code: name ? text : "und" };
}

/** Name the model's languages wherever the page speaks of them, and show its examples. */
function introduce({ languages, examples: [first, ...others] }) {
  const [source, target] = languages.map(languageOf);
  const named = { source, target, both: { name: `${source.name} to ${target.name}` } };
  for (const node of document.querySelectorAll("[data-name]")) node.textContent = named[node.dataset.name].name;
  for (const node of document.querySelectorAll("[data-lang]")) node.lang = named[node.dataset.lang].code;
  document.title = `${named.both.name} · From Attention to Translation`;
  at("text").value ||= first ?? ""; // a browser may bring back what was there before
  at("try").hidden = !others.length;
  const button = (text) => element("button", { type: "button", lang: source.code, dir: "auto", text });
  at("examples").replaceChildren(...others.map(button));
}

// --- Translating ---

/** Ask the model for what stands in the field. A translation in progress is stopped first. */
async function translate() {
  const turn = ++page.asked;
  page.running?.stop();
  while (page.running) await wait(5);
  if (turn !== page.asked) return; // another one was asked for meanwhile
  const run = { stopped: false };
  run.stopping = new Promise((done) => (run.stop = () => done((run.stopped = true))));
  page.running = run;
  mark("busy");
  at("stop").disabled = false;
  at("translation").setAttribute("aria-busy", "true"); // a screen reader hears the whole, not each token
  try {
    await search(at("text").value, run);
  } catch (error) {
    if (!(error instanceof Stopped)) throw error;
    say("Stopped.");
    show(page.shown, page.focus); // with the whole map
  } finally {
    at("translation").classList.remove("unfinished");
    at("translation").removeAttribute("aria-busy");
    if (document.activeElement === at("stop")) at("go").focus(); // a disabled button loses it
    at("stop").disabled = true;
    page.running = null;
    mark("ready");
    document.documentElement.dataset.done = page.done += 1;
  }
}

async function search(source, run) {
  const { model, tokenizer } = page;
  const { special } = tokenizer;
  const width = chosenWidth();
  const alpha = Number(at("alpha").value);
  const split = tokenizer.split(source);
  const ids = tokenizer.encode(source).slice(0, model.config.max_len - 1);
  tellOf(split, ids);
  Object.assign(page, { texts: [], shown: null, focus: 0, alpha, sentence: source });
  page.source = [...split.slice(0, ids.length).map((piece) => brief(tokenizer.label(piece))), "</s>"];
  at("beams").hidden = width === 1 || !ids.length;
  if (!ids.length) {
    say("Nothing to translate.");
    show(null);
    return;
  }
  const started = performance.now();
  let waited = 0; // milliseconds that the model stood still
  let drawn = { at: 0, took: 0 };
  const watch = async (state) => {
    const begin = performance.now();
    const pace = Number(at("pace").value);
    // Drawing must not cost more than the model does: after a long one, some steps go unseen.
    if (!pace && begin - drawn.at < drawn.took) return;
    page.texts = [...state.unfinished, ...state.finished];
    const best = state.unfinished[0] ?? state.finished[0];
    show(best, best.ids.length - 1, true);
    await Promise.race([wait(pace), run.stopping]); // the browser draws, and hears the reader
    drawn = { at: performance.now(), took: performance.now() - begin - pace };
    waited += drawn.at - begin;
    if (run.stopped) throw new Stopped();
  };
  const decoding = await model.read([...ids, special.eos]);
  page.limit = limitFor(ids.length + 1, model.config.max_len);
  const found =
    width === 1
      ? await greedy(decoding, special, page.limit, watch)
      : await beamSearch(decoding, special, page.limit, width, alpha, watch);
  const seconds = (performance.now() - started - waited) / 1000;
  page.texts = found;
  at("translation").removeAttribute("aria-busy"); // from now on a screen reader may speak
  show(found[0], 0);
  const count = found[0].ids.length;
  const cut = finished(found[0]) ? "" : " It found no end, and was stopped there.";
  say(`${count} tokens; the model needed ${Number(seconds.toPrecision(2))} seconds.${cut}`);
}

/** 1 for greedy decoding, else the beam's width. */
function chosenWidth() {
  if (at("ask").elements.search.value !== "beam") return 1;
  const field = at("beam");
  const width = Math.round(Number(field.value));
  return Math.min(Number(field.max), Math.max(Number(field.min), width || 4));
}

/** Say what of the text the model can't take. */
function tellOf(split, ids) {
  const notes = [];
  const { tokenizer, model } = page;
  const strange = split.filter((piece) => !tokenizer.ids.has(piece));
  if (strange.length) {
    const which = [...new Set(strange)].slice(0, 5).map((piece) => `“${isolated(brief(piece))}”`).join(", ");
    notes.push(`The model has never met ${which}: read as “unknown”.`);
  }
  if (split.length > ids.length) {
    notes.push(`The text has ${split.length} tokens; the first ${ids.length} are translated (the model takes ${model.config.max_len} with </s>).`);
  }
  at("note").textContent = notes.join(" ");
  at("note").hidden = !notes.length;
}

// --- Showing ---

const labelOf = (id) => page.tokenizer.label(page.tokenizer.pieces[id]);
const finished = (text) => text.ids.at(-1) === page.tokenizer.special.eos;

/** Show a text with one of its tokens in focus; `unfinished` while it is still being written. */
function show(text, focus = 0, unfinished = false) {
  page.shown = text;
  page.focus = Math.max(0, focus);
  const empty = unfinished ? "…" : "—";
  at("translation").textContent = (text && page.tokenizer.decode(text.ids)) || empty;
  at("translation").classList.toggle("unfinished", unfinished);
  showTexts();
  showTokens();
  showStep();
  showMap();
}

/** The texts of a beam with their scores. */
function showTexts() {
  if (at("beams").hidden) return;
  const items = page.texts.map((text) => {
    const ended = finished(text) || text.ids.length === page.limit;
    const words = page.tokenizer.decode(text.ids) || "…";
    const value = ended ? score(text, page.alpha).toFixed(3) : text.logProb.toFixed(2);
    const item = element(
      "li",
      { role: "option", class: ended ? null : "unfinished", "aria-selected": String(text === page.shown) },
      element("span", { class: "score", text: value }),
      element("span", { dir: "auto", text: ended ? words : `${words} …` }),
    );
    item.tabIndex = text === page.shown ? 0 : -1;
    return item;
  });
  refill(at("texts"), items);
}

function showTokens() {
  const items = (page.shown?.ids ?? []).map((id, i) => {
    const chosen = i === page.focus;
    const item = element("span", { role: "option", "aria-selected": String(chosen), text: labelOf(id) });
    item.tabIndex = chosen ? 0 : -1;
    return item;
  });
  refill(at("tokens"), items);
}

/** The candidates of the token in focus, and where the decoder looked. */
function showStep() {
  const choice = page.shown?.choices[page.focus];
  at("candidates").replaceChildren(...(choice ? candidateBars(choice, labelOf) : []));
  const shares = choice && attentionOf(choice.weights, page.model.config, ...picked());
  const items = page.source.map((label, s) => {
    const share = shares ? shares[s] : 0;
    const back = element("i", { "aria-hidden": "true" });
    back.style.opacity = share;
    return element("span", { class: inkOn(share), text: label }, back);
  });
  at("source").replaceChildren(...items);
  const most = shares ? `While it chose “${isolated(labelOf(choice.token))}”: ${sharesInWords(shares, page.source)} (${pickedInWords()}).` : "";
  at("looked").textContent = most;
  const walk = at("walk"); // a page that stands alone has none
  if (!walk) return;
  at("deeper").hidden = !choice || !at("beams").hidden; // the walk decodes greedily
  walk.hash = new URLSearchParams({ sentence: page.sentence, token: page.focus + 1, stop: "choice" });
}

/** The layer and the head that the pickers name, from 0; null for the mean. */
function picked() {
  return ["layer", "head"].map((id) => (at(id).value === "mean" ? null : Number(at(id).value)));
}

function pickedInWords() {
  const [layer, head] = picked();
  const where = layer === null ? "mean of all layers" : `layer ${layer + 1}`;
  return `${where}, ${head === null ? "mean of its heads" : `head ${head + 1}`}`;
}

function showMap() {
  const choices = page.shown?.choices ?? [];
  if (!choices.length) {
    at("map").replaceChildren();
    at("table").replaceChildren();
    return;
  }
  const writing = at("translation").classList.contains("unfinished");
  if (writing && choices.length > 40) return; // large: drawn at the end
  const weights = choices.map((choice) => attentionOf(choice.weights, page.model.config, ...picked()));
  const rows = choices.map(({ token }) => labelOf(token));
  at("map").replaceChildren(attentionMap(weights, rows, page.source, page.focus, focusOn));
  const caption = `Shares of attention: ${pickedInWords()}. Rows: tokens written; columns: the source's.`;
  const open = at("table").parentElement.open;
  at("table").replaceChildren(...(open ? [attentionTable(weights, rows, page.source, caption, at("source").lang)] : []));
}

function focusOn(i) {
  page.focus = i;
  showTokens();
  showStep();
  showMap();
}

// --- What the reader does ---

function chooseText(i) {
  if (!page.running) show(page.texts[i], 0);
}

/** The pickers for the layers and heads that the model has. */
function fillPickers({ layers, heads, look }) {
  const options = (count) => [
    new Option("mean", "mean"),
    ...Array.from({ length: count }, (_, i) => new Option(String(i + 1), String(i))),
  ];
  at("layer").append(...options(layers));
  at("head").append(...options(heads));
  [at("layer").value, at("head").value] = look;
  for (const id of ["layer", "head"]) {
    at(id).addEventListener("change", () => {
      showStep();
      showMap();
    });
  }
}

function setUp(ready) {
  const ask = () => ready.then(translate).catch(giveUp);
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  at("text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!event.repeat) at("ask").requestSubmit();
  });
  at("examples").addEventListener("click", (event) => {
    if (!event.target.matches("button")) return;
    at("text").value = event.target.textContent;
    ask();
  });
  const enable = () => {
    for (const id of ["beam", "alpha"]) at(id).disabled = at("ask").elements.search.value !== "beam";
  };
  at("ask").addEventListener("change", enable);
  enable(); // a browser may bring back what was chosen before
  at("stop").addEventListener("click", () => page.running?.stop());
  listen(at("tokens"), focusOn);
  listen(at("texts"), chooseText);
  at("table").parentElement.addEventListener("toggle", showMap);
}

async function start() {
  mark("loading");
  const ready = load();
  setUp(ready);
  try {
    await ready;
  } catch (error) {
    giveUp(error);
    return;
  }
  const { config } = page.model;
  fillPickers(config);
  at("alpha").value = config.alpha; // the length penalty that suits this model
  at("progress").hidden = true;
  const count = config.parameters.toLocaleString("en", { notation: "compact", compactDisplay: "long" }); // 7.6 million
  at("facts").textContent = `It has ${count} parameters: ${config.layers} + ${config.layers} layers, ${config.heads} heads, ${config.vocab.toLocaleString("en")} tokens.`;
  say("Ready.");
  mark("ready");
  if (at("text").value && !page.running && !page.shown) await translate().catch(giveUp);
  await keep();
}

if (typeof WebAssembly === "object") start();
