// Keeps the page's files in the browser. build.py fills in the list, and a version that changes with any of them.
const VERSION = "@VERSION@";
const FILES = "@FILES@";
const CACHE = `living-page ${self.registration.scope} ${VERSION}`;

self.addEventListener("install", (event) => {
  event.waitUntil(
    caches
      .open(CACHE)
      // Asked of the server again: the browser's own store may hold files of an older version.
      .then((cache) => cache.addAll(FILES.map((name) => new Request(name, { cache: "no-cache" })))),
  );
});

self.addEventListener("activate", (event) => {
  const ours = `living-page ${self.registration.scope} `; // other pages of this host have caches, too
  const old = (name) => name.startsWith(ours) && name !== CACHE;
  event.waitUntil(
    caches
      .keys()
      .then((names) => Promise.all(names.filter(old).map((name) => caches.delete(name))))
      .then(() => self.clients.claim()),
  );
});

self.addEventListener("fetch", (event) => {
  if (event.request.method !== "GET") return;
  const kept = caches.open(CACHE).then((cache) => cache.match(event.request, { ignoreSearch: true }));
  event.respondWith(kept.then((found) => found ?? fetch(event.request)));
});
