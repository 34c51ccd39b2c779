// Puts the page together: its head, its content, the stream, the keys.
import { html, page, render, run, shell, useEffect, useLayoutEffect, useRef, useState } from "./lib.js";
import { begin, on } from "./live.js";
import { Head } from "./parts.js";
import { TaskTable } from "./table.js";
import * as pages from "./pages.js";

const CONTENT = {
  runs: pages.Runs, overview: pages.Overview, tasks: TaskTable, task: pages.Task, search: pages.Search,
  training: pages.Training, map: pages.MapPage, errors: pages.Errors, about: pages.About,
  devices: pages.Devices, compare: pages.Compare,
};
const KEYS = [
  ["/", "go to the filter or the search"], ["j", "next row"], ["k", "row before"], ["Enter", "open the row"],
  ["x", "choose the row, to compare it"], ["?", "show or hide these keys"], ["Esc", "leave"],
];

function Keys() {
  const box = useRef(null);
  useLayoutEffect(() => {
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const isTyping = event.target.closest?.("input, select, textarea");
      if (event.key === "Escape" && isTyping) event.target.blur();
      if (isTyping) return;
      if (event.key === "?") { if (box.current.open) box.current.close(); else box.current.showModal(); }
      else if (event.key === "/") document.querySelector("[data-search]")?.focus();
      else if ((event.key === "j" || event.key === "k") && page !== "tasks") step(event.key === "j" ? 1 : -1);
      else return;
      event.preventDefault();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
  return html`<dialog ref=${box} aria-label="Keys"><h2>Keys</h2><dl>${KEYS.map(([key, does]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${does}</dd></div>`)}</dl><button type="button" onClick=${() => box.current.close()}>Close</button></dialog>
    <button type="button" class="help" aria-label="Show the keys" title="Keys (?)" onClick=${() => box.current.showModal()}>?</button>`;
}

function step(by) {
  const rows = [...document.querySelectorAll("a[data-row]")];
  const at = rows.indexOf(document.activeElement);
  rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? 0 : at + by))]?.focus();
}

const WORDS = { live: "live", gone: "the run is gone", waiting: "reconnecting…", lost: "connection lost: open the address that muster web has printed", copy: "a copy" };

function Live() {
  const [status, set] = useState(shell.live ? "waiting" : "copy");
  useEffect(() => on("status", set), []);
  useEffect(() => on("stale", ({ what }) => { if (what === "gone") set("gone"); }), []);
  return html`<span class="dot d-${status}" aria-hidden="true"></span>${WORDS[status]}`;
}

const Page = CONTENT[page];
if (Page) {
  const content = document.getElementById("content");
  content.textContent = "";
  render(html`${run && html`<${Head} here=${page} />`}<div id="body"><${Page} /></div><${Keys} />`, content);
  render(html`<${Live} />`, document.getElementById("live"));
  if (shell.live) begin(run ? `/api/stream?run=${run.id}` : "/api/stream", run?.seq);
  document.documentElement.dataset.ready = "1";
}
