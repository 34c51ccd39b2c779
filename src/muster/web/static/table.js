// The table of tasks: rows of one height, of which only those in sight are in the document.
import { html, first, inUrl, keepInUrl, link, questions, run, shell, taskLink, useEffect, useLayoutEffect, useRef, useState } from "./lib.js";
import { on } from "./live.js";
import { STATES, State } from "./parts.js";
import { Rows } from "./rows.js";
import * as format from "./format.js";

const HEIGHT = 30, AROUND = 12, USUAL_COLUMNS = 14, MOST_CHOSEN = 50;
const GROUPS = [["system", "Task"], ["setting", "Settings"], ["result", "Results"], ["metric", "Metrics"]];

const readView = () => {
  const params = inUrl();
  return {
    sort: params.get("sort") || "", desc: params.get("desc") === "1", filter: params.get("filter") || "",
    state: params.get("state") || "", cols: params.get("cols") || "", at: Number(params.get("at")) || 0,
  };
};

/** The columns that are shown: those of the URL, or the first ones of each group. */
function shownColumns(columns, cols) {
  const indexed = columns.map((column, at) => ({ ...column, at }));
  if (cols) {
    const wanted = new Set(cols.split(",").map(decodeURIComponent));
    return indexed.filter((column) => wanted.has(column.key));
  }
  const rank = { system: 0, setting: 1, result: 2, metric: 3 };
  const usual = indexed.filter(({ key, group }) => group !== "system" || USUAL.has(key));
  const found = (usual.length ? usual : indexed).slice().sort((a, b) => order(a) - order(b) || rank[a.group] - rank[b.group] || a.at - b.at);
  return found.slice(0, USUAL_COLUMNS);
}
const USUAL = new Set(["number", "state", "seconds", "attempts"]);
const order = ({ key, group }) => (key === "number" ? -2 : key === "state" ? -1 : group === "system" ? 9 : 0);

/** Widths in pixels from what the first rows hold, so that no column moves while one scrolls. */
function widths(columns, rows) {
  return columns.map((column) => {
    let most = column.label.length + 3;
    for (let n = 0; n < 100; n += 1) {
      const row = rows.row(n);
      if (row) most = Math.max(most, column.key === "state" ? 11 : cellText(column, row.cells[column.at]).length);
    }
    return Math.min(320, Math.max(64, Math.round(most * 7.4) + 22));
  });
}

export function TaskTable() {
  const [, again] = useState(0);
  const [view, setView] = useState(readView);
  const [cursor, setCursor] = useState(-1);
  const [chosen, setChosen] = useState(() => new Set());
  const [top, setTop] = useState(view.at * HEIGHT);
  const [tall, setTall] = useState(600);
  const here = useRef(-1);  // the cursor, also for a key that comes before the next picture
  const place = useRef(null), grid = useRef(null), store = useRef(null), timer = useRef(0);
  if (!store.current) {
    store.current = new Rows(`run/${run.id}/tasks`, () => again((n) => n + 1), first, view);
  }
  const rows = store.current;

  const change = (next) => {
    const now = { ...view, at: 0, ...next };
    setView(now);
    here.current = -1;
    setCursor(-1);
    keepInUrl({ ...now, desc: now.desc ? "1" : "", at: "" });
    if (!("cols" in next)) {
      place.current.scrollTop = 0;
      rows.see(now);
    }
  };
  useEffect(() => {
    const offs = [on("rows", (news) => rows.patch(news)), on("stale", () => rows.refresh()), on("counts", () => rows.refresh())];
    const back = () => { const now = readView(); setView(now); rows.see(now); };
    addEventListener("popstate", back);
    return () => { offs.forEach((off) => off()); removeEventListener("popstate", back); rows.close(); };
  }, []);
  useLayoutEffect(() => {
    const measure = () => setTall(place.current.clientHeight || 600);
    measure();
    place.current.scrollTop = view.at * HEIGHT;
    const watch = new ResizeObserver(measure);
    watch.observe(place.current);
    return () => watch.disconnect();
  }, []);

  const low = Math.max(0, Math.floor(top / HEIGHT) - AROUND);
  const high = Math.min(rows.total, Math.ceil((top + tall) / HEIGHT) + AROUND);
  useEffect(() => rows.want(low, high));
  const scrolled = () => {
    const now = place.current.scrollTop;
    if (Math.abs(now - top) >= HEIGHT * 4 || now === 0) setTop(now);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => { setTop(now); keepInUrl({ at: Math.round(now / HEIGHT) || "" }); }, 150);
  };

  const columns = shownColumns(rows.columns, view.cols);
  const wide = widths(columns, rows);
  const go = (next) => {
    const to = Math.max(0, Math.min(rows.total - 1, next));
    here.current = to;
    setCursor(to);
    const box = place.current, head = HEIGHT + 2;
    if (to * HEIGHT < box.scrollTop) box.scrollTop = to * HEIGHT;
    else if ((to + 1) * HEIGHT + head > box.scrollTop + box.clientHeight) box.scrollTop = (to + 1) * HEIGHT + head - box.clientHeight;
  };
  const pick = (to) => { here.current = to; setCursor(to); };
  const choose = (key) => setChosen((was) => {
    const now = new Set(was);
    if (!now.delete(key) && now.size < MOST_CHOSEN) now.add(key);
    return now;
  });
  const keys = {
    j: () => go(here.current + 1), ArrowDown: () => go(here.current + 1), k: () => go(Math.max(0, here.current - 1)), ArrowUp: () => go(Math.max(0, here.current - 1)),
    Home: () => go(0), End: () => go(rows.total - 1),
    PageDown: () => go(here.current + Math.floor(tall / HEIGHT) - 2), PageUp: () => go(here.current - Math.floor(tall / HEIGHT) + 2),
    Enter: () => { const row = rows.row(here.current); if (row) location.href = taskLink(run.id, row.key); },
    x: () => { const row = rows.row(here.current); if (row) choose(row.key); },
  };
  useLayoutEffect(() => {
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, button, a, summary, dialog, textarea")) return;
      const inside = grid.current?.contains(event.target);
      if (!(event.key in keys) || (!inside && !"jkx".includes(event.key) && !(event.key === "Enter" && here.current >= 0))) return;
      event.preventDefault();
      keys[event.key]();
      grid.current.focus({ preventScroll: true });
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  });

  const sortBy = (key) => change(view.sort !== key ? { sort: key, desc: false } : view.desc ? { sort: "", desc: false } : { sort: key, desc: true });
  const shown = [];
  for (let at = low; at < high; at += 1) shown.push(at);
  return html`<div class="tasks">
    <${Tools} view=${view} change=${change} rows=${rows} columns=${columns} chosen=${chosen} clear=${() => setChosen(new Set())} />
    <div class="grid" ref=${place} onScroll=${scrolled} style=${{ maxHeight: `${Math.max(rows.total, 4) * HEIGHT + 52}px` }}>
      <table role="grid" tabindex="0" ref=${grid} aria-label="Tasks" aria-rowcount=${rows.total + 1} aria-colcount=${columns.length + 1}
        aria-activedescendant=${cursor >= low && cursor < high ? `row-${cursor}` : null} aria-busy=${rows.loading ? "true" : "false"}
        style=${{ width: `max(100%, ${wide.reduce((sum, one) => sum + one, 36)}px)` }}>
        <colgroup><col style=${{ width: "36px" }} />${wide.map((one, n) => html`<col key=${columns[n].key} style=${{ width: one + "px" }} />`)}</colgroup>
        <thead><tr role="row" aria-rowindex="1"><th role="columnheader" scope="col"><span class="sr">Chosen to compare</span></th>
          ${columns.map((column) => html`<th key=${column.key} role="columnheader" scope="col" class="${column.numeric ? "num" : ""} g-${column.group}" aria-sort=${view.sort === column.key ? (view.desc ? "descending" : "ascending") : "none"}>
            <button type="button" title=${column.label} onClick=${() => sortBy(column.key)}>${column.label}<span class="arrow" aria-hidden="true">${view.sort === column.key ? (view.desc ? "▼" : "▲") : ""}</span></button></th>`)}
        </tr></thead>
        <tbody>
          ${low > 0 && html`<tr key="above" class="space" aria-hidden="true"><td style=${{ height: low * HEIGHT + "px" }}></td></tr>`}
          ${shown.map((at) => html`<${Row} key=${at} at=${at} row=${rows.row(at)} columns=${columns} isCursor=${at === cursor} isChosen=${chosen.has(rows.row(at)?.key)} choose=${choose} pick=${pick} />`)}
          ${high < rows.total && html`<tr key="below" class="space" aria-hidden="true"><td style=${{ height: (rows.total - high) * HEIGHT + "px" }}></td></tr>`}
        </tbody>
      </table>
      ${!rows.total && html`<p class="empty">${view.filter || view.state ? "No task matches." : "There are no tasks yet."}</p>`}
    </div>
  </div>`;
}

const cellText = ({ key, group }, value) => (group === "system" && (key === "started" || key === "ended") ? format.moment(value) : format.text(value));

function Row({ at, row, columns, isCursor, isChosen, choose, pick }) {
  if (!row) return html`<tr role="row" aria-rowindex=${at + 2} class="coming"><td colspan=${columns.length + 1} role="gridcell">…</td></tr>`;
  const label = format.text(row.cells[columns[0]?.at] ?? row.key);
  return html`<tr role="row" id="row-${at}" aria-rowindex=${at + 2} aria-selected=${isChosen ? "true" : "false"} class=${isCursor ? "cursor" : ""} onClick=${() => pick(at)}>
    <td role="gridcell"><input type="checkbox" tabindex="-1" checked=${isChosen} aria-label="Compare ${label}" onChange=${() => choose(row.key)} /></td>
    ${columns.map((column, n) => {
      const value = row.cells[column.at];
      const shown = column.key === "state" ? html`<${State} word=${value} />` : cellText(column, value);
      return html`<td key=${column.key} role="gridcell" class=${column.numeric ? "num" : null} title=${typeof value === "string" && value.length > 24 ? value : null}>${n === 0 ? html`<a href=${taskLink(run.id, row.key)} tabindex="-1">${shown}</a>` : shown}</td>`;
    })}
  </tr>`;
}

function Tools({ view, change, rows, columns, chosen, clear }) {
  const states = [...new Set([...STATES, ...(view.state ? [view.state] : [])])];
  const shown = new Set(columns.map((column) => column.key));
  const toggle = (key) => {
    const now = rows.columns.map((column) => column.key).filter((one) => (one === key ? !shown.has(key) : shown.has(one)));
    change({ cols: now.map(encodeURIComponent).join(",") });
  };
  return html`<div class="tools">
    <label class="search"><span class="sr">Filter the tasks</span>
      <input type="search" data-search placeholder='Filter: lr>0.01 state=failed "out of memory"' value=${view.filter} spellcheck="false"
        onInput=${(event) => change({ filter: event.target.value })} /></label>
    <label><span class="sr">State</span><select value=${view.state} onChange=${(event) => change({ state: event.target.value })}>
      <option value="">every state</option>${states.map((name) => html`<option value=${name} selected=${view.state === name}>${name}</option>`)}
    </select></label>
    <details class="menu"><summary>Columns</summary><div>
      ${GROUPS.map(([group, title]) => {
        const found = rows.columns.filter((column) => column.group === group);
        return found.length ? html`<fieldset key=${group}><legend>${title}</legend>${found.map((column) => html`<label key=${column.key}><input type="checkbox" checked=${shown.has(column.key)} onChange=${() => toggle(column.key)} /> ${column.label}</label>`)}</fieldset>` : null;
      })}
      ${view.cols && html`<button type="button" onClick=${() => change({ cols: "" })}>The usual ones</button>`}
    </div></details>
    <span class="total" role="status">${rows.error ? html`<span class="failure">${rows.error}</span>` : `${format.many(rows.total)} ${rows.total === 1 ? "task" : "tasks"}`}</span>
    ${shell.live && html`<span class="note">Save as ${["csv", "json"].map((kind) => html`<a key=${kind} download href="/api/run/${run.id}/tasks.${kind}?${questions({ sort: view.sort, desc: view.desc, filter: view.filter, state: view.state })}">${kind.toUpperCase()}</a> `)}</span>`}
    ${shell.live && chosen.size > 0 && html`<span class="chosen"><a class="button" href=${link("compare") + "?" + questions({ run: run.id, task: [...chosen] })}>Compare ${chosen.size}</a> <button type="button" onClick=${clear}>Clear</button></span>`}
  </div>`;
}

