// The token stands in the fragment, which no server and no log sees. It becomes a cookie here, and
// a key for actions, which stays with this port as the cookie does not. Who has that key already, and
// the cookie of a server that has ended, gets a new one for it.
const told = document.getElementById("told");
const token = decodeURIComponent(location.hash.slice(1));
const KEY = "muster-act", SOON_MS = 5000;

const kept = (work) => { try { return work(localStorage, sessionStorage); } catch { return null; } }; // no storage

async function login(asked) {
  const answer = await fetch("/login", {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Muster": "1" },
    body: JSON.stringify(asked),
  });
  if (!answer.ok) return false;
  const found = await answer.json();
  kept((local) => local.setItem(KEY, found.act));
  location.replace(location.pathname === "/login" ? "/" : location.pathname + location.search);
  return true;
}

async function enter() {
  if (token) {
    told.textContent = "Logging in…";
    history.replaceState(null, "", location.pathname + location.search);
    if (!await login({ token })) told.textContent = "This token is wrong or out of date. Open the address that `muster web` prints.";
    return;
  }
  const key = kept((local) => local.getItem(KEY));
  const wasJustHere = kept((_, session) => Date.now() - Number(session.getItem(KEY)) < SOON_MS); // no cookie stays
  if (!key || wasJustHere) return;
  kept((_, session) => session.setItem(KEY, String(Date.now())));
  if (!await login({ key })) kept((local) => local.removeItem(KEY)); // of another token
}

enter().catch(() => { told.textContent = "The server does not answer. Is `muster web` still running?"; });
