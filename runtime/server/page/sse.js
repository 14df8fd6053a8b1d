/**
 * Server-sent events, read from the body of a response to whatever method.
 *
 * After https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation; of fields only
 * `data` is of interest here.
 */

/** The body ended with an error: its connection broke, or it was aborted. */
export class Broken extends Error {}

/** Lines of a text that comes in pieces, cut anywhere; a line ends with LF, CR or both. */
export class Lines {
  #begun = "";
  #endedWithCR = false;

  /** The lines that are whole with this piece. */
  add(piece) {
    if (piece === "") return []; // no more than the beginning of a character
    if (this.#endedWithCR && piece.startsWith("\n")) piece = piece.slice(1);
    this.#endedWithCR = piece.endsWith("\r");
    const lines = piece.split(/\r\n|\n|\r/);
    lines[0] = this.#begun + lines[0];
    this.#begun = lines.pop();
    return lines;
  }
}

/**
 * The data of each event, as it is whole.
 *
 * @param {ReadableStream<Uint8Array>} body cut anywhere, in the middle of characters too. It is cancelled when this
 *   generator is left.
 * @throws {Broken}
 */
export async function* eventData(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  const lines = new Lines();
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((problem) => {
        throw new Broken(String(problem));
      });
      if (done) return; // an event without its empty line is none
      for (const line of lines.add(decoder.decode(value, { stream: true }))) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line === "data" || line.startsWith("data:")) {
          data.push(line.slice(5).replace(/^ /, ""));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // of a body that failed, it tells of that failure again
  }
}
