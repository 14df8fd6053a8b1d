/** What the browser keeps for this page, if it may keep anything. */

/** A storage of the browser; null if the browser refuses, which it does by throwing on this access. */
function place(name) {
  try {
    return window[name];
  } catch {
    return null;
  }
}

class Memory {
  #storage;
  #kept = new Map(); // in case the storage is missing or full

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
      // The storage is full. This page still has the text, and the old value there is outdated.
      this.#storage?.removeItem(`outrider.${name}`);
    }
  }

  forget(name) {
    this.#kept.delete(name);
    this.#storage?.removeItem(`outrider.${name}`);
  }
}

/** The memory of this tab, until it is closed. */
export const tab = new Memory("sessionStorage");
/** The memory of this browser. */
export const browser = new Memory("localStorage");
