// One stream of events for the tab. All that comes is a state or a place in a file, never a step:
// what comes twice changes nothing, and after a break the page asks for what it may have missed.
// A browser opens six connections to one server at most, so a tab that nobody sees lets its go.
const kinds = ["counts", "rows", "stale", "points", "log", "end"];
const listeners = new Map([...kinds, "status"].map((kind) => [kind, new Set()]));
let source = null, address = "", last = "", log = "", broken = false;

export function on(kind, hear) {
  listeners.get(kind).add(hear);
  return () => listeners.get(kind).delete(hear);
}

const tell = (kind, value) => { for (const hear of [...listeners.get(kind)]) hear(value); };

/** Listens to `path`, from what the page shows: `place` is its number in the stream. */
export function begin(path, place) {
  address = path;
  last = place === null || place === undefined ? "" : String(place);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && !source) open();
    else if (document.hidden && source) { close(); broken = true; }
  });
  // The printed address may differ from this page's by its fragment alone: then the login page reads it.
  addEventListener("hashchange", () => { if (broken) location.reload(); });
  if (!document.hidden) open();
}

/** The log that is looked at: only its lines are sent. */
export function watchLog(task) {
  if (log === String(task)) return;
  log = String(task);
  if (source) { close(); open(); }
}

function close() {
  source?.close();
  source = null;
}

function open() {
  const asked = [log && `log=${encodeURIComponent(log)}`, last && `after=${encodeURIComponent(last)}`].filter(Boolean).join("&");
  source = new EventSource(asked ? `${address}${address.includes("?") ? "&" : "?"}${asked}` : address);
  source.onopen = () => {
    tell("status", "live");
    if (broken) { broken = false; tell("stale", {}); }
  };
  source.onerror = () => {
    broken = true;
    if (source.readyState === EventSource.CLOSED) { // refused: a server that was started again wants its token
      close();
      tell("status", "lost");
      setTimeout(() => { if (!source && !document.hidden) open(); }, 5000);
    } else tell("status", "waiting");
  };
  for (const kind of kinds) {
    source.addEventListener(kind, (event) => {
      if (event.lastEventId) last = event.lastEventId;
      let value = {};
      try { value = JSON.parse(event.data || "{}"); } catch { return; }
      tell(kind, value);
      if (kind === "end") tell("stale", {});
    });
  }
}
