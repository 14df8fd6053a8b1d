// The server's description, /openapi.json, to read and to try. Its contents are inserted as text, never as HTML.

const MOST_CHARACTERS = 200_000; // of an answer, that are shown

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// --- the description ---

function resolved(description, schema) {
  return schema.$ref ? description.components.schemas[schema.$ref.split("/").pop()] : schema;
}

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return [...new Set(options.map(typeOf))].join(" | ");
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items) : "any"}`;
  return [schema.type ?? "any", ...bounds(schema)].join(" ");
}

function bounds(schema) {
  const said = { minimum: "≥", maximum: "≤", minLength: "length ≥", maxLength: "length ≤" };
  return Object.keys(said).filter((name) => schema[name] !== undefined).map((name) => `${said[name]} ${schema[name]}`);
}

function fieldTable(schema) {
  const head = element("tr", {}, ...["Field", "Type", "Default"].map((text) => element("th", { textContent: text })));
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const isRequired = (schema.required ?? []).includes(name);
    const standard = isRequired ? "required" : JSON.stringify(field.default) ?? "";
    return element("tr", {}, element("td", {}, element("code", { textContent: name })),
      element("td", { textContent: typeOf(field) }), element("td", { textContent: standard }));
  });
  return element("div", { className: "scroll" }, element("table", {}, head, ...rows));
}

function statusTable(responses) {
  const rows = Object.entries(responses).map(([status, response]) =>
    element("tr", {}, element("td", {}, element("code", { textContent: status })),
      element("td", { textContent: response.description })));
  return element("div", { className: "scroll" }, element("table", {}, ...rows));
}

// --- trying it ---

async function send(method, path, body, signal, show) {
  const headers = {};
  const key = document.getElementById("key").value;
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== null) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method, headers, body, signal });
  const more = response.headers.get("Retry-After");
  show(`${response.status} ${response.headers.get("Content-Type") ?? ""}${more ? `, Retry-After: ${more}` : ""}\n\n`);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    show(value);
  }
}

function trial(path, method, operation) {
  const example = operation.requestBody?.content["application/json"].example;
  const body = example && element("textarea", { rows: 10, spellcheck: false, value: JSON.stringify(example, null, 2) });
  body?.setAttribute("aria-label", "Body of the request");
  const parameters = (operation.parameters ?? []).map(({ name }) => [name, element("input", { name })]);
  const button = element("button", { type: "submit", textContent: "Send" });
  const output = element("pre", { hidden: true, tabIndex: 0 });
  const form = element("form", {}, ...(body ? [body] : []),
    ...parameters.map(([name, input]) => element("p", {}, element("label", {}, `${name} `, input))),
    element("p", {}, button), output);
  let running = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) {
      running.abort(); // the server then ends the generation
      return;
    }
    running = new AbortController();
    button.textContent = "Stop";
    output.hidden = false;
    output.textContent = "";
    const show = (text) => {
      output.textContent = (output.textContent + text).slice(0, MOST_CHARACTERS);
    };
    const asked = parameters.reduce((text, [name, input]) => text.replace(`{${name}}`, encodeURIComponent(input.value)), path);
    try {
      await send(method.toUpperCase(), asked, body ? body.value : null, running.signal, show);
    } catch (error) {
      show(error.name === "AbortError" ? "\n(stopped)" : `\nThe server did not answer to the end: ${error.message}`);
    } finally {
      running = null;
      button.textContent = "Send";
    }
  });
  return form;
}

// --- the page ---

function shown(description, path, method, operation) {
  const taken = operation.requestBody?.content["application/json"].schema;
  return element("details", { id: operation.operationId },
    element("summary", {}, element("span", { className: "method", textContent: method.toUpperCase() }),
      element("code", { textContent: path }), " ", element("span", { className: "about", textContent: operation.summary })),
    ...(operation.description ? [element("p", { textContent: operation.description })] : []),
    ...(taken ? [element("h3", { textContent: "Body" }), fieldTable(resolved(description, taken))] : []),
    element("h3", { textContent: "Answers" }), statusTable(operation.responses),
    element("h3", { textContent: "Try it" }), trial(path, method, operation));
}

const main = document.getElementById("operations");
try {
  const description = await (await fetch("/openapi.json")).json();
  document.getElementById("title").textContent = `${description.info.title} ${description.info.version}`;
  document.getElementById("about").textContent = description.info.description;
  document.getElementById("key-line").hidden = !description.components.securitySchemes;
  for (const [path, methods] of Object.entries(description.paths)) {
    for (const [method, operation] of Object.entries(methods)) main.append(shown(description, path, method, operation));
  }
} catch (error) {
  main.append(element("p", { textContent: `The description could not be had: ${error.message}` }));
}
