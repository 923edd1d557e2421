// Reads the book in headless Chromium; for the tests.
//
//     node site.mjs TASK < request.json
//
// TASK is one of those at the end of this file. The request names the program `chromium`, the site's
// address `home`, which ends in "/", and what the task needs. The answer goes to standard output.

import { join } from "node:path";

import { launch, reader, request as readRequest, serious } from "./reader.mjs";

const request = readRequest();
const browser = await launch(request.chromium);
const DESK = { width: 1280, height: 900 };
const PHONE = { width: 390, height: 844 };
const PATIENCE = 30000; // milliseconds
const AT_ONCE = 2; // pages that are checked at the same time

// --- What is checked on each page; these functions run in the page, and say what is wrong ---

/** A promise that equations are typeset, if there are any. */
const typeset = () => document.querySelector(".math") && window.MathJax?.startup?.promise?.then(() => true);

/** What is wrong with equations, tables and code. */
function textFaults() {
  const faults = [];
  document.querySelectorAll(".math").forEach((one, i) => {
    const set = one.querySelector("mjx-container");
    const { width = 0, height = 0 } = set?.getBoundingClientRect() ?? {};
    const hidden = !one.checkVisibility(); // folded, or only for print
    if (!set || (!hidden && !(width > 2 && height > 2))) faults.push(`equation ${i + 1} isn't typeset`);
    if (one.querySelector("mjx-merror, [data-mjx-error]")) faults.push(`equation ${i + 1} has an error`);
  });
  for (const one of document.querySelectorAll("main th")) {
    const hidden = !one.checkVisibility() && !one.closest("details");
    if (hidden && one.textContent.trim()) faults.push(`a table's heading can't be seen: ${one.textContent}`);
  }
  for (const code of document.querySelectorAll(".cell_input pre")) {
    const cut = code.scrollWidth > code.clientWidth + 1;
    if (cut) faults.push(`a line is too long for the page: ${code.textContent.trim().split("\n")[0]} …`);
  }
  const prose = document.querySelector("main").cloneNode(true);
  prose.querySelectorAll("pre, code, script").forEach((one) => one.remove());
  if (prose.textContent.includes("$$")) faults.push("$$ is left in the text");
  return faults;
}

/** What is wrong with a drawn chart: each of its views must have visible marks, and it must fit. */
function chartFaults(figure) {
  const svg = figure.querySelector("svg.marks");
  if (!svg) return ["isn't drawn"];
  const paints = (colour, opacity) => colour !== "none" && !/^rgba.*, 0\)$/.test(colour) && opacity > 0;
  const seen = (mark) => {
    const { width, height } = mark.getBoundingClientRect();
    const look = getComputedStyle(mark);
    const inked = paints(look.fill, look.fillOpacity) || paints(look.stroke, look.strokeOpacity);
    return inked && look.opacity > 0 && Math.max(width, height) > 1;
  };
  const views = [...svg.querySelectorAll('.role-scope[class$="_group"]')];
  for (const view of views.length ? views : [svg]) {
    const marks = [...view.querySelectorAll(".role-mark > :not(g)")];
    if (!marks.some(seen)) return ["has no visible marks"];
  }
  const faults = [];
  const lost = [...svg.querySelectorAll("path[d]")].some((one) => one.getAttribute("d").includes("NaN"));
  if (lost) faults.push("has marks without a position");
  const { width, height } = svg.getBoundingClientRect();
  if (width < 100 || height < 50) faults.push(`is only ${width} × ${height} pixels`);
  if (figure.scrollWidth > figure.clientWidth + 1) faults.push("is wider than the column");
  if (figure.querySelector("img").getBoundingClientRect().width) faults.push("shows its PNG as well");
  return faults;
}

/** What sticks out beyond the side of the screen. */
function wideFaults() {
  const over = document.documentElement.scrollWidth - innerWidth;
  if (over <= 0) return [];
  const scrolls = (one) => one && (getComputedStyle(one).overflowX !== "visible" || scrolls(one.parentElement));
  const wide = [...document.querySelectorAll("main *, footer *")].filter(
    (one) => one.getBoundingClientRect().right > innerWidth + 1 && !scrolls(one.parentElement),
  );
  const names = wide.slice(0, 3).map((one) => one.outerHTML.slice(0, 100));
  return [`${over} pixels stick out on a phone: ${names.join(" ")}`];
}

/** Removes what axe would check many times over: known colours of code, a chart's further marks. */
function thinOut() {
  const seen = new Set();
  for (const code of document.querySelectorAll("pre")) {
    const place = code.parentElement.closest("[class*=highlight-], .output")?.className;
    const kinds = [...code.querySelectorAll("span, a")].map(
      (one) => `${place} ${one.parentElement.className} ${one.className} ${Boolean(one.id)}`,
    );
    if (kinds.every((kind) => seen.has(kind))) code.textContent = code.textContent;
    for (const kind of kinds) seen.add(kind);
  }
  document.querySelectorAll(".role-mark > :nth-child(n + 10)").forEach((one) => one.remove());
}

// --- What is done with a page ---

/** Opens an address and waits until its equations are typeset. */
async function open(page, address) {
  await page.goto(address, { waitUntil: "load", timeout: PATIENCE });
  await page.evaluate(typeset);
}

/** Scrolls to each chart in turn, waits until it is drawn, and checks it. */
async function charts(page) {
  const faults = [];
  let timeout = request.patience ?? PATIENCE;
  for (const [i, figure] of (await page.$$("figure.chart")).entries()) {
    await figure.evaluate((one) => one.scrollIntoView({ block: "center", behavior: "instant" }));
    const drawn = await page.waitForFunction((one) => one.dataset.drawn, figure, { timeout }).catch(() => null);
    if (!drawn) timeout = 500; // if one isn't drawn, others won't be
    const found = drawn ? await figure.evaluate(chartFaults) : ["isn't drawn"];
    faults.push(...found.map((fault) => `chart ${i + 1} ${fault}`));
  }
  return faults;
}

/** Chooses "light" or "dark" with the page's own switch. */
async function choose(page, mode) {
  await page.click(".theme-switch-button");
  await page.click(`.theme-change-button[data-mode=${mode}]`);
  await page.waitForFunction((mode) => document.documentElement.dataset.theme === mode, mode);
  await page.mouse.move(0, 0); // the menu closes when the mouse leaves it
}

/** Shows everything: what is far from the screen, and what shows only now and then. */
const ALL = `div.cell { content-visibility: visible !important }
  #pst-back-to-top { display: block !important }
  * { transition: none !important }`;

/** What axe-core finds in light and in dark mode. */
async function manners(page) {
  await page.addStyleTag({ content: ALL });
  await page.evaluate(thinOut);
  const faults = await serious(page, { rules: { "color-contrast": { enabled: false } } });
  for (const mode of ["light", "dark"]) {
    await choose(page, mode);
    const found = await serious(page, { runOnly: ["color-contrast"] });
    faults.push(...found.map((fault) => `${mode}: ${fault}`));
  }
  await choose(page, "light");
  return faults;
}

/** Screenshots at five places of a page, at the size of a desktop and of a phone. */
async function pictures(page, name, mode) {
  for (const [device, size] of Object.entries({ desk: DESK, phone: PHONE })) {
    await page.setViewportSize(size);
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      await page.evaluate((part) => {
        const top = Math.round(part * (document.documentElement.scrollHeight - innerHeight));
        scrollTo({ top, behavior: "instant" });
      }, part);
      await page.waitForTimeout(300); // for what is drawn as it comes near
      const file = `${name.replace(".html", "").replaceAll("/", "-")}-${device}-${mode}-${100 * part}.png`;
      await page.screenshot({ path: join(request.pictures, file) });
    }
  }
  await page.setViewportSize(DESK);
}

/** All that is wrong with a page, and how many charts and equations it has. */
async function look(context, complaints, name) {
  const page = await context.newPage();
  await page.setViewportSize(DESK);
  await open(page, request.home + name);
  const faults = [...(await page.evaluate(textFaults)), ...(await charts(page))];
  const count = (selector) => page.locator(selector).count();
  const size = { charts: await count("figure.chart"), equations: await count(".math") };
  for (const mode of request.pictures ? ["light", "dark"] : []) {
    await choose(page, mode);
    await pictures(page, name, mode);
  }
  if (!request.brief) {
    await page.setViewportSize(PHONE);
    faults.push(...(await page.evaluate(wideFaults)));
    await page.setViewportSize(DESK);
    faults.push(...(await manners(page)));
  }
  await page.close();
  return { faults: [...complaints.splice(0), ...faults], ...size };
}

// --- Tasks ---

/** Checks each page of the list `pages`, several at once. `brief`: without axe and phone. */
async function pages() {
  const answer = {};
  const waiting = [...request.pages];
  const work = async () => {
    const complaints = [];
    const context = await reader(browser, request.home, complaints, { colorScheme: "light" });
    while (waiting.length) {
      const name = waiting.shift();
      answer[name] = await look(context, complaints, name);
    }
    await context.close();
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  return answer;
}

/** Seconds until the page `page` is ready: loaded, equations typeset, charts in view drawn. */
async function speed() {
  const context = await reader(browser, request.home, [], { viewport: DESK });
  const page = await context.newPage();
  const started = Date.now();
  await open(page, request.home + request.page);
  await page.waitForFunction(() =>
    [...document.querySelectorAll("figure.chart")].every(
      (one) => one.dataset.drawn || one.getBoundingClientRect().top > innerHeight,
    ),
  );
  return (Date.now() - started) / 1000;
}

/** Presses the link or heading `one` with the keyboard: a mouse may miss what late equations move. */
const press = (page, one) => page.locator(one).first().press("Enter");

/** Follows the link `one` to an address like `wanted`. */
async function follow(page, one, wanted) {
  await press(page, one);
  await page.waitForURL(wanted);
  await page.evaluate(typeset);
}

/** What a reader does: searches, follows links, unfolds, copies, leaves dark mode, turns pages. */
async function reading() {
  const answer = { complaints: [] };
  const context = await reader(browser, request.home, answer.complaints, {
    viewport: DESK,
    colorScheme: "dark",
    permissions: ["clipboard-read", "clipboard-write"],
  });
  const page = await context.newPage();
  const place = () => page.url().replace(request.home, "");
  const theme = () => page.evaluate(() => document.documentElement.dataset.theme);
  await open(page, `${request.home}index.html`);
  answer.system = await theme();
  await choose(page, "light");
  answer.found = await search(page, "label smoothing");
  answer.kept = await theme();
  answer.axe = await serious(page);

  await follow(page, '#search-results a[href*="ch06_training"]', /ch06_training/);
  await press(page, "summary:has-text('Show the first cell')");
  answer.unfolded = await page.locator("details[open] pre").first().isVisible();
  const cell = page.locator("div.cell_input:visible").first();
  await cell.hover();
  await cell.locator("button.copybtn").click();
  answer.copied = [await page.evaluate(() => navigator.clipboard.readText()), await cell.locator("pre").innerText()];
  await follow(page, "a.right-next", /ch07/);
  await follow(page, "a.left-prev", /ch06/);
  await follow(page, 'a.name[href*="ch04"][href*="#def-make_model"]', /#def-make_model/);
  answer.definition = await page.evaluate(() => {
    const { top, bottom } = document.querySelector(":target").getBoundingClientRect();
    return [document.querySelector(":target").textContent, top > 0 && bottom < innerHeight];
  });
  answer.place = place();
  return answer;
}

/** Types words into the search field; gives the addresses of what is found. */
async function search(page, words) {
  await page.click(".search-button-field");
  await page.keyboard.type(words);
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => /found/.test(document.querySelector("p.search-summary")?.textContent));
  return page.locator("#search-results li a").evaluateAll((all) => all.map((one) => one.getAttribute("href")));
}

/** Chooses another value in each picker of the map on `page`; says whether each changed the map. */
async function pickers() {
  const page = await (await reader(browser, request.home, [], { viewport: DESK })).newPage();
  await open(page, request.home + request.page);
  const specs = await page.locator("figure.chart > script").allTextContents();
  const figure = page.locator("figure.chart").nth(specs.findIndex((spec) => spec.includes('"bind"')));
  await figure.scrollIntoViewIfNeeded();
  const map = figure.locator(".role-frame").first();
  const answer = {};
  await figure.locator("select").first().waitFor();
  for (const picker of await figure.locator("select").all()) {
    const before = await map.innerHTML();
    await picker.selectOption({ index: 1 + (await picker.evaluate((one) => one.selectedIndex % 2)) });
    const changed = page.waitForFunction(([one, text]) => one.innerHTML !== text, [await map.elementHandle(), before], {
      timeout: 5000,
    });
    const name = await picker.evaluate((one) => one.labels[0].firstChild.textContent);
    answer[name.trim()] = await changed.then(() => true, () => false);
  }
  return answer;
}

/** A day with recall cards on the page `page`, by keyboard, and the next day. */
async function recall() {
  const answer = { complaints: [] };
  const context = await reader(browser, request.home, answer.complaints, { viewport: DESK });
  const page = await context.newPage();
  const card = page.locator("details.recall:visible");
  const focused = () => page.evaluate(() => document.activeElement.textContent.trim());
  const reply = async (one, name) => {
    if (!(await one.evaluate((details) => details.open))) await one.locator("summary").press("Enter");
    await one.getByRole("button", { name }).press("Enter");
  };
  await page.clock.setFixedTime(new Date(2030, 0, 1, 12));
  await open(page, request.home + request.page);
  await reply(card.nth(0), "I knew it");
  answer.kept = await focused();
  await reply(card.nth(0), "I knew it"); // on the same day: it gains nothing
  await reply(card.nth(1), "Not yet");
  await page.getByLabel("I have read this chapter").press("Space");
  await page.reload();
  answer.when = await page.locator(".card-when").evaluateAll((all) => all.slice(0, 3).map((one) => one.textContent));
  answer.read = await page.getByLabel("I have read this chapter").isChecked();
  answer.sidebar = await page.locator(".bd-sidebar-primary .short-way, .cards-link").allInnerTexts();

  const questions = await page.locator("details.recall summary").allInnerTexts();
  await open(page, `${request.home}docs/cards.html`);
  answer.due = [await card.count()];
  await page.clock.setFixedTime(new Date(2030, 0, 2, 12));
  await page.reload();
  answer.due.push(await card.count());
  await reply(card.nth(0), "I knew it");
  answer.next = (await focused()) === questions[1];
  await reply(card.nth(0), "I knew it");
  answer.last = await focused();
  await page.getByRole("button", { name: "Show all cards" }).press("Enter");
  answer.all = await card.count();
  answer.axe = await manners(page);
  return answer;
}

/** The pages `pages` without JavaScript: what of their text and pictures can't be seen. */
async function plain() {
  const complaints = [];
  const context = await reader(browser, request.home, complaints, { viewport: DESK, javaScriptEnabled: false });
  const page = await context.newPage();
  const faults = [];
  for (const name of request.pages) {
    await page.goto(request.home + name);
    const found = await page.evaluate(() => {
      const faults = [];
      const pictures = [...document.querySelectorAll("figure.chart img")];
      pictures.forEach((one, i) => {
        const { width, height } = one.getBoundingClientRect();
        if (!one.naturalWidth || width < 100 || height < 50) faults.push(`picture ${i + 1} can't be seen`);
      });
      const texts = document.querySelectorAll("main :is(h1, h2, h3, article p, article pre)");
      for (const one of texts) {
        const shown = one.closest("details, .onlyprint") || one.getBoundingClientRect().height;
        if (one.textContent.trim() && !shown) faults.push(`can't be seen: ${one.textContent.slice(0, 60)}`);
      }
      const folded = [...document.querySelectorAll("details.recall")].filter((one) => one.checkVisibility() && !one.open);
      if (folded.length < 3 || document.querySelector("article :is(button, input)")?.checkVisibility()) {
        faults.push("recall cards can't be seen, or have buttons that do nothing");
      }
      if (!pictures.length || texts.length < 50) faults.push("hardly anything is there");
      return faults;
    });
    faults.push(...found.map((fault) => `${name}: ${fault}`));
  }
  return [...complaints.filter((line) => !line.startsWith("failed:")), ...faults]; // scripts are blocked
}

/** The search, with the site opened from a folder. */
async function folder() {
  const complaints = [];
  const page = await (await reader(browser, request.home, complaints, { viewport: DESK })).newPage();
  await open(page, `${request.home}index.html`);
  return { found: await search(page, "label smoothing"), complaints };
}

const TASKS = { pages, speed, reading, pickers, recall, plain, folder };
const answer = await TASKS[process.argv[2]]();
await browser.close();
process.stdout.write(JSON.stringify(answer));
