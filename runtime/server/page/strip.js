/** The timeline of an answer: two lanes in a canvas, the target's above, the drafter's below. */

import { Lane } from "./lane.js";

const GUTTER = 56;
const LANE = 18;
const GAP = 5;
const TOP = 3;
const AXIS = 17;
const HEIGHT = TOP + 2 * LANE + GAP + AXIS;

/** About the width of a target's bar in the view of the latest, in CSS pixels; and the lengths of that view, in seconds. */
const BAR = 24;
const WINDOWS = [0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 60];
/** With more bars than this in a pixel, columns of this width show how busy each model was. */
const DENSE = 0.3;
const COLUMN = 3;

/** Words for the times in which the drafter does not draft, by its state: in full, and for little room. */
const IDLE = {
  resting: ["resting: plain decoding is faster here", "resting"],
  overdue: ["late: the target goes on without it", "late"],
  left: ["gone: the target decodes alone", "gone"],
  none: ["none: the target decodes alone", "none"],
  ngram: ["prompt lookup: takes no time", "lookup"],
};

const TICKS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600];

export class Strip {
  #canvas;
  #target;
  #draft;
  #elapsed;
  #judged; // how many of the drafter's spans are counted
  #drafting;
  #beside;
  #frame = 0;
  #colours = {};
  #changes;
  #drafter = "model";
  /** Whether the whole answer is shown, and not only its latest part. */
  showsAll = false;

  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.#canvas = canvas;
    this.clear();
    const restyle = () => {
      const style = getComputedStyle(canvas);
      for (const name of ["target", "target-tint", "draft-bar", "draft-tint", "line", "faint", "muted"])
        this.#colours[name] = style.getPropertyValue(`--${name}`);
      this.#colours.font = style.fontFamily;
      this.#soon();
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
    new ResizeObserver(() => this.#draw()).observe(canvas);
    restyle();
  }

  clear() {
    this.#target = new Lane();
    this.#draft = new Lane();
    this.#elapsed = this.#drafting = this.#beside = 0;
    this.#judged = 0;
    this.#changes = [];
    this.#soon();
  }

  /** The spans of both lanes, as they were added. */
  get spans() {
    return [...this.#target.spans, ...this.#draft.spans];
  }

  get changes() {
    return this.#changes;
  }

  /** @param {{at: number, state: string}[]} changes of the drafter's state, in seconds since the answer began. */
  change(changes) {
    this.#changes.push(...changes);
    this.#soon();
  }

  /** @param {string} drafter "none", "ngram" or "model". */
  set drafter(drafter) {
    this.#drafter = drafter;
    this.#soon();
  }

  /** @param {{actor: string, kind: string, began: number, ended: number}[]} spans in seconds since the answer began. */
  add(spans) {
    for (const span of spans) (span.actor === "target" ? this.#target : this.#draft).add(span);
    this.#judge();
    this.#soon();
  }

  /** @param {number} seconds since the answer began that the timeline must cover. */
  reach(seconds) {
    this.#elapsed = Math.max(this.#elapsed, seconds);
    this.#soon();
  }

  show(all) {
    this.showsAll = all;
    this.#soon();
  }

  /** The part of the drafting time in which the target worked too, in [0, 1]; null before there was any drafting. */
  get beside() {
    return this.#drafting > 0 ? this.#beside / this.#drafting : null;
  }

  /** The timeline in words, for readers who do not see it. */
  get summary() {
    if (this.#end === 0) return "Timeline of this answer: nothing yet";
    const percent = (share) => `${Math.round(100 * share)} %`;
    const busy = (lane) => percent(Math.min(1, lane.busy / this.#end));
    const beside = this.beside === null ? "" : `; ${percent(this.beside)} of drafting went on while the target worked`;
    const rested = this.#idle.reduce((sum, { state, from, to }) => sum + (state === "resting" ? to - from : 0), 0);
    const rest = rested > 0 ? `; the drafter rested ${percent(Math.min(1, rested / this.#end))} of the time, where plain decoding was faster` : "";
    return `Timeline of this answer, ${this.#end.toFixed(1)} s: target busy ${busy(this.#target)}, drafter busy ${busy(this.#draft)}${beside}${rest}`;
  }

  /** The times in which the drafter did not draft, and why. */
  get #idle() {
    if (this.#drafter !== "model") return [{ state: this.#drafter, from: 0, to: this.#end }];
    return this.#changes
      .map(({ at, state }, i) => ({ state, from: at, to: this.#changes[i + 1]?.at ?? this.#end }))
      .filter(({ state }) => Object.hasOwn(IDLE, state));
  }

  get #end() {
    return Math.max(this.#elapsed, this.#target.ended, this.#draft.ended);
  }

  /** Count how much of the drafting went on while the target worked, as far as the spans of both are known. */
  #judge() {
    for (; this.#judged < this.#draft.spans.length; this.#judged += 1) {
      const { kind, began, ended } = this.#draft.spans[this.#judged];
      if (ended > this.#target.ended) return;
      if (kind !== "draft") continue;
      this.#drafting += ended - began;
      this.#beside += this.#target.seconds(began, ended);
    }
  }

  #soon() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#draw();
    });
  }

  #view(plot) {
    const end = this.#end;
    if (this.showsAll) return [0, end || 1];
    const lately = this.#target.spans.slice(-30).filter((span) => span.kind === "verify" || span.kind === "decode");
    const pace = lately.length ? (lately.at(-1).ended - lately[0].began) / lately.length : 0.05;
    const wanted = (plot / BAR) * pace;
    const width = WINDOWS.find((seconds) => seconds >= wanted) ?? WINDOWS.at(-1);
    return end < width ? [0, width] : [end - width, end];
  }

  #draw() {
    const width = this.#canvas.clientWidth;
    if (width === 0) return; // hidden
    const ratio = window.devicePixelRatio || 1;
    if (this.#canvas.width !== Math.round(width * ratio)) this.#canvas.width = Math.round(width * ratio);
    if (this.#canvas.height !== Math.round(HEIGHT * ratio)) this.#canvas.height = Math.round(HEIGHT * ratio);
    const c = this.#canvas.getContext("2d");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, width, HEIGHT);
    const plot = width - GUTTER;
    const [from, to] = this.#view(plot);
    const x = (moment) => GUTTER + ((moment - from) / (to - from)) * plot;
    this.#drawAxis(c, from, to, x, width);
    c.save();
    c.beginPath();
    c.rect(GUTTER, 0, plot, HEIGHT);
    c.clip();
    this.#drawLane(c, this.#target, TOP, from, to, x, plot);
    this.#drawLane(c, this.#draft, TOP + LANE + GAP, from, to, x, plot);
    for (const idle of this.#idle) if (idle.to > from && idle.from < to) this.#drawIdle(c, idle, x, width);
    c.restore();
  }

  #drawAxis(c, from, to, x, width) {
    const { line, faint, muted, font } = this.#colours;
    c.font = `11px ${font}`;
    c.fillStyle = muted;
    c.textBaseline = "middle";
    c.fillText("target", 0, TOP + LANE / 2 + 0.5);
    c.fillText("drafter", 0, TOP + LANE + GAP + LANE / 2 + 0.5);
    c.fillStyle = faint;
    c.fillRect(GUTTER, TOP, width - GUTTER, LANE);
    c.fillRect(GUTTER, TOP + LANE + GAP, width - GUTTER, LANE);
    const step = TICKS.find((seconds) => x(from + seconds) - x(from) >= 68) ?? TICKS.at(-1);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const bottom = HEIGHT - AXIS;
    for (let i = Math.ceil(from / step - 1e-9); i * step <= to; i += 1) {
      const at = Math.round(x(i * step)) + 0.5;
      c.fillStyle = line;
      c.fillRect(at - 0.5, bottom, 1, 4);
      c.fillStyle = muted;
      const label = `${(i * step).toFixed(digits)} s`;
      const wide = c.measureText(label).width;
      c.fillText(label, Math.min(Math.max(at - wide / 2, GUTTER), width - wide), bottom + 11);
    }
  }

  #drawLane(c, lane, y, from, to, x, plot) {
    const first = lane.after(from);
    let last = first;
    while (last < lane.spans.length && lane.spans[last].began < to) last += 1;
    if (last - first > plot * DENSE) this.#drawBusy(c, lane, first, last, y, x, plot);
    else for (let i = first; i < last; i += 1) this.#drawBar(c, lane.spans[i], y, x);
  }

  #drawBar(c, { actor, kind, began, ended }, y, x) {
    const left = x(began);
    const width = Math.max(x(ended) - left - (x(ended) - left > 3 ? 1 : 0), 0.75);
    if (actor === "target" && kind !== "prefill") {
      c.fillStyle = this.#colours.target;
      c.fillRect(left, y, width, LANE);
    } else if (kind === "draft") {
      hatch(c, left, y, width, this.#colours["draft-tint"], this.#colours["draft-bar"]);
      c.fillStyle = this.#colours["draft-bar"];
      for (const [from, to] of this.#target.within(began, ended))
        c.fillRect(x(from), y, Math.min(x(to), left + width) - x(from), LANE);
    } else {
      const [tint, strong] = actor === "target" ? ["target-tint", "target"] : ["draft-tint", "draft-bar"];
      c.fillStyle = this.#colours[tint];
      c.fillRect(left, y, width, LANE);
      c.strokeStyle = c.fillStyle = this.#colours[strong];
      if (width > 3) c.strokeRect(left + 0.5, y + 0.5, width - 1, LANE - 1);
      if (width > c.measureText(kind).width + 10) c.fillText(kind, Math.max(left, GUTTER) + 5, y + LANE / 2 + 0.5);
    }
  }

  /** Draw a time without drafts in the drafter's lane: a dashed line, and the reason if there is room. */
  #drawIdle(c, { state, from, to }, x, width) {
    const left = Math.max(x(from), GUTTER);
    const right = Math.min(x(to), width);
    const middle = TOP + LANE + GAP + LANE / 2 + 0.5;
    c.strokeStyle = this.#colours.muted;
    c.setLineDash([2, 3]);
    c.beginPath();
    c.moveTo(left, middle);
    c.lineTo(right, middle);
    c.stroke();
    c.setLineDash([]);
    const words = IDLE[state].find((said) => c.measureText(said).width + 14 <= right - left);
    if (words === undefined) return;
    c.fillStyle = this.#colours.faint;
    c.fillRect(left + 3, middle - 7, c.measureText(words).width + 8, 14);
    c.fillStyle = this.#colours.muted;
    c.fillText(words, left + 7, middle);
  }

  /** Draw many bars as columns, as high as the model was busy; work of the drafter while the target waited is pale, on top. */
  #drawBusy(c, lane, first, last, y, x, plot) {
    const columns = Math.ceil(plot / COLUMN);
    const busy = new Float32Array(columns);
    const beside = lane === this.#target ? busy : new Float32Array(columns);
    const place = (moment) => (x(moment) - GUTTER) / COLUMN;
    for (let i = first; i < last; i += 1) {
      const { began, ended } = lane.spans[i];
      cover(busy, place(began), place(ended));
      if (beside !== busy) for (const [from, to] of this.#target.within(began, ended)) cover(beside, place(from), place(to));
    }
    for (let i = 0; i < columns; i += 1) {
      const left = GUTTER + i * COLUMN;
      const high = Math.min(1, busy[i]) * LANE;
      const solid = Math.min(1, beside[i]) * LANE;
      if (high > solid) {
        c.fillStyle = this.#colours["draft-tint"];
        c.fillRect(left, y + LANE - high, COLUMN, high);
      }
      c.fillStyle = this.#colours[lane === this.#target ? "target" : "draft-bar"];
      c.fillRect(left, y + LANE - solid, COLUMN, solid);
      if (high - solid > 1) c.fillRect(left, y + LANE - high, COLUMN, 1);
    }
  }
}

/** Add to each column the part of it that lies between two positions, in columns. */
function cover(columns, from, to) {
  const end = Math.min(to, columns.length);
  for (let i = Math.max(0, Math.floor(from)); i < end; i += 1) columns[i] += Math.min(to, i + 1) - Math.max(from, i);
}

function hatch(c, x, y, width, tint, strong) {
  c.save();
  c.beginPath();
  c.rect(x, y, width, LANE);
  c.clip();
  c.fillStyle = tint;
  c.fillRect(x, y, width, LANE);
  c.strokeStyle = strong;
  c.lineWidth = 1;
  c.beginPath();
  for (let at = Math.floor((x - LANE) / 5) * 5; at < x + width; at += 5) {
    c.moveTo(at, y + LANE);
    c.lineTo(at + LANE, y);
  }
  c.stroke();
  c.restore();
}
