// Requests to the server that gave this page, and the events of an answer.

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server can't be reached. Is llmrun serve still running?");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `The server answered ${response.status}.`);
}

const posting = (body, signal) => ({
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify(body),
  signal,
});

export const text = async (path) => (await request(path)).text();
export const get = async (path) => (await request(path)).json();
export const post = async (path, body) => (await request(path, posting(body))).json();

/** Yield the server-sent events of an answer as [name, data], those that arrived together in one list. */
export async function* answer(body, signal) {
  const response = await request("/ui/answer", posting(body, signal));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new Error("The connection broke before the answer ended.");
    });
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    yield blocks.filter((block) => block.startsWith("event: ")).map((block) => {
      const end = block.indexOf("\n");
      return [block.slice(7, end), JSON.parse(block.slice(end + 7))];
    });
  }
}
