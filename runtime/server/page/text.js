/** An answer that grows by pieces, many of them at a time, and stays fast when it is long. */

import { Markdown } from "./markdown.js";
import { RawText } from "./raw_text.js";
import { Tinted } from "./tinted.js";

/** The next pieces wait for this many times the duration of the last layout. */
const REST = 4;

export class GrowingText {
  #place;
  #painted;
  #painter;
  #thinking;
  #pending = [];
  #frame = 0;
  #timer = 0;
  #restsUntil = 0;
  #pieces = [];
  #hasText = false;

  /**
   * @param {{thoughts: HTMLDetailsElement, thinking: HTMLElement, text: HTMLElement}} place the reasoning with its
   *   text inside, and the text of the answer.
   * @param {(paint: () => void) => void} painted calls `paint`, which changes the page.
   */
  constructor(place, painted = (paint) => paint()) {
    this.#place = place;
    this.#painted = painted;
    this.clear();
  }

  /** The text that was written, without thoughts and without the lead. */
  get text() {
    return this.#pieces.map(({ text, isThought }) => (isThought ? "" : text)).join("");
  }

  /** Everything that was written, in as few pieces as possible; `add` takes them again. */
  get pieces() {
    return this.#pieces;
  }

  get thoughts() {
    return this.#pieces.map(({ text, isThought }) => (isThought ? text : "")).join("");
  }

  /** Begin a new text, as it is written. */
  clear() {
    this.#cancel();
    this.#restsUntil = 0;
    this.#pending = [];
    this.#pieces = [];
    this.#hasText = false;
    this.#place.thoughts.hidden = this.#place.thoughts.open = true;
    this.#thinking = new RawText(this.#place.thinking);
    this.format(false);
  }

  /** @param {boolean} isFormatted whether the text is shown as the Markdown that it may be, or as it is written. */
  format(isFormatted) {
    const { text } = this.#place;
    text.classList.toggle("formatted", isFormatted);
    this.#painter = new (isFormatted ? Markdown : RawText)(text);
    this.#painter.add(Tinted.of(this.#pieces.filter((piece) => !piece.isThought)));
  }

  /** Put a node in front of a text that is shown as it is written; it is not part of the text. */
  lead(node) {
    this.#painter.lead(node);
  }

  /** @param {{text: string, isDrafted: boolean, isCopied: boolean, isThought: boolean}[]} pieces shown with the next frame, or soon. */
  add(pieces) {
    for (const piece of pieces) this.#pending.push(piece);
    if (this.#frame || this.#timer) return;
    const wait = this.#restsUntil - performance.now();
    const paint = () => (this.#frame = requestAnimationFrame(() => this.flush()));
    if (wait > 0) this.#timer = setTimeout(paint, wait);
    else paint();
  }

  /** Show pending pieces now; a hidden tab has no frames in which to show them. */
  flush() {
    this.#cancel();
    if (this.#pending.length === 0) return;
    const pieces = this.#pending;
    const began = performance.now();
    this.#pending = [];
    this.#painted(() => this.#show(pieces));
    this.#place.text.getBoundingClientRect(); // forces the layout, which is the slow part
    const now = performance.now();
    this.#restsUntil = now + REST * (now - began);
  }

  #cancel() {
    cancelAnimationFrame(this.#frame);
    clearTimeout(this.#timer);
    this.#frame = this.#timer = 0;
  }

  #show(pieces) {
    const { thoughts } = this.#place;
    pieces.forEach((piece) => this.#remember(piece));
    const [thought, said] = [true, false].map((is) => Tinted.of(pieces.filter((piece) => piece.isThought === is)));
    if (thought.length) thoughts.hidden = false;
    if (thought.length || said.length) thoughts.classList.toggle("end", said.length === 0);
    this.#thinking.add(thought);
    this.#painter.add(said);
    // The reasoning is folded away once the answer begins; its reader may unfold it.
    if (this.#hasText || said.text.trim() === "") return;
    this.#hasText = true;
    thoughts.open = false;
  }

  #remember({ text, isDrafted, isCopied, isThought }) {
    const before = this.#pieces.at(-1);
    if (before?.isDrafted === isDrafted && before.isCopied === isCopied && before.isThought === isThought) before.text += text;
    else this.#pieces.push({ text, isDrafted, isCopied, isThought });
  }
}
