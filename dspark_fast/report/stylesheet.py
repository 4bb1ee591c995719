"""How the page looks: light and dark, on a phone, on paper."""

STYLESHEET = """
:root { --ink: #1f2429; --soft: #59626c; --paper: #fdfdfc; --card: #f3f5f7; --line: #dde1e6; --accent: #2b6cb0;
  --ok: #2f8f5b; --no: #b8402f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #a3acb5; --paper: #15181b; --card: #1f2428; --line: #343b42; --accent: #7db3e8;
    --ok: #63c08d; --no: #ef8b7c; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 54rem; padding: 1.5rem 1.1rem 4rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: clamp(1.35rem, 5vw, 1.7rem); line-height: 1.25; margin: 0.2rem 0 0.8rem; text-wrap: balance;
  overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 0 0 0.6rem; }
p { margin: 0 0 0.7rem; max-width: 44rem; }
.kicker { color: var(--accent); font-weight: 600; margin: 0; }
.facts { color: var(--soft); font-size: 0.9rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: 0.7rem; margin: 1.2rem 0; }
.tiles div { background: var(--card); border-radius: 0.6rem; padding: 0.8rem 1rem; }
.tiles b { display: block; font-size: 1.5rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: 0.85rem; line-height: 1.35; display: block; margin-top: 0.2rem; }
nav { display: flex; flex-wrap: wrap; gap: 0.3rem 1rem; padding: 0.7rem 0; font-size: 0.9rem;
  border-block: 1px solid var(--line); }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
section { margin: 2.6rem 0 0; scroll-margin-top: 1rem; }
figure { margin: 1.1rem 0; background: #fff; border: 1px solid var(--line); border-radius: 0.6rem; padding: 0.6rem; }
img { display: block; width: 100%; height: auto; }
.caption { color: var(--soft); font-size: 0.88rem; margin: 1.2rem 0 0; }
.table { overflow-x: auto; margin: 0.2rem 0 1rem; }
table { border-collapse: collapse; font-size: 0.88rem; font-variant-numeric: tabular-nums; min-width: 60%; }
th, td { padding: 0.3rem 0.8rem 0.3rem 0; text-align: right; vertical-align: top;
  border-bottom: 1px solid var(--line); }
td { white-space: nowrap; }
footer td { white-space: normal; }
th:first-child { text-align: left; font-weight: 500; min-width: 9rem; }
thead th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
.strip { margin: 0.7rem 0; }
.label { display: block; color: var(--soft); font-size: 0.85rem; margin-bottom: 0.2rem; }
.tokens, .key { display: flex; flex-wrap: wrap; gap: 0.3rem; }
.tok { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.85rem;
  white-space: pre; padding: 0.1rem 0.4rem; border: 1.5px solid var(--line); border-radius: 0.35rem; }
.anchor { background: var(--card); }
.ok { border-color: var(--ok); }
.no { border-color: var(--no); border-style: dashed; text-decoration: line-through; color: var(--no); }
.own { border-color: var(--accent); font-weight: 600; }
.key { margin-top: 0.4rem; opacity: 0.85; }
.key .tok { font-size: 0.72rem; }
q { quotes: "\\201c" "\\201d"; }
footer { margin-top: 3rem; padding-top: 1.4rem; border-top: 1px solid var(--line); font-size: 0.92rem; }
footer td { text-align: left; }
summary { cursor: pointer; color: var(--accent); margin-bottom: 0.5rem; }
li { margin-bottom: 0.3rem; color: var(--soft); font-size: 0.85rem; overflow-wrap: anywhere; }
pre { background: var(--card); border-radius: 0.5rem; padding: 0.7rem 0.9rem; overflow-x: auto; font-size: 0.82rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
@media screen and (max-width: 40rem) {
  .tiles { grid-template-columns: 1fr 1fr; }
  figure { overflow-x: auto; }
  img { width: 38rem; max-width: none; }
}
@media print {
  :root { --ink: #000; --soft: #444; --paper: #fff; --card: #f3f5f7; --line: #ccc; --accent: #1d4f86; --ok: #1f7a49;
    --no: #a33a2b; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  h1 { font-size: 17pt; }
  .tiles { grid-template-columns: repeat(4, 1fr); }
  section { margin-top: 1.4rem; }
  figure { margin: 0.6rem 0; max-width: 15cm; }
  nav, details { display: none; }
  h2, .caption, .label { break-after: avoid; }
  figure, .table, .strip, .tiles div { break-inside: avoid; }
}
"""
