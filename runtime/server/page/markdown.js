/**
 * Markdown as elements: headings, lists, quotations, code, tables, emphasis and links. Everything else in the text stays text:
 * nothing in it is ever taken for HTML.
 */

import { copyButton } from "./copying.js";

/** A longer text is shown as it was written, and a longer line without emphasis, since either would block the browser. */
const MOST = 200_000;
const MOST_OF_A_LINE = 10_000;
const MOST_DEPTH = 6;

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(.*)$/;
const ROW = /^ *\|.*\| *$/;
const UNDER_HEAD = /^ *\|?( *:?-+:? *\|)+ *(:?-+:? *)?$/;
const LINK = /^\[([^\]\n]{1,500})\]\((https?:\/\/[^\s)]{1,2000}|mailto:[^\s)]{1,200})\)/;
const ADDRESS = /^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]]/;

/** Whether formatting would change how a text looks. */
export function isFormatted(text) {
  if (text.length > MOST) return false;
  return /^ {0,3}(#{1,6} |> |`{3}|~{3})|^ *([-*+]|\d+[.)]) +\S|^ *\|.*\| *$|\*\*\S|`[^`\n]+`|\]\(https?:/m.test(text);
}

/** @returns {Node[]} */
export function formatted(text) {
  return text.length > MOST ? [element("p", text)] : blocks(text.split("\n"), 0);
}

function blocks(lines, depth) {
  const found = [];
  for (let i = 0; i < lines.length; ) {
    const [block, next] = blockAt(lines, i, depth);
    if (block) found.push(block);
    i = next;
  }
  return found;
}

/** The block that begins at a line, null for an empty line; and the index of the line after it. */
function blockAt(lines, i, depth) {
  const line = lines[i];
  let match;
  if (line.trim() === "") return [null, i + 1];
  if ((match = FENCE.exec(line))) return fenced(lines, i, match);
  if ((match = HEADING.exec(line))) return [element(`h${Math.min(6, match[1].length + 2)}`, ...inline(match[2])), i + 1];
  if (RULE.test(line)) return [element("hr"), i + 1];
  if (depth < MOST_DEPTH && QUOTE.test(line)) {
    const end = after(lines, i, (each) => QUOTE.test(each));
    return [element("blockquote", ...blocks(lines.slice(i, end).map((each) => QUOTE.exec(each)[1]), depth + 1)), end];
  }
  if (depth < MOST_DEPTH && ITEM.test(line)) return list(lines, i, depth);
  if (ROW.test(line) && UNDER_HEAD.test(lines[i + 1] ?? "")) return table(lines, i);
  const end = Math.max(i + 1, after(lines, i + 1, (each) => !begins(each)));
  return [element("p", ...inline(lines.slice(i, end).join("\n"))), end];
}

const begins = (line) => line.trim() === "" || [FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(line));

function after(lines, from, holds) {
  let end = from;
  while (end < lines.length && holds(lines[end])) end += 1;
  return end;
}

function fenced(lines, i, [, fence, language]) {
  const closes = (line) => line.trimEnd().replace(/^ {0,3}/, "").startsWith(fence) && /^ {0,3}[`~]+ *$/.test(line);
  const end = after(lines, i + 1, (line) => !closes(line));
  const code = lines.slice(i + 1, end).join("\n");
  const head = element("div", element("span", language));
  head.className = "head";
  head.append(copyButton(() => code, "Copy code"));
  const box = element("div", head, element("pre", element("code", code)));
  box.className = "code";
  return [box, end + 1];
}

function list(lines, i, depth) {
  const [, first, mark] = ITEM.exec(lines[i]);
  const isOrdered = /\d/.test(mark);
  const items = [];
  let next = i;
  while (next < lines.length) {
    const match = ITEM.exec(lines[next]);
    if (!match || match[1].length !== first.length || /\d/.test(match[2]) !== isOrdered) break;
    const indent = match[1].length + match[2].length + 1;
    // The lines of an item are indented, or continue its paragraph.
    const end = after(lines, next + 1, (line) => /^ */.exec(line)[0].length > match[1].length || (line.trim() !== "" && !begins(line)));
    const own = lines.slice(next + 1, end).map((line) => line.slice(Math.min(indent, /^ */.exec(line)[0].length)));
    const inner = blocks([match[3], ...own], depth + 1);
    // The first paragraph needs no element of its own in the item.
    items.push(element("li", ...inner.flatMap((block) => (block.localName === "p" && inner[0] === block ? [...block.childNodes] : [block]))));
    next = end;
    while (lines[next]?.trim() === "" && ITEM.test(lines[next + 1] ?? "")) next += 1;
  }
  const made = element(isOrdered ? "ol" : "ul", ...items);
  if (isOrdered && Number.parseInt(mark) !== 1) made.start = Number.parseInt(mark);
  return [made, next];
}

function table(lines, i) {
  const end = after(lines, i + 2, (line) => ROW.test(line));
  const cells = (line) => line.trim().slice(1, -1).split("|").map((cell) => cell.trim());
  const row = (line, kind) => element("tr", ...cells(line).map((cell) => element(kind, ...inline(cell))));
  const made = element("table", element("thead", row(lines[i], "th")), element("tbody", ...lines.slice(i + 2, end).map((line) => row(line, "td"))));
  const box = element("div", made);
  box.className = "table";
  return [box, end];
}

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

/** Emphasis, code and links in a line or paragraph. */
function inline(text, depth = 0) {
  if (text.length > MOST_OF_A_LINE || depth > MOST_DEPTH) return [text];
  const found = [];
  let plain = "";
  const take = (node, length) => {
    if (plain) found.push(plain);
    plain = "";
    found.push(node);
    return length;
  };
  for (let i = 0; i < text.length; ) {
    const rest = text.slice(i, i + 3000);
    const before = text[i - 1] ?? " ";
    let match, length = 0;
    if ((match = /^\\([\\`*_~[\]()#+.!|-])/.exec(rest))) {
      plain += match[1];
      length = 2;
    } else if ((match = /^(`+)([^`]|[^`][^]*?[^`])\1(?!`)/.exec(rest))) length = take(element("code", match[2]), match[0].length);
    else if ((match = LINK.exec(rest))) length = take(link(match[2], ...inline(match[1], depth + 1)), match[0].length);
    else if (!/\w/.test(before) && (match = ADDRESS.exec(rest))) length = take(link(match[0], match[0]), match[0].length);
    else
      for (const [mark, name] of MARKS) {
        const end = rest.startsWith(mark) && /\S/.test(rest[mark.length] ?? " ") ? rest.indexOf(mark, mark.length + 1) : -1;
        const isInWord = mark.startsWith("_") && (/\w/.test(before) || /\w/.test(rest[end + mark.length] ?? " "));
        if (end < 0 || isInWord || !/\S/.test(rest[end - 1])) continue;
        length = take(element(name, ...inline(rest.slice(mark.length, end), depth + 1)), end + mark.length);
        break;
      }
    if (length === 0) {
      plain += text[i];
      length = 1;
    }
    i += length;
  }
  return plain ? [...found, plain] : found;
}

function link(address, ...words) {
  const made = element("a", ...words);
  made.href = address;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}

/** A new element; children that are strings become text. */
function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}
