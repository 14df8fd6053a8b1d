/** The conversation before the newest question: its messages, and its place on the page. */

import { copyButton } from "./copying.js";
import { Markdown } from "./markdown.js";
import { tab } from "./memory.js";
import { byline } from "./models.js";
import { Tinted } from "./tinted.js";

/** Most characters that the tab keeps for when the page is reloaded. */
const MOST = 1_000_000;

/** @typedef {{asked: string, thoughts: string, text: string, model: string}} Turn `model` is "" if it is unknown. */

export class Conversation {
  #element;
  /** @type {Turn[]} */
  #turns = [];

  /** @param {HTMLElement} element where it is shown. */
  constructor(element) {
    this.#element = element;
    recalled().forEach((turn) => this.#append(turn));
  }

  get isEmpty() {
    return this.#turns.length === 0;
  }

  /** The messages for a request, without reasoning: models do not get that again. */
  get messages() {
    return this.#turns.flatMap(({ asked, text }) => [
      { role: "user", content: asked },
      { role: "assistant", content: text },
    ]);
  }

  /** @param {Turn} turn */
  add(turn) {
    this.#append(turn);
    const json = JSON.stringify(this.#turns);
    if (json.length <= MOST) tab.keep("conversation", json);
    else tab.forget("conversation");
  }

  clear() {
    this.#turns = [];
    this.#element.replaceChildren();
    tab.forget("conversation");
  }

  #append(turn) {
    this.#turns.push(turn);
    const section = document.createElement("section");
    section.className = "turn";
    const question = document.createElement("p");
    question.className = "question";
    question.textContent = turn.asked;
    const answer = document.createElement("div");
    answer.className = "formatted";
    new Markdown(answer).add(new Tinted(turn.text));
    section.append(question, byline(turn.model), ...thoughtsOf(turn), answer, copyButton(() => turn.text, "Copy this answer"));
    this.#element.append(section);
  }
}

/** The reasoning of an answer, folded; nothing if there is none. */
function thoughtsOf({ thoughts }) {
  if (thoughts.trim() === "") return [];
  const folded = document.createElement("details");
  const summary = document.createElement("summary");
  const inside = document.createElement("div");
  folded.className = "thought";
  summary.textContent = "Thinking";
  inside.textContent = thoughts.trim();
  folded.append(summary, inside);
  return [folded];
}

/** The turns that were kept, by any version of this page. */
function recalled() {
  try {
    const turns = JSON.parse(tab.recall("conversation")) ?? [];
    const isTurn = (turn) => ["asked", "thoughts", "text"].every((name) => typeof turn?.[name] === "string");
    const isKnown = Array.isArray(turns) && turns.every(isTurn);
    return isKnown ? turns.map((turn) => ({ ...turn, model: typeof turn.model === "string" ? turn.model : "" })) : [];
  } catch {
    return [];
  }
}
