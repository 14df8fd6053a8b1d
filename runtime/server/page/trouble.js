/** Shows a failure and its remedy: to try again, perhaps later, or to give a key. */

import { keepKey, recallKey, wrongWith } from "./key.js";

const TICK_MS = 500;

export class Trouble {
  #place;
  #counting = 0;
  /** @type {import("./generation.js").Failure | null} the failure that is shown. */
  failure = null;

  /**
   * @param {(id: string) => HTMLElement} place finds an element.
   * @param {() => void} retry
   */
  constructor(place, retry) {
    this.#place = place;
    place("retry").addEventListener("click", retry);
    place("key").addEventListener("input", ({ target }) => target.setCustomValidity(wrongWith(target.value)));
    place("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      keepKey(place("key").value);
      retry();
    });
  }

  hide() {
    this.failure = null;
    clearInterval(this.#counting);
    this.#place("problem").hidden = this.#place("key-form").hidden = true;
  }

  /** @param {import("./generation.js").Failure} failure */
  show(failure) {
    this.failure = failure;
    if (failure.wantsKey) this.#askForKey();
    else this.#tell(failure);
  }

  #tell({ message, retryAfter, canRetry }) {
    const at = performance.now() + 1000 * (retryAfter ?? 0);
    const count = () => {
      const left = Math.ceil((at - performance.now()) / 1000);
      const when = left > 0 ? `Try again in ${left} s.` : "Try again now.";
      this.#place("problem-when").textContent = retryAfter === null ? "" : when;
      if (left <= 0) clearInterval(this.#counting);
    };
    this.#place("problem").hidden = false;
    this.#place("retry").hidden = !canRetry;
    this.#place("problem-text").textContent = /[.!?]$/.test(message) ? message : `${message}.`;
    clearInterval(this.#counting);
    this.#counting = setInterval(count, TICK_MS);
    count();
  }

  #askForKey() {
    const refused = recallKey() !== null;
    this.#place("key-label").textContent = refused ? "This API key was refused" : "This server requires an API key";
    this.#place("key-form").hidden = false;
    this.#place("key").focus();
    this.#place("key").select();
  }
}
