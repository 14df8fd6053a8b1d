/** The settings on the page: their fields, kept by the browser, and the fields of requests that they become. */

import { browser } from "./memory.js";

const DEFAULTS = { max_tokens: "", temperature: "", top_p: "", seed: "", stop_strings: "", system: "", tools: "" };

/** A short text for each setting. */
const IN_SHORT = {
  max_tokens: (value) => `${Number(value).toLocaleString("en")} tokens`,
  temperature: (value) => `temperature ${value}`,
  top_p: (value) => `top p ${value}`,
  seed: (value) => `seed ${value}`,
  stop_strings: () => "stop sequences",
  system: () => "system message",
  tools: () => "tools",
};

const ESCAPES = { n: "\n", t: "\t", r: "\r", "\\": "\\" };
const unescaped = (line) => line.replace(/\\([ntr\\])/g, (_, letter) => ESCAPES[letter]);

export class Settings {
  #fields;
  #changed;

  /**
   * @param {HTMLElement} form has a field for each name in `DEFAULTS`, which is its id.
   * @param {() => void} changed is called after each change.
   */
  constructor(form, changed) {
    this.#changed = changed;
    const kept = parsed(browser.recall("settings"));
    const names = Object.keys(DEFAULTS);
    this.#fields = Object.fromEntries(names.map((name) => [name, form.querySelector(`#${name}`)]));
    this.#fill((name) => (typeof kept[name] === "string" ? kept[name] : DEFAULTS[name]));
    form.addEventListener("input", () => this.#keep());
    this.#checkTools();
  }

  /** The messages that begin every conversation. */
  get opening() {
    const { value } = this.#fields.system;
    return value.trim() === "" ? [] : [{ role: "system", content: value }];
  }

  /** The fields of a request to a model that chats, besides those of `request`. */
  get chatRequest() {
    return this.#fields.tools.value.trim() === "" ? {} : { tools: JSON.parse(this.#fields.tools.value) };
  }

  reset() {
    this.#fill((name) => DEFAULTS[name]);
    this.#keep();
  }

  /** The first field with an invalid value, or null. */
  get wrong() {
    return Object.values(this.#fields).find((field) => !field.checkValidity()) ?? null;
  }

  /** A short text of the settings that differ from the defaults. */
  get chosen() {
    return Object.entries(IN_SHORT)
      .filter(([name]) => this.#fields[name].value !== DEFAULTS[name] && this.#fields[name].value.trim() !== "")
      .map(([name, told]) => told(this.#fields[name].value))
      .join(", ");
  }

  /** The fields of a request, without settings that are left empty: those are up to the server. */
  get request() {
    const request = {};
    for (const name of ["max_tokens", "temperature", "top_p", "seed"])
      if (this.#fields[name].value !== "") request[name] = Number(this.#fields[name].value);
    const stops = this.#fields.stop_strings.value.split("\n").filter((line) => line !== "");
    if (stops.length) request.stop = stops.map(unescaped);
    return request;
  }

  #fill(value) {
    for (const [name, field] of Object.entries(this.#fields)) field.value = value(name);
  }

  #checkTools() {
    const { value } = this.#fields.tools;
    const isList = value.trim() === "" || Array.isArray(parsed(value));
    this.#fields.tools.setCustomValidity(isList ? "" : "Give the tools as a list in JSON, as in a request.");
  }

  #keep() {
    this.#checkTools();
    const values = Object.entries(this.#fields).map(([name, field]) => [name, field.value]);
    browser.keep("settings", JSON.stringify(Object.fromEntries(values)));
    this.#changed();
  }
}

/** The value of a JSON text; {} if it is null or not JSON. */
function parsed(text) {
  try {
    return JSON.parse(text) ?? {};
  } catch {
    return {};
  }
}
