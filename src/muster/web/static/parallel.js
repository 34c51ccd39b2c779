// Parallel coordinates: one axis for each parameter, one line for each trial. A drag along an axis
// keeps the trials that pass there; the table below shows the same ones.
import { canvasOf, colour, html, useEffect, useMemo, useRef, useSize, useView } from "./lib.js";
import * as format from "./format.js";

const HEIGHT = 300, ABOVE = 34, BELOW = 22, SIDE = 46;

/** Where a value stands on its axis: 0 is below, 1 above; null where it has no place. */
export function position(dim, value) {
  if (value === null || value === undefined) return null;
  if (dim.values) {
    const at = dim.values.findIndex((one) => String(one) === String(value));
    return at < 0 ? null : dim.values.length === 1 ? 0.5 : at / (dim.values.length - 1);
  }
  const [low, high] = dim.range, turn = dim.log ? Math.log : Number;
  const found = high === low ? 0.5 : (turn(value) - turn(low)) / (turn(high) - turn(low));
  return Number.isFinite(found) ? Math.max(0, Math.min(1, found)) : null;
}

/** The view's text "name:0.2:0.8,…" as a map from names to parts of their axes. */
export function brushes(text) {
  const found = new Map();
  for (const one of text ? text.split(",") : []) {
    const [name, low, high] = one.split(":");
    if (Number.isFinite(+low) && Number.isFinite(+high)) found.set(decodeURIComponent(name), [+low, +high]);
  }
  return found;
}

const written = (map) => [...map].map(([name, [low, high]]) => `${encodeURIComponent(name)}:${low.toFixed(3)}:${high.toFixed(3)}`).join(",");

export function passes(row, dims, map) {
  return dims.every((dim, at) => {
    const part = map.get(dim.name);
    if (!part) return true;
    const place = position(dim, row.cells[at]);
    return place !== null && place >= part[0] - 1e-9 && place <= part[1] + 1e-9;
  });
}

/** From dark blue to yellow, which the colour-blind can order too (cividis). */
const SHADES = ["#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838"];
function shade(share, dark) {
  const at = dark ? 0.25 + 0.75 * share : 0.9 * share, n = Math.min(SHADES.length - 2, Math.floor(at * (SHADES.length - 1)));
  const part = at * (SHADES.length - 1) - n, [a, b] = [SHADES[n], SHADES[n + 1]];
  const mix = (from) => Math.round(parseInt(a.slice(from, from + 2), 16) * (1 - part) + parseInt(b.slice(from, from + 2), 16) * part);
  return `rgb(${mix(1)},${mix(3)},${mix(5)})`;
}

export function Parallel({ dims, rows, hovered }) {
  const place = useRef(null), sheet = useRef(null), drag = useRef(null);
  const size = useSize(place);
  const [text, setText] = useView("brush");
  const map = useMemo(() => brushes(text), [text]);
  const wide = Math.max(size.width, dims.length * 88);
  const axis = (at) => SIDE + (dims.length === 1 ? 0 : (at * (wide - 2 * SIDE)) / (dims.length - 1));
  const level = (share) => ABOVE + (1 - share) * (HEIGHT - ABOVE - BELOW);
  const ranked = useMemo(() => {
    const values = rows.map((row) => row.value).filter((one) => typeof one === "number").sort((a, b) => a - b);
    return new Map(values.map((value, at) => [value, values.length < 2 ? 1 : at / (values.length - 1)]));
  }, [rows]);
  useEffect(() => {
    if (!size.width) return;
    const pen = canvasOf(sheet.current, wide, HEIGHT), dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const line = (row) => {
      let begun = false;
      pen.beginPath();
      dims.forEach((dim, at) => {
        const where = position(dim, row.cells[at]);
        if (where === null) { begun = false; return; }
        if (begun) pen.lineTo(axis(at), level(where)); else pen.moveTo(axis(at), level(where));
        begun = true;
      });
      pen.stroke();
    };
    const kept = rows.filter((row) => passes(row, dims, map)), left = new Set(kept);
    pen.lineWidth = 1; pen.strokeStyle = colour("line"); pen.globalAlpha = 0.5;
    if (map.size) rows.filter((row) => !left.has(row)).forEach(line);
    pen.globalAlpha = kept.length > 300 ? 0.35 : 0.75; pen.lineWidth = 1.3;
    for (const row of kept) { pen.strokeStyle = ranked.has(row.value) ? shade(ranked.get(row.value), dark) : colour("faint"); line(row); }
    pen.globalAlpha = 1;
    const marked = rows.find((row) => row.task === hovered);
    if (marked) { pen.strokeStyle = colour("line-2"); pen.lineWidth = 3; line(marked); }
    dims.forEach((dim, at) => {
      const x = axis(at);
      pen.fillStyle = colour("faint"); pen.fillRect(x - 0.5, ABOVE, 1, HEIGHT - ABOVE - BELOW);
      pen.textAlign = at === 0 ? "left" : at === dims.length - 1 ? "right" : "center";
      const tx = at === 0 ? Math.max(2, x - 40) : at === dims.length - 1 ? Math.min(wide - 2, x + 40) : x;
      pen.fillStyle = colour("ink"); pen.font = "600 12px system-ui, sans-serif";
      pen.fillText(dim.name.slice(0, 16), tx, 12);
      pen.font = "11px system-ui, sans-serif"; pen.fillStyle = colour("faint");
      const [low, high] = dim.values ? [dim.values[0], dim.values[dim.values.length - 1]] : dim.range;
      pen.fillText(format.text(high).slice(0, 12), tx, 27); pen.fillText(format.text(low).slice(0, 12), tx, HEIGHT - 6);
      const part = map.get(dim.name);
      if (part) {
        pen.fillStyle = colour("line-1"); pen.globalAlpha = 0.3;
        pen.fillRect(x - 7, level(part[1]) - 1, 14, Math.max(3, level(part[0]) - level(part[1]) + 2));
        pen.globalAlpha = 1;
      }
    });
  }, [rows, dims, map, size, hovered, wide]);

  const at = (event) => {
    const box = sheet.current.getBoundingClientRect(), x = event.clientX - box.left;
    let near = 0;
    dims.forEach((_, n) => { if (Math.abs(axis(n) - x) < Math.abs(axis(near) - x)) near = n; });
    const share = Math.max(0, Math.min(1, 1 - (event.clientY - box.top - ABOVE) / (HEIGHT - ABOVE - BELOW)));
    return { dim: dims[near], share, far: Math.abs(axis(near) - x) };
  };
  const down = (event) => {
    const found = at(event);
    if (found.far > 30) return;
    drag.current = found;
    sheet.current.setPointerCapture(event.pointerId);
  };
  const set = (name, part) => {
    const next = new Map(map);
    if (part) next.set(name, part); else next.delete(name);
    setText(written(next));
  };
  const move = (event) => {
    const from = drag.current;
    if (!from) return;
    const { share } = at(event);
    if (Math.abs(share - from.share) > 0.01) { from.moved = true; set(from.dim.name, [Math.min(share, from.share), Math.max(share, from.share)]); }
  };
  const up = () => {
    if (drag.current && !drag.current.moved) set(drag.current.dim.name, null);
    drag.current = null;
  };
  const kept = rows.filter((row) => passes(row, dims, map)).length;
  return html`<div>
    <div class="scroll" ref=${place} tabindex="0" role="region" aria-label="Parallel coordinates">
      <canvas class="parallel" ref=${sheet} role="img" aria-label="${rows.length} trials over ${dims.map((dim) => dim.name).join(", ")}; ${kept} are kept. The table below has the same trials."
        onPointerDown=${down} onPointerMove=${move} onPointerUp=${up} onPointerCancel=${up}></canvas></div>
    <p class="note">${map.size ? html`${kept} of ${rows.length} trials pass. <button type="button" onClick=${() => setText("")}>Keep all</button>` : "Drag along an axis to keep the trials that pass there; click it to let it go. Dark lines have low values, bright ones high."}</p></div>`;
}
