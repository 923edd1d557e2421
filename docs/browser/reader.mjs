// A reader in headless Chromium that notes what goes wrong. For the tests of the book and of the
// living page.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

import { chromium } from "playwright-core";

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf-8");

/** A test's request, from standard input. */
export const request = () => JSON.parse(readFileSync(0, "utf-8"));

const ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage"];
ARGUMENTS.push("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"); // no other host

/** Headless Chromium, the program at `path`. */
export const launch = (path) => chromium.launch({ executablePath: path, args: ARGUMENTS });

/**
 * A fresh context whose pages add what goes wrong to the list `complaints`: lines of the console,
 * errors, failed requests, and requests to addresses outside `home`.
 */
export async function reader(browser, home, complaints, options = {}) {
  const context = await browser.newContext(options);
  const foreign = (url) => !url.startsWith(home) && !/^(data|blob):/.test(url);
  const note = (line) => complaints.push(line);
  const answered = new Set(); // with an error: these may be reported as failed, too
  context.on("request", (one) => foreign(one.url()) && note(`foreign: ${one.url()}`));
  context.on("response", (one) => {
    if (one.status() < 400) return;
    answered.add(one.request());
    note(`${one.status()}: ${one.url()}`);
  });
  context.on("requestfailed", (one) => {
    const left = one.failure()?.errorText === "net::ERR_ABORTED"; // the page was left, or no longer needs it
    if (!foreign(one.url()) && !answered.has(one) && !left) note(`failed: ${one.url()}`);
  });
  context.on("weberror", (one) => note(String(one.error())));
  context.on("console", (line) => {
    const told = line.text().startsWith("Failed to load resource"); // noted by the three above
    if (["error", "warning"].includes(line.type()) && !told) note(line.text());
  });
  return context;
}

/** What axe-core finds that is serious or critical; `options` are those of axe.run. */
export async function serious(page, options = {}) {
  await page.evaluate(axe);
  const quick = { resultTypes: ["violations"], selectors: false };
  const { violations } = await page.evaluate((all) => axe.run(all), { ...quick, ...options });
  return violations
    .filter(({ impact }) => ["serious", "critical"].includes(impact))
    .map(({ id, nodes }) => `${id}: ${nodes.length} × ${nodes.slice(0, 3).map((node) => node.html).join(" ")}`);
}
