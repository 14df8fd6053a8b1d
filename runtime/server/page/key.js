/** The API key for requests to the server; this tab keeps it. */

import { tab } from "./memory.js";

/** What is wrong with a key, in words for a person; "" if it can be sent in a header, which allows only these characters. */
export const wrongWith = (key) =>
  /^[ -~]*$/.test(key) ? "" : "A key has only letters without accents, digits and signs. Is the keyboard set to another language?";

/** @returns {string | null} */
export function recallKey() {
  const key = tab.recall("key");
  return key === null || wrongWith(key) ? null : key;
}

/** @param {string} key */
export const keepKey = (key) => tab.keep("key", key);
