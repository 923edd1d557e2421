// The tokenizer of chapter 7 in JavaScript: the ids that SentencePiece gives, for any text.
//
// Three steps lead from a text to ids.
// 1. Normalise: what can't be seen goes (`plainText`), and the model's own table says what becomes of
//    each other letter (full-width letters become ordinary ones, …). Runs of spaces shrink to one, and a
//    space is written ▁.
// 2. Merge: of all neighbours that together are a piece, the pair with the best score is joined,
//    until there is none left.
// 3. Look up: each piece has an id. A run of letters that the model has never met is one <unk>.

const SPACE = "▁"; // how SentencePiece writes a space
const UNKNOWN_TEXT = " ⁇ "; // what <unk> looks like in a text

const INVISIBLE = /[\p{Default_Ignorable_Code_Point}\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ufff9-\ufffb]/gu;
const BLANK = /[\s\x1c-\x1f\x85\u2800]/g;
const LOOKALIKES = {
  ...{ "\u2010": "-", "\u2011": "-", "\u2012": "–", "\u2212": "–", "\u201a": "," },
  ...{ "\u02bc": "’", "\xb4": "’", "\u2032": "’", "\u1e9e": "ß" },
};

/** The tokenizer's `plain_text`: texts that look the same become the same. */
export function plainText(text) {
  const seen = text.replace(INVISIBLE, "").replace(BLANK, " ");
  return Array.from(seen, (letter) => LOOKALIKES[letter] ?? letter).join("");
}

/** SentencePiece's table of normalisation rules: a trie over UTF-8 bytes in one array. */
class Rules {
  /** `bytes`: the size of the trie, the trie as 32-bit units, then the replacements, each ended by 0. */
  constructor(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const size = view.getUint32(0, true);
    this.units = Uint32Array.from({ length: size / 4 }, (_, i) => view.getUint32(4 + 4 * i, true));
    this.replacements = bytes.subarray(4 + size);
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  }

  /** Where the children of a unit begin, relative to it. */
  static offset(unit) {
    return (unit >>> 10) << ((unit & 0x200) >>> 6);
  }

  /** The longest rule for what `bytes` holds at `start`: [replacement, bytes it covers], or null. */
  longest(bytes, start) {
    const { units } = this;
    let place = Rules.offset(units[0]);
    let found = null;
    for (let i = start; i < bytes.length; i++) {
      place ^= bytes[i];
      const unit = units[place];
      if (unit === undefined || (unit & 0x800000ff) >>> 0 !== bytes[i]) break;
      place ^= Rules.offset(unit);
      if ((unit >>> 8) & 1) found = [units[place] & 0x7fffffff, i + 1 - start];
    }
    return found && [this.replacement(found[0]), found[1]];
  }

  /** The text that begins at `start` and ends before the next 0. */
  replacement(start) {
    const end = this.replacements.indexOf(0, start);
    return this.decoder.decode(this.replacements.subarray(start, end < 0 ? undefined : end));
  }
}

/** How many bytes a letter has if its UTF-8 begins with `first`. */
function letterSize(first) {
  return first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
}

/** A heap of pairs of neighbours: the best score first, of equals the one further left. */
class Agenda {
  constructor() {
    this.heap = [];
  }

  static before(a, b) {
    return a.score > b.score || (a.score === b.score && a.left < b.left);
  }

  push(pair) {
    const { heap } = this;
    let at = heap.push(pair) - 1;
    while (at > 0) {
      const parent = (at - 1) >> 1;
      if (!Agenda.before(heap[at], heap[parent])) break;
      [heap[at], heap[parent]] = [heap[parent], heap[at]];
      at = parent;
    }
  }

  pop() {
    const { heap } = this;
    const [best] = heap;
    const last = heap.pop();
    if (heap.length) {
      heap[0] = last;
      for (let at = 0; ; ) {
        let child = 2 * at + 1;
        if (child >= heap.length) break;
        if (child + 1 < heap.length && Agenda.before(heap[child + 1], heap[child])) child++;
        if (!Agenda.before(heap[child], heap[at])) break;
        [heap[at], heap[child]] = [heap[child], heap[at]];
        at = child;
      }
    }
    return best;
  }
}

/** A label that fits: a run of unknown letters is one piece, however long. */
export const brief = (label) => ([...label].length > 20 ? `${[...label].slice(0, 19).join("")}…` : label);

export class Tokenizer {
  /**
   * `data` is what build.py wrote: `pieces` and `scores` by id, `special` = {pad, unk, bos, eos}, and
   * the normalisation `rules` in base64.
   */
  constructor(data) {
    this.pieces = data.pieces;
    this.scores = data.scores;
    this.special = data.special;
    this.rules = new Rules(Uint8Array.from(atob(data.rules), (letter) => letter.charCodeAt(0)));
    const reserved = new Set(Object.values(data.special));
    this.ids = new Map();
    data.pieces.forEach((piece, id) => reserved.has(id) || this.ids.set(piece, id));
  }

  /** The text that the pieces are cut from. */
  normalise(text) {
    const bytes = new TextEncoder().encode(plainText(text));
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    let normalised = "";
    let afterSpace = true; // leading spaces go, and all but one of a run
    for (let at = 0; at < bytes.length; ) {
      const rule = this.rules.longest(bytes, at);
      const size = rule ? rule[1] : letterSize(bytes[at]);
      let part = rule ? rule[0] : decoder.decode(bytes.subarray(at, at + size));
      if (afterSpace) part = part.replace(/^ +/, "");
      if (part) {
        normalised += part;
        afterSpace = part.endsWith(" ");
      }
      at += size;
    }
    if (!normalised) return "";
    return (SPACE + normalised.replaceAll(" ", SPACE)).replace(/▁+$/, "");
  }

  /** A normalised text to pieces, by byte-pair merges. */
  merge(text) {
    const symbols = Array.from(text, (piece, i) => ({ piece, prev: i - 1, next: i + 1 }));
    if (!symbols.length) return [];
    symbols.at(-1).next = -1;
    const agenda = new Agenda();
    const consider = (left, right) => {
      if (left < 0 || right < 0) return;
      const piece = symbols[left].piece + symbols[right].piece;
      const id = this.ids.get(piece);
      if (id !== undefined) agenda.push({ left, right, piece, score: this.scores[id] });
    };
    for (let i = 1; i < symbols.length; i++) consider(i - 1, i);
    for (let pair = agenda.pop(); pair; pair = agenda.pop()) {
      const [left, right] = [symbols[pair.left], symbols[pair.right]];
      // One of the two may have been merged with another neighbour in the meantime.
      if (!left.piece || !right.piece || left.piece + right.piece !== pair.piece) continue;
      left.piece = pair.piece;
      left.next = right.next;
      right.piece = "";
      if (left.next >= 0) symbols[left.next].prev = pair.left;
      consider(left.prev, pair.left);
      consider(pair.left, left.next);
    }
    return symbols.map((symbol) => symbol.piece).filter(Boolean);
  }

  /** The pieces of a text; a run of unknown letters is one. */
  split(text) {
    const split = [];
    let afterUnknown = false;
    for (const piece of this.merge(this.normalise(text))) {
      const unknown = !this.ids.has(piece);
      if (unknown && afterUnknown) split[split.length - 1] += piece;
      else split.push(piece);
      afterUnknown = unknown;
    }
    return split;
  }

  /** Text to ids, without <s> and </s>. */
  encode(text) {
    return this.split(text).map((piece) => this.ids.get(piece) ?? this.special.unk);
  }

  /** Ids to text; it ends at the first </s>. */
  decode(ids) {
    const { pad, unk, bos, eos } = this.special;
    let text = "";
    for (const id of ids) {
      if (id === eos) break;
      if (id === pad || id === bos) continue;
      let piece = id === unk ? UNKNOWN_TEXT : this.pieces[id].replaceAll(SPACE, " ");
      if (!text && id !== unk) piece = piece.replace(/^ /, "");
      text += piece;
    }
    return text;
  }

  /** How a piece is shown: "▁Hund" as Hund, and a piece within a word with a plus, "+chen". */
  label(piece) {
    if (piece.startsWith(SPACE)) return piece.slice(1) || SPACE;
    return /^[\p{L}\p{N}]/u.test(piece) ? `+${piece}` : piece;
  }
}
