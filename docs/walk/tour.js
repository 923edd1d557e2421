// The tour of the first visit: ten stops, one question. A stop is a state and a text; nothing else is kept,
// so forwards and backwards show the same. Numbers in a text are read from what is shown.

const SENTENCE = "Ein Mann trägt einen Korb.";
const OTHER = "Ein Mann trägt einen Hut.";
const [CARRIES, BASKET] = [2, 4]; // rows of trägt and of Korb

/** A state of the tour: step 3 writes the token after "A man is". */
const here = (stop, [tensor, row, col], more = {}) => ({
  ...{ sentence: SENTENCE, step: 3, layer: 0, head: 6, stop, cell: { tensor, row, col } },
  ...more,
});

export const TOUR = [
  {
    title: "One question",
    state: here("choice", ["probabilities", 0, 0]),
    text: ({ labelAt, numberAt, percent, words }) => [
      [
        `The model translates “${SENTENCE}” The word “trägt” can mean “carries” or “wears”. The model has written “A man is”, and now chooses “${words.tgtPieces[3]}”. `,
        `It gives it ${percent(numberAt("probabilities", 0, 0))}, and “${labelAt("probabilities", 1)}” only ${percent(numberAt("probabilities", 1, 0))}. Why?`,
      ],
      ["We follow the numbers from the beginning. Press any number on the way, and you see how it was made. Leave the tour when you like, and walk with a sentence of your own."],
    ],
  },
  {
    title: "Letters become numbers",
    state: here("pieces", ["source.ids", CARRIES, 0]),
    text: ({ press }) => [
      ["The sentence is cut into pieces. Each piece has a number of its own, its id: ", press("“trägt” is number", "source.ids", CARRIES, 0), ". The model sees ids, never letters."],
    ],
  },
  {
    title: "A piece becomes a vector",
    state: here("embed", ["source.embedded", CARRIES, 0]),
    text: () => [
      ["An id is only a name. So the model looks it up in a table, and finds 256 numbers that it has learned: a vector, one row of the picture."],
      ["It adds a pattern that says where in the sentence the piece stands. Without it, the model could not tell first from last."],
    ],
  },
  {
    title: "Three vectors for each piece",
    state: here("qkv", ["encoder.0.self.query", CARRIES, 0]),
    text: () => [
      ["In attention each piece looks at the others. For this it makes three short vectors. Its query says what it looks for. Its key says what it has to offer. Its value is what it gives to whoever looks."],
      ["Each layer has eight heads, which do this side by side. This is head 7 of the first layer."],
    ],
  },
  {
    title: "Does the key fit the query?",
    state: here("scores", ["encoder.0.self.scores", CARRIES, BASKET]),
    text: ({ press }) => [
      ["The query of “trägt” meets every key: number times number, all added up. The larger the sum, the better the fit. ", press("With “Korb” the score is", "scores", CARRIES, BASKET), ". Compare it with the others of its row."],
    ],
  },
  {
    title: "Scores become shares",
    state: here("softmax", ["encoder.0.self.weights", CARRIES, BASKET]),
    text: ({ press }) => [
      ["Softmax makes shares of the scores: each row has sum 1. ", press("“trägt” gives “Korb” the share", "weights", CARRIES, BASKET), ". Head 7 of the first layer lets the verb look at what is carried."],
      ["Choose other heads: each looks in its own way."],
    ],
  },
  {
    title: "The values are mixed",
    state: here("mix", ["encoder.0.self.mix", CARRIES, 0]),
    text: () => [
      ["Each piece now takes the values of the others, as much of each as its shares say. So the row of “trägt” now has something from “Korb” in it."],
    ],
  },
  {
    title: "Added, not replaced",
    state: here("residual", ["encoder.0.residual1", CARRIES, 0]),
    text: () => [
      ["What the heads found is added to the vector that was there before: a residual connection. It replaces nothing."],
      ["The next box, feed-forward, works on each piece alone. Three such layers follow one another. Their result is the memory: all that the decoder will know of the German."],
    ],
  },
  {
    title: "English looks at German",
    state: here("cross", ["decoder.2.cross.weights", 3, BASKET], { layer: 2, head: 1 }),
    text: ({ press }) => [
      ["The decoder has read “A man is”. Its last row, “is”, leads to the next token, and asks the memory: which German piece matters now? In this head ", press("“Korb” gets", "weights", 3, BASKET), " of the whole."],
      ["Head 2 of the third layer brings the thing that is carried to the place where the verb is chosen. Others look elsewhere: head 3 looks at “trägt”."],
    ],
  },
  {
    title: "The choice",
    state: here("choice", ["probabilities", 0, 0]),
    text: ({ labelAt, numberAt, percent, shown, words, go }) => {
      const more = numberAt("logits", 0, 0) - numberAt("logits", 1, 0);
      return [
        [`Every piece of the vocabulary gets a score, its logit, and softmax makes shares of them. “${words.tgtPieces[3]}” has ${percent(numberAt("probabilities", 0, 0))}: it is written.`],
        [`Its score is larger than that of “${labelAt("logits", 1)}” by ${shown(more)}. So it is e^${shown(more)} = ${shown(Math.exp(more))} times as likely.`],
        ["Does the basket decide? Change this one word and see: ", go(OTHER, { sentence: OTHER, step: 3, stop: "choice" }), " ", go(SENTENCE, { sentence: SENTENCE, step: 3, stop: "choice" })],
        ["Now walk alone: your own sentence, another token, any stop of the map."],
      ];
    },
  },
];
