// Trials as points: each parameter against the goal (slices), and two goals against each other (the
// front of Pareto). What is under the pointer, or chosen with the arrow keys, says its settings.
import { colour, html, useMemo, useView } from "./lib.js";
import { Canvas, robust } from "./charts.js";
import { position } from "./parallel.js";
import { stateKind } from "./parts.js";
import * as format from "./format.js";

const LEFT = 58, FOOT = 40, ABOVE = 12, RIGHT = 12, MOST_WORDS = 60;
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** An axis of numbers: where they stand, from 0 to 1, and what is written beside it. */
function ofNumbers(label, values, direction) {
  const [low, high] = robust(values, direction), pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  const at = (value) => Math.max(0, Math.min(1, (value - low + pad) / (high - low + 2 * pad)));
  const ticks = high > low ? [low, (low + high) / 2, high] : [low];
  return { label, at, ticks: ticks.map((one) => [at(one), format.number(+one.toPrecision(3))]) };
}

/** The axis of a parameter. */
function ofDim(dim) {
  const inner = (share) => (share === null ? null : 0.04 + 0.92 * share), at = (value) => inner(position(dim, value));
  if (dim.values) return { label: dim.name, at, ticks: dim.values.map((one) => [at(one), format.text(one).slice(0, 10)]) };
  const [low, high] = dim.range, middle = dim.log ? Math.sqrt(low * high) : (low + high) / 2;
  const ticks = high > low ? [low, dim.kind === "int" && !dim.log ? Math.round(middle) : +middle.toPrecision(2), high] : [low];
  return { label: dim.log ? `${dim.name} (log)` : dim.name, at, ticks: ticks.map((one) => [at(one), format.number(+one.toPrecision(3))]) };
}

/** `points`: {u, v, kind, text, key, best}, places from 0 to 1. `line`: points to be joined. */
function Scatter({ points, x, y, line, label, open, height = 220 }) {
  const px = (u, width) => LEFT + u * (width - LEFT - RIGHT), py = (v) => ABOVE + (1 - v) * (height - ABOVE - FOOT);
  const draw = (pen, width) => {
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle"; pen.textAlign = "right";
    for (const [v, text] of y.ticks) {
      pen.fillStyle = colour("line"); pen.fillRect(LEFT, Math.round(py(v)), width - LEFT - RIGHT, 1);
      pen.fillStyle = colour("faint"); pen.fillText(text, LEFT - 6, py(v), LEFT - 20);
    }
    const room = (width - LEFT) / x.ticks.length;
    x.ticks.forEach(([u, text], n) => {
      if (room < 34 && n && n < x.ticks.length - 1) return;
      const wide = pen.measureText(text).width / 2;
      pen.fillStyle = colour("line"); pen.fillRect(Math.round(px(u, width)), ABOVE, 1, height - ABOVE - FOOT);
      pen.fillStyle = colour("faint"); pen.textAlign = "center";
      pen.fillText(text, Math.max(wide, Math.min(width - wide, px(u, width))), height - FOOT + 11, Math.max(34, room));
    });
    pen.fillStyle = colour("ink"); pen.textAlign = "center";
    pen.fillText(x.label, LEFT + (width - LEFT - RIGHT) / 2, height - 9, width - LEFT);
    pen.save(); pen.translate(8, ABOVE + (height - ABOVE - FOOT) / 2); pen.rotate(-Math.PI / 2);
    pen.fillText(y.label, 0, 0, height - FOOT); pen.restore();
    if (line?.length > 1) {
      pen.strokeStyle = colour("line-2"); pen.lineWidth = 1.5; pen.beginPath();
      line.forEach(({ u, v }, n) => (n ? pen.lineTo(px(u, width), py(v)) : pen.moveTo(px(u, width), py(v))));
      pen.stroke();
    }
    for (const one of points) {
      pen.globalAlpha = one.best ? 1 : points.length > 400 ? 0.35 : 0.6;
      pen.fillStyle = colour(one.best ? "line-2" : `fill-${stateKind(one.kind)}`);
      pen.beginPath(); pen.arc(px(one.u, width), py(one.v), one.best ? 4.5 : 3, 0, 7); pen.fill();
    }
    pen.globalAlpha = 1;
  };
  const places = (width) => points.map((one) => ({ ...one, x: px(one.u, width), y: py(one.v) }));
  return html`<${Canvas} height=${height} draw=${draw} points=${places} label=${label} deps=${[points, x, y]} pick=${(found) => open?.(found.key)} />`;
}

const worded = (row, dims) => dims.flatMap((dim, n) => (row.cells[n] === null ? [] : [`${dim.name} ${format.text(row.cells[n])}`])).join(", ");

/** A picture for each parameter: its values against those of the goal. */
export function Slices({ dims, rows, goal, open }) {
  const found = useMemo(() => {
    const known = rows.filter((row) => isNumber(row.value)), sign = goal.direction.startsWith("max") ? -1 : 1;
    const y = ofNumbers(goal.name, known.map((row) => row.value), goal.direction);
    const best = known.filter((row) => row.state === "done").reduce((a, b) => (a && a.value * sign <= b.value * sign ? a : b), null);
    const last = (row) => (row === best ? 1 : 0);
    const inOrder = known.slice().sort((a, b) => last(a) - last(b)); // the best is drawn over the others
    return dims.map((dim, n) => {
      const x = ofDim(dim);
      const points = inOrder.flatMap((row) => {
        const u = x.at(row.cells[n]);
        return u === null ? [] : [{ u, v: y.at(row.value), kind: row.state, key: row.task, best: row === best, text: `trial ${row.trial}: ${goal.name} ${format.number(row.value)}; ${worded(row, dims)}` }];
      });
      const told = best && best.cells[n] !== null ? `; the best has ${dim.name} ${format.text(best.cells[n])}` : "";
      return { dim, x, y, points, label: `${goal.name} by ${dim.name}, ${points.length} trials${told}` };
    }).filter((one) => one.points.length);
  }, [dims, rows, goal]);
  return html`<div class="cards small">${found.map((one) => html`<figure class="card" key=${one.dim.name}><figcaption>${one.dim.name}</figcaption><${Scatter} ...${one} open=${open} /></figure>`)}</div>`;
}

/** Two goals against each other, and the trials that no other beats in all goals. */
export function Pareto({ goals, history, front, dims, rows, open }) {
  const [pair, setPair] = useView("goals", "0,1");
  const [a, b] = pair.split(",").map((one) => Math.max(0, Math.min(goals.length - 1, Number(one) || 0)));
  const found = useMemo(() => {
    const known = history.filter((one) => isNumber(one.values?.[a]) && isNumber(one.values?.[b]));
    const axis = (n) => ofNumbers(`${goals[n].name} (${goals[n].direction})`, known.map((one) => one.values[n]), goals[n].direction);
    const x = axis(a), y = axis(b), cells = new Map(rows.map((row) => [row.trial, row]));
    const points = known.map((one) => {
      const row = cells.get(one.trial);
      return { u: x.at(one.values[a]), v: y.at(one.values[b]), kind: one.state, key: one.task, best: front.has(one.task), text: `trial ${one.trial}: ${goals.map((goal, n) => `${goal.name} ${format.number(one.values[n])}`).join(", ")}${row ? `; ${worded(row, dims)}` : ""}` };
    }).sort((one, other) => (one.best ? 1 : 0) - (other.best ? 1 : 0));
    const line = goals.length === 2 ? points.filter((one) => one.best).sort((one, other) => one.u - other.u) : [];
    return { x, y, points, line };
  }, [goals, history, front, a, b]);
  const pick = (n, value) => setPair((n ? [a, value] : [value, b]).join(","));
  const choice = (n, chosen, title) => html`<label>${title} <select onChange=${(event) => pick(n, event.target.value)}>${goals.map((goal, at) => html`<option value=${at} selected=${at === chosen}>${goal.name.slice(0, MOST_WORDS)}</option>`)}</select></label>`;
  return html`${goals.length > 2 ? html`<div class="tools">${choice(0, a, "Across")}${choice(1, b, "Up")}</div>` : null}
    <${Scatter} ...${found} height=${300} open=${open} label="${goals[b].name} against ${goals[a].name}, ${found.points.length} trials, ${front.size} of them on the front" />`;
}
