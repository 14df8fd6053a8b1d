/** The models: which one is asked, and their names at the top of the page and above each answer. */

import { browser } from "./memory.js";

/**
 * The model to ask: the one that was chosen in this browser, or the first.
 *
 * @param {HTMLSelectElement} select gets an option for each model.
 * @param {{id: string}[]} models at least one.
 */
export function choose(select, models) {
  const chosen = models.find(({ id }) => id === browser.recall("model")) ?? models[0];
  select.replaceChildren(...models.map(({ id }) => new Option(id, id, id === chosen.id, id === chosen.id)));
  return chosen;
}

/** What the server calls the drafters that are no model of their own. */
const WORDS = { ngram: "prompt lookup", mtp: "its own MTP heads", auto: "an automatic choice" };

/**
 * @param {{id: string, draft: string | null}} known
 * @returns {(Node | string)[]}
 */
export function namesOf({ id, draft }) {
  return [part(name(id)), " ", draft ? part("drafted by ", WORDS[draft] ?? name(draft)) : part("without a drafter")];
}

/** "none", "ngram" (earlier text is proposed again) or "model" (anything that drafts new text). */
export const drafterOf = ({ draft }) => (draft === "ngram" ? "ngram" : draft ? "model" : "none");

/** What is true of a drafter: a title, and a sentence on how its words look: what is before, in and after the example of it. */
export const WELCOMES = {
  model: ["One model drafts ahead, the other decides.", ["Words that the ", "drafter guessed", " are tinted and underlined; the rest is the target’s own. The text is the target’s either way."]],
  ngram: ["Earlier words are proposed again, the model decides.", ["Words that were ", "copied from earlier", " in the text are tinted; the rest is the model’s own. The text is the model’s either way."]],
  none: ["One model writes, without a drafter.", ["Each token takes a pass of the model. Start the server with --draft, and what was drafted is tinted here."]],
};

/** @param {string} id of the model that gave an answer. */
export function byline(id) {
  const line = document.createElement("p");
  line.className = "by";
  line.textContent = id;
  return line;
}

/** A model's name; its publisher is left out on narrow screens. */
function name(path) {
  const [model, publisher] = path.split("/").filter(Boolean).reverse();
  const words = document.createElement("b");
  const before = document.createElement("span");
  before.className = "publisher";
  before.textContent = publisher === undefined ? "" : `${publisher}/`;
  words.append(before, model ?? path);
  words.title = path;
  return words;
}

/** Words that get a line of their own on narrow screens. */
function part(...words) {
  const span = document.createElement("span");
  span.className = "part";
  span.append(...words);
  return span;
}
