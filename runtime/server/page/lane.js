/** The work of one model over time. */

/** Spans of one actor. They never overlap, so both their beginnings and their ends are sorted. */
export class Lane {
  spans = [];
  busy = 0;

  add(span) {
    let i = this.spans.length;
    while (i > 0 && this.spans[i - 1].began > span.began) i -= 1;
    this.spans.splice(i, 0, span);
    this.busy += span.ended - span.began;
  }

  get ended() {
    return this.spans.at(-1)?.ended ?? 0;
  }

  /** The index of the first span that ends after a moment. */
  after(moment) {
    let low = 0;
    let high = this.spans.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.spans[middle].ended > moment) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** The parts of an interval in which this actor worked. */
  *within(began, ended) {
    for (let i = this.after(began); i < this.spans.length && this.spans[i].began < ended; i += 1)
      yield [Math.max(began, this.spans[i].began), Math.min(ended, this.spans[i].ended)];
  }

  /** The seconds of an interval in which this actor worked. */
  seconds(began, ended) {
    let sum = 0;
    for (const [from, to] of this.within(began, ended)) sum += to - from;
    return sum;
  }
}
