/** Keeps the page scrolled to its end while it grows, unless the reader has scrolled up. */

/** Distance in CSS pixels that still counts as the end, because browsers round. */
const NEAR = 4;

export class Following {
  #button;
  #isFollowing = true;
  #isGrowing = false;
  #lastTop = 0;

  /** @param {HTMLElement} button goes to the end. */
  constructor(button) {
    this.#button = button;
    addEventListener("scroll", () => this.#scrolled(), { passive: true });
    addEventListener("resize", () => this.#isFollowing && this.#isGrowing && this.#toEnd());
    button.addEventListener("click", () => this.resume());
  }

  /** @param {boolean} is whether the page will grow further. */
  set isGrowing(is) {
    this.#isGrowing = is;
    this.#show();
  }

  /** Go to the end, and stay there. */
  resume() {
    this.#isFollowing = true;
    this.#toEnd();
    this.#show();
  }

  /** @param {() => void} growing makes the page longer. */
  while(growing) {
    growing();
    if (this.#isFollowing) this.#toEnd();
  }

  #toEnd() {
    scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
    this.#lastTop = scrollY;
  }

  #scrolled() {
    const { scrollHeight, clientHeight } = document.documentElement;
    // Only a reader scrolls up.
    if (scrollY < this.#lastTop) this.#isFollowing = false;
    if (scrollY + clientHeight >= scrollHeight - NEAR) this.#isFollowing = true;
    this.#lastTop = scrollY;
    this.#show();
  }

  #show() {
    this.#button.hidden = this.#isFollowing || !this.#isGrowing;
  }
}
