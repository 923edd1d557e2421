// Plans when recall cards come back, and marks the chapters that were read. What it knows stays in
// this browser's localStorage. Without scripts or such a store, cards are questions to unfold.
"use strict";

const STORE = "from-attention-to-translation";
const DAYS = [1, 3, 7, 21]; // until a card comes back that was known once, twice, …
const SHORT = "●";

/** What is stored: each card's `step` (how often it was known in a row), `due` day, and who is read. */
function stored() {
  const memory = { cards: {}, read: {} };
  try {
    return Object.assign(memory, JSON.parse(localStorage.getItem(STORE)));
  } catch {
    return memory; // nothing that can be read
  }
}

function change(edit) {
  const memory = stored();
  edit(memory);
  localStorage.setItem(STORE, JSON.stringify(memory));
  show();
}

/** The number of the reader's day. */
function today() {
  const now = new Date();
  return Math.floor((now.getTime() / 60000 - now.getTimezoneOffset()) / 1440);
}

/** What becomes of a card that was answered: known early, it gains nothing. */
function answered({ step, due } = { step: 0, due: today() }, knew) {
  if (!knew) return { step: 0, due: today() };
  if (due > today()) return { step, due };
  return { step: Math.min(step + 1, DAYS.length), due: today() + DAYS[Math.min(step, DAYS.length - 1)] };
}

const page = document.querySelector(".planned"); // only the page with all cards has it
const sections = [...document.querySelectorAll("div.cards")];
const cards = [...document.querySelectorAll("details.recall")];
const counted = element("p", { tabIndex: -1, role: "status" });
let showsAll = false;

function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const button = (text, press) => element("button", { type: "button", className: "card-button", onclick: press }, text);

/** Below a card's answer: two buttons, and when it comes back. */
function equip(card) {
  const judge = (knew) => () => {
    change((memory) => (memory.cards[card.id] = answered(memory.cards[card.id], knew)));
    if (!card.hidden) return;
    card.open = false; // it has left the list: go on with the next
    const next = cards.filter((one) => !one.hidden);
    const later = next.find((one) => card.compareDocumentPosition(one) & Node.DOCUMENT_POSITION_FOLLOWING);
    ((later ?? next[0])?.querySelector("summary") ?? counted).focus();
  };
  const when = element("span", { className: "card-when" });
  when.setAttribute("aria-live", "polite");
  const row = element("div", { className: "card-row" });
  row.append(button("I knew it", judge(true)), button("Not yet", judge(false)), when);
  card.append(row);
}

function showCard(card, state) {
  const days = state ? state.due - today() : 0;
  const text = days > 1 ? `Comes back in ${days} days.` : days === 1 ? "Comes back tomorrow." : "Due today.";
  card.querySelector(".card-when").textContent = state ? text : "";
  card.querySelector("button").setAttribute("aria-disabled", String(days > 0));
}

/** On the page with all cards, shows those that are due. */
function showDue(due) {
  const n = cards.filter((card) => due(card.id)).length;
  for (const card of cards) card.hidden = !showsAll && !due(card.id);
  for (const section of sections) section.hidden = !section.querySelector("details:not([hidden])");
  const none = "No card is due. A card comes here on its day, once you have answered it at its chapter's end.";
  counted.textContent = n ? `${n} ${n === 1 ? "card is" : "cards are"} due today.` : none;
}

/** In the sidebar: how many cards are due, which chapters are read, how far the short way is. */
function showSidebar(read, due) {
  const link = document.querySelector(".cards-link");
  link.textContent = `Recall cards${due ? ` (${due} due)` : ""}`;
  const chapters = [...document.querySelectorAll(".bd-sidebar-primary a.reference")]
    .map((one) => ({ one, number: /^\s*(\d+) · /.exec(one.textContent)?.[1] }))
    .filter(({ number }) => number);
  for (const { one, number } of chapters) one.classList.toggle("chapter-read", Boolean(read[number]));
  const short = chapters.filter(({ one }) => one.textContent.includes(SHORT));
  const left = short.filter(({ number }) => !read[number]);
  const value = short.length - left.length;
  const way = document.querySelector(".short-way");
  way.replaceChildren(`The short way ${SHORT}: ${value} of ${short.length} chapters read`);
  const bar = element("progress", { max: short.length, value, ariaLabel: "Chapters of the short way that are read" });
  way.append(bar);
  if (value && left.length) {
    const title = left[0].one.textContent.replace(SHORT, "").trim();
    way.append("Next: ", element("a", { href: left[0].one.href }, title));
  }
  way.hidden = !short.length;
}

function show() {
  const memory = stored();
  const due = (id) => memory.cards[id]?.due <= today();
  for (const card of cards) showCard(card, memory.cards[card.id]);
  for (const box of document.querySelectorAll(".chapter-done input")) box.checked = Boolean(memory.read[box.value]);
  if (page) showDue(due);
  showSidebar(memory.read, Object.keys(memory.cards).filter(due).length);
}

function begin() {
  cards.forEach(equip);
  if (page) {
    const all = button("Show all cards", () => {
      showsAll = !showsAll;
      all.setAttribute("aria-pressed", String(showsAll));
      show();
    });
    all.setAttribute("aria-pressed", "false");
    const question = "Forget all your answers, and which chapters you have read?";
    const forget = button("Forget everything", () => confirm(question) && change((all) => Object.assign(all, { cards: {}, read: {} })));
    page.hidden = false;
    page.after(counted, element("p", { className: "card-row" }, all, forget));
  } else if (sections.length) {
    const box = element("input", { type: "checkbox", value: sections[0].dataset.chapter });
    box.onchange = () => change((memory) => (memory.read[box.value] = box.checked));
    sections[0].after(element("label", { className: "chapter-done" }, box, " I have read this chapter"));
  }
  show();
  for (const event of ["pageshow", "storage", "visibilitychange"]) addEventListener(event, show);
}

try {
  localStorage.setItem(`${STORE}-try`, "");
  localStorage.removeItem(`${STORE}-try`);
  begin();
} catch (error) {
  console.info("Nothing can be remembered here:", error);
}
