-- The constant parts of the report: its style sheet, and the script that shows values under the
-- pointer. Used by report_html.lua.
local M = {}

M.style = [[
:root{color-scheme:light dark;
--sans:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;
--mono:ui-monospace,"SF Mono",Menlo,Consolas,monospace}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:15px/1.55 var(--sans);
-webkit-font-smoothing:antialiased}
main{max-width:1120px;margin:0 auto;padding:36px 24px 64px}
header{display:flex;align-items:flex-start;gap:16px;margin-bottom:8px}header div{flex:1;min-width:0}
h1{font-size:26px;line-height:1.2;letter-spacing:-.015em;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:16px;letter-spacing:-.005em;margin:0 0 2px}
.badge{display:inline-block;font:600 12px/1 var(--sans);padding:5px 9px;border-radius:99px;
vertical-align:4px;margin-left:10px;white-space:nowrap;letter-spacing:0}
.badge.good{background:var(--good-soft);color:var(--good)}
.badge.bad{background:var(--bad-soft);color:var(--bad)}
.badge.live{background:var(--live-soft);color:var(--live)}.sub{color:var(--muted);margin:0}
.lead{font-size:16.5px;line-height:1.6;margin:18px 0 24px;max-width:76ch}
button{font:500 13px var(--sans);color:var(--muted);background:var(--card);
border:1px solid var(--edge);border-radius:8px;padding:6px 11px;cursor:pointer}
button:hover{color:var(--text)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:12px;
margin:0 0 20px}
.tile{background:var(--card);border:1px solid var(--edge);border-radius:12px;padding:12px 16px}
.tile b{display:block;font-size:22px;font-weight:640;letter-spacing:-.02em;line-height:1.25;
font-variant-numeric:tabular-nums}
.tile span{color:var(--muted);font-size:13px}
.tile b+span{font-size:12.5px;font-variant-numeric:tabular-nums}
section{background:var(--card);border:1px solid var(--edge);border-radius:14px;
padding:18px 20px 12px;margin:0 0 16px}
section>p{color:var(--muted);margin:0 0 8px;font-size:13.5px;max-width:92ch}
svg.panel,svg.heat{display:block;box-sizing:border-box;width:100%;overflow:visible;
touch-action:pan-y}
svg.shapes path,path.line,path.mark,path.event{vector-effect:non-scaling-stroke}
text.limit,text.event{paint-order:stroke;stroke:var(--card);stroke-width:3px;stroke-dasharray:none;
stroke-linejoin:round}
svg.heat path{shape-rendering:crispEdges}
svg.sign{width:24px;height:12px;margin-right:7px;vertical-align:-1px;overflow:visible}
.label{fill:var(--text);font:12px var(--sans)}.none{fill:url(#none)}.blank{fill:var(--card)}
path.bad{fill:var(--bad);stroke:var(--bad);stroke-width:1;vector-effect:non-scaling-stroke}
path.bar{stroke:var(--card);stroke-width:3;vector-effect:non-scaling-stroke}
.cross{stroke:var(--muted);stroke-width:1;pointer-events:none;visibility:hidden}
.cell{fill:none;stroke:var(--text);stroke-width:1.5;pointer-events:none;visibility:hidden}
.legend{display:flex;flex-wrap:wrap;gap:6px 18px;font-size:13px;color:var(--muted);margin:2px 0 6px;
align-items:center}
.ramp{display:inline-flex;height:12px;border-radius:3px;overflow:hidden;vertical-align:middle;
margin:0 8px}
.ramp u{width:7px;height:12px}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:600;color:var(--muted);font-size:12.5px;padding:6px 14px 6px 0;
border-bottom:1px solid var(--edge);white-space:nowrap}
td{padding:6px 14px 6px 0;border-bottom:1px solid var(--grid);vertical-align:top}
tr:last-child td{border-bottom:0}td.n,th.n{text-align:right;white-space:nowrap}
td:first-child code{white-space:nowrap}.scroll{overflow-x:auto}.whole{white-space:nowrap}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:0 16px;align-items:start}
.pair section{min-width:0}@media(max-width:860px){.pair{grid-template-columns:minmax(0,1fr)}}
@media(max-width:600px){text.wide{display:none}
main{padding:20px 10px 40px}section{padding:14px 12px 10px}
h1{font-size:22px}}
.bar{height:8px;margin-top:6px;border-radius:4px;background:var(--bad);min-width:2px;opacity:.75}
code{overflow-wrap:anywhere}code,pre{font-family:var(--mono);font-size:12.5px}
pre{margin:6px 0 10px;padding:14px 16px;background:var(--page);border:1px solid var(--edge);
border-radius:10px;overflow:auto;line-height:1.5;max-height:560px}
.k{color:var(--c4)}.s{color:var(--c3)}.c{color:var(--muted);font-style:italic}.u{color:var(--c1)}
a{color:var(--c1)}details summary{cursor:pointer;padding:4px 0;font-weight:600}
details summary span{color:var(--muted);font-weight:400}
#tip{position:fixed;z-index:9;pointer-events:none;background:var(--tip);color:var(--tip-text);
border-radius:10px;padding:9px 12px;font:12.5px/1.5 var(--sans);
box-shadow:0 6px 24px rgb(0 0 0/.22);max-width:340px;opacity:0;transition:opacity .08s;
font-variant-numeric:tabular-nums}
#tip.on{opacity:1}#tip b{font-weight:640}#tip table{font-size:12.5px;width:auto}
#tip td{border:0;padding:0 0 0 14px;text-align:right}
#tip td:first-child{padding:0;text-align:left;opacity:.75}
#tip em{font-style:normal;color:var(--tip-bad);font-weight:600}
footer{color:var(--muted);font-size:13px;margin-top:28px}
@media print{button{display:none}body{background:#fff}section,.tile{break-inside:avoid}}
]]

-- The pattern behind a heat map, visible where nothing was recorded.
M.hatch = '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>' ..
  '<pattern id="none" width="6" height="6" patternUnits="userSpaceOnUse">' ..
  '<path d="M-1 7L7-1M-1 1L1-1M5 7L7 5"' ..
  ' stroke="var(--none)" stroke-width="1" fill="none"/></pattern></defs></svg>'

M.light = "--page:#f5f6f8;--card:#fff;--edge:#e3e7ee;--good:#067647;--good-soft:#dcf5e7;" ..
  "--bad-soft:#fde4e1;--live:#175cd3;--live-soft:#deebff;--tip:#1d2433;" ..
  "--tip-text:#f5f7fa;--tip-bad:#ff9a8f;--none:#cdd3dd;"
M.dark = "--page:#0b0e13;--card:#131820;--edge:#252d3a;--good:#4cd79b;--good-soft:#10301f;" ..
  "--bad-soft:#3b1714;--live:#84b6ff;--live-soft:#14284a;--tip:#e9edf4;" ..
  "--tip-text:#151a23;--tip-bad:#c3261a;--none:#343d4c;"

M.script = [[
(function(){
"use strict";
var D=JSON.parse(document.getElementById("data").textContent),tip=document.getElementById("tip");
var sup={"-":"⁻",0:"⁰",1:"¹",2:"²",3:"³",4:"⁴",5:"⁵",6:"⁶",7:"⁷",8:"⁸",9:"⁹"};
function power(b,e){return b+String(e).replace(/./g,function(d){return sup[d]})}
function num(x){
  if(x===null||x===undefined)return"–";
  if(typeof x==="string")return x;
  var a=Math.abs(x);
  if(x%1===0&&a<1e12)return x.toLocaleString("en-US");
  if(a>=1e6||a<1e-3){var p=x.toExponential(2).split("e");
  return parseFloat(p[0])+"×"+power("10",+p[1])}
  return a>=1000?Math.round(x).toLocaleString("en-US"):String(parseFloat(x.toPrecision(4)))
}
function scale(x){var e=Math.log2(x);return Math.abs(e-Math.round(e))<1e-9&&
Math.abs(e)>13?power("2",Math.round(e)):num(x)}
function percent(x){if(x===null)return"–";x*=100;
return x===0?"0 %":x<0.01?"<0.01 %":parseFloat(x.toPrecision(3))+" %"}
var show={loss:num,scale:scale,stored:num,norm:num,lr:num,underflow:percent};
function range(c,i,how){
  if(c.mean[i]===null)return"–";
  return D.width>1&&c.min[i]!==c.max[i]?how(c.min[i])+" … "+how(c.max[i]):how(c.mean[i])
}
function row(a,b){return"<tr><td>"+a+"</td><td>"+b+"</td></tr>"}
function steps(a,b){return b>a?"steps "+num(a)+" to "+num(b):"step "+num(a)}
function place(ev){
  tip.classList.add("on");
  var w=tip.offsetWidth,h=tip.offsetHeight,x=ev.clientX+18,y=ev.clientY+18;
  if(x+w>innerWidth-8)x=ev.clientX-w-18;
  if(y+h>innerHeight-8)y=Math.max(8,ev.clientY-h-18);
  tip.style.left=Math.max(8,x)+"px";tip.style.top=y+"px"
}
function hide(){tip.classList.remove("on");crosses.forEach(function(c){
c.style.visibility="hidden"})}
// The pointer's position in a panel: x 0 to 1, y in pixels from the SVG's top. over: 6 pixels in
// units of x, the distance at which the pointer still counts as on the panel or on an event.
function inside(svg,ev){var r=svg.getBoundingClientRect();
return{x:(ev.clientX-r.left-D.left)/(r.width-D.left-D.right),y:ev.clientY-r.top,
over:6/(r.width-D.left-D.right)}}
function near(x){
  var s=D.first+x*(D.last-D.first),lo=0,hi=D.x.length-1;
  while(lo<hi){var m=(lo+hi)>>1;if(D.x[m]<s)lo=m+1;else hi=m}
  return lo>0&&s-D.x[lo-1]<D.x[lo]-s?lo-1:lo
}
function part(step){return(step-D.first)/(D.last-D.first)}
function holding(list,step){var v=null;for(var i=0;i<list.length&&list[i][0]<=step;i++)v=list[i];
return v}
var panels=[].slice.call(document.querySelectorAll("svg.panel")),crosses=panels.map(function(p){
return p.querySelector(".cross")});
panels.forEach(function(svg){
  svg.addEventListener("pointermove",function(ev){
    var p=inside(svg,ev);
    if(p.x<-p.over||p.x>1+p.over)return hide();
    var i=near(p.x),own=svg.dataset.column,text="<b>"+steps(D.step[i],Math.min(D.step[i]+D.width-1,
    D.end_step))+"</b><table>";
    (D.groups?D.groups[own]:D.names).forEach(function(n){
      var v=range(D.columns[n],i,show[n]||show[own]||num);
      text+=row(n===own?"<b>"+D.titles[n]+"</b>":D.titles[n],n===own?"<b>"+v+"</b>":v)
    });
    text+="</table>";
    if(own==="scale")D.shadows.forEach(function(s){
      var v=holding(s.points,D.step[i]+D.width-1);
      if(v&&v[1])text+="<div>"+s.name+": "+scale(v[1])+(v[2]!=="step"?" · "+v[2]:"")+"</div>"
    });
    if(D.overflows[i])text+="<div><em>"+(D.width>1?D.overflows[i]+" overflow"+
    (D.overflows[i]>1?"s":""):"overflow")+"</em></div>";
    D.events.forEach(function(e){if(Math.abs(part(e[0])-part(D.x[i]))<p.over)
    text+="<div>"+e[1]+"</div>"});
    tip.innerHTML=text;place(ev);
    var x=part(D.x[i])*100+"%";
    crosses.forEach(function(c){c.setAttribute("x1",x);c.setAttribute("x2",x);
    c.style.visibility="visible"})
  });
  svg.addEventListener("pointerleave",hide)
});
[].slice.call(document.querySelectorAll("svg.heat")).forEach(function(svg){
  var h=D[svg.dataset.heat],cell=svg.querySelector(".cell");
  svg.addEventListener("pointermove",function(ev){
    var p=inside(svg,ev),r=Math.floor((p.y-h.top)/h.row),c=-1,i;
    for(i=0;i<h.x.length;i++)if(p.x*1000>=h.x[i][0]&&p.x*1000<h.x[i][1]){c=i;break}
    if(r<0||r>=h.rows||c<0){tip.classList.remove("on");cell.style.visibility="hidden";return}
    tip.innerHTML={layers:layer,shares:share,time:exponent,fp8:meter}[svg.dataset.heat](h,r,c);
    place(ev);
    cell.setAttribute("x",h.x[c][0]/10+"%");
    cell.setAttribute("width",(h.x[c][1]-h.x[c][0])/10+"%");
    cell.setAttribute("y",r*h.row);cell.setAttribute("height",h.row);
    cell.style.visibility="visible"
  });
  svg.addEventListener("pointerleave",function(){tip.classList.remove("on");
  cell.style.visibility="hidden"})
});
function layer(h,r,c){
  var v=h.cells[r][c],t="<b>"+h.names[r]+"</b>";
  if(!v)return t+"<div>nothing recorded</div>";
  t+="<table>"+row("step",num(v[0]))+row("largest, as stored",v[1]===0?"0":num(v[1])+
  " = 2^"+Math.log2(v[1]).toFixed(1))+row("format",h.formats[r]);
  if(v[3]!==null)t+=row("below the format's top",v[3].toFixed(1)+" bits");
  t+="</table>";
  return v[2]?t+"<div><em>inf or nan: "+num(v[2])+" elements</em></div>":t
}
function meter(h,r,c){
  var v=h.cells[r][c],t="<b>"+h.names[r]+"</b>";
  if(!v)return t+"<div>not in FP8 here</div>";
  return t+"<table>"+row("step",num(v[0]))+row("signal to noise",v[1]===null?"–":num(v[1])+" dB")+
  row("became zero",percent(v[2]))+row("clipped",percent(v[3]))+
    row("largest",num(v[4]))+
    row("scale",v[5]===v[6]?num(v[5]):num(v[5])+" … "+num(v[6]))+"</table>"
}
function share(h,r,c){
  var n=h.cells[r][c],e=h.least+c;
  return"<b>"+h.names[r]+"</b><div>"+percent(n)+" of its nonzero gradients<br>have magnitudes "+
  power("2",e)+" to "+power("2",e+1)+"</div>"+
    (e<h.normal?"<div>below the smallest normal number</div>":"")
}
function exponent(h,r,c){
  var e=h.most-r,n=h.cells[c]?h.cells[c][e-h.least]:null;
  return"<b>step "+num(h.steps[c])+"</b><div>"+percent(n||0)+
  " of the nonzero gradients<br>have magnitudes "+power("2",e)+" to "+power("2",e+1)+"</div>"
}
var root=document.documentElement,button=document.getElementById("theme");
function dark(){
  return root.dataset.theme?
    root.dataset.theme==="dark":matchMedia("(prefers-color-scheme: dark)").matches
}
function label(){button.textContent=dark()?"Light":"Dark"}
button.addEventListener("click",function(){root.dataset.theme=dark()?"light":"dark";label()});
label()
})();
]]

return M
