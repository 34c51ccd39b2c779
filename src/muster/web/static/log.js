// What a task or a rank has printed: its end first, followed while it grows, with a search and links
// to lines. Lines are numbered where all of the log is here.
import { ask, atMost, html, inUrl, run, shell, useEffect, useLayoutEffect, useMemo, useRef, useState, useView } from "./lib.js";
import { on, watchLog } from "./live.js";
import { Failure } from "./parts.js";
import * as format from "./format.js";

const PART = 64 * 1024, WHOLE = 256 * 1024, MOST = 1024 * 1024;
const COLOURS = /\u001b\[[0-9;:]*[A-Za-z]/g;

export function Log({ task }) {
  const [log, setLog] = useState(null);
  const [error, setError] = useState("");
  const [word, setWord] = useView("find");
  const [at, setAt] = useState(0);
  const [mark, setMark] = useState(() => Number(location.hash.match(/^#L(\d+)$/)?.[1]) || 0);
  const box = useRef(null), follow = useRef(!mark);
  const load = (offset, limit) => ask(shell.live ? `run/${run.id}/log` : `run/${run.id}/log/${task}`, { task, offset, limit });
  useEffect(() => {
    let over = false, timer = 0;
    const begin = async () => {
      try {
        const tail = await load(-PART, PART);
        const whole = tail.offset > 0 && tail.total <= WHOLE ? await load(0, WHOLE) : tail;
        if (!over) { setLog(whole); setError(""); }
      } catch (failed) {
        if (over) return;
        setError(failed.message); // of what has just begun there is no log yet
        clearTimeout(timer);
        if (shell.live) timer = setTimeout(begin, 2000);
      }
    };
    const again = atMost(1000, begin);
    again();
    if (shell.live) watchLog(task);
    const offs = [
      on("stale", ({ what }) => { if (!what) again(); }),
      // Only what goes on exactly where the text here ends is added: nothing twice, nothing left
      // out. What has become too long begins again with its end.
      on("log", (news) => {
        if (String(news.task) !== String(task)) return;
        setLog((was) => {
          if (!was || news.end <= was.end) return was;
          if (news.offset !== was.end || was.text.length > MOST) { again(); return was; }
          return { ...was, text: was.text + news.text, end: news.end, total: news.end };
        });
      }),
    ];
    return () => { over = true; clearTimeout(timer); again.stop(); offs.forEach((off) => off()); };
  }, [task]);
  const earlier = async () => {
    const from = Math.max(0, log.offset - PART);
    const before = await load(from, log.offset - from);
    setLog((was) => ({ ...was, text: before.text + was.text, offset: before.offset }));
  };
  const lines = useMemo(() => {
    const found = (log?.text || "").replace(COLOURS, "").split("\n");
    if (found[found.length - 1] === "") found.pop();
    return found;
  }, [log]);
  const wanted = word.toLowerCase();
  const hits = useMemo(() => (wanted ? lines.flatMap((line, n) => (line.toLowerCase().includes(wanted) ? [n] : [])) : []), [lines, wanted]);
  useLayoutEffect(() => {
    if (follow.current && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines]);
  const show = (n) => box.current?.children[n]?.scrollIntoView({ block: "nearest" });
  useEffect(() => { if (mark && lines.length) show(mark - 1); }, [mark, lines.length > 0]);
  const next = (step) => {
    if (!hits.length) return;
    const to = (at + step + hits.length) % hits.length;
    setAt(to);
    follow.current = false;
    show(hits[to]);
  };
  const pick = (n) => {
    const view = inUrl().toString();
    history.replaceState(null, "", `${location.pathname}${view && "?" + view}#L${n}`);
    setMark(n);
  };
  if (!log) return error ? html`<p class="empty">${error}</p>` : html`<p class="empty">Reading the log…</p>`;
  const isNumbered = log.offset === 0;
  const hit = new Set(hits);
  return html`<div class="log-box">
    <div class="tools"><label class="search"><span class="sr">Find in the log</span>
      <input type="search" data-search placeholder="Find in the log" value=${word} onInput=${(event) => { setAt(0); setWord(event.target.value); }} onKeyDown=${(event) => { if (event.key === "Enter") { event.preventDefault(); next(event.shiftKey ? -1 : 1); } }} /></label>
      ${word && html`<span role="status">${hits.length ? `${at + 1} of ${hits.length}` : "not found"}</span><button type="button" onClick=${() => next(-1)}>Previous</button><button type="button" onClick=${() => next(1)}>Next</button>`}
      <span class="note">${format.bytes(log.total)}</span>
      ${log.offset > 0 && html`<button type="button" onClick=${earlier}>Show earlier lines</button>`}
    </div>
    <${Failure} error=${error} />
    ${lines.length ? html`<div class="log" ref=${box} tabindex="0" role="log" aria-label="Log" aria-live="off" onScroll=${(event) => { const one = event.currentTarget; follow.current = one.scrollHeight - one.scrollTop - one.clientHeight < 40; }}>
      ${lines.map((line, n) => html`<div key=${n} class="${hit.has(n) ? "hit" : ""} ${mark === n + 1 && isNumbered ? "marked" : ""} ${hits[at] === n ? "now" : ""}">${isNumbered ? html`<a href="#L${n + 1}" aria-label="Line ${n + 1}" tabindex="-1" onClick=${(event) => { event.preventDefault(); pick(n + 1); }}>${n + 1}</a>` : null}<span>${line || " "}</span></div>`)}
    </div>` : html`<p class="empty">Nothing was printed.</p>`}
  </div>`;
}
