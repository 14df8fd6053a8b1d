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
  #kept = new Map(); // for where it is not

  constructor(name) {
    this.#storage = place(name);
  }

  /** @returns {string | null} */
  recall(name) {
    return this.#kept.get(name) ?? this.#storage?.getItem(`outrider.${name}`) ?? null;
  }

  /** @param {string} text */
  keep(name, text) {
    this.#kept.set(name, text);
    try {
      this.#storage?.setItem(`outrider.${name}`, text);
    } catch {
      // It is full; this page still knows, and what was there before is not so any more.
      this.#storage?.removeItem(`outrider.${name}`);
    }
  }

  forget(name) {
    this.#kept.delete(name);
    this.#storage?.removeItem(`outrider.${name}`);
  }
}

/** Of this tab, until it is closed. */
export const tab = new Memory("sessionStorage");
/** Of this browser. */
export const browser = new Memory("localStorage");
