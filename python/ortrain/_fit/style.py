"""Style of the report: one sheet for wide and narrow windows, for light and dark ones, and for paper."""

from __future__ import annotations

_LIGHT = """
--page:#f6f6f3;--card:#fdfdfc;--ink:#0b0b0b;--soft:#52514e;--faint:#6f6d66;--rule:#e3e2dc;--edge:rgba(11,11,11,.09);
--c1:#2a78d6;--c2:#d9591f;--c3:#1f9c86;--c4:#8a63c9;--c5:#b98a1c;--good:42,120,214;--bad:217,89,31;--is:#1f63b5;--said:#b0430f;
"""
_DARK = """
--page:#101010;--card:#1a1a19;--ink:#f4f4f1;--soft:#c3c2b7;--faint:#98968e;--rule:#30302d;--edge:rgba(255,255,255,.1);
--c1:#5b9df0;--c2:#ee7f47;--c3:#3fbfa6;--c4:#ac8ae6;--c5:#d6ab45;--good:91,157,240;--bad:238,127,71;--is:#7fb3f6;--said:#f39a6b;
"""

STYLE = (
    ":root{color-scheme:light dark;"
    + _LIGHT
    + "}@media screen and (prefers-color-scheme:dark){:root{"
    + _DARK
    + "}}"
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
-webkit-text-size-adjust:100%}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 12px}
h3{font-size:14px;font-weight:600;margin:0 0 4px}
p{margin:0 0 10px}
.note{color:var(--soft);font-size:13.5px}
section{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:18px 20px;margin-top:16px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:12px;margin-top:18px}
.tile{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:12px 14px}
.tile b{display:block;font-size:22px;line-height:1.25;font-weight:650}
.tile span{color:var(--soft);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:18px 26px}
figure{margin:0;min-width:0}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:12px;fill:var(--faint);font-variant-numeric:tabular-nums}
svg .title{fill:var(--soft)}
.grid{stroke:var(--rule);stroke-width:1}
.axis{stroke:var(--faint);stroke-width:1;opacity:.7}
.reference{stroke:var(--faint);stroke-width:1;stroke-dasharray:4 4}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.line.faint{stroke:var(--c1);stroke-width:1.2;opacity:.38}
.point{stroke:var(--card);stroke-width:1.5}
.dot{opacity:.55}
.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3)}
.point.c1,.dot.c1,.bar.c1{fill:var(--c1)}.point.c2{fill:var(--c2)}.point.c3{fill:var(--c3)}.point.faint{fill:var(--c1)}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;margin:0 0 6px;font-size:13px;color:var(--soft)}
.key{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.key.c1,.part.c1{background:var(--c1)}.key.c2,.part.c2{background:var(--c2)}.key.c3,.part.c3{background:var(--c3)}
.key.c4,.part.c4{background:var(--c4)}.key.c5,.part.c5{background:var(--c5)}.key.faint{background:var(--c1);opacity:.38}
.wide{overflow-x:auto;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums}
th{font-weight:500;color:var(--soft);text-align:left}
.list{width:100%}
.list th,.list td{padding:5px 12px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top;overflow-wrap:anywhere}
.settings th{white-space:nowrap}
.list .number{text-align:right;white-space:nowrap;padding-right:0;padding-left:12px}
code{font:12.5px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.matrix td{min-width:34px;height:30px;padding:0 5px;text-align:center;border:2px solid var(--card);border-radius:6px}
.matrix th{padding:2px 7px;white-space:nowrap;max-width:150px;overflow:hidden;text-overflow:ellipsis}
.matrix tr>th:first-child{position:sticky;left:0;background:var(--card);text-align:left}
.matrix .column{text-align:center}
.matrix .zero{color:var(--faint)}
.pixels{width:min(100%,520px);image-rendering:pixelated;border:1px solid var(--rule);border-radius:4px;display:block}
.beside{display:flex;flex-wrap:wrap;gap:18px 36px;align-items:flex-start}
.beside>*{min-width:0;max-width:100%}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,var(--card-width,150px)),1fr));gap:14px}
.example{border:1px solid var(--rule);border-radius:8px;overflow:hidden;font-size:13px;background:var(--page)}
.example img{display:block;width:100%;aspect-ratio:1;object-fit:contain;image-rendering:pixelated;background:#777}
.example div{padding:8px 10px}
.example blockquote{margin:0;padding:10px 10px 0;overflow-wrap:anywhere;white-space:pre-wrap}
.example .list{font-size:12.5px}
.is{color:var(--is);font-weight:600}.said{color:var(--said);font-weight:600}
.stack{display:flex;gap:2px;height:22px;margin:2px 0 8px;border-radius:5px;overflow:hidden}
.part{min-width:2px}
.share{height:6px;border-radius:3px;background:var(--c1);min-width:2px}
summary{cursor:pointer;color:var(--soft);font-size:13.5px;padding:8px 0}
footer{color:var(--faint);font-size:12.5px;margin-top:22px}
@media (max-width:520px){main{padding:18px 12px 40px}section{padding:14px 14px}h1{font-size:22px}
.tiles{grid-template-columns:1fr 1fr;gap:8px}.tile:last-child:nth-child(odd){grid-column:1/-1}
.tile b{font-size:19px}svg text{font-size:13px}
.cards{--card-width:130px;gap:10px}
.list{font-size:13px}.settings th,.settings td{display:block;white-space:normal;border:0;padding:0}
.settings td{padding-bottom:8px;border-bottom:1px solid var(--rule);margin-bottom:6px}code{font-size:11.5px}
.parameters tr{display:flex;flex-wrap:wrap;justify-content:space-between;border-bottom:1px solid var(--rule)}
.parameters td{border:0}.parameters td:first-child{flex:1 0 100%;padding-bottom:0}.parameters .number{padding-left:0}
.matrix td{min-width:30px;padding:0 3px}.matrix .column{max-width:58px;padding:2px 3px}
.matrix tr>th:first-child{max-width:88px;padding-left:0;white-space:normal;overflow-wrap:anywhere}
.list tr:last-child>*{border-bottom:0}.narrow-hidden{display:none}}
@media print{:root{color-scheme:light;--page:#fff;--card:#fff}@page{margin:14mm}
body{font-size:10.5pt;-webkit-print-color-adjust:exact;print-color-adjust:exact}main{max-width:none;padding:0}
section,.tile{border-color:#d5d4ce}section,figure,.tile,.example,.beside>*,tr{break-inside:avoid}
section{padding:12px 14px}.tile b{font-size:13pt}
.charts{grid-template-columns:1fr 1fr}.tiles{grid-template-columns:repeat(auto-fit,minmax(85px,1fr))}
.cards{grid-template-columns:repeat(auto-fill,minmax(var(--card-width,105px),1fr))}
.wide{overflow:visible}details::details-content{content-visibility:visible;height:auto}summary{display:none}}
"""
)
