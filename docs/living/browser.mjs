// Opens the page in headless Chromium as a reader would; for the tests.
//
//     node browser.mjs < request.json
//
// The request: {chromium, url, file, sentences: [{text, beam}], forward: a key, pictures: folder or null}. The answer, on
// standard output: what was translated, each complaint of the browser, what axe-core
// finds, and what the page says if it can't work.

import { join } from "node:path";

import { launch, reader, request as readRequest, serious } from "../browser/reader.mjs";

const request = readRequest();
const browser = await launch(request.chromium);
const answer = { complaints: [], translations: [], axe: {}, trouble: {} };
const visitor = (options) => reader(browser, request.url, answer.complaints, options);

const finished = (page, count) =>
  page.waitForFunction((n) => Number(document.documentElement.dataset.done) >= n, count, { timeout: 60000 });
const shot = async (page, name) => {
  if (!request.pictures) return;
  await page.evaluate(() => scrollTo(0, 0));
  await page.screenshot({ path: join(request.pictures, `${name}.png`), fullPage: true });
};
const texts = (page, selector) => page.locator(selector).allTextContents();

// On a desktop.
const desk = await visitor({ viewport: { width: 1200, height: 900 } });
const page = await desk.newPage();
await page.goto(request.url);
await finished(page, 1);
answer.opening = await page.textContent("#translation");
const codes = await page.locator("#text, #translation").evaluateAll((all) => all.map((one) => one.lang));
answer.named = [(await page.title()).split(" · ")[0], ...codes];
answer.examples = await texts(page, "#examples button");
await shot(page, "desktop");
answer.axe.light = await serious(page);

let count = 1;
for (const { text, beam } of request.sentences) {
  await page.check(`input[name=search][value=${beam > 1 ? "beam" : "greedy"}]`);
  if (beam > 1) await page.fill("#beam", String(beam));
  await page.fill("#text", text);
  await page.press("#text", "Enter");
  await finished(page, ++count);
  answer.translations.push({
    text: await page.textContent("#translation"),
    tokens: await texts(page, "#tokens [role=option]"),
    texts: await texts(page, "#texts li span:last-child"),
  });
}
await shot(page, "desktop-beam");
answer.axe.beam = await serious(page);

// The keyboard, the pickers, the table.
const focusBefore = await texts(page, "#tokens [aria-selected=true]");
await page.focus("#tokens [aria-selected=true]");
await page.keyboard.press(request.forward);
answer.keyboard = [focusBefore, await texts(page, "#tokens [aria-selected=true]"), await texts(page, "#tokens :focus")];
answer.candidates = await texts(page, "#candidates .share");
const cells = () => page.locator("#map .cell").evaluateAll((all) => all.map((one) => one.getAttribute("fill-opacity")));
const mean = await cells();
await page.selectOption("#layer", "0");
await page.selectOption("#head", "2");
answer.pickerMoves = JSON.stringify(mean) !== JSON.stringify(await cells());
answer.cells = mean.length;
await page.click("summary");
await page.waitForSelector("#table td");
answer.table = await texts(page, "#table tbody tr:first-child td");
await page.selectOption("#layer", "1");
await page.selectOption("#head", "mean");
await shot(page, "desktop-table");

// Stopped midway: what was written stays, and the next translation works.
await page.selectOption("#pace", "250");
await page.press("#text", "Enter");
await page.waitForFunction(() => document.querySelectorAll("#tokens [role=option]").length >= 2);
await page.click("#stop");
await finished(page, ++count);
answer.stopped = await page.textContent("#status");
answer.focus = await page.evaluate(() => document.activeElement.id);
await page.selectOption("#pace", "0");
await page.check("input[name=search][value=beam]");
await page.fill("#text", "");
await page.press("#text", "Enter");
await finished(page, ++count);
answer.nothing = await page.isHidden("#beams");
answer.empty = [await page.textContent("#status"), await page.textContent("#translation")];

// Asked four times at once: the first is stopped, the last runs.
const [{ text: plain }] = request.sentences;
await page.fill("#text", plain.replace(/\p{L}/u, "$&\u00ad"));
await page.evaluate(() => {
  for (let i = 0; i < 4; i++) document.getElementById("ask").requestSubmit();
});
await page.waitForFunction((n) => document.documentElement.dataset.done > n && !document.querySelector("[aria-busy]"), count + 1);
answer.hurried = Number(await page.evaluate(() => document.documentElement.dataset.done)) - count;
count += answer.hurried;
answer.soft = [await page.textContent("#translation")];
await page.fill("#text", plain);
await page.press("#text", "Enter");
await finished(page, ++count);
answer.soft.push(await page.textContent("#translation"));

// Without a network, after it has been loaded once.
await page.waitForFunction(() => document.getElementById("offline").textContent, null, { timeout: 60000 });
await desk.setOffline(true);
const alone = await desk.newPage();
await alone.goto(request.url);
await finished(alone, 1);
answer.offline = await alone.textContent("#translation");
await desk.close();

// On a phone, in dark mode.
const phone = await visitor({
  viewport: { width: 390, height: 844 },
  deviceScaleFactor: 2,
  colorScheme: "dark",
});
const small = await phone.newPage();
await small.goto(request.url);
await finished(small, 1);
answer.wider = await small.evaluate(() => document.documentElement.scrollWidth - innerWidth);
await shot(small, "phone-dark");
answer.axe.dark = await serious(small);
await phone.close();

// If it can't work, it says so.
const trouble = async (name, url, options, prepare, lost) => {
  const context = await browser.newContext({ serviceWorkers: "block", ...options });
  const one = await context.newPage();
  if (prepare) await one.addInitScript(prepare);
  if (lost) await one.route(`**/${lost}`, (route) => route.abort());
  await one.goto(url);
  await one.waitForTimeout(300);
  answer.trouble[name] = (await one.locator(".trouble").allInnerTexts()).join("").trim();
  await shot(one, `trouble-${name}`);
  await context.close();
};
await trouble("file", request.file);
await trouble("no WebAssembly", request.url, {}, "delete window.WebAssembly");
await trouble("no JavaScript", request.url, { javaScriptEnabled: false });
await trouble("no script", request.url, {}, null, "decode.js");

await browser.close();
process.stdout.write(JSON.stringify(answer));
