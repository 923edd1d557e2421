// Computes for the page, beside its thread: the model, a sentence's numbers, a stop's, a cell's.

import { bytesOf } from "../living/common.js";
import { openWalk } from "./stops.js";

let walk;
const calls = {
  async open() {
    walk = await openWalk((name) => bytesOf(name, (heard) => postMessage({ heard })));
    return walk.about;
  },
  read: (sentence) => walk.read(sentence),
  stop: (state) => walk.stop(state),
  code: (state) => walk.code(state),
  inspect: (state) => walk.inspect(state),
};

addEventListener("message", async ({ data: { id, call, args } }) => {
  try {
    postMessage({ id, value: await calls[call](...args) });
  } catch (error) {
    postMessage({ id, error: String(error?.message ?? error) });
  }
});
