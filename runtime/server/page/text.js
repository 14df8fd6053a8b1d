/** A text that grows by pieces, many of them at a time, and stays fast when it is long. */

/** After this many characters, the next line begins a new block: the browser lays out only the last block again. */
const BLOCK = 2000;

/**
 * A text without line breaks is one long block, whose layout may take longer than a frame. The next pieces wait for this
 * many times the duration of the last layout.
 */
const REST = 4;

/** White space that would be a block of colour if it were tinted like words. */
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
   * @param {(paint: () => void) => void} painted calls `paint`, which changes the page.
   */
  constructor(element, painted = (paint) => paint()) {
    this.#element = element;
    this.#painted = painted;
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

  get hasThoughts() {
    return this.#hasThoughts;
  }

  /** Begin a new text. */
  clear() {
    this.#cancel();
    this.#restsUntil = 0;
    this.#pending = [];
    this.#pieces = [];
    this.#isThought = this.#hasThoughts = false;
    this.#element.replaceChildren();
    this.#begin();
  }

  /** Put a node in front of the text, in its first line; it is not part of the text. */
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

  /** Show pending pieces now; a hidden tab has no frames in which to show them. */
  flush() {
    this.#cancel();
    if (this.#pending.length === 0) return;
    const pieces = this.#pending;
    const began = performance.now();
    this.#pending = [];
    this.#painted(() => pieces.forEach((piece) => this.#append(piece)));
    this.#element.getBoundingClientRect(); // forces the layout, which is the slow part
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
      this.#begin(); // the new block takes the place of the line break
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

  /** Change between thoughts and text, which never share a block. */
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
