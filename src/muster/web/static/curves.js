// Curves: one card for each metric, one line for each task, drawn by uPlot.
import { ask, atMost, colour, html, questions, run, shell, useEffect, useRef, useSize, useState, useView } from "./lib.js";
import { on } from "./live.js";
import { Failure } from "./parts.js";
import * as format from "./format.js";

/* Okabe and Ito's colours, which the colour-blind can tell; after eight the lines are dashed. */
const LINES = ["line-1", "line-2", "line-3", "line-4", "line-5", "line-6", "line-7", "line-8"];
const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3]];
const MOST_POINTS = 20_000, MOST_IN_LEGEND = 12, HEIGHT = 220;

/** Exponential mean that begins without a bias. */
export function smoothed(values, share) {
  if (!share) return values;
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
}

/** Lines of different steps over one axis: uPlot's data. */
export function aligned(series, width) {
  const same = series.every((one) => one.x.length === series[0].x.length && one.x.every((x, at) => x === series[0].x[at]));
  if (same) return [series[0].x, ...series.map((one) => one.y)];
  const total = series.reduce((sum, one) => sum + one.x.length, 0);
  if (total <= MOST_POINTS) {
    const axis = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
    const place = new Map(axis.map((x, at) => [x, at]));
    return [axis, ...series.map((one) => {
      const line = new Array(axis.length).fill(undefined);
      one.x.forEach((x, at) => { line[place.get(x)] = one.y[at]; });
      return line;
    })];
  }
  // So many points that no pixel has one of its own: the last value in each of `width` buckets.
  let low = Infinity, high = -Infinity;
  for (const one of series) for (const x of one.x) { if (x < low) low = x; if (x > high) high = x; }
  const count = Math.max(200, Math.min(1200, width)), step = (high - low) / (count - 1) || 1;
  const axis = Array.from({ length: count }, (_, at) => low + at * step);
  return [axis, ...series.map((one) => {
    const line = new Array(count).fill(undefined);
    one.x.forEach((x, at) => { line[Math.round((x - low) / step)] = one.y[at]; });
    return line;
  })];
}

/** Adds the points up to `to` that are not there yet; says whether there were any. */
export function extend(series, news, to = Infinity) {
  let has = false;
  for (const one of news) {
    const old = series.find((line) => String(line.task) === String(one.task) && line.name === one.name);
    if (!old) continue;
    const last = old.x.length ? old.x[old.x.length - 1] : -Infinity;
    one.x.forEach((x, at) => { if (x > last && x <= to) { old.x.push(x); old.y.push(one.y[at]); has = true; } });
  }
  return has;
}

export function CurveTools({ runs }) {
  const [share, setShare] = useView("smooth", "0");
  const [log, setLog] = useView("log");
  return html`<div class="tools curves-tools">
    <label>Smoothing <input type="range" min="0" max="0.98" step="0.02" value=${share} onInput=${(event) => setShare(event.target.value)} aria-valuetext="${Math.round(share * 100)} percent" /></label>
    <label><input type="checkbox" checked=${log === "1"} onChange=${(event) => setLog(event.target.checked ? "1" : "")} /> Logarithmic</label>
    <span class="note">Drag to zoom, double-click to see all.</span>
    ${shell.live && runs.length === 1 && html`<span class="note">Save as ${["csv", "json"].map((kind) => html`<a key=${kind} download href="/api/run/${runs[0].id}/curves.${kind}?${questions({ task: runs[0].tasks })}">${kind.toUpperCase()}</a> `)}</span>`}</div>`;
}

/** `tasks`: whose curves; none for the ranks of a training, which has one. `runs`: [{id, label,
    tasks}] where several are compared. */
export function Curves({ names, tasks = [], id = run?.id, runs = [{ id, tasks }] }) {
  if (!names?.length) return null;
  return html`<${CurveTools} runs=${runs} /><div class="cards">${names.map((name) => html`<${Card} key=${name} name=${name} runs=${runs} of=${names.length} />`)}</div>`;
}

/** The curves of every run, those of the first ones first; one that has none is left out. */
async function askAll(runs, params, signal) {
  const found = await Promise.all(runs.map(({ id, label, tasks }) => ask(`run/${id}/curves`, { ...params, task: tasks }, signal).then(
    ({ series }) => picked(series, params.name, tasks).map((one) => (label ? { ...one, label: [label, one.label].filter(Boolean).join(" ") } : one)),
    (failed) => { if (failed.name === "AbortError" || runs.length === 1) throw failed; return []; })));
  return found.flat();
}

function Card({ name, runs, of }) {
  const [series, setSeries] = useState(null);
  const [error, setError] = useState("");
  const place = useRef(null);
  const size = useSize(place);
  const [range] = useView("x");
  const inSight = useSight(place);
  const key = runs.map(({ id, tasks }) => [id, ...tasks].join(" ")).join("\n");
  useEffect(() => {
    if (!inSight || !size.width) return undefined;
    const control = new AbortController();
    const [from, to] = range ? range.split("~") : [], px = Math.min(1200, size.width);
    const load = () => askAll(runs, { name, px, from, to }, control.signal).then(
      (found) => { setError(""); setSeries(found); },
      (failed) => { if (failed.name !== "AbortError") setError(failed.message); });
    // A training tells that there is more, a task the points themselves. All cards together ask
    // some six times a second.
    const again = atMost(Math.max(1000, 170 * of), load);
    again();
    const offs = [
      on("stale", again),
      on("points", (news) => setSeries((was) => {
        const mine = news.series.filter((one) => one.name === name);
        if (!was || !extend(was, mine, to === undefined ? Infinity : Number(to))) return was;
        if (was.some((one) => one.x.length > 4 * px)) again(); // the server knows how to draw fewer
        return [...was];
      })),
    ];
    return () => { control.abort(); again.stop(); offs.forEach((off) => off()); };
  }, [name, key, range, inSight, size.width > 0]);
  return html`<figure class="card"><figcaption>${name}</figcaption>
    <div class="plot" ref=${place}>${series && size.width > 0 && html`<${Plot} series=${series} width=${size.width} theme=${size.theme} name=${name} />`}</div>
    <${Failure} error=${error} /></figure>`;
}

const picked = (series, name, tasks) => (shell.live ? series : series.filter(
  (one) => one.name === name && (!tasks.length || tasks.includes(String(one.task))))
).map((one) => ({ ...one, x: [...one.x], y: [...one.y] }));

function useSight(ref) {
  const [seen, set] = useState(false);
  useEffect(() => {
    const watch = new IntersectionObserver((found) => { if (found.some((one) => one.isIntersecting)) { set(true); watch.disconnect(); } }, { rootMargin: "200px" });
    watch.observe(ref.current);
    return () => watch.disconnect();
  }, []);
  return seen;
}

export function Plot({ series, width, theme, name, xLabel = "step" }) {
  const place = useRef(null), plot = useRef(null);
  const [share] = useView("smooth", "0");
  const [log] = useView("log");
  const [, setRange] = useView("x");
  const [hover, setHover] = useState(null);
  const lines = series.length;
  const data = () => {
    const drawn = series.map((one) => ({ x: one.x, y: smoothed(one.y, Number(share)) }));
    return lines ? aligned(drawn, width) : [[], []];
  };
  useEffect(() => {
    const [ink, grid] = [colour("faint"), colour("line")];
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui, sans-serif" };
    const positive = log === "1" && series.every((one) => one.y.every((y) => y === null || y === undefined || y > 0));
    const made = new window.uPlot({
      width, height: HEIGHT, legend: { show: false },
      scales: { x: { time: false }, y: { distr: positive ? 3 : 1 } },
      axes: [{ ...axis, size: 34 }, { ...axis, size: 58, values: (_, ticks) => ticks.map((one) => (one === null ? "" : format.number(one))) }],
      series: [{ label: xLabel }, ...(lines ? series : [{}]).map((one, at) => ({
        label: one.label || String(one.task ?? ""), stroke: colour(LINES[at % 8]), width: lines > 12 ? 1 : 1.6,
        dash: DASHES[Math.floor(at / 8) % 4], spanGaps: true, points: { show: (one.x?.length || 0) < 3, size: 5 },
      }))],
      cursor: { drag: { x: true, y: false }, points: { size: 6 }, y: false },
      hooks: {
        setCursor: [(one) => setHover(one.cursor.idx ?? null)],
        setSelect: [(one) => {
          const { left, width: wide } = one.select;
          if (wide > 4) setRange(`${one.posToVal(left, "x")}~${one.posToVal(left + wide, "x")}`);
        }],
      },
    }, data(), place.current);
    made.over.addEventListener("dblclick", () => setRange(""));
    plot.current = made;
    return () => { plot.current = null; made.destroy(); };
  }, [theme, log, lines, name]);
  useEffect(() => { plot.current?.setData(data()); }, [series, share]);
  useEffect(() => { plot.current?.setSize({ width, height: HEIGHT }); }, [width]);
  const at = hover === null ? null : plot.current?.data[0][hover];
  const last = (one) => one.y[one.y.length - 1];
  return html`<div><div ref=${place} role="img" data-points=${series.map((one) => one.x.length).join(" ")} aria-label=${worded(name, series)}></div>
    <p class="legend"><span class="at">${at === null || at === undefined ? "last" : `${xLabel} ${format.number(at)}`}</span>
    ${series.slice(0, MOST_IN_LEGEND).map((one, n) => html`<span key=${n}><svg class="swatch" aria-hidden="true"><line x1="0" y1="5" x2="16" y2="5" class="l-${(n % 8) + 1} d-${Math.floor(n / 8) % 4}" /></svg>${lines > 1 ? `${one.label || one.task} ` : ""}<b>${format.number(hover === null ? last(one) : plot.current?.data[n + 1]?.[hover])}</b></span>`)}
    ${lines > MOST_IN_LEGEND ? html`<span>and ${lines - MOST_IN_LEGEND} more</span>` : null}</p></div>`;
}

function worded(name, series) {
  const ends = series.slice(0, 3).map((one) => `${one.label || one.task || ""} ends at ${format.number(one.y[one.y.length - 1])}`);
  return `${name}, ${series.length} ${series.length === 1 ? "curve" : "curves"}; ${ends.join(", ")}`;
}
