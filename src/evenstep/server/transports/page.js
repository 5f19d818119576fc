const at = id => document.getElementById(id);
const element = (kind, text, look) => { const e = document.createElement(kind); e.textContent = text; if (look) e.className = look; return e; };
const shape = (kind, points) => { const e = document.createElementNS("http://www.w3.org/2000/svg", kind);
  e.setAttribute("points", points); e.setAttribute("vector-effect", "non-scaling-stroke"); return e; };
const ago = s => s < 1 ? "now" : s < 100 ? Math.round(s) + " s ago" : s < 6000 ? Math.round(s / 60) + " min ago" : Math.round(s / 3600) + " h ago";
const number = v => v >= 100 ? Math.round(v).toLocaleString("en") : v >= 10 ? v.toFixed(1) : v.toFixed(2);
const size = b => b >= 1 << 20 ? number(b / (1 << 20)) + " MiB" : b >= 1 << 10 ? number(b / (1 << 10)) + " KiB" : Math.round(b) + " B";
function say(state, look, trouble) { at("state").textContent = state; at("state").className = look; at("trouble").textContent = trouble; }
const entry = (seconds, text) => { const li = element("li", ""); li.append(element("span", ago(seconds)), element("div", text)); return li; };
function showFigures(found) {
  at("figures").replaceChildren(...Object.entries(found).map(([name, value]) => {
    const d = element("div", ""); d.dataset.figure = name; d.append(element("dt", name), element("dd", value)); return d; }));
}
