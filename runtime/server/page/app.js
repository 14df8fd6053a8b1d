/** The page: a prompt, its answer while it is written, and how the models made it. */

import { Calls } from "./calls.js";
import { Conversation } from "./conversation.js";
import { Figures } from "./figures.js";
import { Following } from "./following.js";
import { Failure, Generation, isChat, models } from "./generation.js";
import { forgetAnswer, keepAnswer, recallAnswer } from "./kept.js";
import { recallKey } from "./key.js";
import { watchLoading } from "./loading.js";
import { browser, tab } from "./memory.js";
import { WELCOMES, byline, choose, drafterOf, namesOf } from "./models.js";
import { Settings } from "./settings.js";
import { Strip } from "./strip.js";
import { GrowingText } from "./text.js";
import { Trouble } from "./trouble.js";
import { STATES, told, tokens } from "./words.js";

const $ = (id) => document.getElementById(id);
/** A state that lasts less than this is not read out. */
const WORTH_SAYING_MS = 800;
const TICK_MS = 500;
/** How often to look for a server that could not be reached. */
const LOOK_MS = 5000;
/** Most characters of a prompt that are shown with its answer. */
const SHOWN_OF_PROMPT = 700;

const EXAMPLES = {
  text: ["def quicksort(items):", "class Stack:\n    def __init__(self):", "def read_config(path):"],
  chat: ["Explain speculative decoding in three sentences.", "Write a haiku about a dog that runs ahead.", "Sort a list in Python without sort()."],
};

/** On such screens the settings would cover the answer. */
const LITTLE_ROOM = matchMedia("(max-width: 720px), (max-height: 620px)");

const prompt = $("prompt");
const figures = new Figures($("figures"));
const following = new Following($("follow"));
const strip = new Strip($("strip"));
const text = new GrowingText({ thoughts: $("thoughts"), thinking: $("thinking"), text: $("text") }, (paint) => following.while(paint));
const calls = new Calls($("calls"));
const conversation = new Conversation($("past"));
const settings = new Settings($("settings"), () => {
  showSettings();
  outdate();
});
const trouble = new Trouble($, () => retry());

/** The chosen model, as the server describes it; null until it was asked. */
let known = null;
/** The newest answer, and its prompt. */
let generation = null;
let asked = null;
/** The name of the model that gives the newest answer; null until it is known. */
let answering = null;
let begunAt = 0;
let ticking = 0;
let saying = 0;
/** Whether a prompt that got no answer was put back into the box. */
let isPutBack = false;
/** Whether the answer was kept from before the page was reloaded. */
let isKept = false;
let looking = 0;
/** Whether the next question replaces the last one. */
let isEditing = false;

// --- an answer ------------------------------------------------------------------------------------

/** Ask a question; an answer that is under way ends. */
async function ask(question) {
  if (settings.wrong) {
    openSettings(true);
    settings.wrong.reportValidity();
    return;
  }
  if (LITTLE_ROOM.matches) openSettings(false);
  remember();
  leave();
  asked = question;
  keepPrompt();
  begunAt = performance.now();
  generation = new Generation({
    changed: () => show(),
    wrote: (pieces) => text.add(pieces),
    called: (pieces) => calls.add(pieces),
    counted: (statistics) => {
      figures.count(statistics);
      strip.reach(statistics.elapsed ?? 0);
      if (generation?.state === "reading") tick();
    },
    worked: (spans) => strip.add(spans),
    drafterChanged: (changes) => {
      strip.change(changes);
      figures.count({ drafter: changes.at(-1).state });
    },
  });
  const mine = generation;
  isKept = false;
  begin(isChat(known));
  const met = await modelFor(mine);
  if (met === null || mine.isOver) return;
  showQuestion(isChat(met));
  showAnswering(met.id);
  showDrafter(met);
  const request = { ...settings.request, ...(isChat(met) ? settings.chatRequest : {}) };
  watchLoading(mine, met, recallKey());
  await mine.run(question, [...settings.opening, ...conversation.messages], met, request, recallKey());
  // A model that was loaded for this question may turn out not to chat. Then it gets the question as a text to continue.
  const wasRefused = mine === generation && mine.failure?.canRetry === false && met.has_chat_template === null;
  if (wasRefused && (await modelFor(mine))?.has_chat_template === false && mine === generation) retry();
}

/** Add the last question and its answer to the conversation that the next question continues. */
function remember() {
  text.flush();
  const isTurn = !$("question").hidden && text.text.trim() !== "" && generation !== null && !generation.failure && !isEditing;
  isEditing = false;
  if (isTurn) conversation.add({ asked, thoughts: text.thoughts, text: text.text.trimStart(), model: answering ?? "" });
}

/** Begin a new conversation. */
function beginAnew() {
  leave();
  conversation.clear();
  forgetAnswer();
  asked = null;
  text.clear();
  hideTrouble();
  showStop(false);
  clearInterval(ticking);
  $("instruments").hidden = $("answer").hidden = $("question").hidden = true;
  $("welcome").hidden = false;
  fill("");
}

/** End the current answer and show nothing of it: another one replaces it, or the conversation is over. */
function leave() {
  const left = generation;
  generation = null;
  left?.stop();
}

/** The model; the server is asked if it is not known. Null if that failed, which is then shown. */
async function modelFor(mine) {
  try {
    return known ?? (await meet());
  } catch (problem) {
    if (!(problem instanceof Failure)) throw problem;
    mine.fail(problem);
    return null;
  }
}

/** Repeat what failed: the answer, or asking the server for its models. */
function retry() {
  const { failure } = trouble;
  hideTrouble();
  prompt.focus();
  if (generation === null || !generation.failure || (isKept && failure !== generation.failure)) greet();
  else if (isPutBack && prompt.value.trim() !== "") send();
  else ask(asked);
}

function showTrouble(failure) {
  trouble.show(failure);
  clearInterval(looking);
  if (failure.isUnreachable) looking = setInterval(look, LOOK_MS);
}

function hideTrouble() {
  clearInterval(looking);
  trouble.hide();
}

/** Look again for a server that could not be reached; once it answers, hide the message about that. */
async function look() {
  if (document.hidden) return;
  try {
    await meet();
  } catch (problem) {
    if (!(problem instanceof Failure)) throw problem;
    if (trouble.failure?.isUnreachable && !problem.isUnreachable) showTrouble(problem);
    return;
  }
  if (trouble.failure?.isUnreachable) hideTrouble();
}

/** Hide the problem of a request while its prompt or settings are changed: it may no longer apply. */
function outdate() {
  if (trouble.failure && !trouble.failure.canRetry && !trouble.failure.wantsKey && isPutBack) hideTrouble();
}

function stop() {
  if (generation === null || generation.isOver) return false;
  generation.stop();
  return true;
}

/** @param {boolean} isQuestion whether the prompt is shown as a question above the answer. */
function begin(isQuestion) {
  text.clear();
  figures.clear();
  strip.clear();
  showAll(false);
  $("welcome").hidden = true;
  $("instruments").hidden = $("answer").hidden = false;
  $("timeline").hidden = $("copy").hidden = true;
  $("edit").hidden = false;
  $("anew").hidden = conversation.isEmpty;
  calls.clear();
  showQuestion(isQuestion);
  showAnswering(null);
  hideTrouble();
  isPutBack = false;
  clearInterval(ticking);
  ticking = setInterval(tick, TICK_MS);
  following.resume();
  show();
}

/** Show the state of the answer, everywhere on the page. */
function show() {
  if (generation === null) return;
  const { state, isOver } = generation;
  if (isOver) {
    text.flush();
    figures.flush();
    clearInterval(ticking);
  }
  $("state").dataset.state = state;
  $("state-word").textContent = STATES[state];
  $("text").setAttribute("aria-busy", String(!isOver));
  $("answer").classList.toggle("growing", state === "writing");
  following.isGrowing = !isOver;
  showStop(!isOver);
  tick();
  if (isOver) following.while(showEnd);
  if (!isKept) say();
}

function showEnd() {
  const { id, failure } = generation;
  showAll(true);
  $("strip").setAttribute("aria-label", strip.summary);
  $("timeline").hidden = id === null;
  if (id !== null) $("timeline").href = `/timelines/${encodeURIComponent(id)}`;
  $("copy").hidden = text.text === "" || !navigator.clipboard;
  $("anew").hidden = $("question").hidden;
  if (failure) {
    known = null; // the next time, it may be another server
    showTrouble(failure);
    if (text.pieces.length === 0 && !isKept) putBack();
  }
  if (!isKept) keep();
}

/** Show the answer to a question formatted, unless the reader has chosen it as written. */
function showFormatted() {
  const isWritten = browser.recall("view") === "written";
  $("view").hidden = $("question").hidden;
  $("view").setAttribute("aria-pressed", String(isWritten));
  text.format(!$("view").hidden && !isWritten);
}

/** Put a prompt that got no answer back into the box, unless another one is being written there. */
function putBack() {
  isPutBack = prompt.value === "" || prompt.value === asked;
  if (!isPutBack) return;
  prompt.value = asked;
  keepPrompt();
  text.clear();
  showAnswering(null);
  $("question").hidden = $("edit").hidden = $("view").hidden = true;
  $("answer").hidden = conversation.isEmpty; // otherwise it has the button for a new chat
}

function keep() {
  if (text.pieces.length === 0) return forgetAnswer();
  const { id, state, finishReason, failure } = generation;
  const { spans, changes } = strip;
  const message = failure?.message ?? null;
  keepAnswer({ asked, isChat: !$("question").hidden, model: answering, id, state, finishReason, message, pieces: text.pieces, counts: figures.counts, spans, changes });
}

/** Show the answer that was kept from before the page was reloaded, if there is one. */
function showKept() {
  const kept = recallAnswer();
  if (kept === null) return;
  isKept = true;
  asked = kept.asked;
  generation = Generation.over(kept);
  begin(kept.isChat);
  showAnswering(kept.model ?? null);
  text.add(kept.pieces);
  figures.count(kept.counts);
  strip.add(kept.spans);
  strip.change(kept.changes);
  strip.reach(kept.counts.elapsed ?? 0);
  show();
  isPutBack = tab.recall("prompt") === asked;
}

function tick() {
  $("state-more").textContent = more();
  const beside = strip.beside === null ? null : Math.round(100 * strip.beside);
  $("beside").textContent = beside === null ? "drafts" : `${beside} % of drafting`;
  $("waiting").textContent = beside === null ? "drafts" : `${100 - beside} %`;
}

function more() {
  const { read } = figures;
  return told(generation, { sinceMs: performance.now() - begunAt, read, hasText: text.text !== "" });
}

/** Have the state read out, unless it is over in a moment, as waiting may be. */
function say() {
  clearTimeout(saying);
  const { state, isOver, failure } = generation;
  const words = () => {
    const counted = isOver && figures.tokens ? tokens(figures.tokens) : "";
    $("said").textContent = [STATES[state], failure?.message ?? more(), counted].filter(Boolean).join(", ");
  };
  if (isOver) words();
  else saying = setTimeout(words, WORTH_SAYING_MS);
}

/** @param {string | null} id of the model that gives the answer. */
function showAnswering(id) {
  answering = id;
  $("by").replaceChildren(...(id === null ? [] : [byline(id)]));
}

/** Show what drafts for a model, if anything does. */
function showDrafter(model) {
  const drafter = drafterOf(model);
  const [title, [before, example = "", after = ""]] = WELCOMES[drafter];
  const tinted = document.createElement("em");
  tinted.className = drafter === "ngram" ? "drafted copied" : "drafted";
  tinted.textContent = example;
  $("welcome-title").textContent = title;
  $("welcome-text").replaceChildren(before, ...(example ? [tinted, after] : []));
  document.body.dataset.drafter = drafter;
  strip.drafter = drafter;
}

/** Show the prompt of an answer: as a question above it, or as the beginning of the text that is continued. */
function showQuestion(isQuestion) {
  const isLong = asked.length > SHOWN_OF_PROMPT;
  document.body.classList.toggle("chat", isQuestion);
  $("question").hidden = !isQuestion;
  $("question").textContent = isLong ? `${asked.slice(0, SHOWN_OF_PROMPT)}…` : asked;
  text.clear();
  showFormatted();
  if (isQuestion) return;
  const lead = document.createElement("span");
  lead.className = "prompt";
  lead.textContent = isLong ? `…${asked.slice(-SHOWN_OF_PROMPT)}` : asked;
  text.lead(lead);
}

// --- the server -----------------------------------------------------------------------------------

/** @throws {Failure} */
async function meet() {
  known = choose($("model"), await models(recallKey()));
  $("model-label").hidden = $("model").length < 2;
  document.body.classList.toggle("several", $("model").length > 1);
  $("models").replaceChildren(...namesOf(known));
  $("models").hidden = false;
  if (generation === null || generation.isOver) showDrafter(known);
  showExamples();
  return known;
}

async function greet() {
  try {
    await meet();
  } catch (problem) {
    if (!(problem instanceof Failure)) throw problem;
    showTrouble(problem);
  }
}

function showExamples() {
  const examples = EXAMPLES[isChat(known) ? "chat" : "text"].map((example) => {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = example;
    if (!isChat(known)) button.className = "code";
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

/** Keep the prompt for when the page is reloaded. */
function keepPrompt() {
  tab.keep("prompt", prompt.value || (asked ?? ""));
  grow();
}

/** Make the box as high as its text, in browsers where it does not grow by itself. */
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
  if (!settings.wrong) {
    prompt.value = "";
    isPutBack = false;
  }
  ask(question);
}

function showStop(isRunning) {
  const button = $("stop");
  if (!isRunning && document.activeElement === button) {
    // Keep the focus in the composer; on a touch screen, not in the box, which would bring up a keyboard.
    if (matchMedia("(pointer: coarse)").matches) $("send").focus();
    else prompt.focus();
  }
  button.hidden = !isRunning;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("input", () => {
  keepPrompt();
  outdate();
});
prompt.addEventListener("keydown", (event) => {
  if (event.isComposing || event.keyCode === 229) return; // the key is for an input method
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
$("edit").addEventListener("click", () => {
  isEditing = true;
  fill(asked);
});
$("anew").addEventListener("click", beginAnew);
$("view").addEventListener("click", () => {
  browser.keep("view", browser.recall("view") === "written" ? "formatted" : "written");
  following.while(showFormatted);
});
$("model").addEventListener("change", () => {
  browser.keep("model", $("model").value);
  known = null; // so that a question asked before the server answers goes to the model that was just chosen
  greet();
});
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

// The server must notice that nobody reads on, even if the browser keeps the page for going back.
addEventListener("pagehide", stop);

showSettings();
showKept();
fill(tab.recall("prompt") ?? "");
greet();
