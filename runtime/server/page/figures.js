/** The figures of an answer, as they grow. */

const NONE = "–";

const count = (n) => n.toLocaleString("en");
const percent = (share) => `${Math.round(100 * share)} %`;
const rate = (perSecond) => perSecond.toFixed(perSecond < 10 ? 1 : 0);
/** @param {number} s seconds. */
const duration = (s) => (s < 0.9995 ? `${Math.round(1000 * s)} ms` : `${s.toFixed(s < 9.95 ? 2 : 1)} s`);
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Each figure as text, with its details if there are any; null if there is nothing to show. */
const TOLD = {
  acceptance: ({ proposed, accepted, accepted_copied = 0, rejected_copied = 0, drafter }) => {
    const own = accepted - accepted_copied;
    const copied = accepted_copied + rejected_copied;
    const of = proposed - copied;
    if (of > 0) return [percent(own / of), `${count(own)} of ${count(of)}${accepted_copied ? `, ${count(accepted_copied)} copied` : ""}`];
    if (copied > 0) return [percent(accepted_copied / copied), `${count(accepted_copied)} of ${count(copied)}`];
    return drafter === "resting" ? ["resting"] : null;
  },
  speed: ({ generation_tps, rows_per_pass }) =>
    generation_tps > 0 ? [rate(generation_tps), rows_per_pass > 1 ? `${rows_per_pass.toFixed(1)} streams a pass` : undefined] : null,
  tokens: ({ generated_tokens }) => (isNumber(generated_tokens) ? [count(generated_tokens)] : null),
  first: ({ time_to_first_token }) => (isNumber(time_to_first_token) ? [duration(time_to_first_token)] : null),
  read: ({ prompt_tokens, cached_tokens }) =>
    isNumber(prompt_tokens) ? [count(prompt_tokens), cached_tokens > 0 ? `, of which ${count(cached_tokens)} cached` : undefined] : null,
};

export class Figures {
  #places;
  #frame = 0;
  #counts = {};

  /** @param {HTMLElement} list has an element for each name in `TOLD`, which is its id. */
  constructor(list) {
    this.#places = Object.fromEntries(Object.keys(TOLD).map((name) => [name, list.querySelector(`#${name}`)]));
  }

  /** How far the prompt was read: [tokens read, tokens], or [tokens] alone; empty if neither is known. */
  get read() {
    const { prompt_tokens, cached_tokens, prefilled_tokens } = this.#counts;
    if (!isNumber(prompt_tokens)) return [];
    return isNumber(prefilled_tokens) ? [Math.min(prompt_tokens, (cached_tokens ?? 0) + prefilled_tokens), prompt_tokens] : [prompt_tokens];
  }

  /** All that is known. */
  get counts() {
    return this.#counts;
  }

  get tokens() {
    return this.#counts.generated_tokens ?? null;
  }

  clear() {
    this.#counts = {};
    this.flush();
  }

  /** @param {object} counts new values, by the server's names; shown with the next frame. */
  count(counts) {
    for (const [name, value] of Object.entries(counts)) if (value !== undefined) this.#counts[name] = value;
    this.#frame ||= requestAnimationFrame(() => this.flush());
  }

  flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    for (const [name, told] of Object.entries(TOLD)) {
      const [words, made] = told(this.#counts) ?? [NONE];
      this.#places[name].textContent = words;
      if (made === undefined) continue;
      const small = document.createElement("small");
      small.textContent = made;
      this.#places[name].append(small);
    }
  }
}
