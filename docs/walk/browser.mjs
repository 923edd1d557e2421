// Walks through the page in headless Chromium as a reader would; for the tests.
//
//     node browser.mjs < request.json
//
// The request: {chromium, url, calls: [[name, ...arguments]], sentence, pictures: folder or null}. The answer, on
// standard output: what the worker says to the calls (as node.mjs packs it), what a reader saw, how long it took, each
// complaint of the browser, what axe-core finds, and what the page says if it can't work.

import { join } from "node:path";

import { launch, reader, request as readRequest, serious } from "../browser/reader.mjs";
import { STOPS } from "./stops.js";

const request = readRequest();
const browser = await launch(request.chromium);
const answer = { complaints: [], axe: {}, trouble: {}, wider: [], times: {} };
const home = new URL("..", request.url).href; // the model lies beside the walk
const visitor = (options) => reader(browser, home, answer.complaints, options);
const ready = (page) =>
  page.waitForFunction(() => ["ready", "broken"].includes(document.documentElement.dataset.state), null, { timeout: 60000 });
const shot = async (page, name) => {
  if (request.pictures) await page.screenshot({ path: join(request.pictures, `${name}.png`) });
};
const text = (page, selector) => page.locator(selector).innerText();

/** What the page shows, in words: its place, the stop, the number and its formula, the matrices. */
const seen = (page) =>
  page.evaluate(() => ({
    tour: document.querySelector("#tour:not([hidden]) #tour-title")?.textContent ?? null,
    address: location.hash,
    title: document.getElementById("title").textContent,
    text: document.querySelector("#tour:not([hidden]) #tour-text")?.textContent ?? null,
    cell: document.getElementById("cell-title").textContent,
    lines: document.getElementById("cell-lines").textContent,
    current: document.querySelector("#plan [aria-current]").textContent,
    drawn: [...document.querySelectorAll(".heat canvas")].map((one) => one.toDataURL().length),
  }));

/** Press Tab until the element with this id has the focus; how often. */
async function tabTo(page, id, key = "Tab") {
  for (let presses = 0; presses < 100; presses++) {
    if ((await page.evaluate(() => document.activeElement.id)) === id) return presses;
    await page.keyboard.press(key);
  }
  throw new Error(`Tab doesn't lead to ${id}`);
}

/** Do what changes the page, and wait for what it shows then. */
async function then(page, act) {
  await page.evaluate(() => (document.documentElement.dataset.state = "asked"));
  await act();
  await ready(page);
}

// The first visit: the tour, there and back, by keyboard alone.
const desk = await visitor({ viewport: { width: 1280, height: 900 } });
const page = await desk.newPage();
const started = Date.now();
await page.goto(request.url);
await ready(page);
answer.times.first = Date.now() - started;
answer.tour = [await seen(page)];
await shot(page, "tour-1");
answer.tabs = await tabTo(page, "tour-next");
const length = Number((await text(page, "#tour-place")).split(" ").at(-1));
for (let i = 2; i <= length; i++) {
  await then(page, () => page.keyboard.press("Enter"));
  answer.tour.push(await seen(page));
  await shot(page, `tour-${i}`);
}
answer.axe.tour = await serious(page);
await tabTo(page, "tour-back", "Shift+Tab");
answer.back = [await seen(page)];
for (let i = 2; i <= length; i++) {
  await then(page, () => page.keyboard.press("Enter"));
  answer.back.unshift(await seen(page));
}
answer.focusBack = await page.evaluate(() => document.activeElement.id); // Back is off there
await tabTo(page, "tour-leave");
await then(page, () => page.keyboard.press("Enter"));
answer.left = await seen(page);
answer.focus = await page.evaluate(() => document.activeElement.id);

// Every stop, by the map's links: how long each takes, and what it shows.
answer.stops = [];
for (const { id } of STOPS) {
  await page.evaluate(() => (document.documentElement.dataset.state = "asked"));
  const took = await page.evaluate(async (id) => {
    const since = performance.now();
    document.querySelector(`#plan a[data-stop=${id}]`).dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true }));
    while (document.documentElement.dataset.state !== "ready") await new Promise((done) => setTimeout(done, 1));
    return performance.now() - since;
  }, id);
  answer.stops.push({ id, took, ...(await seen(page)) });
  await shot(page, `stop-${id}`);
  if (["pieces", "scores", "feedforward", "causal"].includes(id)) answer.axe[id] = await serious(page);
}

// A cell by the arrow keys, from there to what made it, and its code.
await then(page, () => page.evaluate(() => (location.hash = "#stop=scores&layer=1&head=7&token=4")));
const cells = () => text(page, "#cell-title");
answer.cells = [await cells()];
await page.locator(".grid").last().focus();
for (const key of ["ArrowUp", "ArrowLeft", "Home"]) {
  await then(page, () => page.keyboard.press(key));
  answer.cells.push(await cells());
}
answer.spoken = await page.locator(".heat:last-of-type [role=gridcell]").innerText();
await page.click("#code summary");
await page.waitForFunction(() => document.querySelector("#code pre").textContent);
answer.code = await text(page, "#code pre");
await page.click("#table summary");
await page.waitForSelector("#table tbody td"); // the rows are drawn after the click
answer.table = await page.locator("#table tbody tr:first-child td").allInnerTexts();
await then(page, () => page.locator("#cell-links button").last().click());
answer.followed = await seen(page);
await then(page, () => page.goBack());
answer.returned = await seen(page);

// From the probability back to what made it, again and again: where that ends.
await then(page, () => page.evaluate(() => (location.hash = "#stop=choice&token=4")));
answer.way = [await cells()];
const made = page.locator("#cell-links p:has(.solid) button");
while ((await made.count()) && answer.way.length < 60) {
  await then(page, () => made.first().click());
  answer.way.push(await cells());
}

// A sentence of one's own; its tokens by the arrow keys.
await page.fill("#text", request.sentence);
await then(page, () => page.press("#text", "Enter"));
answer.tokens = await page.locator("#tokens [role=option]").allInnerTexts();
await page.locator("#tokens [aria-selected=true]").focus();
await then(page, () => page.keyboard.press("ArrowRight"));
answer.chosen = await page.locator("#tokens :focus").innerText();
await shot(page, "own");

// The worker's numbers, as a test asks for them.
answer.calls = await page.evaluate(async (calls) => {
  const worker = new Worker("worker.js", { type: "module" });
  const call = ([call, ...args]) =>
    new Promise((done, fail) => {
      worker.onmessage = ({ data }) => "heard" in data || ("error" in data ? fail(new Error(data.error)) : done(data.value));
      worker.postMessage({ id: 1, call, args });
    });
  const packed = (key, value) => {
    if (!(value instanceof Float32Array)) return value === -Infinity ? "-inf" : value;
    const bytes = new Uint8Array(value.buffer, value.byteOffset, value.byteLength);
    let letters = "";
    for (const byte of bytes) letters += String.fromCharCode(byte);
    return btoa(letters);
  };
  const values = [];
  for (const one of [["open"], ...calls]) values.push(await call(one));
  worker.terminate();
  return JSON.parse(JSON.stringify(values.slice(1), packed));
}, request.calls);

// Without a network, after it has been loaded once.
await page.waitForFunction(() => document.getElementById("offline").textContent, null, { timeout: 60000 });
await desk.setOffline(true);
const alone = await desk.newPage();
await alone.goto(`${request.url}${answer.returned.address}`);
await ready(alone);
answer.offline = await seen(alone);
await desk.close();

// On a phone, at night.
const phone = await visitor({ viewport: { width: 390, height: 844 }, deviceScaleFactor: 2, colorScheme: "dark", hasTouch: true });
const small = await phone.newPage();
for (const [name, hash] of [["tour", ""], ["scores", "#stop=scores&layer=1&head=7&token=4"], ["choice", "#stop=choice&token=4"]]) {
  await small.goto("about:blank");
  await small.goto(request.url + hash);
  await ready(small);
  await shot(small, `phone-${name}`);
  if (name === "scores") {
    await then(small, () => small.locator(".grid canvas").last().tap({ position: { x: 100, y: 100 } }));
    answer.tapped = await text(small, "#cell"); // the formula, too: it opens
    await shot(small, "phone-cell");
  }
  answer.wider.push(await small.evaluate(() => document.documentElement.scrollWidth - innerWidth));
  answer.axe[`phone ${name}`] = await serious(small);
}
await phone.close();

// If it can't work, it says so.
for (const [name, lost] of [["no weights", "weights.bin"], ["no script", "heat.js"]]) {
  const context = await browser.newContext({ serviceWorkers: "block" });
  const one = await context.newPage();
  await one.route(`**/${lost}`, (route) => route.abort());
  await one.goto(request.url);
  await one.waitForFunction(() => document.getElementById("trouble").textContent, null, { timeout: 60000 });
  answer.trouble[name] = await text(one, "#trouble");
  await context.close();
}

await browser.close();
process.stdout.write(JSON.stringify(answer));
