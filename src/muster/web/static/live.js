// One stream of events for the tab. All that comes is a state or a place in a file, never a step:
// what comes twice changes nothing, and after a break the page asks for what it may have missed.
// A browser opens six connections to one server at most, so a tab that nobody sees lets its go.
const kinds = ["counts", "rows", "stale", "points", "log", "end"];
const listeners = new Map([...kinds, "status"].map((kind) => [kind, new Set()]));
let source = null, address = "", last = "", log = "", broken = false, opened = 0;

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
  if (!document.hidden) open();
}

/** The log that is looked at: only its lines are sent. */
export function watchLog(task) {
  if (log === String(task)) return;
  log = String(task);
  if (source) { close(); open(); }
}

/** A cookie of a server that was started anew, for the key that this page has of the token: true
    where it lets the page in, false where not, null where nobody answers. */
export async function comeBack() {
  let key = "";
  try { key = localStorage.getItem("muster-act") || ""; } catch { /* no storage */ }
  if (!key) return false;
  const answer = await fetch("/login", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ key }),
  }).catch(() => null);
  if (answer?.status === 403) localStorage.removeItem("muster-act"); // of another token
  return answer && answer.ok;
}

/** After a break: first the cookie, then the stream; not too often where one breaks at once. */
async function again() {
  if (source || document.hidden) return;
  const isIn = await comeBack();
  if (isIn === null) setTimeout(again, 1000);
  else setTimeout(() => { if (!source && !document.hidden) open(); }, isIn && Date.now() - opened > 5000 ? 0 : 3000);
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
  opened = Date.now();
  source.onerror = () => {
    broken = true;
    tell("status", source.readyState === EventSource.CLOSED ? "lost" : "waiting");
    close();
    again();
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
