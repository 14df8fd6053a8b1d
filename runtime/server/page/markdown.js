/**
 * Markdown as elements: headings, lists, quotations, code, tables, emphasis and links. Everything else in the text stays text:
 * nothing in it is ever taken for HTML.
 */

import { copyButton } from "./copying.js";
import { RawText } from "./raw_text.js";
import { Tinted } from "./tinted.js";

/** A longer line is shown without emphasis, which would block the browser. */
const MOST_OF_A_LINE = 10_000;
const MOST_DEPTH = 6;

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/d;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +/;
const ROW = /^ *\|.*\| *$/;
const UNDER_HEAD = /^ *\|?( *:?-+:? *\|)+ *(:?-+:? *)?$/;
const SPECIAL = /[\\`[h*_~]/;
const LINK = /^\[([^\]\n]{1,500})\]\((https?:\/\/[^\s)]{1,2000}|mailto:[^\s)]{1,200})\)/;
const ADDRESS = /^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]]/;
/** Elements with text or elements that grow at their end. */
const GROWING = "p, h3, h4, h5, h6, ul, ol, li, blockquote, div, table, tbody, tr, td, pre, pre > code";

/**
 * A formatted text that grows at its end. As it grows, its last block is made again, of a list the last item; a code block is
 * only added to.
 */
export class Markdown {
  #element;
  /** The text from the last block or item on, which more text may change, and the elements made from it. */
  #rest = new Tinted();
  #last = [];
  /** The list that the first of these elements continues, or null. */
  #list = null;
  /** @type {Code | null} the code block in which the text goes on. */
  #code = null;
  /** The innermost element at the end of the text. */
  #end = null;

  /** @param {HTMLElement} element is emptied. */
  constructor(element) {
    this.#element = element;
    element.replaceChildren();
  }

  /** @param {Tinted} more */
  add(more) {
    this.#rest = this.#rest.plus(more);
    while (this.#code === null ? this.#format() : this.#endCode());
    this.#end?.classList.remove("end");
    this.#end = this.#element.lastElementChild;
    while (this.#end?.lastElementChild?.matches(GROWING)) this.#end = this.#end.lastElementChild;
    this.#end?.classList.add("end");
  }

  /** Make the last blocks again. Returns whether the text goes on in a code block. */
  #format() {
    const lines = this.#rest.split("\n");
    const found = blocks(lines, 0);
    this.#last.forEach((element) => element.remove());
    if (this.#list) {
      this.#list.append(...found[0].made.children);
      found[0].made = this.#list;
    }
    this.#element.append(...found.slice(this.#list ? 1 : 0).map(({ made }) => made));
    const parts = found.flatMap(({ made, first, items }) => items?.map((item) => ({ ...item, list: made })) ?? [{ made, first, list: null }]);
    // The last line is not complete: it may yet turn out to belong to the part before it.
    const last = Math.max(0, parts.findLastIndex(({ first }) => first < lines.length - 1));
    const { first, list } = parts[last] ?? { first: 0, list: null };
    const fence = FENCE.exec(lines[first].text);
    this.#list = [this.#list, parts[last - 1]?.list].includes(list) ? list : null;
    this.#last = [...new Set(parts.slice(last).map((part) => (part.list === this.#list ? part.made : part.list ?? part.made)))];
    this.#rest = Tinted.joined(lines.slice(first));
    if (!fence || first === lines.length - 1 || end(lines, first, fence[1]) < lines.length) return false;
    this.#code = new Code(fence);
    this.#last[0].replaceWith(this.#code.element);
    this.#last = [];
    this.#rest = Tinted.joined(lines.slice(first + 1));
    return true;
  }

  /** Add to the code. Returns whether it has ended. */
  #endCode() {
    const [rest, isOver] = this.#code.take(this.#rest);
    this.#rest = rest;
    if (isOver) this.#code = null;
    return isOver;
  }
}

/** A code block, in which text grows. */
class Code {
  #fence;
  #raw;
  #text = "";
  #isFirst = true;
  #isInLine = false;

  /** @param {RegExpExecArray} fence the first line, as `FENCE` finds it. */
  constructor([, fence, language]) {
    this.#fence = fence;
    const head = make("div", make("span", language), copyButton(() => this.#text, "Copy code"));
    head.className = "head";
    const code = make("code");
    this.#raw = new RawText(code);
    this.element = make("div", head, make("pre", code));
    this.element.className = "code";
  }

  /**
   * @param {Tinted} more the next lines, of which the last is not complete.
   * @returns {[Tinted, boolean]} what follows the code or is not shown yet, and whether the code is over.
   */
  take(more) {
    const lines = more.split("\n");
    for (const [i, line] of lines.entries()) {
      const isComplete = i < lines.length - 1;
      if (!this.#isInLine && isComplete && closes(line, this.#fence)) return [Tinted.joined(lines.slice(i + 1)), true];
      if (!this.#isInLine && !isComplete && /^ {0,3}[`~]* *$/.test(line.text)) return [line, false]; // may become the closing line
      this.add(this.#isInLine || this.#isFirst ? line : new Tinted("\n").plus(line));
      this.#isFirst = false;
      this.#isInLine = !isComplete;
    }
    return [new Tinted(), false];
  }

  add(more) {
    this.#raw.add(more);
    this.#text += more.text;
  }
}

/** The blocks of lines, each with the index of its first line; of a list, also its items. */
function blocks(lines, depth) {
  const found = [];
  for (let i = 0; i < lines.length; ) {
    const [made, next, items] = blockAt(lines, i, depth);
    if (made) found.push({ made, first: i, items });
    i = next;
  }
  return found;
}

/** The block that begins at a line, null for an empty line; the index of the line after it; and the items of a list. */
function blockAt(lines, i, depth) {
  const line = lines[i];
  let match;
  if (isEmpty(line)) return [null, i + 1];
  if ((match = FENCE.exec(line.text))) return fenced(lines, i, match);
  if ((match = HEADING.exec(line.text))) return [make(`h${Math.min(6, match[1].length + 2)}`, ...inline(line.slice(...match.indices[2]))), i + 1];
  if (RULE.test(line.text)) return [make("hr"), i + 1];
  if (depth < MOST_DEPTH && QUOTE.test(line.text)) {
    const end = after(lines, i, (each) => QUOTE.test(each.text));
    const quoted = lines.slice(i, end).map((each) => each.slice(QUOTE.exec(each.text)[0].length));
    return [make("blockquote", ...blocks(quoted, depth + 1).map(({ made }) => made)), end];
  }
  if (depth < MOST_DEPTH && ITEM.test(line.text)) return list(lines, i, depth);
  if (ROW.test(line.text) && UNDER_HEAD.test(lines[i + 1]?.text ?? "")) return table(lines, i);
  const end = Math.max(i + 1, after(lines, i + 1, (each) => !begins(each)));
  return [make("p", ...inline(Tinted.joined(lines.slice(i, end)))), end];
}

const isEmpty = ({ text }) => text.trim() === "";
const begins = (line) => isEmpty(line) || [FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(line.text));
const indentOf = ({ text }) => /^ */.exec(text)[0].length;
const closes = ({ text }, fence) => text.trimStart().startsWith(fence) && /^ {0,3}[`~]+ *$/.test(text);

function after(lines, from, holds) {
  let end = from;
  while (end < lines.length && holds(lines[end])) end += 1;
  return end;
}

/** The index of the line that closes the code that begins at a line; the number of lines if there is none. */
const end = (lines, i, fence) => after(lines, i + 1, (line) => !closes(line, fence));

function fenced(lines, i, match) {
  const code = new Code(match);
  const next = end(lines, i, match[1]);
  code.add(Tinted.joined(lines.slice(i + 1, next)));
  return [code.element, next + 1];
}

function list(lines, i, depth) {
  const [, first, mark] = ITEM.exec(lines[i].text);
  const isOrdered = /\d/.test(mark);
  const items = [];
  let next = i;
  while (next < lines.length) {
    const match = ITEM.exec(lines[next].text);
    if (!match || RULE.test(lines[next].text) || match[1].length !== first.length || /\d/.test(match[2]) !== isOrdered) break;
    const indent = match[1].length + match[2].length + 1;
    // The lines of an item are indented, or continue its paragraph.
    const end = after(lines, next + 1, (line) => indentOf(line) > match[1].length || !begins(line));
    const own = lines.slice(next + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line))));
    const inner = blocks([lines[next].slice(match[0].length), ...own], depth + 1).map(({ made }) => made);
    // The first paragraph needs no element of its own in the item.
    const item = make("li", ...inner.flatMap((block) => (block.localName === "p" && inner[0] === block ? [...block.childNodes] : [block])));
    items.push({ made: item, first: next });
    next = end;
    while (lines[next]?.text.trim() === "" && ITEM.test(lines[next + 1]?.text ?? "")) next += 1;
  }
  const made = make(isOrdered ? "ol" : "ul", ...items.map(({ made }) => made));
  if (isOrdered && Number.parseInt(mark) !== 1) made.start = Number.parseInt(mark);
  return [made, next, items];
}

function table(lines, i) {
  const end = after(lines, i + 2, (line) => ROW.test(line.text));
  const row = (line, kind) => make("tr", ...line.trim().slice(1, -1).split("|").map((cell) => make(kind, ...inline(cell.trim()))));
  const made = make("table", make("thead", row(lines[i], "th")), make("tbody", ...lines.slice(i + 2, end).map((line) => row(line, "td"))));
  const box = make("div", made);
  box.className = "table";
  return [box, end];
}

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

/** Emphasis, code and links in a line or paragraph. */
function inline(source, depth = 0) {
  const { text } = source;
  if (text.length > MOST_OF_A_LINE || depth > MOST_DEPTH) return source.nodes;
  const found = [];
  let from = 0; // the end of what was found
  const take = (i, length, ...nodes) => {
    found.push(...source.slice(from, i).nodes, ...nodes);
    from = i + length;
  };
  for (let i = 0; i < text.length; i = Math.max(i + 1, from)) {
    if (!SPECIAL.test(text[i])) continue;
    const rest = text.slice(i, i + 3000);
    const before = text[i - 1] ?? " ";
    const part = (start, length) => source.slice(i + start, i + start + length);
    let match;
    if ((match = /^\\([\\`*_~[\]()#+.!|-])/.exec(rest))) take(i, 2, ...part(1, 1).nodes);
    else if ((match = /^(`+)([^`]|[^`][^]*?[^`])\1(?!`)/.exec(rest))) take(i, match[0].length, make("code", ...part(match[1].length, match[2].length).nodes));
    else if ((match = LINK.exec(rest))) take(i, match[0].length, link(match[2], ...inline(part(1, match[1].length), depth + 1)));
    else if (!/\w/.test(before) && (match = ADDRESS.exec(rest))) take(i, match[0].length, link(match[0], ...part(0, match[0].length).nodes));
    else
      for (const [mark, name] of MARKS) {
        const end = rest.startsWith(mark) && /\S/.test(rest[mark.length] ?? " ") ? rest.indexOf(mark, mark.length + 1) : -1;
        const isInWord = mark.startsWith("_") && (/\w/.test(before) || /\w/.test(rest[end + mark.length] ?? " "));
        if (end < 0 || isInWord || !/\S/.test(rest[end - 1])) continue;
        take(i, end + mark.length, make(name, ...inline(part(mark.length, end - mark.length), depth + 1)));
        break;
      }
  }
  return [...found, ...source.slice(from).nodes];
}

function link(address, ...words) {
  const made = make("a", ...words);
  made.href = address;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}

/** A new element; children that are strings become text. */
function make(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}
