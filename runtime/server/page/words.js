/** The state of an answer in words. */

export const STATES = {
  connecting: "Connecting",
  loading: "Loading the model",
  waiting: "Waiting",
  reading: "Reading the prompt",
  writing: "Writing",
  done: "Done",
  stopped: "Stopped",
  failed: "Failed",
};
const ENDS = { stop: "end of text", length: "token limit reached", tool_calls: "waiting for the results of its calls" };

/** After this long without an event from the server, the page says so. The server sends several a second. */
const SILENCE_MS = 5000;

const count = (n) => n.toLocaleString("en");
export const tokens = (n) => `${count(n)} ${n === 1 ? "token" : "tokens"}`;

/**
 * Further words about an answer, besides its state.
 *
 * @param {import("./generation.js").Generation} generation
 * @param {object} more
 * @param {number} more.sinceMs time since the answer was requested.
 * @param {number[]} more.read how far the prompt was read; see `Figures`.
 * @param {boolean} more.hasText whether anything was written.
 */
export function told({ state, finishReason, heardAt }, { sinceMs, read, hasText }) {
  const since = Math.floor(sinceMs / 1000);
  const silentMs = performance.now() - heardAt;
  const silent = silentMs >= SILENCE_MS ? [`nothing heard for ${Math.floor(silentMs / 1000)} s`] : [];
  const lasting = silent.length || !since ? silent : [`${since} s`];
  const last = read.at(-1);
  const parts = {
    connecting: () => (since ? [`${since} s`] : []),
    loading: () => (since ? [`${since} s`] : []),
    waiting: () => ["in the queue", ...lasting],
    reading: () => [...(read.length ? [[...read.slice(0, -1).map(count), tokens(last)].join(" of ")] : []), ...lasting],
    writing: () => silent,
    done: () => [ENDS[finishReason] ?? finishReason],
    stopped: () => (hasText ? [] : ["before the first word"]),
    failed: () => [],
  };
  return parts[state]().join(" · ");
}
