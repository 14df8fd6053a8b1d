/** One answer, from the request to its end; and the models that the server lists. */

import { Broken, eventData } from "./sse.js";

/** Why an answer failed, in words for a person. */
export class Failure extends Error {
  /**
   * @param {string} message
   * @param {object} more
   * @param {number | null} [more.retryAfter] seconds, if the server says how long to wait.
   * @param {boolean} [more.wantsKey] whether the server wants an API key.
   * @param {boolean} [more.canRetry] whether the same request may be answered another time.
   * @param {boolean} [more.isUnreachable] whether no server could be reached.
   */
  constructor(message, { retryAfter = null, wantsKey = false, canRetry = true, isUnreachable = false } = {}) {
    super(message);
    this.retryAfter = retryAfter;
    this.wantsKey = wantsKey;
    this.canRetry = canRetry;
    this.isUnreachable = isUnreachable;
  }
}

const UNREACHABLE = "The server cannot be reached. Is it still running?";
const CUT = "The connection was lost in the middle of the answer. The text so far is kept.";
const CUT_EARLY = "The connection was lost before the first word.";
const UNREADABLE = "The server sent a response that this page cannot read.";

/** Statuses below 500 after which a retry may succeed. 404 is for a model that has changed: the retry asks which there is. */
const PASSING = [404, 408, 429];
/** The advice at the end of a refusal, which says how long to wait. */
const ADVICE = /[;,.]?\s*(please )?try again in [^;,]*$/i;

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

/** Whether a model gets questions and not texts to continue; also if that is unknown because it was never loaded. */
export const isChat = (model) => model?.has_chat_template === true || model?.has_chat_template === null;

/**
 * The server's models, at least one.
 *
 * @param {string | null} key
 * @returns {Promise<{id: string, has_chat_template: boolean | null, draft: string | null, state?: string}[]>}
 * @throws {Failure}
 */
export async function models(key) {
  const response = await asked("/v1/models", { headers: headers(key), cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  const listed = (await response.json().catch(() => null))?.data;
  const known = Array.isArray(listed) ? listed.filter((model) => typeof model?.id === "string") : [];
  if (known.length === 0) throw new Failure("The server lists no models.");
  return known;
}

async function asked(path, request) {
  try {
    return await fetch(path, request);
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new Failure(UNREACHABLE, { isUnreachable: true });
  }
}

async function refusal(response) {
  const said = await response.json().catch(() => null);
  const message = typeof said?.error?.message === "string" && said.error.message !== "" ? said.error.message : null;
  const { status, statusText } = response;
  const retryAfter = status === 429 || status === 503 ? seconds(response.headers.get("Retry-After")) : null;
  // The page counts the seconds down, so a fixed number in the message would soon contradict it.
  const told = retryAfter === null ? message : message?.replace(ADVICE, "");
  return new Failure(told || `The server answered ${status} ${statusText}`.trim() + ".", {
    retryAfter,
    wantsKey: status === 401,
    canRetry: status >= 500 || PASSING.includes(status),
  });
}

/** The seconds of a Retry-After, which is a number of seconds or a date; null if it is neither. */
function seconds(retryAfter) {
  if (retryAfter === null) return null;
  if (/^\d+$/.test(retryAfter.trim())) return Number(retryAfter);
  const at = Date.parse(retryAfter);
  return Number.isNaN(at) ? null : Math.max(0, Math.ceil((at - Date.now()) / 1000));
}

/**
 * A request for an answer, and the answer as it arrives.
 *
 * `state` is "connecting", "loading" (the model), "waiting", "reading", "writing", and at the end "done", "stopped" or "failed". After the end
 * the listener is told nothing more, whatever the server still sends.
 */
export class Generation {
  #abort = new AbortController();
  #listener;

  /** The server's id of the answer; null before its first chunk. */
  id = null;
  state = "connecting";
  /** "stop" or "length", once the text has ended. */
  finishReason = null;
  /** @type {Failure | null} */
  failure = null;
  /** When the server last sent something, in ms of `performance.now()`. */
  heardAt = performance.now();

  /**
   * @param {{
   *   changed(): void,
   *   wrote(pieces: {text: string, isDrafted: boolean, isCopied: boolean, isThought: boolean}[]): void,
   *   called(calls: object[]): void,
   *   counted(statistics: object): void,
   *   worked(spans: {actor: string, kind: string, began: number, ended: number}[]): void,
   *   drafterChanged(changes: {at: number, state: string}[]): void,
   * }} listener
   */
  constructor(listener) {
    this.#listener = listener;
  }

  /**
   * A generation that was over before the page was reloaded.
   *
   * @param {{id: string | null, state: string, finishReason: string | null, message: string | null}} kept
   */
  static over({ id, state, finishReason, message }) {
    const generation = new Generation({});
    if (state === "failed") generation.failure = new Failure(message);
    return Object.assign(generation, { id, state, finishReason });
  }

  /** Whether the server has not begun to answer yet. */
  get isUnanswered() {
    return this.state === "connecting" || this.state === "loading";
  }

  get isOver() {
    return ["done", "stopped", "failed"].includes(this.state);
  }

  /**
   * Send the request, and tell the listener of its answer until that is over; never throws.
   *
   * @param {string} prompt
   * @param {object[]} past the messages before the prompt, for a model that chats.
   * @param {{id: string, has_chat_template: boolean | null}} model
   * @param {object} settings fields of the request.
   * @param {string | null} key
   */
  async run(prompt, past, model, settings, key) {
    const [path, asking] = isChat(model)
      ? ["/v1/chat/completions", { messages: [...past, { role: "user", content: prompt }] }]
      : ["/v1/completions", { prompt }];
    const options = { include_usage: true, include_speculation: true };
    try {
      const response = await asked(path, {
        method: "POST",
        headers: { "Content-Type": "application/json", Accept: "text/event-stream", ...headers(key) },
        body: JSON.stringify({ model: model.id, ...asking, ...settings, stream: true, stream_options: options }),
        cache: "no-store",
        signal: this.#abort.signal,
      });
      if (!response.ok) throw await refusal(response);
      if (!response.headers.get("Content-Type")?.startsWith("text/event-stream")) throw new Failure(UNREADABLE);
      this.#heard();
      this.#become("waiting");
      await this.#read(response.body);
    } catch (problem) {
      if (!(problem instanceof Failure || this.isOver)) reportError(problem);
      this.fail(problem instanceof Failure ? problem : new Failure(`This page failed: ${problem}`));
    }
    this.#abort.abort(); // whatever else the server sends is not read
  }

  /** End the answer at once; harmless if it is over. */
  stop() {
    this.#become("stopped");
    this.#abort.abort();
  }

  /** @param {boolean} isLoading whether the model is being loaded; ignored once the server answers. */
  loads(isLoading) {
    if (this.isUnanswered) this.#become(isLoading ? "loading" : "connecting");
  }

  /** @param {Failure} failure ends the answer; ignored if it is over. */
  fail(failure) {
    if (!this.isOver) this.failure = failure;
    this.#become("failed");
  }

  async #read(body) {
    try {
      for await (const data of eventData(body)) {
        if (this.isOver || data === "[DONE]") break;
        this.#heard();
        this.#take(chunk(data));
      }
    } catch (problem) {
      if (!(problem instanceof Broken)) throw problem;
    }
    if (this.finishReason !== null) this.#become("done");
    else this.fail(new Failure(this.state === "writing" ? CUT : CUT_EARLY));
  }

  #take(chunk) {
    if (chunk.error)
      throw new Failure(String(chunk.error.message ?? UNREADABLE), { canRetry: chunk.error.type !== "invalid_request_error" });
    this.id ??= typeof chunk.id === "string" ? chunk.id : null;
    const { speculation } = chunk;
    if (speculation?.spans?.length) {
      if (this.state === "waiting") this.#become("reading");
      this.#listener.worked(speculation.spans);
    }
    if (speculation?.drafter?.length) this.#listener.drafterChanged(speculation.drafter);
    const pieces = piecesOf(chunk);
    if (pieces.length) {
      this.#become("writing");
      this.#listener.wrote(pieces);
    }
    const calls = chunk.choices?.[0]?.delta?.tool_calls;
    if (Array.isArray(calls) && calls.length) {
      this.#become("writing");
      this.#listener.called(calls.filter((call) => call !== null && typeof call === "object"));
    }
    if (speculation?.statistics) this.#listener.counted(speculation.statistics);
    else if (chunk.usage) this.#listener.counted(countsOf(chunk.usage));
    this.finishReason = chunk.choices?.[0]?.finish_reason ?? this.finishReason;
  }

  #heard() {
    this.heardAt = performance.now();
  }

  #become(state) {
    if (this.isOver || this.state === state) return;
    this.state = state;
    this.#listener.changed();
  }
}

function chunk(data) {
  try {
    const read = JSON.parse(data);
    if (read !== null && typeof read === "object" && !Array.isArray(read)) return read;
  } catch {
    // Reported below.
  }
  throw new Failure(UNREADABLE);
}

/** The pieces of text that a chunk adds; one for each token, if the chunk has its tokens. */
function piecesOf(chunk) {
  if (Array.isArray(chunk.speculation?.tokens))
    return chunk.speculation.tokens
      .filter((token) => token.text)
      .map((token) => ({
        text: token.text,
        isDrafted: token.from_draft === true,
        isCopied: token.drafted_by === "copy",
        isThought: token.is_thinking === true,
      }));
  const choice = chunk.choices?.[0] ?? {};
  return [
    { text: choice.delta?.reasoning_content, isDrafted: false, isCopied: false, isThought: true },
    { text: choice.text ?? choice.delta?.content, isDrafted: false, isCopied: false, isThought: false },
  ].filter((piece) => piece.text);
}

const countsOf = (usage) => ({
  prompt_tokens: usage.prompt_tokens,
  generated_tokens: usage.completion_tokens,
  proposed: usage.proposed_tokens,
  accepted: usage.accepted_tokens,
  accepted_copied: usage.accepted_copied_tokens,
  rejected_copied: usage.rejected_copied_tokens,
});
