/** The newest answer, kept by this tab for when the page is reloaded. */

import { tab } from "./memory.js";

/** Most characters of JSON; a browser has room for some five million. */
const MOST = 2_000_000;
/** The version of the kept format; an answer in another version is ignored. */
const VERSION = 1;

/**
 * @typedef {{
 *   asked: string, isChat: boolean, model: string | null, id: string | null, state: string, finishReason: string | null, message: string | null,
 *   pieces: {text: string, isDrafted: boolean, isCopied: boolean, isThought: boolean}[],
 *   counts: object,
 *   spans: {actor: string, kind: string, began: number, ended: number}[],
 *   changes: {at: number, state: string}[],
 * }} Kept
 */

/** @param {Kept} answer replaces the one before; kept without its spans if it is too long, or not at all. */
export function keepAnswer(answer) {
  for (const one of [answer, { ...answer, spans: [], changes: [] }]) {
    const json = JSON.stringify({ version: VERSION, ...one });
    if (json.length <= MOST) return tab.keep("answer", json);
  }
  forgetAnswer();
}

export function forgetAnswer() {
  tab.forget("answer");
}

/** @returns {Kept | null} */
export function recallAnswer() {
  try {
    const kept = JSON.parse(tab.recall("answer"));
    return kept?.version === VERSION ? kept : null;
  } catch {
    return null;
  }
}
