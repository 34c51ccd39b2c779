// The pages whose content is more than a table of tasks.
import { first, html, inUrl, link, questions, run, runLink, shell, taskLink, useAnswer, useEffect, useState, useView } from "./lib.js";
import { on } from "./live.js";
import { Action, Bar, Copy, Facts, Failure, Records, Blocks, Section, State, Table, Verdict, hasTasks, levelOf } from "./parts.js";
import { Chunks, Gantt, History, Strip } from "./charts.js";
import { Curves } from "./curves.js";
import { Log } from "./log.js";
import { Parallel, brushes, passes } from "./parallel.js";
import { Pareto, Slices } from "./scatter.js";
import * as format from "./format.js";

const toTask = (key) => { location.href = taskLink(run.id, key); };
const TaskLink = ({ task, children }) => (task === null || task === undefined ? children ?? null : html`<a data-row href=${taskLink(run.id, task)}>${children ?? format.text(task)}</a>`);

export function Runs() {
  const { value, error } = useAnswer("runs", {}, first, 5000, ({ runs = [] }) => runs.some((one) => one.kind && one.bytes === null));
  const [word, setWord] = useView("filter");
  const [state, setState] = useView("state");
  const [chosen, setChosen] = useState([]);
  const choose = (id) => setChosen((was) => (was.includes(id) ? was.filter((one) => one !== id) : [...was, id].slice(-50)));
  const all = value.runs || [];
  const found = all.filter((one) => (!state || one.state === state) && (!word || `${one.name} ${one.kind} ${one.state} ${one.path} ${one.verdict?.text ?? one.verdict}`.toLowerCase().includes(word.toLowerCase())));
  const counts = state ? { [state]: 0 } : {};
  for (const one of all) counts[one.state] = (counts[one.state] || 0) + 1;
  const unread = counts.unreadable || 0, failed = all.filter((one) => levelOf(one) === "bad").length - unread, going = all.filter((one) => one.state === "running").length;
  const told = [going && `${format.many(going)} at work`, failed && `${format.many(failed)} with failures`, unread && `${format.many(unread)} that cannot be read`].filter(Boolean).join(", ");
  const words = `Of ${format.many(all.length)} ${all.length === 1 ? "run" : "runs"}: ${told || "none at work, none with failures"}.`;
  return html`<h1>Runs</h1>
    ${all.length ? html`<${Verdict} level=${failed || unread ? "bad" : going ? "working" : "good"}>${words}</${Verdict}>` : null}
    <div class="tools"><label class="search"><span class="sr">Filter the runs</span><input type="search" data-search placeholder="Filter by name, kind or folder" value=${word} onInput=${(event) => setWord(event.target.value)} /></label>
      <label><span class="sr">State</span><select onChange=${(event) => setState(event.target.value)}><option value="">every state</option>${Object.keys(counts).sort().map((name) => html`<option value=${name} selected=${name === state}>${name} (${counts[name]})</option>`)}</select></label>
      ${shell.live && chosen.length > 1 ? html`<span class="chosen"><a class="button" href=${link("compare") + "?" + questions({ run: chosen })}>Compare ${chosen.length}</a> <button type="button" onClick=${() => setChosen([])}>Clear</button></span>` : null}</div>
    <${Failure} error=${error} />
    <${RunTable} empty=${all.length ? "No run matches." : "There are no runs here yet."}
      heads=${[["Run"], ["State"], ["Progress"], ["Done", true], ["Left", true], ["Best", true], ["On"], ["GPU hours", true], ["Size", true], ["Changed", true]]}
      rows=${found.map((one) => [
        html`<span class="run-name">${shell.live && one.kind ? html`<input type="checkbox" checked=${chosen.includes(one.id)} aria-label="Compare ${one.name}" onChange=${() => choose(one.id)} /> ` : null}<a data-row href=${runLink(one.id)}>${one.name}</a> <span class="kind">${format.text(one.kind)}</span><small>${one.verdict?.text ?? one.verdict}</small></span>`,
        html`<${State} word=${one.state} />`,
        html`<span class="cell-bar">${one.counts?.total ? html`<${Bar} small counts=${one.counts} />` : typeof one.progress === "number" ? html`<${Bar} small counts=${{ done: one.progress, waiting: 1 - one.progress }} />` : "–"}</span>`,
        one.counts?.total ? `${format.many(one.counts.done)}${one.kind === "search" ? "" : ` / ${format.many(one.counts.total)}`}` : typeof one.progress === "number" ? `${Math.floor(one.progress * 100)} %` : "–",
        format.interval(one.eta_s),
        one.best ? html`<span>${one.best.name} <b>${format.number(one.best.value)}</b></span>` : "–",
        one.devices?.length ? html`<span title=${one.devices.join(", ")}>${one.devices.slice(0, 2).join(", ")}${one.devices.length > 2 ? ` and ${one.devices.length - 2} more` : ""}</span>` : "–",
        typeof one.gpu_hours === "number" ? format.number(+one.gpu_hours.toPrecision(3)) : "–",
        format.bytes(one.bytes),
        html`<${Ago} when=${one.changed} />`,
      ])} />`;
}

/** Columns of which no run knows anything are left out. */
function RunTable({ heads, rows, empty }) {
  const known = heads.map((_, n) => n < 4 || rows.some((cells) => cells[n] !== "–"));
  const keep = (list) => list.filter((_, n) => known[n]);
  return html`<${Table} kind="runs" name="Runs" empty=${empty} heads=${keep(heads)} rows=${rows.map(keep)} />`;
}

function Ago({ when }) {
  const [, again] = useState(0);
  useEffect(() => { const timer = setInterval(() => again((n) => n + 1), 10_000); return () => clearInterval(timer); }, []);
  return html`<time title=${format.moment(when)}>${format.ago(when)}</time>`;
}

export function Overview() {
  const { value, error } = useAnswer(`run/${run.id}`, {}, first);
  const [now, set] = useState({});
  useEffect(() => on("counts", set), []);
  useEffect(() => { set({}); }, [value]); // the newer of the two is shown
  const all = { ...value, ...now };
  const { best, budget, slots = [], devices = [], alerts = [], recent } = all;
  const causes = all.verdict?.causes || [];
  return html`<${Failure} error=${error} />
    ${causes.length ? html`<${Section} title="Why tasks failed"><${Table} kind="causes" name="Causes" heads=${[["Tasks", true], ["Cause"]]} rows=${causes.map((one) => [one.count, html`<${TaskLink} task=${one.task}>${one.text}</${TaskLink}>`])} /></${Section}>` : null}
    ${alerts.length ? html`<ul class="alerts">${alerts.map((one) => html`<li class="a-${one.level}">${one.text}</li>`)}</ul>` : null}
    <${Facts} pairs=${[
      ["Left", format.interval(all.eta_s)], ["Rate", typeof all.rate === "number" ? `${format.number(all.rate)} / s` : null], [all.state === "running" ? "Since" : "Took", format.duration(all.seconds)],
      ["Best", best ? html`<span><b>${format.number(best.value)}</b> ${best.name} ${best.task !== undefined && best.task !== null ? html`<${TaskLink} task=${best.task}>see the task</${TaskLink}>` : null}</span>` : null], ["Folder", all.path],
    ]} />
    ${budget ? html`<${Section} title="Budget"><${Budget} parts=${budget} /></${Section}>` : null}
    ${(run.tabs || []).includes("training") ? html`<${FirstCurves} />` : null}
    ${slots.some((slot) => slot.bars.length) ? html`<${Section} title="Where and when" note="a line for each slot, a bar for each attempt"><${Gantt} slots=${slots} open=${(run.tabs || []).includes("tasks") ? toTask : null} /></${Section}>` : null}
    ${devices.length ? html`<${Section} title="Devices"><div class="cards small">${devices.map((one, n) => html`<figure class="card" key=${n}><figcaption>${one.label}<span class="note">${[typeof one.busy === "number" && `${Math.round(one.busy * 100)} % busy`, typeof one.memory_mib === "number" && `${format.mib(one.memory_mib)}${one.total_mib ? ` of ${format.mib(one.total_mib)}` : ""}`].filter(Boolean).join(", ")}</span></figcaption><${Strip} history=${one.history} label="How busy ${one.label} was" /></figure>`)}</div></${Section}>` : null}
    ${recent?.length ? html`<${Section} title="Most recent"><${Recent} recent=${recent} /></${Section}>` : null}`;
}

const UNITS = { trials: ["Trials", format.many], seconds: ["Time", format.duration], gpu_hours: ["GPU hours", format.number], cost: ["Cost", format.number] };

/** What a search has spent of what it may, a bar for each limit. */
function Budget({ parts }) {
  return html`<table class="weights"><caption class="sr">Budget</caption><thead class="sr"><tr><th scope="col">Of what</th><th scope="col">Share</th><th scope="col">Spent</th></tr></thead><tbody>${Object.entries(parts).map(([name, { spent, limit }]) => {
    const [label, say] = UNITS[name] || [name, format.number];
    return html`<tr key=${name}><th scope="row">${label}</th><td>${limit ? html`<svg class="bar" aria-hidden="true"><rect width="${Math.min(100, (100 * spent) / limit)}%" height="100%" class="f-running" /></svg>` : null}</td><td class="num">${say(+Number(spent).toPrecision(4))}${limit === null ? "" : ` of ${say(limit)}`}</td></tr>`;
  })}</tbody></table>`;
}

/** Of a training the first curves; its own page has them all. */
function FirstCurves() {
  const { value } = useAnswer(`run/${run.id}/training`, {}, null);
  if (!value?.curves?.length) return null;
  return html`<${Section} title="Curves" note=${html`<a href=${runLink(run.id, "training")}>all of them</a>`}><${Curves} names=${value.curves.slice(0, 4)} /></${Section}>`;
}

function Recent({ recent }) {
  return html`<${Table} name="Most recent" heads=${[["Task"], ["State"], ["Took", true], ["Ended", true]]} rows=${recent.map((one) => [html`<${TaskLink} task=${one.key}>${one.name}</${TaskLink}>`, html`<${State} word=${one.state} />`, format.duration(one.seconds), html`<${Ago} when=${one.ended} />`])} />`;
}

export function Task() {
  const { value, error } = useAnswer(`run/${run.id}/task/${encodeURIComponent(first.key)}`, {}, first);
  const { settings = {}, result = {}, attempts = [], files = [], metrics = [] } = value;
  const [news, setNews] = useState([]);
  // A metric that a running task logs for the first time while somebody looks.
  useEffect(() => on("points", ({ series }) => setNews((was) => [...new Set([...was, ...series.filter((one) => String(one.task) === String(first.key)).map((one) => one.name)])])), []);
  const names = [...new Set([...metrics, ...news])];
  const fields = [...new Set(attempts.flatMap(Object.keys))];
  const shown = (name, cell) => (name === "outcome" || name === "state" ? html`<${State} word=${cell} />` : name === "started" || name === "ended" ? format.moment(cell) : name === "seconds" ? format.duration(cell) : cell);
  return html`<h2 class="task">${value.name ?? value.key} <${State} word=${value.state} />
      ${shell.actions && hasTasks && ["ready", "claimed"].includes(value.state) && html` <${Action} label="Cancel this task" action="cancel" of=${{ task: value.key }} ask="Cancel this task? The others go on." />`}</h2>
    <${Failure} error=${error} />
    ${value.error && html`<div class="error"><p>${value.error.text}</p>${value.error.trace && html`<details open><summary>Traceback</summary><pre tabindex="0">${value.error.trace}</pre></details>`}</div>`}
    <${Facts} pairs=${[["Took", format.duration(value.seconds)], ["All attempts", format.duration(value.all_seconds)], ["GPU time", format.duration(value.gpu_seconds)], ["Energy", typeof value.energy_wh === "number" ? `${format.number(value.energy_wh)} Wh` : null], ["Peak memory", format.mib(value.peak_mib)], ["Key", html`<code>${value.key}</code>`]]} />
    <div class="two"><${Section} title="Settings"><${Facts} wide pairs=${Object.entries(settings)} /></${Section}>
    ${Object.keys(result || {}).length ? html`<${Section} title="Result"><${Facts} wide pairs=${Object.entries(result)} /></${Section}>` : null}</div>
    ${names.length ? html`<${Section} title="Curves"><${Curves} names=${names} tasks=${[String(value.key)]} /></${Section}>` : null}
    <${Section} title="Log"><${Log} task=${value.key} /></${Section}>
    ${attempts.length ? html`<${Section} title="Attempts"><${Table} name="Attempts" heads=${fields.map((name) => [name, typeof attempts[0][name] === "number"])} rows=${attempts.map((one) => fields.map((name) => shown(name, one[name])))} /></${Section}>` : null}
    ${files.length ? html`<${Section} title="Files"><${Table} name="Files" heads=${[["File"], ["Size", true]]} rows=${files.map((one) => [html`<a href=${one.href} download>${one.name}</a>`, format.bytes(one.bytes)])} /></${Section}>` : null}
    ${value.command && html`<${Section} title="To read its log in a terminal"><div class="command"><pre tabindex="0">${value.command}</pre><${Copy} value=${value.command} /></div></${Section}>`}`;
}

export function Search() {
  const { value, error } = useAnswer(`run/${run.id}/search`, {}, first);
  const [brush] = useView("brush");
  const [hovered, hover] = useState(null);
  const [weigh, setWeigh] = useView("importance");
  const weighed = useAnswer(weigh ? `run/${run.id}/search` : "", { importance: 1 }, null);
  const importance = weighed.value?.importance;
  const { goals = [], history = [], parallel, pareto, rungs = [], budget } = value;
  const dims = parallel?.dims || [], front = new Set((pareto || []).map((one) => one?.task ?? one));
  const map = brushes(brush);
  const rows = (parallel?.rows || []).filter((row) => passes(row, dims, map));
  const way = goals[0]?.direction || "minimise", sign = way.startsWith("max") ? -1 : 1;
  const ranked = rows.slice().sort((a, b) => (a.value ?? Infinity * sign) * sign - (b.value ?? Infinity * sign) * sign);
  return html`<${Failure} error=${error} />
    ${goals.length ? html`<p class="note">The goal is to ${goals.map((one) => `${one.direction} ${one.name}`).join(" and to ")}.</p>` : null}
    ${history.length ? null : html`<p class="empty">No trial has ended yet.</p>`}
    ${history.length ? html`<${Section} title="How it went" note="each trial, and the best so far"><${History} history=${history} goal=${way} open=${toTask} /></${Section}>` : null}
    ${dims.length ? html`<${Section} title="Parameters"><${Parallel} dims=${dims} rows=${parallel.rows} hovered=${hovered} /></${Section}>` : null}
    ${goals.length && dims.length && rows.some((row) => typeof row.value === "number") ? html`<${Section} title="Slices" note="each parameter against ${goals[0].name}; the best trial stands out"><${Slices} dims=${dims} rows=${rows} goal=${goals[0]} open=${toTask} /></${Section}>` : null}
    ${goals.length > 1 && history.length ? html`<${Section} title="Goals" note="the trials that no other beats in every goal stand out"><${Pareto} goals=${goals} history=${history} front=${front} dims=${dims} rows=${parallel?.rows || []} open=${toTask} /></${Section}>` : null}
    ${ranked.length ? html`<${Section} title="Trials" note="the best ${Math.min(100, ranked.length)} of ${ranked.length}"><div onMouseLeave=${() => hover(null)} onMouseOver=${(event) => hover(ranked[event.target.closest("tbody tr")?.rowIndex - 1]?.task ?? null)}>
      <${Table} kind="trials" name="Trials" heads=${[["Trial"], ["State"], [goals[0]?.name || "value", true], ...dims.map((dim) => [dim.name, !dim.values])]}
        rows=${ranked.slice(0, 100).map((row) => [html`<span><${TaskLink} task=${row.task} />${front.has(row.task) ? html` <span class="kind">front</span>` : null}</span>`, html`<${State} word=${row.state} />`, format.number(row.value), ...row.cells])} /></div></${Section}>` : null}
    ${!weigh && shell.live && history.length ? html`<${Section} title="Importance"><button type="button" onClick=${() => setWeigh("1")}>Compute which parameters matter</button> <span class="note">takes some seconds</span></${Section}>` : null}
    ${weigh && !importance?.length ? html`<${Section} title="Importance"><p class="note" role="status">${weighed.error || (weighed.value ? "Too few trials have ended to say." : html`<progress aria-hidden="true"></progress> The importance is being computed; it takes some seconds.`)}</p></${Section}>` : null}
    ${importance?.length ? html`<${Section} title="Importance" note="the share of the differences that each parameter explains"><table class="weights"><caption class="sr">Importance</caption><thead class="sr"><tr><th scope="col">Parameter</th><th scope="col">Share</th><th scope="col">Percent</th></tr></thead><tbody>${importance.map((one) => html`<tr><th scope="row">${one.name}</th><td><svg class="bar" aria-hidden="true"><rect width="${100 * Math.max(0, one.value ?? 0)}%" height="100%" class="f-running" /></svg></td><td class="num">${(100 * (one.value ?? 0)).toFixed(1)} %</td></tr>`)}</tbody></table></${Section}>` : null}
    ${rungs.length ? html`<${Section} title="Rungs" note="who was stopped where, and on what evidence">${rungs.map((one) => html`<details key=${one.step}><summary>Step ${one.step}: ${one.reached} reached it, ${one.stopped} stopped, ${one.promoted} went on</summary><${Records} name="Rung ${one.step}" value=${one.rows} /></details>`)}</${Section}>` : null}
    ${budget && Object.keys(budget).length ? html`<${Section} title="Budget"><${Budget} parts=${budget} /></${Section}>` : null}`;
}

export function Training() {
  const { value, error } = useAnswer(`run/${run.id}/training`, {}, first);
  const { curves = [], ranks = [], stall, checkpoints = [], evaluations = [], figures = [] } = value;
  const phases = [...new Set(ranks.flatMap((one) => Object.keys(one.phases || {})))];
  const line = (name) => `f-phase-${phases.indexOf(name) % 8}`;
  const strip = (found) => {
    const total = Object.values(found || {}).reduce((sum, one) => sum + (one || 0), 0);
    let at = 0;
    return total ? html`<svg class="bar" role="img" aria-label=${phases.map((name) => `${name} ${format.duration(found[name])}`).join(", ")}>${phases.map((name) => { const from = at, wide = (100 * (found[name] || 0)) / total; at += wide; return html`<rect x="${from}%" width="${wide}%" height="100%" class=${line(name)}><title>${name}: ${format.duration(found[name])}</title></rect>`; })}</svg>` : "–";
  };
  return html`<${Failure} error=${error} />
    ${stall && html`<div class="error" role="alert"><p>${stall.text}</p>${stall.stacks && html`<details><summary>Where each rank stands</summary><${Records} name="Stacks" value=${stall.stacks} /></details>`}</div>`}
    <${Facts} pairs=${figures.map((one) => [one.name, `${format.number(one.value)} ${(one.unit || "").replace("1/s", "/ s")}`])} />
    ${curves.length ? html`<${Section} title="Curves"><${Curves} names=${curves} /></${Section}>` : null}
    ${ranks.length ? html`<${Section} title="Ranks" note=${phases.length ? "how each spends its time" : ""}>
      ${ranks.filter((one) => one.error).map((one) => html`<p class="failure">Rank ${one.rank}: ${one.error}</p>`)}
      ${phases.length ? html`<p class="legend">${phases.map((name) => html`<span><svg class="swatch" aria-hidden="true"><rect width="16" height="10" class=${line(name)} /></svg>${name}</span>`)}</p>` : null}
      <${Table} name="Ranks" heads=${[["Rank", true], ["Where"], ["State"], ...(phases.length ? [["Time"]] : []), ...phases.map((name) => [name, true])]} rows=${ranks.map((one) => [one.rank, one.host, html`<${State} word=${one.state} />`, ...(phases.length ? [html`<span class="cell-bar">${strip(one.phases)}</span>`] : []), ...phases.map((name) => format.duration(one.phases?.[name]))])} /></${Section}>` : null}
    ${evaluations.length ? html`<${Section} title="Evaluations"><${Records} name="Evaluations" value=${evaluations} /></${Section}>` : null}
    ${checkpoints.length ? html`<${Section} title="Checkpoints"><${Table} name="Checkpoints" heads=${[["Step", true], ["Size", true], ["Saved"], [""]]} rows=${checkpoints.map((one) => [one.step, format.bytes(one.bytes), format.moment(one.when), one.best ? "the best" : ""])} /></${Section}>` : null}
    <${Blocks} blocks=${value.blocks} />
    ${ranks.length && shell.live ? html`<${Section} title="Log"><${RankLog} ranks=${ranks} /></${Section}>` : null}`;
}

function RankLog({ ranks }) {
  const [rank, setRank] = useView("rank", String(ranks[0].rank));
  return html`<div class="tools">${ranks.map((one) => html`<button type="button" aria-pressed=${String(one.rank) === rank ? "true" : "false"} onClick=${() => setRank(String(one.rank))}>Rank ${one.rank}</button>`)}</div><${Log} key=${rank} task=${rank} />`;
}

export function MapPage() {
  const { value, error } = useAnswer(`run/${run.id}/map`, {}, first);
  const { stages = [], curves = [], chunks = [], rejects = [] } = value;
  const states = [...new Set(chunks.map((one) => one.state))], many = chunks[0]?.count;
  const named = [["in", "In"], ["out", "Out"], ["rejected", "Rejected"], ["dropped", "Dropped"], ["waiting", "Waiting"], ["lost", "Lost"]].filter(([key]) => stages.some((one) => one[key] !== null && one[key] !== undefined));
  return html`<${Failure} error=${error} />
    <${Section} title="Stages"><${Table} name="Stages" heads=${[["Stage"], ...named.map(([, label]) => [label, true])]} rows=${stages.map((one) => [one.name, ...named.map(([key]) => (typeof one[key] === "number" && Number.isInteger(one[key]) ? format.many(one[key]) : one[key]))])} empty="Nothing has been read yet." /></${Section}>
    ${chunks.length ? html`<${Section} title="Chunks" note=${many > 1 ? `a square for each ${many}, in the worst of their states` : "each a square"}><p class="legend">${states.map((name) => html`<span><${State} word=${name} /></span>`)}</p><${Chunks} chunks=${chunks} /></${Section}>` : null}
    ${curves.length ? html`<${Section} title="Curves" note="over the rows that are finished"><${Curves} names=${curves} /></${Section}>` : null}
    <${Section} title="Rejects"><${Records} name="Rejects" value=${rejects} empty="No record was rejected." /></${Section}>`;
}

/** How many attempts failed in each part of the run's time, a bar for each part. */
function Times({ counts, since, until }) {
  if (!counts || counts.length < 2 || !(until > since)) return null;
  const most = Math.max(...counts), wide = 100 / counts.length;
  return html`<svg class="times-bar" role="img" aria-label="Failures over the time of the run, at most ${most} in each of ${counts.length} parts">${counts.map((num, at) => num ? html`<rect key=${at} x="${at * wide}%" width="${wide * 0.9}%" y="${100 - (100 * num) / most}%" height="${(100 * num) / most}%" class="f-failed"><title>${num} until ${format.moment(since + ((at + 1) * (until - since)) / counts.length)}</title></rect>` : null)}</svg>
    <p class="note times-ends"><span>${format.moment(since)}</span><span>${format.moment(until)}</span></p>`;
}

export function Errors() {
  const { value, error } = useAnswer(`run/${run.id}/errors`, {}, first);
  const groups = value.groups || [];
  return html`<${Failure} error=${error} />
    ${groups.length ? groups.map((one, n) => html`<section class="group" key=${n}><h2><span class="times">${format.many(one.count)} ×</span> ${one.text}</h2>
      <p class="note">${typeof one.first === "number" ? `First ${format.moment(one.first)}, last ${format.moment(one.last)}. ` : ""}${(one.tasks || []).length ? "Tasks " : ""}${(one.tasks || []).map((key) => html`<${TaskLink} task=${key} /> `)}${one.failed > (one.tasks || []).length ? `of ${format.many(one.failed)} that failed` : ""}</p>
      <${Times} counts=${one.times} since=${value.since} until=${value.until} />
      ${one.trace && html`<details open=${n === 0}><summary>Traceback</summary><pre tabindex="0">${one.trace}</pre></details>`}</section>`) : html`<p class="empty">Nothing has failed.</p>`}`;
}

export function About() {
  const { value, error } = useAnswer(`run/${run.id}/about`, {}, first);
  return html`<${Failure} error=${error} />
    ${value.command && html`<${Section} title="Command"><div class="command"><pre tabindex="0">${value.command}</pre><${Copy} value=${value.command} /></div></${Section}>`}
    <${Blocks} blocks=${value.blocks} />
    ${[["Options", "options"], ["Code", "code"], ["Environment", "environment"], ["Doctor", "doctor"], ["Plan", "plan"]].map(([title, key]) => value[key] && (typeof value[key] !== "object" || Object.keys(value[key]).length) ? html`<${Section} key=${key} title=${title}><${Records} name=${title} value=${value[key]} /></${Section}>` : null)}`;
}

export function Devices() {
  const { value, error } = useAnswer("devices", {}, first, 3000);
  const all = value.devices || [];
  const share = (busy) => (typeof busy === "number" ? html`<span class="cell-bar"><svg class="bar" role="img" aria-label="${Math.round(busy * 100)} percent"><rect width="${busy * 100}%" height="100%" class="f-running" /><rect x="${busy * 100}%" width="${100 - busy * 100}%" height="100%" class="f-waiting" /></svg></span>` : "–");
  return html`<h1>Devices</h1><${Failure} error=${error} />
    <${Table} name="Devices" empty="This machine has no GPU that can be asked." heads=${[["Device"], ["Name"], ["Busy"], ["", true], ["Memory"], ["", true], ["°C", true], ["W", true], ["Held by"], ["Processes"]]}
      rows=${all.map((one) => [one.index, one.name, share(one.busy), typeof one.busy === "number" ? `${Math.round(one.busy * 100)} %` : "–", share(one.total_mib ? one.memory_mib / one.total_mib : null), one.total_mib ? `${format.mib(one.memory_mib)} / ${format.mib(one.total_mib)}` : "–", one.temperature, one.power_w, one.lease ?? "–",
        html`<span>${(one.processes || []).map((who) => html`<div>${who.user} <b>${who.pid}</b> ${who.command} ${typeof who.mib === "number" ? format.mib(who.mib) : ""}</div>`)}${(one.processes || []).length ? null : "–"}</span>`])} />`;
}

export function Compare() {
  const { value, error } = useAnswer("compare", { run: inUrl().getAll("run"), task: inUrl().getAll("task") }, first);
  const [only, setOnly] = useView("only", "1");
  const { columns = [], settings = [], results = [], metrics = [] } = value;
  const runs = new Map();
  for (const { id, run: label, task } of columns) {
    if (!runs.has(id)) runs.set(id, { id, label, tasks: [] });
    if (task) runs.get(id).tasks.push(task);
  }
  const compared = runs.size > 1 ? [...runs.values()] : [...runs.values()].map(({ id, tasks }) => ({ id, tasks }));
  const shown = settings.filter((one) => only !== "1" || one.differs);
  const label = (one) => (typeof one === "object" ? one.label ?? one.task ?? one.name : one);
  if (!columns.length) return html`<h1>Compare</h1><p class="empty">Choose runs on the first page, or tasks in a table of tasks (the key x), to compare them here.</p>`;
  return html`<h1>Compare</h1><${Failure} error=${error} />
    <div class="tools"><label><input type="checkbox" checked=${only === "1"} onChange=${(event) => setOnly(event.target.checked ? "1" : "0")} /> Only what differs</label><span class="note">${shown.length} of ${settings.length} settings</span></div>
    <${Table} kind="compare" name="Settings" heads=${[["Setting"], ...columns.map((one) => [label(one)])]} rows=${shown.map((one) => [one.name, ...one.values])} empty="They do not differ." />
    ${results.length ? html`<${Section} title="Results"><${Table} kind="compare" name="Results" heads=${[["Result"], ...columns.map((one) => [label(one)])]} rows=${results.map((one) => [one.name, ...one.values])} /></${Section}>` : null}
    ${metrics.length ? html`<${Section} title="Curves"><${Curves} names=${metrics} runs=${compared} /></${Section}>` : null}`;
}

