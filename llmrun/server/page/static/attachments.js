// Files for the next question: texts, images and audio, dropped on the page, pasted, or chosen with a button.

import { post } from "./api.js";
import { clean, h, icon, iconButton, number } from "./dom.js";

const IMAGES = ["image/png", "image/jpeg", "image/gif", "image/bmp", "image/webp"]; // that the engine can decode
const AUDIO = /\.(wav|mp3|flac)$/i;
const OTHER_AUDIO = /\.(ogg|oga|opus|m4a|aac|wma|aiff?|amr|weba)$/i;
const MOST_TEXT = 4 << 20; // bytes of a text, as in the terminal
const MOST_MEDIA = 11 << 20; // bytes of all images and audio, or of a document: in base64 they have to fit into one request
const DOCUMENT = /\.(pdf|docx|docm|x?html?|mhtml?)$/i; // the server finds their text
const PLURALS = { image: "images", audio: "audio" };

export class Attachments {
  /** `unable(kind)` returns the name of the chosen model if it is known not to read "image" or "audio"; `failed(error)` says why not. */
  constructor(element, unable, failed) {
    this.element = element;
    this.unable = unable;
    this.failed = failed;
    this.items = [];
    this.ready = Promise.resolve();
    this.input = h("input", { type: "file", multiple: true, hidden: true, change: () => this.add([...this.input.files]) });
  }

  /** Take files from everywhere on the page. */
  listen(choose, field) {
    choose.addEventListener("click", () => this.input.click());
    field.addEventListener("paste", (event) => event.clipboardData.files.length && (event.preventDefault(), this.add([...event.clipboardData.files])));
    document.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
    document.addEventListener("drop", (event) => event.dataTransfer.files.length && (event.preventDefault(), this.add([...event.dataTransfer.files])));
  }

  /** Show files at once, and read them; a question waits for those that are being read, see `ready`. */
  add(files) {
    const items = files.map((file) => ({ name: file.name, n_bytes: file.size, isRead: false, preview: IMAGES.includes(file.type) ? URL.createObjectURL(file) : null }));
    this.items.push(...items);
    this.input.value = "";
    this.show();
    for (const [at, item] of items.entries()) this.ready = this.ready.then(() => this.read(item, files[at]));
  }

  async read(item, file) {
    try {
      Object.assign(item, await read(file, this.items), { isRead: true });
      this.show();
    } catch (error) {
      this.remove(item);
      this.failed(error);
    }
  }

  show() {
    const chip = (item) =>
      h("li", { "aria-busy": !item.isRead && "true" }, item.preview ? h("img", { src: item.preview, alt: "" }) : icon("file"), `${clean(item.name)}, ${number(Math.ceil(item.n_bytes / 1000))} kB${item.isRead ? "" : ", reading …"}${item.note ? `, ${item.note}` : ""} `, iconButton("close", `Remove ${clean(item.name)}`, () => this.remove(item)));
    const kinds = Object.keys(PLURALS).filter((kind) => this.items.some((item) => item.kind === kind) && this.unable(kind));
    const told = kinds.map((kind) => h("li", { class: "hint" }, `${clean(this.unable(kind))} can't read ${PLURALS[kind]}: it gets a line of text instead`));
    this.element.replaceChildren(...this.items.map(chip), ...told);
  }

  remove(...items) {
    this.items = this.items.filter((each) => !items.includes(each));
    for (const { preview } of items) if (preview) URL.revokeObjectURL(preview);
    this.show();
  }

  clear() {
    this.remove(...this.items);
  }

  /** Return the fields of a question. */
  get fields() {
    const of = (key) => this.items.filter((item) => item[key] !== undefined).map((item) => ({ name: item.name, [key]: item[key] }));
    return { files: of("text"), media: of("data") };
  }
}

async function read(file, others) {
  const refuse = (why) => new Error(`${file.name} can't be attached: ${why}.`);
  const media = async (kind) => {
    const total = others.reduce((sum, item) => sum + (item.data ? item.n_bytes : 0), file.size);
    if (total > MOST_MEDIA) throw refuse(`all images and audio together may have ${number(MOST_MEDIA)} bytes`);
    return { kind, data: await base64(file) };
  };
  if (file.type.startsWith("image/") && file.type !== "image/svg+xml") {
    if (!IMAGES.includes(file.type)) throw refuse("only PNG, JPEG, GIF, BMP and WebP images can");
    return media("image");
  }
  if (AUDIO.test(file.name)) return media("audio");
  if (file.type.startsWith("audio/") || OTHER_AUDIO.test(file.name)) {
    throw refuse(`only WAV, MP3 and FLAC audio can; "ffmpeg -i FILE -ac 1 -ar 16000 FILE.flac" converts it`);
  }
  const asked = async () => {
    if (file.size > MOST_MEDIA) throw refuse(`it is larger than ${number(MOST_MEDIA)} bytes`);
    const { text, note } = await post("/ui/documents", { name: file.name, data: await base64(file) });
    return { text, note };
  };
  if (DOCUMENT.test(file.name)) return asked();
  if (file.size > MOST_TEXT) throw refuse(`it is larger than ${number(MOST_TEXT)} bytes`);
  const text = await file.text().catch(() => "\0");
  return /[\0\ufffd]/.test(text) ? asked() : { text }; // in another encoding, which the server guesses
}

/** Return the bytes of a file in base64. */
async function base64(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return btoa(text);
}
