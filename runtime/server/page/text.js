/** A text that grows by pieces, many of them at a time, and stays quick when it is long. */

/** After so many characters, the next line begins a block of its own: what is laid out anew is the last block. */
const BLOCK = 2000;

/**
 * What is laid out anew is more where a text has no lines, and may take longer than a frame: so long, times this, the next
 * pieces wait.
 */
const REST = 4;

/** White that would be a block of colour, if it were tinted as words are. */
const INDENT = /([ \t]{2,})/;

export class GrowingText {
  #element;
  #painted;
  #pending = [];
  #frame = 0;
  #timer = 0;
  #restsUntil = 0;
  #block = null;
  #blockLength = 0;
  #run = null;
  #pieces = [];
  #isThought = false;
  #hasThoughts = false;

  /**
   * @param {HTMLElement} element
   * @param {(paint: () => void) => void} painted is given what changes the page, to call it.
   */
  constructor(element, painted = (paint) => paint()) {
    this.#element = element;
    this.#painted = painted;
  }

  /** What was written, without thoughts, and without what it began with. */
  get text() {
    return this.#pieces.map(({ text, isThought }) => (isThought ? "" : text)).join("");
  }

  /** What was written, in as few pieces as tell it; to be given to `add` again. */
  get pieces() {
    return this.#pieces;
  }

  get thoughts() {
    return this.#pieces.map(({ text, isThought }) => (isThought ? text : "")).join("");
  }

  get hasThoughts() {
    return this.#hasThoughts;
  }

  /** Begin anew. */
  clear() {
    this.#cancel();
    this.#restsUntil = 0;
    this.#pending = [];
    this.#pieces = [];
    this.#isThought = this.#hasThoughts = false;
    this.#element.replaceChildren();
    this.#begin();
  }

  /** Put something in front, which is no part of the text, in the line where it begins. */
  lead(node) {
    this.#block.append(node);
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

  /** Show now what is still to be shown; a tab that is hidden has no frames. */
  flush() {
    this.#cancel();
    if (this.#pending.length === 0) return;
    const pieces = this.#pending;
    const began = performance.now();
    this.#pending = [];
    this.#painted(() => pieces.forEach((piece) => this.#append(piece)));
    this.#element.getBoundingClientRect(); // lays out, which is what takes long
    const now = performance.now();
    this.#restsUntil = now + REST * (now - began);
  }

  #cancel() {
    cancelAnimationFrame(this.#frame);
    clearTimeout(this.#timer);
    this.#frame = this.#timer = 0;
  }

  #append({ text, isDrafted, isCopied, isThought }) {
    const before = this.#pieces.at(-1);
    if (before?.isDrafted === isDrafted && before.isCopied === isCopied && before.isThought === isThought) before.text += text;
    else this.#pieces.push({ text, isDrafted, isCopied, isThought });
    if (isThought !== this.#isThought) this.#turn(isThought);
    const kind = isCopied ? "drafted copied" : "drafted";
    if (isDrafted) text.split(INDENT).forEach((part, i) => this.#write(part, i % 2 ? `${kind} blank` : kind));
    else this.#write(text, "");
  }

  #write(text, kind) {
    while (this.#blockLength + text.length > BLOCK) {
      const end = text.indexOf("\n", Math.max(0, BLOCK - this.#blockLength));
      if (end < 0) break;
      this.#put(text.slice(0, end), kind);
      this.#begin(); // which stands for the line's end
      text = text.slice(end + 1);
    }
    this.#put(text, kind);
  }

  #put(text, kind) {
    if (text === "") return;
    this.#blockLength += text.length;
    if (this.#run?.className === kind) {
      this.#run.lastChild.appendData(text);
      return;
    }
    this.#run = document.createElement("span");
    this.#run.className = kind;
    this.#run.append(document.createTextNode(text));
    this.#block.append(this.#run);
  }

  /** Thoughts and text are in blocks of their own, whatever stands between them. */
  #turn(isThought) {
    this.#isThought = isThought;
    this.#hasThoughts ||= isThought;
    if (this.#block.hasChildNodes()) this.#begin();
    else this.#block.className = isThought ? "thought" : "";
  }

  #begin() {
    this.#block = document.createElement("div");
    this.#block.className = this.#isThought ? "thought" : "";
    this.#blockLength = 0;
    this.#run = null;
    this.#element.append(this.#block);
  }
}
