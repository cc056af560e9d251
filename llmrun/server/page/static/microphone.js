// The microphone: what is recorded becomes a WAV file, as engines take it, and is attached to the next question.

const RATE = 16_000; // samples a second, as models hear
const HEADER = 44; // bytes of a WAV file before its samples
const MOST_SECONDS = 300; // in base64 it has to fit into one request
const REFUSALS = {
  NotAllowedError: "it is not allowed. Allow it for this page in your browser, then press again",
  NotFoundError: "there is none. Plug one in, or attach a recording as a file",
  NotReadableError: "another program uses it",
};
const INSECURE = "browsers allow it only on pages of this machine or over https. Open the page on the machine that runs llmrun, or attach a recording as a file";

export class Microphone {
  /** `taken(file)` gets each recording, `failed(error)` hears why there is none. */
  constructor(button, taken, failed) {
    Object.assign(this, { button, taken, failed, clock: button.querySelector(".clock"), recorded: 0 });
    button.addEventListener("click", () => (this.ends ? this.finish() : this.begin()));
  }

  /** Show the button if the model hears. */
  show(hears) {
    this.button.hidden = !hears && !this.ends;
  }

  async begin() {
    if (this.isAsked) return;
    this.isAsked = true; // the browser asks the user
    try {
      if (!navigator.mediaDevices) throw new Error(INSECURE);
      this.record(await navigator.mediaDevices.getUserMedia({ audio: true }));
    } catch (error) {
      this.failed(new Error(`The microphone can't be used: ${REFUSALS[error.name] ?? error.message}.`));
    } finally {
      this.isAsked = false;
    }
  }

  record(stream) {
    const recorder = new MediaRecorder(stream);
    const parts = [];
    const began = performance.now();
    const tell = () => {
      const seconds = Math.floor((performance.now() - began) / 1000);
      this.clock.textContent = `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
      if (seconds >= MOST_SECONDS) this.finish();
    };
    const clock = setInterval(tell, 500);
    recorder.addEventListener("dataavailable", ({ data }) => parts.push(data));
    this.recorder = recorder;
    this.ends = new Promise((done) => recorder.addEventListener("stop", done)).then(async () => {
      clearInterval(clock);
      for (const track of stream.getTracks()) track.stop();
      this.press(false);
      this.recorded += 1;
      try {
        this.taken(new File([await wav(new Blob(parts))], `recording-${this.recorded}.wav`, { type: "audio/wav" }));
      } catch (error) {
        this.failed(new Error(`The recording can't be used: ${error.message}`));
      }
      this.ends = null;
    });
    recorder.start();
    tell();
    this.press(true);
  }

  /** End the recording, if one is going on, and wait until it is attached. */
  async finish() {
    if (this.recorder?.state === "recording") this.recorder.stop();
    await this.ends;
  }

  press(isOn) {
    this.button.ariaPressed = String(isOn);
    this.button.title = isOn ? "Stop recording" : "Record with the microphone";
    if (!isOn) this.clock.textContent = "";
  }
}

/** Return a recording as a WAV file of one channel of 16-bit samples. */
async function wav(recording) {
  const sound = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await recording.arrayBuffer()); // at this rate
  const channels = Array.from({ length: sound.numberOfChannels }, (_, at) => sound.getChannelData(at));
  const file = new DataView(new ArrayBuffer(HEADER + 2 * sound.length));
  const text = (at, word) => [...word].forEach((each, index) => file.setUint8(at + index, each.charCodeAt(0)));
  text(0, "RIFF");
  file.setUint32(4, file.byteLength - 8, true);
  text(8, "WAVEfmt ");
  file.setUint32(16, 16, true); // bytes of what follows: integers, one channel, rate, bytes a second and a sample, bits
  file.setUint16(20, 1, true);
  file.setUint16(22, 1, true);
  file.setUint32(24, RATE, true);
  file.setUint32(28, 2 * RATE, true);
  file.setUint16(32, 2, true);
  file.setUint16(34, 16, true);
  text(36, "data");
  file.setUint32(40, 2 * sound.length, true);
  for (let at = 0; at < sound.length; at += 1) {
    const sum = channels.reduce((total, channel) => total + channel[at], 0);
    file.setInt16(HEADER + 2 * at, Math.max(-1, Math.min(1, sum / channels.length)) * 0x7fff, true);
  }
  return file.buffer;
}
