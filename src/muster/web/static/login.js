// The token stands in the fragment, which no server and no log sees. It becomes a cookie here, and
// a key for actions, which stays with this port as the cookie does not.
const told = document.getElementById("told");
const token = decodeURIComponent(location.hash.slice(1));
// With the origin: a path such as //example.com alone would be another host.
const here = location.origin + (location.pathname === "/login" ? "/" : location.pathname) + location.search;

async function login() {
  history.replaceState(null, "", here);
  const answer = await fetch("/login", {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Muster": "1" },
    body: JSON.stringify({ token }),
  });
  if (answer.ok) {
    const found = await answer.json();
    try { localStorage.setItem("muster-act", found.act); } catch { /* no storage: it only shows */ }
  }
  if (answer.ok) location.replace(here);
  else told.textContent = "This token is wrong or out of date. Open the address that `muster web` prints.";
}

if (token) {
  told.textContent = "Logging in…";
  login().catch(() => { told.textContent = "The server does not answer. Is `muster web` still running?"; });
}
