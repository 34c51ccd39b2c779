// The rows of a long table: pages of the server's answer, kept as long as the view stays the same.
// A copy in files holds all rows at once; sorting and filtering is then done here.
import { ask, shell, atMost } from "./lib.js";

export const PAGE = 200;

export class Rows {
  /** `changed` is called whenever there is something new to show. */
  constructor(path, changed, initial, view) {
    Object.assign(this, { path, changed, columns: [], total: 0, error: "", loading: false });
    this.pages = new Map();
    this.asked = new Map();
    this.view = view;
    this.range = [0, 0];
    this.refresh = atMost(1000, () => this.#again());
    this.search = atMost(120, () => { this.#again(true); }); // the next word does not wait for it
    if (initial) this.#take(0, initial);
    if (!shell.live) this.#again();
  }

  /** Another sorting or filter: what is shown stays until the new rows are here. */
  see(view) {
    this.view = view;
    this.search();
  }

  row(index) {
    return this.pages.get(Math.floor(index / PAGE))?.[index % PAGE];
  }

  /** Rows from `low` to `high` are looked at. */
  want(low, high) {
    this.range = [low, high];
    if (!shell.live) return;
    for (let at = Math.floor(low / PAGE); at <= Math.floor(Math.max(low, high - 1) / PAGE); at += 1) {
      const page = this.pages.get(at);
      const whole = page && (page.length === PAGE || at * PAGE + page.length >= this.total);
      if (!whole && !this.asked.has(at) && (at === 0 || at * PAGE < this.total)) this.#load(at);
    }
  }

  /** Rows that have changed, as the stream tells them; the order is asked for again. */
  patch({ columns, rows }) {
    const same = columns?.length === this.columns.length && columns.every((key, at) => key === this.columns[at].key);
    if (same) {
      const news = new Map(rows.map((row) => [row.key, row]));
      for (const page of this.pages.values()) {
        page.forEach((row, at) => { if (news.has(row.key)) page[at] = news.get(row.key); });
      }
      this.changed();
    }
    this.refresh();
  }

  close() {
    this.refresh.stop();
    this.search.stop();
    this.closed = true;
    for (const control of this.asked.values()) control.abort();
  }

  #again(fresh) {
    for (const control of this.asked.values()) control.abort();
    this.asked.clear();
    const [low, high] = this.range;
    if (fresh || !shell.live) return this.#load(0, true);
    const loads = [];
    for (let at = Math.floor(low / PAGE); at <= Math.floor(high / PAGE); at += 1) loads.push(this.#load(at, true));
    return Promise.all(loads);
  }

  async #load(at, anew) {
    const control = new AbortController();
    this.asked.set(at, control);
    this.loading = true;
    try {
      const { sort, desc, filter, state } = this.view;
      const answer = await ask(this.path, { sort, desc, filter, state, offset: at * PAGE, limit: PAGE }, control.signal);
      if (control.signal.aborted || this.closed) return;
      if (anew) for (const old of [...this.pages.keys()]) if (old !== at && !this.#isSeen(old)) this.pages.delete(old);
      this.error = "";
      this.#take(at, shell.live ? answer : chosen(answer, this.view));
    } catch (error) {
      if (error.name === "AbortError" || this.closed) return;
      this.error = error.message;
    } finally {
      if (this.asked.get(at) === control) this.asked.delete(at);
      this.loading = this.asked.size > 0;
    }
    this.changed();
  }

  #isSeen(at) {
    return at >= Math.floor(this.range[0] / PAGE) && at <= Math.floor(this.range[1] / PAGE);
  }

  #take(at, answer) {
    // Cells stand in the order of their own answer's columns: what was answered otherwise goes.
    const { columns } = answer, same = columns.length === this.columns.length && columns.every(({ key }, n) => key === this.columns[n].key);
    if (!same) this.pages.clear();
    this.columns = columns;
    this.total = answer.total;
    for (let from = 0; from < Math.max(1, answer.rows.length); from += PAGE) {
      this.pages.set(at + from / PAGE, answer.rows.slice(from, from + PAGE));
    }
    for (const old of [...this.pages.keys()]) if (old * PAGE >= Math.max(1, this.total)) this.pages.delete(old);
  }
}

const WORD = /"([^"]*)"|(\S+)/g;
const TEST = /^([^<>=!]+?)(<=|>=|!=|=|<|>)(.*)$/;
const COMPARE = {
  "=": (a, b) => a === b, "!=": (a, b) => a !== b, "<": (a, b) => a < b, ">": (a, b) => a > b,
  "<=": (a, b) => a <= b, ">=": (a, b) => a >= b,
};

/** What the server does for a live page: `state`, then each word of `filter`, then the order. */
export function chosen(all, { sort, desc, filter, state }) {
  const at = new Map(all.columns.map((column, n) => [column.key, n]));
  const tests = [...(filter || "").matchAll(WORD)].map(([, quoted, word]) => {
    const found = quoted === undefined && word.match(TEST);
    if (found && at.has(found[1])) {
      const n = at.get(found[1]), wanted = found[3], isNumber = wanted !== "" && !Number.isNaN(+wanted);
      return ({ cells }) => isNumber && typeof cells[n] === "number"
        ? COMPARE[found[2]](cells[n], +wanted) : COMPARE[found[2]](String(cells[n] ?? ""), wanted);
    }
    const text = (quoted ?? word).toLowerCase();
    return ({ cells }) => cells.some((cell) => String(cell ?? "").toLowerCase().includes(text));
  });
  if (state) tests.push(({ cells }) => cells[at.get("state")] === state);
  let rows = all.rows.filter((row) => tests.every((test) => test(row)));
  if (at.has(sort)) {
    const n = at.get(sort), sign = desc ? -1 : 1;
    rows = [...rows].sort(({ cells: { [n]: a } }, { cells: { [n]: b } }) => {
      if (a === null || b === null || a === undefined || b === undefined) return (a ?? null) === (b ?? null) ? 0 : (a ?? null) === null ? 1 : -1;
      return sign * (a < b ? -1 : a > b ? 1 : 0);
    });
  }
  return { columns: all.columns, total: rows.length, rows };
}
