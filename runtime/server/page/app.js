/** The page: a prompt, the answer to it as it is written, and how that came about. */

import { Figures } from "./figures.js";
import { Following } from "./following.js";
import { Failure, Generation, model } from "./generation.js";
import { recallKey } from "./key.js";
import { tab } from "./memory.js";
import { Settings } from "./settings.js";
import { Strip } from "./strip.js";
import { GrowingText } from "./text.js";
import { Trouble } from "./trouble.js";

const $ = (id) => document.getElementById(id);
const tokens = (n) => `${n.toLocaleString("en")} ${n === 1 ? "token" : "tokens"}`;

const WORDS = {
  connecting: "Connecting",
  waiting: "Waiting",
  reading: "Reading the prompt",
  writing: "Writing",
  done: "Done",
  stopped: "Stopped",
  failed: "Failed",
};
const ENDS = { stop: "the text ended by itself", length: "the limit on tokens is reached" };

/** After so long without a word from the server, the page says so. It sends one several times a second. */
const SILENCE_MS = 5000;
/** What lasts shorter than this is not worth reading out. */
const WORTH_SAYING_MS = 800;
const TICK_MS = 500;
/** Of a long prompt, so much is shown beside its answer. */
const SHOWN_OF_PROMPT = 700;

const EXAMPLES = {
  text: ["def quicksort(items):", "class Stack:\n    def __init__(self):", "def read_config(path):"],
  chat: ["Explain speculative decoding in three sentences.", "Write a haiku about a dog that runs ahead.", "Sort a list in Python without sort()."],
};

const prompt = $("prompt");
const figures = new Figures($("figures"));
const following = new Following($("follow"));
const strip = new Strip($("strip"));
const text = new GrowingText($("text"), (paint) => following.while(paint));
const settings = new Settings($("settings"), () => showSettings());
const trouble = new Trouble($, () => retry());

/** What the server says of its model, once it was asked. */
let known = null;
/** The newest answer, and what it answers. */
let generation = null;
let asked = null;
let begunAt = 0;
let ticking = 0;
let saying = 0;

// --- an answer ------------------------------------------------------------------------------------

/** Ask; whatever is being answered ends. */
async function ask(question) {
  if (settings.wrong) {
    openSettings(true);
    settings.wrong.reportValidity();
    return;
  }
  leave();
  asked = question;
  keepPrompt();
  begunAt = performance.now();
  generation = new Generation({
    changed: () => show(),
    wrote: (pieces) => text.add(pieces),
    counted: (statistics) => {
      figures.count(statistics);
      strip.reach(statistics.elapsed ?? 0);
    },
    worked: (spans) => strip.add(spans),
  });
  const mine = generation;
  begin();
  const met = await modelFor(mine);
  if (met === null || mine.isOver) return;
  showQuestion();
  await mine.run(question, met, settings.request, recallKey());
}

/** End what is being answered without a word: another answer takes its place, or nobody looks any more. */
function leave() {
  const left = generation;
  generation = null;
  left?.stop();
}

/** The model, asked for if need be; null where that failed, which is then told. */
async function modelFor(mine) {
  try {
    return known ?? (await meet());
  } catch (problem) {
    if (!(problem instanceof Failure)) throw problem;
    mine.fail(problem);
    return null;
  }
}

/** Try again what failed: an answer, or else to meet the server. */
function retry() {
  trouble.hide();
  prompt.focus();
  if (generation?.failure) ask(asked);
  else greet();
}

function stop() {
  if (generation === null || generation.isOver) return false;
  generation.stop();
  return true;
}

function begin() {
  text.clear();
  figures.clear();
  strip.clear();
  showAll(false);
  $("welcome").hidden = true;
  $("instruments").hidden = $("answer").hidden = false;
  $("timeline").hidden = $("copy").hidden = true;
  showQuestion();
  trouble.hide();
  clearInterval(ticking);
  ticking = setInterval(tick, TICK_MS);
  following.resume();
  show();
}

/** What the state of the answer is, wherever it shows. */
function show() {
  if (generation === null) return;
  const { state, isOver } = generation;
  if (isOver) {
    text.flush();
    figures.flush();
    clearInterval(ticking);
  }
  $("state").dataset.state = state;
  $("state-word").textContent = WORDS[state];
  $("text").setAttribute("aria-busy", String(!isOver));
  $("text").classList.toggle("growing", state === "writing");
  following.isGrowing = !isOver;
  showStop(!isOver);
  tick();
  if (isOver) following.while(showEnd);
  say();
}

function showEnd() {
  const { id, failure } = generation;
  if (failure) known = null; // it may be another server by the next time
  showAll(true);
  $("strip").setAttribute("aria-label", strip.summary);
  $("timeline").hidden = id === null;
  if (id !== null) $("timeline").href = `/timelines/${encodeURIComponent(id)}`;
  $("copy").hidden = text.text === "" || !navigator.clipboard;
  if (failure) trouble.show(failure);
}

function tick() {
  $("state-more").textContent = more();
  $("thought-key").hidden = !text.hasThoughts;
  const beside = strip.beside === null ? null : Math.round(100 * strip.beside);
  $("beside").textContent = beside === null ? "drafts" : `${beside} % of drafting`;
  $("waiting").textContent = beside === null ? "drafts" : `${100 - beside} %`;
}

function more() {
  const { state, finishReason, heardAt } = generation;
  const now = performance.now();
  const since = Math.floor((now - begunAt) / 1000);
  const silent = now - heardAt >= SILENCE_MS ? [`nothing heard for ${Math.floor((now - heardAt) / 1000)} s`] : [];
  const told = {
    connecting: () => (since ? [`${since} s`] : []),
    waiting: () => ["for its turn", ...(silent.length || !since ? silent : [`${since} s`])],
    reading: () => [
      ...(figures.promptTokens === null ? [] : [tokens(figures.promptTokens)]),
      ...(silent.length || !since ? silent : [`${since} s`]),
    ],
    writing: () => silent,
    done: () => [ENDS[finishReason] ?? finishReason],
    stopped: () => (text.text === "" ? ["before the first word"] : []),
    failed: () => [],
  };
  return told[state]().join(" · ");
}

/** Read the state out, if it lasts; a waiting one may be over in a moment. */
function say() {
  clearTimeout(saying);
  const { state, isOver, failure } = generation;
  const words = () => {
    const counted = isOver && figures.tokens ? tokens(figures.tokens) : "";
    $("said").textContent = [WORDS[state], failure?.message ?? more(), counted].filter(Boolean).join(", ");
  };
  if (isOver) words();
  else saying = setTimeout(words, WORTH_SAYING_MS);
}

/** The prompt, before its answer: a question above it, or the beginning of the text that goes on. */
function showQuestion() {
  const isChat = known?.has_chat_template === true;
  const isLong = asked.length > SHOWN_OF_PROMPT;
  document.body.classList.toggle("chat", isChat);
  $("question").hidden = !isChat;
  $("question").textContent = isLong ? `${asked.slice(0, SHOWN_OF_PROMPT)}…` : asked;
  text.clear();
  if (isChat) return;
  const lead = document.createElement("span");
  lead.className = "prompt";
  lead.textContent = isLong ? `…${asked.slice(-SHOWN_OF_PROMPT)}` : asked;
  text.lead(lead);
}

// --- the server -----------------------------------------------------------------------------------

/** @throws {Failure} */
async function meet() {
  known = await model(recallKey());
  const name = (path) => {
    const words = document.createElement("b");
    words.textContent = path.split("/").filter(Boolean).slice(-2).join("/");
    words.title = path;
    return words;
  };
  $("models").replaceChildren(name(known.id), ...(known.draft ? [" drafted by ", name(known.draft)] : [" without a drafter"]));
  $("models").hidden = false;
  document.body.classList.toggle("undrafted", !known.draft);
  showExamples();
  return known;
}

async function greet() {
  try {
    await meet();
  } catch (problem) {
    if (!(problem instanceof Failure)) throw problem;
    trouble.show(problem);
  }
}

function showExamples() {
  const examples = EXAMPLES[known.has_chat_template ? "chat" : "text"].map((example) => {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = example;
    button.addEventListener("click", () => fill(example));
    item.append(button);
    return item;
  });
  $("examples").replaceChildren(...examples);
}

// --- the prompt -----------------------------------------------------------------------------------

function fill(words) {
  prompt.value = words;
  keepPrompt();
  prompt.focus();
  prompt.setSelectionRange(words.length, words.length);
}

/** For when the page is loaded again. */
function keepPrompt() {
  tab.keep("prompt", prompt.value || (asked ?? ""));
  grow();
}

/** Where the box does not grow with what is in it by itself. */
function grow() {
  if (CSS.supports("field-sizing", "content")) return;
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function send() {
  const question = prompt.value;
  if (question.trim() === "") {
    prompt.focus();
    return;
  }
  if (!settings.wrong) prompt.value = "";
  ask(question);
}

function showStop(isRunning) {
  const button = $("stop");
  if (!isRunning && document.activeElement === button) {
    // Focus stays with the composer; where there is no keyboard, none should come up.
    if (matchMedia("(pointer: coarse)").matches) $("send").focus();
    else prompt.focus();
  }
  button.hidden = !isRunning;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("input", keepPrompt);
prompt.addEventListener("keydown", (event) => {
  if (event.isComposing || event.keyCode === 229) return; // an input method has the key
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && prompt.value === "" && asked !== null) {
    event.preventDefault();
    fill(asked);
  }
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || event.defaultPrevented) return;
  if (stop()) event.preventDefault();
  else if (!$("settings").hidden) openSettings(false);
});
$("stop").addEventListener("click", stop);
$("edit").addEventListener("click", () => fill(asked));
$("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText(text.text);
  $("said").textContent = $("copy").textContent = "Copied";
  setTimeout(() => ($("copy").textContent = "Copy"), 1500);
});

// --- settings, the strip --------------------------------------------------------------------------

function openSettings(open) {
  const hadFocus = $("settings").contains(document.activeElement);
  $("settings").hidden = !open;
  $("settings-button").setAttribute("aria-expanded", String(open));
  if (!open && hadFocus) $("settings-button").focus();
}

function showSettings() {
  $("chosen").textContent = settings.chosen;
}

function showAll(all) {
  strip.show(all);
  $("all").setAttribute("aria-pressed", String(all));
  $("latest").setAttribute("aria-pressed", String(!all));
}

$("settings-button").addEventListener("click", () => openSettings($("settings").hidden));
$("reset").addEventListener("click", () => settings.reset());
$("latest").addEventListener("click", () => showAll(false));
$("all").addEventListener("click", () => showAll(true));

// --- begin ----------------------------------------------------------------------------------------

// The server hears of it that nobody reads on, also where the browser keeps the page for going back.
addEventListener("pagehide", stop);

showSettings();
fill(tab.recall("prompt") ?? "");
greet();
