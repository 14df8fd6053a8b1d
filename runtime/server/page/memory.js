/** What the browser keeps for this page, where it is let. */

/** A browser may refuse to keep anything, and says so by throwing as soon as it is asked for the place. */
function place(name) {
  try {
    return window[name];
  } catch {
    return null;
  }
}

class Memory {
  #storage;

  constructor(name) {
    this.#storage = place(name);
  }

  /** @returns {string | null} */
  recall(name) {
    return this.#storage?.getItem(`outrider.${name}`) ?? null;
  }

  /** @param {string | null} text null forgets. */
  keep(name, text) {
    try {
      if (text === null) this.#storage?.removeItem(`outrider.${name}`);
      else this.#storage?.setItem(`outrider.${name}`, text);
    } catch {
      // Full; the page works without.
    }
  }
}

/** Of this tab, until it is closed. */
export const tab = new Memory("sessionStorage");
/** Of this browser. */
export const browser = new Memory("localStorage");
