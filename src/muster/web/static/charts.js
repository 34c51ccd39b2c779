// Small drawings of our own on canvases: bars in time, a map of chunks, points. What they show is
// also in a table or in words beside them.
import { canvasOf, colour, html, useEffect, useRef, useSize, useState } from "./lib.js";
import { stateKind } from "./parts.js";
import * as format from "./format.js";

/** `find` tells what is at a place; of `points`, {x, y, text, key}, it is the nearest one, and the
    arrow keys go from one to the next. */
export function Canvas({ height, draw, label, find, points, pick, deps }) {
  const place = useRef(null), sheet = useRef(null), at = useRef(-1);
  const size = useSize(place);
  const [told, tell] = useState(null);
  useEffect(() => {
    if (size.width) draw(canvasOf(sheet.current, size.width, height), size.width);
  }, [size, height, ...deps]);
  const say = (found, x, y) => tell(found ? { ...found, x: Math.min(x, size.width - 180), y } : null);
  const near = (event) => {
    const box = sheet.current.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    if (!points) return [find?.(x, y, size.width), x, y];
    let found = null, least = 100;
    for (const one of points(size.width)) {
      const far = (one.x - x) ** 2 + (one.y - y) ** 2;
      if (far < least) { least = far; found = one; }
    }
    return [found, x, y];
  };
  const click = (event) => { const [found] = near(event); if (found && pick) pick(found); };
  const press = (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Enter" && told) pick?.(told);
    else if (event.key === "Escape") tell(null);
    else if (step) {
      const all = points(size.width).sort((a, b) => a.x - b.x || a.y - b.y);
      if (!all.length) return;
      at.current = told ? Math.max(0, Math.min(all.length - 1, at.current + step)) : 0;
      const one = all[at.current];
      say({ ...one, ring: [one.x, one.y] }, one.x, one.y);
    } else return;
    event.preventDefault();
  };
  return html`<div class="canvas" ref=${place}>
    <canvas ref=${sheet} role="img" aria-label=${label} tabindex=${points ? 0 : null} onMouseMove=${(event) => say(...near(event))} onMouseLeave=${() => tell(null)} onClick=${click} onKeyDown=${points ? press : null} onBlur=${() => tell(null)}></canvas>
    ${told?.ring && html`<span class="ring" style=${{ left: told.ring[0] + "px", top: told.ring[1] + "px" }}></span>`}
    ${told && html`<div class="tip" role=${points ? "status" : null} style=${{ left: Math.max(0, told.x) + "px", top: told.y + 14 + "px" }}>${told.text}</div>`}
  </div>`;
}

/** From the least to the most of `values`, without those that went astray on the bad side: one such
    trial must not press all the others into a line. */
export function robust(values, direction) {
  const sorted = values.slice().sort((a, b) => a - b), pick = (share) => sorted[Math.round((sorted.length - 1) * share)];
  return direction.startsWith("max") ? [pick(0.08), pick(1)] : [pick(0), pick(0.92)];
}

/** What each slot did when: one line for each slot. */
export function Gantt({ slots, open }) {
  const line = 22, left = 92, foot = 22;
  const bars = slots.flatMap((slot) => slot.bars);
  if (!bars.length) return null;
  const low = Math.min(...bars.map(([start]) => start).filter(Number.isFinite));
  const high = Math.max(...bars.map(([start, end]) => end ?? start), low + 1);
  const scale = (width) => (width - left - 8) / (high - low);
  const draw = (pen, width) => {
    const each = scale(width);
    pen.textBaseline = "middle";
    const ticks = width < 520 ? 2 : 5;
    for (let n = 0; n <= ticks; n += 1) {
      const x = left + ((width - left - 8) * n) / ticks;
      pen.fillStyle = colour("line");
      pen.fillRect(Math.round(x), 0, 1, slots.length * line);
      pen.fillStyle = colour("faint");
      pen.textAlign = n === ticks ? "right" : n ? "center" : "left";
      pen.fillText(format.duration(((high - low) * n) / ticks), n === ticks ? x + 6 : x, slots.length * line + 12);
    }
    pen.textAlign = "left";
    slots.forEach((slot, row) => {
      pen.fillStyle = colour("ink");
      pen.fillText(format.text(slot.label).slice(0, 13), 0, row * line + line / 2);
      for (const [start, end, state] of slot.bars) {
        pen.fillStyle = colour(`fill-${stateKind(state)}`);
        const x = left + (start - low) * each;
        pen.fillRect(x, row * line + 3, Math.max(1, ((end ?? high) - start) * each - 0.5), line - 6);
      }
    });
  };
  const find = (x, y, width) => {
    const slot = slots[Math.floor(y / line)], when = low + (x - left) / scale(width), near = 2 / scale(width);
    const bar = slot?.bars.find(([start, end]) => when >= start - near && when <= (end ?? high) + near);
    return bar && { text: `${bar[3] ?? ""} ${bar[2]}, ${format.duration((bar[1] ?? high) - bar[0])}`, key: bar[3] };
  };
  const label = `${slots.length} slots over ${format.duration(high - low)}, ${bars.length} attempts`;
  return html`<${Canvas} height=${slots.length * line + foot} draw=${draw} find=${find} label=${label} deps=${[slots]} pick=${(found) => found.key && open?.(found.key)} />`;
}

/** A square for each chunk; of many for some of them. */
export function Chunks({ chunks }) {
  const side = chunks.length > 4000 ? 7 : chunks.length > 400 ? 11 : 18, gap = side > 7 ? 2 : 1;
  const [across, setAcross] = useState(40);
  const rows = Math.ceil(chunks.length / across);
  const draw = (pen, width) => {
    const fit = Math.max(1, Math.floor(width / (side + gap)));
    if (fit !== across) setAcross(fit);
    chunks.forEach((chunk, at) => {
      const x = (at % fit) * (side + gap), y = Math.floor(at / fit) * (side + gap), kind = stateKind(chunk.state);
      pen.fillStyle = colour(`fill-${kind}`);
      pen.fillRect(x, y, side, side);
      if (kind === "failed" && side > 7) {
        pen.strokeStyle = colour("bg");
        pen.lineWidth = 1.5;
        pen.beginPath();
        pen.moveTo(x + 4, y + 4); pen.lineTo(x + side - 4, y + side - 4);
        pen.moveTo(x + side - 4, y + 4); pen.lineTo(x + 4, y + side - 4);
        pen.stroke();
      }
    });
  };
  const find = (x, y) => {
    const chunk = chunks[Math.floor(y / (side + gap)) * across + Math.floor(x / (side + gap))];
    return chunk && { text: `chunk ${chunk.index}${chunk.count > 1 ? ` to ${chunk.index + chunk.count - 1}` : ""}: ${chunk.state}` };
  };
  return html`<${Canvas} height=${rows * (side + gap)} draw=${draw} find=${find} label="The states of the chunks, in ${chunks.length} squares" deps=${[chunks, across]} />`;
}

/** Points and the best so far: how a search went. */
export function History({ history, open, goal }) {
  const left = 62, foot = 26, height = 240;
  const points = history.filter((one) => typeof one.value === "number");
  if (!points.length) return null;
  const [low, high] = robust(points.map((one) => one.value), goal), pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  const last = Math.max(...history.map((one) => one.n), 1), begin = Math.min(...history.map((one) => one.n));
  const px = (n, width) => left + 6 + ((n - begin) / (last - begin || 1)) * (width - left - 14);
  const py = (value) => Math.max(3, Math.min(height - foot - 2, (1 - (value - low + pad) / (high - low + 2 * pad)) * (height - foot)));
  const draw = (pen, width) => {
    pen.textBaseline = "middle";
    for (let n = 0; n <= 4; n += 1) {
      const value = low + ((high - low) * n) / 4;
      pen.fillStyle = colour("line");
      pen.fillRect(left, Math.round(py(value)), width - left, 1);
      pen.fillStyle = colour("faint");
      pen.textAlign = "right";
      pen.fillText(format.number(+value.toPrecision(3)), left - 6, py(value));
    }
    pen.textAlign = "left"; pen.fillText("the first to end", left, height - 8);
    pen.textAlign = "right"; pen.fillText("the last", width - 2, height - 8);
    for (const one of points) {
      pen.fillStyle = colour(`fill-${stateKind(one.state || "done")}`);
      pen.globalAlpha = 0.65;
      pen.beginPath(); pen.arc(px(one.n, width), py(one.value), 3, 0, 7); pen.fill();
    }
    pen.globalAlpha = 1;
    pen.strokeStyle = colour("line-2"); pen.lineWidth = 2;
    pen.beginPath();
    let before = null;
    for (const one of history) {
      if (typeof one.best !== "number") continue;
      const x = px(one.n, width), y = py(one.best);
      if (before === null) pen.moveTo(x, y); else { pen.lineTo(x, before); pen.lineTo(x, y); }
      before = y;
    }
    pen.stroke();
  };
  const places = (width) => points.map((one) => ({ x: px(one.n, width), y: py(one.value), text: `trial ${one.trial}: ${format.number(one.value)}`, key: one.task }));
  const ended = points[points.length - 1];
  return html`<${Canvas} height=${height} draw=${draw} points=${places} label="${points.length} trials; the best so far is ${format.number(ended.best)}" deps=${[history]} pick=${(found) => open?.(found.key)} />`;
}

/** A small line of values from 0 to 1, such as how busy a device was. */
export function Strip({ history, label }) {
  const height = 36;
  const points = (history || []).filter((one) => typeof one[1] === "number");
  if (points.length < 2) return null;
  const low = points[0][0], high = points[points.length - 1][0];
  const draw = (pen, width) => {
    const x = (when) => ((when - low) / (high - low || 1)) * width, y = (busy) => height - 1 - busy * (height - 3);
    pen.fillStyle = colour("fill-running"); pen.globalAlpha = 0.25;
    pen.beginPath(); pen.moveTo(0, height);
    for (const [when, busy] of points) pen.lineTo(x(when), y(busy));
    pen.lineTo(width, height); pen.fill();
    pen.globalAlpha = 1; pen.strokeStyle = colour("fill-running"); pen.lineWidth = 1.2; pen.beginPath();
    points.forEach(([when, busy], at) => (at ? pen.lineTo(x(when), y(busy)) : pen.moveTo(x(when), y(busy))));
    pen.stroke();
  };
  return html`<${Canvas} height=${height} draw=${draw} label=${label} deps=${[history]} />`;
}
