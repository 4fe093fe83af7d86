"use strict";
// What the page does beyond standing there: structures that turn, and one residue or a selection shown in all of
// structure, sequence, pLDDT, coverage and PAE at once, by mouse, finger or keyboard.  Downloads are made from what the
// page holds.  A `Panel` is one prediction; nothing of it is made before it comes into sight.
const { classes, targets } = JSON.parse(document.getElementById("structures").textContent);
const RESIDUES = { A: "Ala", R: "Arg", N: "Asn", D: "Asp", C: "Cys", Q: "Gln", E: "Glu", G: "Gly", H: "His", I: "Ile", L: "Leu", K: "Lys", M: "Met", F: "Phe", P: "Pro", S: "Ser", T: "Thr", W: "Trp", Y: "Tyr", V: "Val", X: "Xaa" };
const DIMMED = "#b9c1c9", SVG = "http://www.w3.org/2000/svg", MOST_VIEWERS = 6;
const live = [];  // panels with a viewer, the one seen longest ago first: browsers allow some 16 WebGL contexts at once
const dark = matchMedia("(prefers-color-scheme: dark)");
const hasWebGL = (() => { try { return !!document.createElement("canvas").getContext("webgl2"); } catch { return false; } })();
const classOf = plddt => classes.find(([bound]) => plddt > bound) || classes[classes.length - 1];
const clamp = (value, top) => Math.min(top, Math.max(0, value));
const variable = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Bytes and files

const bytesOf = base64 => Uint8Array.from(atob(base64), letter => letter.charCodeAt(0));
const inflated = bytes => new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")));
const unpack = base64 => inflated(bytesOf(base64)).text();

async function pixels(image) {  // the numbers of a picture that warpfold/report/charts.py wrote: rows of indices
  const png = bytesOf(image.getAttribute("href").split(",")[1]), view = new DataView(png.buffer), parts = [];
  for (let at = 8; at < png.length; at += 12 + view.getUint32(at)) {
    const kind = String.fromCharCode(...png.subarray(at + 4, at + 8));
    if (kind === "IDAT") parts.push(png.subarray(at + 8, at + 8 + view.getUint32(at)));
  }
  const width = view.getUint32(16), height = view.getUint32(20), rows = [];
  const lines = new Uint8Array(await inflated(new Blob(parts)).arrayBuffer());
  for (let y = 0; y < height; y++) {
    const above = rows[y - 1] || new Uint8Array(width), from = y * (width + 1) + 1;
    rows.push(lines.slice(from, from + width).map((value, x) => value + above[x]));  // filter 2; Uint8Array wraps
  }
  return rows;
}

function offer(name, content, type = "text/plain") {
  const link = document.createElement("a");
  link.download = name;
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

function pdbOf(mmcif) {  // from the atoms of an mmCIF file that WarpFold wrote, as warpfold/data/structure/write.py does
  const right = (text, width) => String(text).padStart(width), lines = [];
  let serial = 0, last = null;
  const end = () => { if (last) lines.push(`TER   ${right(++serial, 5)}      ${last[5]} ${last[16]}${right(last[15], 4)} `); };
  for (const fields of mmcif.split("\n").filter(line => line.startsWith("ATOM ")).map(line => line.split(" "))) {
    if (last && last[16] !== fields[16]) end();
    const [, , element, atom, , residue, , , , , x, y, z, , b, number, chain] = last = fields;
    lines.push(`ATOM  ${right(++serial, 5)}  ${atom.padEnd(3)} ${residue} ${chain}${right(number, 4)}    ${right(x, 8)}${right(y, 8)}${right(z, 8)}  1.00${right(b, 6)}          ${right(element, 2)}`);
  }
  end();
  return [...lines, "END", ""].join("\n");
}

// One prediction

class Panel {
  constructor(article) {
    this.article = article;
    this.record = targets[article.dataset.target];
    this.length = this.record.sequence.length;
    this.chains = this.record.chains.length ? this.record.chains : [["", 0, this.length, DIMMED]];
    this.at = { scored: null, aligned: null };  // the residues that are pointed at: places in the whole sequence
    this.selected = { scored: null, aligned: null };  // ranges [first, last]; aligned: of PAE's rows alone
    this.box = this.find(".viewer");
    this.readout = this.find(".readout");
    this.letters = [...article.querySelectorAll(".sequence i")];
    this.charts = [...article.querySelectorAll(".chart")].map(svg => this.chart(svg));
    const image = this.find('[data-kind="pae"] image');
    if (image) pixels(image).then(rows => { this.pae = rows; });
    this.listenToSequence(this.find(".sequence"));
    article.classList.add("ready");
    if (!hasWebGL) article.querySelectorAll('[name="picture"], [name="reset"], .controls label').forEach(element => { element.hidden = true; });
    this.find(".downloads").hidden = this.find(".controls").hidden = false;
    this.find(".downloads").onclick = event => this.download(event.target.name);
    this.find(".controls").onchange = () => this.addRanks();
    this.find(".controls").onclick = event => ({ reset: () => this.look(), clear: () => this.select(null) })[event.target.name]?.();
  }

  find(selector) { return this.article.querySelector(selector); }
  on(name) { return this.find(`[name="${name}"]`)?.checked === true; }
  chainOf(place) { return this.chains.find(([, start, stop]) => place >= start && place < stop); }
  nameOf(place) {
    const [chain, start] = this.chainOf(place), letter = this.record.sequence[place];
    return `${chain && chain + " "}${RESIDUES[letter] || letter} ${place - start + 1}`;
  }
  placeOf(atom) {
    const chain = this.record.chains.length ? this.chains.find(([id]) => id === atom.chain) : this.chains[0];
    return chain ? chain[1] + atom.resi - 1 : null;
  }
  error(scored, aligned) {
    if (!this.pae) return null;
    const step = Math.ceil(this.length / this.pae.length);
    return this.pae[Math.floor(aligned / step)][Math.floor(scored / step)];
  }

  // Where the mouse is, or the keyboard

  chart(svg) {
    const [left, top, right, bottom] = svg.dataset.box.split(" ").map(Number), square = svg.dataset.kind === "pae";
    const marks = svg.appendChild(document.createElementNS(SVG, "g"));
    marks.setAttribute("class", "marks");
    const chart = { svg, left, top, right, bottom, square, marks };
    const where = event => {
      const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const place = part => clamp(Math.floor(part * this.length), this.length - 1);
      return { scored: place((x - left) / (right - left)), aligned: square ? place((y - top) / (bottom - top)) : null };
    };
    let start = null;
    svg.onpointerdown = event => { start = where(event); svg.setPointerCapture(event.pointerId); this.point(start, svg); };
    svg.onpointermove = event => {
      const now = where(event);
      if (start && (now.scored !== start.scored || now.aligned !== start.aligned)) this.selectBetween(start, now);
      this.point(now, svg);
    };
    svg.onpointerup = event => {
      const now = where(event);
      if (start && now.scored === start.scored && now.aligned === start.aligned) this.selectBetween(start, now);
      start = null;
    };
    svg.onpointerleave = () => { if (!start) this.point(null, svg); };
    this.listenToKeys(svg, square);
    return chart;
  }

  listenToSequence(box) {
    const place = event => this.letters.indexOf(event.target);
    let start = null;
    const move = event => {
      const scored = place(event);
      if (scored < 0) return this.point(null, box);
      if (start !== null && event.buttons) this.selectBetween({ scored: start, aligned: null }, { scored, aligned: null });
      this.point({ scored, aligned: null }, box);
    };
    box.onpointerdown = event => { start = place(event) < 0 ? null : place(event); if (event.target.hasPointerCapture(event.pointerId)) event.target.releasePointerCapture(event.pointerId); move(event); };
    box.onpointermove = move;
    box.onpointerleave = () => this.point(null, box);
    this.listenToKeys(box, false);
  }

  listenToKeys(element, square) {
    element.tabIndex = 0;
    element.setAttribute("role", square ? "application" : "slider");
    const what = { pae: "predicted aligned error", sequence: "sequence", plddt: "pLDDT", coverage: "coverage" }[element.dataset.kind];
    element.setAttribute("aria-label", `${what} of ${this.record.name}: arrow keys move, with shift they select, escape clears`);
    if (!square) Object.entries({ valuemin: 1, valuemax: this.length, valuenow: 1 }).forEach(([key, value]) => element.setAttribute(`aria-${key}`, value));
    let anchor = null;
    element.onkeydown = event => {
      const last = this.length - 1, now = { scored: this.at.scored ?? 0, aligned: square ? this.at.aligned ?? 0 : null };
      const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [square ? 0 : -10, -1], ArrowDown: [square ? 0 : 10, 1], PageUp: [-50, 0], PageDown: [50, 0], Home: [-last, -last], End: [last, last], Enter: [0, 0], " ": [0, 0] };
      if (event.key === "Escape") { anchor = null; this.point(null); this.select(null); return; }
      if (!steps[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const [across, down] = steps[event.key], first = this.at.scored === null && event.key.startsWith("Arrow");
      const next = first ? now : { scored: clamp(now.scored + across, last), aligned: square ? clamp(now.aligned + down, last) : null };
      if (event.shiftKey || event.key === "Enter" || event.key === " ") this.selectBetween(anchor ??= now, next);
      if (!event.shiftKey) anchor = null;
      this.point(next, element);
    };
    element.onblur = () => this.point(null, element);
  }

  // What is shown of it

  point(at, source = this.source) {  // who leaves clears what it showed itself, not what the keyboard shows meanwhile
    if (!at && source !== this.source) return;
    this.source = at ? source : null;
    this.at = at ?? { scored: null, aligned: null };
    this.draw();
  }

  selectBetween(one, other) {
    const range = key => one[key] === null ? null : [Math.min(one[key], other[key]), Math.max(one[key], other[key])];
    this.select({ scored: range("scored"), aligned: range("aligned") });
  }

  select(ranges) {
    this.selected = ranges ?? { scored: null, aligned: null };
    this.changed = true;
    this.draw();
  }

  draw() {
    if (this.drawing) return;  // once for each frame, however fast the mouse is
    this.drawing = setTimeout(() => {  // no animation frame: those wait for structures, slow without a GPU
      this.drawing = null;
      if (this.changed) this.said = this.selected.scored ? this.summary() : null;
      this.charts.forEach(chart => this.mark(chart));
      this.markSequence();
      this.say();
      if (this.changed) this.paint();
      this.changed = false;
      this.label();
    }, 16);
  }

  mark({ left, top, right, bottom, square, marks }) {
    const x = place => left + (right - left) * place / this.length, y = place => top + (bottom - top) * place / this.length;
    const { scored, aligned } = this.selected;
    const rect = (kind, from, to, above, below) => `<rect class="${kind}" x="${x(from)}" width="${x(to + 1) - x(from)}" y="${above}" height="${below - above}"/>`;
    let inside = "";
    if (scored && square) { const rows = aligned ?? scored; inside += rect("scored", ...scored, y(rows[0]), y(rows[1] + 1)); }
    if (scored && !square) inside += rect("scored", ...scored, top, bottom);
    if (aligned && !square) inside += rect("aligned", ...aligned, top, bottom);
    if (this.at.scored !== null) inside += `<path d="M${x(this.at.scored + 0.5)} ${top}V${bottom}"/>`;
    const row = this.at.aligned ?? this.at.scored;
    if (square && row !== null) inside += `<path d="M${left} ${y(row + 0.5)}H${right}"/>`;
    if (!square && this.at.aligned !== null) inside += `<path d="M${x(this.at.aligned + 0.5)} ${top}V${bottom}"/>`;
    marks.innerHTML = inside;
  }

  markSequence() {
    const inside = (range, place) => range !== null && place >= range[0] && place <= range[1];
    this.letters.forEach((letter, place) => {
      for (const [name, set] of [["scored", inside(this.selected.scored, place)], ["aligned", inside(this.selected.aligned, place)], ["at", place === this.at.scored || place === this.at.aligned]])
        if (letter.classList.contains(name) !== set) letter.classList.toggle(name, set);
    });
  }

  say() {
    const { scored, aligned } = this.at, lines = [];
    const value = place => `${this.nameOf(place)}: pLDDT ${this.record.plddt[place].toFixed(1)}, ${classOf(this.record.plddt[place])[2]}`;
    if (aligned !== null) lines.push([`${this.nameOf(scored)} seen from ${this.nameOf(aligned)}: expected error ${this.error(scored, aligned) ?? "–"} Å`]);
    else if (scored !== null) lines.push([value(scored)]);
    if (this.said) lines.push(this.said);
    this.readout.replaceChildren(...lines.map(parts => {
      const line = document.createElement("span");
      line.append(...parts);
      return line;
    }));
    for (const element of this.article.querySelectorAll('[role="slider"]')) {
      if (scored === null) continue;
      element.setAttribute("aria-valuenow", scored + 1);
      element.setAttribute("aria-valuetext", value(scored));
    }
  }

  summary() {
    const { scored, aligned } = this.selected;
    const named = ([first, last], kind) => {
      const part = document.createElement("span");
      part.className = kind;
      part.textContent = first === last ? this.nameOf(first) : `${this.nameOf(first)} to ${this.nameOf(last)}`;
      return part;
    };
    const mean = (of, [first, last]) => {
      let sum = 0;
      for (let place = first; place <= last; place++) sum += of(place);
      return sum / (last - first + 1);
    };
    if (!aligned) return [named(scored, "scored"), ` selected: mean pLDDT ${mean(place => this.record.plddt[place], scored).toFixed(1)}`];
    const error = this.pae ? mean(row => mean(place => this.error(place, row), scored), aligned).toFixed(1) : "–";
    return [named(scored, "scored"), " seen from ", named(aligned, "aligned"), `: mean expected error ${error} Å`];
  }

  // The structure

  async show() {
    if (!hasWebGL || this.viewer || this.making) return;
    this.making = true;
    const [prediction, truth] = await Promise.all([this.record.prediction, this.record.truth].map(text => text && unpack(text)));
    this.host = document.createElement("div");
    this.host.style.cssText = "position:absolute;inset:0";
    this.box.append(this.host);
    const viewer = this.viewer = $3Dmol.createViewer(this.host, { backgroundColor: variable("--wash"), antialias: true });
    const model = viewer.addModel(prediction, "cif");
    if (truth) viewer.addModel(truth, "cif");
    this.middle = new Map(model.selectedAtoms({ atom: "CA" }).map(atom => [this.placeOf(atom), atom]));
    viewer.setHoverDuration(60);
    viewer.setHoverable({ model: 0 }, true, atom => this.point({ scored: this.placeOf(atom), aligned: null }, viewer), () => this.point(null, viewer));
    viewer.setClickable({ model: 0 }, true, atom => { const scored = this.placeOf(atom); this.selectBetween({ scored, aligned: null }, { scored, aligned: null }); });
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "application");
    this.box.setAttribute("aria-label", `structure of ${this.record.name}: arrow keys turn it, plus and minus zoom`);
    this.box.onkeydown = event => this.turn(event);
    this.look();
    await this.addRanks();
    this.box.classList.add("live");
    this.making = false;
    live.push(this);
    if (live.length > MOST_VIEWERS) live.shift().hide();
  }

  hide() {
    this.host.querySelector("canvas")?.getContext("webgl2")?.getExtension("WEBGL_lose_context")?.loseContext();
    this.host.remove();
    this.viewer = this.ranks = null;
    this.box.classList.remove("live", "by-chain");
  }

  async addRanks() {  // the other predictions of the query, read when they are first shown
    const viewer = this.viewer, group = targets.filter(one => one !== this.record && one.group === this.record.group);
    if (viewer && this.on("ranks") && !this.ranks) {
      this.ranks = [];
      const texts = await Promise.all(group.map(one => unpack(one.prediction)));
      if (viewer === this.viewer) this.ranks = texts.map(text => viewer.addModel(text, "cif"));
    }
    this.paint();
  }

  look() {
    this.viewer?.setView([0, 0, 0, 0, 0, 0, 0, 1]);
    this.viewer?.zoomTo();
    this.viewer?.render();
  }

  turn(event) {
    const turns = { ArrowLeft: [-10, "y"], ArrowRight: [10, "y"], ArrowUp: [-10, "x"], ArrowDown: [10, "x"] }, zooms = { "+": 1.2, "=": 1.2, "-": 1 / 1.2 };
    if (!this.viewer || !(turns[event.key] || zooms[event.key])) return;
    event.preventDefault();
    if (turns[event.key]) this.viewer.rotate(...turns[event.key]);
    else this.viewer.zoom(zooms[event.key]);
    this.viewer.render();
  }

  color(atom) {
    const place = this.placeOf(atom), { scored, aligned } = this.selected, inside = range => range && place >= range[0] && place <= range[1];
    if (scored && !inside(scored) && !inside(aligned)) return DIMMED;
    if (aligned) return variable(inside(scored) ? "--scored" : "--aligned");
    return this.on("chains") ? this.chainOf(place)[3] : classOf(this.record.plddt[place])[1];
  }

  paint() {
    this.box.classList.toggle("by-chain", this.on("chains"));
    if (!this.viewer) return;
    const colorfunc = atom => this.color(atom);
    this.viewer.setStyle({ model: 0 }, { cartoon: { colorfunc, thickness: 0.5 } });
    if (this.on("sidechains")) this.viewer.addStyle({ model: 0 }, { stick: { radius: 0.12, colorfunc } });
    if (this.record.truth) this.viewer.setStyle({ model: 1 }, this.on("truth") ? { cartoon: { color: "#aab2bb", opacity: 0.8, thickness: 0.4 } } : {});
    for (const model of this.ranks ?? []) model.setStyle({}, this.on("ranks") ? { cartoon: { color: "#aab2bb", opacity: 0.8, thickness: 0.4 } } : {});
    this.viewer.render();
  }

  label() {
    if (!this.viewer) return;
    this.viewer.removeAllLabels();
    this.viewer.removeAllShapes();
    for (const place of new Set([this.at.scored, this.at.aligned])) {
      const atom = this.middle.get(place);
      if (!atom) continue;
      this.viewer.addSphere({ center: { x: atom.x, y: atom.y, z: atom.z }, radius: 1.4, color: variable("--ink"), opacity: 0.6 });
      this.viewer.addLabel(this.nameOf(place), { position: { x: atom.x, y: atom.y, z: atom.z }, fontSize: 13, fontColor: variable("--paper"), backgroundColor: variable("--ink"), backgroundOpacity: 0.85, inFront: true });
    }
    this.viewer.render();
  }

  async download(kind) {
    const { stem, sequence, plddt, prediction, name, maxPae } = this.record, rows = this.pae;
    const csv = () => ["chain,residue,amino_acid,plddt", ...plddt.map((value, place) => { const [chain, start] = this.chainOf(place); return `${chain || "A"},${place - start + 1},${sequence[place]},${value}`; }), ""].join("\n");
    const fasta = () => this.chains.map(([chain, start, stop]) => `>${name}${chain && " " + chain}\n${sequence.slice(start, stop).replace(/.{1,80}/g, "$&\n")}`).join("");
    if (kind === "mmCIF") offer(`${stem}.cif`, await unpack(prediction));
    if (kind === "PDB") offer(`${stem}.pdb`, pdbOf(await unpack(prediction)));
    if (kind === "PAE" && rows) offer(`${stem}_pae.json`, JSON.stringify([{ predicted_aligned_error: rows.map(row => [...row]), max_predicted_aligned_error: maxPae }]), "application/json");
    if (kind === "pLDDT") offer(`${stem}_plddt.csv`, csv(), "text/csv");
    if (kind === "FASTA") offer(`${stem}.fasta`, fasta());
    if (kind === "picture" && this.viewer) offer(`${stem}.png`, bytesOf(this.viewer.pngURI().split(",")[1]), "image/png");
  }
}

const panels = new Map();
const sight = new IntersectionObserver(entries => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    if (!panels.has(target)) panels.set(target, new Panel(target));
    panels.get(target).show();
  }
}, { rootMargin: "200px" });
document.querySelectorAll("article").forEach(article => sight.observe(article));
dark.addEventListener("change", () => live.forEach(panel => { panel.viewer.setBackgroundColor(variable("--wash")); panel.paint(); }));
