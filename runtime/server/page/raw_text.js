/** A text as it is written, with its runs tinted; it grows at its end. */

/** After this many characters, the next line begins a new block: the browser lays out only the last block again. */
const BLOCK = 2000;

export class RawText {
  #element;
  #block;
  #length;
  #run;

  /** @param {HTMLElement} element is emptied. */
  constructor(element) {
    this.#element = element;
    element.replaceChildren();
    this.#begin();
  }

  /** Put a node in front of the text, in its first line. */
  lead(node) {
    this.#block.append(node);
  }

  /** @param {import("./tinted.js").Tinted} more */
  add(more) {
    for (const [text, name] of more.runs()) this.#write(text, name);
  }

  #write(text, name) {
    while (this.#length + text.length > BLOCK) {
      const end = text.indexOf("\n", Math.max(0, BLOCK - this.#length));
      if (end < 0) break;
      this.#put(text.slice(0, end), name);
      this.#begin(); // the new block takes the place of the line break
      text = text.slice(end + 1);
    }
    this.#put(text, name);
  }

  #put(text, name) {
    if (text === "") return;
    this.#length += text.length;
    if (this.#run?.className === name) {
      this.#run.lastChild.appendData(text);
      return;
    }
    this.#run = document.createElement("span");
    this.#run.className = name;
    this.#run.append(document.createTextNode(text));
    this.#block.append(this.#run);
  }

  #begin() {
    this.#block = document.createElement("div");
    this.#length = 0;
    this.#run = null;
    this.#element.append(this.#block);
  }
}
