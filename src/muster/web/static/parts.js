// What several pages show: a state, a verdict, counts as a bar, tables of few rows.
import { html, run, shell, runLink, useState, useEffect, act } from "./lib.js";
import { on } from "./live.js";
import * as format from "./format.js";

export const STATES = ["done", "failed", "stopped", "cancelled", "running", "waiting"];
const SAME = {
  ready: "waiting", open: "waiting", queued: "waiting", claimed: "running",
  "starting again": "running", refused: "failed", saved: "stopped", ok: "done",
  pruned: "stopped", paused: "stopped", rejected: "failed",
};
/** What the ledger calls otherwise than a reader would. */
const PLAIN = { ready: "waiting", claimed: "running" };
const MARKS = { done: "✓", failed: "✕", stopped: "◼", cancelled: "⊘", running: "▶", waiting: "○" };
const LEVELS = { good: "✓", working: "▶", bad: "✕", paused: "‖" };
const TABS = {
  overview: "Overview", tasks: "Tasks", search: "Search", training: "Training", map: "Map",
  errors: "Errors", about: "About",
};

/** Made here, and not an object that a run has brought. */
const isNode = (value) => typeof value === "object" && value !== null && value.constructor === undefined;

export function stateKind(word) {
  const kind = SAME[word] || word;
  return kind in MARKS ? kind : "waiting";
}

export function State({ word }) {
  const kind = stateKind(word);
  return html`<span class="state s-${kind}"><span class="mark" aria-hidden="true">${MARKS[kind]}</span> ${word in PLAIN ? PLAIN[word] : format.text(word)}</span>`;
}

export function Bar({ counts, small }) {
  const found = STATES.map((name) => [name, counts?.[name] || 0]);
  const total = found.reduce((sum, [, value]) => sum + value, 0);
  if (!total) return null;
  let at = 0;
  const parts = found.map(([name, value]) => {
    const width = (100 * value) / total, from = at;
    at += width;
    return value ? html`<rect x="${from}%" y="0" width="${width}%" height="100%" class="f-${name}" />` : null;
  });
  const worded = found.filter(([, value]) => value).map(([name, value]) => `${value} ${name}`).join(", ");
  const bar = html`<svg class="bar" role="img" aria-label=${worded}><title>${worded}</title>${parts}</svg>`;
  if (small) return bar;
  return html`<div class="progress">${bar}<ul class="counts">
    ${found.map(([name, value]) => value ? html`<li><${State} word=${name} /> <b>${format.many(value)}</b></li>` : null)}
  </ul></div>`;
}

export function levelOf(one) {
  const level = one?.verdict?.level || one?.level;
  if (level in LEVELS) return level;
  return { done: "good", running: "working", failed: "bad" }[one?.state] || "paused";
}

export function Verdict({ level, children }) {
  return html`<div class="verdict v-${level}" role="status">
    <span class="mark" aria-hidden="true">${LEVELS[level]}</span><p>${children}</p></div>`;
}

/** Whether its tasks are independent: each of them may be cancelled or tried again. */
export const hasTasks = ["sweep", "search"].includes(run?.kind);

/** The head of a run's pages; it follows the run while it works. */
export function Head({ here }) {
  const [now, set] = useState(run);
  useEffect(() => on("counts", (value) => set((was) => ({ ...was, ...value }))), []);
  const text = now.verdict?.text || now.verdict || now.state;
  const left = format.interval(now.eta_s);
  return html`<div id="head">
    <div class="title"><h1>${now.name}</h1><span class="kind">${format.text(now.kind)}</span>
      ${left !== "–" && html`<span class="left">${left} left</span>`}
      ${shell.actions && now.state === "running" && (hasTasks || now.kind === "map") && html`<${Action} label="Give a device back" action="release" ask="Give one device back, after the task in hand? The run goes on with the others." />`}
      ${shell.actions && now.state === "running" && html`<${Action} label="Cancel this run" action="cancel" ask="Cancel this run? What is done stays." />`}
      ${shell.actions && now.state !== "running" && now.counts?.failed > 0 && hasTasks && html`<${Action} label="Retry what failed" action="retry" ask="Try the failed tasks again, on this machine?" />`}
    </div>
    <${Verdict} level=${levelOf(now)}>${String(text)}</${Verdict}>
    <${Bar} counts=${now.counts} />
    <nav class="tabs" aria-label="Pages of this run">
      ${(now.tabs || ["overview"]).map((name) => html`<a href=${runLink(now.id, name)} key=${name}
        aria-current=${name === here || (name === "tasks" && here === "task") ? "page" : null}>${TABS[name] || name}${name === "errors" && now.counts?.failed ? html` <span class="badge">${format.many(now.counts.failed)}</span>` : null}</a>`)}
    </nav>
  </div>`;
}

/** A button that asks the run for something, as the command line does. */
export function Action({ label, action, ask, of }) {
  const [told, tell] = useState("");
  const press = async () => {
    if (!confirm(ask)) return;
    tell("Asked…");
    try { tell((await act(run.id, action, of)).said); }
    catch (error) { tell(error.message); }
  };
  return html`<span class="action"><button type="button" onClick=${press}>${label}</button> <span role="status">${told}</span></span>`;
}

export function Section({ title, note, children, id }) {
  return html`<section id=${id}><h2>${title}${note ? html` <small>${note}</small>` : null}</h2>${children}</section>`;
}

/** `heads`: [label, is it a number]. Rows: {key, cells, href?}. */
export function Table({ name, heads, rows, kind, empty }) {
  if (!rows.length) return empty ? html`<p class="empty">${empty}</p>` : null;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${name}><table class=${kind || ""}>
    <caption class="sr">${name}</caption>
    <thead><tr>${heads.map(([label, num]) => html`<th scope="col" class=${num ? "num" : null}>${label}</th>`)}</tr></thead>
    <tbody>${rows.map((cells, at) => html`<tr key=${at}>${cells.map((cell, n) => html`<td class="${heads[n]?.[1] ? "num" : ""} ${cell === "–" ? "none" : ""}" data-label=${heads[n]?.[0]}>${isNode(cell) ? cell : format.text(cell)}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

export function Facts({ pairs, wide }) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== "–");
  if (!known.length) return null;
  return html`<dl class="facts ${wide ? "wide" : ""}">${known.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${isNode(value) ? value : format.text(value)}</dd></div>`)}</dl>`;
}

export function Failure({ error }) {
  return error ? html`<p class="failure" role="alert">${error}</p>` : null;
}

/** Anything that comes as a list of objects, an object, or a text. */
export function Records({ name, value, empty }) {
  if (value === null || value === undefined || value.length === 0) return empty ? html`<p class="empty">${empty}</p>` : null;
  if (typeof value === "string") return html`<pre tabindex="0">${value}</pre>`;
  if (!Array.isArray(value)) return html`<${Facts} wide pairs=${Object.entries(value)} />`;
  if (typeof value[0] !== "object") return html`<ul>${value.map((one) => html`<li>${format.text(one)}</li>`)}</ul>`;
  const names = [...new Set(value.flatMap((one) => Object.keys(one || {})))];
  return html`<${Table} name=${name} heads=${names.map((key) => [key, typeof value[0][key] === "number"])}
    rows=${value.slice(0, 500).map((one) => names.map((key) => (typeof one[key] === "object" && one[key] ? format.text(one[key]) : one[key])))} />`;
}

/** What `muster report` shows too: tables, names with values, texts. */
export function Blocks({ blocks }) {
  return (blocks || []).map((one, n) => {
    const title = one.caption || "";
    const inner = one.kind === "table" ? html`<${Table} name=${title} heads=${one.columns.map((name) => [name])} rows=${one.rows} />`
      : one.kind === "facts" ? html`<${Facts} wide pairs=${one.pairs} />`
        : one.text ? html`<pre tabindex="0">${one.text}</pre>` : null;
    return inner && html`<${Section} key=${n} title=${title}>${inner}${one.note ? html`<p class="note">${one.note}</p>` : null}</${Section}>`;
  });
}

export function Copy({ value, label = "Copy" }) {
  const [told, tell] = useState(label);
  const copy = () => navigator.clipboard?.writeText(value).then(() => {
    tell("Copied");
    setTimeout(() => tell(label), 1500);
  }, () => tell("Select and copy it"));
  return html`<button type="button" class="copy" onClick=${copy}>${told}</button>`;
}

