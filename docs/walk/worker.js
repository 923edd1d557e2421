// Computes for the page, beside its thread: the model, a sentence's numbers, a stop's, a cell's.

import { bytesOf } from "../living/common.js";
import { openWalk } from "./numbers.js";

let walk;
const calls = {
  async open() {
    walk = await openWalk((name) => bytesOf(name, (heard) => postMessage({ heard })));
    return walk.about;
  },
  read: (sentence) => walk.read(sentence),
  stop: (state) => walk.stop(state),
  heads: (state, tensor) => Array.from({ length: walk.about.heads }, (_, head) => walk.view({ name: tensor }, { ...state, head })),
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
