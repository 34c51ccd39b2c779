"""How a report looks: on a wide screen, on a telephone, in the dark and on paper."""

from __future__ import annotations

STYLE = """
:root { --ink: #1b1f24; --faint: #57606a; --page: #ffffff; --panel: #f4f6f8; --line: #d0d7de;
  --link: #0b5cad; --good: #1a7f37; --open: #8a5a00; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --faint: #a3adb8; --page: #14171b; --panel: #1e2329; --line: #3a424c;
    --link: #7db7f2; --good: #57c272; --open: #e3b341; --bad: #ff8a80; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 72rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-bottom: .25rem;
  border-bottom: 1px solid var(--line); }
p { margin: .5rem 0; max-width: 60rem; }
a { color: var(--link); }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; padding: 0;
  margin: .8rem 0 0; }
.state { font-weight: 600; border-left: .35rem solid; padding: .35rem .7rem;
  background: var(--panel); border-radius: .2rem; }
.good { border-color: var(--good); } .open { border-color: var(--open); }
.bad { border-color: var(--bad); }
pre { background: var(--panel); padding: .7rem; border-radius: .3rem; overflow-x: auto;
  font: .85rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
header pre { white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: .5rem 0; } summary { cursor: pointer; }
.scroll { overflow: auto; margin: .8rem 0 .2rem; } .tall { max-height: 34rem; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; white-space: nowrap; }
th, td { padding: .28rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; white-space: nowrap; }
th { font-weight: 600; } thead th { position: sticky; top: 0; background: var(--page); }
td.text, th.text { text-align: left; }
.long { text-align: left; white-space: normal; min-width: 18rem; max-width: 34rem; }
.facts { min-width: 20rem; } .facts th { text-align: left; color: var(--faint);
  font-weight: 400; }
.facts td { overflow-wrap: anywhere; white-space: normal; max-width: 40rem; }
figure { margin: 1rem 0; }
img { max-width: 100%; height: auto; background: #ffffff; border: 1px solid var(--line);
  border-radius: .3rem; padding: .3rem; }
figcaption, .note, footer { color: var(--faint); font-size: .88rem; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); }
@media print {
  :root { --ink: #000000; --faint: #444444; --page: #ffffff; --panel: #f4f4f4; --line: #bbbbbb;
    --link: #000000; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; }
  .scroll, .tall { overflow: visible; max-height: none; }
  pre { white-space: pre-wrap; }
  thead th { position: static; }
  th, td { padding: .15rem .35rem; white-space: normal; }
  table { font-size: 8pt; }
  figure, tr { break-inside: avoid; } h2 { break-after: avoid; }
}
"""
