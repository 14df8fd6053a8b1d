/** The calls of a model: names and arguments of functions, as they arrive. */

export class Calls {
  #element;
  #calls = new Map();

  /** @param {HTMLElement} element a list. */
  constructor(element) {
    this.#element = element;
  }

  get isEmpty() {
    return this.#calls.size === 0;
  }

  clear() {
    this.#calls.clear();
    this.#element.replaceChildren();
    this.#element.hidden = true;
  }

  /** @param {{index?: number, function?: {name?: string, arguments?: string}}[]} pieces of calls, as chunks have them. */
  add(pieces) {
    for (const { index = 0, function: called = {} } of pieces) {
      const { name, given } = this.#at(index);
      name.append(called.name ?? "");
      given.append(called.arguments ?? "");
    }
    this.#element.hidden = this.isEmpty;
  }

  #at(index) {
    if (!this.#calls.has(index)) {
      const item = document.createElement("li");
      const name = document.createElement("b");
      const given = document.createElement("pre");
      item.append("Calls ", name, given);
      this.#element.append(item);
      this.#calls.set(index, { name, given });
    }
    return this.#calls.get(index);
  }
}
