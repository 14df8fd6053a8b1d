/** A text that knows of each character who wrote it: the model itself, its drafter, or a copy from earlier in the text. */

/** The class of each kind of character. */
const CLASSES = { " ": "", d: "drafted", c: "drafted copied" };
/** White space that would be a block of colour if it were tinted like words. */
const INDENT = /([ \t]{2,})/;

export class Tinted {
  /**
   * @param {string} text
   * @param {string} kinds a key of `CLASSES` for each character of the text.
   */
  constructor(text = "", kinds = " ".repeat(text.length)) {
    this.text = text;
    this.kinds = kinds;
  }

  /** @param {{text: string, isDrafted: boolean, isCopied: boolean}[]} pieces */
  static of(pieces) {
    const kind = ({ isDrafted, isCopied }) => (isCopied ? "c" : isDrafted ? "d" : " ");
    return new Tinted(pieces.map(({ text }) => text).join(""), pieces.map((piece) => kind(piece).repeat(piece.text.length)).join(""));
  }

  /** Lines as one text; a line break is of the kind of what is before it. */
  static joined(lines) {
    return new Tinted(lines.map(({ text }) => text).join("\n"), lines.map(({ kinds }, i) => kinds + (i < lines.length - 1 ? kinds.at(-1) ?? " " : "")).join(""));
  }

  get length() {
    return this.text.length;
  }

  slice(from, to) {
    return new Tinted(this.text.slice(from, to), this.kinds.slice(from, to));
  }

  plus({ text, kinds }) {
    return new Tinted(this.text + text, this.kinds + kinds);
  }

  split(separator) {
    let at = 0;
    return this.text.split(separator).map((part) => {
      const from = at;
      at += part.length + separator.length;
      return this.slice(from, from + part.length);
    });
  }

  trim() {
    const from = this.length - this.text.trimStart().length;
    return this.slice(from, Math.max(from, this.text.trimEnd().length));
  }

  /** Each part of one kind: [its text, its class]. */
  *runs() {
    for (const { 0: run, index } of this.kinds.matchAll(/ +|d+|c+/g)) {
      const name = CLASSES[run[0]];
      const text = this.text.slice(index, index + run.length);
      if (name === "") yield [text, ""];
      else for (const [i, part] of text.split(INDENT).entries()) if (part) yield [part, i % 2 ? `${name} blank` : name];
    }
  }

  /** The text as nodes: a string for each run of the model's own, an element for every other one. */
  get nodes() {
    return [...this.runs()].map(([text, name]) => {
      if (name === "") return text;
      const run = document.createElement("span");
      run.className = name;
      run.append(text);
      return run;
    });
  }
}
