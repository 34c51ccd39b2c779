// Values as a reader sees them. Pure.
export function number(value) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value !== "number") return text(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return String(value);
  const size = Math.abs(value);
  return size >= 1e6 || (size < 1e-4 && size > 0) ? value.toExponential(3).replace(/\.?0+e/, "e") : String(+value.toPrecision(5));
}

export function text(value) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "number") return number(value);
  if (Array.isArray(value)) return `[${value.map(text).join(", ")}]`;
  if (typeof value === "object") {
    return Object.entries(value).filter(([, one]) => one !== null).map(([name, one]) => `${name} ${text(one)}`).join(", ") || "–";
  }
  return String(value);
}

export const many = (value) => (value ?? 0).toLocaleString("en-US");

const two = (value) => String(value).padStart(2, "0");

export function duration(seconds) {
  if (typeof seconds !== "number") return "–";
  if (seconds > 0 && seconds < 1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  if (seconds < 60) return `${seconds < 10 ? Math.max(0, seconds).toFixed(1) : Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${two(Math.floor(whole / 60) % 60)} min`;
  return `${Math.floor(whole / 86400)} d ${two(Math.floor(whole / 3600) % 24)} h`;
}

export function interval(range) {
  if (!range || range.some((one) => typeof one !== "number")) return "–";
  const [least, most] = [duration(range[0]), duration(range[range.length - 1])];
  return least === most ? least : `${least} – ${most}`;
}

export function ago(seconds, now = Date.now() / 1000) {
  if (typeof seconds !== "number") return "–";
  const past = now - seconds;
  if (past < 5) return "now";
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const [size, unit] = units.find(([one]) => past >= one) || [1, "s"];
  return `${Math.floor(past / size)} ${unit} ago`;
}

export function moment(seconds) {
  if (typeof seconds !== "number") return "–";
  const when = new Date(seconds * 1000);
  return Number.isNaN(when.getTime()) ? "–" : when.toLocaleString("sv-SE");
}

export function bytes(value) {
  if (typeof value !== "number") return "–";
  let rest = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (rest < 1024) return unit === "B" ? `${rest} B` : `${rest.toFixed(1)} ${unit}`;
    rest /= 1024;
  }
  return `${rest.toFixed(1)} TiB`;
}

export const mib = (value) => (typeof value === "number" ? bytes(value * 1048576) : "–");
