// The page's tokenizer, model and searches without a browser: for the tests, and for your own scripts.
//
//     node node.mjs FOLDER < request.json
//
// FOLDER is what build.py wrote. The request is {plain: [texts], encode: [texts], decode: [lists of ids],
// translate: [{text, beam, alpha}]}, each part optional; the answer, on standard output, has the same parts.

import { readFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

import { beamSearch, greedy, limitFor, score } from "./decode.js";
import { attentionOf, Model } from "./model.js";
import { plainText, Tokenizer } from "./tokenizer.js";

const folder = resolve(process.argv[2]);
const read = (name) => new Uint8Array(readFileSync(join(folder, name)));
const json = (bytes) => JSON.parse(new TextDecoder().decode(bytes));

async function runtime() {
  const here = dirname(fileURLToPath(import.meta.url));
  const module = join(here, "../node_modules", "onnxruntime-web", "dist", "ort.node.min.mjs");
  const ort = await import(pathToFileURL(module));
  ort.env.wasm.numThreads = 1;
  return ort;
}

async function translations(wanted, tokenizer) {
  const names = ["encoder.onnx", "decoder_step.onnx", "weights.bin"];
  const files = Object.fromEntries(names.map((name) => [name, read(name)]));
  const model = await Model.load(await runtime(), json(read("model.json")), files);
  const { special } = tokenizer;
  const answers = [];
  for (const { text, beam = 1, alpha = model.config.alpha } of wanted) {
    const source = [...tokenizer.encode(text).slice(0, model.config.max_len - 1), special.eos];
    const decoding = await model.read(source);
    const limit = limitFor(source.length, model.config.max_len);
    const found =
      beam === 1
        ? await greedy(decoding, special, limit)
        : await beamSearch(decoding, special, limit, beam, alpha);
    answers.push(
      found.map(({ ids, logProb, choices }) => ({
        ids,
        logProb,
        text: tokenizer.decode(ids),
        score: score({ ids, logProb }, alpha),
        candidates: choices.map((choice) => choice.candidates),
        weights: choices.map((choice) => Array.from(choice.weights)),
        mean: choices.map((choice) => Array.from(attentionOf(choice.weights, model.config, 1, null))),
      })),
    );
  }
  return answers;
}

const request = json(new Uint8Array(readFileSync(0)));
const tokenizer = new Tokenizer(json(read("tokenizer.json")));
const answer = {
  plain: (request.plain ?? []).map(plainText),
  encode: (request.encode ?? []).map((text) => tokenizer.encode(text)),
  decode: (request.decode ?? []).map((ids) => tokenizer.decode(ids)),
  translate: request.translate ? await translations(request.translate, tokenizer) : [],
};
process.stdout.write(JSON.stringify(answer));
