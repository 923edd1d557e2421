// What the living page and the walk have in common: fetching, the state line, list boxes, the offline copy.

export const at = (id) => document.getElementById(id);

/** A file's bytes; `heard` is told how many came in. */
export async function bytesOf(name, heard) {
  const answer = await fetch(name);
  if (!answer.ok) throw new Error(`${name}: the server answered ${answer.status}`);
  const transform = (chunk, out) => {
    heard(chunk.length);
    out.enqueue(chunk);
  };
  const counted = answer.body.pipeThrough(new TransformStream({ transform }));
  return new Uint8Array(await new Response(counted).arrayBuffer());
}

export function say(text) {
  at("status").textContent = text;
}

/** Where the page stands, for who watches it from outside: loading, ready, busy, broken. */
export function mark(state) {
  document.documentElement.dataset.state = state;
}

export function giveUp(error) {
  const why = String(error?.message ?? error);
  at("trouble").textContent = /SIMD is not supported/.test(why)
    ? "This browser's WebAssembly is too old: it has no SIMD instructions. Any recent browser has them."
    : `The model failed (${why}). Load the page again; if that doesn't help, try another browser.`;
  document.documentElement.classList.add("broken");
  say("");
  mark("broken");
}

/** New items in a list box; the focus stays in it. */
export function refill(list, items) {
  const inside = list.contains(document.activeElement);
  list.replaceChildren(...items);
  if (inside) list.querySelector('[aria-selected="true"]')?.focus();
}

/** In a list box: a click or an arrow key chooses an item. */
export function listen(list, choose) {
  list.addEventListener("click", (event) => {
    const item = event.target.closest('[role="option"]');
    if (!item) return;
    item.focus();
    choose([...list.children].indexOf(item));
  });
  list.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return; // the browser's own keys
    const last = list.children.length - 1;
    const now = [...list.children].findIndex((item) => item === document.activeElement);
    const right = getComputedStyle(list).direction === "rtl" ? -1 : 1;
    const next = {
      ArrowRight: now + right,
      ArrowDown: now + 1,
      ArrowLeft: now - right,
      ArrowUp: now - 1,
      Home: 0,
      End: last,
    }[event.key];
    if (next === undefined || now < 0) return;
    event.preventDefault();
    choose(Math.min(last, Math.max(0, next)));
  });
}

/** Keep the page's files in the browser, so that it opens without a network the next time. */
export async function keep() {
  if (!("serviceWorker" in navigator) || !window.isSecureContext) return;
  if (new URL("./", location.href).pathname === "/") return; // it would keep all of this address
  try {
    await navigator.serviceWorker.register("sw.js");
    await navigator.serviceWorker.ready;
    at("offline").textContent = "The page is kept in this browser: it works without a network now.";
  } catch {
    // A private window may refuse to keep anything. The page works all the same.
  }
}
