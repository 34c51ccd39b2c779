// What every module needs: the page's data, links, questions to the server, and the view in the URL.
import {
  html, render, useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback,
} from "./vendor/htm-preact.module.js";
import { on } from "./live.js";

export { html, render, useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback };

const island = JSON.parse(document.getElementById("data").textContent);
export const { page, run, shell } = island;
export const first = island.data;

export const encode = (key) => encodeURIComponent(key);

/** The address of a page: "" is the first one, "run/ID/tasks" a run's tasks. */
export function link(path, params) {
  const base = path || !shell.suffix ? path : "index";
  const search = params ? "?" + new URLSearchParams(params) : "";
  return shell.root + base + (base ? shell.suffix : "") + search;
}

export const runLink = (id, name = "overview") =>
  link(name === "overview" ? `run/${id}` : `run/${id}/${name}`);
export const taskLink = (id, key) => link(`run/${id}/task/${encode(key)}`);

/** Names and values of a question; lists are repeated, what is empty is left out. */
export function questions(params) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(params || {})) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "" && one !== false) {
        found.append(name, one === true ? "1" : one);
      }
    }
  }
  return found.toString();
}

const kept = new Map(); // answers of a copy never change

/** The server's answer; in a copy the file beside the page, which holds all there is. */
export async function ask(path, params, signal) {
  if (!shell.live) {
    const address = shell.root + "api/" + path + ".json";
    if (!kept.has(address)) {
      kept.set(address, fetch(address).then((answer) => {
        if (!answer.ok) throw new Error("This copy does not include it.");
        return answer.json();
      }));
    }
    return kept.get(address);
  }
  const search = questions(params);
  const answer = await fetch(`/api/${path}${search && "?" + search}`, { signal });
  if (answer.status === 401) throw new Error("The server wants its token again: open the address that it has printed.");
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(found.error || `The server answered ${answer.status}.`);
  return found;
}

/** Asks for a change of the run, or `of` a part of it, where the server was started with
    --allow-actions. */
export async function act(id, action, of) {
  let key = "";
  try { key = localStorage.getItem("muster-act") || ""; } catch { /* no storage */ }
  const answer = await fetch(`/api/run/${id}/act`, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Muster": key || "none" },
    body: JSON.stringify({ action, ...of }),
  });
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(found.error || `The server answered ${answer.status}.`);
  return found;
}

/** Calls `work` now, and again when it is asked to: `pause` ms after the last time has settled. */
export function atMost(pause, work) {
  let timer = 0, wanted = false; // -1: at work
  const begin = async () => {
    wanted = false;
    timer = -1;
    try { await work(); } catch { /* it has said so itself */ }
    if (timer === -1) timer = setTimeout(() => { timer = 0; if (wanted) begin(); }, pause);
  };
  const asked = () => { if (timer) wanted = true; else begin(); };
  asked.stop = () => { clearTimeout(timer); timer = 0; wanted = false; };
  return asked;
}

/** An answer that is asked for again when it may be stale: at once when the whole page may be, and
    while its run goes on, or `every` so many ms while `lacks` says that it is not whole. `initial`:
    from the page. */
export function useAnswer(path, params, initial, every, lacks = () => true) {
  const [state, set] = useState({ value: initial ?? null, error: null });
  const key = path + "?" + questions(params);
  const begun = useRef(initial != null ? key : null), now = useRef(null);
  now.current = state.value;
  useEffect(() => {
    if (!path) return undefined;
    let control = null, over = false;
    const load = () => {
      control = new AbortController();
      return ask(path, params, control.signal).then(
        (value) => { if (!over) set({ value, error: null }); },
        (error) => { if (!over && error.name !== "AbortError") set((was) => ({ ...was, error: error.message })); });
    };
    const again = atMost(1000, load), often = atMost(5000, again);
    if (begun.current !== key) again();
    begun.current = null;
    const offs = !shell.live ? [] : [
      on("stale", ({ what }) => (what === "tasks" || what === "curves" ? often : again)()),
      ...(params.importance ? [] : [on("counts", often)]),
    ];
    const timer = shell.live && every ? setInterval(() => { if (!document.hidden && lacks(now.current)) again(); }, every) : 0;
    return () => { over = true; clearInterval(timer); control?.abort(); often.stop(); again.stop(); offs.forEach((off) => off()); };
  }, [key]);
  return state;
}

/** One value of the view; it stands in the URL, so that a link is the view. */
export function useView(name, usual = "") {
  const read = () => inUrl().get(name) ?? usual;
  const [value, set] = useState(read);
  useEffect(() => {
    const follow = () => set(read());
    addEventListener("popstate", follow);
    return () => removeEventListener("popstate", follow);
  }, [name]);
  return [value, (next) => {
    keepInUrl({ [name]: next === usual ? "" : next });
    dispatchEvent(new PopStateEvent("popstate")); // others show the same value
  }];
}

let search = null; // what is to stand in the URL: browsers let a page change it some times a second
const write = atMost(100, () => {
  history.replaceState(null, "", location.pathname + (search && "?" + search) + location.hash);
  search = null;
});

/** The view: what the URL says, or will say in a moment. */
export const inUrl = () => new URLSearchParams(search ?? location.search);

export function keepInUrl(values) {
  const params = inUrl();
  for (const [name, value] of Object.entries(values)) {
    if (value === "" || value === null || value === undefined) params.delete(name);
    else params.set(name, value);
  }
  search = params.toString();
  write();
}

/** A colour of the theme, for canvases. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A number that changes with the theme and the width of `ref`, so that canvases are drawn again. */
export function useSize(ref) {
  const [size, set] = useState({ width: 0, theme: 0 });
  useLayoutEffect(() => {
    const measure = () => set((was) => {
      const width = Math.floor(ref.current?.clientWidth || 0);
      return width === was.width ? was : { ...was, width };
    });
    measure();
    const watch = new ResizeObserver(measure);
    watch.observe(ref.current);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const turn = () => set((was) => ({ ...was, theme: was.theme + 1 }));
    dark.addEventListener("change", turn);
    return () => { watch.disconnect(); dark.removeEventListener("change", turn); };
  }, []);
  return size;
}

/** A canvas's context in CSS pixels, cleared. */
export function canvasOf(element, width, height) {
  const ratio = devicePixelRatio || 1;
  element.width = Math.round(width * ratio);
  element.height = Math.round(height * ratio);
  element.style.width = width + "px";
  element.style.height = height + "px";
  const pen = element.getContext("2d");
  pen.scale(ratio, ratio);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif";
  return pen;
}
