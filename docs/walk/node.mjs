// The walk's numbers without a browser: for the tests, and for your own scripts.
//
//     node node.mjs FOLDER < request.json
//
// FOLDER is the living page's, as build.py wrote it. The request is {read: [sentences], calls: [[name, ...arguments]]}:
// calls of Walk (numbers.js). The answer holds, for each sentence, what was read and its whole trace, for each call its
// value, and how long things took, in milliseconds.

import { readFileSync } from "node:fs";
import { resolve } from "node:path";

import { openWalk } from "./numbers.js";

const request = JSON.parse(readFileSync(0, "utf-8"));
const started = performance.now();
const took = (since) => performance.now() - since;
const walk = await openWalk(async (name) => new Uint8Array(readFileSync(resolve(process.argv[2], "..", "walk", name))));
const answer = { about: walk.about, times: { open: took(started), calls: [] }, read: [], calls: [] };

// An array of float32 numbers in base64, as they lie in memory; JSON has no −∞ for a single one.
const packed = (key, value) => {
  if (value instanceof Float32Array) return Buffer.from(value.buffer, value.byteOffset, value.byteLength).toString("base64");
  return value === -Infinity ? "-inf" : value;
};

for (const sentence of request.read ?? []) {
  const since = performance.now();
  const read = walk.read(sentence);
  const trace = [...walk.trace].map(([name, { axes, shape, data }]) => [name, { axes, shape, data }]);
  answer.read.push({ ...read, ids: walk.source, target: walk.target, trace: Object.fromEntries(trace), ms: took(since) });
}
for (const [name, ...args] of request.calls ?? []) {
  const since = performance.now();
  answer.calls.push(walk[name](...args));
  answer.times.calls.push(took(since));
}
process.stdout.write(JSON.stringify(answer, packed));
