// The searches of chapters 6 and 8: greedy decoding and beam search.
//
// Both take a `decoding` (model.js), which continues prefixes by a token, and a `watch` function, which
// is told of every step and may make the search wait, or end it by throwing.
//
// What was decided at a step is kept with the text: `choices`, one for each token, each with the token,
// its log-probability, the likeliest candidates and the cross-attention of that step.

/** The `k` largest of `numbers[start…end-1]`, largest first, equals by place: [place, number] each. */
export function largest(numbers, k, start = 0, end = numbers.length) {
  const best = [];
  for (let i = start; i < end; i++) {
    const number = numbers[i];
    if (best.length === k && !(number > best[k - 1][1])) continue;
    let at = best.length === k ? k - 1 : best.length;
    while (at > 0 && best[at - 1][1] < number) at--;
    if (best.length === k) best.pop();
    best.splice(at, 0, [i - start, number]);
  }
  return best;
}

/** log Σ exp of `numbers[start…end-1]`, whose largest is `most`. */
function logSumExp(numbers, most, start, end) {
  let sum = 0;
  for (let i = start; i < end; i++) sum += Math.exp(numbers[i] - most);
  return most + Math.log(sum);
}

const SHOWN = 5; // candidates that are kept for the page

/** How each of the prefixes may go on: its `k` likeliest tokens, and what to remember of the step. */
function continuations({ logits, vocab, attention }, k) {
  return attention.map((weights, row) => {
    const [start, end] = [row * vocab, (row + 1) * vocab];
    const best = largest(logits, Math.max(k, SHOWN), start, end);
    const total = logSumExp(logits, best[0][1], start, end);
    const scored = best.map(([token, logit]) => ({ token, logProb: logit - total }));
    return { likely: scored.slice(0, k), step: { candidates: scored.slice(0, SHOWN), weights } };
  });
}

/** A text with one more token. */
function longer(text, { token, logProb }, step) {
  return {
    ids: [...text.ids, token],
    logProb: text.logProb + logProb,
    choices: [...text.choices, { token, logProb, ...step }],
  };
}

const nothing = () => ({ ids: [], logProb: 0, choices: [] });

/** log-probability / length^α, with </s> counted in the length (Wu et al. 2016, simplified as in chapter 8). */
export function score(text, alpha) {
  return text.logProb / text.ids.length ** alpha;
}

/** An output has at most twice the source's tokens and 10 more; `length` counts the source's </s>. */
export function limitFor(length, maxLength) {
  return Math.min(maxLength, 2 * length + 10);
}

/** The likeliest token, again and again: a text, which ends with `eos` unless `limit` tokens came first. */
export async function greedy(decoding, { bos, eos }, limit, watch = async () => {}) {
  let text = nothing();
  while (text.ids.length < limit && text.ids.at(-1) !== eos) {
    const [next] = continuations(await decoding.step([text.ids.at(-1) ?? bos]), 1);
    text = longer(text, next.likely[0], next.step);
    await watch({ unfinished: [text], finished: [] });
  }
  return [text];
}

/**
 * The `beam` best texts, best first.
 *
 * At each step every unfinished text is continued by every token, and of all continuations the `beam`
 * best go on. Those that end are set aside. The search is over when `beam` have ended.
 */
export async function beamSearch(decoding, { bos, eos }, limit, beam, alpha, watch = async () => {}) {
  let unfinished = [nothing()];
  const finished = [];
  for (let length = 1; length <= limit && finished.length < beam; length++) {
    const last = unfinished.map((text) => text.ids.at(-1) ?? bos);
    // 2·beam candidates: even if half of them end, enough are left to go on with.
    const next = continuations(await decoding.step(last), 2 * beam);
    const candidates = next
      .flatMap(({ likely }, origin) =>
        likely.map((way) => ({ origin, way, logProb: unfinished[origin].logProb + way.logProb })),
      )
      .sort((a, b) => b.logProb - a.logProb)
      .slice(0, 2 * beam);
    const grow = ({ origin, way }) => longer(unfinished[origin], way, next[origin].step);
    const ends = ({ way }) => way.token === eos || length === limit;
    finished.push(...candidates.slice(0, beam).filter(ends).map(grow));
    const going = candidates.filter((candidate) => !ends(candidate)).slice(0, beam);
    unfinished = going.map(grow);
    if (going.length) decoding.follow(going.map(({ origin }) => origin));
    await watch({ unfinished, finished });
  }
  return finished.sort((a, b) => score(b, alpha) - score(a, alpha)).slice(0, beam);
}
