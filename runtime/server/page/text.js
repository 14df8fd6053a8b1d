/** A text that grows by pieces, many of them at a time, and stays quick when it is long. */

/** After so many characters, the next line begins a block of its own: what is laid out anew is the last block. */
const BLOCK = 2000;

export class GrowingText {
  #element;
  #painted;
  #pending = [];
  #frame = 0;
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
    return this.#pieces.join("");
  }

  get hasThoughts() {
    return this.#hasThoughts;
  }

  /** Begin anew. */
  clear() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
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

  /** @param {{text: string, isDrafted: boolean, isThought: boolean}[]} pieces shown with the next frame. */
  add(pieces) {
    for (const piece of pieces) this.#pending.push(piece);
    this.#frame ||= requestAnimationFrame(() => this.flush());
  }

  /** Show now what is still to be shown; a tab that is hidden has no frames. */
  flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    if (this.#pending.length === 0) return;
    const pieces = this.#pending;
    this.#pending = [];
    this.#painted(() => pieces.forEach((piece) => this.#append(piece)));
  }

  #append({ text, isDrafted, isThought }) {
    if (!isThought) this.#pieces.push(text);
    if (isThought !== this.#isThought) this.#turn(isThought);
    const kind = isDrafted ? "drafted" : "";
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
