// Requests to the server: JSON, streamed answers, and errors with messages for people.

/** An error whose message can be shown; `status` is the HTTP status, 0 if there was no response. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const KEY_WANTED = "The server wants an API key: enter it in the settings";
const keysNeeded = document.documentElement.dataset.keys === "needed";

async function request(path, key, options) {
  if (keysNeeded && !key) throw new ServerError(`${KEY_WANTED}.`, 401); // as the server would answer
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server can't be reached. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** The error of a failed response: the server's message and, for known statuses, what to do. */
async function refusal(response) {
  let message = "";
  try {
    const body = await response.json();
    message = body.error?.message ?? (typeof body.detail === "string" ? body.detail : "");
  } catch {
    // no JSON: only the status is known
  }
  const retryAfter = response.headers.get("Retry-After");
  const words = {
    401: KEY_WANTED,
    403: "The server doesn't accept this API key: check it in the settings",
    429: retryAfter ? `The server is busy: try again in ${retryAfter} s` : "The server is busy: try again soon",
    503: "The server is shutting down or not ready: try again soon",
  }[response.status];
  const text = words ? `${words}${message ? ` (${message})` : ""}.` : message || `The server answered with status ${response.status}.`;
  return new ServerError(text, response.status);
}

export async function getJson(path, key, signal) {
  return (await request(path, key, { signal })).json();
}

/** Yield the parsed events of a streamed answer up to `[DONE]`. Throws ServerError, or AbortError on `signal`. */
export async function* streamJson(path, body, key, signal) {
  const response = await request(path, key, { method: "POST", body: JSON.stringify(body), signal });
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(event.error.message ?? "The server failed.");
    yield event;
  }
  throw new ServerError("The connection was lost before the answer was complete.");
}

/** Yield the `data` of each server-sent event. */
async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    while (true) {
      const { value, done } = await read(reader);
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the server sees that the client is gone
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection was lost before the answer was complete.");
  }
}
