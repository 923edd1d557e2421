// The map: the Transformer as in chapter 0's picture, each stop a link at its place.

import { shape } from "../living/draw.js";
import { STOPS } from "./stops.js";

const [LEFT, RIGHT, WIDE] = [8, 172, 140]; // the columns of encoder and decoder

// What is drawn: [text, x, y, height, kind, stop]; without a stop it is no link.
const BOXES = [
  ["German pieces, ids", LEFT, 426, 26, "plain", "pieces"],
  ["embedding + place", LEFT, 386, 26, "plain", "embed"],
  ["query, key, value", LEFT, 330, 24, "attention", "qkv"],
  ["scores", LEFT, 304, 24, "attention", "scores"],
  ["softmax", LEFT, 278, 24, "attention", "softmax"],
  ["mix", LEFT, 252, 24, "attention", "mix"],
  ["join, add, norm", LEFT, 212, 24, "norm", "residual"],
  ["feed-forward", LEFT, 172, 24, "feed", "feedforward"],
  ["memory", LEFT, 108, 26, "cross"],
  ["English so far", RIGHT, 426, 26, "plain"],
  ["embedding + place", RIGHT, 386, 26, "plain"],
  ["causal attention", RIGHT, 314, 40, "attention", "causal"],
  ["cross-attention", RIGHT, 238, 40, "cross", "cross"],
  ["feed-forward", RIGHT, 172, 24, "feed", "decoderff"],
  ["logits", RIGHT, 108, 26, "plain", "logits"],
  ["softmax, choice", RIGHT, 68, 26, "plain", "choice"],
];
const line = (d) => shape("path", { d, class: "line" });

/** Draw the map into `box`. walk.js says where each link leads, and which is the present one. */
export function drawPlan(box) {
  const svg = shape("svg", { viewBox: "0 0 320 460", role: "group", "aria-label": "The stops" });
  for (const [x, name] of [[LEFT, "Encoder × 3"], [RIGHT, "Decoder × 3"]]) {
    svg.append(line(`M${x + WIDE / 2} 426 V108`), shape("rect", { class: "frame", x: x - 6, y: 162, width: WIDE + 12, height: 202, rx: 6 }));
    svg.append(shape("text", { class: "name", x: x - 4, y: 156, text: name }));
  }
  svg.append(line(`M${RIGHT + WIDE / 2} 108 V48`), line(`M${LEFT + WIDE} 121 H160 V258 H${RIGHT}`));
  svg.append(shape("text", { class: "written", x: RIGHT + WIDE / 2, y: 40 }), shape("text", { class: "name", x: RIGHT - 4, y: 18, text: "the next token" }));
  for (const [text, x, y, height, kind, stop] of BOXES) {
    const number = STOPS.findIndex(({ id }) => id === stop) + 1;
    const words = number ? `${number} ${text}` : text;
    const label = shape("text", { x: x + WIDE / 2, y: y + height / 2 + 4.5, text: words });
    const rect = shape("rect", { x, y, width: WIDE, height, rx: 4 });
    const name = number && `${words}: ${STOPS[number - 1].title}`;
    svg.append(shape(number ? "a" : "g", { class: `box ${kind}`, href: number ? "#" : null, "data-stop": stop, "aria-label": name || null }, rect, label));
  }
  box.append(svg);
}
